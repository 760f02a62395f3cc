//! Parts of a file in the page cache, and their release.

use crate::platform::mapped::MappedFile;
use std::fs::File;
use std::io;
use std::path::Path;

/// A file and its pages in the page cache.
#[derive(Debug)]
pub(super) struct PageCache {
    // Used on Linux only.
    #[cfg_attr(not(target_os = "linux"), allow(dead_code))]
    file: File,
    /// `None` if the kernel does not report the pages in the page cache.
    #[cfg_attr(not(target_os = "linux"), allow(dead_code))]
    map: Option<MappedFile>,
}

impl PageCache {
    /// Pages of an open file.
    ///
    /// # Errors
    /// An operation that the operating system refuses.
    pub(super) fn of(file: &File, path: &Path) -> io::Result<Self> {
        let file = file.try_clone()?;
        // No byte is ever read through the mapping.
        let map = if reports_residency(&file)? { MappedFile::of(&file, path).ok() } else { None };
        Ok(Self { file, map })
    }
}

/// Share of the pages of a range that must be in the page cache for a read through it: `.1` of every `.0`.
#[cfg(target_os = "linux")]
const RESIDENT_SHARE: (usize, usize) = (8, 7);

/// Most samples of a file that [`PageCache::holds_most`] checks, and bytes of each sample.
#[cfg(target_os = "linux")]
const MAX_SAMPLES: u64 = 1024;
#[cfg(target_os = "linux")]
const SAMPLE_BYTES: u64 = 256 << 10;

#[cfg(target_os = "linux")]
impl PageCache {
    /// Whether the page cache has nearly all of a range, as far as the kernel reports it. `offset` is a
    /// multiple of the page size.
    pub(super) fn holds(&self, offset: u64, bytes: u64) -> bool {
        let Some(map) = &self.map else { return false };
        let range = (usize::try_from(offset).ok()).zip(usize::try_from(bytes).ok());
        let Some((at, len)) =
            range.filter(|&(at, len)| at.checked_add(len).is_some_and(|end| end <= map.len()))
        else {
            return false;
        };
        // SAFETY: the call takes no memory.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096).max(1);
        let mut pages = vec![0_u8; len.div_ceil(page)];
        // SAFETY: the range is in the mapping, from which nothing is read, and there is a byte for each of
        // its pages.
        let status =
            unsafe { libc::mincore(map.as_ptr().add(at).cast_mut().cast(), len, pages.as_mut_ptr()) };
        let resident = pages.iter().filter(|&&p| p & 1 == 1).count();
        status == 0 && resident * RESIDENT_SHARE.0 >= pages.len() * RESIDENT_SHARE.1
    }

    /// Whether the page cache has nearly all of the file, which has `bytes` bytes. At most a thousand samples
    /// are checked: checking each page of 16 GB would delay the first token too much.
    pub(super) fn holds_most(&self, bytes: u64) -> bool {
        let pitch = (bytes / MAX_SAMPLES).next_multiple_of(SAMPLE_BYTES);
        (0..bytes).step_by(usize::try_from(pitch.max(SAMPLE_BYTES)).unwrap_or(usize::MAX)).all(|at| {
            let sample = SAMPLE_BYTES.min(bytes - at);
            self.holds(at, sample)
        })
    }

    /// Drops a range from the page cache.
    pub(super) fn forget(&self, offset: u64, bytes: u64) {
        self.advise(offset, bytes, libc::POSIX_FADV_DONTNEED);
    }

    /// Starts to read a range into the page cache; the reads may end later.
    pub(super) fn fetch(&self, offset: u64, bytes: u64) {
        self.advise(offset, bytes, libc::POSIX_FADV_WILLNEED);
    }

    fn advise(&self, offset: u64, bytes: u64, advice: libc::c_int) {
        use std::os::fd::AsRawFd as _;
        let (Ok(at), Ok(len)) = (libc::off_t::try_from(offset), libc::off_t::try_from(bytes)) else { return };
        // SAFETY: a hint on a descriptor that is open; no memory is passed.
        unsafe { libc::posix_fadvise(self.file.as_raw_fd(), at, len, advice) };
    }
}

#[cfg(not(target_os = "linux"))]
impl PageCache {
    /// Not reported on this operating system.
    #[allow(clippy::unused_self, reason = "it has something to look at on Linux only")]
    pub(super) fn holds(&self, _offset: u64, _bytes: u64) -> bool {
        false
    }

    /// Not reported on this operating system.
    #[allow(clippy::unused_self, reason = "it has something to look at on Linux only")]
    pub(super) fn holds_most(&self, _bytes: u64) -> bool {
        false
    }

    /// Does nothing on this system.
    #[allow(clippy::unused_self, reason = "it has something to look at on Linux only")]
    pub(super) fn forget(&self, _offset: u64, _bytes: u64) {}

    /// Does nothing on this system.
    #[allow(clippy::unused_self, reason = "it has something to look at on Linux only")]
    pub(super) fn fetch(&self, _offset: u64, _bytes: u64) {}
}

/// Whether the kernel reports the pages in the page cache. Since Linux 5.2 it does so only to the owner of
/// the file; for others it reports all pages as present.
#[cfg(target_os = "linux")]
fn reports_residency(file: &File) -> io::Result<bool> {
    use std::os::unix::fs::MetadataExt as _;
    // SAFETY: the call takes no memory and cannot fail.
    let user = unsafe { libc::geteuid() };
    Ok(user == 0 || user == file.metadata()?.uid())
}

/// Not reported on this operating system.
#[cfg(not(target_os = "linux"))]
#[allow(clippy::unnecessary_wraps, reason = "as on Linux")]
fn reports_residency(_file: &File) -> io::Result<bool> {
    Ok(false)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn page_cache_residency_follows_release_and_prefetch() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, vec![7; 1 << 20]).unwrap();
        let cache = PageCache::of(&File::open(&path).unwrap(), &path).unwrap();
        assert!(cache.holds(0, 1 << 20) && cache.holds(4096, 5000) && cache.holds_most(1 << 20));
        assert!(!cache.holds(0, (1 << 20) + 1) && !cache.holds(u64::MAX - 4095, 4096));
        cache.file.sync_all().unwrap();
        cache.forget(0, 1 << 20);
        assert!(!cache.holds(0, 1 << 20) && !cache.holds_most(1 << 20));
        let start = std::time::Instant::now();
        while !cache.holds(0, 1 << 20) {
            cache.fetch(0, 1 << 20);
            assert!(start.elapsed() < std::time::Duration::from_secs(20), "it is not read");
        }
    }
}
