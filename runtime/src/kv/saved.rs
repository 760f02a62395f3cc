//! Saved prompts: files with the ids of a prompt and its part of the states.
//!
//! A file belongs to one build: it has the SHA-256 of the encoded plan, which contains the hashes of all
//! weights. It is read as untrusted input. Its expected size follows from the plan and its number of tokens,
//! and is compared before anything else is read. A SHA-256 of all bytes is at its end; the slot stays empty
//! until this was compared. States hold numbers to compute with, never offsets, so wrong numbers can only
//! give wrong tokens.
//!
//! | bytes | content |
//! |---|---|
//! | 8 | `moecsave` |
//! | 4 | version of this format, 2 |
//! | 32 | SHA-256 of the plan |
//! | 8 | tokens |
//! | 8 | position after the furthest one written in rings; without rings the tokens |
//! | 8 | snapshots |
//! | 4 each | ids |
//! | 8 each | positions of the snapshots, ascending and before the end |
//! | by the plan | values of the states, in the plan's order, head by head |
//! | by the plan, for each snapshot | values of the snapshot, in the plan's order |
//! | 32 | SHA-256 of all bytes before |
//!
//! Numbers are little-endian.

use crate::bundle::program::Program;
use crate::error::{Error, Hex, Result};
use crate::exec::engine::{Engine, long_rope_threshold};
use crate::exec::unit::Units;
use crate::platform::regular;
use moec_ir::plan::Plan;
use sha2::{Digest, Sha256};
use std::fs::{self, File, OpenOptions};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 8] = b"moecsave";
const VERSION: u32 = 2;
/// Bytes before the ids.
const HEAD: usize = 8 + 4 + 32 + 8 + 8 + 8;
/// SHA-256.
type Sha = [u8; 32];
/// Bytes of the hash at the end.
const HASH: u64 = size_of::<Sha>() as u64;

/// An opened saved prompt: its header fits this plan, and its ids are within the vocabulary. Its states are
/// not read yet.
#[derive(Debug)]
pub struct Saved {
    path: PathBuf,
    file: File,
    bytes: u64,
    hash: Sha256,
    written: usize,
    /// Long-RoPE threshold of this plan.
    long_rope_threshold: Option<usize>,
    ids: Vec<u32>,
    snapshots: Vec<usize>,
}

/// Hash that identifies a plan, and with it its weights.
fn plan_hash(plan: &Plan) -> Result<[u8; 32]> {
    let bytes = plan.encode().map_err(Error::plan)?;
    Ok(Sha256::digest(&bytes).into())
}

/// Writes the sequence of a slot to `path`: `ids` are its tokens. The file appears complete or not at all,
/// and replaces an existing one. Returns its size in bytes.
///
/// # Errors
/// [`Error::State`] for states in another unit, and after a call that failed; [`Error::Request`] if the
/// number of ids is not that of the slot's tokens; [`Error::Io`].
pub fn save(engine: &Engine<'_>, slot: u32, ids: &[u32], path: &Path) -> Result<u64> {
    if ids.len() != engine.len(slot) || ids.is_empty() {
        return Err(Error::request(format!(
            "slot {slot} does not hold the {} tokens to be saved",
            ids.len()
        )));
    }
    let head = head(engine, slot, ids)?;
    let failed = |source| Error::io("write", path.to_owned(), source);
    let partial = Partial::create(path).map_err(failed)?;
    let mut out = Summed { out: BufWriter::new(&partial.file), hash: Sha256::new(), bytes: 0 };
    out.put(&head).map_err(failed)?;
    for id in ids {
        out.put(&id.to_le_bytes()).map_err(failed)?;
    }
    for pos in engine.states.snapshots(slot) {
        out.put(&(pos as u64).to_le_bytes()).map_err(failed)?;
    }
    engine.states.save(slot, &mut |part| out.put(part).map_err(failed))?;
    let bytes = out.finish().map_err(failed)?;
    partial.keep(path).map_err(failed)?;
    Ok(bytes)
}

/// Error for a file that is not a saved prompt, or is damaged.
fn unusable(path: &Path, why: &str) -> Error {
    Error::file(path, format!("is not a saved prompt that can be used: {why}"))
        .with_hint("give a file that `--save-prompt` has written, or write it again")
}

/// Number at the beginning of `bytes`.
fn word(bytes: &[u8]) -> Option<usize> {
    bytes.first_chunk().and_then(|&word| usize::try_from(u64::from_le_bytes(word)).ok())
}

fn head(engine: &Engine<'_>, slot: u32, ids: &[u32]) -> Result<Vec<u8>> {
    let mut head = Vec::with_capacity(HEAD);
    head.extend_from_slice(MAGIC);
    head.extend_from_slice(&VERSION.to_le_bytes());
    head.extend_from_slice(&plan_hash(engine.program())?);
    head.extend_from_slice(&(ids.len() as u64).to_le_bytes());
    head.extend_from_slice(&(engine.states.written(slot) as u64).to_le_bytes());
    head.extend_from_slice(&(engine.states.snapshots(slot).len() as u64).to_le_bytes());
    Ok(head)
}

impl Saved {
    /// Opens a file and reads its header and its ids.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::BadFile`] for a file that is not a saved prompt, is of another version or
    /// bundle, or is too short.
    pub fn open(path: &Path, program: &Program) -> Result<Self> {
        let failed = |source| Error::io("read", path.to_owned(), source);
        let wrong = |why: &str| unusable(path, why);
        let mut file = regular::open(path).map_err(failed)?;
        let bytes = file.metadata().map_err(failed)?.len();
        if bytes < HEAD as u64 + HASH {
            return Err(wrong("it is too short"));
        }
        let mut head = [0; HEAD];
        file.read_exact(&mut head).map_err(failed)?;
        let (magic, rest) = head.split_at(8);
        let (version, rest) = rest.split_at(4);
        let (found, numbers) = rest.split_at(32);
        if magic != MAGIC {
            return Err(wrong("it does not begin as one"));
        }
        if version != VERSION.to_le_bytes() {
            return Err(wrong("another version of moec wrote it"));
        }
        let expected = plan_hash(program)?;
        if found != expected {
            let mut hash = [0; 32];
            hash.copy_from_slice(found);
            let what = format!(
                "was saved with another bundle: of a plan whose SHA-256 starts with {}, not with {}",
                Hex(&hash),
                Hex(&expected)
            );
            return Err(Error::file(path, what).with_hint(
                "a saved prompt belongs to one build, its weights included; save it again with `--save-prompt`",
            ));
        }
        let max = program.model.max_context as usize;
        let number = |at: usize| numbers.get(at..).and_then(word).filter(|&n| n <= max);
        let (tokens, written) = number(0)
            .zip(number(8))
            .filter(|&(tokens, written)| 0 < tokens && tokens <= written)
            .ok_or_else(|| wrong("its number of tokens cannot be"))?;
        let snapshots = number(16).filter(|&n| n == 0 || (n < tokens && program.snapshots_of_slot() > 0));
        let snapshots = snapshots.ok_or_else(|| wrong("its number of snapshots cannot be"))?;
        let mut raw = vec![0; tokens * 4 + snapshots * 8];
        if bytes - (HEAD as u64 + HASH) < raw.len() as u64 {
            return Err(wrong("it is cut off"));
        }
        file.read_exact(&mut raw).map_err(failed)?;
        let (of_ids, of_snapshots) = raw.split_at(tokens * 4);
        let ids: Vec<u32> =
            of_ids.chunks_exact(4).map(|w| u32::from_le_bytes([w[0], w[1], w[2], w[3]])).collect();
        let snapshots: Vec<usize> = of_snapshots.chunks_exact(8).filter_map(word).collect();
        let ascend = snapshots.iter().chain([&tokens]).is_sorted_by(|a, b| a < b);
        if snapshots.len() * 8 != of_snapshots.len() || !ascend || snapshots.first() == Some(&0) {
            return Err(wrong("its snapshots are not at ascending positions of it"));
        }
        if ids.iter().any(|&id| id >= program.model.vocab) {
            return Err(wrong("one of its ids is outside of the vocabulary"));
        }
        let hash = Sha256::new().chain_update(head).chain_update(&raw);
        let (path, long_rope_threshold) = (path.to_owned(), long_rope_threshold(program));
        Ok(Self { path, file, bytes, hash, written, long_rope_threshold, ids, snapshots })
    }

    /// Tokens of the prompt.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// The long-RoPE threshold, if a prompt of `tokens` tokens is on its other side. All positions then have
    /// other angles, and no saved state can be used.
    pub fn crossed_long_rope_threshold(&self, tokens: usize) -> Option<usize> {
        self.long_rope_threshold.filter(|&threshold| (self.ids.len() > threshold) != (tokens > threshold))
    }

    /// Number of first tokens of `prompt` that are saved here. The prompt's last token does not count: logits
    /// are not saved, so at least one token must be computed.
    pub fn shared_with(&self, prompt: &[u32]) -> usize {
        if self.crossed_long_rope_threshold(prompt.len()).is_some() {
            return 0;
        }
        let same = self.ids.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        same.min(prompt.len().saturating_sub(1))
    }

    /// Restores a slot as it was when it was saved.
    ///
    /// # Errors
    /// [`Error::State`] for states in another unit; [`Error::BadFile`] for a file whose length does not fit
    /// the plan's states, or with another hash; [`Error::Io`]. The slot is empty then.
    pub fn restore(self, engine: &mut Engine<'_>, slot: u32) -> Result<()> {
        let Self { path, mut file, bytes, mut hash, written, long_rope_threshold: _, ids, snapshots } = self;
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::UnexpectedEof => unusable(&path, "it is cut off"),
            _ => Error::io("read", path.clone(), source),
        };
        let wrong = |why: &str| unusable(&path, why);
        let states = engine.states.saved_bytes(slot, ids.len(), snapshots.len())?;
        let read = HEAD as u64 + HASH + 4 * ids.len() as u64 + 8 * snapshots.len() as u64;
        let expected = read.saturating_add(states);
        if bytes != expected {
            return Err(wrong(&format!("it has {bytes} bytes in place of {expected}")));
        }
        let mut read = |part: &mut [u8]| {
            file.read_exact(part).map_err(failed)?;
            hash.update(part);
            Ok(())
        };
        engine.states.restore(slot, ids.len(), written, &snapshots, &mut read, Units(&engine.units))?;
        let mut stored_hash = Sha::default();
        let right = file.read_exact(&mut stored_hash).map_err(failed).and_then(|()| {
            let same = *hash.finalize() == stored_hash;
            if same { Ok(()) } else { Err(wrong("its content is not what was saved")) }
        });
        if right.is_err() {
            engine.reset(slot)?;
        }
        right
    }
}

/// Writer that also hashes and counts the bytes.
struct Summed<W: Write> {
    out: W,
    hash: Sha256,
    bytes: u64,
}

impl<W: Write> Summed<W> {
    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.hash.update(bytes);
        self.bytes += bytes.len() as u64;
        self.out.write_all(bytes)
    }

    /// Writes the hash of all bytes so far, and returns the number of bytes.
    fn finish(mut self) -> io::Result<u64> {
        self.out.write_all(&self.hash.finalize())?;
        self.out.flush()?;
        Ok(self.bytes + HASH)
    }
}

/// A temporary file beside its target; it is removed unless it is renamed to the target.
struct Partial {
    file: File,
    path: PathBuf,
}

impl Partial {
    fn create(target: &Path) -> io::Result<Self> {
        let name = target.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        // A process id is not enough: it may be the same in two containers that share a folder.
        hidden.push(format!(".{:016x}.partial", RandomState::new().build_hasher().finish()));
        let path = target.with_file_name(hidden);
        let file = OpenOptions::new().write(true).create_new(true).open(&path)?;
        Ok(Self { file, path })
    }

    /// Renames it to the target.
    fn keep(self, target: &Path) -> io::Result<()> {
        self.file.sync_all()?;
        fs::rename(&self.path, target)
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // After `keep` there is no file with this name.
        let _ = fs::remove_file(&self.path);
    }
}
