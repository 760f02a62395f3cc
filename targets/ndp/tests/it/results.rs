//! Results of the machine: bitwise those of the evaluator, and close to the exact result.

use crate::common::{Bench, GLUS, Random, Weights, bits};
use moec_ir::{Activation, Glu};
use moec_ndp::emit::Output;
use moec_ndp::evaluate::expert;
use moec_ndp::image::Shape;
use moec_ndp::machine::{Dimms, Fault, Program};

/// Hidden and inner channels: panels and tiles that are full, ones that are not, odd numbers, and several
/// chunks.
const SIZES: [(u32, u32); 7] = [(64, 32), (64, 48), (100, 36), (33, 17), (1, 1), (130, 65), (256, 512)];

fn x_of(shape: &Shape, tokens: usize, seed: u64) -> Vec<f32> {
    Random(seed).numbers(tokens * shape.hidden as usize, 2.0)
}

#[test]
fn every_expert_network_matches_the_evaluator() {
    for (number, glu) in GLUS.into_iter().enumerate() {
        for bias in [false, true] {
            for (hidden, inner) in SIZES {
                let shape = Shape { hidden, inner, glu, bias };
                let weights = Weights::random(shape, number as u64 + 1);
                let mut bench = Bench::new(&weights, 9, Output::Slots);
                let x = x_of(&shape, 3, 77);
                let (results, _) = bench.run(1, &x, &[1.0; 3], 2);
                let expected = expert(&shape, &bench.image, &x, 3).expect("an evaluation");
                assert_eq!(bits(&results), bits(&expected), "{shape:?}");
            }
        }
    }
}

#[test]
fn many_tokens_are_computed_in_blocks() {
    for (hidden, inner, bias) in [(1024, 2048, true), (2048, 640, false)] {
        let shape = Shape { hidden, inner, glu: Glu::Gated(Activation::Silu), bias };
        let weights = Weights::random(shape, 5);
        let mut bench = Bench::new(&weights, 4096, Output::Slots);
        let block = bench.stream.tokens as usize;
        assert!(block > 2, "{block} tokens of a block");
        let x = x_of(&shape, 3 * block + 2, 6);
        let expected = expert(&shape, &bench.image, &x, 3 * block + 2).expect("an evaluation");
        for tokens in [0, 1, block - 1, block, block + 1, 3 * block + 2] {
            let numbers = tokens * hidden as usize;
            let (results, report) = bench.run(1, &x[..numbers], &vec![1.0; tokens], 3);
            assert_eq!(bits(&results), bits(&expected[..numbers]), "{tokens} tokens of {shape:?}");
            let weights = shape.image().expect("an image");
            let products = (weights.gate_up.weights() + weights.down.weights()) * tokens as u64;
            assert_eq!(report.flops, 2 * products);
        }
    }
}

#[test]
fn routing_weights_scale_the_output() {
    for (hidden, inner) in SIZES {
        let shape = Shape { hidden, inner, glu: Glu::Gated(Activation::Gelu), bias: true };
        let weights = Weights::random(shape, 8);
        let mut bench = Bench::new(&weights, 40, Output::Weighted);
        let x = x_of(&shape, 12, 9);
        let factors = Random(10).numbers(12, 1.0);
        let (results, _) = bench.run(1, &x, &factors, 20);
        let plain = expert(&shape, &bench.image, &x, 12).expect("an evaluation");
        let rows = plain.chunks_exact(hidden as usize).zip(&factors);
        let expected: Vec<f32> = rows.flat_map(|(row, factor)| row.iter().map(move |y| y * factor)).collect();
        assert_eq!(bits(&results), bits(&expected), "{shape:?}");
    }
}

/// Results are close to those in f64, in which `h` is rounded to bf16, as the unit does.
///
/// Remaining errors: `k` roundings of f32 for every sum of `k` products, and their effect on the rounding of
/// `h`, which is at most an ulp of bf16.
#[test]
fn ndp_results_match_the_model_within_rounding() {
    for glu in GLUS {
        let shape = Shape { hidden: 192, inner: 160, glu, bias: true };
        let weights = Weights::random(shape, 21);
        let (gate_up_bias, down_bias) = weights.biases.clone().expect("biases");
        let bench = Bench::new(&weights, 4, Output::Slots);
        let x: Vec<f32> = x_of(&shape, 1, 22).iter().map(|&x| half::bf16::from_f32(x).to_f32()).collect();
        let results = expert(&shape, &bench.image, &x, 1).expect("an evaluation");
        let dot = |row: &[f32], x: &[f64]| row.iter().zip(x).map(|(&w, x)| f64::from(w) * x).sum::<f64>();
        let wide: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
        let both: Vec<f64> = weights
            .gate_up
            .chunks_exact(192)
            .zip(&gate_up_bias)
            .map(|(row, &bias)| dot(row, &wide) + f64::from(bias))
            .collect();
        let h: Vec<f64> = (0..160).map(|i| meaning(glu, both[i], both[160 + i])).collect();
        let size = h.iter().fold(0.0_f64, |most, h| most.max(h.abs()));
        for ((row, &bias), &result) in weights.down.chunks_exact(160).zip(&down_bias).zip(&results) {
            let expected = dot(row, &h) + f64::from(bias);
            // Each product may be off by half an ulp of bf16 (2⁻⁹ of it), plus the errors of f32.
            let bound: f64 =
                row.iter().zip(&h).map(|(&w, h)| f64::from(w.abs()) * h.abs()).sum::<f64>() / 500.0;
            let error = (f64::from(result) - expected).abs();
            assert!(error <= bound + size * 1e-6, "{glu:?}: {result} instead of {expected}, bound {bound}");
        }
    }
}

fn meaning(glu: Glu, g: f64, u: f64) -> f64 {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    match glu {
        Glu::Gated(Activation::Silu) => g * sigmoid(g) * u,
        // The normal distribution by Simpson's rule.
        Glu::Gated(Activation::Gelu) => {
            let steps = 2000;
            let at = |i: i32| (-(g * f64::from(i) / f64::from(steps)).powi(2) / 2.0).exp();
            let inner: f64 = (1..steps).map(|i| at(i) * if i % 2 == 1 { 4.0 } else { 2.0 }).sum();
            let area = (at(0) + inner + at(steps)) * g / f64::from(steps) / 3.0;
            g * (0.5 + area / (2.0 * std::f64::consts::PI).sqrt()) * u
        }
        Glu::Gated(Activation::GeluTanh) => {
            let y = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044_715 * g.powi(3));
            0.5 * g * (1.0 + y.tanh()) * u
        }
        Glu::Gated(Activation::Relu) => g.max(0.0) * u,
        Glu::Gated(Activation::Relu2) | Glu::Ungated(_) => unreachable!("no instruction joins them so"),
        Glu::Gated(Activation::Sigmoid) => sigmoid(g) * u,
        Glu::DRelu => g.max(0.0) * u.max(0.0),
        Glu::FatRelu { threshold } => (if g >= f64::from(threshold) { g } else { 0.0 }) * u,
        Glu::Cats { threshold } => {
            let g = g * sigmoid(g);
            (if g.abs() >= f64::from(threshold) { g } else { 0.0 }) * u
        }
        Glu::Limited { limit } => {
            let limit = f64::from(limit);
            (g * sigmoid(g)).min(limit) * u.clamp(-limit, limit)
        }
        Glu::Clamped { alpha, limit } => {
            let (alpha, limit) = (f64::from(alpha), f64::from(limit));
            let (g, u) = (g.min(limit), u.clamp(-limit, limit));
            (u + 1.0) * g * sigmoid(alpha * g)
        }
    }
}

#[test]
fn invalid_ndp_runs_are_reported() {
    let shape = Shape { hidden: 64, inner: 32, glu: GLUS[0], bias: false };
    let mut bench = Bench::new(&Weights::random(shape, 1), 4, Output::Slots);
    let run = |bench: &mut Bench, first, n| {
        let run = Program::new(bench.stream.clone()).and_then(|program| bench.dimms.run(&program, first, n));
        run.expect_err("a fault").to_string()
    };
    // The expert was written, but no activations were.
    let missing = run(&mut bench, 0, 1);
    assert!(missing.starts_with("DIMM 1 reads an address that was not written: Place {"), "{missing}");
    assert_eq!(run(&mut bench, 2, 3), "3 tokens from slot 2 on are more than the 4 slots of stream `expert`");
    assert_eq!(
        run(&mut bench, u32::MAX, 2),
        "2 tokens from slot 4294967295 on are more than the 4 slots of stream `expert`"
    );
    bench.stream.dimm = 4;
    assert_eq!(
        run(&mut bench, 0, 1),
        "stream `expert`: header: there is no DIMM 4: the system has 4, numbered from 0"
    );
    bench.stream.dimm = 1;
    bench.stream.regions[0].rows.end = 5000;
    let outside = run(&mut bench, 0, 1);
    assert!(outside.contains("region `expert`: rows 3..5000"), "{outside}");
    bench.stream.regions[0].rows.end = 4;
    bench.stream.geometry.rows = 7;
    assert!(run(&mut bench, 0, 1).contains("emit it again"));
}

#[test]
fn unwritten_memory_reads_as_zero_if_allowed() {
    let shape = Shape { hidden: 64, inner: 32, glu: GLUS[0], bias: false };
    let bench = Bench::new(&Weights::random(shape, 1), 4, Output::Slots);
    let (dimm_config, bus) = (*bench.dimms.dimm_config(), *bench.dimms.bus());
    let mut dimms = Dimms::new(dimm_config, bus, false).expect("DIMMs");
    dimms.run(&Program::new(bench.stream).expect("it is verified"), 0, 2).expect("no fault");
    let empty = moec_ndp::allocation::DimmConfig {
        system: moec_ndp_isa::System { channels: 0, dimms: 1 },
        ..dimm_config
    };
    let fault = Dimms::new(empty, bus, false).expect_err("no DIMMs");
    assert_eq!(fault, Fault::Dimms(empty));
}
