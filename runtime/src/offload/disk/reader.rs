//! Interface of readers: one attempt to read one block.

use crate::error::Result;
use crate::platform::memory::Addr;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// One read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Read {
    /// Token that the result carries.
    pub token: u64,
    /// Index of the file.
    pub file: u32,
    /// Offset in the file, a multiple of 4096.
    pub offset: u64,
    /// Bytes, a multiple of 4096. May reach past the end of the file.
    pub bytes: u32,
    /// Destination, aligned to 4096 bytes.
    pub at: Addr,
    /// Index of the buffer that they go to.
    pub buffer: u32,
}

/// The answer to a [`Read`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadResult {
    /// Token of the read.
    pub token: u64,
    /// Bytes read from the front of the range, or the operating system's error number.
    pub result: Result<u32, i32>,
}

/// Reads blocks, many at a time. Makes one attempt for each and reports the result.
pub trait Reader: Send {
    /// Most reads in flight.
    fn depth(&self) -> usize;

    /// Starts reads. Each ends in exactly one [`ReadResult`].
    ///
    /// # Errors
    /// The reader is broken and must be dropped. Some of the reads may have been started.
    ///
    /// # Safety
    /// The bytes of every read belong to a buffer of the reader's [`Buffers`](super::Buffers), and nothing
    /// else accesses them before its [`ReadResult`] was returned. No more than [`Reader::depth`] are in
    /// flight.
    unsafe fn submit(&mut self, reads: &[Read]) -> io::Result<()>;

    /// Waits until a read has ended, [`Wake::wake`] was called, or `at_most` is over (`None`: no limit).
    /// Appends all reads that have ended; may return early without any.
    ///
    /// # Errors
    /// The reader is broken and must be dropped.
    fn wait(&mut self, done: &mut Vec<ReadResult>, at_most: Option<Duration>) -> io::Result<()>;

    /// Ends a [`Reader::wait`] from another thread.
    fn waker(&self) -> Arc<dyn Wake>;

    /// Name, for users.
    fn describe(&self) -> String;
}

/// Ends a [`Reader::wait`], the present or the next one.
pub trait Wake: Send + Sync {
    /// Ends the wait.
    fn wake(&self);
}
