//! The matrix microkernel: a few rows times one weight panel, accumulated in registers.

use super::panel::{Panel, Results, fetch};
use super::squares;
use crate::dsl::{F, I, Kb, LINE, P, Span};
use crate::schedule::{Schedule, least};
use crate::spec::{ComputeType, RowFormat};
use moec_ir::op::Glu;
use moec_ir::types::Format;

/// Passes over a panel that fetch the next one together.
pub(super) const QUARTERS: usize = 4;

/// Numbers of rows that the microkernel is written for, the largest first. 1 is the last.
pub(super) fn variants(mr: usize) -> impl Iterator<Item = usize> {
    let least = least(mr);
    (least..=mr).rev().chain([4, 2, 1].into_iter().filter(move |&m| m < least))
}

/// Cuts rows `first .. end` into groups for which the microkernel is written. With enough rows the groups are
/// even, since a small group waits for its sums and for the weights; otherwise they are greedy.
pub(crate) fn row_groups<'k>(
    k: &'k Kb<'k>,
    mr: usize,
    first: I<'k>,
    end: I<'k>,
    mut body: impl FnMut(I<'k>, usize),
) {
    let rows = end - first;
    let groups = (rows + (mr - 1)).div(k.i(mr as i64)).max(k.i(1));
    let (each, larger) = (rows.div(groups), rows.rem(groups));
    let evenly = each.ge(k.i(least(mr) as i64));
    let mut first = first;
    for m in variants(mr) {
        let size = k.i(m as i64);
        let greedily = (end - first).div(size);
        let count = if m >= least(mr) {
            let even = each.equals(size).pick_int(groups - larger, k.i(0));
            let even = (each + 1).equals(size).pick_int(larger, even);
            evenly.pick_int(even, greedily)
        } else {
            greedily
        };
        let stop = if m == 1 { end } else { first + count * m };
        k.each(first, stop, m, |row| body(row, m));
        first = stop;
    }
}

/// Rows times panel, for panels of f32, f16 and bf16: two vectors of columns for each row.
///
/// A step is one channel, or the pair of channels that a word of bf16 holds. `later` is a quarter of a panel
/// that is needed after this one: it is prefetched meanwhile.
pub(crate) fn product<'k>(
    k: &'k Kb<'k>,
    rows: &[P<'k>],
    panel: &Panel<'k>,
    later: Option<P<'k>>,
) -> Vec<[F<'k>; 2]> {
    if squares::supports(&k.isa, rows.len(), panel) {
        return squares::product(k, rows, panel);
    }
    // Few rows do not fill the pipeline: steps then take turns with several sets of accumulators.
    let splits = match rows.len() {
        1 => 4,
        2 => 2,
        _ => 1,
    };
    let mut sums = vec![k.fv(0.0); splits * rows.len() * 2];
    let per_step = if panel.format == Format::Bf16 { 2 } else { 1 };
    let bytes = panel.format.bytes(per_step * k.isa.nr);
    let step = |at: I<'k>, u: usize, channels: usize, sums: &mut [F<'k>]| {
        let from = panel.weights.bytes(at * bytes).bytes(u * bytes);
        let set = &mut sums[u % splits * rows.len() * 2..];
        match (panel.format, panel.compute) {
            (Format::Bf16, ComputeType::Bf16) => pairs(k, rows, from, at, u, set),
            (Format::Bf16, _) => {
                for odd in 0..channels {
                    let rows: Vec<P<'k>> = rows.iter().map(|r| r.words(at * 2).words(2 * u + odd)).collect();
                    outer(&rows, widened(k, from, odd), set);
                }
            }
            (format, _) => {
                let rows: Vec<P<'k>> = rows.iter().map(|r| r.words(at).words(u)).collect();
                let second = from.elements(k.lanes(), format);
                let w = [from.load_weights(format, Span::Full), second.load_weights(format, Span::Full)];
                outer(&rows, w, set);
            }
        }
    };
    let Schedule { unroll, ahead, .. } = panel.schedule;
    // Many rows are work enough for an iteration.
    let unroll = if rows.len() >= least(k.isa.mr) { unroll / 2 } else { unroll };
    let steps = panel.depth / per_step;
    let whole = steps / unroll * unroll;
    if whole > 0 {
        sums = k.fold(0, whole, unroll, &sums, |at, sums| {
            let mut sums = sums.to_vec();
            let from = panel.weights.bytes(at * bytes);
            // One row has nothing that waits for the lines of other steps.
            let at_once = if rows.len() == 1 { unroll } else { 0 };
            fetch(from, at_once * bytes, ahead);
            if let Some(later) = later {
                let quarter = later.bytes(at * (bytes / QUARTERS));
                for line in (0..unroll * bytes / QUARTERS).step_by(LINE) {
                    quarter.beyond(line).prefetch_far();
                }
            }
            for u in 0..unroll {
                step(at, u, per_step, &mut sums);
                if at_once == 0 {
                    fetch(from.bytes(u * bytes), bytes, ahead);
                }
            }
            sums
        });
    }
    for u in 0..steps - whole {
        step(k.i(whole as i64), u, per_step, &mut sums);
    }
    if panel.depth > steps * per_step {
        step(k.i(whole as i64), steps - whole, 1, &mut sums);
    }
    let mut sets = sums.chunks_exact(rows.len() * 2);
    let mut total = sets.next().unwrap_or_default().to_vec();
    for set in sets {
        for (t, &s) in total.iter_mut().zip(set) {
            *t = *t + s;
        }
    }
    total.chunks_exact(2).map(|pair| [pair[0], pair[1]]).collect()
}

/// One channel: the number at each row's address times two vectors of weights.
pub(super) fn outer<'k>(rows: &[P<'k>], w: [F<'k>; 2], sums: &mut [F<'k>]) {
    for (row, sums) in rows.iter().zip(sums.chunks_exact_mut(2)) {
        let x = row.load().splat();
        for (sum, w) in sums.iter_mut().zip(w) {
            *sum = x.fma(w, *sum);
        }
    }
}

/// Two channels of bf16 at once.
pub(super) fn pairs<'k>(k: &'k Kb<'k>, rows: &[P<'k>], from: P<'k>, at: I<'k>, u: usize, sums: &mut [F<'k>]) {
    let w = [from.load_ints(), from.words(k.lanes()).load_ints()];
    for (row, sums) in rows.iter().zip(sums.chunks_exact_mut(2)) {
        let x = row.words(at).words(u).load_word().splat(k.lanes());
        for (sum, w) in sums.iter_mut().zip(w) {
            *sum = k.dot_pairs(*sum, w, x);
        }
    }
}

/// The even or the odd channel of a row of bf16 pairs, as f32: one shift or one mask away.
pub(super) fn widened<'k>(k: &'k Kb<'k>, from: P<'k>, odd: usize) -> [F<'k>; 2] {
    [from, from.words(k.lanes())].map(|p| {
        let pairs = p.load_ints();
        if odd == 0 { pairs.shl(16).as_float() } else { (pairs & 0xffff_0000).as_float() }
    })
}

/// The output columns of a panel: one vector with a gated epilogue, else two.
pub(crate) struct Columns<'k> {
    first: I<'k>,
    /// Rows of the weight up to the up projection, with a gated epilogue.
    gates: Option<usize>,
    glu: Option<Glu>,
    lanes: usize,
    spans: Vec<Span<'k>>,
    /// As `spans`, up to a whole pair.
    pairs: Vec<Span<'k>>,
}

impl<'k> Columns<'k> {
    /// The columns of panel `p` of a weight with `n` rows.
    pub(crate) fn of(k: &'k Kb<'k>, p: I<'k>, n: usize, glu: Option<Glu>) -> Self {
        let gates = glu.filter(|glu| glu.is_gated()).map(|_| n / 2);
        let (width, count) = gates.map_or((k.isa.nr, n), |gates| (k.isa.nr / 2, gates));
        let first = p * width;
        let spans = |count: usize| {
            let span = |at: usize| {
                let left = k.i(count as i64) - (first + at);
                if count.is_multiple_of(width) { Span::Full } else { k.span_before(left) }
            };
            (0..width).step_by(k.lanes()).map(span).collect()
        };
        let (spans, pairs) = (spans(count), spans(count.next_multiple_of(2)));
        Self { first, gates, glu, lanes: k.lanes(), spans, pairs }
    }

    /// Destination of a panel's results: `out` is where those of row 0 begin.
    pub(crate) fn results(&self, out: P<'k>, format: RowFormat) -> Results<'k> {
        let (at, bytes) =
            (self.address(format.compute, out), self.spans.len() * self.lanes * number_bytes(format.compute));
        let whole = self.spans.iter().all(|span| matches!(span, Span::Full));
        // Of bf16 a panel with a gated epilogue has half a line.
        let lines = whole && format.compute == ComputeType::F32 && format.ld.is_multiple_of(LINE / 4);
        Results { at, ld: format.ld, bytes, lines }
    }

    /// Address of a panel's columns in a row that begins at `row`.
    fn address(&self, compute: ComputeType, row: P<'k>) -> P<'k> {
        row.bytes(self.first * number_bytes(compute))
    }

    /// The bias of the two accumulators, in the weight's natural order.
    pub(crate) fn bias(&self, k: &'k Kb<'k>, bias: P<'k>) -> [F<'k>; 2] {
        let at = bias.words(self.first);
        let second = self.gates.unwrap_or(k.lanes());
        let span = |i: usize| self.spans.get(i).or(self.spans.first()).copied().unwrap_or(Span::Full);
        [at.load_vec(span(0)), at.words(second).load_vec(span(1))]
    }

    /// Epilogue of one row: bias, gate, residual, store. `out` and `residual` are where the row begins.
    pub(crate) fn store(
        &self,
        sums: [F<'k>; 2],
        bias: Option<[F<'k>; 2]>,
        residual: Option<P<'k>>,
        out: P<'k>,
    ) {
        self.store_as(ComputeType::F32, sums, bias, residual, out);
    }

    /// As [`Self::store`], in a compute type: f32 or pairs of bf16.
    pub(crate) fn store_as(
        &self,
        compute: ComputeType,
        sums: [F<'k>; 2],
        bias: Option<[F<'k>; 2]>,
        residual: Option<P<'k>>,
        out: P<'k>,
    ) {
        let [a, b] = match bias {
            Some([x, y]) => [sums[0] + x, sums[1] + y],
            None => sums,
        };
        let values = match self.glu {
            Some(Glu::Ungated(act)) => vec![a.activate(act), b.activate(act)],
            Some(glu) => vec![a.glu(b, glu)],
            None => vec![a, b],
        };
        let mut at = 0;
        for ((x, &span), &pairs) in values.into_iter().zip(&self.spans).zip(&self.pairs) {
            let x = match residual {
                Some(r) => x + r.words(self.first).words(at).load_vec(span),
                None => x,
            };
            let to = self.address(compute, out).bytes(at * number_bytes(compute));
            match compute {
                // The upper half of the last word of an odd row is zero.
                ComputeType::Bf16 => to.store_bf16(x.within(span, 0.0), pairs),
                _ => to.store_vec(x, span),
            }
            at += x.width();
        }
    }
}

/// Bytes of a number of a row.
const fn number_bytes(compute: ComputeType) -> usize {
    match compute {
        ComputeType::F32 => 4,
        ComputeType::Bf16 => 2,
        ComputeType::I8 => 1,
    }
}
