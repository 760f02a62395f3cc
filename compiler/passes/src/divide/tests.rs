//! Tests of experts on two units.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use super::*;
use crate::cluster::Unseen;
use moec_ir::Format;
use moec_ir::text::parse_module;

/// A layer of two experts of three neurons, for prompts and for decoding one and two sequences.
fn module() -> Module {
    let entry = |kind: &str, n: usize| {
        format!(
            "entry {kind}[{n}] -> %12 {{\n  inputs %0: i32[{n}], %1: i32[{n}], %2: i32[{n}], %3: i32[{n}]\n  scope embed\n  \
             %4: f32[{n}, 4] = embed %0, @embed\n  scope layers.0.ffn\n  %5: f32[{n}, 2] = linear %4, @router\n  \
             %6: i32[{n}, 1], %7: f32[{n}, 1] = router %5 {{experts = 2, k = 1, score = softmax, weight_from = score, \
             renorm = none, scale = 1.0}}\n  %8: i32[{words}] = dispatch %6 {{experts = 2}}\n  \
             %9: f32[{n}, 4] = expert_ffn %4, %8, @layers.0.gate_up, @layers.0.down {{glu = relu}}\n  \
             %10: f32[{n}, 4] = combine %9, %8, %7\n  \
             scope head\n  %11: f32[{n}, 4] = gather_rows %10, %3\n  %12: f32[{n}, 8] = linear %11, @embed\n}}\n",
            words = 9 + 2 * n
        )
    };
    let entries = [("prefill", 4), ("decode", 1), ("decode", 2)].map(|(kind, n)| entry(kind, n)).concat();
    let text = format!(
        "weight @embed: f32[8, 4] embeddings = t\"embed\"[8, 4]\n\
         weight @layers.0.gate_up: f32[2, 6, 4] experts = t\"gate_up\"[2, 6, 4]\n\
         weight @layers.0.down: f32[2, 4, 3] experts = t\"down\"[2, 4, 3]\n\
         weight @router: f32[2, 4] exact = t\"router\"[2, 4]\n\n{entries}"
    );
    parse_module(&text).unwrap()
}

/// The layer, with one order of neurons for both experts.
fn layer(batches: &[(u32, u32)], order: [u32; 3]) -> [(HotLayer, Vec<Vec<u32>>); 1] {
    let batches = batches.iter().map(|&(batch, neurons)| HotBatch { batch, neurons }).collect();
    [(HotLayer { layer: 0, batches }, vec![order.to_vec(); 2])]
}

fn ops(graph: &Graph) -> Vec<&'static str> {
    graph.nodes.iter().filter(|n| n.scope.layer == Some(0)).map(|n| n.op.name()).collect()
}

#[test]
fn each_batch_size_has_hot_weights_and_prompts_whole_experts() {
    let mut divided = module();
    divide(&mut divided, &layer(&[(1, 1), (2, 2)], [2, 1, 0])).unwrap();
    moec_ir::verify::module(&divided).unwrap();
    assert_eq!(divided.entries[0], module().entries[0]);
    let shapes: Vec<(&str, &[usize])> =
        divided.weights.iter().skip(4).map(|w| (w.name.as_str(), w.shape.as_slice())).collect();
    let expected: [(&str, &[usize]); 6] = [
        ("layers.0.hot.1.gate_up", &[2, 2, 4]),
        ("layers.0.hot.1.down", &[2, 4, 1]),
        ("layers.0.cold.1", &[2, 2, 12]),
        ("layers.0.hot.2.gate_up", &[2, 4, 4]),
        ("layers.0.hot.2.down", &[2, 4, 2]),
        ("layers.0.cold.2", &[2, 1, 12]),
    ];
    assert_eq!(shapes, expected);
    for graph in &divided.entries[1..] {
        let expected =
            ["linear", "router", "dispatch", "expert_ffn", "neuron_ffn", "combine", "combine", "add"];
        assert_eq!(ops(graph), expected);
        // The unit's part begins first, and the CPU's part is combined first.
        let [hot, cold] = ["expert_ffn", "neuron_ffn"]
            .map(|name| graph.nodes.iter().find(|n| n.op.name() == name).unwrap());
        assert!(matches!(hot.op, Op::ExpertFfn { fixed: true, .. }));
        let combined = graph.nodes.iter().filter(|n| n.op.name() == "combine").map(|n| n.inputs[0]);
        let slots: Vec<Operand> = [cold, hot].map(|n| n.outputs[0].into()).to_vec();
        assert_eq!(combined.collect::<Vec<_>>(), slots);
    }
    let cold = divided.weights.iter().find(|w| w.name == "layers.0.cold.1").unwrap();
    let text = cold.expr.to_string();
    assert!(text.starts_with("slice rows 1:2:1 (arrange [2, 1, 0, 2, 1, 0]"), "{text}");
}

#[test]
fn all_hot_neurons_leave_no_cold_part() {
    let mut divided = module();
    divide(&mut divided, &layer(&[(2, 3)], [0, 1, 2])).unwrap();
    moec_ir::verify::module(&divided).unwrap();
    assert_eq!(divided.entries[..2], module().entries[..2]);
    assert_eq!(ops(&divided.entries[2]), ["linear", "router", "dispatch", "expert_ffn", "combine"]);
    // No neuron moves.
    assert!(divided.weights.iter().all(|w| !w.expr.to_string().contains("arrange")));
}

#[test]
fn bundles_of_neurons_have_formats_with_scales_of_their_own() {
    let mut by_channel = module();
    by_channel.weights.iter_mut().filter(|w| w.name.contains("layers")).for_each(|w| w.format = Format::Q4o);
    divide(&mut by_channel, &layer(&[(1, 1)], [0, 1, 2])).unwrap();
    let formats: Vec<Format> = by_channel.weights.iter().skip(4).map(|w| w.format).collect();
    assert_eq!(formats, [Format::Q4o, Format::Q4o, Format::Q4]);
}

#[test]
fn on_disk_all_batches_share_the_neurons_and_pass_over_hot_ones() {
    let mut divided = module();
    divide_on_disk(&mut divided, &layer(&[(1, 1), (2, 2)], [0, 1, 2]), &Unseen, |_, _| false).unwrap();
    moec_ir::verify::module(&divided).unwrap();
    // Prompts compute all neurons.
    assert_eq!(ops(&divided.entries[0]), ["linear", "router", "dispatch", "neuron_ffn", "combine"]);
    let cold = divided.entries.iter().flat_map(|g| &g.nodes).filter_map(|n| match n.op {
        Op::NeuronFfn { paged, hot, .. } => Some((paged, hot, &n.inputs[2..])),
        _ => None,
    });
    let cold: Vec<_> = cold.collect();
    let own = cold[0].2;
    assert_eq!(cold, [(Some(0), None, own), (Some(0), Some(1), own), (Some(0), Some(2), own)]);
    // Networks are written from the whole matrices.
    let experts = LayerExperts::of(&divided, 0).unwrap();
    let names = [experts.gate_up, experts.down].map(|id| divided.weight(id).name.as_str());
    assert_eq!(names, ["layers.0.gate_up", "layers.0.down"]);
}

#[test]
fn on_disk_a_batch_without_cold_neurons_reads_none() {
    let mut divided = module();
    divide_on_disk(&mut divided, &layer(&[(2, 3)], [0, 1, 2]), &Unseen, |_, _| false).unwrap();
    moec_ir::verify::module(&divided).unwrap();
    assert_eq!(ops(&divided.entries[2]), ["linear", "router", "dispatch", "expert_ffn", "combine"]);
    assert_eq!(ops(&divided.entries[1]), ops(&divided.entries[0]));
}
