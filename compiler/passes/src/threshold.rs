//! Pass `threshold`: adds a threshold to SiLU in the gates of experts, below which a neuron is 0 (CATS, arXiv
//! 2404.08763).
//!
//! ```text
//! expert_ffn {glu = silu}   →   expert_ffn {glu = cats(threshold = t)}, t of the layer
//! ```
//!
//! This changes results. The module `thresholds` of `moec-measure` chooses the thresholds and measures their
//! loss.

use moec_ir::op::{Activation, Glu};
use moec_ir::{Module, Op};
use std::collections::BTreeMap;

/// Thresholds of the layers that have one, and the share of neurons that they leave inactive.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Thresholds {
    /// By layer: magnitudes of `silu(gate)` below this become 0.
    pub by_layer: BTreeMap<u32, f32>,
    /// Percent of the neurons of these layers that are below it, by the recorded gates.
    pub percent: f32,
}

/// Sets the threshold of experts with SiLU and without biases to that of their layer. Returns the number of
/// changed nodes.
pub fn threshold(module: &mut Module, thresholds: &Thresholds) -> usize {
    let mut found = 0;
    for node in module.entries.iter_mut().flat_map(|g| &mut g.nodes) {
        let threshold = node.scope.layer.and_then(|layer| thresholds.by_layer.get(&layer));
        if let (Op::ExpertFfn { glu, bias: false, .. }, Some(&threshold)) = (&mut node.op, threshold)
            && *glu == Glu::Gated(Activation::Silu)
        {
            *glu = Glu::Cats { threshold };
            found += 1;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use moec_ir::text::parse_module;

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
