//! Attention over chunks, compared with the Graph's reference.

use crate::interpret::{Rounding, States, call, difference};
use crate::store::{Store, ane};
use half::f16;
use moec_coreml::emit::{Attention, Chunk, MASKED, Rope};
use moec_coreml::program::Program;
use moec_ir::eval::{self, Arg, Tensor};
use moec_ir::op::AttentionDesc;
use moec_ir::{Op, RopeStyle};

const CONTEXT: usize = 64;
const ROWS: usize = 16;

#[test]
fn printed_attention_chunk_matches_its_snapshot() {
    let mut attention = Store::default().attention();
    attention.chunks.push(Chunk { rows: 16, start: Some(32) });
    insta::assert_snapshot!(attention.emit(&ane()).unwrap());
}

/// Frequencies of rotary embeddings.
fn frequencies(rope: Option<Rope>) -> Vec<f32> {
    let half = rope.map_or(0, |r| r.channels / 2);
    (0..half).map(|i| 100.0_f32.powf(-(i as f32) / half as f32)).collect()
}

fn op(op: &Op, args: &[&Tensor]) -> Tensor {
    eval::op(op, args.iter().map(|t| Arg::Tensor(t)).collect()).unwrap().remove(0)
}

/// The reference: caches of keys and values as in the Graph.
struct Reference<'a> {
    store: &'a Store,
    of: &'a Attention,
    keys: Tensor,
    values: Tensor,
}

impl<'a> Reference<'a> {
    fn new(store: &'a Store, of: &'a Attention) -> Self {
        let cache = |dim| Tensor::f32([1, of.kv_heads, CONTEXT, dim], vec![0.0; of.kv_heads * CONTEXT * dim]);
        Self { store, of, keys: cache(of.qk_dim), values: cache(of.v_dim) }
    }

    /// Attention of rows `x[T, H]` at these positions (−1 for padding), with this window.
    fn chunk(&mut self, x: &[f32], pos: &[i32], angles: &Tensor, window: Option<usize>) -> Vec<f32> {
        let a = self.of;
        let x = Tensor::f32([pos.len(), a.hidden], x.to_vec());
        let slot = Tensor::i32([pos.len()], vec![0; pos.len()]);
        let pos = Tensor::i32([pos.len()], pos.to_vec());
        let linear = |x: &Tensor, p: &moec_coreml::emit::Projection| {
            let weights = [Some(&p.weight), p.bias.as_ref()].into_iter().flatten();
            let weights: Vec<Tensor> = weights.map(|raw| self.store.tensor(raw)).collect();
            let args: Vec<&Tensor> = [x].into_iter().chain(&weights).collect();
            op(&Op::Linear { bias: p.bias.is_some() }, &args)
        };
        let clipped = |x: Tensor| match a.clip_qkv {
            Some(c) => op(&Op::Clamp { lo: -c, hi: c }, &[&x]),
            None => x,
        };
        let rotated = |mut x: Tensor, norm: &Option<moec_coreml::emit::Norm>, heads: usize| {
            if let Some(n) = norm {
                let weight = self.store.tensor(n.weight.as_ref().unwrap());
                let groups = heads * a.qk_dim / weight.as_f32().len();
                x = op(&Op::RmsNorm { eps: n.eps, groups, weight: true }, &[&x, &weight]);
            }
            x = clipped(x);
            match a.rope {
                Some(r) => op(&Op::Rope { heads, offset: r.offset, style: r.style }, &[&x, angles]),
                None => x,
            }
        };
        let q = rotated(linear(&x, &a.q), &a.q_norm, a.heads);
        let k = rotated(linear(&x, &a.k), &a.k_norm, a.kv_heads);
        let v = clipped(linear(&x, &a.v));
        for (cache, new) in [(&mut self.keys, &k), (&mut self.values, &v)] {
            let args = vec![Arg::State(cache), Arg::Tensor(new), Arg::Tensor(&pos), Arg::Tensor(&slot)];
            eval::op(&Op::CacheWrite, args).unwrap();
        }
        let desc = AttentionDesc {
            heads: a.heads,
            kv_heads: a.kv_heads,
            qk_dim: a.qk_dim,
            v_dim: a.v_dim,
            scale: a.scale,
            window,
            chunked: false,
            sinks: a.sinks.is_some(),
            v_from_k: false,
        };
        let sinks = a.sinks.iter().map(|raw| self.store.tensor(raw)).collect::<Vec<_>>();
        let args: Vec<&Tensor> =
            [&q, &self.keys, &self.values, &pos, &slot].into_iter().chain(&sinks).collect();
        let y = op(&Op::Attention(desc), &args);
        linear(&y, &a.o).as_f32().to_vec()
    }
}

/// Inputs that the runtime passes for the rows from `start` on; the first `valid` are not padding.
fn inputs(a: &Attention, chunk: Chunk, start: usize, valid: usize, window: Option<usize>) -> [Vec<f32>; 3] {
    let rows = |t| start + t;
    let seen = chunk.start.map_or(CONTEXT, |s| s + chunk.rows);
    let mask = (0..chunk.rows).flat_map(|t| {
        (0..seen).map(move |p| {
            let near = window.is_none_or(|w| p + w > rows(t));
            if p <= rows(t) && near { 0.0 } else { MASKED }
        })
    });
    let write =
        (0..CONTEXT).flat_map(|p| (0..chunk.rows).map(move |t| (t < valid && p == rows(t)) as u8 as f32));
    let frequencies = frequencies(a.rope);
    let angles = (0..chunk.rows).flat_map(|t| {
        let angle = |f: &f32| rows(t) as f32 * f;
        let cos = frequencies.iter().map(|f| angle(f).cos()).collect::<Vec<_>>();
        let sin = frequencies.iter().map(|f| angle(f).sin()).collect::<Vec<_>>();
        [cos, sin].concat()
    });
    let rounded = |x: f32| f16::from_f32(x).to_f32();
    [mask.collect(), write.collect(), angles.map(rounded).collect()]
}

/// A prompt of 40 tokens in chunks of 16, the last one half empty. Compares rows and cache.
fn check(
    what: &str,
    store: &mut Store,
    a: &Attention,
    window: Option<usize>,
    rounding: Rounding,
    bound: f64,
) {
    let program: Program = a.emit(&ane()).unwrap();
    let prompt = store.rows(40 * a.hidden);
    let mut reference = Reference::new(store, a);
    let mut states = States::new();
    for start in [0, 16, 32] {
        let valid = ROWS.min(40 - start);
        let fixed = Chunk { rows: ROWS, start: Some(start) };
        let chunk = if a.chunks.contains(&fixed) { fixed } else { Chunk { rows: ROWS, start: None } };
        let name = if chunk == fixed { format!("chunk16_at{start}") } else { "chunk16".to_owned() };
        let [mask, write, angles] = inputs(a, chunk, start, valid, window);
        let mut x = prompt[start * a.hidden..(start + valid) * a.hidden].to_vec();
        x.resize(ROWS * a.hidden, 0.0);
        let given = [("x", &*x), ("mask", &mask), ("write", &write), ("angles", &angles)];
        let got = call(&program, &name, store, &given, &mut states, rounding);

        let pos: Vec<i32> = (0..ROWS).map(|t| if t < valid { (start + t) as i32 } else { -1 }).collect();
        let channels = a.rope.map_or(0, |r| r.channels);
        let want = reference.chunk(&x, &pos, &Tensor::f32([ROWS, channels], angles.clone()), window);
        let rows = valid * a.hidden;
        let error = difference(&got["y"][..rows], &want[..rows]);
        assert!(error < bound, "{what}, rows from {start}: {error}");
    }
    // The state holds keys, then values; both are as wide as the wider of the two, padded with zeros.
    let (state, width) = (&states["kv"], a.state_width(&ane()));
    for (half, cache) in [&reference.keys, &reference.values].into_iter().enumerate() {
        let dim = cache.ty.shape[3];
        let cells = cache.as_f32().chunks(dim).zip(state[half * state.len() / 2..].chunks(width));
        // Values that padding rows wrote to fixed positions are ignored.
        for (i, (want, got)) in cells.enumerate().filter(|(i, _)| i % CONTEXT < 40) {
            if want.iter().any(|x| *x != 0.0) {
                let error = difference(&got[..dim], want);
                assert!(error < bound * 10.0, "{what}, cell {i} of half {half}: {error}");
            }
            assert!(got[dim..].iter().all(|x| *x == 0.0), "{what}");
        }
    }
}

/// A name; query heads, key-value heads, channels of keys and of values; a change to plain attention.
type Case = (&'static str, [usize; 4], fn(&mut Store, &mut Attention));

#[test]
fn every_kind_of_attention_agrees_with_the_reference() {
    let cases: &[Case] = &[
        ("grouped queries", [4, 2, 32, 32], |_, _| ()),
        ("a head of keys per query", [2, 2, 32, 32], |_, _| ()),
        ("norms per head", [4, 2, 32, 32], |store, a| {
            (a.q_norm, a.k_norm) = (Some(store.norm(32)), Some(store.norm(32)));
        }),
        ("norms over all heads", [4, 2, 32, 32], |store, a| {
            (a.q_norm, a.k_norm) = (Some(store.norm(4 * 32)), Some(store.norm(2 * 32)));
        }),
        ("no rotation, clipped", [4, 2, 32, 32], |_, a| (a.rope, a.clip_qkv) = (None, Some(0.5))),
        ("some channels rotated in pairs", [4, 1, 32, 32], |_, a| {
            a.rope = Some(Rope { offset: 8, channels: 16, style: RopeStyle::Interleaved });
        }),
        ("narrow heads, values narrower still", [4, 2, 24, 16], |_, a| {
            a.rope = Some(Rope { offset: 0, channels: 16, style: RopeStyle::Half });
        }),
        ("values wider than keys", [2, 1, 16, 48], |_, _| ()),
        ("sinks", [4, 2, 32, 32], |store, a| a.sinks = Some(store.raw(&[4], 0.0, 2.0))),
        ("fixed places", [4, 2, 32, 32], |_, a| {
            a.chunks = [0, 16, 32].map(|start| Chunk { rows: 16, start: Some(start) }).to_vec();
        }),
        ("a fixed place first, then any", [4, 2, 24, 24], |_, a| {
            a.chunks.push(Chunk { rows: 16, start: Some(0) });
        }),
    ];
    for (what, dims, change) in cases {
        for (bias, window) in [(false, None), (true, Some(10))] {
            let mut store = Store::default();
            let mut attention = store.attention_of(*dims, bias);
            change(&mut store, &mut attention);
            check(what, &mut store, &attention, window, Rounding::None, 1e-5);
        }
    }
}

#[test]
fn f16_attention_error_is_a_few_thousandths() {
    let mut store = Store::default();
    let mut attention = store.attention();
    (attention.q_norm, attention.k_norm) = (Some(store.norm(32)), Some(store.norm(32)));
    check("f16", &mut store, &attention, None, Rounding::F16, 5e-3);
}

#[test]
fn graph_size_is_predicted_before_writing() {
    for dims in [[4, 2, 32, 32], [4, 2, 24, 16], [2, 1, 16, 48], [2, 2, 24, 24]] {
        let mut store = Store::default();
        let mut attention = store.attention_of(dims, true);
        attention.sinks = Some(store.raw(&[dims[0]], 0.0, 1.0));
        attention.chunks.push(Chunk { rows: 32, start: Some(0) });
        let bytes = attention.emit(&ane()).unwrap().weight_bytes();
        let limits = |graph_bytes| moec_coreml::emit::Limits { graph_bytes, ..ane() };
        assert!(attention.emit(&limits(bytes)).is_ok());
        let error = attention.emit(&limits(bytes - 1)).unwrap_err().to_string();
        assert!(
            error.contains(&format!("has {bytes} bytes")) && error.contains("keep it on another unit"),
            "{error}"
        );
    }
}

/// Expected words of an error, and the change to a description that causes it.
type Fault = (&'static str, fn(&mut Attention));

#[test]
fn inconsistent_attention_descriptions_are_rejected() {
    let cases: [Fault; 5] = [
        ("4 query heads share 3 of keys", |a| a.kv_heads = 3),
        ("does not fit 64 positions", |a| a.chunks = vec![Chunk { rows: 16, start: Some(56) }]),
        ("in heads of 32 channels", |a| {
            a.rope = Some(Rope { offset: 16, channels: 32, style: RopeStyle::Half });
        }),
        ("`v` is [64, 32], expected [32, 32]", |a| a.v_dim = 16),
        ("there are no numbers of rows", |a| a.chunks.clear()),
    ];
    for (what, change) in cases {
        let mut attention = Store::default().attention();
        change(&mut attention);
        let error = attention.emit(&ane()).unwrap_err().to_string();
        assert!(error.starts_with("graph `layer0.attention`: ") && error.contains(what), "{error}");
    }
}
