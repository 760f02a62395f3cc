//! Path of a checkpoint's file, which must be in its folder even if there are links.
//!
//! A checkpoint is untrusted data. With a link out of the folder, moec would read files that its author has
//! no right to, and copy them into a bundle. The one exception is the download cache of Hugging Face, where
//! every file of `models--NAME/snapshots/REVISION` is a link to a blob in `models--NAME/blobs`.

use moec_base::error::{Error, Result};
use moec_runtime::platform::regular;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Component, Path, PathBuf};

const HINT: &str =
    "moec reads nothing outside of the checkpoint's folder; check where the checkpoint comes from";

/// Returns the path of a file of the checkpoint in `dir`; `None` if there is no such file.
///
/// # Errors
/// Fails if the name is not that of a file in the folder. Also fails if it is a link that leads out of the
/// folder or to a missing file.
pub(crate) fn find(dir: &Path, name: &str) -> Result<Option<PathBuf>> {
    let plain = |c: Component<'_>| matches!(c, Component::Normal(_));
    if name.is_empty() || !Path::new(name).components().all(plain) {
        return Err(outside(name).because("only plain names and subfolders are allowed").hint(HINT));
    }
    let path = dir.join(name);
    let unreadable = |e| unreadable(name, &e);
    let meta = match fs::symlink_metadata(&path) {
        Ok(meta) => meta,
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(None),
        Err(e) => return Err(unreadable(e)),
    };
    let root = fs::canonicalize(dir).map_err(unreadable)?;
    let real = match fs::canonicalize(&path) {
        Ok(real) => real,
        Err(e) if meta.is_symlink() => {
            return Err(Error::input(format!("`{name}` is a link that leads nowhere"))
                .because(e)
                .hint("the download may be incomplete: download it again, or remove the link"));
        }
        Err(e) => return Err(unreadable(e)),
    };
    if real.starts_with(&root) || blobs(&root).is_some_and(|blobs| real.starts_with(blobs)) {
        Ok(Some(path))
    } else {
        Err(outside(name).because(format!("it is a link to `{}`", real.display())).hint(HINT))
    }
}

/// The error for a file that exists and cannot be read.
pub(crate) fn unreadable(name: &str, e: &io::Error) -> Error {
    let error = Error::environment(format!("`{name}` cannot be read")).because(e);
    match regular::refused(e) {
        Some(why) => error.hint(why.hint()),
        None => error,
    }
}

fn outside(name: &str) -> Error {
    Error::input(format!("`{name}` is outside of the checkpoint's folder"))
}

/// The folder of blobs for the snapshot `root`, in a download cache.
fn blobs(root: &Path) -> Option<PathBuf> {
    let snapshots = root.parent().filter(|p| p.ends_with("snapshots"))?;
    Some(snapshots.parent()?.join("blobs"))
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn links_may_target_only_the_folder_or_blobs_of_its_model() {
        let cache = tempfile::tempdir().unwrap();
        let at = |path: &str| cache.path().join(path);
        for model in ["models--a", "models--b"] {
            fs::create_dir_all(at(model).join("blobs")).unwrap();
            fs::create_dir_all(at(model).join("snapshots/rev/sub")).unwrap();
            fs::write(at(model).join("blobs/0"), "{}").unwrap();
        }
        let root = at("models--a/snapshots/rev");
        fs::write(root.join("file"), "{}").unwrap();
        for (name, to) in [
            ("blob", "../../blobs/0"),
            ("beside", "file"),
            ("sub/up", "../file"),
            ("twice", "blob"),
            ("other", "../../../models--b/blobs/0"),
            ("root", "/etc/hostname"),
            ("snapshots", "../../snapshots"),
            ("out", "../.."),
            ("gone", "../../blobs/1"),
            ("self", "self"),
        ] {
            symlink(to, root.join(name)).unwrap();
        }
        for name in ["file", "blob", "beside", "sub/up", "twice"] {
            assert_eq!(find(&root, name).unwrap(), Some(root.join(name)), "{name}");
        }
        for name in ["none", "sub/none", "file/none"] {
            assert_eq!(find(&root, name).unwrap(), None, "{name}");
        }
        for name in
            ["other", "root", "snapshots", "out", "out/blobs/../../x", "../rev/file", "/etc/passwd", ""]
        {
            let error = find(&root, name).unwrap_err();
            assert!(error.message.contains("outside of the checkpoint's folder"), "{name}: {error}");
        }
        for name in ["gone", "self"] {
            let error = find(&root, name).unwrap_err();
            assert!(error.message.contains("leads nowhere"), "{name}: {error}");
        }
        // Links to blobs are allowed only in a download cache.
        fs::rename(at("models--a/snapshots"), at("models--a/others")).unwrap();
        assert!(find(&at("models--a/others/rev"), "blob").is_err());
    }
}
