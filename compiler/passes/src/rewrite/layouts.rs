//! Linear layers as 1×1 convolutions, and where rows become channels-first (NPUMoE, Figure 4 and §3.2).
//!
//! These equations hold both ways, and neither side is better everywhere: what an operator costs on the unit that
//! computes it picks the form. `rows` is [`Op::FromNchw`](moec_ir::Op::FromNchw), `nchw` is
//! [`Op::ToNchw`](moec_ir::Op::ToNchw). A processor moves every number twice to gain a convolution that costs as much as
//! the linear layer, so it keeps the layer. Going channels-first is pushed towards the operands: between two convolutions
//! it meets the way back, and both vanish.

use super::language::Moe;
use super::row::{Build, Graph, Row, add_slice, row, var};
use egg::{Id, Subst, rewrite};

/// Every rule about forms.
#[rustfmt::skip]
pub fn layouts() -> Vec<Row> {
    vec![
        // Linear layers and convolutions.
        row("x Wᵀ = rows(conv(nchw(x), W))",
            rewrite!("linear-conv"; "(linear ?x ?w)" => "(from_nchw (conv1x1 (to_nchw ?x) ?w))")),
        row("x Wᵀ + b = rows(conv(nchw(x), W, b))",
            rewrite!("linear-conv-bias";
                "(linear_bias ?x ?w ?b)" => "(from_nchw (conv1x1_bias (to_nchw ?x) ?w ?b))")),
        row("conv(x, W) = nchw(rows(x) Wᵀ)",
            rewrite!("conv-linear"; "(conv1x1 ?x ?w)" => "(to_nchw (linear (from_nchw ?x) ?w))")),
        row("conv(x, W, b) = nchw(rows(x) Wᵀ + b)",
            rewrite!("conv-linear-bias";
                "(conv1x1_bias ?x ?w ?b)" => "(to_nchw (linear_bias (from_nchw ?x) ?w ?b))")),
        row("head by head x Wᵀ = rows(conv(nchw(x), W)), a group for each head",
            rewrite!("heads-conv";
                "(head_linear ?h ?x ?w)" => "(from_nchw (conv1x1_groups ?h (to_nchw ?x) ?w))")),
        row("conv(x, W) of groups = nchw(head by head rows(x) Wᵀ)",
            rewrite!("conv-heads";
                "(conv1x1_groups ?h ?x ?w)" => "(to_nchw (head_linear ?h (from_nchw ?x) ?w))")),
        row("linear_glu(x, W) = rows(glu(c[.. I], c[I ..])), c = conv(nchw(x), W)",
            rewrite!("glu-conv"; "(linear_glu ?k ?x ?w)" => { Build(glu_conv) })),
        row("linear_glu(x, W, b) = rows(glu(c[.. I], c[I ..])), c = conv(nchw(x), W, b)",
            rewrite!("glu-conv-bias"; "(linear_glu_bias ?k ?x ?w ?b)" => { Build(glu_conv_bias) })),

        // There and back.
        row("nchw(rows(x)) = x",
            rewrite!("to-from"; "(to_nchw (from_nchw ?x))" => "?x")),
        row("rows(nchw(x)) = x",
            rewrite!("from-to"; "(from_nchw (to_nchw ?x))" => "?x")),

        // What works on the channels of a row does so in either form.
        row("nchw(a + b) = nchw(a) + nchw(b)",
            rewrite!("nchw-add"; "(to_nchw (add ?a ?b))" => "(add (to_nchw ?a) (to_nchw ?b))")),
        row("nchw(a · b) = nchw(a) · nchw(b)",
            rewrite!("nchw-mul"; "(to_nchw (mul ?a ?b))" => "(mul (to_nchw ?a) (to_nchw ?b))")),
        row("nchw(glu(g, u)) = glu(nchw(g), nchw(u))",
            rewrite!("nchw-glu"; "(to_nchw (glu ?k ?g ?u))" => "(glu ?k (to_nchw ?g) (to_nchw ?u))")),
        row("nchw(act(x)) = act(nchw(x))",
            rewrite!("nchw-act"; "(to_nchw (act ?k ?x))" => "(act ?k (to_nchw ?x))")),
        row("nchw(factor · x) = factor · nchw(x)",
            rewrite!("nchw-scale"; "(to_nchw (scale ?a ?x))" => "(scale ?a (to_nchw ?x))")),
        row("nchw(clamp(x)) = clamp(nchw(x))",
            rewrite!("nchw-clamp"; "(to_nchw (clamp ?a ?x))" => "(clamp ?a (to_nchw ?x))")),
        row("nchw(x · w) = nchw(x) · w, per channel",
            rewrite!("nchw-cols"; "(to_nchw (scale_cols ?x ?w))" => "(scale_cols (to_nchw ?x) ?w)")),
        row("nchw(rms_norm(x, w)) = rms_norm(nchw(x), w)",
            rewrite!("nchw-norm"; "(to_nchw (rms_norm ?a ?x ?w))" => "(rms_norm ?a (to_nchw ?x) ?w)")),
        row("nchw(rms_norm(x)) = rms_norm(nchw(x))",
            rewrite!("nchw-unit"; "(to_nchw (rms_unit ?a ?x))" => "(rms_unit ?a (to_nchw ?x))")),
        row("nchw(x[a ..]) = nchw(x)[a ..]",
            rewrite!("nchw-slice"; "(to_nchw (slice ?a ?x))" => "(slice ?a (to_nchw ?x))")),
        row("nchw([a | b]) = [nchw(a) | nchw(b)]",
            rewrite!("nchw-concat"; "(to_nchw (concat ?h ?a ?b))" => "(concat ?h (to_nchw ?a) (to_nchw ?b))")),
    ]
}

#[expect(clippy::unnecessary_wraps, reason = "as every right side that a function builds")]
fn glu_conv(g: &mut Graph, class: Id, s: &Subst) -> Option<Id> {
    Some(glu_halves(g, class, s, |x| Moe::Conv1x1([x, s[var("?w")]])))
}

#[expect(clippy::unnecessary_wraps, reason = "as every right side that a function builds")]
fn glu_conv_bias(g: &mut Graph, class: Id, s: &Subst) -> Option<Id> {
    Some(glu_halves(g, class, s, |x| Moe::Conv1x1Bias([x, s[var("?w")], s[var("?b")]])))
}

/// Gate and up are one convolution, whose halves join.
fn glu_halves(g: &mut Graph, class: Id, s: &Subst, conv: impl Fn(Id) -> Moe) -> Id {
    let half = g[class].data.channels();
    let x = g.add(Moe::ToNchw(s[var("?x")]));
    let both = g.add(conv(x));
    let (gate, up) = (add_slice(g, 1, 0, half, both), add_slice(g, 1, half, half, both));
    let joined = g.add(Moe::Glu([s[var("?k")], gate, up]));
    g.add(Moe::FromNchw(joined))
}
