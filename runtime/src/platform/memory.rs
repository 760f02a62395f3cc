//! Zeroed memory, whose size is known before the first token, and the addresses in it.

use crate::error::{Error, Result};
use memmap2::{MmapMut, MmapOptions};
use std::io;

/// Bytes of a huge page, on the CPUs that we compile for.
pub(crate) const HUGE_PAGE: usize = 2 << 20;

/// Bytes of a page, at most, on the systems that we compile for.
#[cfg(target_os = "linux")]
const PAGE: usize = 64 << 10;

/// Returns freed memory to the operating system. glibc's allocator keeps memory between used blocks; with
/// other allocators this does nothing.
pub fn give_back_freed() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: it takes no address, and any thread may call it at any time.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Locks this process's memory: pages that were used, those of mapped weights included, stay in RAM until it
/// ends.
///
/// # Errors
/// Fails if the user may not lock as much memory, or the operating system cannot lock page by page (Linux's
/// `MCL_ONFAULT`).
pub fn lock() -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: it takes no address, and changes no memory.
        let done = unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
    #[cfg(not(target_os = "linux"))]
    Err(io::ErrorKind::Unsupported.into())
}

/// Locks the pages of mapped memory: once they were used they stay in RAM as long as they are mapped.
///
/// # Errors
/// As [`lock`].
pub(crate) fn lock_pages(at: Addr, bytes: u64) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        let bytes = usize::try_from(bytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
        // SAFETY: it changes no memory. A range that is not mapped is an error.
        let done = unsafe { libc::syscall(libc::SYS_mlock2, at.ptr(), bytes, libc::MLOCK_ONFAULT) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = (at, bytes);
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// An address that threads may share.
///
/// It grants no right to read or write: each use has a SAFETY comment with the reason why it is allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Addr(*mut u8);

// SAFETY: an address is a number; every access through it is an unsafe operation with its own reason.
unsafe impl Send for Addr {}
// SAFETY: as above.
unsafe impl Sync for Addr {}

impl Addr {
    /// The address as a pointer.
    pub const fn ptr(self) -> *mut u8 {
        self.0
    }

    /// The address as that of a `T`. The caller ensures the alignment: regions and segments are aligned to 64
    /// bytes, and the verifier of plans checks offsets in them.
    #[allow(clippy::cast_ptr_alignment, reason = "see above")]
    pub const fn of<T>(self) -> *mut T {
        self.0.cast()
    }

    /// The address of memory that is only read.
    pub const fn read_only(ptr: *const u8) -> Self {
        Self(ptr.cast_mut())
    }

    /// The address `bytes` bytes later. The caller keeps it inside of the same region.
    #[must_use]
    pub const fn plus(self, bytes: usize) -> Self {
        Self(self.0.wrapping_add(bytes))
    }
}

/// Anonymous memory: zeroed, page-aligned, and backed by the operating system only for pages that were
/// touched.
#[derive(Debug)]
pub struct Region {
    // Held for its Drop and for advice; accessed only through `base`, so that there is never a reference to
    // the whole.
    #[cfg_attr(not(target_os = "linux"), allow(dead_code, reason = "held for its Drop"))]
    map: MmapMut,
    base: Addr,
    bytes: usize,
}

impl Region {
    /// Maps `bytes` bytes for `what`.
    ///
    /// # Errors
    /// [`Error::Io`] if the operating system refuses.
    pub fn new(what: &'static str, bytes: u64) -> Result<Self> {
        Self::aligned(what, bytes, 1)
    }

    /// As [`Region::new`], aligned to 2 MiB and requested in pages of that size, if the operating system has
    /// them.
    ///
    /// # Errors
    /// As [`Region::new`].
    pub fn in_huge_pages(what: &'static str, bytes: u64) -> Result<Self> {
        let region = Self::aligned(what, bytes, HUGE_PAGE)?;
        // A hint: its effect is measured later ([`crate::weights::WeightPlacement`]).
        #[cfg(target_os = "linux")]
        drop(region.map.advise(memmap2::Advice::HugePage));
        Ok(region)
    }

    /// Maps the region. `align`: a power of two; the operating system aligns to a page anyway.
    fn aligned(what: &'static str, bytes: u64, align: usize) -> Result<Self> {
        let refused = |source| Error::memory(what, bytes, source);
        let none = || refused(io::ErrorKind::OutOfMemory.into());
        let len = usize::try_from(bytes).map_err(|_| none())?;
        let whole = len.max(1).checked_add(align - 1).filter(|&n| isize::try_from(n).is_ok());
        let whole = whole.ok_or_else(none)?;
        // Not reserved: a run may need only a small part of a KV cache. The part that it may need is compared
        // with free memory before ([`crate::weights::Demand`]). The operating system would compare the whole
        // with all memory.
        let mut map = MmapOptions::new().len(whole).no_reserve_swap().map_anon().map_err(refused)?;
        let first = map.as_mut_ptr();
        let base = Addr(first.wrapping_add(first.addr().next_multiple_of(align) - first.addr()));
        Ok(Self { map, base, bytes: len })
    }

    /// Lets the operating system back a part of the region now, rather than at the first write. Its content
    /// does not change. Offset and length are in bytes, multiples of 4096. A hint: returns whether the
    /// operating system accepted it.
    #[cfg(target_os = "linux")]
    pub(crate) fn populate(&self, at: usize, bytes: usize) -> bool {
        let skip = self.base.ptr().addr() - self.map.as_ptr().addr();
        let inside = at.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        inside && self.map.advise_range(memmap2::Advice::PopulateWrite, skip + at, bytes).is_ok()
    }

    /// Does nothing on this system.
    #[cfg(not(target_os = "linux"))]
    #[allow(clippy::unused_self, reason = "it has something to look at on Linux only")]
    pub(crate) fn populate(&self, _at: usize, _bytes: usize) -> bool {
        false
    }

    /// Returns the memory of everything from byte `at` on to the operating system, page by page; it is zero
    /// afterwards. A hint.
    #[cfg(target_os = "linux")]
    pub(crate) fn release(&mut self, at: usize) {
        let skip = self.base.ptr().addr() - self.map.as_ptr().addr();
        let (from, end) = ((skip + at).next_multiple_of(PAGE), skip + self.bytes);
        if let Some(bytes) = end.checked_sub(from).filter(|&bytes| bytes > 0) {
            // SAFETY: the pages are in the map, and `&mut self` excludes every other use of it. They read as
            // zeros, which is a value of bytes.
            let _ =
                unsafe { self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, from, bytes) };
        }
    }

    /// Does nothing on this system.
    #[cfg(not(target_os = "linux"))]
    #[allow(clippy::unused_self, reason = "it has something to release on Linux only")]
    pub(crate) fn release(&mut self, _at: usize) {}

    /// First byte.
    pub fn base(&self) -> Addr {
        self.base
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Clears `bytes` bytes; `None` if they are outside.
    pub fn zero(&mut self, at: usize, bytes: usize) -> Option<()> {
        at.checked_add(bytes).filter(|&end| end <= self.bytes)?;
        // SAFETY: the range is in the region, and `&mut self` excludes every other use of it.
        unsafe { self.base.plus(at).ptr().write_bytes(0, bytes) };
        Some(())
    }

    /// A part of the region; `None` if it is outside. The caller ensures that no step is running.
    pub(crate) fn part(&self, at: usize, bytes: usize) -> Option<&[u8]> {
        at.checked_add(bytes).filter(|&end| end <= self.bytes)?;
        // SAFETY: the range is in the region, which is initialised memory. Steps run under `&mut` of the
        // engine that owns it.
        Some(unsafe { std::slice::from_raw_parts(self.base.plus(at).ptr(), bytes) })
    }

    /// A writable part of the region; `None` if it is outside.
    pub(crate) fn part_mut(&mut self, at: usize, bytes: usize) -> Option<&mut [u8]> {
        at.checked_add(bytes).filter(|&end| end <= self.bytes)?;
        // SAFETY: as in `part`, and `&mut self` excludes every other use of the region.
        Some(unsafe { std::slice::from_raw_parts_mut(self.base.plus(at).ptr(), bytes) })
    }

    /// Copies `bytes` bytes from one place of the region to another; `None` if one of them is outside.
    pub fn copy(&mut self, from: usize, to: usize, bytes: usize) -> Option<()> {
        let inside = |at: usize| at.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        if !inside(from) || !inside(to) {
            return None;
        }
        // SAFETY: both ranges are in the region, and `&mut self` excludes every other use of it; they may
        // overlap.
        unsafe { std::ptr::copy(self.base.plus(from).ptr(), self.base.plus(to).ptr(), bytes) };
        Some(())
    }
}

/// A size for people: three digits and a binary unit.
pub(crate) fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = usize::from(unit > 0 && value < 100.0);
    format!("{value:.digits$} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        let shown = [0, 999, 1000, 1536, 10 << 20, 3 << 30, 200 << 40].map(size);
        assert_eq!(shown, ["0 B", "999 B", "1.0 KiB", "1.5 KiB", "10.0 MiB", "3.0 GiB", "200 TiB"]);
    }

    #[test]
    fn huge_pages_are_aligned_and_populated() {
        let region = Region::in_huge_pages("test", 5 << 20).unwrap();
        assert_eq!((region.base().ptr().addr() % HUGE_PAGE, region.bytes()), (0, 5 << 20));
        // SAFETY: the region has that many bytes, and nothing else uses it.
        unsafe { region.base().ptr().write(7) };
        if region.populate(0, 5 << 20) {
            // SAFETY: as above.
            assert_eq!(unsafe { region.base().ptr().read() }, 7);
        }
        assert!(!region.populate(4 << 20, 2 << 20) && !region.populate(usize::MAX, 4096));
        assert!(Region::in_huge_pages("everything", u64::MAX).is_err());
    }

    #[test]
    fn zeroed_and_aligned() {
        let region = Region::new("test", 10_000).unwrap();
        assert_eq!(region.base().ptr() as usize % 64, 0);
        // SAFETY: the region has that many bytes, and nothing else uses it.
        let bytes = unsafe { std::slice::from_raw_parts(region.base().ptr(), region.bytes()) };
        assert!(bytes.iter().all(|&b| b == 0));
        assert!(Region::new("nothing", 0).is_ok());
        assert!(Region::new("everything", u64::MAX).is_err());
    }

    #[test]
    fn out_of_bounds_copies_are_rejected() {
        let mut region = Region::new("test", 100).unwrap();
        // SAFETY: the region has that many bytes, and nothing else uses it.
        unsafe { region.base().ptr().write_bytes(7, 10) };
        assert_eq!(region.copy(5, 90, 10), Some(()));
        // SAFETY: as above.
        let bytes = unsafe { std::slice::from_raw_parts(region.base().ptr(), 100) };
        assert_eq!(bytes[88..], [0, 0, 7, 7, 7, 7, 7, 0, 0, 0, 0, 0]);
        assert_eq!(region.zero(92, 2), Some(()));
        assert_eq!((region.zero(99, 2), region.zero(usize::MAX, 2)), (None, None));
        assert_eq!(region.part(5, 3), Some(&[7_u8, 7, 7][..]));
        region.part_mut(99, 1).unwrap()[0] = 7;
        assert_eq!((region.part(99, 2), region.part(usize::MAX, 2)), (None, None));
        assert!(region.part_mut(99, 2).is_none() && region.part_mut(usize::MAX, 2).is_none());
        // SAFETY: as above.
        let bytes = unsafe { std::slice::from_raw_parts(region.base().ptr(), 100) };
        assert_eq!(bytes[90..], [7, 7, 0, 0, 7, 0, 0, 0, 0, 7]);
        for (from, to, bytes) in [(0, 91, 10), (91, 0, 10), (0, 1, 100), (usize::MAX, 0, 2)] {
            assert_eq!(region.copy(from, to, bytes), None);
        }
    }
}
