//! Packing the weight files of a bundle.
//!
//! | thread | what |
//! |---|---|
//! | one per core | reads a block of a weight, orders and rounds its numbers, writes it to its place |
//! | the caller's | hashes blocks, in order, and gives their memory back |
//! | one | has the operating system put on the disk what was written |
//!
//! The buffers of `Jobs` go around: their number bounds what is held, and the slowest of these sets the pace.

use super::in_order::Jobs;
use super::reuse::{MatrixRecord, Packed, Reuse};
use moec_base::error::{Error, Result, io_error};
use moec_base::hashing::hex;
use moec_base::interrupt;
use moec_base::paths::has_weights;
use moec_base::progress::{Bar, Progress};
use moec_cpu::{Block, PackError, Packer, Scratch, WeightImportance};
use moec_ir::plan::{FileRef, Paging, Plan, Segment};
use moec_ir::{Module, Source, WeightId};
use moec_runtime::offload::disk::{checksum, checksum_after};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Seek as _, SeekFrom, Write as _};
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread;

/// Number of written bytes after which they are synced to the disk: later ones are packed meanwhile.
const SYNCED: u64 = 64 << 20;

/// Weights to pack.
pub struct Packing<'a> {
    /// Weights.
    pub module: &'a Module,
    /// Weight of each segment of the plan.
    pub segment_weights: &'a [WeightId],
    /// Source of their numbers.
    pub source: &'a dyn Source,
    /// Importance of errors, for grouped formats.
    pub importance: Option<&'a dyn WeightImportance>,
    /// Parts in earlier bundles.
    pub reuse: Option<&'a Reuse>,
}

/// Result of packing.
#[derive(Debug, Default)]
pub struct PackResult {
    /// Bytes of the segments.
    pub bytes: u64,
    /// Number of them that earlier bundles had.
    pub reused: u64,
    /// Parts that later builds may take, by file, if there are notes of earlier ones.
    pub(crate) files: BTreeMap<String, Packed>,
}

/// Packs every segment into its file below `root`, block by block. Sets size and hash of the weight files,
/// and the checksums of experts that stay on disk.
///
/// # Errors
/// Weights that cannot be read or do not fit their format; a disk that is full; an interrupt.
pub fn pack(c: &Packing<'_>, plan: &mut Plan, root: &Path, progress: &Progress) -> Result<PackResult> {
    let total = plan.segments.iter().map(|s| s.bytes).sum();
    let mut result = PackResult { bytes: total, ..PackResult::default() };
    let bar = progress.bytes("Packing", total);
    for at in 0..plan.files.len() {
        let file = plan.files[at].path.clone();
        if !has_weights(&file) {
            continue;
        }
        let index = u32::try_from(at).map_err(|_| Error::bug("more files than a plan counts"))?;
        let (pieces, end) = pieces(c, plan, index)?;
        let written = write(&pieces, c.reuse, end, &root.join(&file), &bar)?;
        if c.reuse.is_some() {
            let matrices = pieces.iter().flat_map(Piece::matrices).collect();
            result.files.insert(file.clone(), Packed { sha256: hex(&written.sha256), matrices });
        }
        drop(pieces);
        result.reused += written.reused;
        let memory = paging_in(plan, index).map(|(memory, _)| memory);
        let mut paging = memory.and_then(|memory| plan.paging_of_mut(memory));
        for (at, crc32c) in written.checksums {
            if let Some(sum) = paging.as_mut().and_then(|p| p.checksums.get_mut(at)) {
                *sum = crc32c;
            }
        }
        plan.files[at] = FileRef { path: file, bytes: written.bytes, sha256: written.sha256 };
    }
    bar.finish();
    Ok(result)
}

/// Matrices of a segment that are written one after the other.
struct Piece<'a> {
    name: &'a str,
    packer: Packer<'a>,
    /// Zeros before it.
    padding: usize,
    /// Index of its checksum.
    checksum: Option<usize>,
    /// Key of its weight, for later builds.
    key: String,
    /// Number of its first matrix in the weight.
    first: usize,
    /// First byte of that in the file, and the bytes of each.
    place: (u64, u64),
    /// CRC-32C of its blocks.
    sums: Vec<AtomicU32>,
}

impl Piece<'_> {
    /// Blocks of each of its matrices.
    fn blocks_of_one(&self) -> usize {
        self.packer.blocks_of_one().max(1)
    }

    /// Its matrices, when all of it is packed.
    fn matrices(&self) -> impl Iterator<Item = MatrixRecord> {
        let sums = self.sums.chunks(self.blocks_of_one()).enumerate();
        sums.map(|(i, sums)| MatrixRecord {
            weight: self.key.clone(),
            matrix: self.first + i,
            offset: self.place.0 + i as u64 * self.place.1,
            blocks: sums.iter().map(|s| s.load(Ordering::Relaxed)).collect(),
        })
    }
}

/// Pieces of a weight file, in the order of its bytes, and its end.
fn pieces<'a>(c: &Packing<'a>, plan: &'a Plan, file: u32) -> Result<(Vec<Piece<'a>>, u64)> {
    let mut end = 0;
    let piece = |(index, matrices, checksum): (usize, Range<usize>, Option<usize>)| {
        let (Some(segment), Some(&weight)) = (plan.segments.get(index), c.segment_weights.get(index)) else {
            return Err(Error::bug("a segment that does not exist"));
        };
        let misplaced = || Error::bug(format!("`{}` does not lie after what is before it", segment.name));
        let offset = matrix_offset(segment, matrices.start).unwrap_or(segment.offset);
        let padding = offset.checked_sub(end).and_then(|n| usize::try_from(n).ok()).ok_or_else(misplaced)?;
        let one = segment.matrix_bytes().ok_or_else(misplaced)?;
        let first = matrices.start;
        let bytes = one.checked_mul(matrices.len() as u64);
        end = bytes.and_then(|n| n.checked_add(offset)).ok_or_else(misplaced)?;
        let weight = c.module.weight(weight);
        let packer = Packer::new(segment, weight, c.source, c.importance, matrices).map_err(failed)?;
        let key = c.reuse.map(|r| r.key(weight, segment)).unwrap_or_default();
        let sums = packer.blocks().map(|_| AtomicU32::default()).collect();
        Ok(Piece { name: &segment.name, packer, padding, checksum, key, first, place: (offset, one), sums })
    };
    let all = parts(plan, file).into_iter().map(piece).collect::<Result<_>>()?;
    Ok((all, end))
}

/// Offset of a segment's matrix in its file.
fn matrix_offset(segment: &Segment, matrix: usize) -> Option<u64> {
    segment.matrix_offset(u32::try_from(matrix).ok()?)
}

/// Experts on disk whose matrices are in a file, with the memory of their host.
fn paging_in(plan: &Plan, file: u32) -> Option<(u32, &Paging)> {
    let inside = |segment: u32| plan.segments.get(segment as usize).is_some_and(|s| s.file == file);
    plan.paged_memories().find(|(_, paging)| paging.segments().any(inside))
}

/// The segments of a file with their matrices, in the order of their bytes, and where their checksums go:
/// whole segments, or the experts that stay on disk one by one.
fn parts(plan: &Plan, file: u32) -> Vec<(usize, Range<usize>, Option<usize>)> {
    let (segments, found) = (&plan.segments, paging_in(plan, file));
    let paging = found.map(|(_, paging)| paging);
    let matrices = |s: &Segment| s.extents().0 as usize;
    // Neurons by themselves have no checksums, and gates are before them.
    let whole = paging.filter(|p| !p.by_neurons());
    let paged: Vec<_> =
        whole.iter().flat_map(|p| &p.layers).map(|l| [l.gate_up as usize, l.down as usize]).collect();
    let is_paged = |i: usize| paged.iter().any(|pair| pair.contains(&i));
    let own = segments.iter().enumerate().filter(|(i, s)| s.file == file && !is_paged(*i));
    let mut all: Vec<_> = own.map(|(i, s)| (i, 0..matrices(s), None)).collect();
    let neurons =
        |i: &usize| paging.filter(|p| p.by_neurons()).is_some_and(|p| p.segments().any(|s| s as usize == *i));
    // Their matrices may be apart from each other.
    let by_matrix = |(i, matrices, sum): (usize, Range<usize>, Option<usize>)| -> Vec<_> {
        if neurons(&i) { matrices.map(|m| (i, m..m + 1, None)).collect() } else { vec![(i, matrices, sum)] }
    };
    all = all.into_iter().flat_map(by_matrix).collect();
    all.sort_by_key(|(i, matrices, _)| segments.get(*i).and_then(|s| matrix_offset(s, matrices.start)));
    let mut first = 0;
    for (memory, layer) in
        found.iter().filter(|_| whole.is_some()).flat_map(|(m, p)| p.layers.iter().map(move |l| (*m, l)))
    {
        // In the order of their bytes, whichever experts of the layer these are.
        for (expert, index) in plan.experts_on_disk(memory, layer.gate_up) {
            for (part, segment) in [layer.gate_up, layer.down].into_iter().enumerate() {
                let at = first + 2 * expert as usize + part;
                all.push((segment as usize, index as usize..index as usize + 1, Some(at)));
            }
        }
        first += 2 * layer.experts as usize;
    }
    all
}

/// The error of a weight that could not be packed.
fn failed(e: PackError) -> Error {
    match e {
        PackError::Read(e) => match e.downcast::<Error>() {
            Ok(e) => *e,
            Err(e) => Error::input(e.to_string()),
        },
        PackError::Range { .. } => {
            Error::input(e.to_string()).hint("choose bf16 or f32 for its class under `[weights]`")
        }
        PackError::Cut { .. } => Error::limit(e.to_string()).hint(
            "hosts and slices cut its rows: set a format such as \"q6\" for its class under `[weights]`",
        ),
        PackError::Importance { .. } | PackError::Form(_) => Error::bug(e.to_string()),
    }
}

/// Piece that is packed at a time.
#[derive(Clone)]
struct Job<'p, 'a> {
    piece: &'p Piece<'a>,
    block: Block,
    /// Offset in the file, padding included.
    offset: u64,
    /// Zeros before it.
    padding: usize,
    /// Its number in the piece.
    number: usize,
}

impl Job<'_, '_> {
    /// Appends the packed block to `out`, or copies it from an earlier bundle. Returns whether it was copied.
    fn pack(&self, reuse: Option<&Reuse>, scratch: &mut Scratch, out: &mut Vec<u8>) -> Result<bool> {
        let Self { piece, block, .. } = self;
        let start = out.len();
        // Offset in its own matrix, which does not depend on the file.
        let at = (self.offset + self.padding as u64 - piece.place.0) % piece.place.1.max(1);
        let matrix = || (piece.key.clone(), piece.first + block.matrix);
        let number = self.number % piece.blocks_of_one();
        let reused = reuse.is_some_and(|r| r.copy(matrix(), number, at, block.bytes, out));
        if !reused {
            piece.packer.pack(block, scratch, out).map_err(failed)?;
        }
        let packed = out.get(start..).unwrap_or_default();
        if packed.len() != block.bytes {
            return Err(Error::bug(format!("`{}` was packed with another size than planned", piece.name)));
        }
        if let Some(sum) = piece.sums.get(self.number).filter(|_| reuse.is_some()) {
            sum.store(checksum(packed), Ordering::Relaxed);
        }
        Ok(reused)
    }
}

/// The blocks of pieces, in the order of their bytes.
fn jobs<'p, 'a>(pieces: &'p [Piece<'a>]) -> impl Iterator<Item = Job<'p, 'a>> + Send {
    let blocks = pieces.iter().flat_map(|piece| piece.packer.blocks().enumerate().map(move |b| (piece, b)));
    blocks.scan(0, |end, (piece, (number, block))| {
        let offset = *end;
        let padding = if number == 0 { piece.padding } else { 0 };
        *end += padding as u64 + block.bytes as u64;
        Some(Job { piece, block, offset, padding, number })
    })
}

/// A file that was written.
struct Written {
    bytes: u64,
    /// Bytes that an earlier bundle had.
    reused: u64,
    sha256: [u8; 32],
    /// CRC-32C of pieces, and where they go.
    checksums: Vec<(usize, u32)>,
}

/// Packs pieces into a file of `end` bytes, which must not exist.
fn write(pieces: &[Piece<'_>], reuse: Option<&Reuse>, end: u64, path: &Path, bar: &Bar) -> Result<Written> {
    let failed_io = |e: io::Error| interrupt::check().err().unwrap_or_else(|| io_error("write", path, &e));
    let file = File::create_new(path).map_err(failed_io)?;
    let synced = file.try_clone().map_err(failed_io)?;
    let file = Mutex::new(file);
    // Called on the thread that has just packed the block, whose bytes are still in its core's cache.
    let put = |offset: u64, bytes: &[u8]| {
        let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
        file.seek(SeekFrom::Start(offset))?;
        file.write_all(bytes)
    };
    let (mut sha, mut checksums, mut position) = (Sha256::new(), Vec::new(), 0);
    let reused = AtomicU64::new(0);
    thread::scope(|scope| {
        // A full channel means that a sync is pending already.
        let (to_sync, sync_requests) = mpsc::sync_channel(1);
        let syncing = scope.spawn(|| sync_requests.into_iter().try_for_each(|()| synced.sync_data()));
        let workers = thread::available_parallelism().map_or(1, usize::from);
        let jobs = Jobs::new(jobs(pieces), workers);
        jobs.run(
            |job| job.piece.packer.expect(&job.block),
            |job, scratch: &mut Scratch, buffer| {
                buffer.resize(job.padding, 0);
                if job.pack(reuse, scratch, buffer)? {
                    reused.fetch_add(job.block.bytes as u64, Ordering::Relaxed);
                }
                put(job.offset, buffer).map_err(failed_io)
            },
            |job, bytes| {
                interrupt::check()?;
                if job.number == 0 {
                    bar.label(job.piece.name);
                    checksums.extend(job.piece.checksum.map(|at| (at, 0)));
                }
                sha.update(&bytes);
                if let (Some(_), Some((_, crc32c))) = (job.piece.checksum, checksums.last_mut()) {
                    *crc32c = checksum_after(*crc32c, bytes.get(job.padding..).unwrap_or_default());
                }
                position = job.offset + bytes.len() as u64;
                if job.offset / SYNCED != position / SYNCED {
                    let _ = to_sync.try_send(());
                }
                bar.add(job.block.bytes as u64);
                jobs.free(bytes);
                Ok(())
            },
        )?;
        drop(to_sync);
        syncing.join().map_err(|_| Error::bug("the thread that syncs has ended"))?.map_err(failed_io)
    })?;
    if position != end {
        return Err(Error::bug(format!("`{}` has another size than planned", path.display())));
    }
    synced.sync_data().map_err(failed_io)?;
    Ok(Written { bytes: position, reused: reused.into_inner(), sha256: sha.finalize().into(), checksums })
}
