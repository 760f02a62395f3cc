//! Read-only maps of checkpoint files. The only `unsafe` code of the compiler's import.

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
        // What is read is counted by the piece. Huge pages would bring two megabytes around each. A refusal costs memory, not
        // correctness.
        #[cfg(target_os = "linux")]
        drop(map.map().advise(memmap2::Advice::NoHugePage));
        Ok(Self(map))
    }

    /// Notifies the system that these bytes will be read soon, so that it fetches them meanwhile. Bytes out of range are ignored.
    pub fn will_read(&self, range: Range<usize>) {
        #[cfg(unix)]
        if range.start < range.end && range.end <= self.0.len() {
            // A refusal costs time, not correctness.
            drop(self.0.map().advise_range(memmap2::Advice::WillNeed, range.start, range.end - range.start));
        }
        #[cfg(not(unix))]
        let _ = range;
    }

    /// Notifies the system that these bytes are not needed any more, so that they leave memory. They can
    /// still be read, and are then fetched from the file anew. Bytes out of range are ignored.
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
            // A refusal costs memory, not correctness.
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
