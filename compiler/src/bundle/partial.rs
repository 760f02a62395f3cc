//! A folder that appears whole or not at all.
//!
//! Files are written to a hidden sibling of the destination, which is renamed into place at the end and
//! removed when anything goes wrong before.

use crate::error::{Error, Result};
use crate::interrupt::{self, Hold};
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// File that marks a folder as a bundle.
pub const MANIFEST: &str = "manifest.json";

/// A bundle being written.
#[derive(Debug)]
pub struct Partial {
    folder: PathBuf,
    destination: PathBuf,
    done: bool,
    /// Let go of when the folder is in place or gone.
    _hold: Hold,
}

impl Partial {
    /// Opens a folder beside `destination`, which must be free, or an earlier bundle, or empty.
    ///
    /// # Errors
    /// A destination that is something else, or a parent that cannot be written.
    pub fn create(destination: &Path) -> Result<Self> {
        check_destination(destination)?;
        let parent = parent_of(destination);
        fs::create_dir_all(parent).map_err(|e| io_error("create", parent, &e))?;
        remove_stale(parent, destination);
        let hold = interrupt::hold();
        let folder = parent.join(partial_name(destination, std::process::id()));
        fs::create_dir(&folder).map_err(|e| io_error("create", &folder, &e))?;
        Ok(Self { folder, destination: destination.to_owned(), done: false, _hold: hold })
    }

    /// The folder to write into.
    pub fn path(&self) -> &Path {
        &self.folder
    }

    /// Puts the folder in place, in exchange for an earlier bundle.
    ///
    /// # Errors
    /// A rename that fails; the earlier bundle is then still there.
    pub fn commit(mut self) -> Result<()> {
        let old = self.destination.exists().then(|| {
            let parent = parent_of(&self.destination);
            parent.join(named(&self.destination, &format!(".replaced-{}", std::process::id())))
        });
        if let Some(old) = &old {
            fs::rename(&self.destination, old).map_err(|e| io_error("replace", &self.destination, &e))?;
        }
        if let Err(e) = fs::rename(&self.folder, &self.destination) {
            if let Some(old) = &old {
                // Best effort: the error that is reported is the first.
                let _ = fs::rename(old, &self.destination);
            }
            return Err(io_error("put into place", &self.destination, &e));
        }
        self.done = true;
        if let Some(old) = &old {
            fs::remove_dir_all(old).map_err(|e| io_error("remove", old, &e))?;
        }
        Ok(())
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.done {
            let _ = fs::remove_dir_all(&self.folder);
        }
    }
}

fn check_destination(path: &Path) -> Result<()> {
    let shown = path.display();
    if path.file_name().is_none() {
        return Err(Error::usage(format!("`{shown}` cannot be a bundle")).hint("name a new folder with `-o`"));
    }
    match fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(io_error("look at", path, &e)),
        Ok(meta) if !meta.is_dir() => {
            Err(Error::usage(format!("`{shown}` exists and is no folder"))
                .hint("name another folder with `-o`"))
        }
        Ok(_) => {
            let empty = fs::read_dir(path).map_err(|e| io_error("read", path, &e))?.next().is_none();
            if empty || path.join(MANIFEST).is_file() {
                Ok(())
            } else {
                Err(Error::usage(format!("`{shown}` exists and is no bundle"))
                    .hint("name another folder with `-o`: only an earlier bundle is replaced"))
            }
        }
    }
}

fn parent_of(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn named(destination: &Path, suffix: &str) -> OsString {
    let mut name = OsString::from(".");
    name.push(destination.file_name().unwrap_or_default());
    name.push(suffix);
    name
}

fn partial_name(destination: &Path, pid: u32) -> OsString {
    named(destination, &format!(".partial-{pid}"))
}

/// Removes what a killed build of the same destination left behind.
fn remove_stale(parent: &Path, destination: &Path) {
    let prefix = named(destination, ".partial-");
    let prefix = prefix.to_string_lossy();
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if let Some(pid) = name.strip_prefix(&*prefix)
            && !Path::new("/proc").join(pid).exists()
        {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// An I/O failure as the user reads it.
pub fn io_error(action: &str, path: &Path, e: &io::Error) -> Error {
    let error = Error::environment(format!("cannot {action} `{}`", path.display())).because(e);
    if let Some(why) = moec_runtime::regular::refused(e) {
        return error.hint(why.hint());
    }
    match e.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            error.hint("the disk is full: free some space, or write elsewhere with `-o`")
        }
        io::ErrorKind::PermissionDenied => error.hint("check who may write there"),
        _ => error,
    }
}
