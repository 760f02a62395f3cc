//! Pass `threshold`: adds a threshold to SiLU in the gates of experts and dense networks, below which a neuron
//! is 0 (CATS, arXiv 2404.08763).
//!
//! ```text
//! expert_ffn {glu = silu}   →   expert_ffn {glu = cats(threshold = t)}, t of the layer
//! mul(silu(g), u)           →   glu(g, u) {glu = cats(threshold = t)}
//! ```
//!
//! Shared experts have no threshold.
//!
//! This changes results. The module `thresholds` of `moec-measure` chooses the thresholds and measures their
//! loss.

use moec_ir::op::{Activation, Glu};
use moec_ir::{Graph, Module, Node, Op, Operand, Part};
use std::collections::BTreeMap;

/// The gate that gets a threshold.
const SILU: Glu = Glu::Gated(Activation::Silu);

/// Thresholds of the layers that have one, and the share of neurons that they leave inactive.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Thresholds {
    /// By layer: magnitudes of `silu(gate)` below this become 0.
    pub by_layer: BTreeMap<u32, f32>,
    /// Percent of the neurons of these layers that are below it, by the recorded gates.
    pub percent: f32,
}

/// Sets the threshold of experts, and of dense networks of layers without experts, with SiLU and without
/// biases to that of their layer. Returns the number of changed nodes.
pub fn threshold(module: &mut Module, thresholds: &Thresholds) -> usize {
    let mut found = 0;
    for graph in &mut module.entries {
        for (&layer, &threshold) in &thresholds.by_layer {
            let of_layer = |n: &Node| n.scope.layer == Some(layer);
            let is_dense = !graph.nodes.iter().any(|n| of_layer(n) && n.op.router().is_some());
            for at in 0..graph.nodes.len() {
                let Some(node) = graph.nodes.get(at).filter(|n| of_layer(n)) else { continue };
                let (op, inputs) = match node.op {
                    Op::ExpertFfn { glu: SILU, bias: false, fixed } => {
                        (Op::ExpertFfn { glu: Glu::Cats { threshold }, bias: false, fixed }, None)
                    }
                    Op::LinearGlu { glu: SILU, bias: false } if is_dense => {
                        (Op::LinearGlu { glu: Glu::Cats { threshold }, bias: false }, None)
                    }
                    Op::Mul if is_dense => match gate_and_up(graph, node) {
                        Some(inputs) => (Op::Glu(Glu::Cats { threshold }), Some(inputs)),
                        None => continue,
                    },
                    _ => continue,
                };
                if let Some(node) = graph.nodes.get_mut(at) {
                    node.op = op;
                    node.inputs = inputs.map_or_else(|| std::mem::take(&mut node.inputs), Vec::from);
                    found += 1;
                }
            }
        }
    }
    found
}

/// Gate and up of a product `silu(gate) · up` in a dense network, if both are projections without biases.
fn gate_and_up(graph: &Graph, product: &Node) -> Option<[Operand; 2]> {
    let def = |o: &Operand| match *o {
        Operand::Value(v) => graph.nodes.get(graph.def(v)?.0 as usize).filter(|n| n.scope == product.scope),
        Operand::Weight(_) | Operand::State(_) => None,
    };
    let projects = |o: &Operand| def(o).is_some_and(|n| matches!(n.op, Op::Linear { bias: false }));
    let activated = |o: &Operand| {
        def(o).filter(|n| n.op == Op::Act(Activation::Silu)).and_then(|n| n.inputs.first().copied())
    };
    let &[a, b] = product.inputs.as_slice() else { return None };
    let found = match (activated(&a), activated(&b)) {
        (Some(gate), None) => [gate, b],
        (None, Some(gate)) => [gate, a],
        _ => return None,
    };
    (product.scope.part == Part::FFN && found.iter().all(projects)).then_some(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use moec_ir::text::parse_module;

    #[test]
    fn dense_networks_get_thresholds_and_shared_experts_none() {
        let network = |scope: &str, x: u32, first: u32| {
            let [gate, up, act, joined, y] = [0, 1, 2, 3, 4].map(|i| first + i);
            format!(
                "  scope {scope}\n  %{gate}: f32[1, 3] = linear %{x}, @gate\n  %{up}: f32[1, 3] = linear %{x}, @up\n  \
                 %{act}: f32[1, 3] = silu %{gate}\n  %{joined}: f32[1, 3] = mul %{act}, %{up}\n  \
                 %{y}: f32[1, 4] = linear %{joined}, @down\n"
            )
        };
        let [dense, shared] = [network("layers.0.ffn", 4, 5), network("layers.1.shared", 9, 10)];
        let text = format!(
            "weight @embed: f32[8, 4] embeddings = t\"embed\"[8, 4]\n\
             weight @gate: f32[3, 4] attention = t\"gate\"[3, 4]\n\
             weight @up: f32[3, 4] attention = t\"up\"[3, 4]\n\
             weight @down: f32[4, 3] attention = t\"down\"[4, 3]\n\
             weight @router: f32[2, 4] exact = t\"router\"[2, 4]\n\n\
             entry decode[1] -> %19 {{\n  inputs %0: i32[1], %1: i32[1], %2: i32[1], %3: i32[1]\n  scope embed\n  \
             %4: f32[1, 4] = embed %0, @embed\n{dense}{shared}  scope layers.1.ffn\n  %15: f32[1, 2] = linear %14, @router\n  \
             %16: i32[1, 1], %17: f32[1, 1] = router %15 {{experts = 2, k = 1, score = softmax, weight_from = score, \
             renorm = none, scale = 1.0}}\n  scope head\n  \
             %18: f32[1, 4] = gather_rows %14, %3\n  %19: f32[1, 8] = linear %18, @embed\n}}\n"
        );
        let mut module = parse_module(&text).unwrap();
        let thresholds = Thresholds { by_layer: [(0, 0.25), (1, 0.5)].into(), percent: 40.0 };
        assert_eq!(threshold(&mut module, &thresholds), 1);
        moec_ir::verify::module(&module).unwrap();
        let now = module.to_string();
        assert!(now.contains("glu %5, %6 {glu = cats(threshold = 0.25)}"), "{now}");
        assert!(now.contains("mul %12, %11"), "{now}");
        assert_eq!(threshold(&mut module, &thresholds), 0);
    }

    #[test]
    fn each_layer_with_silu_gets_its_own_threshold() {
        let layer = |l: u32, from: u32, glu: &str| {
            format!(
                "  scope layers.{l}.ffn\n  %{}: f32[1, 4] = expert_ffn %{from}, %8, @gate_up, @down {{glu = {glu}}}\n  \
                 %{}: f32[1, 4] = combine %{}, %8, %7\n",
                from + 1,
                from + 2,
                from + 1
            )
        };
        // Value 8 is the table, which all layers share.
        let layers = [layer(0, 8, "silu"), layer(1, 10, "relu"), layer(2, 12, "silu")].concat();
        let layers = layers.replacen("expert_ffn %8", "expert_ffn %4", 1);
        let text = format!(
            "weight @embed: f32[8, 4] embeddings = t\"embed\"[8, 4]\n\
             weight @gate_up: f32[2, 6, 4] experts = t\"gate_up\"[2, 6, 4]\n\
             weight @down: f32[2, 4, 3] experts = t\"down\"[2, 4, 3]\n\
             weight @router: f32[2, 4] exact = t\"router\"[2, 4]\n\n\
             entry decode[1] -> %16 {{\n  inputs %0: i32[1], %1: i32[1], %2: i32[1], %3: i32[1]\n  scope embed\n  \
             %4: f32[1, 4] = embed %0, @embed\n  %5: f32[1, 2] = linear %4, @router\n  \
             %6: i32[1, 1], %7: f32[1, 1] = router %5 {{experts = 2, k = 1, score = softmax, weight_from = score, \
             renorm = none, scale = 1.0}}\n  %8: i32[11] = dispatch %6 {{experts = 2}}\n{layers}  scope head\n  \
             %15: f32[1, 4] = gather_rows %14, %3\n  %16: f32[1, 8] = linear %15, @embed\n}}\n"
        );
        let mut module = parse_module(&text).unwrap();
        let thresholds = Thresholds { by_layer: [(0, 0.25), (1, 0.5), (2, 0.125)].into(), percent: 40.0 };
        // One threshold for each layer with SiLU; the layer with ReLU has exact zeros already.
        assert_eq!(threshold(&mut module, &thresholds), 2);
        moec_ir::verify::module(&module).unwrap();
        let now = module.to_string();
        for (glu, there) in
            [("cats(threshold = 0.25)", 1), ("cats(threshold = 0.125)", 1), ("relu", 1), ("silu", 0)]
        {
            assert_eq!(now.matches(&format!("{{glu = {glu}}}")).count(), there, "{now}");
        }
        // An existing threshold is kept.
        assert_eq!(threshold(&mut module, &thresholds), 0);
    }
}
