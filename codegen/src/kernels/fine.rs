//! Scales of a group of codes, for each of its runs, and what is taken off: the numbers of every format of
//! codes, those with scales of two levels ([`moec_ir::types::Fine`]) among them.

use super::panel::{Panel, group_bytes, is_nibbles};
use super::unpack::{from_planes, plain_scale};
use crate::dsl::{F, I, Kb, P, Span};
use moec_ir::types::{FINE_BYTES, Format, GROUP};

/// Bytes of a scale of a group.
const HALF: usize = 2;

/// Scales of a block's runs, and what is taken off: a number is `scale · (code + offset) − minimum`.
#[derive(Clone, Copy)]
pub(super) struct Scales<'k> {
    by: F<'k>,
    /// Of the upper half, where that has another one.
    upper: Option<F<'k>>,
    /// Offset in multiples of codes, and the minimum.
    minimum: Option<(f32, F<'k>)>,
}

impl<'k> Scales<'k> {
    /// Those of group `index` for the columns from `column` on, for codes as they are.
    pub(super) fn new(k: &'k Kb<'k>, panel: &Panel<'k>, index: I<'k>, group: P<'k>, column: usize) -> Self {
        let format = panel.format;
        if !format.has_fine_scales() {
            let by = plain_scale(k, panel, index, group, column);
            return Self { by, upper: None, minimum: None };
        }
        let nr = k.isa.nr;
        let units = panel.group_scales(k, index, group, 0);
        let unit = |i: usize| units.bytes(HALF * (i * nr + column)).load_weights(format.scales(), Span::Full);
        let fine = group.bytes(nr * format.code_bytes() + column * FINE_BYTES).load_halves();
        of(format, fine, &unit)
    }

    /// For codes that are this many times themselves, a power of two.
    pub(super) fn of_multiples(self, k: &'k Kb<'k>, of: f32) -> Self {
        let by = |by: F<'k>| by * k.f(1.0 / of);
        let minimum = self.minimum.map(|(offset, minimum)| (of * offset, minimum));
        Self { by: by(self.by), upper: self.upper.map(by), minimum }
    }

    /// The same with every vector changed.
    pub(super) fn map(self, change: impl Fn(F<'k>) -> F<'k>) -> Self {
        let Self { by, upper, minimum } = self;
        let minimum = minimum.map(|(offset, minimum)| (offset, change(minimum)));
        Self { by: change(by), upper: upper.map(&change), minimum }
    }

    /// Scale of a run.
    pub(super) fn of_run(&self, run: usize) -> F<'k> {
        self.upper.filter(|_| run > 0).unwrap_or(self.by)
    }

    /// The number of a code of quad `quad`.
    pub(super) fn number(&self, quad: usize, code: F<'k>) -> F<'k> {
        let by = self.of_run(quad / (GROUP / 8));
        match self.minimum {
            Some((offset, minimum)) => (code + offset) * by - minimum,
            None => code * by,
        }
    }

    /// Factor of a row's sum over a block, which is taken off its products with codes.
    pub(super) fn of_sum(&self) -> Option<F<'k>> {
        self.minimum.map(|(offset, minimum)| minimum - self.by * offset)
    }
}

/// Scales of two levels by the fine ones of a block, one or a vector, and the scales of its group.
fn of<'k>(format: Format, fine: I<'k>, unit: &dyn Fn(usize) -> F<'k>) -> Scales<'k> {
    let scale = fine.shl(24).shr(24).to_float() * unit(0);
    let upper = fine.shl(16).shr(24).to_float();
    match format.spec().codes {
        Some(codes) if codes.fine.is_some_and(|fine| fine.minima) => {
            let minimum = Some((-f32::from(codes.lowest), upper * unit(1)));
            Scales { by: scale, upper: None, minimum }
        }
        _ => Scales { by: scale, upper: Some(upper * unit(0)), minimum: None },
    }
}

/// Column `column` of a panel of codes with scales of two levels, as f32.
pub(super) fn write_column<'k>(
    k: &'k Kb<'k>,
    format: Format,
    panel: P<'k>,
    column: I<'k>,
    cols: usize,
    out: P<'k>,
) {
    let (nr, blocks) = (k.isa.nr, (format.group() / GROUP) as i64);
    let bytes = group_bytes(format, nr);
    let groups = panel.bytes(cols.div_ceil(GROUP) * bytes);
    let block = |g: I<'k>, count: usize| {
        let (from, out) = (panel.bytes(g * bytes), out.words(g * GROUP));
        let units = groups.bytes(g.div(k.i(blocks)) * (nr * format.scale_bytes()));
        let unit = |i: usize| units.halves(column + i * nr).load_f16();
        let fine = from.bytes(nr * format.code_bytes()).halves(column).load_half();
        let scales = of(format, fine, &unit);
        let word = |i: usize| from.words(column + i * nr).load_int().narrow();
        for quad in 0..GROUP / 4 {
            let codes = if is_nibbles(format) {
                word(quad % 4).logical_shr(4 * (quad / 4) as i64) & 0x0f0f_0f0f
            } else {
                from_planes(format, quad, &word, 0)
            };
            for j in (0..4).filter(|j| 4 * quad + j < count) {
                let code = codes.signed_byte(j);
                let code = if is_nibbles(format) { code - 8_usize } else { code };
                out.words(4 * quad + j).store(scales.number(quad, code.to_float()));
            }
        }
    };
    super::embed::each_group(k, cols, block);
}
