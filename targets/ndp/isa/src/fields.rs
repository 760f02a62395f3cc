//! The operands of every operation in their order: one table that printing, parsing, encoding and decoding
//! walk.

use crate::geometry::Layout;
use crate::op::{Activation, Glu, Lines, Number, Op, Slab};
use std::ops::Range;

/// Visitor of the operands, in the order of the text form.
pub(crate) trait Fields {
    /// Error of the visitor.
    type Error;
    /// `f32[0 + t*64]`
    fn slab(&mut self, slab: &mut Slab) -> Result<(), Self::Error>;
    /// `weights[0]`
    fn lines(&mut self, lines: &mut Lines) -> Result<(), Self::Error>;
    /// `inbox[0 + r*64]`
    fn rows(&mut self, lines: &mut Lines, stride: &mut u64) -> Result<(), Self::Error>;
    /// `count 64`
    fn number(&mut self, label: &'static str, number: &mut u32) -> Result<(), Self::Error>;
    /// `rows 0..4`
    fn range(&mut self, label: &'static str, range: &mut Range<u32>) -> Result<(), Self::Error>;
    /// `silu`, before the operands.
    fn activation(&mut self, kind: &mut Activation) -> Result<(), Self::Error>;
    /// `silu`, `drelu` or `clamped(1.702, 7)`, before the operands.
    fn glu(&mut self, kind: &mut Glu) -> Result<(), Self::Error>;
    /// `to striped`
    fn layout(&mut self, label: &'static str, layout: &mut Layout) -> Result<(), Self::Error>;
    /// Separator before the next operand, where it is not a comma.
    fn separator(&mut self, separator: Separator) -> Result<(), Self::Error>;
}

/// Separator between two operands in the text form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Separator {
    /// A space.
    Space,
    /// `,`
    Comma,
    /// `->`
    Arrow,
}

const SLAB: Slab = Slab { number: Number::B16, base: 0, stride: 0 };
const LINES: Lines = Lines { region: 0, line: 0 };

/// Every operation, its operands blank. An operation's place here is its code in the binary form.
pub(crate) const BLANKS: [Op; 15] = [
    Op::Loop,
    Op::End,
    Op::Barrier,
    Op::Load { dst: SLAB, src: LINES, stride: 0, lines: 0 },
    Op::Store { src: SLAB, dst: LINES, stride: 0, lines: 0 },
    Op::Init { dst: SLAB, count: 0 },
    Op::Gemv { acc: SLAB, x: SLAB, weights: LINES, panels: 0, pairs: 0 },
    Op::Act { kind: Activation::Silu, dst: SLAB, src: SLAB, count: 0 },
    Op::Glu { kind: Glu::DRelu, dst: SLAB, src: SLAB, count: 0 },
    Op::Mul { dst: SLAB, a: SLAB, b: SLAB, count: 0 },
    Op::Scale { dst: SLAB, src: SLAB, factor: SLAB, count: 0 },
    Op::Reduce { dst: SLAB, src: SLAB, count: 0 },
    Op::Convert { dst: SLAB, src: SLAB, count: 0 },
    Op::Relayout { src: LINES, dst: LINES, lines: 0, to: Layout::Localized },
    Op::Migrate { src: LINES, dimm: 0, rows: 0..0, lines: 0 },
];

/// Every join of gate and up, its parameters blank. A join's place here is its code in the binary form.
pub(crate) const GLUS: [Glu; 7] = [
    Glu::Gated(Activation::Silu),
    Glu::Gated(Activation::Gelu),
    Glu::Gated(Activation::GeluTanh),
    Glu::Gated(Activation::Relu),
    Glu::Gated(Activation::Sigmoid),
    Glu::DRelu,
    Glu::Clamped { alpha: 0.0, limit: 0.0 },
];

/// Walks over the operands of an operation.
pub(crate) fn walk<F: Fields>(op: &mut Op, f: &mut F) -> Result<(), F::Error> {
    match op {
        Op::Loop | Op::End | Op::Barrier => Ok(()),
        Op::Load { dst: slab, src: lines, stride, lines: count }
        | Op::Store { src: slab, dst: lines, stride, lines: count } => {
            f.slab(slab)?;
            f.rows(lines, stride)?;
            f.number("lines", count)
        }
        Op::Init { dst, count } => {
            f.slab(dst)?;
            f.number("count", count)
        }
        Op::Gemv { acc, x, weights, panels, pairs } => {
            f.slab(acc)?;
            f.slab(x)?;
            f.lines(weights)?;
            f.number("panels", panels)?;
            f.number("pairs", pairs)
        }
        Op::Act { kind, dst, src, count } => {
            f.activation(kind)?;
            f.separator(Separator::Space)?;
            f.slab(dst)?;
            f.slab(src)?;
            f.number("count", count)
        }
        Op::Glu { kind, dst, src, count } => {
            f.glu(kind)?;
            f.separator(Separator::Space)?;
            f.slab(dst)?;
            f.slab(src)?;
            f.number("count", count)
        }
        Op::Mul { dst, a, b, count } | Op::Scale { dst, src: a, factor: b, count } => {
            f.slab(dst)?;
            f.slab(a)?;
            f.slab(b)?;
            f.number("count", count)
        }
        Op::Reduce { dst, src, count } | Op::Convert { dst, src, count } => {
            f.slab(dst)?;
            f.slab(src)?;
            f.number("count", count)
        }
        Op::Relayout { src, dst, lines, to } => {
            f.lines(src)?;
            f.separator(Separator::Arrow)?;
            f.lines(dst)?;
            f.number("lines", lines)?;
            f.layout("to", to)
        }
        Op::Migrate { src, dimm, rows, lines } => {
            f.lines(src)?;
            f.separator(Separator::Arrow)?;
            f.number("dimm", dimm)?;
            f.separator(Separator::Space)?;
            f.range("rows", rows)?;
            f.number("lines", lines)
        }
    }
}
