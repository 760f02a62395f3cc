//! Removing the quantisation of activations gives the original f32 network.

use super::fixture::*;
use moec_ir::RopeStyle;
use moec_qnn::exec::share_of_spread;
use moec_qnn::quant::reals;

#[test]
fn dequantized_network_matches_the_f32_network() {
    for form in [MatrixRounding::Eight, MatrixRounding::Mixed] {
        let plain = ffn(form, RELU, 64, &[64, 32], 4).graph("b4", 4, 2).unwrap();
        let codes = calibrated(&plain, |seed| vec![numbers(seed + 70, 4 * 64)]);
        assert_ne!(codes, plain);
        assert_eq!(reals(&codes, None).unwrap(), plain);
    }
}

/// The weights of norms are stored as codes, too, which loses a little.
#[test]
fn static_codes_are_dequantized() {
    let attention = attention(MatrixRounding::Eight, RopeStyle::Half);
    let plain = attention.graph("chunk4", 4).unwrap();
    let inputs = |seed: u64| {
        let seen = attention.context + 4;
        let cache = |s: u64| numbers(s + seed, attention.kv_heads * attention.context * attention.v_dim);
        let mask = (0..4 * seen).map(|i| if i % seen < 8 + i / seen { 1e4 } else { -1e4 }).collect();
        let angles =
            |s| numbers(s + seed, 4 * attention.qk_dim / 2).iter().map(|x| x.clamp(-1.0, 1.0)).collect();
        vec![numbers(seed, 4 * attention.hidden), cache(100), cache(200), mask, angles(300), angles(400)]
    };
    let back = reals(&calibrated(&plain, inputs), None).unwrap();
    back.verify().unwrap();
    assert!(back != plain && back.activations().eq(plain.activations()));
    for (got, want) in run(&back, &inputs(3)).iter().zip(&run(&plain, &inputs(3))) {
        let off = share_of_spread(got, want);
        assert!(off < 1e-4, "{off:e}");
    }
}
