//! Sixteen rows while they are rounded with [feedback](super::feedback), group by group: every scale is tried with the
//! codes that it leads to.

use super::descent::Descent;
use super::feedback::{Block, Codebook, SWEEPS};
use super::lanes::{LANES, Lanes, stored};
use super::patterns::QUAD;
use super::quads::Quads;
use super::quantise::{Codes, Group, Q3_TOPS, Q4N_TOPS, SMALLEST};
use super::scale;
use moec_ir::types::{Format, GROUP, LARGEST};
use std::ops::Range;

/// Codes that the tried scales give the largest magnitude of a group.
const fn tops(format: Format) -> &'static [f32] {
    match format.spec().bits {
        3 => &Q3_TOPS,
        4 if !format.grid().is_empty() => &Q4N_TOPS,
        4 => &[-8.0, -7.0, -7.5, -8.5, -9.5, -12.0, 6.6, 7.2],
        5 => &[-16.0, -15.0, -15.5, -16.5, 14.8, 15.4],
        _ => &[-32.0, -31.0, 30.7, 31.3],
    }
}

/// The codes in −8 ..= 7.
const NIBBLES: Codebook = Codebook::Each(Codes::Q4);

/// Rows while they are rounded, column by column. Each is divided by a power of two of its own size: products
/// neither overflow nor lose digits.
pub(super) struct Strip {
    /// The numbers.
    exact: Vec<Lanes>,
    /// The same with the errors of the columns before.
    fed: Vec<Lanes>,
    /// Divisor of each row.
    size: Lanes,
}

/// Columns of the largest group.
const LARGEST_GROUP: usize = 2 * GROUP;

/// Result of one scale for a group.
struct Trial {
    /// Weighted error.
    error: Lanes,
    /// Codes of each column.
    codes: [Lanes; LARGEST_GROUP],
    /// Error of each column against the exact number.
    missed: [Lanes; LARGEST_GROUP],
}

impl Strip {
    #[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
    #[inline(always)]
    pub(super) fn new(rows: &[f32], cols: usize) -> Self {
        let mut exact = vec![[0.0; LANES]; cols];
        let mut size = [1.0; LANES];
        for (lane, row) in rows.chunks_exact(cols.max(1)).enumerate() {
            let largest = row.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
            if !(SMALLEST..=LARGEST).contains(&largest) {
                continue;
            }
            let power = largest.to_bits() & 0x7f80_0000;
            size[lane] = f32::from_bits(power);
            let down = f32::from_bits(0x7f00_0000 - power);
            exact.iter_mut().zip(row).for_each(|(to, &x)| to[lane] = x * down);
        }
        Self { fed: exact.clone(), exact, size }
    }

    /// Rounds the columns of a block; `put` gets each lane's groups.
    #[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
    #[inline(always)]
    pub(super) fn round(
        &mut self,
        block: &Block,
        (format, codebook): (Format, &Codebook),
        sweeps: usize,
        put: &mut impl FnMut(usize, usize, Group),
    ) {
        let (n, group) = (block.cols.len(), format.group());
        let (exact, fed) = (&self.exact[block.cols.clone()], &mut self.fed[block.cols.clone()]);
        let mut codes = vec![[0.0; LANES]; n];
        let mut scales = vec![[0.0; LANES]; n.div_ceil(group)];
        for first in (0..n).step_by(group) {
            let cols = first..(first + group).min(n);
            let tried = match codebook {
                Codebook::Each(_) => scales_of_tops(format, &fed[cols.clone()]),
                Codebook::Quads(quads) => quads.scales(&fed[cols.clone()]).collect(),
            };
            let (mut best, mut least) = ([0.0; LANES], [f32::INFINITY; LANES]);
            for scale in tried {
                let error = trial(block, cols.clone(), codebook, exact, fed, &scale).error;
                for l in 0..LANES {
                    if error[l] < least[l] {
                        (best[l], least[l]) = (scale[l], error[l]);
                    }
                }
            }
            scales[first / group] = best;
            round_columns(block, cols.clone(), codebook, exact, fed, &best, &mut codes[cols]);
        }
        if sweeps > 0 {
            let of = (format, codebook);
            let mut descent = Descent::new(&block.moments, of, exact, &mut codes, &mut scales);
            descent.sweep();
            for _ in 1..sweeps {
                descent.refit();
                descent.sweep();
            }
        }
        for (g, codes) in codes.chunks(GROUP).enumerate() {
            let scale = &scales[g * GROUP / group];
            for l in 0..LANES {
                let scale = scale::nearest(format, scale[l] * self.size[l]);
                let codes = std::array::from_fn(|i| codes.get(i).map_or(0, |c| c[l] as i8));
                let group = if scale == 0.0 { Group::ZERO } else { Group { scale, codes } };
                put(l, block.cols.start / GROUP + g, group);
            }
        }
    }

    /// Codes of the columns of a block at one scale for each row.
    #[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
    #[inline(always)]
    pub(super) fn round_at(&mut self, block: &Block, scales: &[f32]) -> Vec<Lanes> {
        let n = block.cols.len();
        let (exact, fed) = (&self.exact[block.cols.clone()], &mut self.fed[block.cols.clone()]);
        let mut scale = [0.0; LANES];
        for (l, given) in scales.iter().take(LANES).enumerate() {
            scale[l] = given / self.size[l];
        }
        let mut codes = vec![[0.0; LANES]; n];
        for first in (0..n).step_by(GROUP) {
            let cols = first..(first + GROUP).min(n);
            round_columns(block, cols.clone(), &NIBBLES, exact, fed, &scale, &mut codes[cols]);
        }
        let mut scales = vec![scale; n.div_ceil(GROUP)];
        let mut descent =
            Descent::new(&block.moments, (Format::Q4c, &NIBBLES), exact, &mut codes, &mut scales);
        (0..SWEEPS).for_each(|_| descent.sweep());
        codes
    }
}

/// Scales that put the number of the largest magnitude at each of [`tops`].
#[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
#[inline(always)]
fn scales_of_tops(format: Format, numbers: &[Lanes]) -> Vec<Lanes> {
    let mut largest = [0.0_f32; LANES];
    for x in numbers {
        for l in 0..LANES {
            largest[l] = if x[l].abs() > largest[l].abs() { x[l] } else { largest[l] };
        }
    }
    let scales = |top: &f32| {
        let mut scale = largest;
        for x in &mut scale {
            *x = stored(format, *x / top);
        }
        scale
    };
    tops(format).iter().map(scales).collect()
}

/// Rounds the columns of a group at a scale, and hands what they miss to all that come later in the block.
#[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
#[inline(always)]
fn round_columns(
    block: &Block,
    cols: Range<usize>,
    codebook: &Codebook,
    exact: &[Lanes],
    fed: &mut [Lanes],
    scale: &Lanes,
    codes: &mut [Lanes],
) {
    let n = block.cols.len();
    let found = trial(block, cols.clone(), codebook, exact, fed, scale);
    codes.copy_from_slice(&found.codes[..cols.len()]);
    for (j, later) in fed.iter_mut().enumerate().take(n).skip(cols.end) {
        for (i, missed) in cols.clone().zip(&found.missed) {
            add(later, missed, block.upper[i * n + j]);
        }
    }
}

/// Rounds the columns of a group, each after the errors of those before it were added.
#[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
#[inline(always)]
fn trial(
    block: &Block,
    cols: Range<usize>,
    codebook: &Codebook,
    exact: &[Lanes],
    fed: &[Lanes],
    scale: &Lanes,
) -> Trial {
    let zeros = [[0.0; LANES]; LARGEST_GROUP];
    let mut found = Trial { error: [0.0; LANES], codes: zeros, missed: zeros };
    let mut x = zeros;
    x.iter_mut().zip(&fed[cols.clone()]).for_each(|(to, from)| *to = *from);
    match codebook {
        Codebook::Each(codes) => try_columns(block, cols, codes, exact, &mut x, scale, &mut found),
        Codebook::Quads(quads) => try_quads(block, cols, quads, exact, &mut x, scale, &mut found),
    }
    found
}

/// A trial with a code for each number. `x` are the numbers with the errors of all columns before the group.
#[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
#[inline(always)]
fn try_columns(
    block: &Block,
    cols: Range<usize>,
    codebook: &Codes,
    exact: &[Lanes],
    x: &mut [Lanes; LARGEST_GROUP],
    scale: &Lanes,
    found: &mut Trial,
) {
    let n = block.cols.len();
    let mut by = *scale;
    for s in &mut by {
        *s = if *s == 0.0 { 0.0 } else { 1.0 / *s };
    }
    for (c, i) in cols.clone().enumerate() {
        let (mut missed, mut near) = ([0.0; LANES], x[c]);
        for l in 0..LANES {
            near[l] *= by[l];
        }
        let codes = codebook.nearest(&near);
        for l in 0..LANES {
            let value = codes[l] * scale[l];
            let error = x[c][l] - value;
            found.error[l] += block.weights[i] * error * error;
            missed[l] = exact[i][l] - value;
        }
        found.codes[c] = codes;
        found.missed[c] = missed;
        for (x, j) in x.iter_mut().skip(c + 1).zip(i + 1..cols.end) {
            add(x, &missed, block.upper[i * n + j]);
        }
    }
}

/// A trial with codes for four numbers at a time.
#[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
#[inline(always)]
fn try_quads(
    block: &Block,
    cols: Range<usize>,
    quads: &Quads,
    exact: &[Lanes],
    x: &mut [Lanes; LARGEST_GROUP],
    scale: &Lanes,
    found: &mut Trial,
) {
    let n = block.cols.len();
    for first in cols.clone().step_by(QUAD) {
        let (columns, c) = (first..(first + QUAD).min(cols.end), first - cols.start);
        let now = [&exact[columns.clone()], &x[c..c + columns.len()]];
        let (codes, error) = quads.choose([&block.weights, &block.upper], first, now, scale);
        add(&mut found.error, &error, 1.0);
        for (i, codes) in columns.clone().zip(codes) {
            let at = i - cols.start;
            found.codes[at] = codes;
            for l in 0..LANES {
                found.missed[at][l] = exact[i][l] - codes[l] * scale[l];
            }
            for j in columns.end..cols.end {
                add(&mut x[j - cols.start], &found.missed[at], block.upper[i * n + j]);
            }
        }
    }
}

#[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
#[inline(always)]
fn add(sum: &mut Lanes, x: &Lanes, by: f32) {
    for l in 0..LANES {
        sum[l] += x[l] * by;
    }
}
