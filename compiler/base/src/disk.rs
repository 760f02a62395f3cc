//! Free space on disk, and files that appear whole or not at all. The only `unsafe` of this file queries the
//! free space.

use crate::locked_folder::TRIES;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Writes a file and the folders above it, and replaces an earlier file. The file is on disk when this
/// returns.
///
/// # Errors
/// Those of the operating system; an earlier file is then unchanged.
pub fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(parent)?;
    let _hold = crate::interrupt::hold();
    let (partial, mut file) = Partial::create(path, parent)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    partial.rename(path)?;
    sync_folder(parent)
}

/// A temporary file, which is removed unless it was renamed.
struct Partial(Option<PathBuf>);

impl Partial {
    /// Creates a file next to `path` that no other thread or process writes, not even one in another
    /// container.
    fn create(path: &Path, parent: &Path) -> io::Result<(Self, File)> {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let mut taken = io::Error::from(io::ErrorKind::AlreadyExists);
        for _ in 0..TRIES {
            let mut name = path.file_name().unwrap_or_default().to_owned();
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            name.push(format!(".partial-{}-{number}", std::process::id()));
            let partial = parent.join(name);
            match File::create_new(&partial) {
                Ok(file) => return Ok((Self(Some(partial)), file)),
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => taken = e,
                Err(e) => return Err(e),
            }
        }
        Err(taken)
    }

    fn rename(mut self, path: &Path) -> io::Result<()> {
        if let Some(partial) = &self.0 {
            fs::rename(partial, path)?;
        }
        // The temporary name is free again: another process may have taken it by now.
        self.0 = None;
        Ok(())
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if let Some(partial) = &self.0 {
            let _ = fs::remove_file(partial);
        }
    }
}

/// Waits until the names in a folder are on the disk.
///
/// # Errors
/// Those of the operating system.
#[cfg(unix)]
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Does nothing: folders are not opened as files here.
///
/// # Errors
/// None.
#[cfg(not(unix))]
pub fn sync_folder(_folder: &Path) -> io::Result<()> {
    Ok(())
}

/// Bytes that this user can still write below a folder; `None` if the operating system does not report it.
#[cfg(unix)]
pub fn free_bytes(folder: &Path) -> Option<u64> {
    use std::os::unix::ffi::OsStrExt;
    let path = std::ffi::CString::new(folder.as_os_str().as_bytes()).ok()?;
    // SAFETY: `path` is a C string and `stat` is a valid `statvfs` to write to (zero is a valid bit pattern of
    // every field).
    let stat = unsafe {
        let mut stat: libc::statvfs = std::mem::zeroed();
        if libc::statvfs(path.as_ptr(), &raw mut stat) != 0 {
            return None;
        }
        stat
    };
    #[allow(clippy::useless_conversion, reason = "the fields have other widths elsewhere")]
    Some(u64::from(stat.f_bavail).saturating_mul(u64::from(stat.f_frsize)))
}

/// Bytes that this user can still write below a folder; `None` if the operating system does not report it.
#[cfg(not(unix))]
pub fn free_bytes(_folder: &Path) -> Option<u64> {
    None
}

/// The nearest existing ancestor of a path; its file system will provide the space.
pub fn existing(path: &Path) -> &Path {
    path.ancestors().find(|p| p.exists()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_that_write_one_file_leave_one_of_their_texts_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let texts: Vec<Vec<u8>> = (1..5).map(|n| vec![b'0' + n; 1000 * usize::from(n)]).collect();
        std::thread::scope(|scope| {
            for text in &texts {
                scope.spawn(|| (0..50).for_each(|_| write_whole(&path, text).unwrap()));
            }
        });
        assert!(texts.contains(&fs::read(&path).unwrap()));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "a temporary file is left");
    }

    #[test]
    fn a_file_that_cannot_be_replaced_leaves_no_temporary_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::create_dir_all(path.join("in the way")).unwrap();
        assert!(write_whole(&path, b"text").is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "a temporary file is left");
    }
}
