//! A folder that one process writes, and that others may remove once that process has ended.
//!
//! The folder holds a file `lock`, which its process keeps locked for as long as it lives. A process id says nothing where hosts
//! or containers share a folder; a lock does. A file system without locks keeps every folder: none is ever found abandoned.

use crate::error::{Error, Result, io_error};
use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

/// Locked while the process lives. It also marks the folder as moec's.
pub const LOCK: &str = "lock";
/// Number of tries for names and locks, when other processes take them.
pub const TRIES: usize = 100;
/// File descriptors that are kept for removing the folder, one for each folder in it that is open at once.
const RESERVED: usize = 12;

/// A folder of this process, or one that it took over from a process that has ended.
#[derive(Debug)]
pub struct LockedFolder {
    path: PathBuf,
    /// Held for as long as this lives.
    _lock: File,
    /// Closed before the folder is removed: removing opens folders, and descriptors may be what the process ran out of.
    reserved: Vec<File>,
}

impl LockedFolder {
    /// Creates a folder in `parent`, which exists. `name` makes a name of what distinguishes processes. `reached` is called with
    /// the name of each step.
    ///
    /// # Errors
    /// A parent that cannot be written.
    pub fn create(parent: &Path, name: impl Fn(&str) -> OsString, reached: impl Fn(&str)) -> Result<Self> {
        let id = std::process::id();
        for n in 0..TRIES {
            // Other hosts and containers may write here, too, with the same process id.
            let id = if n == 0 { id.to_string() } else { format!("{id}-{n}") };
            let path = parent.join(name(&id));
            match fs::create_dir(&path) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
                made => made.map_err(|e| io_error("create", &path, &e))?,
            }
            reached("folder");
            // Until it is locked, another process may take the folder for an abandoned one, and remove it.
            let lock = match File::create_new(path.join(LOCK)) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                made => made.map_err(|e| discarded(&path, io_error("create", &path.join(LOCK), &e)))?,
            };
            match lock.try_lock() {
                Err(TryLockError::WouldBlock) => continue,
                Err(TryLockError::Error(_)) | Ok(()) => {}
            }
            if same_file(&lock, &path.join(LOCK)) {
                reached("lock");
                let reserved: io::Result<Vec<File>> = (0..RESERVED).map(|_| lock.try_clone()).collect();
                let reserved = reserved.map_err(|e| discarded(&path, io_error("create", &path, &e)))?;
                return Ok(Self { path, _lock: lock, reserved });
            }
        }
        Err(Error::environment(format!("cannot make a folder in `{}`", parent.display()))
            .hint("remove the hidden folders there that other builds left"))
    }

    /// Takes over a folder whose process has ended; `None` if it lives, or the folder has no lock.
    pub fn abandoned(path: PathBuf) -> Option<Self> {
        let file = path.join(LOCK);
        // Opening a pipe of that name would wait for ever.
        fs::symlink_metadata(&file).ok().filter(fs::Metadata::is_file)?;
        let lock = File::open(&file).ok()?;
        lock.try_lock().ok()?;
        same_file(&lock, &file).then_some(Self { path, _lock: lock, reserved: Vec::new() })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Closes the descriptors that were kept for removing the folder.
    pub fn release_descriptors(&mut self) {
        self.reserved.clear();
    }
}

/// Removes a folder that has just been made, for an error.
fn discarded(path: &Path, error: Error) -> Error {
    // The error that comes first is the one to report.
    let _ = fs::remove_file(path.join(LOCK));
    let _ = fs::remove_dir(path);
    error
}

/// Whether an open file is what a path names.
#[cfg(unix)]
pub fn same_file(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    let key = |m: fs::Metadata| (m.dev(), m.ino());
    let (open, named) = (file.metadata().map(key), fs::symlink_metadata(path).map(key));
    open.is_ok_and(|open| named.is_ok_and(|named| open == named))
}

/// Whether the path names a file.
#[cfg(not(unix))]
pub fn same_file(_file: &File, path: &Path) -> bool {
    path.is_file()
}
