//! Weights in memory of our own: anonymous huge pages, filled by direct I/O while the first prompt runs.
//!
//! The page cache decides where pages of a file are. If memory was full when the file was read, they are
//! scattered pages of 4 KiB. Decoding, which mostly reads weights, then runs at a third of the speed. Memory
//! of our own is requested in huge pages, touched piece by piece just before reads fill it, and never moves.
//!
//! * `order`: the pieces of files, in the order in which the steps of a prompt use them.
//! * `loader`: the threads that read pieces and, if files are checked, compute their SHA-256.
//! * `load_progress`: the loaded pieces, and the threads that wait for more. A step waits for the pieces of
//!   its own segments.
//! * `page_cache`: the parts of files that the page cache has.
//! * `moving`: weights that are mapped until memory of our own is filled.

mod load_progress;
mod loader;
mod moving;
mod order;
mod page_cache;

use crate::bundle::program::Program;
use crate::bundle::{BundleFile, BundleFiles};
use crate::error::{Error, Result};
use crate::offload::disk::{
    self, Buffers, Class, Disk, Extent, ExtentTable, FileEntry, SystemClock, ThreadedDisk,
};
use crate::offload::paging::{self, Wrap};
use crate::platform::memory::Addr;
use crate::weights::store::{Addresses, CheckLevel, Store};
use crate::weights::{WeightPlacement, huge_bytes};
use loader::{Loader, Reading, Whole};
use moec_ir::plan::FileRef;
use order::{Order, PIECE, Pieces};
use page_cache::PageCache;
use std::path::Path;
use std::sync::Arc;

pub use load_progress::LoadProgress;
pub use moving::MovingStore;

/// Weight files in memory of our own, read in the background once the store is opened.
///
/// After a file was read it may be changed, truncated or removed. Before, this is an error for the calls that
/// wait for it.
pub struct OwnedStore {
    // Declared first: its threads end before the memory is freed.
    _loader: Loader,
    progress: Arc<LoadProgress>,
    memory: Arc<Buffers>,
    addresses: Addresses,
    reader: String,
}

/// Options of reads.
#[derive(Clone, Copy, Debug)]
pub struct LoadOptions {
    /// Options of the disk reader.
    pub disk: disk::Options,
    /// Wrapper of the reader, for tests.
    pub wrap: Option<Wrap>,
}

impl LoadOptions {
    /// Options of the environment: `MOEC_DISK_READER` names the reader.
    ///
    /// # Errors
    /// An unknown reader.
    pub fn from_env() -> Result<Self> {
        let disk = paging::usual_disk()?;
        // Registered memory would be populated at once, before the first read.
        Ok(Self { disk: disk::Options { register: false, verify_reads: false, ..disk }, wrap: None })
    }
}

impl OwnedStore {
    /// Checks the sizes of all files, allocates memory for those with segments, and begins to read them.
    /// Their content is checked, as far as `check` says, while they are read: segments of a wrong file are
    /// never used.
    ///
    /// # Errors
    /// A file that is missing or has another size; a file without segments that has other content; a segment
    /// outside of its file; memory or threads refused.
    pub fn open(program: &Program, bundle: &Path, check: CheckLevel, options: &LoadOptions) -> Result<Self> {
        Self::of(program, &BundleFiles::open(program, bundle)?, check, options)
    }

    /// As [`OwnedStore::open`], for open files.
    ///
    /// # Errors
    /// As [`OwnedStore::open`].
    pub(crate) fn of(
        program: &Program,
        opened: &BundleFiles,
        check: CheckLevel,
        options: &LoadOptions,
    ) -> Result<Self> {
        let pieces = Arc::new(Pieces::new(program)?);
        let read = |file: u32| !pieces.of_file(file).is_empty();
        let opened = opened.reading(program, &read)?;
        let files = || (0_u32..).zip(&program.files).zip(&opened).map(|((i, info), &file)| (i, info, file));
        for (_, info, file) in files().filter(|&(i, info, _)| !read(i) && check.hashes(info.bytes)) {
            file.map_or(Ok(()), |file| file.check(info))?;
        }
        let whole: Vec<bool> = files().map(|(i, info, _)| read(i) && check.hashes(info.bytes)).collect();
        let is_whole = |file: u32| whole.get(file as usize).copied().unwrap_or(false);

        let count = u32::try_from(pieces.all.len()).map_err(|_| too_many())?;
        let memory = Buffers::in_huge_pages("weights", &[Class { bytes: PIECE, count }])?;
        let is_read = |i: u32| program.segments.get(i as usize).is_some_and(|s| pieces.reads(s));
        let addresses = Addresses::new(program, &is_read, &|s, end| {
            let first = pieces.place(s.file, s.offset);
            let inside = end <= program.files.get(s.file as usize)?.bytes;
            // An empty segment at the end of a file has an address that is never read.
            inside.then(|| memory.base().plus(first.unwrap_or(0)))
        })?;
        let table = Arc::new(table(&pieces, files())?);
        let disk_options = disk::Options { verify_reads: false, ..options.disk };
        let clock = Arc::new(SystemClock::default());
        let disk =
            ThreadedDisk::with_reader(
                table,
                Arc::clone(&memory),
                &disk_options,
                clock,
                |reader| match options.wrap {
                    Some(wrap) => (wrap.0)(reader),
                    None => reader,
                },
            )?;
        let reader = disk.describe().to_owned();

        let Order { pieces: order, needs } = Order::new(program, &pieces, &is_whole);
        let unverified = files().filter(|&(i, ..)| is_whole(i)).flat_map(|(i, ..)| pieces.of_file(i));
        let progress = Arc::new(LoadProgress::new(pieces.all.len(), order, needs, unverified));
        let mut buffers: Vec<_> = pieces.all.iter().map(|_| memory.take(PIECE)).collect();
        buffers.sort_by_key(|b| b.as_ref().map(disk::Buffer::index));
        let cache = |(i, _, of): (u32, &FileRef, Option<&BundleFile>)| {
            let cache = |BundleFile { path, file }: &BundleFile| {
                PageCache::of(file, path).map_err(|source| Error::io("open", path.clone(), source))
            };
            of.filter(|_| read(i)).map(cache).transpose()
        };
        let caches = files().map(cache).collect::<Result<_>>()?;
        let reading = Reading::new(Arc::clone(&progress), disk, Arc::clone(&pieces), buffers, caches);
        let hashed = files().filter_map(|(i, info, of)| Some((i, info, of.filter(|_| is_whole(i))?)));
        let hashing = hashed.map(|(file, info, of)| Whole {
            path: of.path.clone(),
            sha256: info.sha256,
            file,
            pieces: Arc::clone(&pieces),
            memory: Arc::clone(&memory),
        });
        let loader = Loader::start(reading, hashing.collect())?;
        Ok(Self { _loader: loader, progress, memory, addresses, reader })
    }
}

fn too_many() -> Error {
    Error::plan("there are more weights than memory can be")
}

/// Table of extents, with every piece twice: past the page cache, and through it.
fn table<'a>(
    pieces: &Pieces,
    files: impl Iterator<Item = (u32, &'a FileRef, Option<&'a BundleFile>)>,
) -> Result<ExtentTable> {
    let (mut entries, mut extents) = (Vec::new(), Vec::new());
    for (i, info, file) in files {
        let range = pieces.of_file(i);
        let Some(file) = file.filter(|_| !range.is_empty()) else { continue };
        let first = u32::try_from(entries.len()).map_err(|_| too_many())?;
        let (path, identity) = (&file.path, file.identity()?);
        entries.extend([false, true].map(|cached| FileEntry {
            path: path.clone(),
            bytes: info.bytes,
            cached,
            identity,
        }));
        let both = |p: &order::Piece| {
            let extent = |file| Extent { file, offset: p.offset, bytes: p.bytes, crc32c: None };
            [extent(first), extent(first + 1)]
        };
        extents.extend(pieces.all.get(range).unwrap_or_default().iter().flat_map(both));
    }
    ExtentTable::new(entries, extents)
}

// SAFETY: every address is in the memory of the pieces, which the store holds. It is 2 MiB-aligned, plus
// whole pieces, plus the rest of an offset that the verifier has found to be a multiple of 64. The pieces of
// a file follow each other without a gap, so the segment's bytes are there, too (`open`). Only reads write to
// them, until the load progress releases their pieces. Tables are never changed; an address is as large as a
// pointer.
unsafe impl Store for OwnedStore {
    fn segment(&self, index: u32) -> Option<Addr> {
        self.addresses.segment(index)
    }

    fn matrices(&self, index: u32) -> Option<Addr> {
        self.addresses.matrices(index)
    }

    fn bytes(&self) -> u64 {
        self.addresses.bytes()
    }

    fn load_progress(&self) -> Option<&LoadProgress> {
        Some(&self.progress)
    }

    fn held(&self) -> WeightPlacement {
        let first = self.memory.base().ptr().addr();
        WeightPlacement {
            own: true,
            bytes: self.memory.bytes() as u64,
            huge_bytes: huge_bytes(first..first + self.memory.bytes()),
            reader: Some(self.reader.clone()),
            took: self.progress.took(),
            ..WeightPlacement::default()
        }
    }
}
