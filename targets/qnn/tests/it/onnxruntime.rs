//! onnxruntime computes the same of a written model as moec's evaluator of the network.

use super::fixture::*;
use moec_ir::{Activation, Glu, RopeStyle};
use moec_qnn::exec::{Executor, share_of_spread};
use moec_qnn::net::{Data, Network, Quant};
use moec_qnn::onnx;
use moec_runtime::bundle::BundleReader;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

/// Python script that reads a model and raw inputs, and writes raw outputs.
const SCRIPT: &str = "
import sys
import numpy, onnxruntime
options = onnxruntime.SessionOptions()
options.log_severity_level = 3
options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
model = onnxruntime.InferenceSession(sys.argv[1], options, providers=['CPUExecutionProvider'])
given = {}
for i, port in enumerate(model.get_inputs()):
    given[port.name] = numpy.fromfile(f'{sys.argv[2]}/in{i}', dtype='<f4').reshape(port.shape)
for i, result in enumerate(model.run(None, given)):
    result.astype('<f4').tofile(f'{sys.argv[2]}/out{i}')
";

/// Outputs of onnxruntime; the network's weights are in a file beside the model.
fn run_onnx(
    python: &Path,
    network: &Network,
    inputs: &[Vec<f32>],
) -> (Network, tempfile::TempDir, Vec<Vec<f32>>) {
    let folder = tempfile::tempdir().unwrap();
    let mut network = network.clone();
    let mut file = Vec::new();
    for tensor in network.tensors.iter_mut().filter(|t| matches!(t.quant, Quant::Channels(_))) {
        let Some(Data::Here(bytes)) = tensor.data.clone() else { continue };
        file.resize(file.len().next_multiple_of(64), 0);
        tensor.data = Some(Data::File { file: "weights.bin".into(), offset: file.len() as u64 });
        file.extend_from_slice(&bytes);
    }
    std::fs::write(folder.path().join("weights.bin"), file).unwrap();
    let model = folder.path().join("model.onnx");
    std::fs::write(&model, onnx::write(&network).unwrap()).unwrap();
    for (i, x) in inputs.iter().enumerate() {
        let bytes: Vec<u8> = x.iter().flat_map(|x| x.to_le_bytes()).collect();
        std::fs::write(folder.path().join(format!("in{i}")), bytes).unwrap();
    }
    let out = Command::new(python).arg("-c").arg(SCRIPT).arg(&model).arg(folder.path()).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let read = |i: usize| {
        let bytes = std::fs::read(folder.path().join(format!("out{i}"))).unwrap();
        bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    };
    let outputs = (0..network.outputs.len()).map(read).collect();
    (network, folder, outputs)
}

/// One step of the codes, as a share of a result's spread. A number between two codes may be rounded to
/// either, and later results then differ by some steps. After a softmax, whose operands include a mask, the
/// difference is larger.
const STEP: f64 = 1.0 / 65535.0;

#[test]
fn onnxruntime_and_the_evaluator_agree() {
    if !moec_testing::ONNXRUNTIME.met_or_skip() {
        return;
    }
    let python = moec_testing::onnxruntime().unwrap();
    let attention = attention(MatrixRounding::Mixed, RopeStyle::Interleaved);
    let wide = |seed: u64| {
        let seen = attention.context + 3;
        let cache = |s: u64| numbers(s + seed, attention.kv_heads * attention.context * attention.v_dim);
        let mask = (0..3 * seen).map(|i| if i % seen < 8 + i / seen { 1e4 } else { -1e4 }).collect();
        let angles =
            |s| numbers(s + seed, 3 * attention.qk_dim / 2).iter().map(|x| x.clamp(-1.0, 1.0)).collect();
        vec![numbers(seed, 3 * attention.hidden), cache(100), cache(200), mask, angles(300), angles(400)]
    };
    let rows = |seed: u64| vec![numbers(seed + 70, 3 * 64)];
    let gated = |glu| ffn(MatrixRounding::Mixed, glu, 64, &[64, 32], 4).graph("b3", 3, 2).unwrap();
    let network = attention.graph("chunk3", 3).unwrap();
    type Sample<'a> = &'a dyn Fn(u64) -> Vec<Vec<f32>>;
    let cases: [(Network, Sample<'_>, f64); 4] = [
        (gated(RELU), &rows, 8.0),
        (gated(Glu::Gated(Activation::Silu)), &rows, 8.0),
        (gated(Glu::Gated(Activation::Gelu)), &rows, 8.0),
        (network, &wide, 32.0),
    ];
    for (network, sample, steps) in cases {
        for network in [network.clone(), calibrated(&network, sample)] {
            let x = sample(3);
            let (network, folder, got) = run_onnx(&python, &network, &x);
            let inputs: Vec<&[f32]> = x.iter().map(|x| &**x).collect();
            let executor =
                Executor::new(Arc::new(network.clone()), Some(&BundleReader::unchecked(folder.path())))
                    .unwrap();
            let want = executor.run(&inputs).unwrap().outputs;
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                let off = share_of_spread(got, want);
                assert!(off <= steps * STEP, "{} result {i}: {off:e}", network.name);
            }
            let read = onnx::read(&std::fs::read(folder.path().join("model.onnx")).unwrap()).unwrap();
            assert_eq!(read, network.ordered());
        }
    }
}

#[test]
fn a_file_of_weights_that_is_too_short_is_refused() {
    let network = ffn(MatrixRounding::Eight, RELU, 16, &[16], 1).graph("b1", 1, 1).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut network = network;
    for tensor in network.tensors.iter_mut().filter(|t| t.is_static()) {
        tensor.data = Some(Data::File { file: "weights.bin".into(), offset: 4 });
    }
    std::fs::write(folder.path().join("weights.bin"), [0; 100]).unwrap();
    let network = Arc::new(network);
    let error = Executor::new(network.clone(), Some(&BundleReader::unchecked(folder.path())))
        .unwrap_err()
        .to_string();
    assert!(error.contains("it ends before byte 260"), "{error}");
    let error = Executor::new(network, None).unwrap_err().to_string();
    assert!(error.contains("no folder is given"), "{error}");
}
