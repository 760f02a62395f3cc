//! Int8 gate bounds: an upper bound of a gate, from half its bytes or fewer.
//!
//! A gate bound takes as long to read as to multiply, one byte after the other widened to f32. So where a
//! machine multiplies bytes a row becomes 16-bit integers, in two planes of bytes, and a vector of codes
//! takes two instructions. What the integers miss is bounded too.

use super::numbers::{Row, dot, norm};
use super::{AHEAD, MAYBE};
use crate::dsl::{F, I, Kb, LINE, P};
use crate::machine::{ByteDot, Isa};
use moec_ir::bundle::Bundle;

/// Largest of the integers: `127 · 256`, so that the upper plane is in −127 ..= 127.
const MOST: f32 = 32512.0;
/// Numbers of a row whose sums of `255 · 128` are sure to be below 2³¹.
const LONGEST: usize = 1 << 16;

/// Words that describe a row: its norm, the error of its integers, their unit, and of both planes `128 · Σ`.
const NORM: usize = 0;
const MISSED: usize = 1;
const UNIT: usize = 2;
const SUMS: usize = 3;

/// Method by which rows are multiplied by gate bounds.
#[derive(Clone, Copy)]
pub(super) struct GateBounds {
    bundle: Bundle,
    /// Bytes of a plane; 0 where rows stay f32.
    plane: usize,
    vector: usize,
}

impl GateBounds {
    pub(super) fn new(isa: &Isa, bundle: Bundle) -> Self {
        let vector = 4 * isa.lanes;
        let by_bytes = isa.bytes != ByteDot::None && bundle.hidden <= LONGEST;
        Self { bundle, vector, plane: if by_bytes { bundle.hidden.next_multiple_of(vector) } else { 0 } }
    }

    /// Bytes of a row in scratch.
    pub(super) const fn row_bytes(self) -> usize {
        LINE + 2 * self.plane
    }

    /// Place of the row of a slot.
    fn row<'k>(self, k: &'k Kb<'k>, slot: I<'k>) -> P<'k> {
        k.scratch().bytes(MAYBE).bytes(slot * self.row_bytes())
    }

    /// Writes a row to scratch, as that of `slot` of its expert.
    pub(super) fn prepare<'k>(self, k: &'k Kb<'k>, x: P<'k>, slot: I<'k>) {
        let (hidden, to) = (self.bundle.hidden, self.row(k, slot));
        to.words(NORM).store(norm(k, x, hidden));
        to.words(MISSED).store(k.f(0.0));
        if self.plane == 0 {
            return;
        }
        let largest = |most: F<'k>, c: I<'k>, span| most.max(x.words(c).load_vec(span).abs());
        let most = k.fold_columns(hidden, 4, k.fv(0.0), largest, F::max).lanes_max();
        let by = most.gt(k.f(0.0)).pick(k.f(MOST) / most, k.f(0.0)).splat();
        let unit = most * (1.0 / MOST);
        to.words(UNIT).store(unit);
        // Half a unit each, at most; rounding of the products is within the slack of the bound.
        to.words(MISSED).store(unit * (0.5005 * (hidden as f32).sqrt()));
        let planes = [0, 1].map(|i| self.plane_at(to, i));
        for plane in planes {
            plane.bytes(self.plane - self.vector).store_int(k.i32v(0));
        }
        k.columns(hidden, |c, span| {
            let x = (x.words(c).load_vec(span) * by).to_int();
            let upper = (x + 128).shr(8);
            planes[0].bytes(c).store_bytes(upper);
            planes[1].bytes(c).store_bytes(x - upper.shl(8));
        });
        for (i, plane) in planes.into_iter().enumerate() {
            let sum = k.fold(0, self.plane, self.vector, &[k.i32v(0)], |at, sum| {
                vec![k.dot_bytes(sum[0], k.i32v(0x8080_8080_u32.cast_signed()), plane.bytes(at).load_ints())]
            });
            to.words(SUMS + i).store_int(sum[0].lanes_sum());
        }
    }

    fn plane_at(self, row: P<'_>, i: usize) -> P<'_> {
        row.bytes(LINE + i * self.plane)
    }

    /// Upper bound of the gate whose bound is at `gate_bound`, for `x`, the row of a slot.
    pub(super) fn upper_bound<'k>(self, k: &'k Kb<'k>, gate_bound: P<'k>, x: P<'k>, slot: I<'k>) -> F<'k> {
        let row = self.row(k, slot);
        let facts = gate_bound.bytes(self.bundle.codes_bytes());
        let [scale, bound, kept] = [0, 1, 2].map(|i| facts.words(i).load());
        let sum = if self.plane == 0 {
            dot(k, &Row::codes(k, self.bundle.hidden, gate_bound), x, Some(AHEAD))
        } else {
            self.dot_codes(k, gate_bound, row)
        };
        sum * scale + bound * row.words(NORM).load() + kept * row.words(MISSED).load()
    }

    /// `Σ code·x` of the integers of a row.
    fn dot_codes<'k>(self, k: &'k Kb<'k>, gate_bound: P<'k>, row: P<'k>) -> F<'k> {
        let above = k.isa.bytes == ByteDot::Vnni;
        let planes = [0, 1].map(|i| self.plane_at(row, i));
        let step = |at: I<'k>, sums: &mut [I<'k>]| {
            let from = gate_bound.bytes(at);
            from.beyond(AHEAD).prefetch();
            let codes = from.load_ints();
            let codes = if above { codes ^ 0x8080_8080 } else { codes };
            for (sum, plane) in sums.iter_mut().zip(planes) {
                *sum = k.dot_bytes(*sum, codes, plane.bytes(at).load_ints());
            }
        };
        gate_bound.beyond(self.bundle.codes_bytes() + AHEAD).prefetch();
        let turn = 2 * self.vector;
        let whole = self.plane / turn * turn;
        let mut sums = vec![k.i32v(0); 4];
        if whole > 0 {
            sums = k.fold(0, whole, turn, &sums, |at, sums| {
                let mut sums = sums.to_vec();
                let (even, odd) = sums.split_at_mut(2);
                step(at, even);
                step(at + self.vector, odd);
                sums
            });
        }
        if whole < self.plane {
            step(k.i(whole as i64), &mut sums[..2]);
        }
        let [upper, lower] = [0, 1].map(|i| {
            let sum = (sums[i] + sums[i + 2]).lanes_sum();
            let sum = if above { sum - row.words(SUMS + i).load_word() } else { sum };
            sum.to_float()
        });
        (upper * 256.0 + lower) * row.words(UNIT).load()
    }
}
