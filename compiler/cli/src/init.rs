//! `moec init`.

use super::{facts, output};
use moec_base::progress::Progress;
use moec_base::{Error, Result, human};
use moec_import::{ImportOptions, hub};
use serde_json::json;
use std::fs::OpenOptions;
use std::io::{ErrorKind, Write as _};
use std::path::{Component, Path, PathBuf};

/// Write a commented model.toml for a checkpoint
///
/// The file can be built without changes. It has the ten keys that users often change, each with an
/// explanation and the model's figures.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Folder of a Hugging Face checkpoint, a GGUF file, or the name of a model on the hub: `owner/name`,
    /// `owner/name@revision` or `owner/name:file.gguf`. An existing path takes precedence
    #[arg(value_name = "HF_DIR|NAME")]
    pub source: PathBuf,
    /// Use only the local Hugging Face cache (`HF_HOME`); make no network requests
    #[arg(long)]
    pub offline: bool,
    /// File to write
    #[arg(long, short, value_name = "FILE", default_value = "model.toml")]
    pub output: PathBuf,
    /// Write every key, not only those that users often change
    #[arg(long)]
    pub all: bool,
    /// Replace an existing file
    #[arg(long, short)]
    pub force: bool,
    /// Print one JSON object to stdout
    #[arg(long)]
    pub json: bool,
}

/// Writes a `model.toml` for a checkpoint.
///
/// # Errors
/// Fails if the checkpoint is not supported, or the file exists.
pub fn run(args: &Args, progress: &Progress) -> Result<()> {
    let source = source(&args.source, args.offline, progress)?;
    let (checkpoint, spec) = moec_import::open(&source, &ImportOptions::default())?;
    for warning in &spec.warnings {
        progress.warn(warning);
    }
    let limits = checkpoint.limits(&spec)?;
    for limit in &limits {
        progress.stage("Note", limit);
    }
    let facts = facts::of(&spec, &|leaf| checkpoint.format(leaf));
    let text = moec_config::template(&relative_path(&args.output, &source)?, &facts, args.all, &[]);
    let shown = args.output.display();
    write(&args.output, &text, args.force)?;
    progress.stage(
        "Created",
        &format!("`{shown}` for {} with {} parameters", spec.title, human::count(facts.parameters)),
    );
    progress.stage("Next", &format!("moec build {shown}"));
    if args.json {
        output::json(&json!({
            "model_toml": args.output,
            "source": source,
            "family": spec.family,
            "parameters": facts.parameters,
            "active_parameters": facts.active_parameters,
            "warnings": spec.warnings,
            "limits": limits,
        }))?;
    }
    Ok(())
}

/// Writes a `model.toml`.
///
/// # Errors
/// Fails if the file exists and `force` is false, or it cannot be written.
pub(crate) fn write(path: &Path, text: &str, force: bool) -> Result<()> {
    let shown = path.display();
    let opened = OpenOptions::new().write(true).truncate(true).create(force).create_new(!force).open(path);
    opened.and_then(|mut f| f.write_all(text.as_bytes())).map_err(|e| {
        if e.kind() == ErrorKind::AlreadyExists {
            return Error::usage(format!("`{shown}` exists already"))
                .hint("replace it with `--force`, or name another file with `-o`");
        }
        Error::environment(format!("`{shown}` cannot be written")).because(e)
    })
}

/// Path of the checkpoint: the given one if it exists, else the folder of the downloaded model with that
/// name.
fn source(given: &Path, offline: bool, progress: &Progress) -> Result<PathBuf> {
    match name(given) {
        Some(name) => fetched(given, hub::fetch(&name, offline, progress)),
        None => Ok(given.to_owned()),
    }
}

/// The name of a model on the hub, if no such path exists. Anything else is a path; opening it reports the error.
pub(crate) fn name(given: &Path) -> Option<hub::Name> {
    given.to_str().filter(|_| !given.exists()).and_then(hub::Name::parse)
}

/// The folder of a downloaded model, or the error with the name that was given.
pub(crate) fn fetched(given: &Path, found: Result<PathBuf>) -> Result<PathBuf> {
    found.map_err(|e| {
        e.context(format!(
            "`{}` is not a local path, and downloading it from the Hugging Face Hub failed",
            given.display()
        ))
    })
}

/// The path of `target` as seen from the folder of `file`: relative where both have a common ancestor below
/// the root, so that the two can be moved together.
pub(crate) fn relative_path(file: &Path, target: &Path) -> Result<PathBuf> {
    let whole = |path: &Path| {
        path.canonicalize()
            .map_err(|e| Error::environment(format!("`{}` cannot be resolved", path.display())).because(e))
    };
    let folder = match file.parent() {
        Some(p) if !p.as_os_str().is_empty() => whole(p)?,
        _ => whole(Path::new("."))?,
    };
    let target = in_its_folder(target, &whole)?;
    let common = folder.components().zip(target.components()).take_while(|(a, b)| a == b).count();
    if common <= 1 {
        return Ok(target);
    }
    let up = folder.components().skip(common).map(|_| Component::ParentDir);
    let path: PathBuf = up.chain(target.components().skip(common)).collect();
    Ok(if path.as_os_str().is_empty() { ".".into() } else { path })
}

/// Absolute path of a file or folder. A link to a file keeps its own name, which may be the only sign of its
/// format.
fn in_its_folder(target: &Path, whole: &impl Fn(&Path) -> Result<PathBuf>) -> Result<PathBuf> {
    match (target.file_name(), target.parent()) {
        (Some(name), Some(folder)) if target.is_file() => {
            let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
            Ok(whole(folder)?.join(name))
        }
        _ => whole(target),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_relative_if_possible() {
        let dir = tempfile::tempdir().unwrap();
        let at = |p: &str| dir.path().join(p);
        std::fs::create_dir_all(at("a/hf")).unwrap();
        std::fs::create_dir_all(at("b")).unwrap();
        for (file, expected) in
            [("m.toml", "a/hf"), ("a/m.toml", "hf"), ("a/hf/m.toml", "."), ("b/m.toml", "../a/hf")]
        {
            assert_eq!(relative_path(&at(file), &at("a/hf")).unwrap(), Path::new(expected));
        }
    }
}
