//! Packed weights of earlier bundles, for later builds from the same checkpoint.
//!
//! A build notes in the cache which matrices it packed, their places in its bundle, and a CRC-32C of every
//! block: `packed/CHECKPOINT/BUNDLE.json`, where both names are hashes. A later build, for another target or
//! with other shapes, copies the blocks whose matrices would come out equal. A matrix is known by everything
//! that decides its bytes:
//!
//! | what | why |
//! |---|---|
//! | the checkpoint's files, their sizes, and when they were written | what they hold, without reading them |
//! | this moec's own file | how numbers are rounded |
//! | the expression, format and layout of the weight | which numbers, and how they are stored |
//! | the profile and how it rounds, for grouped formats | which codes are chosen |
//!
//! Nothing depends on it: a block that is not there, or has another checksum, is packed. All of this only
//! saves time, so no failure here is an error.

use super::manifest::Manifest;
use moec_base::cache_dir;
use moec_base::disk;
use moec_base::hashing::{hex, sha256};
use moec_import::Checkpoint;
use moec_ir::Weight;
use moec_ir::plan::Segment;
use moec_runtime::offload::disk::checksum;
use moec_runtime::platform::regular::{self, Limit};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

/// Folder in the cache.
const FOLDER: &str = "packed";
/// Most notes that are kept of one checkpoint; the oldest go.
const MOST_NOTES: usize = 16;
/// Most bytes of a note that is read.
const MOST: Limit = Limit { what: "a note of packed weights", bytes: 256 << 20 };

/// Note of a build about its bundle.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Note {
    /// Folder of the bundle.
    bundle: PathBuf,
    /// Weight files, by their paths in it.
    files: BTreeMap<String, Packed>,
}

/// A weight file.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Packed {
    /// SHA-256 in the manifest's form.
    pub(crate) sha256: String,
    /// Its matrices.
    pub(crate) matrices: Vec<MatrixRecord>,
}

/// A matrix in a weight file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MatrixRecord {
    /// Key of its weight.
    pub(crate) weight: String,
    /// Index of the weight's matrix.
    pub(crate) matrix: usize,
    /// First byte.
    pub(crate) offset: u64,
    /// CRC-32C of its blocks.
    pub(crate) blocks: Vec<u32>,
}

/// A matrix that an earlier bundle has.
struct ReusableMatrix {
    file: Arc<File>,
    offset: u64,
    blocks: Vec<u32>,
}

/// Parts of earlier builds that can be reused.
pub struct Reuse {
    /// Folder of the notes of this checkpoint.
    folder: PathBuf,
    /// Files of the checkpoint when it was opened.
    stamp: String,
    /// Prefix of all keys.
    origin: String,
    /// Further prefix of keys of grouped formats.
    rounding: String,
    known: HashMap<(String, usize), ReusableMatrix>,
}

impl Reuse {
    /// Reusable parts of a checkpoint. `rounding`: the profile and how it rounds grouped formats, if it does.
    /// `None`: there is no cache folder, or the checkpoint cannot be distinguished from another.
    pub(crate) fn of(checkpoint: &Checkpoint, rounding: Option<&str>) -> Option<Self> {
        let stamp = stamp(checkpoint)?;
        let moec = std::env::current_exe().and_then(fs::metadata).ok()?;
        let moec = format!("{} {} {:?}", env!("CARGO_PKG_VERSION"), moec.len(), moec.modified().ok()?);
        let folder = cache_dir::path().ok()?.join(FOLDER).join(short(&stamp));
        let rounding = rounding.unwrap_or_default().to_owned();
        let mut reuse =
            Self { folder, origin: format!("{moec}\n{stamp}"), stamp, rounding, known: HashMap::new() };
        for note in reuse.notes() {
            reuse.add_note(note);
        }
        Some(reuse)
    }

    /// The notes of bundles that are still what they were, the newest first. Others are removed.
    fn notes(&self) -> Vec<Note> {
        let Ok(entries) = fs::read_dir(&self.folder) else { return Vec::new() };
        let mut paths: Vec<(SystemTime, PathBuf)> = entries
            .flatten()
            .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
            .filter(|(_, path)| path.extension().is_some_and(|e| e == "json"))
            .collect();
        paths.sort();
        let mut notes = Vec::new();
        for (_, path) in paths.into_iter().rev() {
            match Note::read(&path).filter(|_| notes.len() < MOST_NOTES) {
                Some(note) => notes.push(note),
                // The first to remove it has done so for all.
                None => drop(fs::remove_file(&path)),
            }
        }
        notes
    }

    fn add_note(&mut self, note: Note) {
        for (path, packed) in note.files {
            let Ok(file) = regular::open(&note.bundle.join(path)) else { continue };
            let file = Arc::new(file);
            for MatrixRecord { weight, matrix, offset, blocks } in packed.matrices {
                let place = || ReusableMatrix { file: Arc::clone(&file), offset, blocks };
                self.known.entry((weight, matrix)).or_insert_with(place);
            }
        }
    }

    /// The key of a weight in a segment.
    pub(crate) fn key(&self, weight: &Weight, segment: &Segment) -> String {
        let Segment { format, layout, shape, .. } = segment;
        let mut text = format!("{}\n{:?} {format:?} {layout:?} {shape:?}", self.origin, weight.expr);
        if format.is_quantised() && !self.rounding.is_empty() {
            let _ = write!(text, " {} {}", weight.name, self.rounding);
        }
        short(&text)
    }

    /// Appends block `block` of a matrix to `out`: `bytes` bytes, `at` bytes after the matrix's first.
    /// Returns false and leaves `out` unchanged if no earlier bundle has it intact.
    pub(crate) fn copy(
        &self,
        matrix: (String, usize),
        block: usize,
        at: u64,
        bytes: usize,
        out: &mut Vec<u8>,
    ) -> bool {
        let Some(place) = self.known.get(&matrix) else { return false };
        let (Some(&sum), Some(offset)) = (place.blocks.get(block), place.offset.checked_add(at)) else {
            return false;
        };
        let start = out.len();
        out.resize(start + bytes, 0);
        let mine = out.get_mut(start..).unwrap_or_default();
        let whole = read_at(&place.file, mine, offset).is_ok() && checksum(mine) == sum;
        if !whole {
            out.truncate(start);
        }
        whole
    }

    /// Records the weights of the bundle at `bundle`. Nothing is recorded if the checkpoint has changed
    /// meanwhile.
    pub(crate) fn note(&self, checkpoint: &Checkpoint, bundle: &Path, files: BTreeMap<String, Packed>) {
        let Ok(bundle) = fs::canonicalize(bundle) else { return };
        if stamp(checkpoint).is_none_or(|now| now != self.stamp) {
            return;
        }
        let path = self.folder.join(format!("{}.json", short(&bundle.to_string_lossy())));
        if let Ok(text) = serde_json::to_string(&Note { bundle, files }) {
            // A cache that is full or cannot be written costs the next build time.
            drop(disk::write_whole(&path, text.as_bytes()));
        }
    }
}

impl Note {
    /// A note whose bundle has exactly the files that the note names, by its manifest.
    fn read(path: &Path) -> Option<Self> {
        let text = regular::read(path, MOST).ok()?;
        let note: Self = serde_json::from_slice(&text).ok()?;
        let manifest = Manifest::read(&note.bundle).ok()?;
        let same = |(path, packed): (&String, &Packed)| {
            manifest.files.get(path).is_some_and(|entry| entry.sha256 == packed.sha256)
        };
        note.files.iter().all(same).then_some(note)
    }
}

/// The files of a checkpoint: where they are, how large, and when they were written.
fn stamp(checkpoint: &Checkpoint) -> Option<String> {
    let mut text = String::new();
    for file in checkpoint.files() {
        let path = fs::canonicalize(&file.path).ok()?;
        let facts = fs::metadata(&path).ok()?;
        let _ = writeln!(
            text,
            "{} {} {:?} {:?}",
            path.display(),
            facts.len(),
            facts.modified().ok()?,
            changed(&facts)
        );
    }
    Some(text)
}

/// Sixteen bytes of a hash, hexadecimal.
fn short(text: &str) -> String {
    let hash = sha256(text.as_bytes());
    hex(hash.get(..16).unwrap_or_default())
}

/// Time of a file's last change of any kind, which no program can set.
#[cfg(unix)]
fn changed(facts: &fs::Metadata) -> (i64, i64, u64) {
    use std::os::unix::fs::MetadataExt as _;
    (facts.ctime(), facts.ctime_nsec(), facts.ino())
}

#[cfg(not(unix))]
fn changed(_: &fs::Metadata) {}

#[cfg(unix)]
fn read_at(file: &File, out: &mut [u8], offset: u64) -> std::io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, out, offset)
}

#[cfg(not(unix))]
fn read_at(_: &File, _: &mut [u8], _: u64) -> std::io::Result<()> {
    Err(std::io::ErrorKind::Unsupported.into())
}
