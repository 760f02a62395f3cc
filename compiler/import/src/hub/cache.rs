//! The cache of the hub's own tools, which other programs share. It has `blobs` by their hashes, `snapshots`
//! of commits that link to blobs, and `refs` that name commits.

use super::name::{Name, is_hash};
use moec_base::error::{Error, Result, io_error};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Folder of a model in the cache.
#[derive(Clone, Debug)]
pub(super) struct Repo {
    root: PathBuf,
    revision: String,
}

/// The value of a variable that is not empty.
pub(super) fn var(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from)
}

/// `$HF_HOME`, `$XDG_CACHE_HOME/huggingface` or `~/.cache/huggingface`.
pub(super) fn home() -> Result<PathBuf> {
    var("HF_HOME")
        .or_else(|| var("XDG_CACHE_HOME").map(|p| p.join("huggingface")))
        .or_else(|| var("HOME").map(|p| p.join(".cache/huggingface")))
        .ok_or_else(|| Error::environment("there is no folder for downloads").hint("set `HF_HOME` to one"))
}

/// Folder of models: `$HF_HUB_CACHE`, or `hub` below [`home`].
pub(super) fn models() -> Result<PathBuf> {
    var("HF_HUB_CACHE").map_or_else(|| home().map(|h| h.join("hub")), Ok)
}

/// The token: `$HF_TOKEN`, or the file that the hub's login command writes.
pub(super) fn token() -> Option<String> {
    let given = std::env::var("HF_TOKEN").ok();
    let file = || {
        let path = var("HF_TOKEN_PATH").or_else(|| home().ok().map(|h| h.join("token")))?;
        fs::read_to_string(path).ok()
    };
    let token = given.filter(|t| !t.trim().is_empty()).or_else(file)?.trim().to_owned();
    // The token becomes a line of a request.
    (!token.is_empty() && token.bytes().all(|b| b.is_ascii_graphic())).then_some(token)
}

impl Repo {
    pub(super) fn of(name: &Name) -> Result<Self> {
        Ok(Self { root: models()?.join(name.folder()), revision: name.revision.clone() })
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    pub(super) fn blob(&self, hash: &str) -> PathBuf {
        self.root.join("blobs").join(hash)
    }

    pub(super) fn snapshot(&self, commit: &str) -> PathBuf {
        self.root.join("snapshots").join(commit)
    }

    /// The commit that the cache records for the revision, if its folder exists.
    pub(super) fn commit(&self) -> Option<String> {
        let named = fs::read_to_string(self.root.join("refs").join(&self.revision)).ok();
        let commit = named.map_or_else(|| self.revision.clone(), |text| text.trim().to_owned());
        (is_hash(&commit, 40) && self.snapshot(&commit).is_dir()).then_some(commit)
    }

    /// Records the commit of a revision.
    pub(super) fn note(&self, commit: &str) -> Result<()> {
        if self.revision == commit {
            return Ok(());
        }
        let path = self.root.join("refs").join(&self.revision);
        moec_base::disk::write_whole(&path, commit.as_bytes()).map_err(|e| io_error("write", &path, &e))
    }

    /// Links a blob into a commit's folder under its name.
    pub(super) fn link(&self, commit: &str, file: &str, hash: &str) -> Result<PathBuf> {
        let path = self.snapshot(commit).join(file);
        let folder = path.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder).map_err(|e| io_error("create", folder, &e))?;
        let up = "../".repeat(2 + file.matches('/').count());
        let target = PathBuf::from(format!("{up}blobs/{hash}"));
        if fs::read_link(&path).is_ok_and(|old| old == target) {
            return Ok(path);
        }
        match fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(io_error("replace", &path, &e)),
            _ => {}
        }
        #[cfg(unix)]
        let result = std::os::unix::fs::symlink(&target, &path);
        #[cfg(not(unix))]
        let result = fs::hard_link(self.blob(hash), &path);
        match result {
            // Another process has linked the same blob.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && path.exists() => {}
            result => result.map_err(|e| io_error("link", &path, &e))?,
        }
        Ok(path)
    }
}

/// Names of the models in the cache, sorted.
pub(super) fn cached_models() -> Vec<String> {
    let entries = models().ok().and_then(|folder| fs::read_dir(folder).ok());
    let mut names: Vec<String> = entries
        .into_iter()
        .flatten()
        .filter_map(|e| e.ok()?.file_name().into_string().ok())
        .filter_map(|name| Some(name.strip_prefix("models--")?.replacen("--", "/", 1)))
        .collect();
    names.sort();
    names
}
