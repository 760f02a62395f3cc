//! Messages between two hosts, whole and in order.

use moec_runtime::{Error, Result};
use std::fmt::Debug;
use std::time::Duration;

/// Kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tag {
    /// Commands to a host.
    Commands,
    /// Its answer.
    Answer,
    /// A sign that it still works.
    Alive,
}

impl Tag {
    /// Number in MPI.
    pub const fn number(self) -> i32 {
        self as i32 + 1
    }
}

/// Connection of this host to all others.
pub trait Wire: Debug + Send + Sync {
    /// Index of this host; the first is 0.
    fn rank(&self) -> usize;

    /// Number of hosts.
    fn hosts(&self) -> usize;

    /// Sends a message. If the other host does not take it in this time, the job ends: what carries the message may
    /// still read it.
    ///
    /// # Errors
    /// A host that cannot be reached.
    fn send(&self, to: usize, tag: Tag, bytes: &[u8], wait: Duration) -> Result<()>;

    /// Receives the next message of a kind in place of `message`, waiting at most so long; false if none came. Callers
    /// use the same vector again: new pages take more time than the copy.
    ///
    /// # Errors
    /// A host that cannot be reached.
    fn receive(&self, from: usize, tag: Tag, wait: Duration, message: &mut Vec<u8>) -> Result<bool>;

    /// Ends the processes of all hosts, and says why.
    fn end_job(&self, why: &Error) -> !;
}
