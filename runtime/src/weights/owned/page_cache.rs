//! Parts of a file in the page cache, and their release.

use crate::platform::mapped::MappedFile;
use std::fs::File;
use std::io;
use std::path::Path;

/// A file, as the page cache sees it.
#[derive(Debug)]
pub(super) struct PageCache {
    // Used on Linux only.
    #[cfg_attr(not(target_os = "linux"), allow(dead_code))]
    file: File,
    /// None where the kernel would not say what is there.
    #[cfg_attr(not(target_os = "linux"), allow(dead_code))]
    map: Option<MappedFile>,
}

impl PageCache {
    /// Of an open file.
    ///
    /// # Errors
    /// What the operating system refuses.
    pub(super) fn of(file: &File, path: &Path) -> io::Result<Self> {
        let file = file.try_clone()?;
        // Nothing of it is ever read through the mapping.
        let map = if reports_residency(&file)? { MappedFile::of(&file, path).ok() } else { None };
        Ok(Self { file, map })
    }
}

/// Of every so many pages of a range, how many must be in the page cache, so that what is missing is read with them.
#[cfg(target_os = "linux")]
const MOSTLY: (usize, usize) = (8, 7);

/// Places of a file that [`PageCache::holds_most`] looks at, at most, and bytes that it looks at in each.
#[cfg(target_os = "linux")]
const PLACES: u64 = 1024;
#[cfg(target_os = "linux")]
const STRETCH: u64 = 256 << 10;

#[cfg(target_os = "linux")]
impl PageCache {
    /// Whether nearly all of a range lies there, as far as the kernel reports it. `offset` is a multiple of the size of a page.
    pub(super) fn holds(&self, offset: u64, bytes: u64) -> bool {
        let Some(map) = &self.map else { return false };
        let range = (usize::try_from(offset).ok()).zip(usize::try_from(bytes).ok());
        let Some((at, len)) =
            range.filter(|&(at, len)| at.checked_add(len).is_some_and(|end| end <= map.len()))
        else {
            return false;
        };
        // SAFETY: a question without memory.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096).max(1);
        let mut pages = vec![0_u8; len.div_ceil(page)];
        // SAFETY: the range lies in the mapping, which nothing is read from, and there is a byte for each of its pages.
        let asked = unsafe { libc::mincore(map.as_ptr().add(at).cast_mut().cast(), len, pages.as_mut_ptr()) };
        let there = pages.iter().filter(|&&p| p & 1 == 1).count();
        asked == 0 && there * MOSTLY.0 >= pages.len() * MOSTLY.1
    }

    /// Whether nearly all of the file, of so many bytes, lies there: in a thousand places at most, since to request each page of
    /// 16 GB takes longer than the first token may.
    pub(super) fn holds_most(&self, bytes: u64) -> bool {
        let pitch = (bytes / PLACES).next_multiple_of(STRETCH);
        (0..bytes).step_by(usize::try_from(pitch.max(STRETCH)).unwrap_or(usize::MAX)).all(|at| {
            let stretch = STRETCH.min(bytes - at);
            self.holds(at, stretch)
        })
    }

    /// Lets a range go, which is not needed there any more.
    pub(super) fn forget(&self, offset: u64, bytes: u64) {
        self.advise(offset, bytes, libc::POSIX_FADV_DONTNEED);
    }

    /// Has a range read into it; the reads may end later.
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
    /// This system does not say.
    #[allow(clippy::unused_self, reason = "it has something to look at on Linux only")]
    pub(super) fn holds(&self, _offset: u64, _bytes: u64) -> bool {
        false
    }

    /// This system does not say.
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

/// Whether the kernel says what is there: to who owns the file. To others it says that all is, since Linux 5.2.
#[cfg(target_os = "linux")]
fn reports_residency(file: &File) -> io::Result<bool> {
    use std::os::unix::fs::MetadataExt as _;
    // SAFETY: a question without memory, which cannot fail.
    let user = unsafe { libc::geteuid() };
    Ok(user == 0 || user == file.metadata()?.uid())
}

/// This system does not say.
#[cfg(not(target_os = "linux"))]
#[allow(clippy::unnecessary_wraps, reason = "as on Linux")]
fn reports_residency(_file: &File) -> io::Result<bool> {
    Ok(false)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_there_until_it_is_let_go_and_when_it_was_fetched() {
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
