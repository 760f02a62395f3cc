//! What is said between the caller and the process: requests, answers, and how they are framed.

use crate::call::{BinaryInfo, GraphInfo};
use crate::error::Error;
use crate::graph::GraphSpec;
use bincode::{Decode, Encode};
use std::io::{self, Read, Write};
use std::path::PathBuf;

/// Longest message that is read: the other side may have written over its own memory.
const LONGEST: u64 = 1 << 33;

/// What is asked.
#[derive(Debug, Encode, Decode)]
pub(super) enum Request {
    /// First of all: load the library from a folder, for the chip of that number, with a context that shares weights or not.
    Open { folder: PathBuf, model: u32, share: bool },
    /// Add a graph and compile it.
    Compose(GraphSpec),
    /// Add the graphs of a DLC and compile them.
    ComposeDlc(PathBuf),
    /// Take a context binary for the context, which is empty.
    Load(Vec<u8>),
    /// Execute the graph of that number.
    Execute { graph: u32, inputs: Vec<Vec<u8>> },
    /// Give the context binary.
    Binary,
    /// Describe a context binary.
    Info(Vec<u8>),
    /// Write a graph as DLC.
    WriteDlc { spec: GraphSpec, path: PathBuf },
}

impl Request {
    /// What an error says was asked.
    pub(super) fn doing(&self) -> &'static str {
        match self {
            Self::Open { .. } => "load the library",
            Self::Compose(_) => "compile a graph",
            Self::ComposeDlc(_) => "compile a DLC",
            Self::Load(_) => "load a context binary",
            Self::Execute { .. } => "execute a graph",
            Self::Binary => "save a context binary",
            Self::Info(_) => "describe a context binary",
            Self::WriteDlc { .. } => "write a DLC",
        }
    }
}

/// What is answered.
#[derive(Debug, Encode, Decode)]
pub(super) enum Answer {
    /// It is done.
    Done,
    /// The version of the library.
    Opened(String),
    /// New graphs, numbered on.
    Graphs(Vec<GraphInfo>),
    /// What a graph's outputs hold.
    Outputs(Vec<Vec<u8>>),
    /// A context binary.
    Binary(Vec<u8>),
    /// A description.
    Info(BinaryInfo),
    /// It cannot be done.
    Failed(Error),
}

impl Answer {
    /// What an error says was answered.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Done => "that it is done",
            Self::Opened(_) => "a version",
            Self::Graphs(_) => "graphs",
            Self::Outputs(_) => "outputs",
            Self::Binary(_) => "a context binary",
            Self::Info(_) => "a description",
            Self::Failed(_) => "an error",
        }
    }
}

/// Writes a message.
pub(super) fn send(to: &mut impl Write, message: &impl Encode) -> io::Result<()> {
    let bytes = bincode::encode_to_vec(message, bincode::config::standard()).map_err(io::Error::other)?;
    to.write_all(&(bytes.len() as u64).to_le_bytes())?;
    to.write_all(&bytes)?;
    to.flush()
}

/// Reads a message; none if there are no more.
pub(super) fn receive<T: Decode<()>>(from: &mut impl Read) -> io::Result<Option<T>> {
    let mut head = [0u8; 8];
    let mut first = 0;
    while first < head.len() {
        match from.read(&mut head[first..]) {
            Ok(0) if first == 0 => return Ok(None),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => first += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    let len = u64::from_le_bytes(head);
    if len > LONGEST {
        return Err(io::Error::other(format!("a message of {len} bytes")));
    }
    let mut bytes = Vec::new();
    if from.take(len).read_to_end(&mut bytes)? as u64 != len {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let (message, read) =
        bincode::decode_from_slice(&bytes, bincode::config::standard()).map_err(io::Error::other)?;
    if read == bytes.len() { Ok(Some(message)) } else { Err(io::Error::other("bytes behind a message")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_is_sent_is_received() {
        let mut wire = Vec::new();
        send(&mut wire, &Request::Execute { graph: 3, inputs: vec![vec![1, 2], vec![]] }).unwrap();
        send(&mut wire, &Request::Binary).unwrap();
        let mut from = wire.as_slice();
        let first = receive(&mut from).unwrap();
        assert!(
            matches!(first, Some(Request::Execute { graph: 3, inputs }) if inputs == [vec![1, 2], vec![]])
        );
        assert!(matches!(receive(&mut from).unwrap(), Some(Request::Binary)));
        assert!(receive::<Request>(&mut from).unwrap().is_none());
    }

    proptest! {
        #[test]
        fn damaged_messages_are_errors(
            keep in 0usize..64, at in 0usize..64, value: u8, fill in prop::collection::vec(any::<u8>(), 0..32)
        ) {
            let mut wire = Vec::new();
            let answer = Answer::Failed(Error::Io { path: "a".into(), why: "b".into() });
            send(&mut wire, &answer).unwrap();
            if let Some(byte) = wire.get_mut(at) {
                *byte = value;
            }
            wire.truncate(keep);
            wire.extend(fill);
            // Whatever comes, it is a message, the end, or an error: nothing panics or takes memory without bound.
            let _ = receive::<Answer>(&mut wire.as_slice());
        }
    }
}
