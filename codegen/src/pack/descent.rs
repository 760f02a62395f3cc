//! Codes and scales that were chosen one after the other, looked at once more.
//!
//! Feedback chooses a code before it knows those after it. Afterwards `tr((W − Ŵ) H (W − Ŵ)ᵀ)` falls further,
//! code by code. With all others fixed, the best code is the nearest to `ŵ[k] + ((w − ŵ) H)[k] / H[k, k]`
//! (cyclic coordinate descent, QuantEase, arXiv 2309.01885, §3). Between two sweeps each group gets the scale
//! that is best for its codes.

use super::feedback::Codebook;
use super::lanes::{LANES, Lanes, stored};
use super::patterns::QUAD;
use super::quads::Quads;
use super::quantise::Codes;
use moec_ir::types::Format;

/// Sixteen rows, while they are rounded, in a block of columns.
pub(super) struct Descent<'a> {
    /// `H`, `[n, n]`.
    moments: &'a [f32],
    format: Format,
    /// Codes of the format.
    codebook: &'a Codebook,
    /// Codes of each column.
    codes: &'a mut [Lanes],
    /// Scale of each group.
    scales: &'a mut [Lanes],
    /// `(w − ŵ) H`, by column.
    gradient: Vec<Lanes>,
}

impl<'a> Descent<'a> {
    /// From numbers, and what was chosen for them.
    #[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
    #[inline(always)]
    pub(super) fn new(
        moments: &'a [f32],
        (format, codebook): (Format, &'a Codebook),
        exact: &[Lanes],
        codes: &'a mut [Lanes],
        scales: &'a mut [Lanes],
    ) -> Self {
        let (n, group) = (exact.len(), format.group());
        let mut gradient = vec![[0.0; LANES]; n];
        for (i, x) in exact.iter().enumerate() {
            let mut missed = *x;
            for l in 0..LANES {
                missed[l] -= codes[i][l] * scales[i / group][l];
            }
            add_row(&mut gradient, &missed, &moments[i * n..(i + 1) * n]);
        }
        Self { moments, format, codebook, codes, scales, gradient }
    }

    /// Every code once more, in order.
    #[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
    #[inline(always)]
    pub(super) fn sweep(&mut self) {
        match self.codebook {
            Codebook::Each(codes) => self.sweep_columns(codes),
            Codebook::Quads(quads) => self.sweep_quads(quads),
        }
    }

    #[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
    #[inline(always)]
    fn sweep_columns(&mut self, codebook: &Codes) {
        let (n, group) = (self.gradient.len(), self.format.group());
        for i in 0..n {
            let row = &self.moments[i * n..(i + 1) * n];
            let (scale, old, weight) = (&self.scales[i / group], self.codes[i], row[i]);
            let (mut delta, mut moved) = ([0.0; LANES], 0.0_f32);
            let mut near = old;
            for l in 0..LANES {
                near[l] += self.gradient[i][l] / (weight * scale[l]);
            }
            let found = codebook.nearest(&near);
            for l in 0..LANES {
                // Where nothing is stored, or no error matters, no code is better.
                let code = if weight * scale[l] == 0.0 { old[l] } else { found[l] };
                self.codes[i][l] = code;
                delta[l] = (old[l] - code) * scale[l];
                moved += (old[l] - code).abs();
            }
            if moved > 0.0 {
                add_row(&mut self.gradient, &delta, row);
            }
        }
    }

    #[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
    #[inline(always)]
    fn sweep_quads(&mut self, quads: &Quads) {
        let (n, group) = (self.gradient.len(), self.format.group());
        for first in (0..n).step_by(QUAD) {
            let columns = first..(first + QUAD).min(n);
            let scale = &self.scales[first / group];
            let now = [&self.gradient[columns.clone()], &self.codes[columns.clone()]];
            let found = quads.again(self.moments, first, now, scale);
            for (i, code) in columns.zip(found) {
                let old = &mut self.codes[i];
                let (mut delta, mut moved) = ([0.0; LANES], 0.0_f32);
                for l in 0..LANES {
                    // Where nothing is stored, no code is better.
                    let code = if scale[l] == 0.0 { old[l] } else { code[l] };
                    delta[l] = (old[l] - code) * scale[l];
                    moved += (old[l] - code).abs();
                    old[l] = code;
                }
                if moved > 0.0 {
                    add_row(&mut self.gradient, &delta, &self.moments[i * n..(i + 1) * n]);
                }
            }
        }
    }

    /// The best scale for the codes of each group, in order, where it is better as it is stored.
    #[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
    #[inline(always)]
    pub(super) fn refit(&mut self) {
        let (n, size) = (self.gradient.len(), self.format.group());
        for (g, scale) in self.scales.iter_mut().enumerate() {
            let group = g * size..((g + 1) * size).min(n);
            let codes = &self.codes[group.clone()];
            let (mut gradient_dot_code, mut code_h_code) = ([0.0; LANES], [0.0; LANES]);
            for (c, i) in codes.iter().zip(group.clone()) {
                let mut sum = [0.0; LANES];
                for (other, by) in codes.iter().zip(&self.moments[i * n + group.start..]) {
                    for l in 0..LANES {
                        sum[l] += other[l] * by;
                    }
                }
                for l in 0..LANES {
                    gradient_dot_code[l] += c[l] * self.gradient[i][l];
                    code_h_code[l] += c[l] * sum[l];
                }
            }
            let mut decrease = [0.0; LANES];
            for l in 0..LANES {
                let best = if code_h_code[l] > 0.0 {
                    stored(self.format, scale[l] + gradient_dot_code[l] / code_h_code[l])
                } else {
                    0.0
                };
                let step = best - scale[l];
                if best != 0.0
                    && scale[l] != 0.0
                    && step * (2.0 * gradient_dot_code[l] - step * code_h_code[l]) > 0.0
                {
                    (scale[l], decrease[l]) = (best, -step);
                }
            }
            for (c, i) in codes.iter().zip(group) {
                let mut delta = *c;
                for l in 0..LANES {
                    delta[l] *= decrease[l];
                }
                add_row(&mut self.gradient, &delta, &self.moments[i * n..(i + 1) * n]);
            }
        }
    }
}

/// Adds to each column what comes of an error in one of them.
#[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
#[inline(always)]
fn add_row(gradient: &mut [Lanes], error: &Lanes, row: &[f32]) {
    for (sum, by) in gradient.iter_mut().zip(row) {
        for l in 0..LANES {
            sum[l] += error[l] * by;
        }
    }
}
