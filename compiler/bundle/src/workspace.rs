//! The hidden folder beside a bundle in which it is written, and what killed builds leave there.
//!
//! `.NAME.partial-ID` has a file `lock`, which its build keeps locked as long as it lives, and the bundle
//! that is being written (`bundle`). For a moment it also has the bundle that is replaced: under the same
//! name after an exchange, or as `replaced` if the operating system needs two renames. A process that can
//! take the lock knows that the build is dead, even if its process id is in use again. The next build of that
//! name removes the remains; if there is no bundle at all, it restores `replaced` first.

use super::destination::{self, FolderState, ignore_missing};
use super::manifest;
use super::swap::fail_point;
use moec_base::disk::sync_folder;
use moec_base::error::{Result, io_error};
use moec_base::locked_folder::{LOCK, LockedFolder, TRIES};
use moec_base::paths::MANIFEST;
use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The bundle that is written, and later the one that it replaced.
const BUNDLE: &str = "bundle";
/// The bundle that is replaced, where names cannot be exchanged.
const REPLACED: &str = "replaced";
/// Names in the folder of a build of an earlier moec, which had no lock.
const EARLIER: [&str; 9] = [
    "weights",
    "artifacts",
    "runner",
    "run",
    "plan.bin",
    "plan.txt",
    "decisions.json",
    "device.toml",
    MANIFEST,
];

/// The hidden folder of a build.
#[derive(Debug)]
pub(super) struct Workspace(LockedFolder);

impl Workspace {
    /// Makes one beside `destination`, whose parent exists.
    ///
    /// # Errors
    /// A parent that cannot be written.
    pub(super) fn create(destination: &Path) -> Result<Self> {
        LockedFolder::create(parent_of(destination), |id| hidden(destination, PARTIAL, id), fail_point)
            .map(Self)
    }

    /// A folder of a dead build, locked; none if the build lives, or no build of this moec made the folder.
    fn abandoned(path: PathBuf) -> Option<Self> {
        LockedFolder::abandoned(path).map(Self)
    }

    /// Folder that the bundle is written into.
    pub(super) fn bundle(&self) -> PathBuf {
        self.0.path().join(BUNDLE)
    }

    /// Folder of a bundle that is replaced by two renames.
    pub(super) fn replaced(&self) -> PathBuf {
        self.0.path().join(REPLACED)
    }

    /// Removes the folder and the files of a build in it. Other files stay, and are reported.
    ///
    /// # Errors
    /// A file that cannot be removed.
    pub(super) fn remove(&mut self) -> io::Result<Option<String>> {
        self.0.release_descriptors();
        let path = self.0.path();
        let mut left = Vec::new();
        for name in [BUNDLE, REPLACED] {
            let found = discard(&path.join(name))?;
            left.extend(found.into_iter().map(|f| format!("{name}/{f}")));
        }
        fail_point("remove");
        for entry in fs::read_dir(path)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if ![BUNDLE, REPLACED, LOCK].contains(&&*name) {
                left.push(name);
            }
        }
        if left.is_empty() {
            ignore_missing(fs::remove_file(path.join(LOCK)))?;
            fail_point("unlock");
            ignore_missing(fs::remove_dir(path))?;
            fail_point("tidy");
            return Ok(None);
        }
        left.sort();
        Ok(Some(format!(
            "`{}` was not removed: {} was not written by a build",
            path.display(),
            destination::named(&left)
        )))
    }
}

/// Removes a bundle by its manifest, or the files of a build that has not written one. Returns what remains.
fn discard(folder: &Path) -> io::Result<Vec<String>> {
    match fs::symlink_metadata(folder) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(e),
        Ok(meta) if !meta.is_dir() => return Ok(vec![String::new()]),
        Ok(_) => {}
    }
    match manifest::listed(folder) {
        Ok(listed) => destination::remove(folder, &listed, &mut || fail_point("file")),
        // The manifest is written last: without it all is that build's.
        Err(_) => ignore_missing(fs::remove_dir_all(folder)).map(|()| Vec::new()),
    }
}

/// Restores the bundle that a build was replacing when it was killed, if there is none at `destination`.
/// Reports it if there was one.
///
/// # Errors
/// Fails if the operating system refuses a rename.
pub fn recover(destination: &Path) -> Result<Option<String>> {
    let destination = &destination::plain(destination);
    let absent =
        || matches!(fs::symlink_metadata(destination), Err(e) if e.kind() == io::ErrorKind::NotFound);
    if destination.file_name().is_none() || !absent() {
        return Ok(None);
    }
    let parent = parent_of(destination);
    let Some(_lock) = RenameLock::take(parent) else { return Ok(None) };
    // A living build may have been between its two renames.
    if !absent() {
        return Ok(None);
    }
    let restored = || {
        let shown = destination.display();
        Ok(Some(format!("`{shown}` is restored: an earlier build was killed while replacing it")))
    };
    let put_back = |from: &Path| -> Result<bool> {
        if !matches!(destination::look(from, destination), Ok(FolderState::Bundle)) {
            return Ok(false);
        }
        fs::rename(from, destination).map_err(|e| io_error("put back", destination, &e))?;
        sync_folder(parent).map_err(|e| io_error("write", parent, &e))?;
        Ok(true)
    };
    for path in beside(destination, PARTIAL) {
        if let Some(abandoned) = Workspace::abandoned(path)
            && put_back(&abandoned.replaced())?
        {
            return restored();
        }
    }
    for path in beside(destination, EARLIER_REPLACED) {
        if put_back(&path)? {
            return restored();
        }
    }
    Ok(None)
}

/// Removes the files of killed builds of `destination`. Returns notes about those that cannot be removed.
pub(super) fn clear(destination: &Path) -> Vec<String> {
    let mut notes = Vec::new();
    let mut note = |path: &Path, result: io::Result<Option<String>>| match result {
        Ok(remaining) => notes.extend(remaining),
        Err(e) => notes.push(format!("`{}` of an earlier build could not be removed: {e}", path.display())),
    };
    for path in beside(destination, PARTIAL) {
        if path.join(LOCK).symlink_metadata().is_ok() {
            if let Some(mut abandoned) = Workspace::abandoned(path.clone()) {
                note(&path, abandoned.remove());
            }
        } else if fs::remove_dir(&path).is_err() && of_an_earlier_moec(&path) {
            note(&path, fs::remove_dir_all(&path).map(|()| None));
        }
    }
    for path in beside(destination, EARLIER_REPLACED) {
        if !matches!(destination::look(&path, &path), Ok(FolderState::Bundle)) {
            continue;
        }
        if let Ok(listed) = manifest::listed(&path) {
            note(&path, destination::remove(&path, &listed, &mut || {}).map(|_| None));
        }
    }
    notes
}

/// Whether a folder without a lock was left by a build of an earlier moec whose process has ended.
fn of_an_earlier_moec(path: &Path) -> bool {
    let id = path.file_name().and_then(|n| n.to_str()).and_then(|n| n.rsplit('-').next()).unwrap_or_default();
    let dead = Path::new("/proc/self").exists() && !Path::new("/proc").join(id).exists();
    let own = |entry: io::Result<fs::DirEntry>| {
        entry.is_ok_and(|e| e.file_name().to_str().is_some_and(|n| EARLIER.contains(&n)))
    };
    dead && fs::read_dir(path).is_ok_and(|mut all| all.all(own))
}

/// Suffix of hidden folders of builds: after the bundle's name, before the process that made them.
const PARTIAL: &str = ".partial-";
/// Like [`PARTIAL`], for bundles that builds of an earlier moec were replacing.
const EARLIER_REPLACED: &str = ".replaced-";

/// `.NAME.partial-ID`
fn hidden(destination: &Path, kind: &str, id: &str) -> OsString {
    let mut name = OsString::from(".");
    name.push(destination.file_name().unwrap_or_default());
    name.push(kind);
    name.push(id);
    name
}

/// Hidden folders of that kind beside `destination`, by name.
fn beside(destination: &Path, kind: &str) -> Vec<PathBuf> {
    let prefix = hidden(destination, kind, "");
    let prefix = prefix.as_encoded_bytes();
    let ours = |entry: &fs::DirEntry| {
        let name = entry.file_name();
        let id = name.as_encoded_bytes().strip_prefix(prefix);
        id.is_some_and(|id| !id.is_empty() && id.iter().all(|b| b.is_ascii_digit() || *b == b'-'))
            && entry.file_type().is_ok_and(|t| t.is_dir())
    };
    let all = fs::read_dir(parent_of(destination)).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = all.filter(ours).map(|e| e.path()).collect();
    found.sort();
    found
}

/// Lock for changing names in a folder. Builds and readers take it in turn if one change needs two renames.
pub(super) struct RenameLock {
    _folder: Option<File>,
}

impl RenameLock {
    /// Waits for it, a second at most: a process that holds it longer is not a build, or is stopped. `None`
    /// if the folder is not there.
    pub(super) fn take(folder: &Path) -> Option<Self> {
        let folder = File::open(folder).ok()?;
        for _ in 0..TRIES {
            match folder.try_lock() {
                Ok(()) => return Some(Self { _folder: Some(folder) }),
                Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(10)),
                // No locks here; renames are whole by themselves.
                Err(TryLockError::Error(_)) => break,
            }
        }
        Some(Self { _folder: None })
    }
}

pub(super) fn parent_of(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
