//! Source of packed weights.

use crate::bundle::BundleFiles;
use crate::bundle::program::Program;
use crate::error::{Error, Result};
use crate::platform::mapped::MappedFile;
use crate::platform::memory::Addr;
use crate::weights::WeightPlacement;
use crate::weights::owned::LoadProgress;
use crate::weights::preload::Preload;
use moec_ir::plan::Segment;
use sha2::{Digest as _, Sha256};
use std::path::Path;
use std::sync::Arc;

/// Source of the addresses of weight segments: memory of our own, mapped files, or a cache over disk for
/// models that do not fit in memory.
///
/// # Safety
/// The following holds for every index of [`moec_ir::plan::Plan::segments`]. An address that `segment`
/// returns is aligned to 64 bytes, and at least the segment's bytes are there. An address that `matrices`
/// returns is that of a table. The table has an address for each matrix of the segment, or, of neurons on disk
/// ([`Segment::on_disk`]), as many for each of its rows as they have. All addresses stay the same and readable
/// as long as the store lives, or until `leave` after a `moves` that was true. If the store has a
/// `load_progress`, bytes may be read once it has released the pieces that the segment needs; nothing writes
/// to them from then on. An address in a table is that of a matrix, aligned to 64 bytes if the segment's
/// pitch is. It is always valid; for an expert on disk, it is valid after its pager has found it ready, until
/// the step is over.
pub unsafe trait Store: Send + Sync {
    /// Address of a segment of the program that the store was opened for; `None` if its matrices are reached
    /// only through a table.
    fn segment(&self, index: u32) -> Option<Addr>;
    /// Address of the table of a segment's matrices.
    fn matrices(&self, index: u32) -> Option<Addr>;
    /// Bytes of weights that the store serves.
    fn bytes(&self) -> u64;
    /// Begins to load in the background the weights that were not requested yet.
    fn preload(&mut self) {}
    /// Load progress to wait for before a segment is read; `None` if all may be read from the start.
    fn load_progress(&self) -> Option<&LoadProgress> {
        None
    }
    /// Whether weights have new addresses from now on. The old ones stay readable until [`Store::leave`].
    ///
    /// # Errors
    /// A file that is no longer the one of the build. Weights that cannot be read again stay where they are.
    fn moves(&mut self) -> Result<bool> {
        Ok(false)
    }
    /// Releases the old weights: no caller uses addresses from before [`Store::moves`] was true.
    fn leave(&mut self) {}
    /// Waits until weights are at their final place; a call of `moves` must follow, which returns the result.
    fn settle(&mut self) {}
    /// Takes the warning about the place of the weights, if there is one.
    fn warning(&mut self) -> Option<String> {
        None
    }
    /// Place of the weights that it holds.
    fn held(&self) -> WeightPlacement {
        WeightPlacement::default()
    }
}

/// Extent of the checks of a bundle before it runs. Sizes are always checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum CheckLevel {
    /// Sizes only.
    Sizes,
    /// Also the SHA-256 of files of at most [`SMALL_FILE`] bytes.
    #[default]
    Small,
    /// The SHA-256 of every file.
    All,
}

impl CheckLevel {
    /// Whether the content of a file of `bytes` bytes is checked.
    pub(crate) fn hashes(self, bytes: u64) -> bool {
        self == Self::All || (self == Self::Small && bytes <= SMALL_FILE)
    }
}

/// Largest file whose content is checked at every start, in bytes.
pub const SMALL_FILE: u64 = 64 << 20;

/// Weight files mapped into memory, read-only. Pages are read from disk when a kernel first uses them, or
/// before ([`Store::preload`]).
///
/// If a file is truncated during the run, the process ends with a message ([`crate::platform::mapped`]).
#[derive(Debug)]
pub struct MappedStore {
    // Held so that the addresses stay valid.
    maps: Arc<Vec<Option<MappedFile>>>,
    preload: Option<Preload>,
    addresses: Addresses,
}

/// Addresses of segments, and the tables of their matrices.
#[derive(Debug)]
pub(crate) struct Addresses {
    segments: Vec<Option<Addr>>,
    tables: Vec<Vec<Addr>>,
    bytes: u64,
}

impl Addresses {
    /// Addresses of the segments whose indices `is_needed` accepts. `place` returns the first byte of a segment
    /// that ends before the given offset in its file, or `None` if the file is shorter.
    ///
    /// # Errors
    /// [`Error::Bundle`] for a segment outside of its file.
    pub(crate) fn new(
        program: &Program,
        is_needed: &dyn Fn(u32) -> bool,
        place: &dyn Fn(&Segment, u64) -> Option<Addr>,
    ) -> Result<Self> {
        let (mut segments, mut tables, mut bytes) = (Vec::new(), Vec::new(), 0_u64);
        for (i, s) in (0..).zip(&program.segments) {
            if !is_needed(i) {
                segments.push(None);
                tables.push(Vec::new());
                continue;
            }
            let first = s
                .end()
                .and_then(|end| place(s, end))
                .ok_or_else(|| Error::plan(format!("segment {i} is outside of its file")))?;
            segments.push(Some(first));
            // Inside of the range: the last matrix ends with it.
            let (matrices, rows, _) = s.extents();
            let rows = rows as usize;
            let too_large = |_| Error::plan(format!("segment {i} is larger than memory can be"));
            let pitch = usize::try_from(s.pitch).map_err(too_large)?;
            let matrix = |m: u32| first.plus(m as usize * pitch);
            tables.push(match s.on_disk() {
                Some(neurons) => {
                    let row = |m, r| neurons.at(r, rows).map(|at| matrix(m).plus(at));
                    let of = |m| (0..rows).flat_map(move |r| row(m, r).into_iter().take(neurons.addresses()));
                    (0..matrices).flat_map(of).collect()
                }
                None => (0..matrices).map(matrix).collect(),
            });
            bytes = bytes.saturating_add(s.bytes);
        }
        Ok(Self { segments, tables, bytes })
    }

    /// As [`Store::segment`].
    pub(crate) fn segment(&self, index: u32) -> Option<Addr> {
        self.segments.get(index as usize).copied().flatten()
    }

    /// As [`Store::matrices`].
    pub(crate) fn matrices(&self, index: u32) -> Option<Addr> {
        let table = self.tables.get(index as usize).filter(|t| !t.is_empty())?;
        Some(Addr::read_only(table.as_ptr().cast()))
    }

    /// As [`Store::bytes`].
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl MappedStore {
    /// Checks the files of the bundle and maps those with segments. For other files this only finds damage
    /// early: their readers compare the bytes again ([`crate::bundle::BundleReader`]).
    ///
    /// # Errors
    /// A file that is missing, or has another size or other content (as far as `check` says); a segment
    /// outside of its file; an operation that the operating system refuses.
    pub fn open(program: &Program, bundle: &Path, check: CheckLevel) -> Result<Self> {
        Self::of(program, &BundleFiles::open(program, bundle)?, check, &|_| true)
    }

    /// As [`MappedStore::open`], for open files, and only with segments of files that are read here
    /// ([`Plan::files_here`](moec_ir::plan::Plan::files_here)).
    ///
    /// # Errors
    /// As [`MappedStore::open`].
    pub(crate) fn of_files_here(program: &Program, files: &BundleFiles, check: CheckLevel) -> Result<Self> {
        let here = program.files_here();
        let is_here = |i: u32| program.segments.get(i as usize).is_some_and(|s| here.contains(&s.file));
        Self::of(program, files, check, &is_here)
    }

    /// As [`MappedStore::open`], for open files, and only with the segments whose indices `is_needed` accepts.
    ///
    /// # Errors
    /// As [`MappedStore::open`].
    pub(crate) fn of(
        program: &Program,
        files: &BundleFiles,
        check: CheckLevel,
        is_needed: &dyn Fn(u32) -> bool,
    ) -> Result<Self> {
        // Segments of a file, those that are needed and all.
        let segments_in = |file: usize| {
            let all = (0..).zip(&program.segments).filter(move |(_, s)| s.file as usize == file);
            (all.clone().filter(|(i, _)| is_needed(*i)).count(), all.count())
        };
        let mut maps = Vec::with_capacity(program.files.len());
        for (i, (info, file)) in program.files.iter().zip(files.iter()).enumerate() {
            let (needed, all) = segments_in(i);
            let file = match file {
                Some(file) => file,
                None if needed == 0 => {
                    maps.push(None);
                    continue;
                }
                None => return Err(Error::MissingFile(info.path.clone().into())),
            };
            let map = if needed > 0 { file.map(info)? } else { None };
            if check.hashes(info.bytes) {
                match &map {
                    // Touching the rest of a mapping would keep it in memory.
                    Some(map) if needed == all => file.check_hash(info, Sha256::digest(&**map).into())?,
                    _ => file.check(info)?,
                }
            }
            maps.push(map);
        }
        let addresses = Addresses::new(program, is_needed, &|s, end| {
            let map = maps.get(s.file as usize)?.as_deref().unwrap_or_default();
            let range = usize::try_from(s.offset).ok()?..usize::try_from(end).ok()?;
            map.get(range).map(|bytes| Addr::read_only(bytes.as_ptr()))
        })?;
        Ok(Self { maps: Arc::new(maps), preload: None, addresses })
    }
}

// SAFETY: every address is in a mapping that the store holds: page-aligned, plus an offset that the verifier
// has found to be a multiple of 64. The segment's bytes are inside of the mapping (`open`). Tables are never
// changed; an address is as large as a pointer.
unsafe impl Store for MappedStore {
    fn segment(&self, index: u32) -> Option<Addr> {
        self.addresses.segment(index)
    }

    fn matrices(&self, index: u32) -> Option<Addr> {
        self.addresses.matrices(index)
    }

    fn bytes(&self) -> u64 {
        self.addresses.bytes()
    }

    fn preload(&mut self) {
        self.preload = self.preload.take().or_else(|| Preload::start(&self.maps));
    }
}
