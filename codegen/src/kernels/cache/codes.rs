//! Keys and values in codes: parts of their panels and blocks, and rounding.

use super::BLOCK;
use crate::dsl::{F, I, Kb, P};
use moec_ir::types::{Format, GROUP};

/// Bytes of a group of 32 channels in a panel of keys.
pub(super) fn panel_group_bytes(format: Format, nr: usize) -> usize {
    nr * format.group_bytes().unwrap_or(0)
}

/// The codes that [`quantise`] left in the scratch, four bytes each.
pub(super) fn quads<'k>(k: &'k Kb<'k>) -> Vec<I<'k>> {
    (0..GROUP / 4).map(|quad| k.scratch().words(quad).load_word()).collect()
}

/// Low four bits of two quads, those of the second above the first's.
pub(super) fn low_bits<'k>(first: I<'k>, second: I<'k>) -> I<'k> {
    (first & 0x0f0f_0f0f) | (second & 0x0f0f_0f0f).shl(4)
}

/// Fifth bits of a quad, in the lowest bits.
pub(super) fn fifth_bits(quad: I<'_>) -> I<'_> {
    let bits = quad.shr(4) & 0x0101_0101;
    let pairs = (bits | bits.shr(7)) & 0x0003_0003;
    (pairs | pairs.shr(14)) & 15
}

/// Parts of a block of values in q8, q5 or q4.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct Values<'k> {
    format: Format,
    block: P<'k>,
    /// Fifth bits, in q5.
    fifth: Option<P<'k>>,
    /// Scales of group 0; those of a group are [`BLOCK`].
    pub(in crate::kernels) scales: P<'k>,
}

/// A panel of codes of values.
pub(in crate::kernels) struct ValuePanel<'k> {
    format: Format,
    /// Bytes: codes in q8, else the low four bits of two.
    pub(super) low: P<'k>,
    pub(super) fifth: Option<P<'k>>,
}

impl<'k> Values<'k> {
    pub(in crate::kernels) fn of(k: &Kb<'k>, format: Format, dim: usize, block: P<'k>) -> Self {
        let codes = dim.next_multiple_of(k.isa.nr) * BLOCK;
        let fifth = (format == Format::Q5).then(|| block.bytes(codes / 2));
        Self { format, block, fifth, scales: block.bytes(codes * format.spec().bits / 8) }
    }

    pub(in crate::kernels) fn panel(&self, k: &'k Kb<'k>, panel: I<'k>) -> ValuePanel<'k> {
        let codes = k.isa.nr * BLOCK;
        let low = self.block.bytes(panel * if self.format == Format::Q8 { codes } else { codes / 2 });
        ValuePanel { format: self.format, low, fifth: self.fifth.map(|bits| bits.bytes(panel * (codes / 8))) }
    }
}

impl<'k> ValuePanel<'k> {
    /// Codes of token `first + more`, a vector of them from a column on that is 0 or the number of lanes.
    pub(in crate::kernels) fn codes(&self, k: &'k Kb<'k>, first: I<'k>, more: usize, column: usize) -> I<'k> {
        let nr = k.isa.nr;
        let token = |p: P<'k>, bytes: usize| p.bytes(first * bytes).bytes(more * bytes);
        if self.format == Format::Q8 {
            return token(self.low, nr).bytes(column).load_codes();
        }
        let both = token(self.low, nr / 2).load_bytes();
        let low = if column == 0 { both & 15 } else { both.shr(4) };
        let Some(fifth) = self.fifth else { return low - 8 };
        // A vector ends before the bits do: what is read past them is of the block, too.
        let own = k.lane_bits(column);
        let is_set = (token(fifth, nr / 8).load_bits() & own).equals(own);
        low - is_set.pick_int(k.i32v(0), k.i32v(16))
    }
}

/// Quantises `dim` numbers group by group: `store(group, numbers in it, scale as bf16)` finds the codes in
/// the scratch, those of q5 and q4 counted from the lowest code.
pub(super) fn quantise<'k>(
    k: &'k Kb<'k>,
    format: Format,
    x: P<'k>,
    dim: usize,
    store: impl Fn(I<'k>, usize, I<'k>),
) {
    let lanes = k.lanes();
    let Some(codes) = format.spec().codes else { return k.fail("a cache without codes") };
    let (lowest, highest) = (f32::from(codes.lowest), f32::from(codes.highest));
    // The largest number has the lowest code, of which there is one more than of the highest.
    let is_signed = codes.lowest != -codes.highest;
    let group = |g: I<'k>, width: usize| {
        let x = x.words(g * GROUP);
        let parts: Vec<F<'k>> = (0..GROUP)
            .step_by(lanes)
            .map(|c| match width.saturating_sub(c) {
                0 => k.fv(0.0),
                n => x.words(c).load_vec(k.span(n)),
            })
            .collect();
        let largest = |of: &dyn Fn(F<'k>) -> F<'k>| {
            parts.iter().fold(k.fv(0.0), |top, &p| top.max(of(p))).lanes_max().splat()
        };
        let scale = if is_signed {
            let [above, below] = [largest(&|p| p), largest(&|p| -p)];
            below.gt(above).pick(-below, above) * (1.0 / lowest)
        } else {
            largest(&F::abs) * (1.0 / highest)
        };
        let scale = scale.to_bf16();
        let step = scale.shl(16).as_float();
        let is_zero = step.equals(k.fv(0.0));
        let inverse = is_zero.pick(k.fv(0.0), k.fv(1.0) / step);
        for (i, &p) in parts.iter().enumerate() {
            let code = (p * inverse).at_least(lowest).at_most(highest).to_int();
            let code = if is_signed { code + usize::from(codes.lowest.unsigned_abs()) } else { code };
            k.scratch().bytes(i * lanes).store_bytes(code);
        }
        store(g, width, scale.first());
    };
    k.each(0, dim / GROUP, 1, |g| group(g, GROUP));
    if !dim.is_multiple_of(GROUP) {
        group(k.i((dim / GROUP) as i64), dim % GROUP);
    }
}

/// Scales of a group of a panel of keys, for codes as kernels load them.
pub(in crate::kernels) fn key_scale(group: P<'_>, cached: Format, nr: usize, column: usize) -> F<'_> {
    let scale = group.bytes(nr * cached.block_bytes()).halves(column).load_halves().shl(16).as_float();
    // Codes of q4 are loaded as 16 times themselves.
    if cached == Format::Q4 { scale * (1.0 / 16.0) } else { scale }
}
