//! Root mean square norm and layer norm, in the forms that their readers multiply.

use super::quantise::write_row;
use super::{GpuKernel, Kernel, ROWS, Rule, fits};
use crate::dsl::{F, I, Kb, P, Span};
use crate::machine::Isa;
use crate::spec::{RowFormat, Symbol, packed_words};
use moec_ir::plan::Results;

/// Sums that take turns, to hide the latency of additions.
const SUMS: usize = 4;

/// Kind of norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NormKind {
    /// `x / sqrt(mean(x²) + eps) · weight`
    Rms,
    /// `(x − mean) / sqrt(var + eps) · weight + bias`
    Layer,
}

/// `[x, weight?, bias (Layer only), out, …]`: one result per format. A single result of f32 may be `x`.
#[derive(Clone, Debug, PartialEq)]
pub struct Norm {
    /// Kind of norm.
    pub kind: NormKind,
    /// Channels normalised together.
    pub width: usize,
    /// Segments of `width` channels per row; they share the weight.
    pub groups: usize,
    /// Row distance of `x`.
    pub x_ld: usize,
    /// Forms of the results; each segment is packed by itself.
    pub outs: Vec<RowFormat>,
    /// Added to the mean square or the variance.
    pub eps: f32,
    /// Whether the weight is there, f32 `[width]`.
    pub weight: bool,
}

impl Kernel for Norm {
    fn kind(&self) -> &'static str {
        "norm"
    }

    fn name(&self, s: &mut Symbol, _isa: &Isa) {
        s.word(match self.kind {
            NormKind::Rms => "rms_norm",
            NormKind::Layer => "layer_norm",
        });
        s.num("c", self.width).num("g", self.groups).num("x", self.x_ld);
        for out in &self.outs {
            s.row_format(*out);
        }
        s.float("eps", self.eps).flag("weight", self.weight);
    }

    fn args(&self) -> usize {
        1 + usize::from(self.weight) + usize::from(self.kind == NormKind::Layer) + self.outs.len()
    }

    fn results(&self) -> Results {
        Results::last(self.outs.len(), self.args())
    }

    fn rules(&self, isa: &Isa) -> Vec<Rule> {
        let mut rules = vec![
            (self.width > 0, "no channels"),
            (!self.outs.is_empty(), "no result"),
            (self.x_ld >= self.width * self.groups, "rows overlap"),
        ];
        rules.extend(self.outs.iter().flat_map(|out| fits(isa, *out, self.width, self.groups)));
        rules
    }

    fn on_gpu(&self) -> Option<&dyn GpuKernel> {
        Some(self)
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let &Self { kind, width, groups, x_ld, ref outs, eps, weight } = self;
        let x = k.arg(0);
        let weight = weight.then(|| k.arg(1));
        let at = 1 + usize::from(weight.is_some());
        let bias = (kind == NormKind::Layer).then(|| k.arg(at));
        let first = at + usize::from(bias.is_some());
        let results: Vec<_> = outs.iter().enumerate().map(|(i, &out)| (k.arg(first + i), out)).collect();
        k.rows(ROWS, |row| {
            k.each(0, groups, 1, |group| {
                let x = x.words(row * x_ld + group * width);
                let mean = match kind {
                    NormKind::Rms => None,
                    NormKind::Layer => Some(mean(k, x, width)),
                };
                let factor = factor(k, x, width, eps, mean).splat();
                let read = |c: I<'k>, span: Span<'k>| {
                    let x = x.words(c).load_vec(span);
                    let x = mean.map_or(x, |mean| x - mean) * factor;
                    let x = weight.map_or(x, |w| x * w.words(c).load_vec(span));
                    bias.map_or(x, |b| x + b.words(c).load_vec(span))
                };
                for &(to, out) in &results {
                    let words = packed_words(width, out.compute);
                    write_row(k, out.compute, width, &read, to.words(row * out.ld + group * words));
                }
            });
        });
    }
}

fn mean<'k>(k: &'k Kb<'k>, x: P<'k>, width: usize) -> F<'k> {
    let add = |sum, c, span| x.words(c).load_vec(span) + sum;
    k.fold_columns(width, SUMS, k.fv(0.0), add, |a, b| a + b).sum() / width as f32
}

/// Factor of `width` numbers, less their mean if there is one.
pub(super) fn factor<'k>(k: &'k Kb<'k>, x: P<'k>, width: usize, eps: f32, mean: Option<F<'k>>) -> F<'k> {
    let squares = |sum, c, span| {
        let x = x.words(c).load_vec(span);
        let x = mean.map_or(x, |mean| (x - mean).within(span, 0.0));
        x.fma(x, sum)
    };
    let square = k.fold_columns(width, SUMS, k.fv(0.0), squares, |a, b| a + b).sum() / width as f32;
    k.f(1.0) / (square + eps).sqrt()
}
