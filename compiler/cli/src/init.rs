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
/// The file builds as it stands. It has the ten keys that people change, each explained, with the model's own figures.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Folder of a Hugging Face checkpoint, a GGUF file, or the name of a model on the hub: `owner/name`, `owner/name@revision` or
    /// `owner/name:file.gguf`. What exists as a path is taken as one
    #[arg(value_name = "HF_DIR|NAME")]
    pub source: PathBuf,
    /// Use only the local Hugging Face cache (`HF_HOME`); make no network requests
    #[arg(long)]
    pub offline: bool,
    /// File to write
    #[arg(long, short, value_name = "FILE", default_value = "model.toml")]
    pub output: PathBuf,
    /// Write every key, not only those that people change
    #[arg(long)]
    pub all: bool,
    /// Replace a file that is already there
    #[arg(long, short)]
    pub force: bool,
    /// Print one JSON object to stdout
    #[arg(long)]
    pub json: bool,
}

/// Writes it.
///
/// # Errors
/// The folder is no checkpoint that this version reads, or the file is there already.
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
    let text = moec_config::template(&seen_from(&args.output, &source)?, &facts, args.all, &[]);
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
/// The file is there already and not to be replaced, or cannot be written.
pub(crate) fn write(path: &Path, text: &str, force: bool) -> Result<()> {
    let shown = path.display();
    let opened = OpenOptions::new().write(true).truncate(true).create(force).create_new(!force).open(path);
    opened.and_then(|mut f| f.write_all(text.as_bytes())).map_err(|e| {
        if e.kind() == ErrorKind::AlreadyExists {
            return Error::usage(format!("`{shown}` exists already"))
                .hint("`--force` replaces it, `-o` names another");
        }
        Error::environment(format!("`{shown}` cannot be written")).because(e)
    })
}

/// The path that is meant: one that exists, or where a model with that name was fetched to.
pub(crate) fn source(given: &Path, offline: bool, progress: &Progress) -> Result<PathBuf> {
    let name = given.to_str().filter(|_| !given.exists()).and_then(hub::Name::parse);
    // Whatever else is given is a path, and opening it says what is wrong.
    let Some(name) = name else { return Ok(given.to_owned()) };
    hub::fetch(&name, offline, progress).map_err(|e| {
        e.context(format!(
            "`{}` is not a local path, and downloading it from the Hugging Face Hub failed",
            given.display()
        ))
    })
}

/// The path of `target` as seen from the folder of `file`: relative where both have a common ancestor below
/// the root, so that the two can be moved together.
pub(crate) fn seen_from(file: &Path, target: &Path) -> Result<PathBuf> {
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

/// The whole path of a file or folder. A file keeps its own name, should it be a link: what it is may be seen by it alone.
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
    fn sources_are_relative_where_they_can_be() {
        let dir = tempfile::tempdir().unwrap();
        let at = |p: &str| dir.path().join(p);
        std::fs::create_dir_all(at("a/hf")).unwrap();
        std::fs::create_dir_all(at("b")).unwrap();
        for (file, expected) in
            [("m.toml", "a/hf"), ("a/m.toml", "hf"), ("a/hf/m.toml", "."), ("b/m.toml", "../a/hf")]
        {
            assert_eq!(seen_from(&at(file), &at("a/hf")).unwrap(), Path::new(expected));
        }
    }
}
