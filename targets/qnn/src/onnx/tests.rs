//! Written models are read back unchanged, and no input makes the reader panic.

use super::{read, write};
use crate::net::{Data, Network, NetworkBuilder, Op, Tensor};
use crate::quant::{Bits, Matrix, Range, Ranges, coded};
use proptest::prelude::*;

fn matrix(numbers: &[f32], cols: usize, bits: Bits) -> Matrix {
    let rows = numbers.len() / cols;
    let codes = numbers.iter().map(|x| (x * 7.0).round() as i8).collect();
    Matrix { shape: [rows, cols], bits, codes, scales: vec![1.0 / 7.0; rows] }
}

/// A network with every operator, in f32.
fn every() -> Network {
    let mut b = NetworkBuilder::new("every");
    let numbers: Vec<f32> = (0..24).map(|i| (i as f32 * 0.37).sin()).collect();
    let x = b.input("x", &[2, 4]).unwrap();
    let bias = b.constant(Tensor::floats("bias", [6], &numbers[..6])).unwrap();
    let w = b.constant(matrix(&numbers, 4, Bits::Eight).tensor("w8")).unwrap();
    let y = b.op("y", Op::FullyConnected, &[x, w, bias]).unwrap();
    let w = b.constant(matrix(&numbers, 6, Bits::Four).tensor("w4")).unwrap();
    let z = b.op("z", Op::FullyConnected, &[y, w]).unwrap();
    let two = b.number("two", 2.0).unwrap();
    let pairs = [Op::Add, Op::Subtract, Op::Multiply, Op::Divide, Op::Maximum, Op::Minimum];
    let mut at = z;
    for (i, op) in pairs.into_iter().enumerate() {
        at = b.op(&format!("pair{i}"), op, &[at, two]).unwrap();
    }
    for (i, op) in [Op::Relu, Op::Sigmoid, Op::Tanh, Op::Gelu, Op::Softmax].into_iter().enumerate() {
        at = b.op(&format!("each{i}"), op, &[at]).unwrap();
    }
    let gain = b.constant(Tensor::floats("gain", [4], &[1.0, 0.5, -1.0, 2.0])).unwrap();
    at = b.op("norm", Op::RmsNorm { eps: 1e-6 }, &[at, gain]).unwrap();
    at = b.op("joined", Op::Concat { axis: 1 }, &[at, z]).unwrap();
    at = b.part("part", at, 1, 1, 6).unwrap();
    at = b.op("boxed", Op::Reshape { shape: vec![2, 3, 2] }, &[at]).unwrap();
    let transposed = b.op("turned", Op::Transpose { perm: vec![0, 2, 1] }, &[at]).unwrap();
    at = b.op("products", Op::MatMul, &[at, transposed]).unwrap();
    let indices = b.constant(Tensor::indices("indices", [2], &[2, 0])).unwrap();
    at = b.op("picked", Op::Gather { axis: 1 }, &[at, indices]).unwrap();
    b.finish(&[at]).unwrap()
}

fn wide(network: &Network) -> Network {
    let ranges: Ranges =
        network.activations().map(|(_, t)| (t.name.clone(), Range { least: -4.0, most: 4.0 })).collect();
    coded(network, &ranges).unwrap()
}

#[test]
fn onnx_networks_round_trip() {
    for network in [every(), wide(&every())] {
        let bytes = write(&network).unwrap();
        assert_eq!(read(&bytes).unwrap(), network.ordered());
        assert_eq!(write(&read(&bytes).unwrap()).unwrap(), write(&network.ordered()).unwrap());
    }
}

#[test]
fn external_weights_stay_in_their_file() {
    let mut network = wide(&every());
    for t in network.tensors.iter_mut().filter(|t| t.name.starts_with('w')) {
        t.data = Some(Data::File { file: "every.weights".into(), offset: 64 });
    }
    let bytes = write(&network).unwrap();
    assert_eq!(read(&bytes).unwrap(), network.ordered());
    // A weight file must be inside of the model's folder and have a plain name.
    for file in ["../w", "/etc/passwd", ".hidden", ""] {
        let mut network = network.clone();
        network.tensors.iter_mut().filter(|t| t.is_static()).for_each(|t| {
            t.data = Some(Data::File { file: file.into(), offset: 0 });
        });
        let error = write(&network).unwrap_err().to_string();
        assert!(error.contains("is not a valid offset for it"), "{error}");
    }
}

proptest! {
    #[test]
    fn damaged_onnx_is_rejected_or_read_as_a_network(at in 0_usize..4000, to in any::<u8>(), cut in 0_usize..4000) {
        let mut bytes = write(&wide(&every())).unwrap();
        let len = bytes.len();
        bytes[at % len] = to;
        if let Ok(network) = read(&bytes) {
            prop_assert!(network.verify().is_ok());
        }
        let _ = read(&bytes[..cut % len]);
    }
}

/// Seeds of fuzzing: a network in f32 and one in codes. `MOEC_RENEW_SEEDS=1` writes both.
#[test]
fn onnx_fuzz_seeds_are_current() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/onnx");
    for (name, network) in [("reals", every()), ("codes", wide(&every()))] {
        let (path, bytes) = (folder.join(name), write(&network).unwrap());
        if std::env::var_os("MOEC_RENEW_SEEDS").is_some() {
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(&path, &bytes).unwrap();
        }
        let seed = std::fs::read(&path).unwrap();
        assert!(seed == bytes, "`{}` is of another version; MOEC_RENEW_SEEDS=1 renews it", path.display());
    }
}
