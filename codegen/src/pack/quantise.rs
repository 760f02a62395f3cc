//! Groups of numbers as whole codes times a scale.
//!
//! A group's scale and codes are chosen so that the weighted squared error `Σ wᵢ (xᵢ − s·qᵢ)²` is small, with
//! `s` the scale as it is stored, in bf16 or f16. The codes of [`Group::nearest`] are the nearest ones to
//! that scale, which [`Group::with_scale`] can thus repeat; those of [`super::Feedback`] are not. Groups of
//! E2M1 have a way of their own (`e2m1`), and so have quads by patterns (`patterns`), whose codes depend on
//! weights, too.
//!
//! Everything here is written as loops over fixed arrays, which the compiler turns into vector code. No
//! operation depends on the machine, so two builds give the same bytes.

pub use super::group::Group;
use super::{e2m1, patterns, scale};
pub use moec_ir::types::LARGEST;
use moec_ir::types::{Format, GROUP};
use std::hint::black_box;

/// Numbers that are summed side by side.
const LANES: usize = 8;

/// Numbers of this size have no fraction: a number added to it is rounded, ties to even, and is then in its
/// lowest bits.
const WHOLE: f32 = 12_582_912.0;

/// Groups with no larger number are stored as zero: their scale would leave the range of bf16.
pub(super) const SMALLEST: f32 = 1e-30;

/// Bits of codes so few that the best scale is worth a search ([`TOPS`]).
const FEW_BITS: usize = 4;

/// Codes of a grouped format.
#[derive(Clone, Copy, Debug)]
pub(super) struct Codes {
    lowest: f32,
    highest: f32,
    /// Of a grid in ascending order: where each code but the lowest begins, and how far it is above the one before.
    borders: [(f32, f32); MOST_BORDERS],
    /// Number of these; 0 where codes are whole numbers.
    count: usize,
}

/// Borders of a grid of 4 bits.
const MOST_BORDERS: usize = 15;

impl Codes {
    pub(super) const Q4: Self = Self::of(Format::Q4);

    pub(super) const fn of(format: Format) -> Self {
        let mut found = Self { lowest: 0.0, highest: 0.0, borders: [(0.0, 0.0); MOST_BORDERS], count: 0 };
        let Some(codes) = &format.spec().codes else { return found };
        (found.lowest, found.highest) = (codes.lowest as f32, codes.highest as f32);
        // Numbers of E2M1 are rounded by `e2m1`.
        while !codes.powers && found.count + 1 < codes.grid.len() {
            let (below, code) = (codes.grid[found.count] as f32, codes.grid[found.count + 1] as f32);
            found.borders[found.count] = (f32::midpoint(below, code), code - below);
            found.count += 1;
        }
        found
    }

    /// The nearest codes; ties to even, of a grid to the lower one.
    #[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
    #[inline(always)]
    pub(super) fn nearest<const N: usize>(&self, x: &[f32; N]) -> [f32; N] {
        let mut found = *x;
        if self.count == 0 {
            for x in &mut found {
                // Comparisons written out: `clamp` minds NaN, which costs instructions.
                let low = if *x < self.lowest { self.lowest } else { *x };
                let both = if low > self.highest { self.highest } else { low };
                *x = (both + WHOLE) - WHOLE;
            }
            return found;
        }
        found = [self.lowest; N];
        for &(border, step) in self.borders.iter().take(self.count) {
            for i in 0..N {
                found[i] += if x[i] > border { step } else { 0.0 };
            }
        }
        found
    }
}

impl Group {
    /// The group that represents `x` in a grouped format. `weights` are the weights of the numbers' errors,
    /// finite and not negative; all zero means the same as all one. Numbers of `x` are at most [`LARGEST`] in
    /// magnitude.
    #[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
    #[inline(always)]
    pub fn nearest(format: Format, x: &[f32; GROUP], weights: &[f32; GROUP]) -> Self {
        let extreme = extreme(x);
        let size = extreme.abs();
        if size.is_nan() || !(SMALLEST..=format.spec().largest).contains(&size) {
            return Self::ZERO;
        }
        let total = weights.iter().sum::<f32>();
        let even = total.is_nan() || !(1e-30..=1e30).contains(&total);
        let w = if even { [1.0; GROUP] } else { *weights };
        if has_powers(format) {
            return e2m1::nearest(x, size, &w);
        }
        if let Some(patterns) = patterns::Patterns::of(format) {
            let mut found = Self::ZERO;
            patterns.nearest(x, Some(&w), |group| found = group);
            return found;
        }
        // Divided by a power of two: products neither overflow nor lose digits.
        let power = size.to_bits() & 0x7f80_0000;
        let (up, down) = (f32::from_bits(power), f32::from_bits(0x7f00_0000 - power));
        // Loops: `map` is called, and not vectorised.
        let mut near = *x;
        for x in &mut near {
            *x *= down;
        }
        let fit = Fit::new(near, w, format);
        let extreme = extreme * down;
        let (short, codes) =
            if format.spec().bits > FEW_BITS { fit.q8(extreme) } else { fit.few_bits(extreme) };
        let mut whole = [0; GROUP];
        for i in 0..GROUP {
            whole[i] = (codes[i] + WHOLE).to_bits() as i8;
        }
        let scale = scale::nearest(format, short * up);
        if scale == short * up && scale != 0.0 {
            return Self { scale, codes: whole };
        }
        // Below the smallest normal number of f16 a scale has fewer digits, and 0 has no codes.
        Self::with_scale(format, x, scale)
    }

    /// The nearest codes to a scale that is given.
    pub fn with_scale(format: Format, x: &[f32; GROUP], scale: f32) -> Self {
        if has_powers(format) && scale > 0.0 && scale.is_finite() {
            return e2m1::at(x, scale);
        }
        if let Some(patterns) = patterns::Patterns::of(format) {
            return patterns.at(x, scale);
        }
        let by = 1.0 / scale;
        if !by.is_finite() {
            return Self::ZERO;
        }
        Self { scale, codes: Codes::of(format).nearest(&x.map(|x| x * by)).map(|code| code as i8) }
    }

    /// The group that numbers were read back from: a scale and codes that give them exactly. If there is no
    /// such group, the result of [`Group::nearest`] with equal weights.
    pub fn recover(format: Format, x: &[f32; GROUP]) -> Self {
        if let Some(patterns) = patterns::Patterns::of(format) {
            let mut found = Self::ZERO;
            patterns.recover(x, |group| found = group);
            return found;
        }
        let largest = extreme(x);
        if largest.is_finite() && largest != 0.0 {
            let codes = Codes::of(format);
            let top = if largest < 0.0 { codes.lowest } else { codes.highest };
            // The largest number has the largest code, most often that at the end of the range; scales have
            // either sign.
            let most = codes.highest.max(-codes.lowest) as i16;
            for top in
                (1..=most).rev().flat_map(|c| [f32::from(c).copysign(top), f32::from(c).copysign(-top)])
            {
                let found = Self::with_scale(format, x, scale::nearest(format, largest / top));
                if found.values() == *x {
                    return found;
                }
            }
        }
        Self::nearest(format, x, &[1.0; GROUP])
    }
}

/// Whether scales are powers of two, as those of E2M1.
fn has_powers(format: Format) -> bool {
    format.spec().codes.is_some_and(|codes| codes.powers)
}

/// The number of the largest magnitude, with its sign; NaN if there is one.
#[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
#[inline(always)]
fn extreme(x: &[f32; GROUP]) -> f32 {
    let (mut low, mut high, mut sum) = ([0.0_f32; LANES], [0.0_f32; LANES], [0.0_f32; LANES]);
    for x in x.chunks_exact(LANES) {
        for (i, &x) in x.iter().enumerate() {
            low[i] = if x < low[i] { x } else { low[i] };
            high[i] = if x > high[i] { x } else { high[i] };
            sum[i] += x * 0.0;
        }
    }
    let low = low.into_iter().fold(0.0_f32, f32::min);
    let high = high.into_iter().fold(0.0_f32, f32::max);
    // Infinities and NaNs times zero are NaN.
    (if -low > high { low } else { high }) + total(sum)
}

#[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
#[inline(always)]
fn total(lanes: [f32; LANES]) -> f32 {
    // Through memory. Otherwise the compiler begins with the halves that are added here, and vectorises all
    // that leads to them at half the width.
    let [a, b, c, d, e, f, g, h] = black_box(lanes);
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

/// Numbers whose scale is looked for.
struct Fit {
    x: [f32; GROUP],
    w: [f32; GROUP],
    wx: [f32; GROUP],
    range: Codes,
    format: Format,
    /// Whether errors matter differently.
    uneven: bool,
}

/// A scale, its codes, and what they miss.
#[derive(Clone, Copy)]
struct Trial {
    scale: f32,
    codes: [f32; GROUP],
    error: f32,
}

impl Fit {
    #[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
    #[inline(always)]
    fn new(x: [f32; GROUP], w: [f32; GROUP], format: Format) -> Self {
        let range = Codes::of(format);
        let uneven = w != [w[0]; GROUP];
        let mut wx = [0.0; GROUP];
        for i in 0..GROUP {
            wx[i] = w[i] * x[i];
        }
        Self { x, w, wx, range, format, uneven }
    }

    /// `Σ w x q` and `Σ w q²` of the codes at `1 / scale`. The best scale for those codes is their quotient,
    /// and `Σ w x²` less `(Σ w x q)² / Σ w q²` is what it misses.
    #[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
    #[inline(always)]
    fn sums(&self, by: f32) -> (f32, f32) {
        let (mut xq, mut qq) = ([0.0_f32; LANES], [0.0_f32; LANES]);
        for at in (0..GROUP).step_by(LANES) {
            let q = self.nearest(at, by);
            for i in 0..LANES {
                xq[i] += self.wx[at + i] * q[i];
                qq[i] += self.w[at + i] * q[i] * q[i];
            }
        }
        (total(xq), total(qq))
    }

    /// The nearest codes to numbers from `at` on at `1 / scale`.
    #[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
    #[inline(always)]
    fn nearest(&self, at: usize, by: f32) -> [f32; LANES] {
        let mut near = [0.0; LANES];
        for (to, x) in near.iter_mut().zip(&self.x[at..at + LANES]) {
            *to = x * by;
        }
        self.range.nearest(&near)
    }

    /// Codes and error of a scale, rounded to the digits of the format's.
    #[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
    #[inline(always)]
    fn at(&self, scale: f32) -> Trial {
        let scale = scale::round_scale(self.format, scale);
        let by = 1.0 / scale;
        let mut codes = [0.0; GROUP];
        let mut error = [0.0_f32; LANES];
        for at in (0..GROUP).step_by(LANES) {
            let q = self.nearest(at, by);
            for i in 0..LANES {
                let d = self.x[at + i] - scale * q[i];
                error[i] += self.w[at + i] * d * d;
            }
            codes[at..at + LANES].copy_from_slice(&q);
        }
        Trial { scale, codes, error: total(error) }
    }

    /// Of scales that put the number `1 / by` at these codes: the gain of the best one, and its own best
    /// scale; or the best known so far.
    #[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
    #[inline(always)]
    fn best_of(&self, tops: &[f32], by: f32, known: (f32, f32)) -> (f32, f32) {
        let mut best = known;
        for top in tops {
            let (xq, qq) = self.sums(top * by);
            let gain = xq * xq;
            // Compared as fractions: a division each would cost as much as the sums.
            if gain > best.0 * qq {
                best = (gain / qq, xq / qq);
            }
        }
        best
    }

    /// The best scale for the codes of a trial, as long as that makes it better.
    #[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
    #[inline(always)]
    fn refined(&self, mut best: Trial) -> Trial {
        for _ in 0..2 {
            let (mut xq, mut qq) = ([0.0_f32; LANES], [0.0_f32; LANES]);
            for at in (0..GROUP).step_by(LANES) {
                for i in 0..LANES {
                    let q = best.codes[at + i];
                    xq[i] += self.wx[at + i] * q;
                    qq[i] += self.w[at + i] * q * q;
                }
            }
            let scale = total(xq) / total(qq);
            if !scale.is_normal() {
                break;
            }
            let next = self.at(scale);
            if next.error >= best.error {
                break;
            }
            best = next;
        }
        best
    }

    /// With this many codes the errors of near scales hardly differ: those next to the plain one do.
    #[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
    #[inline(always)]
    fn q8(&self, extreme: f32) -> (f32, [f32; GROUP]) {
        let plain = scale::round_scale(self.format, extreme.abs() / self.range.highest);
        let mut best = self.at(plain);
        for step in [-2, -1, 1, 2] {
            let near = plain.to_bits().wrapping_add_signed(step << scale::dropped_bits(self.format));
            let trial = self.at(f32::from_bits(near));
            if trial.error < best.error {
                best = trial;
            }
        }
        let best = self.refined(best);
        (best.scale, best.codes)
    }

    /// Scales that put the largest magnitude near the lowest code or beyond, or near the highest; the best one is
    /// refined.
    #[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
    #[inline(always)]
    fn few_bits(&self, extreme: f32) -> (f32, [f32; GROUP]) {
        let plain = self.at(extreme / self.range.lowest);
        let by = 1.0 / extreme;
        let [tops, more] = match (self.format.spec().bits, self.range.count) {
            (4, 0) => [&TOPS[..], &MORE_TOPS[..]],
            (4, _) => <[&[f32]; 2]>::from(Q4N_TOPS.split_at(FIRST_Q4N_TOPS)),
            _ => [&Q3_TOPS[..], &[]],
        };
        let mut best = self.best_of(tops, by, (0.0, plain.scale));
        if self.uneven {
            best = self.best_of(more, by, best);
        }
        let trial = if best.1.is_normal() { self.refined(self.at(best.1)) } else { plain };
        let best = if trial.error < plain.error { trial } else { self.refined(plain) };
        (best.scale, best.codes)
    }
}

/// Codes that the scales tried for `q4` give the largest magnitude. Beyond the range of codes it
/// is cut off, for the good of the others.
const TOPS: [f32; 9] = [-7.0, -7.5, -8.0, -8.5, -9.0, -13.0, 6.7, 7.2, 7.8];

/// Codes that the tried scales give the largest magnitude, for [`moec_ir::types::Q4N_GRID`]. As [`Q3_TOPS`], each
/// is the one that takes most of the error away from groups of normal numbers that those before leave.
pub(super) const Q4N_TOPS: [f32; 12] =
    [56.0, -49.2, 58.8, 53.2, 47.6, -48.0, 57.4, 54.6, 61.6, -50.4, -46.8, 60.2];

/// Number of [`Q4N_TOPS`] that are tried where errors have the same weight.
const FIRST_Q4N_TOPS: usize = 8;

/// As [`Q4N_TOPS`], for [`moec_ir::types::Q3_GRID`].
pub(super) const Q3_TOPS: [f32; 10] = [61.3, 55.6, 67.0, -56.4, 58.4, -51.7, 64.1, 52.7, 71.2, -59.9];

/// More codes than [`TOPS`], for numbers whose errors have different weights: then cutting off is worth more
/// trials.
const MORE_TOPS: [f32; 16] =
    [-6.6, -6.8, -7.2, -7.7, -8.2, -8.7, -9.3, -9.7, -10.4, -11.5, -16.0, -20.0, 6.4, 7.0, 7.5, 8.5];
