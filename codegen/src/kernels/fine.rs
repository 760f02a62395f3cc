//! Scales of a group of codes, for each of its runs, and what is taken off: the numbers of every format of
//! codes, those with scales of two levels ([`moec_ir::types::Fine`]) among them.

use super::panel::{Panel, group_bytes, is_nibbles};
use super::unpack::{from_planes, plain_scale};
use crate::dsl::{F, I, Kb, P, Span};
use moec_ir::types::{Coding, FINE_BYTES, Format, GROUP};

/// Bytes of a scale of a group.
const HALF: usize = 2;

/// Scale of a run, and what is taken off its numbers.
#[derive(Clone, Copy)]
struct Run<'k> {
    by: F<'k>,
    minimum: Option<F<'k>>,
}

/// Scales of a block's runs: a number is `by · (code + offset) − minimum`, without minima `by · code`.
#[derive(Clone, Copy)]
pub(super) struct Scales<'k> {
    lower: Run<'k>,
    /// Of the upper half, where that has its own.
    upper: Option<Run<'k>>,
    offset: f32,
}

impl<'k> Scales<'k> {
    /// Those of group `index` for the columns from `column` on, for codes as they are.
    pub(super) fn new(k: &'k Kb<'k>, panel: &Panel<'k>, index: I<'k>, group: P<'k>, column: usize) -> Self {
        let format = panel.format;
        if !format.has_fine_scales() {
            let by = plain_scale(k, panel, index, group, column);
            return Self { lower: Run { by, minimum: None }, upper: None, offset: 0.0 };
        }
        let nr = k.isa.nr;
        let units = panel.group_scales(k, index, group, 0);
        let unit = |i: usize| units.bytes(HALF * (i * nr + column)).load_weights(format.scales(), Span::Full);
        let fine = group.bytes(nr * format.code_bytes() + column * FINE_BYTES).load_halves();
        of(format, fine, &unit)
    }

    /// For codes that are this many times themselves, a power of two.
    pub(super) fn of_multiples(self, k: &'k Kb<'k>, of: f32) -> Self {
        let by = |run: Run<'k>| Run { by: run.by * k.f(1.0 / of), ..run };
        Self { lower: by(self.lower), upper: self.upper.map(by), offset: of * self.offset }
    }

    /// The same with every vector changed.
    pub(super) fn map(self, change: impl Fn(F<'k>) -> F<'k>) -> Self {
        let changed = |run: Run<'k>| Run { by: change(run.by), minimum: run.minimum.map(&change) };
        Self { lower: changed(self.lower), upper: self.upper.map(changed), offset: self.offset }
    }

    fn run(&self, run: usize) -> Run<'k> {
        self.upper.filter(|_| run > 0).unwrap_or(self.lower)
    }

    /// Scale of a run.
    pub(super) fn of_run(&self, run: usize) -> F<'k> {
        self.run(run).by
    }

    /// The number of a code of quad `quad`.
    pub(super) fn number(&self, quad: usize, code: F<'k>) -> F<'k> {
        let Run { by, minimum } = self.run(quad / (GROUP / 8));
        match minimum {
            Some(minimum) => (code + self.offset) * by - minimum,
            None => code * by,
        }
    }

    /// Factor of a row's sum over a run, which is taken off its products with codes.
    pub(super) fn of_sum(&self, run: usize) -> Option<F<'k>> {
        let Run { by, minimum } = self.run(run);
        minimum.map(|minimum| minimum - by * self.offset)
    }
}

/// Scales of two levels by the fine ones of a block, one or a vector, and the scales of its group.
fn of<'k>(format: Format, fine: I<'k>, unit: &dyn Fn(usize) -> F<'k>) -> Scales<'k> {
    let minima = format.fine().is_some_and(|fine| fine.minima);
    let two = format.runs() > 1;
    // A byte, signed, and half a byte.
    let byte = |i: i64| fine.shl(24 - 8 * i).shr(24).to_float();
    let half = |i: i64| (fine.shr(4 * i) & 15).to_float();
    let scale = |run: i64| if two && minima { half(2 * run) } else { byte(run) };
    let minimum = |run: i64| if two { half(2 * run + 1) } else { byte(1) };
    let run = |run: i64| Run { by: scale(run) * unit(0), minimum: minima.then(|| minimum(run) * unit(1)) };
    let lowest = format.spec().codes.filter(|_| minima).map_or(0, |codes| codes.lowest);
    Scales { lower: run(0), upper: two.then(|| run(1)), offset: -f32::from(lowest) }
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
            let nibbles = || word(quad % 4).logical_shr(4 * (quad / 4) as i64) & 0x0f0f_0f0f;
            let codes = match format.coding() {
                Some(Coding::Nibbles) if is_nibbles(format) => nibbles(),
                Some(Coding::Nibbles) => nibbles().codes_at(format.grid(), 0),
                _ => from_planes(format, quad, &word, 0),
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
