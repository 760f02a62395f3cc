//! Rows of a weight that are stored in INT8 after panels of nibbles: their codes, brought to the columns of
//! their panel.
//!
//! A panel has as many of them as it has, and each is read along its input channels. Rows of bytes are
//! multiplied by it as such, eight words of four channels at a time; other rows are multiplied by the
//! unpacked panel, in which its column is written last.

use super::panel::Panel;
use super::quantise::{CORRECTION, ROW_GROUP, SCALE};
use crate::dsl::{F, I, Kb, P};
use crate::machine::ByteDot;
use moec_ir::types::{Format, GROUP};

/// Words of four channels in a group.
const QUADS: usize = GROUP / 4;

/// Writes their columns of an unpacked panel at `to`, f32 or pairs of bf16.
pub(super) fn unpack<'k>(k: &'k Kb<'k>, panel: &Panel<'k>, format: Format, to: P<'k>) {
    let (nr, lanes) = (k.isa.nr, k.lanes());
    panel.each_outlier(k, |column, codes| {
        let scale = panel.channel_scales(k).words(column).load().splat();
        let to = to.words(column);
        k.each(0, panel.depth.next_multiple_of(GROUP), lanes, |c| {
            let x = codes.bytes(c).load_codes().to_float() * scale;
            if format == Format::Bf16 {
                let halves = x.to_bf16().as_float();
                let to = to.words(c * (nr / 2));
                for i in 0..lanes {
                    to.words(i / 2 * nr).halves(i % 2).store_halves(halves.lane(i).bits());
                }
            } else {
                let to = to.words(c * nr);
                (0..lanes).for_each(|i| to.words(i * nr).store(x.lane(i)));
            }
        });
    });
}

/// Adds to the sums of rows `first .. end` of bytes what their columns give, times `by`; scales of columns
/// come later.
pub(super) fn add<'k>(
    k: &'k Kb<'k>,
    panel: &Panel<'k>,
    [first, end]: [I<'k>; 2],
    row: &dyn Fn(I<'k>) -> P<'k>,
    sums: &dyn Fn(I<'k>) -> P<'k>,
    by: f32,
) {
    let groups = panel.depth.div_ceil(GROUP);
    panel.each_outlier(k, |column, codes| {
        k.each(first, end, 1, |i| {
            let at = sums(i).words(column);
            at.store(at.load() + product(k, row(i), codes, groups) * k.f(by));
        });
    });
}

/// A row of bytes times the codes of one column.
fn product<'k>(k: &'k Kb<'k>, x: P<'k>, codes: P<'k>, groups: usize) -> F<'k> {
    // Vectors of sixteen lanes take two groups.
    let several = (k.lanes() / QUADS).max(1);
    let whole = groups / several * several;
    let sums = k.fold(0, whole, several, &[k.fv(0.0)], |g, sums| {
        let (x, codes) = (x.bytes(g * ROW_GROUP), codes.bytes(g * GROUP));
        let (words, scale, start) = if several == 1 { one(k, x) } else { two_groups(k, x) };
        let found = dot(k, start, codes.load_ints(), words);
        // And two vectors of four lanes are a group.
        let found = if k.lanes() < QUADS {
            let upper = |p: P<'k>| p.words(k.lanes()).load_ints();
            dot(k, found, upper(codes), upper(x))
        } else {
            found
        };
        vec![found.to_float().fma(scale, sums[0])]
    });
    let mut sum = sums[0];
    if whole < groups {
        let (x, codes) = (x.bytes(whole * ROW_GROUP), codes.bytes(whole * GROUP));
        let there = |p: P<'k>| p.load_vec(k.span(QUADS)).bits();
        let start = k.first_lanes(QUADS).pick_int(correction(k, x), k.i32v(0));
        let found = dot(k, start, there(codes), there(x));
        sum = found.to_float().fma(x.bytes(SCALE).load().splat(), sum);
    }
    sum.sum()
}

/// The first words of a group of a row, its scale, and where its sums begin.
fn one<'k>(k: &'k Kb<'k>, x: P<'k>) -> (I<'k>, F<'k>, I<'k>) {
    (x.load_ints(), x.bytes(SCALE).load().splat(), correction(k, x))
}

/// As [`one`], of two groups, one in each half of a vector.
fn two_groups<'k>(k: &'k Kb<'k>, x: P<'k>) -> (I<'k>, F<'k>, I<'k>) {
    let (lower, (a, scale, start)) = (k.first_lanes(QUADS), one(k, x));
    // The words of the second begin at the middle of this vector, and none after it is read.
    let (second, b) = (x.bytes(ROW_GROUP), x.bytes(ROW_GROUP - 4 * QUADS).load_ints());
    let (other, begin) = (second.bytes(SCALE).load().splat(), correction(k, second));
    (lower.pick_int(a, b), lower.pick(scale, other), lower.pick_int(start, begin))
}

/// `sum + Σ code·x` in every lane, of signed bytes.
fn dot<'k>(k: &'k Kb<'k>, sum: I<'k>, codes: I<'k>, x: I<'k>) -> I<'k> {
    let weights = if k.isa.bytes == ByteDot::Vnni { codes ^ 0x8080_8080 } else { codes };
    k.dot_bytes(sum, weights, x)
}

/// Initial sums of a group at `x`, an eighth in each of eight lanes: VNNI multiplies by `code + 128`, and the
/// row has −128 times its own sum.
fn correction<'k>(k: &'k Kb<'k>, x: P<'k>) -> I<'k> {
    if k.isa.bytes == ByteDot::Vnni {
        x.bytes(CORRECTION).load_word().shr(3).splat(k.lanes())
    } else {
        k.i32v(0)
    }
}
