//! Messages between a worker process and its owner.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Maximum number of bytes of a message: a vocabulary is the longest.
const MESSAGE: u64 = 1 << 30;

/// A connection of messages, each preceded by its length.
#[derive(Debug)]
pub(crate) struct Link(pub(crate) UnixStream);

impl Link {
    /// Sends a message.
    ///
    /// # Errors
    /// Those of the connection.
    pub(crate) fn send(&mut self, message: &[u8]) -> io::Result<()> {
        let length = u64::try_from(message.len()).map_err(io::Error::other)?;
        self.0.write_all(&[&length.to_le_bytes(), message].concat())
    }

    /// Receives a message.
    ///
    /// # Errors
    /// Those of the connection; it has ended, or is silent for too long.
    pub(crate) fn receive(&mut self) -> io::Result<Vec<u8>> {
        let mut length = [0; 8];
        self.0.read_exact(&mut length)?;
        let length = u64::from_le_bytes(length);
        let mut message = Vec::new();
        if length > MESSAGE || (&self.0).take(length).read_to_end(&mut message)? as u64 != length {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        Ok(message)
    }

    /// Sends a reply: the result, or the reason that there is none.
    pub(crate) fn reply(&mut self, reply: Result<Vec<u8>, String>) -> io::Result<()> {
        let (status, bytes) = reply.map_or_else(|why| (1, why.into_bytes()), |bytes| (0, bytes));
        self.send(&[&[status], &*bytes].concat())
    }

    /// Receives a reply, within `timeout`. The worker's own limits usually end it earlier.
    ///
    /// # Errors
    /// As [`Link::receive`].
    pub(crate) fn receive_reply(&mut self, timeout: Duration) -> io::Result<Result<Vec<u8>, String>> {
        self.0.set_read_timeout(Some(timeout))?;
        let mut message = self.receive()?;
        match message.first() {
            Some(0) => Ok(Ok(message.split_off(1))),
            Some(_) => Ok(Err(String::from_utf8_lossy(&message[1..]).into_owned())),
            None => Err(ErrorKind::InvalidData.into()),
        }
    }
}
