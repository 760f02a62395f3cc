//! Order of reading pieces of the weight files, and the pieces that a segment needs.

use crate::bundle::program::Program;
use crate::error::Result;
use moec_ir::plan::{Arg, Segment};
use std::collections::BTreeSet;
use std::ops::Range;

/// Most bytes of a piece, which is touched, read and waited for as a whole. Two huge pages.
pub(super) const PIECE: u64 = 4 << 20;

/// A part of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Index of the file in the program.
    pub(super) file: u32,
    /// Offset in the file, a multiple of [`PIECE`].
    pub(super) offset: u64,
    /// Bytes, 1 to [`PIECE`].
    pub(super) bytes: u64,
}

/// Pieces of all files with segments that are read here ([`Plan::files_here`](moec_ir::plan::Plan::files_here)), file
/// after file. In memory a piece takes [`PIECE`] bytes.
#[derive(Debug)]
pub(super) struct Pieces {
    pub(super) all: Vec<Piece>,
    /// By file: its pieces; empty if none is read.
    of_file: Vec<Range<usize>>,
    /// Files that are read.
    files: BTreeSet<u32>,
}

impl Pieces {
    /// Cuts the files of a program.
    ///
    /// # Errors
    /// [`Error::Bundle`] for too many pieces.
    pub(super) fn new(program: &Program) -> Result<Self> {
        let (all, of_file) = (Vec::new(), Vec::with_capacity(program.files.len()));
        let mut pieces = Self { all, of_file, files: program.files_here() };
        for (file, info) in (0..).zip(&program.files) {
            let first = pieces.all.len();
            let count = if pieces.files.contains(&file) { info.bytes.div_ceil(PIECE) } else { 0 };
            // Limit of a buffer's index: 8 PB.
            if count > u64::from(u32::MAX / 2) - first as u64 {
                return Err(super::too_many());
            }
            pieces.all.extend((0..count).map(|i| {
                let offset = i * PIECE;
                Piece { file, offset, bytes: (info.bytes - offset).min(PIECE) }
            }));
            pieces.of_file.push(first..pieces.all.len());
        }
        Ok(pieces)
    }

    /// Whether a segment's file is read.
    pub(super) fn reads(&self, s: &Segment) -> bool {
        self.files.contains(&s.file)
    }

    /// The pieces of a file.
    pub(super) fn of_file(&self, file: u32) -> Range<usize> {
        self.of_file.get(file as usize).cloned().unwrap_or_default()
    }

    /// Pieces of a segment.
    fn of_segment(&self, s: &Segment) -> Range<usize> {
        let file = self.of_file(s.file);
        let end = s.end().unwrap_or(s.offset);
        let at = |offset: u64| {
            file.start.saturating_add(usize::try_from(offset).unwrap_or(usize::MAX)).min(file.end)
        };
        at(s.offset / PIECE)..at(end.div_ceil(PIECE))
    }

    /// Offset of a byte of a file in the memory of all pieces; `None` if the file has no such byte.
    pub(super) fn place(&self, file: u32, offset: u64) -> Option<usize> {
        let piece = self.of_file(file).nth(usize::try_from(offset / PIECE).ok()?)?;
        piece.checked_mul(usize::try_from(PIECE).ok()?)?.checked_add(usize::try_from(offset % PIECE).ok()?)
    }
}

/// Order of loading pieces.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Order {
    /// Indices of pieces, each once. Pieces without a segment are missing.
    pub(super) pieces: Vec<u32>,
    /// By segment, the number of pieces from the front that must be loaded before it is read.
    pub(super) needs: Vec<usize>,
}

impl Order {
    /// The order in which the steps of a program use segments, prefill first. Files of `whole` are hashed:
    /// they are read from beginning to end, and not used before.
    pub(super) fn new(program: &Program, pieces: &Pieces, whole: &dyn Fn(u32) -> bool) -> Self {
        let of = |s: &Segment| if whole(s.file) { pieces.of_file(s.file) } else { pieces.of_segment(s) };
        let steps = program.entries.iter().flat_map(|e| &e.steps);
        let used = steps.flat_map(|s| &s.args).filter_map(|arg| match arg {
            Arg::Segment(i) | Arg::Matrices(i) => program.segments.get(*i as usize),
            Arg::Buffer(..) | Arg::State(_) => None,
        });
        let mut at = vec![None; pieces.all.len()];
        let mut order = Self::default();
        // Segments that no step uses come last.
        for piece in used.chain(&program.segments).flat_map(&of) {
            if let Some(place @ None) = at.get_mut(piece) {
                *place = Some(order.pieces.len());
                order.pieces.extend(u32::try_from(piece));
            }
        }
        let last = |s: &Segment| of(s).filter_map(|piece| at.get(piece).copied().flatten()).max();
        order.needs = program.segments.iter().map(|s| last(s).map_or(0, |i| i + 1)).collect();
        order
    }
}
