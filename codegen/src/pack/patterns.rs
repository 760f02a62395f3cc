//! Quads of codes by patterns of magnitudes, with signs ([`Coding::Patterns`]).
//!
//! A group's scale is the one of [`scales`] with the smallest weighted error. A quad's codes are those with
//! the smallest `(x − s·c) H (x − s·c)ᵀ`: `H` is diagonal where numbers are rounded each by itself, and a block
//! of the second moments where they are rounded with feedback. The terms without `c` aside, that is twice the
//! scale times `s · ½ c H cᵀ − c H xᵀ`: a norm of `c`, which all rows share, and its reach towards `x`.
#![allow(clippy::inline_always, reason = "the caller vectorises them only inline")]

use super::group::Group;
use super::lanes::{LANES, Lanes};
use super::{quantise::SMALLEST, scale};
#[cfg(doc)]
use moec_ir::types::Coding;
use moec_ir::types::{E5M3, Format, GROUP};

/// Codes that are chosen together.
pub(super) const QUAD: usize = 4;
/// Most patterns of a format.
const MOST: usize = 32;
/// Signs of three codes: the first one's, and so all of them, may be inverted, which leaves norms as they are.
const SIGNS: usize = 8;
/// Most quads of a group.
const QUADS: usize = 2 * GROUP / QUAD;

/// The smallest tried scale by the quotient of the roots of mean squares, of numbers and of all magnitudes.
/// That of normal numbers is 1.1 times the quotient.
const SMALLEST_SCALE: f32 = 0.74;
/// Scales that are tried, each the next one that is stored: an octave.
const TRIED: u32 = 9;

/// The patterns of a format.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patterns {
    format: Format,
    known: &'static [[u8; QUAD]],
    /// Magnitudes, by their place in a quad.
    places: [[f32; MOST]; QUAD],
    /// Root of the mean square of all magnitudes.
    size: f32,
}

/// Numbers of a group by their place in a quad, then by quad: those past the end of the group are 0.
type Places = [[f32; QUADS]; QUAD];

/// Norms and reaches by pattern, then by quad.
struct Sums {
    norm: [[f32; QUADS]; MOST],
    reach: [[f32; QUADS]; MOST],
}

/// Numbers by their place in a quad.
#[inline(always)]
fn by_place(x: &[f32], by: f32) -> Places {
    let mut places = [[0.0; QUADS]; QUAD];
    for (quad, x) in x.chunks(QUAD).enumerate().take(QUADS) {
        for (place, x) in places.iter_mut().zip(x) {
            place[quad] = x * by;
        }
    }
    places
}

impl Patterns {
    /// The patterns of a format; `None` if it has none.
    #[inline(always)]
    pub(super) fn of(format: Format) -> Option<Self> {
        let known = format.spec().codes.map(|c| c.patterns).filter(|known| !known.is_empty())?;
        let mut places = [[0.0; MOST]; QUAD];
        let mut sum = 0.0;
        for (p, pattern) in known.iter().enumerate() {
            for (place, &magnitude) in places.iter_mut().zip(pattern) {
                place[p] = f32::from(magnitude);
                sum += place[p] * place[p];
            }
        }
        let size = (sum / (QUAD * known.len()) as f32).sqrt();
        Some(Self { format, known, places, size })
    }

    /// The index of the pattern of codes; 0 if they have none.
    pub(super) fn index(known: &[[u8; QUAD]], codes: &[i8]) -> usize {
        let is = |pattern: &[u8; QUAD]| pattern.iter().zip(codes).all(|(m, c)| *m == c.unsigned_abs());
        known.iter().position(is).unwrap_or(0)
    }

    /// The scales that are tried for numbers whose mean square has this root.
    #[inline(always)]
    pub(super) fn scales(&self, root: &Lanes) -> impl Iterator<Item = Lanes> + use<> {
        let mut first = *root;
        for x in &mut first {
            *x = scale::round_scale(self.format, *x / self.size * SMALLEST_SCALE);
        }
        (0..TRIED).map(move |step| {
            let mut scale = first;
            for x in &mut scale {
                // Of zero the next numbers are none that are stored.
                *x = if *x == 0.0 { 0.0 } else { f32::from_bits(x.to_bits() + (step << (23 - E5M3))) };
            }
            scale
        })
    }

    #[inline(always)]
    fn sums(&self, x: &Places, w: &Places) -> Sums {
        let mut sums = Sums { norm: [[0.0; QUADS]; MOST], reach: [[0.0; QUADS]; MOST] };
        let rows = sums.norm.iter_mut().zip(&mut sums.reach);
        for (p, (norm, reach)) in rows.enumerate().take(self.known.len()) {
            for ((place, x), w) in self.places.iter().zip(x).zip(w) {
                let m = place[p];
                for q in 0..QUADS {
                    norm[q] += 0.5 * w[q] * m * m;
                    reach[q] += w[q] * x[q].abs() * m;
                }
            }
        }
        sums
    }

    /// The place of the best pattern of every quad at a scale, and what these add to half of the error by the scale.
    #[inline(always)]
    fn best(&self, sums: &Sums, scale: f32) -> ([u32; QUADS], f32) {
        let (mut least, mut best) = ([f32::INFINITY; QUADS], [0; QUADS]);
        let rows = sums.norm.iter().zip(&sums.reach).take(self.known.len());
        for (p, (norm, reach)) in (0..).zip(rows) {
            for q in 0..QUADS {
                let missed = scale * norm[q] - reach[q];
                let less = missed < least[q];
                least[q] = if less { missed } else { least[q] };
                best[q] = if less { p } else { best[q] };
            }
        }
        (best, least.iter().sum())
    }

    /// Groups of [`GROUP`] numbers that represent `x`, the numbers of one scale, all but the last one whole;
    /// `weights` are those of their errors.
    #[inline(always)]
    pub(super) fn nearest(&self, x: &[f32], weights: Option<&[f32]>, mut put: impl FnMut(Group)) {
        let mut all = [0.0; QUADS * QUAD];
        let mut by = [0.0; QUADS * QUAD];
        for (i, (to, x)) in all.iter_mut().zip(x).enumerate() {
            *to = *x;
            by[i] = weights.and_then(|w| w.get(i)).copied().unwrap_or(1.0);
        }
        let total = by.iter().sum::<f32>();
        if total.is_nan() || !(1e-30..=1e30).contains(&total) {
            by[..x.len().min(QUADS * QUAD)].fill(1.0);
        }
        // Divided by a power of two: products neither overflow nor lose digits.
        let size = x.iter().fold(0.0_f32, |m, x| if m.is_nan() || x.abs() <= m { m } else { x.abs() });
        let scale = if size.is_nan() || !(SMALLEST..=self.format.spec().largest).contains(&size) {
            0.0
        } else {
            let power = size.to_bits() & 0x7f80_0000;
            let (up, down) = (f32::from_bits(power), f32::from_bits(0x7f00_0000 - power));
            let (places, by) = (by_place(&all, down), by_place(&by, 1.0));
            let sums = self.sums(&places, &by);
            let (mut squares, mut total) = ([0.0; QUADS], [0.0; QUADS]);
            for (place, by) in places.iter().zip(&by) {
                for q in 0..QUADS {
                    squares[q] += by[q] * place[q] * place[q];
                    total[q] += by[q];
                }
            }
            let root = (squares.iter().sum::<f32>() / total.iter().sum::<f32>()).sqrt();
            let mut found = (0.0, f32::INFINITY);
            for [scale, ..] in self.scales(&[root; LANES]) {
                let error = self.best(&sums, scale).1 * scale;
                if error < found.1 {
                    found = (scale, error);
                }
            }
            scale::nearest(self.format, found.0 * up)
        };
        for (x, w) in all.chunks_exact(GROUP).zip(by.chunks_exact(GROUP)).take(x.len().div_ceil(GROUP)) {
            put(self.codes(x, w, scale));
        }
    }

    /// The nearest codes to a scale. What is past the numbers has no weight.
    #[inline(always)]
    fn codes(&self, x: &[f32], weights: &[f32], scale: f32) -> Group {
        let by = 1.0 / scale;
        if !by.is_finite() || by <= 0.0 {
            return Group::ZERO;
        }
        let x = by_place(x, by);
        let (best, _) = self.best(&self.sums(&x, &by_place(weights, 1.0)), 1.0);
        let mut group = Group { scale, codes: [0; GROUP] };
        for (quad, codes) in group.codes.chunks_exact_mut(QUAD).enumerate() {
            for ((code, x), place) in codes.iter_mut().zip(&x).zip(&self.places) {
                *code = place[best[quad] as usize].copysign(x[quad]) as i8;
            }
        }
        group
    }

    /// The nearest codes to a scale that is given, errors mattering the same; of a group of fewer numbers, too.
    pub(super) fn at(&self, x: &[f32], scale: f32) -> Group {
        let (mut all, mut weights) = ([0.0; GROUP], [0.0; GROUP]);
        for (i, x) in x.iter().enumerate().take(GROUP) {
            (all[i], weights[i]) = (*x, 1.0);
        }
        self.codes(&all, &weights, scale)
    }

    /// The groups that the numbers of one scale were read back from: a scale and codes that give them exactly.
    /// If there are no such, as [`Self::nearest`].
    pub(super) fn recover(&self, x: &[f32], mut put: impl FnMut(Group)) {
        // The first number is a magnitude times the scale: none is zero.
        let first = x.first().map_or(0.0, |x| x.abs());
        let highest = self.format.spec().codes.map_or(0, |codes| codes.highest);
        let mut scales = (1..=highest).map(|m| scale::nearest(self.format, first / f32::from(m)));
        let is = |scale: &f32| x.chunks(GROUP).all(|x| self.at(x, *scale).values()[..x.len()] == *x);
        match scales.find(is) {
            Some(scale) => x.chunks(GROUP).for_each(|x| put(self.at(x, scale))),
            None => self.nearest(x, None, put),
        }
    }

    /// Norms of all codes of a quad whose errors matter by `h`: by pattern, then by signs of all but the first
    /// code.
    pub(super) fn norms(&self, h: &[[f32; QUAD]; QUAD]) -> impl Iterator<Item = f32> {
        let norm = move |codes: [f32; QUAD]| {
            let row = |row: &[f32; QUAD]| row.iter().zip(codes).map(|(h, c)| h * c).sum::<f32>();
            0.5 * h.iter().zip(codes).map(|(h, c)| c * row(h)).sum::<f32>()
        };
        self.known.iter().flat_map(move |pattern| {
            (0..SIGNS).map(move |signs| {
                norm(std::array::from_fn(|i| {
                    let magnitude = f32::from(pattern[i]);
                    if i > 0 && signs >> (i - 1) & 1 > 0 { -magnitude } else { magnitude }
                }))
            })
        })
    }

    /// Number of norms of a quad.
    pub(super) const fn norms_of_quad(&self) -> usize {
        self.known.len() * SIGNS
    }

    /// The best codes of a quad by their [`Self::norms`], at a scale, and `H xᵀ`.
    #[inline(always)]
    pub(super) fn choose(&self, norms: &[f32], reach: &[Lanes; QUAD], scale: &Lanes) -> [Lanes; QUAD] {
        let (mut least, mut best) = ([f32::INFINITY; LANES], [0.0_f32; LANES]);
        for (p, (pattern, norms)) in self.known.iter().zip(norms.as_chunks::<SIGNS>().0).enumerate() {
            let m = pattern.map(f32::from);
            // By the second code's sign, and by those of the last two codes.
            let (mut first, mut last) = ([[0.0; LANES]; 2], [[0.0; LANES]; 4]);
            for l in 0..LANES {
                let [a, b, c, d] =
                    [m[0] * reach[0][l], m[1] * reach[1][l], m[2] * reach[2][l], m[3] * reach[3][l]];
                (first[0][l], first[1][l]) = (a + b, a - b);
                (last[0][l], last[1][l]) = (c + d, d - c);
                (last[2][l], last[3][l]) = (c - d, -c - d);
            }
            for (signs, norm) in norms.iter().enumerate() {
                let (first, last, at) = (&first[signs & 1], &last[signs >> 1], (p * SIGNS + signs) as f32);
                for l in 0..LANES {
                    let missed = scale[l] * norm - (first[l] + last[l]).abs();
                    let less = missed < least[l];
                    least[l] = if less { missed } else { least[l] };
                    best[l] = if less { at } else { best[l] };
                }
            }
        }
        let mut codes = [[0.0; LANES]; QUAD];
        for l in 0..LANES {
            let at = best[l] as usize;
            let Some(pattern) = self.known.get(at / SIGNS) else { continue };
            let signed = |i: usize| {
                let m = f32::from(pattern[i]);
                if i > 0 && at >> (i - 1) & 1 > 0 { -m } else { m }
            };
            let towards = (0..QUAD).map(|i| signed(i) * reach[i][l]).sum::<f32>();
            for (i, code) in codes.iter_mut().enumerate() {
                code[l] = if towards < 0.0 { -signed(i) } else { signed(i) };
            }
        }
        codes
    }
}
