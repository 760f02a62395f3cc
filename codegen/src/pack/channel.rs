//! Rows of numbers as whole codes times one scale each: one scale for an output channel, as NPUs want it.
//!
//! A scale is chosen so that the weighted squared error `Σ wᵢ (xᵢ − s·qᵢ)²` of the row is small, codes being
//! the nearest ones; it is positive and has [`SCALE_BITS`] significant bits, so that its product with any
//! code is exact in f32. Every unit that multiplies, the CPU or another, works with the same numbers.

use super::quantise::SMALLEST;
use super::vectors::{Work, widest};
use moec_ir::types::{GROUP, LARGEST};

/// Significant bits of a scale: 24 of f32 less the 8 of a code.
pub const SCALE_BITS: u32 = 16;

/// Numbers that are summed side by side.
const LANES: usize = 8;

/// Numbers of this size have no fraction: what is added to it is rounded, ties to even.
const WHOLE: f32 = 12_582_912.0;

/// Width of the codes of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// −8 ..= 7.
    Int4,
    /// −127 ..= 127.
    Int8,
}

impl Width {
    /// The lowest and the highest code.
    pub const fn range(self) -> (i8, i8) {
        match self {
            Self::Int4 => (-8, 7),
            Self::Int8 => (-127, 127),
        }
    }

    /// Codes that the tried scales give the largest magnitude of a row. Numbers beyond the range are cut off,
    /// to the benefit of the others: the longer a row, the farther its largest number is from the rest.
    const fn peak_codes(self) -> &'static [f32] {
        match self {
            Self::Int4 => &[
                6.6, 7.0, 7.5, 8.0, 8.5, 9.0, 9.5, 10.0, 10.5, 11.0, 11.5, 12.0, 13.0, 14.0, 15.5, 17.0, 19.0,
            ],
            Self::Int8 => &[127.0, 128.5, 131.0, 135.0, 142.0],
        }
    }

    /// More scales that are tried, by the row's root mean square: where the largest numbers tell nothing of
    /// the others, or do not matter.
    const fn rms_factors(self) -> &'static [f32] {
        match self {
            Self::Int4 => &[0.2, 0.25, 0.3, 0.36, 0.45],
            Self::Int8 => &[0.02, 0.03, 0.045],
        }
    }
}

/// A row as it is stored.
#[derive(Clone, Debug, PartialEq)]
pub struct Channel {
    /// Scale, finite and positive.
    pub scale: f32,
    /// One code for each number.
    pub codes: Vec<i8>,
}

impl Channel {
    /// The numbers that are stored.
    pub fn values(&self) -> impl Iterator<Item = f32> {
        self.codes.iter().map(|&q| f32::from(q) * self.scale)
    }

    /// The channel that represents `x`, with the nearest codes to the best scale found. `weights` are the
    /// weights of the numbers' errors, finite and not negative; `None`: all equal. Numbers are at most
    /// [`LARGEST`] in magnitude; a row of zeros has the scale 1.
    pub fn nearest(width: Width, x: &[f32], weights: Option<&[f32]>) -> Self {
        Self::with_scale(width, x, best_scale(width, x, weights))
    }

    /// The nearest codes to a scale.
    pub fn with_scale(width: Width, x: &[f32], scale: f32) -> Self {
        let (by, (low, high)) = (1.0 / scale, width.range());
        let codes = x.iter().map(|x| nearest(x * by, f32::from(low), f32::from(high)) as i8);
        Self { scale, codes: codes.collect() }
    }

    /// The channel that numbers were read back from: a scale and codes that give them exactly, if there are
    /// any.
    pub fn recover(width: Width, x: &[f32]) -> Option<Self> {
        let largest = x.iter().fold(0.0_f32, |m, x| if x.abs() > m.abs() { *x } else { m });
        if largest == 0.0 {
            return Some(Self::with_scale(width, x, 1.0));
        }
        let (low, high) = width.range();
        let top = if largest < 0.0 { -i32::from(low) } else { i32::from(high) };
        // The largest number has the largest code; most often that is at the end of the range.
        (1..=top).rev().map(|c| round_scale(largest.abs() / c as f32)).find_map(|scale| {
            let found = (scale >= f32::MIN_POSITIVE).then(|| Self::with_scale(width, x, scale))?;
            found.values().eq(x.iter().copied()).then_some(found)
        })
    }

    /// `Σ wᵢ (xᵢ − s·qᵢ)²`.
    pub fn error(&self, x: &[f32], weights: Option<&[f32]>) -> f64 {
        let missed = x.iter().zip(self.values()).map(|(x, y)| f64::from(x - y).powi(2));
        match weights {
            Some(w) => missed.zip(w).map(|(e, &w)| e * f64::from(w)).sum(),
            None => missed.sum(),
        }
    }
}

/// The scale of a row that errs least of those tried, with [`SCALE_BITS`]; 1 for a row as good as zero.
pub(super) fn best_scale(width: Width, x: &[f32], weights: Option<&[f32]>) -> f32 {
    let largest = x.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
    if !(SMALLEST..=LARGEST).contains(&largest) {
        return 1.0;
    }
    // Divided by a power of two: products neither overflow nor lose digits.
    let power = largest.to_bits() & 0x7f80_0000;
    let (up, down) = (f32::from_bits(power), f32::from_bits(0x7f00_0000 - power));
    let usable = weights.filter(|w| (1e-30..=1e30).contains(&w.iter().sum::<f32>()));
    let mut fit = Fit { width, x: Vec::new(), w: Vec::new() };
    let blocks = x.len().next_multiple_of(GROUP);
    fit.x.extend(x.iter().map(|x| x * down));
    fit.x.resize(blocks, 0.0);
    match usable {
        Some(w) => fit.w.extend(w.iter().take(x.len())),
        None => fit.w.resize(x.len(), 1.0),
    }
    fit.w.resize(blocks, 0.0);
    round_scale(widest(Search { fit: &fit, largest: largest * down }) * up)
}

/// Rounded to [`SCALE_BITS`], ties to even.
fn round_scale(scale: f32) -> f32 {
    let bits = scale.to_bits();
    f32::from_bits((bits + 0x7f + (bits >> 8 & 1)) & !0xff)
}

/// The nearest code, ties to even.
#[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
#[inline(always)]
fn nearest(x: f32, low: f32, high: f32) -> f32 {
    // Comparisons written out: `clamp` minds NaN, which costs instructions.
    let x = if x < low { low } else { x };
    let x = if x > high { high } else { x };
    (x + WHOLE) - WHOLE
}

/// A row whose scale is looked for, filled up with zeros to whole groups.
struct Fit {
    width: Width,
    x: Vec<f32>,
    w: Vec<f32>,
}

impl Fit {
    /// `Σ w x q` and `Σ w q²` of the nearest codes at `1 / scale`. The best scale for those codes is their
    /// quotient, and `Σ w x²` less `(Σ w x q)² / Σ w q²` is what it misses.
    #[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
    #[inline(always)]
    fn sums(&self, by: f32) -> (f64, f64) {
        let (low, high) = self.width.range();
        let (low, high) = (f32::from(low), f32::from(high));
        let (mut xqs, mut qqs) = (0.0, 0.0);
        for (x, w) in self.x.as_chunks::<GROUP>().0.iter().zip(self.w.as_chunks::<GROUP>().0) {
            let (mut xq, mut qq) = ([0.0_f32; LANES], [0.0_f32; LANES]);
            for at in (0..GROUP).step_by(LANES) {
                for i in 0..LANES {
                    let q = nearest(x[at + i] * by, low, high);
                    xq[i] += w[at + i] * x[at + i] * q;
                    qq[i] += w[at + i] * q * q;
                }
            }
            xqs += f64::from(total(xq));
            qqs += f64::from(total(qq));
        }
        (xqs, qqs)
    }

    /// Root mean square of the numbers, by their weights.
    fn root_mean_square(&self) -> f32 {
        let (mut squares, mut weights) = (0.0, 0.0);
        for (x, w) in self.x.iter().zip(&self.w) {
            squares += f64::from(w * x * x);
            weights += f64::from(*w);
        }
        (squares / weights).sqrt() as f32
    }
}

#[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
#[inline(always)]
fn total([a, b, c, d, e, f, g, h]: [f32; LANES]) -> f32 {
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

/// Looks for the scale of a row.
struct Search<'a> {
    fit: &'a Fit,
    /// Its largest magnitude.
    largest: f32,
}

impl Work for Search<'_> {
    type Output = f32;

    #[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
    #[inline(always)]
    fn run(self) -> f32 {
        let Self { fit, largest } = self;
        // The gain of the best scale for the present codes, and that scale.
        let (mut gain, mut scale) = (0.0, f64::from(largest / fit.width.peak_codes()[0]));
        let tops = fit.width.peak_codes().iter().map(|top| top / largest);
        let spread = fit.root_mean_square();
        let spreads = fit.width.rms_factors().iter().map(|s| 1.0 / (s * spread)).filter(|by| by.is_finite());
        for by in tops.chain(spreads) {
            let (xq, qq) = fit.sums(by);
            if xq * xq > gain * qq {
                (gain, scale) = (xq * xq / qq, xq / qq);
            }
        }
        // The codes that are nearest to it may have a better one yet.
        for _ in 0..2 {
            let (xq, qq) = fit.sums((1.0 / scale) as f32);
            if xq * xq <= gain * qq {
                break;
            }
            (gain, scale) = (xq * xq / qq, xq / qq);
        }
        scale as f32
    }
}
