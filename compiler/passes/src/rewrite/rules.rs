//! The rewrite rules, one per line, each under its equation.
//!
//! Rules are directional, and the right side is never worse than the left on any target that runs it. No rule
//! swaps operands. A rule that changes rounding says so in its condition.

use super::language::{Atom, Attr, Facts, Moe, attr_of};
pub use super::row::Row;
use super::row::{Build, Graph, add_slice, row, var};
use egg::{Condition, Id, Subst, rewrite};
use moec_ir::{Activation, Format, Glu};

/// Every rule.
#[rustfmt::skip]
pub fn all() -> Vec<Row> {
    vec![
        // Gated feed-forward networks.
        row("act(g) · u = glu(g, u)",
            rewrite!("act-mul"; "(mul (act ?k ?g) ?u)" => "(glu ?k ?g ?u)" if same_cols("?g", "?u"))),
        row("u · act(g) = glu(g, u)",
            rewrite!("mul-act"; "(mul ?u (act ?k ?g))" => "(glu ?k ?g ?u)" if same_cols("?g", "?u"))),
        row("relu(g) · relu(u) = drelu(g, u)",
            rewrite!("drelu"; "(glu relu ?g (act relu ?u))" => { Build(drelu) })),
        row("glu(x Wgᵀ, x Wuᵀ) = linear_glu(x, [Wg; Wu])",
            rewrite!("gate-up";
                "(glu ?k (linear ?x ?g) (linear ?x ?u))" => "(linear_glu ?k ?x (w_rows ?g ?u))"
                if same_storage("?g", "?u"))),
        row("glu(x Wgᵀ + bg, x Wuᵀ + bu) = linear_glu(x, [Wg; Wu], [bg, bu])",
            rewrite!("gate-up-bias";
                "(glu ?k (linear_bias ?x ?g ?bg) (linear_bias ?x ?u ?bu))"
                => "(linear_glu_bias ?k ?x (w_rows ?g ?u) (w_rows ?bg ?bu))"
                if same_storage("?g", "?u"))),

        // The scale of a norm goes into the weights after it; that is exact only if they are stored in f32.
        row("rms_norm(x, w) = rms_norm(x, 1) · w, where every reader can fold w",
            rewrite!("norm-split"; "(rms_norm ?a ?x ?w)" => "(scale_cols (rms_unit ?a ?x) ?w)" if foldable("?a"))),
        row("(x · s) Wᵀ = x (W · s)ᵀ",
            rewrite!("fold-linear";
                "(linear (scale_cols ?x ?s) ?w)" => "(linear ?x (w_scale ?w ?s))" if exact("?w"))),
        row("(x · s) Wᵀ + b = x (W · s)ᵀ + b",
            rewrite!("fold-linear-bias";
                "(linear_bias (scale_cols ?x ?s) ?w ?b)" => "(linear_bias ?x (w_scale ?w ?s) ?b)" if exact("?w"))),
        row("linear_glu(x · s, W) = linear_glu(x, W · s)",
            rewrite!("fold-glu";
                "(linear_glu ?k (scale_cols ?x ?s) ?w)" => "(linear_glu ?k ?x (w_scale ?w ?s))" if exact("?w"))),
        row("linear_glu(x · s, W, b) = linear_glu(x, W · s, b)",
            rewrite!("fold-glu-bias";
                "(linear_glu_bias ?k (scale_cols ?x ?s) ?w ?b)" => "(linear_glu_bias ?k ?x (w_scale ?w ?s) ?b)"
                if exact("?w"))),
        row("expert_ffn(x · s, Wgu, Wd) = expert_ffn(x, Wgu · s, Wd)",
            rewrite!("fold-experts";
                "(expert_ffn ?k (scale_cols ?x ?s) ?d ?gu ?dn)" => "(expert_ffn ?k ?x ?d (w_scale ?gu ?s) ?dn)"
                if exact("?gu"))),
        row("expert_ffn(x · s, Wgu, Wd, b) = expert_ffn(x, Wgu · s, Wd, b)",
            rewrite!("fold-experts-bias";
                "(expert_ffn_bias ?k (scale_cols ?x ?s) ?d ?gu ?dn ?gb ?db)"
                => "(expert_ffn_bias ?k ?x ?d (w_scale ?gu ?s) ?dn ?gb ?db)"
                if exact("?gu"))),

        // Identities.
        row("1 · x = x",
            rewrite!("scale-one"; "(scale ?a ?x)" => "?x" if attr_is("?a", |a| *a == Attr::Factor(1.0)))),
        row("clamp(x, −∞, ∞) = x",
            rewrite!("clamp-all"; "(clamp ?a ?x)" => "?x"
                if attr_is("?a", |a| *a == Attr::Bounds(f32::NEG_INFINITY, f32::INFINITY)))),
        row("x[0 .. C] = x",
            rewrite!("slice-all"; "(slice ?a ?x)" => "?x" if whole("?a", "?x"))),

        // Slices and joins cancel.
        row("(x[a ..])[b ..] = x[a + b ..], over the same heads",
            rewrite!("slice-slice"; "(slice ?a (slice ?b ?x))" => { Build(slice_slice) })),
        row("[a | b][.. |a|] = a, [a | b][|a| ..] = b; a slice inside one part is a slice of it",
            rewrite!("slice-concat"; "(slice ?a (concat ?h ?x ?y))" => { Build(slice_concat) })),
        row("[x[.. m] | x[m ..]] = x",
            rewrite!("concat-slices"; "(concat ?h (slice ?a ?x) (slice ?b ?x))" => { Build(concat_slices) })),
    ]
}

/// Condition that both operands have equally many columns: no broadcast is fused away.
fn same_cols(a: &str, b: &str) -> impl Condition<Moe, Facts> {
    let (a, b) = (var(a), var(b));
    move |g: &mut Graph, _: Id, s: &Subst| g[s[a]].data.shape == g[s[b]].data.shape
}

/// Condition that both weights have the same format and class.
fn same_storage(a: &str, b: &str) -> impl Condition<Moe, Facts> {
    let (a, b) = (var(a), var(b));
    move |g: &mut Graph, _: Id, s: &Subst| g[s[a]].data.storage == g[s[b]].data.storage
}

/// Condition that the weight is stored in f32, so that scaling it rounds no more than scaling the activation.
fn exact(w: &str) -> impl Condition<Moe, Facts> {
    let w = var(w);
    move |g: &mut Graph, _: Id, s: &Subst| matches!(g[s[w]].data.storage, Some((Format::F32, _)))
}

fn attr_is(a: &str, holds: fn(&Attr) -> bool) -> impl Condition<Moe, Facts> {
    let a = var(a);
    move |g: &mut Graph, _: Id, s: &Subst| attr_of(g, s[a]).is_some_and(|x| holds(&x))
}

fn foldable(a: &str) -> impl Condition<Moe, Facts> {
    attr_is(a, |a| matches!(a, Attr::Rms { foldable: true, .. }))
}

/// Condition that the slice keeps every channel of `x`.
fn whole(a: &str, x: &str) -> impl Condition<Moe, Facts> {
    let (a, x) = (var(a), var(x));
    move |g: &mut Graph, _: Id, s: &Subst| match attr_of(g, s[a]) {
        Some(Attr::Slice { heads, start, len }) => start == 0 && heads * len == g[s[x]].data.channels(),
        _ => false,
    }
}

#[expect(clippy::unnecessary_wraps, reason = "as every right side that a function builds")]
fn drelu(g: &mut Graph, _: Id, s: &Subst) -> Option<Id> {
    let leaf = g.analysis.attr(Attr::Glu(Glu::DRelu));
    let kind = g.add(leaf);
    Some(g.add(Moe::Glu([kind, s[var("?g")], s[var("?u")]])))
}

fn slice_slice(g: &mut Graph, _: Id, s: &Subst) -> Option<Id> {
    let (Attr::Slice { heads: ha, start: sa, len }, Attr::Slice { heads: hb, start: sb, .. }) =
        (attr_of(g, s[var("?a")])?, attr_of(g, s[var("?b")])?)
    else {
        return None;
    };
    (ha == hb).then(|| add_slice(g, ha, sa + sb, len, s[var("?x")]))
}

fn slice_concat(g: &mut Graph, _: Id, s: &Subst) -> Option<Id> {
    let (Attr::Slice { heads, start, len }, Attr::Heads(joined)) =
        (attr_of(g, s[var("?a")])?, attr_of(g, s[var("?h")])?)
    else {
        return None;
    };
    let (x, y) = (s[var("?x")], s[var("?y")]);
    let split = g[x].data.channels() / heads.max(1);
    if heads != joined {
        None
    } else if start + len <= split {
        Some(add_slice(g, heads, start, len, x))
    } else if start >= split {
        Some(add_slice(g, heads, start - split, len, y))
    } else {
        None
    }
}

fn concat_slices(g: &mut Graph, _: Id, s: &Subst) -> Option<Id> {
    let (
        Attr::Heads(heads),
        Attr::Slice { heads: ha, start: sa, len: la },
        Attr::Slice { heads: hb, start: sb, len: lb },
    ) = (attr_of(g, s[var("?h")])?, attr_of(g, s[var("?a")])?, attr_of(g, s[var("?b")])?)
    else {
        return None;
    };
    let adjoin = heads == ha && heads == hb && sa + la == sb;
    adjoin.then(|| add_slice(g, heads, sa, la + lb, s[var("?x")]))
}

/// The GLU of a kind leaf.
pub fn glu_of(egraph: &Graph, id: Id) -> Option<Glu> {
    if let Some(Attr::Glu(glu)) = attr_of(egraph, id) {
        return Some(glu);
    }
    egraph[id].nodes.iter().find_map(|n| match n {
        Moe::Atom(Atom::Kind(k)) => Some(Glu::Gated(*k)),
        _ => None,
    })
}

/// The activation of a kind leaf.
pub fn activation_of(egraph: &Graph, id: Id) -> Option<Activation> {
    egraph[id].nodes.iter().find_map(|n| match n {
        Moe::Atom(Atom::Kind(k)) => Some(*k),
        _ => None,
    })
}
