//! Rows of f32 in the compute type of a matrix kernel: pairs of bf16, or bytes by groups.

use super::{GpuKernel, Kernel, ROWS, Rule, fits};
use crate::dsl::{F, I, Kb, P, Span};
use crate::machine::Isa;
use crate::spec::{ComputeType, RowFormat, Symbol, packed_words};
use moec_ir::types::GROUP;

/// Bytes of a packed group: 32 codes, the scale as f32, and `−128 · Σ codes` as i32.
pub(crate) const ROW_GROUP: usize = GROUP + 8;
/// Offset of the scale, in bytes.
pub(crate) const SCALE: usize = GROUP;
/// Offset of the correction, in bytes.
pub(crate) const CORRECTION: usize = GROUP + 4;

/// `[x, out]`: rows in the compute type of a matrix kernel, [`packed_words`] per group.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantise {
    /// Columns of a group.
    pub cols: usize,
    /// Groups of a row, each packed by itself.
    pub groups: usize,
    /// Rows of `x` per valid row (slots per token).
    pub per_row: usize,
    /// Row distance of `x`.
    pub x_ld: usize,
    /// Row distance of `out`, in words.
    pub out_ld: usize,
    /// The compute type.
    pub to: ComputeType,
}

impl Kernel for Quantise {
    fn kind(&self) -> &'static str {
        "quantise"
    }

    fn name(&self, s: &mut Symbol, _isa: &Isa) {
        s.word("quantise").num("c", self.cols).num("g", self.groups).num("r", self.per_row);
        s.num("x", self.x_ld).num("o", self.out_ld).word(self.to.name());
    }

    fn args(&self) -> usize {
        2
    }

    fn rules(&self, isa: &Isa) -> Vec<Rule> {
        let mut rules = vec![
            (self.cols > 0 && self.groups > 0 && self.per_row > 0, "an extent is zero"),
            (self.x_ld >= self.cols * self.groups, "rows overlap"),
        ];
        rules.extend(fits(isa, RowFormat { compute: self.to, ld: self.out_ld }, self.cols, self.groups));
        rules
    }

    fn on_gpu(&self) -> Option<&dyn GpuKernel> {
        Some(self)
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let &Self { cols, groups, per_row, x_ld, out_ld, to } = self;
        let (x, out) = (k.arg(0), k.arg(1));
        let words = packed_words(cols, to);
        k.tiles(ROWS, |_, first, end| {
            k.each(first * per_row, end * per_row, 1, |row| {
                k.each(0, groups, 1, |g| {
                    let from = x.words(row * x_ld + g * cols);
                    let read = |c: I<'k>, span| from.words(c).load_vec(span);
                    write_row(k, to, cols, &read, out.words(row * out_ld + g * words));
                });
            });
        });
    }
}

/// Writes a row of `cols` numbers in a compute type: `read(c, span)` gives those from column `c` on. Every
/// number is read before its destination is written.
pub(super) fn write_row<'k>(
    k: &'k Kb<'k>,
    compute: ComputeType,
    cols: usize,
    read: &dyn Fn(I<'k>, Span<'k>) -> F<'k>,
    to: P<'k>,
) {
    match compute {
        ComputeType::F32 => k.columns(cols, |c, span| to.words(c).store_vec(read(c, span), span)),
        ComputeType::Bf16 => pairs(k, read, to, cols),
        ComputeType::I8 => bytes(k, read, to, cols),
    }
}

fn pairs<'k>(k: &'k Kb<'k>, read: &dyn Fn(I<'k>, Span<'k>) -> F<'k>, to: P<'k>, cols: usize) {
    let lanes = k.lanes();
    let whole = cols / lanes * lanes;
    k.each(0, whole, lanes, |c| to.bytes(c * 2).store_bf16(read(c, Span::Full), Span::Full));
    if cols > whole {
        // The upper half of the last word of an odd row is zero.
        let (there, stored) = (k.span(cols - whole), k.span(cols.next_multiple_of(2) - whole));
        let x = read(k.i(whole as i64), there).within(there, 0.0);
        to.bytes(whole * 2).store_bf16(x, stored);
    }
}

/// Symmetric groups of 32: codes in −127 ..= 127 of the largest magnitude.
fn bytes<'k>(k: &'k Kb<'k>, read: &dyn Fn(I<'k>, Span<'k>) -> F<'k>, to: P<'k>, cols: usize) {
    let whole = cols / GROUP;
    k.each(0, whole, 1, |g| group(k, read, g * GROUP, to.bytes(g * ROW_GROUP), GROUP));
    if !cols.is_multiple_of(GROUP) {
        let first = k.i((whole * GROUP) as i64);
        group(k, read, first, to.bytes(whole * ROW_GROUP), cols % GROUP);
    }
}

fn group<'k>(k: &'k Kb<'k>, read: &dyn Fn(I<'k>, Span<'k>) -> F<'k>, first: I<'k>, to: P<'k>, count: usize) {
    let lanes = k.lanes();
    let part = |c: usize| {
        let span = k.span(count - c);
        read(first + c, span).within(span, 0.0)
    };
    let values: Vec<F<'k>> =
        (0..GROUP).step_by(lanes).map(|c| if c < count { part(c) } else { k.fv(0.0) }).collect();
    let most = values.iter().skip(1).fold(values[0].abs(), |most, x| most.max(x.abs())).lanes_max();
    let by = most.gt(k.f(0.0)).pick(k.f(127.0) / most, k.f(0.0)).splat();
    let codes: Vec<I<'k>> = values.iter().map(|&x| (x * by).to_int()).collect();
    for (i, &c) in codes.iter().enumerate() {
        to.bytes(i * lanes).store_bytes(c);
    }
    let sum = codes.iter().skip(1).fold(codes[0], |sum, &c| sum + c).lanes_sum();
    to.bytes(SCALE).store(most * (1.0 / 127.0));
    to.bytes(CORRECTION).store_int(k.i32(0) - sum.shl(7));
}
