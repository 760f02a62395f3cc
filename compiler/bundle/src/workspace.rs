//! The hidden folder beside a bundle in which it is written, and what killed builds leave of it.
//!
//! `.NAME.partial-ID` holds a file `lock`, which its build keeps locked for as long as it lives, the bundle
//! that is being written (`bundle`), and for a moment the one that it replaces: under the same name once the
//! two were exchanged, or as `replaced` where the operating system renames twice. A process that can take the
//! lock knows that the build is dead, even if another has its process id by now. The next build of that name
//! removes what is left; one that finds no bundle at all puts `replaced` back first.

use super::destination::{self, Standing, gone};
use super::manifest;
use super::swap::reached;
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
        LockedFolder::create(parent_of(destination), |id| hidden(destination, PARTIAL, id), reached).map(Self)
    }

    /// A folder of a dead build, locked; none if the build lives, or no build of this moec made the folder.
    fn of_the_dead(path: PathBuf) -> Option<Self> {
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

    /// Removes the folder and what a build wrote there. What is not a build's stays, and is said.
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
        reached("remove");
        for entry in fs::read_dir(path)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if ![BUNDLE, REPLACED, LOCK].contains(&&*name) {
                left.push(name);
            }
        }
        if left.is_empty() {
            gone(fs::remove_file(path.join(LOCK)))?;
            reached("unlock");
            gone(fs::remove_dir(path))?;
            reached("tidy");
            return Ok(None);
        }
        left.sort();
        Ok(Some(format!("`{}` stays: {} is not a build's", path.display(), destination::named(&left))))
    }
}

/// Removes a bundle as its manifest lists it, or what a build has written before there was one. Gives what
/// stays.
fn discard(folder: &Path) -> io::Result<Vec<String>> {
    match fs::symlink_metadata(folder) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(e),
        Ok(meta) if !meta.is_dir() => return Ok(vec![String::new()]),
        Ok(_) => {}
    }
    match manifest::listed(folder) {
        Ok(listed) => destination::remove(folder, &listed, &mut || reached("file")),
        // The manifest is written last: without it all is that build's.
        Err(_) => gone(fs::remove_dir_all(folder)).map(|()| Vec::new()),
    }
}

/// Puts the bundle back that a build was replacing when it was killed, if there is none at `destination`.
/// Reports it if there was one.
///
/// # Errors
/// A rename that the operating system refuses.
pub fn recover(destination: &Path) -> Result<Option<String>> {
    let destination = &destination::plain(destination);
    let absent =
        || matches!(fs::symlink_metadata(destination), Err(e) if e.kind() == io::ErrorKind::NotFound);
    if destination.file_name().is_none() || !absent() {
        return Ok(None);
    }
    let parent = parent_of(destination);
    let Some(_turn) = Turn::take(parent) else { return Ok(None) };
    // A living build may have been between its two renames.
    if !absent() {
        return Ok(None);
    }
    let said = || {
        let shown = destination.display();
        Ok(Some(format!("`{shown}` is back: an earlier build was killed while it replaced it")))
    };
    let put_back = |from: &Path| -> Result<bool> {
        if !matches!(destination::look(from, destination), Ok(Standing::Bundle)) {
            return Ok(false);
        }
        fs::rename(from, destination).map_err(|e| io_error("put back", destination, &e))?;
        sync_folder(parent).map_err(|e| io_error("write", parent, &e))?;
        Ok(true)
    };
    for path in beside(destination, PARTIAL) {
        if let Some(dead) = Workspace::of_the_dead(path)
            && put_back(&dead.replaced())?
        {
            return said();
        }
    }
    for path in beside(destination, EARLIER_REPLACED) {
        if put_back(&path)? {
            return said();
        }
    }
    Ok(None)
}

/// Removes what killed builds of `destination` left. What cannot be removed stays. Gives what is to be said
/// of it.
pub(super) fn clear(destination: &Path) -> Vec<String> {
    let mut notes = Vec::new();
    let mut note = |path: &Path, done: io::Result<Option<String>>| match done {
        Ok(said) => notes.extend(said),
        Err(e) => notes.push(format!("`{}` of an earlier build stays: {e}", path.display())),
    };
    for path in beside(destination, PARTIAL) {
        if path.join(LOCK).symlink_metadata().is_ok() {
            if let Some(mut dead) = Workspace::of_the_dead(path.clone()) {
                note(&path, dead.remove());
            }
        } else if fs::remove_dir(&path).is_err() && of_an_earlier_moec(&path) {
            note(&path, fs::remove_dir_all(&path).map(|()| None));
        }
    }
    for path in beside(destination, EARLIER_REPLACED) {
        if !matches!(destination::look(&path, &path), Ok(Standing::Bundle)) {
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
/// As [`PARTIAL`], of bundles that builds of an earlier moec were replacing.
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

/// The right to change names in a folder, which builds and readers take in turns where one change is two
/// renames.
pub(super) struct Turn {
    _folder: Option<File>,
}

impl Turn {
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
