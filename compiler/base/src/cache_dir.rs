//! The cache folder, which holds data that later builds can use.

use crate::error::{Error, Result};
use std::fs;
use std::path::{Path, PathBuf};

/// `$MOEC_CACHE`, `$XDG_CACHE_HOME/moec` or `~/.cache/moec`.
///
/// # Errors
/// Fails if none of the three is set.
pub fn path() -> Result<PathBuf> {
    let from = |var: &str| std::env::var_os(var).filter(|v| !v.is_empty()).map(PathBuf::from);
    from("MOEC_CACHE")
        .or_else(|| from("XDG_CACHE_HOME").map(|p| p.join("moec")))
        .or_else(|| from("HOME").map(|p| p.join(".cache/moec")))
        .ok_or_else(|| {
            Error::environment("there is no cache folder")
                .hint("set `MOEC_CACHE` to a folder that you can write")
        })
}

/// The cache folder, after a test that it can be written: a file is created there and removed. The test runs
/// before anything is computed that would be lost. `what` is the user of the folder in messages; `otherwise`
/// names a way to do without it, if there is one.
///
/// # Errors
/// Fails if there is no cache folder or it cannot be written. The message says what to do about it.
pub fn writable_for(what: &str, otherwise: Option<&str>) -> Result<PathBuf> {
    let mut hint = "set `MOEC_CACHE` to a folder that you can write".to_owned();
    if let Some(otherwise) = otherwise {
        hint.extend([", or ", otherwise]);
    }
    let folder = path().map_err(|e| e.context(format!("{what} needs a cache folder")).hint(&hint))?;
    probe(&folder).map_err(|e| {
        let shown = folder.display();
        Error::environment(format!("{what} needs the cache folder `{shown}`, which cannot be written"))
            .because(e)
            .hint(&hint)
    })?;
    Ok(folder)
}

/// Makes a folder, and writes and removes a file in it.
///
/// # Errors
/// Those of the operating system.
pub fn probe(folder: &Path) -> std::io::Result<()> {
    let file = folder.join(format!(".probe-{}", std::process::id()));
    fs::create_dir_all(folder)?;
    fs::write(&file, "moec")?;
    match fs::remove_file(&file) {
        // Another process with the same id, in another container, has created it first.
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_probe_leaves_an_empty_folder() {
        let above = tempfile::tempdir().unwrap();
        let folder = above.path().join("a/b");
        probe(&folder).unwrap();
        assert!(fs::read_dir(&folder).unwrap().next().is_none());
    }

    #[test]
    fn cache_path_that_is_not_a_folder_is_an_error() {
        let above = tempfile::tempdir().unwrap();
        let file = above.path().join("file");
        fs::write(&file, "").unwrap();
        for folder in [&*file, &file.join("below"), Path::new("/proc/moec")] {
            assert!(probe(folder).is_err(), "{}", folder.display());
        }
    }
}
