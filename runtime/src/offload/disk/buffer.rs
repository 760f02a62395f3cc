//! Memory for reads: one region, allocated once and cut into aligned buffers.
//!
//! A [`Buffer`] is the right to fill one of them, a [`Loaded`] the right to read what was filled. Dropping
//! either frees the buffer, so eviction is a drop. Nothing is allocated after [`Buffers::new`].

use super::extent::BLOCK;
use crate::error::{Error, Result};
use crate::platform::memory::{Addr, HUGE_PAGE, Region};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// Buffers of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Class {
    /// Bytes of a buffer; rounded up to [`BLOCK`].
    pub bytes: u64,
    /// Number.
    pub count: u32,
}

/// The region and which of its buffers are free.
#[derive(Debug)]
pub struct Buffers {
    region: Region,
    /// Range of every buffer in the region; buffers of a class are consecutive, the smallest class first.
    places: Vec<Range<usize>>,
    /// By class: buffer size in bytes, and the free buffers.
    free: Mutex<Vec<(u64, Vec<u32>)>>,
}

impl Buffers {
    /// Allocates the memory for all classes.
    ///
    /// # Errors
    /// [`Error::Io`] if the operating system refuses, or the sum exceeds the address space.
    pub fn new(classes: &[Class]) -> Result<Arc<Self>> {
        Self::cut("disk buffers", classes, Region::new)
    }

    /// As [`Buffers::new`], in huge pages where the operating system has them: for data that stays in memory
    /// once it was read. `what` names it in errors.
    ///
    /// # Errors
    /// As [`Buffers::new`].
    pub fn in_huge_pages(what: &'static str, classes: &[Class]) -> Result<Arc<Self>> {
        Self::cut(what, classes, Region::in_huge_pages)
    }

    fn cut(
        what: &'static str,
        classes: &[Class],
        take: impl FnOnce(&'static str, u64) -> Result<Region>,
    ) -> Result<Arc<Self>> {
        let total = Self::bytes_of(classes).ok_or_else(|| {
            let source = std::io::ErrorKind::OutOfMemory.into();
            Error::memory(what, u64::MAX, source)
        })?;
        let mut classes = classes.to_vec();
        classes.sort_by_key(|c| c.bytes);
        // The region checks that the sum fits an address; so every position below it fits, too.
        let region = take(what, total)?;
        let (mut places, mut free, mut at) = (Vec::new(), Vec::new(), 0);
        for class in classes {
            let bytes = class.bytes.next_multiple_of(BLOCK);
            let first = places.len() as u32;
            for _ in 0..class.count {
                places.push(at..at + bytes as usize);
                at += bytes as usize;
            }
            // Taken from the end: the lowest address first.
            free.push((bytes, (first..places.len() as u32).rev().collect()));
        }
        Ok(Arc::new(Self { region, places, free: Mutex::new(free) }))
    }

    /// Bytes that buffers of these classes take; `None` on overflow.
    pub fn bytes_of(classes: &[Class]) -> Option<u64> {
        classes.iter().try_fold(0_u64, |sum, c| {
            c.bytes.checked_next_multiple_of(BLOCK)?.checked_mul(u64::from(c.count))?.checked_add(sum)
        })
    }

    /// A free buffer of at least `bytes` bytes, of the smallest class that has one.
    pub fn take(self: &Arc<Self>, bytes: u64) -> Option<Buffer> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let index = free.iter_mut().filter(|(size, _)| *size >= bytes).find_map(|(_, free)| free.pop())?;
        Some(Buffer { pool: Arc::clone(self), index })
    }

    /// The buffer of an index, if it is free: for callers that track free buffers themselves.
    pub fn claim(self: &Arc<Self>, index: u32) -> Option<Buffer> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        // Searched from the end: callers that track buffers take the one that was freed last.
        let found = |(_, free): &mut (u64, Vec<u32>)| {
            let at = free.iter().rposition(|&i| i == index)?;
            Some(free.swap_remove(at))
        };
        let index = free.iter_mut().find_map(found)?;
        Some(Buffer { pool: Arc::clone(self), index })
    }

    /// Free buffers of at least `bytes` bytes.
    pub fn free(&self, bytes: u64) -> usize {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.iter().filter(|(size, _)| *size >= bytes).map(|(_, free)| free.len()).sum()
    }

    /// Buffers in all.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Bytes of the region.
    pub fn bytes(&self) -> usize {
        self.region.bytes()
    }

    /// First byte of the region.
    pub(crate) fn base(&self) -> Addr {
        self.region.base()
    }

    /// Address and size of every buffer, in address order and without gaps.
    #[cfg(target_os = "linux")]
    pub(super) fn places(&self) -> impl Iterator<Item = (Addr, usize)> {
        self.places.iter().map(|p| (self.region.base().plus(p.start), p.len()))
    }

    fn give_back(&self, index: u32) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = self.places.get(index as usize).map_or(0, Range::len) as u64;
        // Two classes may have the same size: then either will do.
        if let Some((_, free)) = free.iter_mut().find(|(size, _)| *size == bytes) {
            free.push(index);
        }
    }
}

/// The right to fill a buffer.
#[derive(Debug)]
pub struct Buffer {
    pool: Arc<Buffers>,
    index: u32,
}

impl Buffer {
    /// Index among the buffers of its region.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// First byte.
    pub fn addr(&self) -> Addr {
        let start = self.pool.places.get(self.index as usize).map_or(0, |p| p.start);
        self.pool.region.base().plus(start)
    }

    /// Size.
    pub fn capacity(&self) -> u64 {
        self.pool.places.get(self.index as usize).map_or(0, Range::len) as u64
    }

    /// Makes the operating system back its first `bytes` bytes with memory now, in huge pages if the region
    /// requests them. The contents do not change.
    pub(crate) fn populate(&mut self, bytes: u64) {
        let Some(place) = self.pool.places.get(self.index as usize) else { return };
        let bytes = bytes.min(place.len() as u64).next_multiple_of(BLOCK) as usize;
        if !self.pool.region.populate(place.start, bytes) {
            for at in (0..bytes).step_by(HUGE_PAGE) {
                let first = self.addr().plus(at).ptr();
                // SAFETY: the byte is in the buffer, which `self` has the right to fill.
                unsafe { first.write_volatile(first.read_volatile()) };
            }
        }
    }

    /// Whether it belongs to this region.
    pub fn is_of(&self, pool: &Arc<Buffers>) -> bool {
        Arc::ptr_eq(&self.pool, pool)
    }

    /// Bytes of the buffer; empty if the range is outside of it.
    ///
    /// # Safety
    /// Nothing writes to them while the result lives.
    pub(super) unsafe fn slice(&self, range: Range<u64>) -> &[u8] {
        if range.start > range.end || range.end > self.capacity() {
            return &[];
        }
        let at = self.addr().plus(range.start as usize).ptr();
        // SAFETY: the range was checked to be inside the buffer, whose memory the pool holds and has zeroed
        // at first. The caller guarantees that nothing writes to it.
        unsafe { std::slice::from_raw_parts(at, (range.end - range.start) as usize) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.pool.give_back(self.index);
    }
}

/// A buffer that was filled; nothing writes to it any more.
#[derive(Debug)]
pub struct Loaded {
    buffer: Buffer,
    bytes: u64,
}

impl Loaded {
    /// The caller guarantees that no read into the buffer is in flight.
    pub(super) fn new(buffer: Buffer, bytes: u64) -> Self {
        Self { buffer, bytes }
    }

    /// First byte.
    pub fn addr(&self) -> Addr {
        self.buffer.addr()
    }

    /// Bytes that were read: the extents in their order, each at the next multiple of [`BLOCK`].
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the buffer is held here, and a scheduler hands it out only when no read fills it.
        unsafe { self.buffer.slice(0..self.bytes) }
    }

    /// The buffer, for the next read.
    pub fn into_buffer(self) -> Buffer {
        self.buffer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_disjoint() {
        let pool = Buffers::new(&[Class { bytes: 10_000, count: 2 }, Class { bytes: 1, count: 3 }]).unwrap();
        assert_eq!((pool.len(), pool.bytes()), (5, 2 * 12_288 + 3 * 4096));
        let taken: Vec<_> = std::iter::from_fn(|| pool.take(1)).collect();
        let mut ranges: Vec<_> =
            taken.iter().map(|b| (b.addr().ptr() as usize, b.capacity() as usize)).collect();
        ranges.sort_unstable();
        assert_eq!(ranges.len(), 5);
        assert!(ranges.iter().all(|(at, _)| at.is_multiple_of(4096)));
        assert!(ranges.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0));
    }

    #[test]
    fn smallest_fitting_buffer_is_taken_and_returned() {
        let pool = Buffers::new(&[Class { bytes: 4096, count: 1 }, Class { bytes: 8192, count: 1 }]).unwrap();
        assert_eq!((pool.free(1), pool.free(4097), pool.free(8193)), (2, 1, 0));
        let small = pool.take(100).unwrap();
        assert_eq!(small.capacity(), 4096);
        let large = pool.take(100).unwrap();
        assert_eq!(large.capacity(), 8192);
        assert!(pool.take(1).is_none());
        drop(large);
        assert!(pool.take(8193).is_none());
        assert_eq!(pool.take(8192).unwrap().capacity(), 8192);
        drop(small);
        assert_eq!(pool.free(1), 2);
    }

    #[test]
    fn a_buffer_is_claimed_once() {
        let pool = Buffers::new(&[Class { bytes: 1, count: 3 }, Class { bytes: 8192, count: 1 }]).unwrap();
        let taken = [3, 1].map(|i| pool.claim(i).unwrap());
        assert_eq!(taken.each_ref().map(Buffer::index), [3, 1]);
        assert!(pool.claim(1).is_none() && pool.claim(9).is_none());
        drop(taken);
        assert_eq!(pool.claim(1).unwrap().capacity(), 4096);
        assert_eq!(pool.free(1), 4);
    }

    #[test]
    fn excessive_buffer_request_is_an_error() {
        assert!(Buffers::new(&[Class { bytes: u64::MAX, count: 2 }]).is_err());
        assert!(Buffers::new(&[Class { bytes: 1 << 62, count: 1 }]).is_err());
        assert!(Buffers::new(&[]).unwrap().take(0).is_none());
    }
}
