//! Copies over the link: a stream, and two pinned buffers that its copies use alternately. One is filled or
//! emptied while the other is copied.

use super::{GpuDevice, Result, check, poll};
use crate::api::{Api, DevicePtr, Handle};
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Bytes of a pinned buffer.
const STAGED: usize = 4 << 20;
/// Pinned buffers.
const BUFFERS: usize = 2;
/// Streams do not wait for the one that belongs to every context.
pub(super) const NON_BLOCKING: u32 = 1;
/// Events take no times.
pub(super) const NO_TIMES: u32 = 2;

/// A pinned buffer.
#[derive(Clone, Copy)]
struct Buffer {
    at: *mut c_void,
    /// After the last copy that uses it.
    done: Handle,
}

/// A stream of copies. It is given back before its GPU.
pub(crate) struct CopyStream {
    api: Api,
    context: Handle,
    stream: Handle,
    staged: [Buffer; BUFFERS],
    /// The GPU's [`GpuDevice::hangs`].
    hangs: Arc<AtomicBool>,
}

// SAFETY: handles of the driver may be used by any thread that has made the context its own, which every
// function below does; the owner of a copy stream uses it alone.
unsafe impl Send for CopyStream {}

impl CopyStream {
    /// Creates a stream without resources, for a GPU that is being opened.
    pub(super) fn closed(api: &Api, hangs: &Arc<AtomicBool>) -> Self {
        let staged = [Buffer { at: ptr::null_mut(), done: ptr::null_mut() }; BUFFERS];
        let (context, stream) = (ptr::null_mut(), ptr::null_mut());
        Self { api: *api, context, stream, staged, hangs: Arc::clone(hangs) }
    }

    /// Creates the stream's resources in a context.
    pub(super) fn open(&mut self, context: Handle) -> Result<()> {
        let api = self.api;
        self.context = context;
        self.current()?;
        // SAFETY: every address is of a variable that lives as long as the call.
        unsafe {
            check(&api, "cuStreamCreate", (api.stream_create)(&raw mut self.stream, NON_BLOCKING))?;
            for buffer in &mut self.staged {
                check(&api, "cuMemHostAlloc", (api.host_alloc)(&raw mut buffer.at, STAGED, 0))?;
                check(&api, "cuEventCreate", (api.event_create)(&raw mut buffer.done, NO_TIMES))?;
            }
        }
        Ok(())
    }

    /// Releases the stream's resources; a second call does nothing.
    pub(super) fn free(&mut self) {
        // Freeing memory of a copy waits for it, and for the kernels before it.
        let freed = !self.hangs.load(Ordering::Relaxed) && !self.context.is_null() && self.current().is_ok();
        let stream = std::mem::replace(&mut self.stream, ptr::null_mut());
        if freed && !stream.is_null() {
            // SAFETY: it is this copy stream's own and used no more.
            unsafe { (self.api.stream_destroy)(stream) };
        }
        for buffer in &mut self.staged {
            let done = std::mem::replace(&mut buffer.done, ptr::null_mut());
            let at = std::mem::replace(&mut buffer.at, ptr::null_mut());
            // SAFETY: as above; objects that were not created are not released.
            unsafe {
                if freed && !done.is_null() {
                    (self.api.event_destroy)(done);
                }
                if freed && !at.is_null() {
                    (self.api.host_free)(at);
                }
            }
        }
    }

    /// Makes the context that of the calling thread.
    fn current(&self) -> Result<()> {
        // SAFETY: the context is the GPU's, which outlives this.
        check(&self.api, "cuCtxSetCurrent", unsafe { (self.api.context_set)(self.context) })
    }

    pub(super) fn stream(&self) -> Handle {
        self.stream
    }

    fn record(&self, event: Handle) -> Result<()> {
        // SAFETY: stream and event are this copy stream's own.
        check(&self.api, "cuEventRecord", unsafe { (self.api.event_record)(event, self.stream) })
    }

    /// Waits for an event; one that was never recorded has passed.
    fn passed(&self, event: Handle, limit: Duration) -> Result<()> {
        // SAFETY: the event is this copy stream's own.
        poll(&self.api, "cuEventQuery", limit, &self.hangs, || unsafe { (self.api.event_query)(event) })
    }

    /// Waits for all copies.
    pub(crate) fn wait(&self, limit: Duration) -> Result<()> {
        // SAFETY: the stream is this copy stream's own.
        poll(&self.api, "cuStreamQuery", limit, &self.hangs, || unsafe {
            (self.api.stream_query)(self.stream)
        })
    }

    /// Begins to copy to the GPU. The source may be changed as soon as this returns, though the copy is not
    /// complete.
    ///
    /// # Safety
    /// Both ends must have this many bytes, and the source must not change before this returns.
    ///
    /// # Errors
    /// Fails if the driver does; `CUDA_ERROR_NOT_READY` if a copy takes longer than `limit`.
    pub(crate) unsafe fn put(
        &self,
        from: *const u8,
        to: DevicePtr,
        bytes: usize,
        limit: Duration,
    ) -> Result<()> {
        self.current()?;
        for (i, at) in (0..bytes).step_by(STAGED).enumerate() {
            let (count, buffer) = (STAGED.min(bytes - at), self.staged[i % BUFFERS]);
            self.passed(buffer.done, limit)?;
            // SAFETY: the caller's promise; the pinned buffer has as many bytes, and the copy that used it
            // has ended.
            let status = unsafe {
                ptr::copy_nonoverlapping(from.add(at), buffer.at.cast(), count);
                (self.api.copy_in)(to + at as u64, buffer.at, count, self.stream)
            };
            check(&self.api, "cuMemcpyHtoDAsync", status)?;
            self.record(buffer.done)?;
        }
        Ok(())
    }

    /// Copies from the GPU.
    ///
    /// # Safety
    /// Both ends must have this many bytes, and the destination must not be used.
    ///
    /// # Errors
    /// As [`Self::put`].
    pub(crate) unsafe fn get(
        &self,
        from: DevicePtr,
        to: *mut u8,
        bytes: usize,
        limit: Duration,
    ) -> Result<()> {
        self.current()?;
        let pieces: Vec<usize> = (0..bytes).step_by(STAGED).collect();
        let count = |at: usize| STAGED.min(bytes - at);
        let begin = |i: usize| {
            let Some(&at) = pieces.get(i) else { return Ok(()) };
            let buffer = self.staged[i % BUFFERS];
            self.passed(buffer.done, limit)?;
            // SAFETY: the pinned buffer has as many bytes, and was emptied.
            let status = unsafe { (self.api.copy_out)(buffer.at, from + at as u64, count(at), self.stream) };
            check(&self.api, "cuMemcpyDtoHAsync", status)?;
            self.record(buffer.done)
        };
        begin(0)?;
        for (i, &at) in pieces.iter().enumerate() {
            begin(i + 1)?;
            let buffer = self.staged[i % BUFFERS];
            self.passed(buffer.done, limit)?;
            // SAFETY: the caller's promise; the copy has ended.
            unsafe { ptr::copy_nonoverlapping(buffer.at.cast::<u8>(), to.add(at), count(at)) };
        }
        Ok(())
    }

    /// Copies a pinned buffer `times` times, or as much of it as there are bytes at `at`, and waits.
    fn link(
        &self,
        to: bool,
        times: usize,
        [at, all]: [u64; 2],
        limit: Duration,
    ) -> Result<(usize, Duration)> {
        self.current()?;
        let bytes = STAGED.min(usize::try_from(all).unwrap_or(STAGED));
        let start = Instant::now();
        for i in 0..times {
            let buffer = self.staged[i % BUFFERS].at;
            // SAFETY: both ends have as many bytes, and nothing else uses them.
            let (name, status) = unsafe {
                if to {
                    ("cuMemcpyHtoDAsync", (self.api.copy_in)(at, buffer, bytes, self.stream))
                } else {
                    ("cuMemcpyDtoHAsync", (self.api.copy_out)(buffer, at, bytes, self.stream))
                }
            };
            check(&self.api, name, status)?;
        }
        self.wait(limit)?;
        Ok((bytes * times, start.elapsed()))
    }
}

impl Drop for CopyStream {
    fn drop(&mut self) {
        self.free();
    }
}

impl GpuDevice {
    /// Another stream of copies.
    ///
    /// # Errors
    /// Fails if the driver does.
    pub(crate) fn copy_stream(&self) -> Result<CopyStream> {
        let mut copies = CopyStream::closed(&self.api, &self.hangs);
        copies.open(self.context)?;
        Ok(copies)
    }

    fn wait_for_kernels(&mut self, copies: Handle) -> Result<()> {
        self.current()?;
        self.flush()?;
        self.order_after(copies, self.compute)
    }

    /// Begins to copy to the GPU, after the kernels until now; kernels that are launched from now on wait for
    /// it.
    ///
    /// # Safety
    /// Both ends must have this many bytes, and the source must not change before this returns.
    ///
    /// # Errors
    /// Fails if the driver does; `CUDA_ERROR_NOT_READY` if a copy takes longer than `limit`.
    pub unsafe fn put(
        &mut self,
        from: *const u8,
        to: DevicePtr,
        bytes: usize,
        limit: Duration,
    ) -> Result<()> {
        self.wait_for_kernels(self.copies.stream())?;
        // SAFETY: the caller's promise.
        unsafe { self.copies.put(from, to, bytes, limit) }?;
        self.order_after(self.compute, self.copies.stream())
    }

    /// Copies from the GPU, after the kernels that were launched.
    ///
    /// # Safety
    /// Both ends must have this many bytes, and the destination must not be used.
    ///
    /// # Errors
    /// As [`Self::put`].
    pub unsafe fn get(&mut self, from: DevicePtr, to: *mut u8, bytes: usize, limit: Duration) -> Result<()> {
        self.wait_for_kernels(self.copies.stream())?;
        // SAFETY: the caller's promise.
        unsafe { self.copies.get(from, to, bytes, limit) }
    }

    /// Copies a pinned buffer `times` times, or as much of it as the memory has room for, and waits: the best
    /// rate of the link. `to`: to the GPU, else from it. Gives the bytes of all copies, and their time.
    ///
    /// # Errors
    /// As [`Self::put`].
    pub fn measure_link(&mut self, to: bool, times: usize, limit: Duration) -> Result<(usize, Duration)> {
        let (at, all) = self.memory.unwrap_or_default();
        self.copies.link(to, times, [at, all as u64], limit)
    }
}
