//! Tests of every rewrite rule, with both sides evaluated on the same numbers.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, reason = "a test fails by panicking")]

use moec_ir::eval::Evaluator;
use moec_ir::{
    Activation, Encoding, EntryKind, Format, Glu, GraphBuilder, Leaf, Module, Op, Operand, Part, Scope,
    Source, ValueId, Weight, WeightClass, WeightExpr, verify,
};
use moec_passes::rewrite::{Applied, Costs, Options, rewrite, rules};
use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;

const T: usize = 5;
const C: usize = 8;
const VOCAB: usize = 11;

/// Numbers between −1 and 1 that depend only on the tensor's name and the index.
struct Numbers;

impl Source for Numbers {
    fn read(
        &self,
        leaf: &Leaf,
        matrix: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let places = rows.flat_map(|r| cols.clone().map(move |c| (r, c)));
        for (x, (r, c)) in out.iter_mut().zip(places) {
            let mut hasher = DefaultHasher::new();
            (&leaf.tensor, matrix, r, c).hash(&mut hasher);
            *x = (hasher.finish() >> 40) as f32 / (1_u32 << 23) as f32 - 1.0;
        }
        Ok(())
    }
}

/// Builds a block on the residual stream `x[T, C]`.
struct Block<'a, 'm> {
    b: &'a mut GraphBuilder<'m>,
    x: ValueId,
}

impl Block<'_, '_> {
    fn weight(&mut self, name: &str, shape: &[usize]) -> Operand {
        let leaf = Leaf { tensor: name.into(), shape: shape.into(), encoding: Encoding::Plain };
        let weight = Weight {
            name: name.into(),
            shape: shape.into(),
            class: WeightClass::Attention,
            format: Format::F32,
            expr: WeightExpr::Leaf(leaf),
        };
        self.b.module().add_weight(weight).unwrap().into()
    }
    fn op(&mut self, op: Op, inputs: &[Operand]) -> ValueId {
        self.b.one(op, inputs).unwrap()
    }
    fn linear(&mut self, name: &str, x: ValueId, n: usize, bias: bool) -> ValueId {
        let k = self.cols(x);
        let mut inputs = vec![x.into(), self.weight(name, &[n, k])];
        if bias {
            inputs.push(self.weight(&format!("{name}_bias"), &[n]));
        }
        self.op(Op::Linear { bias }, &inputs)
    }
    /// Number of channels of a value.
    fn cols(&self, x: ValueId) -> usize {
        self.b.ty(x).unwrap().shape[1]
    }
    fn norm(&mut self) -> ValueId {
        let inputs = [self.x.into(), self.weight("norm", &[C])];
        self.op(Op::RmsNorm { eps: 1e-5, groups: 1, weight: true }, &inputs)
    }
    fn act(&mut self, act: Activation, x: ValueId) -> ValueId {
        self.op(Op::Act(act), &[x.into()])
    }
    fn slice(&mut self, x: ValueId, heads: usize, start: usize, len: usize) -> ValueId {
        self.op(Op::Slice { heads, start, len }, &[x.into()])
    }
    fn experts(&mut self, x: ValueId, bias: bool) -> ValueId {
        let (e, k, inter) = (3, 2, 6);
        let router = self.linear("router", x, e, false);
        let desc = moec_ir::RouterDesc {
            experts: e,
            zero: None,
            k,
            score: moec_ir::op::Score::Softmax,
            select_bias: false,
            groups: None,
            weight_from: moec_ir::op::WeightFrom::Score,
            renorm: moec_ir::op::Renorm::None,
            scale: 1.0,
        };
        let routed = self.b.push(Op::Router(desc), &[router.into()]).unwrap();
        let table = self.op(Op::Dispatch { experts: e, partial: false }, &[routed[0].into()]);
        let mut inputs = vec![
            x.into(),
            table.into(),
            self.weight("gate_up", &[e, 2 * inter, C]),
            self.weight("down", &[e, C, inter]),
        ];
        if bias {
            inputs.push(self.weight("gate_up_bias", &[e, 2 * inter]));
            inputs.push(self.weight("down_bias", &[e, C]));
        }
        let y = self.op(Op::ExpertFfn { glu: Glu::Gated(Activation::Silu), bias, fixed: false }, &inputs);
        self.op(Op::Combine { partial: false }, &[y.into(), table.into(), routed[1].into()])
    }
}

type Build = fn(&mut Block<'_, '_>) -> ValueId;

/// A block for each rule, and the rules that must be on so that the target prefers the right side.
fn cases() -> Vec<(&'static str, &'static [&'static str], Build)> {
    vec![
        ("act-mul", &[], |b| {
            let (g, u) = (b.linear("g", b.x, 6, false), b.linear("u", b.x, 6, false));
            let g = b.act(Activation::Silu, g);
            b.op(Op::Mul, &[g.into(), u.into()])
        }),
        ("mul-act", &[], |b| {
            let (g, u) = (b.linear("g", b.x, 6, false), b.linear("u", b.x, 6, false));
            let g = b.act(Activation::GeluTanh, g);
            b.op(Op::Mul, &[u.into(), g.into()])
        }),
        ("drelu", &["act-mul"], |b| {
            let (g, u) = (b.linear("g", b.x, 6, false), b.linear("u", b.x, 6, false));
            let (g, u) = (b.act(Activation::Relu, g), b.act(Activation::Relu, u));
            b.op(Op::Mul, &[g.into(), u.into()])
        }),
        ("gate-up", &[], |b| {
            let (g, u) = (b.linear("g", b.x, 6, false), b.linear("u", b.x, 6, false));
            b.op(Op::Glu(Glu::Gated(Activation::Silu)), &[g.into(), u.into()])
        }),
        ("gate-up-bias", &[], |b| {
            let (g, u) = (b.linear("g", b.x, 6, true), b.linear("u", b.x, 6, true));
            b.op(Op::Glu(Glu::Clamped { alpha: 1.7, limit: 0.5 }), &[g.into(), u.into()])
        }),
        ("norm-split", &["fold-linear"], |b| {
            let n = b.norm();
            b.linear("w", n, 6, false)
        }),
        ("fold-linear", &["norm-split"], |b| {
            let n = b.norm();
            let (p, q) = (b.linear("p", n, 6, false), b.linear("q", n, 6, false));
            b.op(Op::Add, &[p.into(), q.into()])
        }),
        ("fold-linear-bias", &["norm-split"], |b| {
            let n = b.norm();
            b.linear("w", n, 6, true)
        }),
        ("fold-glu", &["norm-split", "fold-linear", "gate-up"], |b| {
            let n = b.norm();
            let (g, u) = (b.linear("g", n, 6, false), b.linear("u", n, 6, false));
            b.op(Op::Glu(Glu::Gated(Activation::Silu)), &[g.into(), u.into()])
        }),
        ("fold-glu-bias", &["norm-split", "fold-linear-bias", "gate-up-bias"], |b| {
            let n = b.norm();
            let (g, u) = (b.linear("g", n, 6, true), b.linear("u", n, 6, true));
            b.op(Op::Glu(Glu::Gated(Activation::Gelu)), &[g.into(), u.into()])
        }),
        ("fold-experts", &["norm-split", "fold-linear"], |b| {
            let n = b.norm();
            b.experts(n, false)
        }),
        ("fold-experts-bias", &["norm-split", "fold-linear"], |b| {
            let n = b.norm();
            b.experts(n, true)
        }),
        ("scale-one", &[], |b| b.op(Op::Scale { factor: 1.0 }, &[b.x.into()])),
        ("clamp-all", &[], |b| b.op(Op::Clamp { lo: f32::NEG_INFINITY, hi: f32::INFINITY }, &[b.x.into()])),
        ("slice-all", &[], |b| b.slice(b.x, 2, 0, C / 2)),
        ("slice-slice", &[], |b| {
            let s = b.slice(b.x, 2, 1, 3);
            b.slice(s, 2, 1, 2)
        }),
        ("slice-concat", &["slice-all"], |b| {
            let y = b.linear("y", b.x, 4, false);
            let joined = b.op(Op::Concat { heads: 2 }, &[b.x.into(), y.into()]);
            let (left, right) = (b.slice(joined, 2, 1, 2), b.slice(joined, 2, 4, 2));
            b.op(Op::Add, &[left.into(), right.into()])
        }),
        ("concat-slices", &["slice-all"], |b| {
            let (left, right) = (b.slice(b.x, 2, 0, 1), b.slice(b.x, 2, 1, 3));
            b.op(Op::Concat { heads: 2 }, &[left.into(), right.into()])
        }),
    ]
}

/// Costs of a unit that runs every operator.
const ALL: Costs<'_> = Costs { legal: &|_| true, launch: 64.0 };

/// Rewrites with all rules.
fn rewritten(module: &mut Module, keep: Option<&dyn Fn(&str) -> bool>, costs: Costs<'_>) -> Applied {
    rewrite(module, &Options { keep, costs }).unwrap()
}

fn module(build: impl FnOnce(&mut Block<'_, '_>) -> ValueId) -> Module {
    let mut module = Module::default();
    let mut b = GraphBuilder::new(&mut module, EntryKind::Prefill(T as u32), T);
    b.scope(Part::EMBED);
    let mut block = Block { b: &mut b, x: ValueId(0) };
    let table = block.weight("embed", &[VOCAB, C]);
    block.x = block.op(Op::Embed, &[ValueId(0).into(), table]);
    block.b.scope(Scope::in_layer(0, Part::FFN));
    let y = build(&mut block);
    block.b.scope(Part::HEAD);
    let picked = block.op(Op::GatherRows, &[y.into(), ValueId(3).into()]);
    let logits = block.linear("head", picked, VOCAB, false);
    b.finish(logits).unwrap();
    module
}

fn logits(module: &Module) -> Vec<f32> {
    Evaluator::new(module, &Numbers).logits(&[3, 1, 4, 1, 5]).unwrap().as_f32().to_vec()
}

#[test]
fn rewrite_rules_preserve_values() {
    let mut seen = BTreeSet::new();
    for (rule, helpers, build) in cases() {
        let before = module(build);
        verify::module(&before).unwrap();
        let mut after = before.clone();
        let keep = |name: &str| name == rule || helpers.contains(&name);
        let applied = rewritten(&mut after, Some(&keep), ALL);
        assert!(applied.get(rule).is_some_and(|&n| n > 0), "`{rule}` did not apply: {applied:?}");
        verify::module(&after).unwrap_or_else(|e| panic!("`{rule}` made a wrong graph: {e}\n{after}"));
        assert_ne!(before.to_string(), after.to_string(), "`{rule}` changed nothing");
        for (a, b) in logits(&before).iter().zip(logits(&after)) {
            assert!((a - b).abs() <= 1e-5 * a.abs().max(1.0), "`{rule}`: {a} became {b}\n{before}\n{after}");
        }
        seen.insert(rule);
    }
    let all: BTreeSet<_> = rules::all().iter().map(|r| r.rule.name.to_string()).collect();
    let seen: BTreeSet<_> = seen.into_iter().map(String::from).collect();
    assert_eq!(all, seen, "every rule needs a case here");
}

#[test]
fn scales_are_not_folded_into_rounded_weights() {
    let mut m = module(|b| {
        let n = b.norm();
        b.linear("w", n, 6, false)
    });
    for w in &mut m.weights {
        if w.name == "w" {
            w.format = Format::Bf16;
        }
    }
    let before = m.to_string();
    rewritten(&mut m, None, ALL);
    assert_eq!(m.to_string(), before);
}

#[test]
fn unread_values_are_removed() {
    let mut m = module(|b| {
        let unread = b.linear("unread", b.x, 4, false);
        b.act(Activation::Relu, unread);
        b.linear("w", b.x, 6, false)
    });
    let before = logits(&m);
    rewritten(&mut m, None, ALL);
    verify::module(&m).unwrap();
    assert!(!m.to_string().contains("unread"), "{m}");
    assert_eq!(logits(&m), before);
}

#[test]
fn operators_illegal_on_the_target_are_not_chosen() {
    let mut m = module(|b| {
        let (g, u) = (b.linear("g", b.x, 6, false), b.linear("u", b.x, 6, false));
        let g = b.act(Activation::Silu, g);
        b.op(Op::Mul, &[g.into(), u.into()])
    });
    rewritten(&mut m, None, Costs { legal: &|op| op != "linear_glu", ..ALL });
    let text = m.to_string();
    assert!(text.contains(" = glu ") && !text.contains("linear_glu"), "{text}");
}
