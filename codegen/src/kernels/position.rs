//! Heads as input of a kernel: normalised and rotated where they are read.
//!
//! Rotary embedding follows a norm in many models (OLMoE norms a whole row of queries or keys, Qwen3 each
//! head), and keys go on into the cache. As separate steps, each would read and write as much as the one
//! before. So a kernel that reads heads ([`super::rope`], [`super::cache`]) does the earlier steps in
//! registers. The order of every sum and product is that of the separate steps.

use super::Rule;
use super::norm::factor;
use crate::dsl::{F, I, Kb, P, Span};
use moec_ir::op::RopeStyle;

/// A root mean square norm of rows where they are read, as [`Norm`](crate::spec::Norm) computes it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowNorm {
    /// Channels normalised together: those of a head, or of a row.
    pub width: usize,
    /// Added to the mean square.
    pub eps: f32,
    /// Whether the weight is there, f32 `[width]`.
    pub weight: bool,
}

impl RowNorm {
    /// Operands of a norm, if there is one: its weight.
    pub(super) fn args(norm: Option<Self>) -> usize {
        usize::from(norm.is_some_and(|n| n.weight))
    }
}

/// A rotation of heads where they are read, as [`Rope`](crate::spec::Rope) computes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rotation {
    /// Rotated channels of a head, even.
    pub rotary: usize,
    /// First rotated channel of a head.
    pub offset: usize,
    /// Pairing.
    pub style: RopeStyle,
    /// Row distance of the angles.
    pub angles_ld: usize,
}

/// Operation on heads, with the operands for it.
pub(super) struct HeadOperation<'k> {
    dim: usize,
    /// The norm, whether it spans whole rows, and its weight.
    norm: Option<(RowNorm, bool, Option<P<'k>>)>,
    /// The rotation, and the angles of row 0.
    rotation: Option<(Rotation, P<'k>)>,
}

/// Contradictions of a norm and a rotation with the heads that they are for.
pub(super) fn rules(
    heads: usize,
    dim: usize,
    norm: Option<RowNorm>,
    rotation: Option<Rotation>,
) -> Vec<Rule> {
    let width = norm.map_or(dim, |n| n.width);
    let mut rules = vec![(width > 0 && (width == dim || width == heads * dim), "a norm of parts of heads")];
    if let Some(r) = rotation {
        rules.extend([
            (r.rotary.is_multiple_of(2), "an odd number of rotated channels"),
            (r.offset + r.rotary <= dim, "rotated channels outside of the head"),
            (r.angles_ld >= r.rotary, "rows overlap"),
        ]);
    }
    rules
}

impl<'k> HeadOperation<'k> {
    /// Takes its operands, the weight of the norm and the angles, from `next`.
    pub(super) fn new(
        dim: usize,
        norm: Option<RowNorm>,
        rotation: Option<Rotation>,
        next: &mut dyn FnMut() -> P<'k>,
    ) -> Self {
        let norm = norm.map(|n| (n, n.width != dim, n.weight.then(&mut *next)));
        Self { dim, norm, rotation: rotation.map(|r| (r, next())) }
    }

    /// Whether heads stay as they are.
    pub(super) fn is_plain(&self) -> bool {
        self.norm.is_none() && self.rotation.is_none()
    }

    /// Whether there is a norm that spans whole rows.
    pub(super) fn is_of_rows(&self) -> bool {
        self.norm.is_some_and(|(_, whole, _)| whole)
    }

    /// The factor of a norm that spans the whole row at `x`.
    pub(super) fn of_row(&self, k: &'k Kb<'k>, x: P<'k>) -> Option<F<'k>> {
        let (n, ..) = self.norm.filter(|&(_, whole, _)| whole)?;
        Some(factor(k, x, n.width, n.eps, None))
    }

    /// Writes head `head` of the row at `x` to `to`: all of it, or, if it is not moved, what changes.
    /// `of_row` is what [`Self::of_row`] gave.
    pub(super) fn head(
        &self,
        k: &'k Kb<'k>,
        (x, row, head): (P<'k>, I<'k>, I<'k>),
        of_row: Option<F<'k>>,
        to: P<'k>,
        moved: Option<I<'k>>,
    ) {
        let x = x.words(head * self.dim);
        let norm = self.norm.map(|(n, whole, weight)| {
            let weight = weight.map(|w| if whole { w.words(head * self.dim) } else { w });
            (of_row.unwrap_or_else(|| factor(k, x, n.width, n.eps, None)).splat(), weight)
        });
        let read = |c: I<'k>, span: Span<'k>| {
            let x = x.words(c).load_vec(span);
            match norm {
                Some((factor, Some(w))) => x * factor * w.words(c).load_vec(span),
                Some((factor, None)) => x * factor,
                None => x,
            }
        };
        let keep = |from: usize, count: usize| {
            k.columns(count, |c, span| to.words(c + from).store_vec(read(c + from, span), span));
        };
        let Some((r, angles)) = self.rotation else { return keep(0, self.dim) };
        let after = r.offset + r.rotary;
        rotate(
            k,
            r,
            &|c, span| read(c + r.offset, span),
            to.words(r.offset),
            angles.words(row * r.angles_ld),
        );
        if r.rotary < self.dim {
            let rest = || {
                keep(0, r.offset);
                keep(after, self.dim - after);
            };
            match moved.filter(|_| norm.is_none()) {
                Some(moved) => k.when(moved, rest),
                None => rest(),
            }
        }
    }
}

/// Rotates the channels that `read` gives. Every pair is read before it is written, so `out` may be where
/// they are.
fn rotate<'k>(
    k: &'k Kb<'k>,
    r: Rotation,
    read: &dyn Fn(I<'k>, Span<'k>) -> F<'k>,
    out: P<'k>,
    angles: P<'k>,
) {
    let half = r.rotary / 2;
    let lanes = k.lanes();
    match r.style {
        RopeStyle::Half => k.columns(half, |i, span| {
            let (cos, sin) = (angles.words(i).load_vec(span), angles.words(half).words(i).load_vec(span));
            let (a, b) = (read(i, span), read(i + half, span));
            out.words(i).store_vec(a * cos - b * sin, span);
            out.words(half).words(i).store_vec(b * cos + a * sin, span);
        }),
        RopeStyle::Interleaved => {
            let pairs = |i: I<'k>, count: usize| {
                let span = k.span(count);
                let (lo, hi) = (k.span(2 * count), k.span((2 * count).saturating_sub(lanes)));
                let (cos, sin) = (angles.words(i).load_vec(span), angles.words(half).words(i).load_vec(span));
                let [a, b] = read(i * 2, lo).unzip(read(i * 2 + lanes, hi));
                let [first, second] = (a * cos - b * sin).zip(b * cos + a * sin);
                let out = out.words(i * 2);
                out.store_vec(first, lo);
                out.words(lanes).store_vec(second, hi);
            };
            let whole = half / lanes * lanes;
            k.each(0, whole, lanes, |i| pairs(i, lanes));
            if half > whole {
                pairs(k.i(whole as i64), half - whole);
            }
        }
    }
}
