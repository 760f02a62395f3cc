//! Protocol between the caller and the process: requests, answers, and how they are framed.

use crate::call::{BinaryInfo, GraphInfo};
use crate::error::Error;
use crate::graph::GraphSpec;
use bincode::error::DecodeError;
use bincode::{Decode, Encode};
use std::io::{self, Read, Write};
use std::path::PathBuf;

/// Longest message: the other side may have written over its own memory.
const LONGEST: u64 = 1 << 33;

/// Request.
#[derive(Debug, Encode, Decode)]
pub(super) enum Request {
    /// First of all: load the library from a folder, for the chip of that number, with a context that shares
    /// weights or not.
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
    /// Name of the request in errors.
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

/// Answer.
#[derive(Debug, Encode, Decode)]
pub(super) enum Answer {
    /// The request is done.
    Done,
    /// The version of the library.
    Opened(String),
    /// New graphs, numbered on.
    Graphs(Vec<GraphInfo>),
    /// Contents of a graph's outputs.
    Outputs(Vec<Vec<u8>>),
    /// A context binary.
    Binary(Vec<u8>),
    /// A description.
    Info(BinaryInfo),
    /// The request has failed.
    Failed(Error),
}

impl Answer {
    /// Name of the answer in errors.
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

/// A message after its length.
///
/// # Errors
/// It is too long, or has a path that is not UTF-8.
pub(super) fn encode(message: &impl Encode) -> io::Result<Vec<u8>> {
    let mut wire = vec![0; HEAD];
    bincode::encode_into_std_write(message, &mut wire, bincode::config::standard())
        .map_err(io::Error::other)?;
    let len = (wire.len() - HEAD) as u64;
    if len > LONGEST {
        return Err(too_long(len));
    }
    wire[..HEAD].copy_from_slice(&len.to_le_bytes());
    Ok(wire)
}

/// Bytes of a length.
const HEAD: usize = size_of::<u64>();

fn too_long(len: u64) -> io::Error {
    io::Error::other(format!("a message of {len} bytes, and at most {LONGEST} are allowed"))
}

/// Writes what [`encode`] gave.
pub(super) fn send(to: &mut impl Write, wire: &[u8]) -> io::Result<()> {
    to.write_all(wire)?;
    to.flush()
}

/// Reads a message; none if there are no more.
pub(super) fn receive<T: Decode<()>>(from: &mut impl Read) -> io::Result<Option<T>> {
    let mut head = [0u8; HEAD];
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
        return Err(too_long(len));
    }
    let mut bytes = Vec::new();
    if from.take(len).read_to_end(&mut bytes)? as u64 != len {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let (message, read) = decode(&bytes).map_err(io::Error::other)?;
    if read == bytes.len() { Ok(Some(message)) } else { Err(io::Error::other("bytes after a message")) }
}

/// Decodes a message in no more memory than a message of this length can need. Memory is allocated before the
/// bytes that fill it are read, so a damaged length could request any amount. Structures take more room than
/// their encoding, bytes as much.
fn decode<T: Decode<()>>(bytes: &[u8]) -> Result<(T, usize), DecodeError> {
    match bytes.len() as u64 {
        0..KIB => within::<T, { most(64 * KIB) }>(bytes),
        KIB..MIB => within::<T, { most(64 * MIB) }>(bytes),
        MIB..GIB => within::<T, { most(2 * GIB) }>(bytes),
        _ => within::<T, { most(2 * LONGEST) }>(bytes),
    }
}

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// This number of bytes, or the largest number of this machine.
#[expect(clippy::cast_possible_truncation, reason = "compared before; `try_from` is not `const`")]
const fn most(bytes: u64) -> usize {
    if bytes > usize::MAX as u64 { usize::MAX } else { bytes as usize }
}

#[expect(clippy::disallowed_methods, reason = "a limit is set")]
fn within<T: Decode<()>, const LIMIT: usize>(bytes: &[u8]) -> Result<(T, usize), DecodeError> {
    bincode::decode_from_slice(bytes, bincode::config::standard().with_limit::<LIMIT>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn worker_messages_round_trip() {
        let execute = Request::Execute { graph: 3, inputs: vec![vec![1, 2], vec![]] };
        let wire = [encode(&execute).unwrap(), encode(&Request::Binary).unwrap()].concat();
        let mut from = wire.as_slice();
        let first = receive(&mut from).unwrap();
        assert!(
            matches!(first, Some(Request::Execute { graph: 3, inputs }) if inputs == [vec![1, 2], vec![]])
        );
        assert!(matches!(receive(&mut from).unwrap(), Some(Request::Binary)));
        assert!(receive::<Request>(&mut from).unwrap().is_none());
    }

    /// A damaged count of bytes or elements must not allocate that much memory.
    #[test]
    fn declared_message_lengths_are_not_trusted() {
        // Of each variant: one length in a byte, and what follows.
        let outputs = [3, 1];
        let graphs = [2];
        for count in [u64::MAX, 1 << 62, 1 << 40, 1 << 34] {
            for before in [&outputs[..], &graphs] {
                // A length of 64 bits, after its marker byte.
                let message = [before, &[253], &count.to_le_bytes(), &[0; 40]].concat();
                let wire = [&(message.len() as u64).to_le_bytes()[..], &message].concat();
                let why = receive::<Answer>(&mut wire.as_slice()).unwrap_err().to_string();
                assert!(why.contains("LimitExceeded"), "{count} after {before:?}: {why}");
            }
        }
        let wire = (LONGEST + 1).to_le_bytes();
        assert!(receive::<Answer>(&mut wire.as_slice()).is_err_and(|e| e.to_string().contains("at most")));
    }

    /// Decoded messages take more memory than their encoding.
    #[test]
    fn small_messages_of_many_structures_are_received() {
        for n in [1, 400, 1000, 20_000, 200_000] {
            let wire = encode(&Answer::Outputs(vec![Vec::new(); n])).unwrap();
            let found = receive::<Answer>(&mut wire.as_slice()).unwrap();
            assert!(matches!(found, Some(Answer::Outputs(outputs)) if outputs.len() == n));
        }
    }

    #[test]
    fn non_utf8_path_is_not_sent() {
        use std::os::unix::ffi::OsStrExt as _;
        let path = std::ffi::OsStr::from_bytes(b"a\xff").into();
        assert!(encode(&Request::ComposeDlc(path)).is_err());
    }

    proptest! {
        #[test]
        fn damaged_messages_are_errors(
            keep in 0usize..64, at in 0usize..64, value: u8, fill in prop::collection::vec(any::<u8>(), 0..32)
        ) {
            let answer = Answer::Failed(Error::Io { path: "a".into(), why: "b".into() });
            let mut wire = encode(&answer).unwrap();
            if let Some(byte) = wire.get_mut(at) {
                *byte = value;
            }
            wire.truncate(keep);
            wire.extend(fill);
            // Any bytes are a message, the end, or an error: nothing panics, or allocates without bound.
            let _ = receive::<Answer>(&mut wire.as_slice());
        }
    }
}
