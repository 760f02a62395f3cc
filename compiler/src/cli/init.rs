//! `moec init`.

use super::facts;
use crate::import::{self, ImportOptions};
use crate::progress::Progress;
use crate::{Error, Result, config, human};
use std::fs::OpenOptions;
use std::io::{ErrorKind, Write as _};
use std::path::{Component, Path, PathBuf};

/// Write a commented model.toml for a checkpoint
///
/// The file builds as it stands; every key is explained, with the model's own figures.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Folder of a Hugging Face checkpoint, or a GGUF file
    #[arg(value_name = "HF_DIR")]
    pub source: PathBuf,
    /// File to write
    #[arg(long, short, value_name = "FILE", default_value = "model.toml")]
    pub output: PathBuf,
    /// Replace a file that is already there
    #[arg(long, short)]
    pub force: bool,
}

/// Writes it.
///
/// # Errors
/// The folder is no checkpoint that this version reads, or the file is there already.
pub fn run(args: &Args, progress: &Progress) -> Result<()> {
    let (_, spec) = import::open(&args.source, &ImportOptions::default())?;
    for warning in &spec.warnings {
        progress.warn(warning);
    }
    let facts = facts::of(&spec);
    let text = config::template(&seen_from(&args.output, &args.source)?, &facts);
    let shown = args.output.display();
    let opened = OpenOptions::new()
        .write(true)
        .truncate(true)
        .create(args.force)
        .create_new(!args.force)
        .open(&args.output);
    opened.and_then(|mut f| f.write_all(text.as_bytes())).map_err(|e| {
        if e.kind() == ErrorKind::AlreadyExists {
            return Error::input(format!("`{shown}` exists already"))
                .hint("`--force` replaces it, `-o` names another");
        }
        Error::environment(format!("`{shown}` cannot be written")).because(e)
    })?;
    progress.stage(
        "Created",
        &format!("`{shown}` for {} with {} parameters", spec.title, human::count(facts.parameters)),
    );
    progress.stage("Next", &format!("moec build {shown}"));
    Ok(())
}

/// The path of `target` as seen from the folder of `file`: relative where both have a common ancestor below
/// the root, so that the two can be moved together.
fn seen_from(file: &Path, target: &Path) -> Result<PathBuf> {
    let whole = |path: &Path| {
        path.canonicalize()
            .map_err(|e| Error::environment(format!("`{}` cannot be resolved", path.display())).because(e))
    };
    let folder = match file.parent() {
        Some(p) if !p.as_os_str().is_empty() => whole(p)?,
        _ => whole(Path::new("."))?,
    };
    let target = whole(target)?;
    let common = folder.components().zip(target.components()).take_while(|(a, b)| a == b).count();
    if common <= 1 {
        return Ok(target);
    }
    let up = folder.components().skip(common).map(|_| Component::ParentDir);
    let path: PathBuf = up.chain(target.components().skip(common)).collect();
    Ok(if path.as_os_str().is_empty() { ".".into() } else { path })
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
