//! Read-only maps of weight files. The only `unsafe` code of reading packages.

use memmap2::Mmap;
use std::fs::File;
use std::io;
use std::ops::Deref;
use std::path::Path;

/// A file mapped for reading.
#[derive(Debug)]
pub(super) struct Map(Mmap);

impl Map {
    /// Maps a regular file.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        // SAFETY: the map is only read, and every byte pattern is a valid `u8`. A package that another
        // process rewrites while it is read gives wrong numbers, and one that it shortens ends this process
        // with a bus error; neither breaks memory safety.
        Ok(Self(unsafe { Mmap::map(&file)? }))
    }
}

impl Deref for Map {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.0
    }
}
