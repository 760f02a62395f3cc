//! Zeroed memory of a size known before the first token, and the addresses in it.

use crate::error::{Error, Result};
use memmap2::{MmapMut, MmapOptions};

/// An address that threads may share.
///
/// It carries no right to read or write: who uses it says in a SAFETY comment why that is allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Addr(*mut u8);

// SAFETY: an address is a number; every access through it is an unsafe act with its own reason.
unsafe impl Send for Addr {}
// SAFETY: as above.
unsafe impl Sync for Addr {}

impl Addr {
    /// The address as a pointer.
    pub const fn ptr(self) -> *mut u8 {
        self.0
    }

    /// The address as that of a `T`. The caller knows it to be aligned: regions and segments are to 64
    /// bytes, and [`crate::validate`] checks what lies between.
    #[allow(clippy::cast_ptr_alignment, reason = "see above")]
    pub const fn of<T>(self) -> *mut T {
        self.0.cast()
    }

    /// The address of memory that is only read.
    pub const fn read_only(ptr: *const u8) -> Self {
        Self(ptr.cast_mut())
    }

    /// The address `bytes` further on. The caller keeps it inside of the same region.
    #[must_use]
    pub const fn plus(self, bytes: usize) -> Self {
        Self(self.0.wrapping_add(bytes))
    }
}

/// Anonymous memory: zeroed, page-aligned, and backed by the system only where it was touched.
#[derive(Debug)]
pub struct Region {
    // Held for its Drop; accessed through `base` only, so that no reference to the whole ever exists.
    _map: MmapMut,
    base: Addr,
    bytes: usize,
}

impl Region {
    /// Maps `bytes` bytes for `what`.
    ///
    /// # Errors
    /// [`Error::Memory`] if the system refuses.
    pub fn new(what: &'static str, bytes: u64) -> Result<Self> {
        let refused = |source| Error::Memory { what, bytes, source };
        let len = usize::try_from(bytes)
            .ok()
            .filter(|&n| isize::try_from(n).is_ok())
            .ok_or_else(|| refused(std::io::ErrorKind::OutOfMemory.into()))?;
        let mut map = MmapOptions::new().len(len.max(1)).no_reserve_swap().map_anon().map_err(refused)?;
        let base = Addr(map.as_mut_ptr());
        Ok(Self { _map: map, base, bytes: len })
    }

    /// First byte.
    pub fn base(&self) -> Addr {
        self.base
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies `bytes` bytes from one place of the region to another; `None` where one of them lies outside.
    pub fn copy(&mut self, from: usize, to: usize, bytes: usize) -> Option<()> {
        let inside = |at: usize| at.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        if !inside(from) || !inside(to) {
            return None;
        }
        // SAFETY: both places lie in the region, and `&mut self` keeps every other use of it away; they may overlap.
        unsafe { std::ptr::copy(self.base.plus(from).ptr(), self.base.plus(to).ptr(), bytes) };
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn copies_stay_inside() {
        let mut region = Region::new("test", 100).unwrap();
        // SAFETY: the region has that many bytes, and nothing else uses it.
        unsafe { region.base().ptr().write_bytes(7, 10) };
        assert_eq!(region.copy(5, 90, 10), Some(()));
        // SAFETY: as above.
        let bytes = unsafe { std::slice::from_raw_parts(region.base().ptr(), 100) };
        assert_eq!(bytes[88..], [0, 0, 7, 7, 7, 7, 7, 0, 0, 0, 0, 0]);
        for (from, to, bytes) in [(0, 91, 10), (91, 0, 10), (0, 1, 100), (usize::MAX, 0, 2)] {
            assert_eq!(region.copy(from, to, bytes), None);
        }
    }
}
