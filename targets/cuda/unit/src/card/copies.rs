//! Copies over the link, by way of two pinned buffers in turn.

use super::{BUFFERS, Card, Result, STAGED, check};
use crate::api::DevicePtr;
use std::ptr;
use std::time::{Duration, Instant};

impl Card {
    /// Begins to copy to the card; kernels that are launched from now on wait for it.
    ///
    /// # Safety
    /// So many bytes are at both ends, and nobody changes those that are read before this returns.
    ///
    /// # Errors
    /// What the driver refuses; `CUDA_ERROR_NOT_READY` where a copy takes longer than `limit`.
    pub unsafe fn put(
        &mut self,
        from: *const u8,
        to: DevicePtr,
        bytes: usize,
        limit: Duration,
    ) -> Result<()> {
        self.current()?;
        self.flush()?;
        // What kernels still read there.
        self.behind(self.copies, self.compute)?;
        for (i, at) in (0..bytes).step_by(STAGED).enumerate() {
            let (count, buffer) = (STAGED.min(bytes - at), self.staged[i % BUFFERS]);
            self.passed(buffer.done, limit)?;
            // SAFETY: the caller's promise; the pinned buffer has as many bytes, and the copy that used it has ended.
            let status = unsafe {
                ptr::copy_nonoverlapping(from.add(at), buffer.at.cast(), count);
                (self.api.copy_in)(to + at as u64, buffer.at, count, self.copies)
            };
            check(&self.api, "cuMemcpyHtoDAsync", status)?;
            self.record(buffer.done, self.copies)?;
        }
        self.behind(self.compute, self.copies)
    }

    /// Copies from the card, behind the kernels that were launched.
    ///
    /// # Safety
    /// So many bytes are at both ends, and nobody uses those that are written.
    ///
    /// # Errors
    /// As [`Self::put`].
    pub unsafe fn get(&mut self, from: DevicePtr, to: *mut u8, bytes: usize, limit: Duration) -> Result<()> {
        self.current()?;
        self.flush()?;
        self.behind(self.copies, self.compute)?;
        let pieces: Vec<usize> = (0..bytes).step_by(STAGED).collect();
        let count = |at: usize| STAGED.min(bytes - at);
        let begin = |card: &Self, i: usize| {
            let Some(&at) = pieces.get(i) else { return Ok(()) };
            let buffer = card.staged[i % BUFFERS];
            card.passed(buffer.done, limit)?;
            // SAFETY: the pinned buffer has as many bytes, and was emptied.
            let status = unsafe { (card.api.copy_out)(buffer.at, from + at as u64, count(at), card.copies) };
            check(&card.api, "cuMemcpyDtoHAsync", status)?;
            card.record(buffer.done, card.copies)
        };
        begin(self, 0)?;
        for (i, &at) in pieces.iter().enumerate() {
            begin(self, i + 1)?;
            let buffer = self.staged[i % BUFFERS];
            self.passed(buffer.done, limit)?;
            // SAFETY: the caller's promise; the copy has ended.
            unsafe { ptr::copy_nonoverlapping(buffer.at.cast::<u8>(), to.add(at), count(at)) };
        }
        Ok(())
    }

    /// Copies a pinned buffer so many times, or as much of it as the memory has room for, and waits: what the link does at best. `to`: to
    /// the card, else from it. Gives the bytes of all copies, and how long they took.
    ///
    /// # Errors
    /// As [`Self::put`].
    pub fn link(&mut self, to: bool, times: usize, limit: Duration) -> Result<(usize, Duration)> {
        self.current()?;
        let (at, all) = self.memory.unwrap_or_default();
        let bytes = all.min(STAGED);
        let start = Instant::now();
        for i in 0..times {
            let buffer = self.staged[i % BUFFERS].at;
            // SAFETY: both ends have as many bytes, and nobody else uses them.
            let (name, status) = unsafe {
                if to {
                    ("cuMemcpyHtoDAsync", (self.api.copy_in)(at, buffer, bytes, self.copies))
                } else {
                    ("cuMemcpyDtoHAsync", (self.api.copy_out)(buffer, at, bytes, self.copies))
                }
            };
            check(&self.api, name, status)?;
        }
        self.ended(self.copies, limit)?;
        Ok((bytes * times, start.elapsed()))
    }
}
