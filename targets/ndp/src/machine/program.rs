//! Streams that may be executed.

use super::fault::Fault;
use moec_ndp_isa::Stream;

/// A stream that the verifier has accepted. Its text and binary form are those of [`Program::stream`].
#[derive(Clone, Debug, PartialEq)]
pub struct Program(Stream);

impl Program {
    /// Has a stream verified.
    ///
    /// # Errors
    /// [`Fault::Stream`].
    pub fn new(stream: Stream) -> Result<Self, Fault> {
        match moec_ndp_isa::verify(&stream) {
            Ok(()) => Ok(Self(stream)),
            Err(fault) => Err(Fault::Stream { stream: stream.name, what: fault.to_string() }),
        }
    }

    /// The stream.
    pub const fn stream(&self) -> &Stream {
        &self.0
    }
}
