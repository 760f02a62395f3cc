//! Latent attention over chunks, compared with the Graph's reference.

use crate::interpret::{Rounding, States, call, difference};
use crate::store::{Store, ane};
use half::f16;
use moec_coreml::emit::{Chunk, LatentAttention, Limits, MASKED, Norm, Projection};
use moec_coreml::program::Rules;
use moec_ir::eval::{self, Arg, Tensor};
use moec_ir::op::AttentionDesc;
use moec_ir::{Op, RopeStyle};

const CONTEXT: usize = 64;
const ROWS: usize = 16;
const HIDDEN: usize = 32;

/// Four heads of 24 + 8 channels over a latent of 40, values of 16 channels.
pub(crate) fn latent(store: &mut Store, rank: Option<usize>, style: RopeStyle) -> LatentAttention {
    let (heads, nope, rotated, latent, v_dim) = (4, 24, 8, 40, 16);
    let mut projection = |out, channels| Projection { weight: store.matrix(out, channels), bias: None };
    let down = rank.map(|rank| projection(rank, HIDDEN));
    let q = projection(heads * (nope + rotated), rank.unwrap_or(HIDDEN));
    let kv_down = projection(latent + rotated, HIDDEN);
    let o = projection(HIDDEN, heads * v_dim);
    LatentAttention {
        name: "layer0.latent".into(),
        hidden: HIDDEN,
        heads,
        nope,
        rotated,
        latent,
        v_dim,
        scale: 1.0 / ((nope + rotated) as f32).sqrt(),
        context: CONTEXT,
        q_down: down.zip(rank).map(|(down, rank)| (down, store.norm(rank))),
        q,
        k_up: store.raw(&[heads, latent, nope], 0.0, 0.3),
        kv_down,
        kv_norm: store.norm(latent),
        v_up: store.raw(&[heads, v_dim, latent], 0.0, 0.2),
        o,
        style,
        chunks: vec![Chunk { rows: ROWS, start: None }],
    }
}

fn op(op: &Op, args: &[&Tensor]) -> Tensor {
    eval::op(op, args.iter().map(|t| Arg::Tensor(t)).collect()).unwrap().remove(0)
}

/// The Graph's operators, in the order of lowering.
fn reference(
    store: &Store,
    a: &LatentAttention,
    cache: &mut Tensor,
    x: &Tensor,
    pos: &[i32],
    angles: &Tensor,
) -> Vec<f32> {
    let linear = |x: &Tensor, p: &Projection| op(&Op::Linear { bias: false }, &[x, &store.tensor(&p.weight)]);
    let norm = |x: &Tensor, n: &Norm| {
        let op_ = Op::RmsNorm { eps: n.eps, groups: 1, weight: true };
        op(&op_, &[x, &store.tensor(n.weight.as_ref().unwrap())])
    };
    let slice = |x: &Tensor, heads, start, len| op(&Op::Slice { heads, start, len }, &[x]);
    let rotate = |x: &Tensor, heads| op(&Op::Rope { heads, offset: 0, style: a.style }, &[x, angles]);
    let heads = a.heads;
    let rank = a.q_down.as_ref().map(|(down, n)| norm(&linear(x, down), n));
    let q = linear(rank.as_ref().unwrap_or(x), &a.q);
    let plain = op(&Op::HeadLinear { heads }, &[&slice(&q, heads, 0, a.nope), &store.tensor(&a.k_up)]);
    let rotary = rotate(&slice(&q, heads, a.nope, a.rotated), heads);
    let q = op(&Op::Concat { heads }, &[&plain, &rotary]);
    let kv = linear(x, &a.kv_down);
    let k = op(
        &Op::Concat { heads: 1 },
        &[&norm(&slice(&kv, 1, 0, a.latent), &a.kv_norm), &rotate(&slice(&kv, 1, a.latent, a.rotated), 1)],
    );
    let slot = Tensor::i32([pos.len()], vec![0; pos.len()]);
    let pos = Tensor::i32([pos.len()], pos.to_vec());
    let args = vec![Arg::State(cache), Arg::Tensor(&k), Arg::Tensor(&pos), Arg::Tensor(&slot)];
    eval::op(&Op::CacheWrite, args).unwrap();
    let desc = AttentionDesc {
        heads,
        kv_heads: 1,
        qk_dim: a.latent + a.rotated,
        v_dim: a.latent,
        scale: a.scale,
        window: None,
        chunked: false,
        sinks: false,
        v_from_k: true,
    };
    let y = op(&Op::Attention(desc), &[&q, cache, &pos, &slot]);
    let y = op(&Op::HeadLinear { heads }, &[&y, &store.tensor(&a.v_up)]);
    linear(&y, &a.o).as_f32().to_vec()
}

/// A prompt of 40 tokens in chunks of 16, the last one half empty.
fn check(
    what: &str,
    store: &mut Store,
    a: &LatentAttention,
    limits: &Limits,
    rounding: Rounding,
    bound: f64,
) {
    let program = a.emit(limits).unwrap();
    let prompt = store.rows(40 * HIDDEN);
    let dim = a.latent + a.rotated;
    let mut cache = Tensor::f32([1, 1, CONTEXT, dim], vec![0.0; CONTEXT * dim]);
    let mut states = States::new();
    for start in [0, 16, 32] {
        let valid = ROWS.min(40 - start);
        let fixed = Chunk { rows: ROWS, start: Some(start) };
        let chunk = if a.chunks.contains(&fixed) { fixed } else { Chunk { rows: ROWS, start: None } };
        let seen = chunk.window(CONTEXT);
        let see = |t: usize, p: usize| if p <= start + t { 0.0 } else { MASKED };
        let mask: Vec<f32> = (0..ROWS).flat_map(|t| (0..seen).map(move |p| see(t, p))).collect();
        let put = |p: usize, t: usize| f32::from(u8::from(t < valid && p == start + t));
        let write: Vec<f32> = (0..CONTEXT).flat_map(|p| (0..ROWS).map(move |t| put(p, t))).collect();
        let half = a.rotated / 2;
        let angle = |t: usize, i: usize| (start + t) as f32 * 100.0_f32.powf(-(i as f32) / half as f32);
        let angles = (0..ROWS).flat_map(|t| {
            let cos = (0..half).map(move |i| angle(t, i).cos());
            cos.chain((0..half).map(move |i| angle(t, i).sin())).map(|x| f16::from_f32(x).to_f32())
        });
        let angles: Vec<f32> = angles.collect();
        let mut x = prompt[start * HIDDEN..(start + valid) * HIDDEN].to_vec();
        x.resize(ROWS * HIDDEN, 0.0);
        let given = [("x", &*x), ("mask", &mask), ("write", &write), ("angles", &angles)];
        let got = call(&program, &chunk.function(), store, &given, &mut states, rounding);

        let pos: Vec<i32> = (0..ROWS).map(|t| if t < valid { (start + t) as i32 } else { -1 }).collect();
        let angles = Tensor::f32([ROWS, a.rotated], angles);
        let want = reference(store, a, &mut cache, &Tensor::f32([ROWS, HIDDEN], x), &pos, &angles);
        let error = difference(&got["y"][..valid * HIDDEN], &want[..valid * HIDDEN]);
        assert!(error < bound, "{what}, rows from {start}: {error}");
    }
    let width = a.state_width(limits);
    assert_eq!((width, states["kv"].len()), (64, CONTEXT * 64), "{what}");
    for (cell, want) in states["kv"].chunks(width).zip(cache.as_f32().chunks(dim)).take(40) {
        assert!(difference(&cell[..dim], want) < bound * 10.0, "{what}");
        assert!(cell[dim..].iter().all(|x| *x == 0.0), "{what}");
    }
}

#[test]
fn latent_attention_agrees_with_the_reference() {
    for (what, rank, style, fixed) in [
        ("queries from the token", None, RopeStyle::Interleaved, false),
        ("queries from a latent", Some(20), RopeStyle::Half, false),
        ("at fixed positions", Some(20), RopeStyle::Interleaved, true),
    ] {
        let mut store = Store::default();
        let mut a = latent(&mut store, rank, style);
        if fixed {
            a.chunks.extend([0, 16, 32].map(|start| Chunk { rows: ROWS, start: Some(start) }));
        }
        check(what, &mut store, &a, &ane(), Rounding::None, 1e-5);
        // With a smaller limit on tensors, the queries are split: 128 channels into three heads and one.
        let small = Limits { rules: Rules { extent: 100, ..Rules::ANE }, ..ane() };
        let parts = a.emit(&small).unwrap();
        assert!(parts.weights.iter().any(|w| w.name == "q3" && w.shape[0] == 32));
        check(what, &mut store, &a, &small, Rounding::None, 1e-5);
    }
}

#[test]
fn f16_latent_attention_error_is_a_few_thousandths() {
    let mut store = Store::default();
    let a = latent(&mut store, Some(20), RopeStyle::Interleaved);
    check("f16", &mut store, &a, &ane(), Rounding::F16, 5e-3);
}

#[test]
fn head_matrices_of_wrong_shape_are_rejected() {
    let mut store = Store::default();
    let mut a = latent(&mut store, None, RopeStyle::Half);
    a.k_up = store.raw(&[4, 24, 40], 0.0, 1.0);
    let error = a.emit(&ane()).unwrap_err().to_string();
    assert!(error.contains("`k_up` is [4, 24, 40], expected [4, 40, 24]"), "{error}");
    let bytes = latent(&mut store, None, RopeStyle::Half).emit(&ane()).unwrap().weight_bytes();
    let limits = Limits { graph_bytes: bytes - 1, ..ane() };
    let error = latent(&mut store, None, RopeStyle::Half).emit(&limits).unwrap_err().to_string();
    assert!(error.contains(&format!("has {bytes} bytes")), "{error}");
}
