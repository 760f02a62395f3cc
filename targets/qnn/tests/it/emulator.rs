//! QNN's emulator of the HTP and moec's evaluator agree to within a few steps of the codes.

use super::fixture::*;
use moec_ir::{Activation, Glu, RopeStyle};
use moec_qnn::compose::compose;
use moec_qnn::exec::{Executor, share_of_spread};
use moec_qnn::net::{Dtype, Network, Quant, Scale, TensorId};
use moec_qnn_sys::{Backend, Context, Device, Installation, SNAPDRAGON_8_GEN_3, System};
use std::rc::Rc;
use std::sync::Arc;

fn scale(network: &Network, id: TensorId) -> Scale {
    match network.tensor(id).quant {
        Quant::Tensor(scale) => scale,
        _ => Scale { scale: 1.0, offset: 0 },
    }
}

/// Results of a network on the emulator; inputs and outputs are floats.
fn emulated(device: &Rc<Device>, network: &Network, inputs: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let mut context = Context::new(device, false).unwrap();
    let graph = context.compose(&compose(network, None).unwrap()).unwrap();
    let codes = |(id, x): (&TensorId, &Vec<f32>)| -> Vec<u8> {
        let scale = scale(network, *id);
        x.iter().flat_map(|x| (scale.code(f64::from(*x), Dtype::U16).0 as u16).to_le_bytes()).collect()
    };
    let given: Vec<Vec<u8>> = network.inputs.iter().zip(inputs).map(codes).collect();
    let given: Vec<&[u8]> = given.iter().map(|x| &**x).collect();
    let reals = |(id, bytes): (&TensorId, Vec<u8>)| -> Vec<f32> {
        let scale = scale(network, *id);
        bytes
            .as_chunks::<2>()
            .0
            .iter()
            .map(|b| scale.real(i64::from(u16::from_le_bytes(*b))) as f32)
            .collect()
    };
    network.outputs.iter().zip(graph.execute(&given).unwrap()).map(reals).collect()
}

#[test]
fn the_emulator_and_the_evaluator_agree() {
    if !moec_testing::QNN.met_or_skip() {
        return;
    }
    let cache = moec_testing::cache().unwrap();
    let installation = Installation::find(&cache).unwrap();
    let device = Device::new(&Backend::htp(&installation).unwrap(), SNAPDRAGON_8_GEN_3).unwrap();
    let attention = attention(MatrixRounding::Eight, RopeStyle::Half);
    let wide = |seed: u64| {
        let seen = attention.context + 4;
        let cache = |s: u64| numbers(s + seed, attention.kv_heads * attention.context * attention.v_dim);
        let mask = (0..4 * seen).map(|i| if i % seen < 8 + i / seen { 1e4 } else { -1e4 }).collect();
        let angles =
            |s| numbers(s + seed, 4 * attention.qk_dim / 2).iter().map(|x| x.clamp(-1.0, 1.0)).collect();
        vec![numbers(seed, 4 * attention.hidden), cache(100), cache(200), mask, angles(300), angles(400)]
    };
    let rows = |seed: u64| vec![numbers(seed + 70, 4 * 64)];
    let gated = |form, glu| ffn(form, glu, 64, &[64, 32], 4).graph("b4", 4, 2).unwrap();
    type Sample<'a> = &'a dyn Fn(u64) -> Vec<Vec<f32>>;
    let cases: [(Network, Sample<'_>, f64); 4] = [
        (gated(MatrixRounding::Eight, RELU), &rows, 3e-4),
        (gated(MatrixRounding::Mixed, RELU), &rows, 3e-3),
        (gated(MatrixRounding::Eight, Glu::Gated(Activation::Silu)), &rows, 5e-4),
        (attention.graph("chunk4", 4).unwrap(), &wide, 1e-3),
    ];
    for (network, sample, bound) in cases {
        let (codes, x) = (calibrated(&network, sample), sample(3));
        let got = emulated(&device, &codes, &x);
        let inputs: Vec<&[f32]> = x.iter().map(|x| &**x).collect();
        let want = Executor::new(Arc::new(codes), None).unwrap().run(&inputs).unwrap().outputs;
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            let off = share_of_spread(got, want);
            assert!(off <= bound, "{} result {i}: {off:e} of the spread", network.name);
        }
    }
}

#[test]
fn batch_sizes_share_their_weights_in_one_context() {
    if !moec_testing::QNN.met_or_skip() {
        return;
    }
    let cache = moec_testing::cache().unwrap();
    let installation = Installation::find(&cache).unwrap();
    let device = Device::new(&Backend::htp(&installation).unwrap(), SNAPDRAGON_8_GEN_3).unwrap();
    let ffn = ffn(MatrixRounding::Eight, RELU, 256, &[512], 4);
    let binary = |share: bool| {
        let mut context = Context::new(&device, share).unwrap();
        for rows in 1..=4 {
            let network = ffn.graph(&format!("b{rows}"), rows, 1).unwrap();
            let codes = calibrated(&network, |seed| vec![numbers(seed + 70, rows * 256)]);
            context.compose(&compose(&codes, None).unwrap()).unwrap();
        }
        context.binary().unwrap()
    };
    let (shared, separate) = (binary(true), binary(false));
    let weights = 3 * 256 * 512;
    assert!(shared.len() < separate.len() / 2, "{} and {}", shared.len(), separate.len());
    assert!(
        shared.len() > weights && separate.len() > 4 * weights,
        "{} and {}",
        shared.len(),
        separate.len()
    );
    let info = System::open(&installation).unwrap().binary_info(&shared).unwrap();
    info.expect(SNAPDRAGON_8_GEN_3).unwrap();
    assert_eq!(info.graphs.len(), 4);
}
