//! Accesses of an instruction: one table, of which the verifier and a simulator's assertions are made.

use crate::op::{Lines, Number, Op, Slab};
use crate::{GLU_PANEL, LINE, PAIR_LINES, PANEL};
use std::ops::Range;

/// A slab as an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlabUse {
    /// Name of the operand.
    pub name: &'static str,
    /// The slab.
    pub slab: Slab,
    /// The only kind of number that it may have.
    pub only: Option<Number>,
    /// Bytes of a token.
    pub bytes: u64,
    /// Whether they are read.
    pub reads: bool,
    /// Whether they are written.
    pub writes: bool,
    /// Whether the destination may be this same slab, if both have the same kind of number: the instruction
    /// reads a number only where it writes it.
    pub in_place: bool,
}

/// Lines of a region as an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinesUse {
    /// First line; with a stride, that of row 0.
    pub lines: Lines,
    /// Lines from one row to the next; 0 where rows do not matter.
    pub stride: u64,
    /// Number of lines; with a stride, of each row.
    pub count: u64,
    /// Whether they are written; else they are read.
    pub writes: bool,
}

const F32: Option<Number> = Some(Number::F32);

/// One iteration of the loop over blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Row of its first token.
    pub first: u64,
    /// Its tokens.
    pub tokens: u32,
}

/// A range of bytes or lines that an instruction accesses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Touch {
    /// Bytes of the buffer.
    Buffer(Range<u64>),
    /// Lines of a region.
    Lines {
        /// Index of the region.
        region: u16,
        /// Lines, counted from its first.
        lines: Range<u64>,
    },
}

impl SlabUse {
    /// The bytes that a block of tokens touches: one range if vectors touch each other, else one for each
    /// token.
    pub fn ranges(&self, tokens: u32) -> impl Iterator<Item = Range<u64>> + use<> {
        let (base, stride, bytes) = (u64::from(self.slab.base), u64::from(self.slab.stride), self.bytes);
        let dense = stride <= bytes;
        let last = u64::from(tokens.saturating_sub(1)) * stride;
        let (vectors, length) = if dense { (1, last.saturating_add(bytes)) } else { (tokens, bytes) };
        let vectors = if tokens == 0 { 0 } else { vectors };
        (0..u64::from(vectors)).map(move |t| {
            let from = base + t * stride;
            from..from.saturating_add(length)
        })
    }
}

impl LinesUse {
    /// The lines that a block of tokens touches: one range for each token, or a single range without a
    /// stride.
    pub fn ranges(&self, block: Block) -> impl Iterator<Item = Range<u64>> + use<> {
        let Self { lines, stride, count, .. } = *self;
        let rows = if stride == 0 { block.tokens.min(1) } else { block.tokens };
        (0..u64::from(rows)).map(move |t| {
            let row = block.first.saturating_add(t);
            let from = lines.line.saturating_add(row.saturating_mul(stride));
            from..from.saturating_add(count)
        })
    }
}

impl Op {
    /// Its slabs. A slab that is both read and written is listed once.
    pub fn slabs(&self) -> Vec<SlabUse> {
        let slab = |name, slab: Slab, only, bytes| SlabUse {
            name,
            slab,
            only,
            bytes,
            reads: false,
            writes: false,
            in_place: false,
        };
        let source = |name, s, only, bytes| SlabUse { reads: true, ..slab(name, s, only, bytes) };
        let element = |name, s, bytes| SlabUse { in_place: true, ..source(name, s, F32, bytes) };
        let target = |s, only, bytes| SlabUse { writes: true, ..slab("destination", s, only, bytes) };
        let sums = |name, s, bytes| SlabUse { writes: true, ..source(name, s, F32, bytes) };
        let of = |slab: Slab, count: u32| u64::from(count) * u64::from(slab.number.bytes());
        let lines_of = |lines: u32| u64::from(lines) * u64::from(LINE);
        let panels_of = |panels: u32| u64::from(panels) * u64::from(PANEL) * 4;
        match *self {
            Self::Loop | Self::End | Self::Barrier | Self::Relayout { .. } | Self::Migrate { .. } => {
                Vec::new()
            }
            Self::Load { dst, lines, .. } => vec![target(dst, None, lines_of(lines))],
            Self::Store { src, lines, .. } => vec![source("source", src, None, lines_of(lines))],
            Self::Init { dst, count } => vec![target(dst, F32, of(dst, count))],
            Self::Gemv { acc, x, panels, pairs, .. } => vec![
                sums("accumulator", acc, panels_of(panels)),
                source("input", x, Some(Number::B16), u64::from(pairs) * 4),
            ],
            Self::Act { dst, src, count, .. } => {
                vec![target(dst, None, of(dst, count)), element("source", src, of(src, count))]
            }
            Self::Glu { dst, src, count, .. } => {
                let sums = panels_of(count.div_ceil(GLU_PANEL));
                vec![target(dst, None, of(dst, count)), source("source", src, F32, sums)]
            }
            Self::Mul { dst, a, b, count } => vec![
                target(dst, None, of(dst, count)),
                element("first source", a, of(a, count)),
                element("second source", b, of(b, count)),
            ],
            Self::Scale { dst, src, factor, count } => vec![
                target(dst, None, of(dst, count)),
                element("source", src, of(src, count)),
                source("factor", factor, F32, 4),
            ],
            Self::Reduce { dst, src, count } => {
                vec![sums("destination", dst, of(dst, count)), element("source", src, of(src, count))]
            }
            Self::Convert { dst, src, count } => {
                vec![target(dst, None, of(dst, count)), source("source", src, None, of(src, count))]
            }
        }
    }

    /// Its lines of this DIMM's regions; those of a striped region are lines of the whole.
    pub fn lines(&self) -> Vec<LinesUse> {
        let plain = |lines, count: u64, writes| LinesUse { lines, stride: 0, count, writes };
        match *self {
            Self::Load { src, stride, lines, .. } => {
                vec![LinesUse { lines: src, stride, count: u64::from(lines), writes: false }]
            }
            Self::Store { dst, stride, lines, .. } => {
                vec![LinesUse { lines: dst, stride, count: u64::from(lines), writes: true }]
            }
            Self::Gemv { weights, panels, pairs, .. } => {
                let lines =
                    u64::from(panels).saturating_mul(u64::from(pairs)).saturating_mul(u64::from(PAIR_LINES));
                vec![plain(weights, lines, false)]
            }
            Self::Relayout { src, dst, lines, .. } => {
                vec![plain(src, u64::from(lines), false), plain(dst, u64::from(lines), true)]
            }
            Self::Migrate { src, lines, .. } => vec![plain(src, u64::from(lines), false)],
            _ => Vec::new(),
        }
    }

    /// Reads in a block.
    pub fn reads(&self, block: Block) -> Vec<Touch> {
        self.touches(block, |slab| slab.reads, |lines| !lines.writes)
    }

    /// Writes in a block. Those of a migration are on another DIMM, and not included.
    pub fn writes(&self, block: Block) -> Vec<Touch> {
        self.touches(block, |slab| slab.writes, |lines| lines.writes)
    }

    fn touches(
        &self,
        block: Block,
        slabs: impl Fn(&SlabUse) -> bool,
        lines: impl Fn(&LinesUse) -> bool,
    ) -> Vec<Touch> {
        // Accesses that do not depend on tokens happen once, whatever the block.
        let once = self.slabs().is_empty();
        let block = if once { Block { tokens: 1, ..block } } else { block };
        let mut touches = Vec::new();
        for slab in self.slabs().iter().filter(|s| slabs(s)) {
            touches.extend(slab.ranges(block.tokens).map(Touch::Buffer));
        }
        for operand in self.lines().iter().filter(|l| lines(l)) {
            let region = operand.lines.region;
            touches.extend(operand.ranges(block).map(|lines| Touch::Lines { region, lines }));
        }
        touches
    }
}
