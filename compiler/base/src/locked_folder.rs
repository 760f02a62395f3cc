//! A folder that one process writes, and that other processes may remove after it has ended.
//!
//! The folder has a file `lock`, which its process keeps locked until it ends. Process ids are not comparable
//! between hosts or containers that share a folder; locks are. On a file system without locks, no folder is
//! ever taken for an abandoned one.

use crate::error::{Error, Result, io_error};
use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

/// Name of the file that is locked while the process runs. It also marks the folder as one of moec's.
pub const LOCK: &str = "lock";
/// Number of attempts at names and locks that other processes may take.
pub const TRIES: usize = 100;
/// Number of file descriptors kept for removing the folder: one for each level of folders that is open at
/// once.
const RESERVED: usize = 12;

/// A folder of this process: a new one, or one of a process that has ended.
#[derive(Debug)]
pub struct LockedFolder {
    path: PathBuf,
    /// The lock file, locked as long as this value lives.
    _lock: File,
    /// Descriptors that are closed before the folder is removed. Removal opens folders, and the process may
    /// have run out of descriptors.
    reserved: Vec<File>,
}

impl LockedFolder {
    /// Creates a folder in `parent`, which must exist. `name` makes the folder's name from a text that is
    /// unique to the process. `reached` is called with the name of each step.
    ///
    /// # Errors
    /// Fails if the parent cannot be written.
    pub fn create(parent: &Path, name: impl Fn(&str) -> OsString, reached: impl Fn(&str)) -> Result<Self> {
        let id = std::process::id();
        for n in 0..TRIES {
            // Other hosts and containers with the same process id may write here, too.
            let id = if n == 0 { id.to_string() } else { format!("{id}-{n}") };
            let path = parent.join(name(&id));
            match fs::create_dir(&path) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
                made => made.map_err(|e| io_error("create", &path, &e))?,
            }
            reached("folder");
            // Before the file is locked, another process may take the folder for an abandoned one and remove
            // it.
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

    /// Takes over a folder whose process has ended; `None` if that process runs or the folder has no lock.
    pub fn abandoned(path: PathBuf) -> Option<Self> {
        let file = path.join(LOCK);
        // Opening a named pipe would block indefinitely.
        fs::symlink_metadata(&file).ok().filter(fs::Metadata::is_file)?;
        let lock = File::open(&file).ok()?;
        lock.try_lock().ok()?;
        same_file(&lock, &file).then_some(Self { path, _lock: lock, reserved: Vec::new() })
    }

    /// Path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Closes the descriptors that were kept for removing the folder.
    pub fn release_descriptors(&mut self) {
        self.reserved.clear();
    }
}

/// Removes a folder that has just been created, after an error.
fn discarded(path: &Path, error: Error) -> Error {
    // The first error is the one to report.
    let _ = fs::remove_file(path.join(LOCK));
    let _ = fs::remove_dir(path);
    error
}

/// Whether an open file is the one at a path.
#[cfg(unix)]
pub fn same_file(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    let key = |m: fs::Metadata| (m.dev(), m.ino());
    let (open, named) = (file.metadata().map(key), fs::symlink_metadata(path).map(key));
    open.is_ok_and(|open| named.is_ok_and(|named| open == named))
}

/// Whether a path names a file; systems without inodes have no better test.
#[cfg(not(unix))]
pub fn same_file(_file: &File, path: &Path) -> bool {
    path.is_file()
}
