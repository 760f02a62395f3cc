//! Rules that make linear layers 1×1 convolutions, and that move the changes of layout (NPUMoE, Figure 4 and
//! §3.2).
//!
//! `rows` is `from_nchw`, `nchw` is `to_nchw`. The rules move `from_nchw` towards results and `to_nchw`
//! towards operands, so between two convolutions they meet and cancel. Each rule is a row, after the equation
//! that it states.

use super::language::{Facts, Form};
use egg::{Rewrite, rewrite};

/// A rule of the table.
pub type Rule = Rewrite<Form, Facts>;

/// Every rule, with the equation that it states.
#[rustfmt::skip]
pub fn all() -> Vec<(&'static str, Rule)> {
    vec![
        // Linear layers are convolutions.
        ("x Wᵀ = rows(conv(nchw(x), W))",
            rewrite!("linear-conv"; "(linear ?x ?w)" => "(from_nchw (conv1x1 (to_nchw ?x) ?w))")),
        ("x Wᵀ + b = rows(conv(nchw(x), W, b))",
            rewrite!("linear-conv-bias"; "(linear_bias ?x ?w ?b)" => "(from_nchw (conv1x1_bias (to_nchw ?x) ?w ?b))")),
        ("head by head x Wᵀ = rows(conv(nchw(x), W)), a group for each head",
            rewrite!("heads-conv"; "(head_linear ?h ?x ?w)" => "(from_nchw (conv1x1_groups ?h (to_nchw ?x) ?w))")),

        // There and back.
        ("nchw(rows(x)) = x",
            rewrite!("to-from"; "(to_nchw (from_nchw ?x))" => "?x")),
        ("rows(nchw(x)) = x",
            rewrite!("from-to"; "(from_nchw (to_nchw ?x))" => "?x")),

        // Operators on the channels of rows: the conversion to rows comes after them.
        ("by_head(rows(x)) = rows(by_head(x))",
            rewrite!("rows-heads"; "(by_head ?h (from_nchw ?x))" => "(from_nchw (by_head ?h ?x))")),
        ("norm(rows(x)) = rows(norm(x))",
            rewrite!("rows-norm"; "(norm ?a (from_nchw ?x))" => "(from_nchw (norm ?a ?x))")),
        ("clamp(rows(x)) = rows(clamp(x))",
            rewrite!("rows-clamp"; "(clamp ?a (from_nchw ?x))" => "(from_nchw (clamp ?a ?x))")),
        ("rope(rows(x), t) = rows(rope(x, nchw(t)))",
            rewrite!("rows-rope"; "(rope ?a (from_nchw ?x) ?t)" => "(from_nchw (rope ?a ?x (to_nchw ?t)))")),
        ("rows(x)[a ..] = rows(x[a ..])",
            rewrite!("rows-slice"; "(slice ?a (from_nchw ?x))" => "(from_nchw (slice ?a ?x))")),
        ("[rows(a) | rows(b)] = rows([a | b])",
            rewrite!("rows-concat"; "(concat ?h (from_nchw ?a) (from_nchw ?b))" => "(from_nchw (concat ?h ?a ?b))")),
        ("glu(rows(g), rows(u)) = rows(glu(g, u))",
            rewrite!("rows-glu"; "(glu ?k (from_nchw ?g) (from_nchw ?u))" => "(from_nchw (glu ?k ?g ?u))")),
        ("sigmoid(rows(x)) = rows(sigmoid(x))",
            rewrite!("rows-sigmoid"; "(sigmoid (from_nchw ?x))" => "(from_nchw (sigmoid ?x))")),
        ("rows(a) · rows(b) = rows(a · b)",
            rewrite!("rows-mul"; "(mul (from_nchw ?a) (from_nchw ?b))" => "(from_nchw (mul ?a ?b))")),

        // Becoming channels-first comes before it.
        ("nchw(by_head(x)) = by_head(nchw(x))",
            rewrite!("nchw-heads"; "(to_nchw (by_head ?h ?x))" => "(by_head ?h (to_nchw ?x))")),
        ("nchw(norm(x)) = norm(nchw(x))",
            rewrite!("nchw-norm"; "(to_nchw (norm ?a ?x))" => "(norm ?a (to_nchw ?x))")),
        ("nchw(clamp(x)) = clamp(nchw(x))",
            rewrite!("nchw-clamp"; "(to_nchw (clamp ?a ?x))" => "(clamp ?a (to_nchw ?x))")),
        ("nchw(rope(x, t)) = rope(nchw(x), nchw(t))",
            rewrite!("nchw-rope"; "(to_nchw (rope ?a ?x ?t))" => "(rope ?a (to_nchw ?x) (to_nchw ?t))")),
        ("nchw(x[a ..]) = nchw(x)[a ..]",
            rewrite!("nchw-slice"; "(to_nchw (slice ?a ?x))" => "(slice ?a (to_nchw ?x))")),
        ("nchw([a | b]) = [nchw(a) | nchw(b)]",
            rewrite!("nchw-concat"; "(to_nchw (concat ?h ?a ?b))" => "(concat ?h (to_nchw ?a) (to_nchw ?b))")),
        ("nchw(glu(g, u)) = glu(nchw(g), nchw(u))",
            rewrite!("nchw-glu"; "(to_nchw (glu ?k ?g ?u))" => "(glu ?k (to_nchw ?g) (to_nchw ?u))")),
        ("nchw(sigmoid(x)) = sigmoid(nchw(x))",
            rewrite!("nchw-sigmoid"; "(to_nchw (sigmoid ?x))" => "(sigmoid (to_nchw ?x))")),
        ("nchw(a · b) = nchw(a) · nchw(b)",
            rewrite!("nchw-mul"; "(to_nchw (mul ?a ?b))" => "(mul (to_nchw ?a) (to_nchw ?b))")),
    ]
}
