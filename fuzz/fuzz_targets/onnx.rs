//! A network of Hexagon as ONNX: whatever is read verifies, is written and read again as itself, and can be run.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moec_qnn::exec::Executor;
use moec_qnn::onnx;
use std::sync::Arc;

/// Largest tensor of a network that is run, in elements.
const SMALL: u64 = 4096;
/// Most operators of a network that is run.
const FEW: usize = 64;

fuzz_target!(|bytes: &[u8]| {
    let Ok(network) = onnx::read(bytes) else { return };
    assert!(network.verify().is_ok(), "what was read does not verify:\n{network}");
    // Names that only other programs give cannot be written: that is an answer, too.
    if let Ok(written) = onnx::write(&network) {
        match onnx::read(&written) {
            Ok(again) => assert!(again == network, "reads back another network:\n{network}"),
            Err(e) => panic!("does not read back: {e}\n{network}"),
        }
    }
    if network.nodes.len() > FEW || network.tensors.iter().any(|t| t.elements() > SMALL) {
        return;
    }
    let shapes: Vec<usize> = network.inputs.iter().map(|id| network.tensor(*id).elements() as usize).collect();
    // What lies in a file is not there.
    let Ok(executor) = Executor::new(Arc::new(network), None) else { return };
    for fill in [0.0, 1.5, -1e30] {
        let inputs: Vec<Vec<f32>> = shapes.iter().map(|n| vec![fill; *n]).collect();
        let inputs: Vec<&[f32]> = inputs.iter().map(|x| &**x).collect();
        let outcome = executor.run(&inputs).expect("a network that verifies runs");
        let network = executor.network();
        for (id, got) in network.outputs.iter().zip(&outcome.outputs) {
            assert_eq!(got.len() as u64, network.tensor(*id).elements());
        }
    }
});
