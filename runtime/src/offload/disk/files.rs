//! The files that contain extents, opened for direct reads where the file system allows it.

use super::extent::{ExtentTable, FileEntry};
use crate::error::{Error, Result};
use crate::platform::regular;
use std::fs::File;
use std::io;
use std::path::Path;

/// Open files, in the order of their table.
#[derive(Debug)]
pub struct Files {
    files: Vec<Open>,
}

#[derive(Debug)]
struct Open {
    file: File,
    /// Reason for reading through the page cache; `None` if it is bypassed, or if the table requests it.
    buffered: Option<String>,
}

impl Files {
    /// Opens every file of a table; past the page cache if `direct`, unless the table or the file system
    /// prevents it.
    ///
    /// # Errors
    /// A file is missing, is not a regular file, or does not have the size in the table.
    pub fn open(table: &ExtentTable, direct: bool) -> Result<Self> {
        let files = table.files().iter().map(|f| open(f, direct)).collect::<Result<_>>()?;
        Ok(Self { files })
    }

    /// No files: for a simulated device, which reads nothing.
    pub fn none() -> Self {
        Self { files: Vec::new() }
    }

    /// The file of an index.
    pub fn get(&self, index: u32) -> Option<&File> {
        self.files.get(index as usize).map(|f| &f.file)
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &File> {
        self.files.iter().map(|f| &f.file)
    }

    /// Size of a file now.
    pub fn size(&self, index: u32) -> Option<u64> {
        self.get(index)?.metadata().ok().map(|m| m.len())
    }

    /// `direct reads`, or the reason that some are not direct.
    pub fn describe(&self) -> String {
        match self.files.iter().find_map(|f| f.buffered.as_ref()) {
            None => "direct reads".to_owned(),
            Some(why) => format!("reads through the page cache ({why})"),
        }
    }

    /// Whether every file is read past the page cache, except those that are to be read through it.
    pub fn is_direct(&self) -> bool {
        self.files.iter().all(|f| f.buffered.is_none())
    }
}

fn open(entry: &FileEntry, direct: bool) -> Result<Open> {
    let path = || entry.path.clone();
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound => Error::MissingFile(path()),
        _ => Error::io("open", path(), source),
    };
    let open = |direct| open_one(&entry.path, direct);
    let opened = if entry.cached {
        open(false).map(|file| Open { file, buffered: None })
    } else {
        choose(direct, &open)
    };
    let opened = opened.map_err(failed)?;
    let meta = opened.file.metadata().map_err(failed)?;
    if meta.len() != entry.bytes {
        return Err(Error::wrong_size(path(), entry.bytes, meta.len()));
    }
    if entry.identity.is_some() && regular::identity(&opened.file).map_err(failed)? != entry.identity {
        return Err(Error::replaced(path()));
    }
    Ok(opened)
}

/// Tries direct reads first, if requested; keeps the reason for which the file system refuses them.
fn choose(direct: bool, open: &dyn Fn(bool) -> io::Result<File>) -> io::Result<Open> {
    let buffered = if direct {
        match open(true) {
            Ok(file) => return Ok(Open { file, buffered: None }),
            // Any other error would fail the second attempt, too.
            Err(e) if refused(&e) => format!("the file system refuses direct ones: {e}"),
            Err(e) => return Err(e),
        }
    } else {
        "as requested".to_owned()
    };
    Ok(Open { file: open(false)?, buffered: Some(buffered) })
}

fn refused(e: &io::Error) -> bool {
    regular::refused(e).is_none()
        && matches!(e.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported)
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn open_one(path: &Path, direct: bool) -> io::Result<File> {
    use super::extent::BLOCK;
    use crate::platform::memory::Region;
    use std::os::unix::fs::FileExt;
    let flags = if direct { libc::O_DIRECT } else { 0 };
    let file = regular::open_with(path, flags)?;
    if direct {
        // Some file systems refuse only when reading, or require larger blocks.
        let region = Region::new("first block of a file", BLOCK).map_err(io::Error::other)?;
        // SAFETY: the region has that many zeroed bytes and nothing else refers to it.
        let block = unsafe { std::slice::from_raw_parts_mut(region.base().ptr(), region.bytes()) };
        match file.read_at(block, 0) {
            Err(e) if refused(&e) => return Err(e),
            // Any other error occurs again, and is reported, when it matters.
            _ => {}
        }
    }
    Ok(file)
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn open_one(path: &Path, direct: bool) -> io::Result<File> {
    if direct {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "this system has none"));
    }
    regular::open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsupported_direct_reads_fall_back_to_the_page_cache() {
        let file = tempfile::tempfile().unwrap();
        let open = |direct| if direct { Err(io::ErrorKind::InvalidInput.into()) } else { file.try_clone() };
        let files = Files { files: vec![choose(true, &open).unwrap()] };
        assert!(!files.is_direct());
        assert!(files.describe().contains("refuses direct"), "{}", files.describe());
        let missing = |_| Err(io::ErrorKind::PermissionDenied.into());
        assert_eq!(choose(true, &missing).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }

    #[test]
    fn file_size_must_match_the_extent_table() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("w");
        std::fs::write(&path, [1; 100]).unwrap();
        let open = |path: &Path, bytes| {
            let entry = FileEntry { path: path.to_owned(), bytes, cached: false, identity: None };
            Files::open(&ExtentTable::new(vec![entry], Vec::new()).unwrap(), true)
        };
        assert_eq!(open(&path, 100).unwrap().size(0), Some(100));
        let e = open(&path, 99).unwrap_err().to_string();
        assert!(e.ends_with("has 100 bytes, but the build wrote 99"), "{e}");
        assert!(matches!(open(&dir.path().join("none"), 1), Err(Error::MissingFile(_))));
        assert!(open(dir.path(), 4096).is_err());
    }

    #[cfg(unix)]
    #[test]
    fn file_replaced_after_its_check_is_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let (path, other) = (dir.path().join("w"), dir.path().join("other"));
        std::fs::write(&path, [1; 100]).unwrap();
        std::fs::write(&other, [2; 100]).unwrap();
        let identity = regular::identity(&regular::open(&path).unwrap()).unwrap();
        let open = |cached| {
            let entry = FileEntry { path: path.clone(), bytes: 100, cached, identity };
            Files::open(&ExtentTable::new(vec![entry], Vec::new()).unwrap(), true)
        };
        assert!(open(false).is_ok() && open(true).is_ok());
        std::fs::rename(&other, &path).unwrap();
        for cached in [false, true] {
            assert!(
                matches!(open(cached), Err(Error::BadFile { path: found, what, .. }) if found == path && what.contains("replaced"))
            );
        }
    }
}
