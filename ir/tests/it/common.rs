//! A tiny model and a source of numbers, shared by the tests.

use moec_ir::eval::Tensor;
use moec_ir::op::{AttentionDesc, Renorm, Score, WeightFrom};
use moec_ir::{
    Activation, EntryKind, Format, Glu, Graph, GraphBuilder, Leaf, Module, Op, Operand, Part, RopeStyle,
    RouterDesc, Scope, Source, StateDecl, StateKind, Type, Weight, WeightClass, WeightExpr, WeightId,
};
use std::error::Error;
use std::ops::Range;
use std::sync::Mutex;

/// Tensor, matrix, rows and columns of one read.
type Read = (String, usize, Range<usize>, Range<usize>);

/// Generates numbers from the tensor's name and the index; counts reads.
#[derive(Default)]
pub(crate) struct GeneratedSource {
    pub(crate) reads: Mutex<Vec<Read>>,
}

pub(crate) fn number(tensor: &str, matrix: usize, row: usize, col: usize) -> f32 {
    let mut h = 0xcbf2_9ce4_8422_2325_u64;
    for b in tensor.bytes().map(u64::from).chain([matrix as u64, 7, row as u64, 11, col as u64]) {
        h = (h ^ b).wrapping_mul(0x0100_0000_01b3);
        h ^= h >> 29;
    }
    ((h >> 20) % 2001) as f32 / 1000.0 - 1.0
}

impl Source for GeneratedSource {
    fn read(
        &self,
        leaf: &Leaf,
        matrix: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), Box<dyn Error + Send + Sync>> {
        self.reads.lock().unwrap().push((leaf.tensor.clone(), matrix, rows.clone(), cols.clone()));
        let cells = rows.flat_map(|r| cols.clone().map(move |c| (r, c)));
        assert_eq!(out.len(), cells.clone().count());
        for (x, (r, c)) in out.iter_mut().zip(cells) {
            *x = number(&leaf.tensor, matrix, r, c);
        }
        Ok(())
    }
}

pub(crate) fn leaf(tensor: &str, shape: &[usize]) -> WeightExpr {
    WeightExpr::Leaf(Leaf { tensor: tensor.into(), shape: shape.into(), encoding: moec_ir::Encoding::Plain })
}

pub(crate) fn weight(name: &str, expr: WeightExpr) -> Weight {
    Weight {
        name: name.into(),
        shape: expr.shape().unwrap(),
        class: WeightClass::Experts,
        format: Format::Bf16,
        expr,
    }
}

fn add(b: &mut GraphBuilder<'_>, name: &str, shape: &[usize]) -> WeightId {
    b.weight(weight(name, leaf(name, shape))).unwrap()
}

pub(crate) const VOCAB: usize = 11;
const HIDDEN: usize = 8;
const HEADS: usize = 2;
const EXPERTS: usize = 4;

pub(crate) fn router(experts: usize, k: usize) -> RouterDesc {
    RouterDesc {
        experts,
        zero: None,
        k,
        score: Score::Softmax,
        select_bias: false,
        groups: None,
        weight_from: WeightFrom::Score,
        renorm: Renorm::Sum { eps: 0.0 },
        scale: 1.0,
    }
}

/// One layer with attention and experts.
pub(crate) fn entry(module: &mut Module, kind: EntryKind, out_rows: usize) {
    let state =
        |name: &str| StateDecl { name: name.into(), ty: Type::f32([2, 1, 16, 4]), kind: StateKind::Cache };
    let mut b = GraphBuilder::new(module, kind, out_rows);
    let [ids, pos, slot, rows] = [Graph::IDS, Graph::POS, Graph::SLOT, Graph::ROWS].map(Operand::from);
    b.scope(Part::EMBED);
    let w = add(&mut b, "embed", &[VOCAB, HIDDEN]);
    let x = b.one(Op::Embed, &[ids, w.into()]).unwrap();
    let freqs = Weight {
        class: WeightClass::Exact,
        format: Format::F32,
        ..weight("freqs", WeightExpr::Const(vec![1.0, 0.01]))
    };
    let freqs = b.weight(freqs).unwrap();
    let angles = b.one(Op::RopeAngles { scale: 1.0, switch: None }, &[pos, freqs.into()]).unwrap();
    b.scope(Scope::in_layer(0, Part::ATTN));
    let w = add(&mut b, "norm", &[HIDDEN]);
    let h = b.one(Op::RmsNorm { eps: 1e-6, groups: 1, weight: true }, &[x.into(), w.into()]).unwrap();
    let linear = Op::Linear { bias: false };
    let [q, k, v] = [("q", HEADS * 4), ("k", 4), ("v", 4)].map(|(name, n)| {
        let w = add(&mut b, name, &[n, HIDDEN]);
        b.one(linear.clone(), &[h.into(), w.into()]).unwrap()
    });
    let rope = |heads| Op::Rope { heads, offset: 0, style: RopeStyle::Half };
    let q = b.one(rope(HEADS), &[q.into(), angles.into()]).unwrap();
    let k = b.one(rope(1), &[k.into(), angles.into()]).unwrap();
    let [k, v] = [("layers.0.k", k), ("layers.0.v", v)].map(|(name, x)| {
        let s = b.module().add_state(state(name));
        b.one(Op::CacheWrite, &[s.into(), x.into(), pos, slot]).unwrap()
    });
    let attention = Op::Attention(AttentionDesc {
        heads: HEADS,
        kv_heads: 1,
        qk_dim: 4,
        v_dim: 4,
        scale: 0.5,
        window: Some(6),
        chunked: false,
        sinks: false,
        v_from_k: false,
    });
    let a = b.one(attention, &[q.into(), k.into(), v.into(), pos, slot]).unwrap();
    let x = b.one(Op::Add, &[x.into(), a.into()]).unwrap();
    b.scope(Scope::in_layer(0, Part::FFN));
    let w = add(&mut b, "router", &[EXPERTS, HIDDEN]);
    let z = b.one(linear.clone(), &[x.into(), w.into()]).unwrap();
    let chosen = b.push(Op::Router(router(EXPERTS, 2)), &[z.into()]).unwrap();
    let table = b.one(Op::Dispatch { experts: EXPERTS, partial: false }, &[chosen[0].into()]).unwrap();
    let gate_up = add(&mut b, "gate_up", &[EXPERTS, 12, HIDDEN]);
    let down = add(&mut b, "down", &[EXPERTS, HIDDEN, 6]);
    let ffn = Op::ExpertFfn { glu: Glu::Gated(Activation::Silu), bias: false, fixed: false };
    let y = b.one(ffn, &[x.into(), table.into(), gate_up.into(), down.into()]).unwrap();
    let y = b.one(Op::Combine { partial: false }, &[y.into(), table.into(), chosen[1].into()]).unwrap();
    let x = b.one(Op::Add, &[x.into(), y.into()]).unwrap();
    b.scope(Part::HEAD);
    let x = b.one(Op::GatherRows, &[x.into(), rows]).unwrap();
    let w = add(&mut b, "lm head", &[VOCAB, HIDDEN]);
    let logits = b.one(linear, &[x.into(), w.into()]).unwrap();
    b.finish(logits).unwrap();
}

/// A model with a prefill and a decode entry.
pub(crate) fn model() -> Module {
    let mut module = Module::default();
    entry(&mut module, EntryKind::Prefill(5), 5);
    entry(&mut module, EntryKind::Prefill(4), 2);
    entry(&mut module, EntryKind::Decode(3), 3);
    module
}

pub(crate) fn close(a: &[f32], b: &[f32]) {
    assert_eq!(a.len(), b.len(), "{a:?} and {b:?}");
    for (i, (x, y)) in a.iter().zip(b).enumerate() {
        assert!((x - y).abs() <= 1e-5 * (1.0 + y.abs()), "element {i}: {x} and {y}\n{a:?}\n{b:?}");
    }
}

pub(crate) fn tensor(shape: &[usize], data: &[f32]) -> Tensor {
    Tensor::f32(shape, data.to_vec())
}
