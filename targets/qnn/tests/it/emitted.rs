//! Emitted networks compute the right results, and quantised networks are close to them.

use super::fixture::*;
use moec_ir::{Activation, Glu, RopeStyle};
use moec_qnn::emit::{Attention, Ffn, Group, Head, mask};
use moec_qnn::exec::share_of_spread;
use moec_qnn::net::Quant;

/// Bound on the error of quantisation: 2 % of the reference's spread.
const BOUND: f64 = 0.02;

/// A gated network computed by its formula, one row at a time.
fn plain(glu: Glu, x: &[f32], hidden: usize, clusters: &[usize], seed: u64) -> Vec<f32> {
    let exact = ffn(MatrixRounding::Exact, glu, hidden, clusters, seed);
    let mut y = vec![0.0; hidden];
    for cluster in &exact.clusters {
        let read = |p: &moec_qnn::emit::Projection| match &p.matrix.data {
            Some(moec_qnn::net::Data::Here(bytes)) => {
                bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect::<Vec<_>>()
            }
            _ => Vec::new(),
        };
        let (wg, wu, wd) = (read(&cluster.gate), read(&cluster.up), read(&cluster.down));
        let dot = |w: &[f32]| w.iter().zip(x).map(|(a, b)| a * b).sum::<f32>();
        let n = wg.len() / hidden;
        for i in 0..n {
            let (g, u) = (dot(&wg[i * hidden..(i + 1) * hidden]), dot(&wu[i * hidden..(i + 1) * hidden]));
            let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
            let h = match glu {
                Glu::Gated(Activation::Relu) => g.max(0.0) * u,
                Glu::Gated(Activation::Relu2) => g.max(0.0).powi(2) * u,
                Glu::Gated(Activation::Silu) => g * sigmoid(g) * u,
                Glu::Gated(Activation::Sigmoid) => sigmoid(g) * u,
                Glu::Gated(Activation::Gelu | Activation::GeluTanh) => {
                    let z = 0.797_884_6 * (g + 0.044_715 * g * g * g);
                    g / 2.0 * (1.0 + z.tanh()) * u
                }
                Glu::DRelu => g.max(0.0) * u.max(0.0),
                Glu::FatRelu { threshold } => (if g >= threshold { g } else { 0.0 }) * u,
                Glu::Cats { threshold } => {
                    let g = g * sigmoid(g);
                    (if g.abs() >= threshold { g } else { 0.0 }) * u
                }
                Glu::Limited { limit } => (g * sigmoid(g)).min(limit) * u.clamp(-limit, limit),
                Glu::Clamped { alpha, limit } => {
                    let (g, u) = (g.min(limit), u.clamp(-limit, limit));
                    (u + 1.0) * g * sigmoid(alpha * g)
                }
                Glu::Ungated(_) => unreachable!("a network without a gate is refused"),
            };
            for (r, y) in y.iter_mut().enumerate() {
                *y += h * wd[r * n + i];
            }
        }
    }
    y
}

#[test]
fn every_gated_activation_matches_its_formula() {
    let clamped = Glu::Clamped { alpha: 1.702, limit: 1.0 };
    let gated = Activation::ALL.map(Glu::Gated);
    let cut = [Glu::FatRelu { threshold: 0.125 }, Glu::Cats { threshold: 0.125 }];
    for glu in gated.into_iter().chain([Glu::DRelu, Glu::Limited { limit: 0.25 }, clamped]).chain(cut) {
        let x = numbers(5, 2 * 32);
        let network = ffn(MatrixRounding::Exact, glu, 32, &[24, 16], 1).graph("b2", 2, 2).unwrap();
        let got = run(&network, std::slice::from_ref(&x)).remove(0);
        let want: Vec<f32> = x.chunks(32).flat_map(|row| plain(glu, row, 32, &[24, 16], 1)).collect();
        // GELU's tanh approximation differs from GELU by the error function.
        let bound = if glu == Glu::Gated(Activation::Gelu) { 2e-3 } else { 1e-5 };
        assert!(share_of_spread(&got, &want) < bound, "{glu:?}: {}", share_of_spread(&got, &want));
    }
}

#[test]
fn activations_without_an_operator_are_rejected_by_name() {
    let ungated = Glu::Ungated(Activation::Relu2);
    let ungated = ffn(MatrixRounding::Exact, ungated, 16, &[16], 1).graph("b1", 1, 1);
    assert!(ungated.unwrap_err().to_string().contains("without a gate"));
}

#[test]
fn batch_uses_the_first_clusters_and_shares_weights() {
    let ffn = ffn(MatrixRounding::Mixed, RELU, 32, &[32, 16, 16], 1);
    let statics = |n: usize| -> Vec<String> {
        let graph = ffn.graph(&format!("b{n}"), n, n).unwrap();
        graph.tensors.iter().filter(|t| t.is_static()).map(ToString::to_string).collect()
    };
    let all = statics(3);
    for n in 1..3 {
        assert!(statics(n).iter().all(|t| all.contains(t)), "{n}");
        assert!(statics(n).len() < all.len());
    }
    let x = numbers(5, 32);
    let got = run(&ffn.graph("b1", 1, 1).unwrap(), std::slice::from_ref(&x)).remove(0);
    let want = plain(RELU, &x, 32, &[32], 1);
    assert!(share_of_spread(&got, &want) < 0.1, "{}", share_of_spread(&got, &want));
    assert!(ffn.graph("b0", 1, 0).unwrap_err().to_string().contains("no cluster"));
}

#[test]
fn inputs_with_wider_weights_are_added() {
    // Except for rounding, the network is that in f32; an input at a wrong position would give large errors.
    for glu in [RELU, Glu::Gated(Activation::Silu)] {
        let x = numbers(6, 3 * 48);
        let graph = |form| ffn(form, glu, 48, &[64, 32], 2).graph("b3", 3, 2).unwrap();
        let [want, mixed, eight] = [MatrixRounding::Exact, MatrixRounding::Mixed, MatrixRounding::Eight]
            .map(|form| run(&graph(form), std::slice::from_ref(&x)).remove(0));
        let (four, eight) = (share_of_spread(&mixed, &want), share_of_spread(&eight, &want));
        assert!(four < 0.08 && eight < 0.01 && eight < four, "{four} {eight}");
    }
}

#[test]
fn quantized_ffn_error_is_within_two_percent_of_spread() {
    for rows in 1..=4 {
        let network = ffn(MatrixRounding::Mixed, RELU, 64, &[96, 32], 3).graph("b", rows, 2).unwrap();
        let sample = |seed: u64| vec![numbers(seed + 50, rows * 64)];
        let codes = calibrated(&network, sample);
        let x = sample(1);
        let off = share_of_spread(&run(&codes, &x)[0], &run(&network, &x)[0]);
        assert!(off < BOUND / 20.0, "{rows} rows: {off}");
    }
}

#[test]
fn experts_of_a_group_have_rows_of_their_own() {
    let experts: Vec<Ffn> = (0..3).map(|e| ffn(MatrixRounding::Eight, RELU, 32, &[48], e + 1)).collect();
    let group = Group { experts: experts.clone() };
    let x = numbers(7, 3 * 2 * 32);
    let got = run(&group.graph("cap2", 2).unwrap(), std::slice::from_ref(&x)).remove(0);
    for (e, expert) in experts.iter().enumerate() {
        let own = e * 64..(e + 1) * 64;
        let want = run(&expert.graph("b2", 2, 1).unwrap(), &[x[own.clone()].to_vec()]).remove(0);
        assert_eq!(got[own], want);
    }
    assert!(Group { experts: Vec::new() }.graph("cap2", 2).unwrap_err().to_string().contains("no experts"));
}

#[test]
fn head_returns_its_vocabulary_in_parts() {
    let all = numbers(8, 40 * 32);
    let part = |name: &str, rows: std::ops::Range<usize>| {
        projection(MatrixRounding::Exact, name, [rows.len(), 32], &all[rows.start * 32..rows.end * 32])
    };
    let head = Head { hidden: 32, parts: vec![part("w0", 0..24), part("w1", 24..40)] };
    let x = numbers(9, 32);
    let got = run(&head.graph("rows1", 1).unwrap(), std::slice::from_ref(&x)).concat();
    let want: Vec<f32> = all.chunks(32).map(|row| row.iter().zip(&x).map(|(a, b)| a * b).sum()).collect();
    assert!(share_of_spread(&got, &want) < 1e-6);
}

/// Inputs of attention: `rows` rows at position `at`, after the first `at` positions of `cache`.
fn chunk(a: &Attention, x: &[f32], at: usize, cache: [&[f32]; 2]) -> Vec<Vec<f32>> {
    let rows = x.len() / a.hidden;
    let (seen, half) = (a.context + rows, a.qk_dim / 2);
    let mut mask = vec![-1e4; rows * seen];
    for t in 0..rows {
        (0..at).for_each(|c| mask[t * seen + c] = 1e4);
        (0..=t).for_each(|s| mask[t * seen + a.context + s] = 1e4);
    }
    let angle = |t: usize, i: usize| (at + t) as f32 / 10_f32.powf(i as f32 / half as f32);
    let of = |f: fn(f32) -> f32| (0..rows).flat_map(|t| (0..half).map(move |i| f(angle(t, i)))).collect();
    vec![x.to_vec(), cache[0].to_vec(), cache[1].to_vec(), mask, of(f32::cos), of(f32::sin)]
}

/// Writes a chunk's keys or values `[kv, rows, dim]` after `at` positions of a cache `[kv, context, dim]`.
fn keep(a: &Attention, cache: &mut [f32], new: &[f32], at: usize) {
    let rows = new.len() / a.kv_heads / a.v_dim;
    for h in 0..a.kv_heads {
        let from = (h * a.context + at) * a.v_dim;
        let own = &new[h * rows * a.v_dim..(h + 1) * rows * a.v_dim];
        cache[from..from + own.len()].copy_from_slice(own);
    }
}

#[test]
fn attention_gives_equal_results_by_chunk_and_by_row() {
    for style in [RopeStyle::Half, RopeStyle::Interleaved] {
        let a = attention(MatrixRounding::Exact, style);
        let x = numbers(11, 5 * a.hidden);
        let empty = vec![0.0; a.kv_heads * a.context * a.v_dim];
        let whole = run(&a.graph("chunk5", 5).unwrap(), &chunk(&a, &x, 0, [&empty, &empty])).remove(0);
        let (mut keys, mut values) = (empty.clone(), empty);
        let one = a.graph("chunk1", 1).unwrap();
        let mut steps = Vec::new();
        for (t, row) in x.chunks(a.hidden).enumerate() {
            let out = run(&one, &chunk(&a, row, t, [&keys, &values]));
            steps.extend_from_slice(&out[0]);
            keep(&a, &mut keys, &out[1], t);
            keep(&a, &mut values, &out[2], t);
        }
        assert!(share_of_spread(&steps, &whole) < 1e-5, "{style:?}: {}", share_of_spread(&steps, &whole));
    }
}

#[test]
fn queries_keys_and_values_are_clipped() {
    let a = attention(MatrixRounding::Exact, RopeStyle::Half);
    let (x, empty) = (numbers(11, 3 * a.hidden), vec![0.0; a.kv_heads * a.context * a.v_dim]);
    let given = |clip| {
        let clipped = Attention { clip, ..a.clone() };
        run(&clipped.graph("chunk3", 3).unwrap(), &chunk(&a, &x, 0, [&empty, &empty]))
    };
    let (free, wide, narrow) = (given(None), given(Some(1e3)), given(Some(0.5)));
    assert_eq!(free, wide);
    let limited: Vec<f32> = free[2].iter().map(|v| v.clamp(-0.5, 0.5)).collect();
    assert!(narrow[2] == limited && limited != free[2] && narrow[0] != free[0]);
}

#[test]
fn known_ranges_are_not_widened() {
    let a = attention(MatrixRounding::Eight, RopeStyle::Half);
    let network = a.graph("chunk4", 4).unwrap();
    let sample = |seed: u64| {
        let cache = numbers(seed + 60, a.kv_heads * a.context * a.v_dim);
        chunk(&a, &numbers(seed + 30, 4 * a.hidden), 3, [&cache, &cache])
    };
    let codes = calibrated(&network, sample);
    let [hidden, seen] = mask(&codes);
    assert_eq!(mask(&network), [-1e4, 1e4]);
    let ends = |name: &str| {
        let tensor = codes.tensors.iter().find(|t| t.name == name).unwrap();
        let Quant::Tensor(scale) = tensor.quant else { panic!("{name} has no scale") };
        [0, 65535].map(|code| scale.real(code) as f32)
    };
    let scores = ends("scores.rows");
    assert!(
        (seen - scores[1]).abs() < 0.01 * seen && (hidden + 16.0 - scores[0]).abs() < 0.1,
        "{hidden} {seen} {scores:?}"
    );
    assert_eq!(ends("scores.masked"), [hidden, seen]);
    for (name, least, most) in [("shares", 0.0, 1.0), ("cos", -1.0, 1.0), ("sin.row", -1.0, 1.0)] {
        let found = ends(name);
        assert!((found[0] - least).abs() < 1e-3 && (found[1] - most).abs() < 1e-3, "{name}: {found:?}");
    }
}

#[test]
fn attention_error_is_within_two_percent_of_spread() {
    let a = attention(MatrixRounding::Eight, RopeStyle::Half);
    let network = a.graph("chunk4", 4).unwrap();
    let sample = |seed: u64| {
        let x = numbers(seed + 30, 4 * a.hidden);
        let cache = |seed| numbers(seed, a.kv_heads * a.context * a.v_dim);
        chunk(&a, &x, 3, [&cache(seed + 60), &cache(seed + 90)])
    };
    let codes = calibrated(&network, sample);
    let (got, want) = (run(&codes, &sample(1)), run(&network, &sample(1)));
    for (got, want) in got.iter().zip(&want) {
        assert!(share_of_spread(got, want) < BOUND / 4.0, "{}", share_of_spread(got, want));
    }
}

#[test]
fn printed_network_matches_its_snapshot() {
    let network = ffn(MatrixRounding::Mixed, RELU, 16, &[16], 1).graph("b1", 1, 1).unwrap();
    let codes = calibrated(&network, |seed| vec![numbers(seed + 50, 16)]);
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/snapshots");
    insta::with_settings!({ snapshot_path => folder, prepend_module_to_snapshot => false }, {
        insta::assert_snapshot!("ffn", format!("{network}\n{codes}"));
    });
}
