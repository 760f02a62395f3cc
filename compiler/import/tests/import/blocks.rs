//! Tests of layers with other structures than those of the families: their Graphs, against results computed
//! by hand.

use super::support::{distance, shapes};
use moec_import::ModelSpec;
use moec_import::lower::lower;
use moec_import::mixers::{ExpertWeights, Gqa, Mixer, Mlp, Moe, RouterInput};
use moec_import::spec::{Block, LayerSpec, Norm, Projection};
use moec_ir::eval::Evaluator;
use moec_ir::op::{Renorm, Score, WeightFrom};
use moec_ir::{Activation, Encoding, Glu, Leaf, RopeStyle, RouterDesc, Source, WeightExpr};
use std::ops::Range;

const HIDDEN: usize = 4;
const INNER: usize = 3;
const EXPERTS: usize = 3;
const VOCAB: usize = 5;
const EPS: f32 = 1e-5;
const SILU: Glu = Glu::Gated(Activation::Silu);
const TOKENS: [u32; 3] = [3, 0, 4];

/// The number at a position of a tensor.
fn number(tensor: &str, matrix: usize, row: usize, col: usize) -> f32 {
    let seed = tensor.bytes().fold(7, |seed, byte| (seed * 31 + u64::from(byte)) % 1009);
    ((seed as usize + 17 * matrix + 7 * row + 3 * col) as f32 * 0.7).sin()
}

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
        out.iter_mut().zip(places).for_each(|(x, (r, c))| *x = number(&leaf.tensor, matrix, r, c));
        Ok(())
    }
}

fn leaf(tensor: &str, shape: &[usize]) -> WeightExpr {
    WeightExpr::Leaf(Leaf { tensor: tensor.into(), shape: shape.into(), encoding: Encoding::Plain })
}

fn projection(tensor: &str, out: usize, input: usize) -> Projection {
    Projection { weight: leaf(tensor, &[out, input]), bias: None }
}

fn norm(tensor: &str) -> Norm {
    Norm::Rms { eps: EPS, weight: leaf(tensor, &[HIDDEN]) }
}

/// Attention with one head and no rotation.
fn attention() -> Mixer {
    let [q, k, v, o] = ["q", "k", "v", "o"].map(|name| projection(name, HIDDEN, HIDDEN));
    Gqa {
        heads: 1,
        kv_heads: 1,
        head_dim: HIDDEN,
        v_dim: HIDDEN,
        q,
        gate: None,
        k,
        v: Some(v),
        v_scale: 1.0,
        v_norm: None,
        o,
        qk_norm: None,
        clip: None,
        rope: None,
        style: RopeStyle::Half,
        window: None,
        chunked: false,
        temperature: None,
        sinks: None,
        scale: 0.5,
    }
    .into()
}

fn dense() -> Mixer {
    let [gate, up] = ["gate", "up"].map(|name| projection(name, INNER, HIDDEN));
    Mlp { gate: Some(gate), up, down: projection("down", HIDDEN, INNER), glu: SILU }.into()
}

fn moe(router_reads: RouterInput) -> Mixer {
    Moe {
        router: RouterDesc {
            experts: EXPERTS,
            zero: None,
            k: 1,
            score: Score::Softmax,
            select_bias: false,
            groups: None,
            weight_from: WeightFrom::Score,
            renorm: Renorm::None,
            scale: 1.0,
        },
        logits: projection("router", EXPERTS, HIDDEN),
        router_reads,
        weighs_input: false,
        reads_previous_layer: false,
        select_bias: None,
        latent: None,
        experts: ExpertWeights {
            intermediate: INNER,
            gate_up: leaf("gate_up", &[EXPERTS, 2 * INNER, HIDDEN]),
            down: leaf("experts_down", &[EXPERTS, HIDDEN, INNER]),
            bias: None,
            glu: SILU,
        },
        shared: None,
        sum_scale: 1.0,
    }
    .into()
}

fn model(layer: LayerSpec) -> ModelSpec {
    ModelSpec {
        family: "none",
        title: "None",
        vocab: VOCAB,
        hidden: HIDDEN,
        max_positions: 8,
        embed: leaf("embed", &[VOCAB, HIDDEN]),
        multipliers: moec_import::spec::Multipliers::default(),
        logit_cap: None,
        layers: vec![layer],
        final_norm: norm("final"),
        head: None,
        head_bias: None,
        bos: None,
        eos: Vec::new(),
        params: 0,
        active_params: 0,
        warnings: Vec::new(),
    }
}

/// Logits of the tokens, computed by the evaluator.
fn logits(layer: LayerSpec) -> Vec<f32> {
    let module = lower(&model(layer), &shapes(8, 4)).unwrap();
    moec_ir::verify::module(&module).unwrap();
    let logits = Evaluator::new(&module, &Numbers).logits_from(0, 0, 0, &TOKENS).unwrap();
    logits.as_f32().to_vec()
}

/// Computed by hand.
mod by_hand {
    use super::{EPS, EXPERTS, HIDDEN, INNER, TOKENS, VOCAB, number};

    pub(super) type Rows = Vec<Vec<f32>>;

    pub(super) fn embedded() -> Rows {
        TOKENS.map(|id| (0..HIDDEN).map(|c| number("embed", 0, id as usize, c)).collect()).into()
    }

    pub(super) fn logits(x: &Rows) -> Vec<f32> {
        norm("final", x).iter().flat_map(|x| times("embed", 0, 0..VOCAB, x)).collect()
    }

    fn times(tensor: &str, matrix: usize, rows: std::ops::Range<usize>, x: &[f32]) -> Vec<f32> {
        rows.map(|r| x.iter().enumerate().map(|(c, x)| number(tensor, matrix, r, c) * x).sum()).collect()
    }

    pub(super) fn norm(tensor: &str, rows: &Rows) -> Rows {
        let one = |x: &Vec<f32>| {
            let root = (x.iter().map(|x| x * x).sum::<f32>() / HIDDEN as f32 + EPS).sqrt();
            x.iter().enumerate().map(|(c, x)| x / root * number(tensor, 0, 0, c)).collect()
        };
        rows.iter().map(one).collect()
    }

    pub(super) fn sum(a: &Rows, b: &Rows) -> Rows {
        a.iter().zip(b).map(|(a, b)| a.iter().zip(b).map(|(a, b)| a + b).collect()).collect()
    }

    fn softmax(x: &[f32]) -> Vec<f32> {
        let all: f32 = x.iter().map(|x| x.exp()).sum();
        x.iter().map(|x| x.exp() / all).collect()
    }

    pub(super) fn attention(rows: &Rows) -> Rows {
        let [q, k, v] =
            ["q", "k", "v"].map(|name| rows.iter().map(|x| times(name, 0, 0..HIDDEN, x)).collect::<Rows>());
        let one = |t: usize| {
            let score = |s: usize| 0.5 * q[t].iter().zip(&k[s]).map(|(q, k)| q * k).sum::<f32>();
            let share = softmax(&(0..=t).map(score).collect::<Vec<_>>());
            let mixed: Vec<f32> =
                (0..HIDDEN).map(|c| share.iter().zip(&v).map(|(p, v)| p * v[c]).sum()).collect();
            times("o", 0, 0..HIDDEN, &mixed)
        };
        (0..rows.len()).map(one).collect()
    }

    fn gated(gate: &[f32], up: &[f32]) -> Vec<f32> {
        gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect()
    }

    pub(super) fn dense(rows: &Rows) -> Rows {
        let one = |x: &Vec<f32>| {
            let [gate, up] = ["gate", "up"].map(|name| times(name, 0, 0..INNER, x));
            times("down", 0, 0..HIDDEN, &gated(&gate, &up))
        };
        rows.iter().map(one).collect()
    }

    /// The best expert of each row of `x`, chosen by the logits of `routed`.
    pub(super) fn moe(routed: &Rows, x: &Rows) -> Rows {
        let one = |(routed, x): (&Vec<f32>, &Vec<f32>)| {
            let scores = softmax(&times("router", 0, 0..EXPERTS, routed));
            let e = (0..EXPERTS).max_by(|&a, &b| scores[a].total_cmp(&scores[b])).unwrap();
            let gate = times("gate_up", e, 0..INNER, x);
            let up = times("gate_up", e, INNER..2 * INNER, x);
            let y = times("experts_down", e, 0..HIDDEN, &gated(&gate, &up));
            y.iter().map(|y| y * scores[e]).collect()
        };
        routed.iter().zip(x).map(one).collect()
    }
}

fn same(layer: LayerSpec, expected: &by_hand::Rows) {
    let distance = distance(&logits(layer), &by_hand::logits(expected));
    assert!(distance < 1e-5, "{distance}");
}

#[test]
fn mixers_of_one_block_run_in_parallel() {
    let block = Block { norm: Some(norm("pre")), mixers: vec![attention(), dense()], post_norm: None };
    let x = by_hand::embedded();
    let h = by_hand::norm("pre", &x);
    let y = by_hand::sum(&by_hand::attention(&h), &by_hand::dense(&h));
    same(LayerSpec { blocks: vec![block.clone()], scale: None }, &by_hand::sum(&x, &y));

    let block = Block { post_norm: Some(norm("post")), ..block };
    same(LayerSpec { blocks: vec![block], scale: None }, &by_hand::sum(&x, &by_hand::norm("post", &y)));
}

#[test]
fn norms_may_follow_mixers() {
    let sandwich =
        Block { norm: Some(norm("pre")), mixers: vec![attention()], post_norm: Some(norm("post")) };
    let after = Block { norm: None, mixers: vec![dense()], post_norm: Some(norm("last")) };
    let x = by_hand::embedded();
    let y = by_hand::attention(&by_hand::norm("pre", &x));
    let x = by_hand::sum(&x, &by_hand::norm("post", &y));
    let x = by_hand::sum(&x, &by_hand::norm("last", &by_hand::dense(&x)));
    same(LayerSpec { blocks: vec![sandwich, after], scale: None }, &x);
}

#[test]
fn router_may_read_the_input_of_its_layer() {
    let layer = |reads| LayerSpec::pre_norm([(norm("pre"), attention()), (norm("mid"), moe(reads))]);
    let input = by_hand::embedded();
    let x = by_hand::sum(&input, &by_hand::attention(&by_hand::norm("pre", &input)));
    let h = by_hand::norm("mid", &x);
    same(layer(RouterInput::Layer), &by_hand::sum(&x, &by_hand::moe(&input, &h)));
    same(layer(RouterInput::Experts), &by_hand::sum(&x, &by_hand::moe(&h, &h)));
    let [a, b] = [RouterInput::Layer, RouterInput::Experts].map(|reads| logits(layer(reads)));
    assert!(distance(&a, &b) > 1e-3);
}

#[test]
fn blocks_without_mixers_or_with_duplicate_parts_are_refused() {
    let block = |mixers| Block { norm: None, mixers, post_norm: None };
    let refusal = |blocks| {
        let e = lower(&model(LayerSpec { blocks, scale: None }), &shapes(8, 4)).unwrap_err();
        e.causes.join(" ")
    };
    let e = refusal(vec![block(vec![attention()]), block(vec![attention()])]);
    assert!(e.contains("layers.0: two mixers are its `attn`"), "{e}");
    let e = refusal(vec![block(Vec::new())]);
    assert!(e.contains("layers.0: a block without mixers"), "{e}");
}
