//! Saved prompts: the ids of a prompt and what the states hold of it, in a file.
//!
//! A file belongs to one build: it names the SHA-256 of the encoded plan, which holds the hashes of all weights. It is read as
//! untrusted input: how long it must be follows from the plan and its number of tokens, and is compared before anything else is
//! read; a SHA-256 of everything stands at its end, and until it was compared the slot holds nothing. What states hold are numbers
//! that are only computed with, never places: other numbers give other tokens, and nothing worse.
//!
//! | bytes | what |
//! |---|---|
//! | 8 | `moecsave` |
//! | 4 | version of this form, 2 |
//! | 32 | SHA-256 of the plan |
//! | 8 | tokens |
//! | 8 | of rings, the position after the furthest that was written; else the tokens |
//! | 8 | snapshots |
//! | 4 each | ids |
//! | 8 each | positions of the snapshots, ascending and before the end |
//! | as many as the plan says | what the states hold, in the plan's order, head by head |
//! | as many as the plan says, for each snapshot | what it holds, in the plan's order |
//! | 32 | SHA-256 of all before |
//!
//! Numbers are little-endian.

use crate::bundle::program::Program;
use crate::error::{Error, Hex, Result};
use crate::exec::engine::{Engine, long_rope_threshold};
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

/// A saved prompt that has been opened: its head fits this plan, and its ids are the vocabulary's. What its states hold is still
/// to be read.
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

/// The hash by which a plan, and with it its weights, is known.
fn plan_hash(plan: &Plan) -> Result<[u8; 32]> {
    let bytes = plan.encode().map_err(Error::plan)?;
    Ok(Sha256::digest(&bytes).into())
}

/// Writes what a slot holds to `path`: `ids` are its tokens. The file appears whole or not at all, and replaces another. Gives its
/// size in bytes.
///
/// # Errors
/// [`Error::State`] for what another unit keeps, and after a call that failed; [`Error::Request`] for ids that are not as many as
/// the slot's tokens; [`Error::Io`].
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

/// A file is not a saved prompt, or a damaged one.
fn unusable(path: &Path, why: &str) -> Error {
    Error::file(path, format!("is not a saved prompt that can be used: {why}"))
        .with_hint("give a file that `--save-prompt` has written, or write it again")
}

/// The number that bytes begin with.
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
    /// Opens a file and reads its head and its ids.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::BadFile`] for what is no such file, is of another version or another bundle, or is too short.
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

    /// The long-RoPE threshold, if a prompt of `tokens` is on its other side: then all of its positions have other angles, and nothing
    /// that is saved can be used.
    pub fn crossed_long_rope_threshold(&self, tokens: usize) -> Option<usize> {
        self.long_rope_threshold.filter(|&threshold| (self.ids.len() > threshold) != (tokens > threshold))
    }

    /// Number of the first tokens of `prompt` that it holds, the last token left aside: its logits are not saved, so that one token
    /// is always to be computed.
    pub fn shared_with(&self, prompt: &[u32]) -> usize {
        if self.crossed_long_rope_threshold(prompt.len()).is_some() {
            return 0;
        }
        let same = self.ids.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        same.min(prompt.len().saturating_sub(1))
    }

    /// Makes a slot what it was when it was saved.
    ///
    /// # Errors
    /// [`Error::State`] for what another unit keeps; [`Error::BadFile`] for a file of another length than the plan's states have, or
    /// with another hash; [`Error::Io`]. The slot holds nothing then.
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
        engine.states.restore(slot, ids.len(), written, &snapshots, &mut |part| {
            file.read_exact(part).map_err(failed)?;
            hash.update(part);
            Ok(())
        })?;
        let mut said = Sha::default();
        let right = file.read_exact(&mut said).map_err(failed).and_then(|()| {
            let same = *hash.finalize() == said;
            if same { Ok(()) } else { Err(wrong("its content is not what was saved")) }
        });
        if right.is_err() {
            engine.reset(slot)?;
        }
        right
    }
}

/// Writes, sums up and counts.
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

    /// Writes the hash of all before, and gives the number of bytes.
    fn finish(mut self) -> io::Result<u64> {
        self.out.write_all(&self.hash.finalize())?;
        self.out.flush()?;
        Ok(self.bytes + HASH)
    }
}

/// A file beside the one that it is to become; it goes where it does not become it.
struct Partial {
    file: File,
    path: PathBuf,
}

impl Partial {
    fn create(target: &Path) -> io::Result<Self> {
        let name = target.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        // The number of a process is not enough: in containers it is always the same, and two of them may share a folder.
        hidden.push(format!(".{:016x}.partial", RandomState::new().build_hasher().finish()));
        let path = target.with_file_name(hidden);
        let file = OpenOptions::new().write(true).create_new(true).open(&path)?;
        Ok(Self { file, path })
    }

    /// Puts it in its place.
    fn keep(self, target: &Path) -> io::Result<()> {
        self.file.sync_all()?;
        fs::rename(&self.path, target)
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // After it was kept there is nothing under this name.
        let _ = fs::remove_file(&self.path);
    }
}
