//! Read-only maps of checkpoint files. This file has the only `unsafe` code of this crate.

use moec_runtime::platform::mapped::MappedFile;
use std::io;
use std::ops::{Deref, Range};
use std::path::Path;

/// A file mapped for reading.
#[derive(Debug)]
pub struct Map(MappedFile);

impl Map {
    /// Maps a file; an empty file gives an empty map.
    pub fn open(path: &Path) -> io::Result<Self> {
        let map = MappedFile::open(path)?;
        // Reads are accounted for in small pieces, but huge pages would load two megabytes around each. If
        // the call fails, that costs memory but is still correct.
        #[cfg(target_os = "linux")]
        drop(map.map().advise(memmap2::Advice::NoHugePage));
        Ok(Self(map))
    }

    /// Tells the operating system that these bytes will be read soon, so that it prefetches them. Bytes out
    /// of range are ignored.
    pub fn will_read(&self, range: Range<usize>) {
        #[cfg(unix)]
        if range.start < range.end && range.end <= self.0.len() {
            // If the call fails, that costs time but is still correct.
            drop(self.0.map().advise_range(memmap2::Advice::WillNeed, range.start, range.end - range.start));
        }
        #[cfg(not(unix))]
        let _ = range;
    }

    /// Tells the operating system that these bytes are not needed now, so that it frees their memory. Later
    /// reads load them from the file again. Bytes out of range are ignored.
    pub fn release(&self, range: Range<usize>) {
        if range.start >= range.end || range.end > self.0.len() {
            return;
        }
        #[cfg(unix)]
        {
            use memmap2::UncheckedAdvice::DontNeed;
            // SAFETY: the map is a file mapping that is never written through, so dropping its pages loses
            // nothing: the next read faults them in with the file's content. Bytes that share a page with
            // the range are the same file and come back the same way. The range was checked above.
            let advised = unsafe {
                self.0.map().unchecked_advise_range(DontNeed, range.start, range.end - range.start)
            };
            // If the call fails, that costs memory but is still correct.
            drop(advised);
        }
    }
}

impl Deref for Map {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.0
    }
}
