//! Gates of neurons on disk, which a predictor makes unnecessary in memory (PowerInfer-2, §4.3 and §4.4).
//!
//! ```text
//! y = neuron_ffn(x, table, gates, up_down) {paged}   →   y = neuron_ffn(x, table, neurons) {paged, gates_on_disk}
//! neurons[e, i] = gates[e, i] | up_down[e, i]
//! ```

use moec_ir::{Axis, Module, Op, Operand, Weight, WeightExpr, WeightId};
use std::collections::BTreeMap;

/// Joins gate, up and down of neurons on disk to one weight each, whose gates stay on disk, too. The weights of
/// predictors can follow it.
pub fn gates_to_disk(module: &mut Module) {
    let mut entries = std::mem::take(&mut module.entries);
    let mut joined: BTreeMap<[WeightId; 2], WeightId> = BTreeMap::new();
    let mut parts: Vec<String> = Vec::new();
    for node in entries.iter_mut().flat_map(|g| &mut g.nodes) {
        let Op::NeuronFfn { paged: Some(_), gates_on_disk: on_disk @ false, .. } = &mut node.op else {
            continue;
        };
        let &[x, table, Operand::Weight(gates), Operand::Weight(up_down)] = node.inputs.as_slice() else {
            continue;
        };
        let neurons = *joined.entry([gates, up_down]).or_insert_with(|| {
            let [first, second] = [gates, up_down].map(|id| module.weight(id).clone());
            parts.extend([first.name.clone(), second.name.clone()]);
            module.weights.push(join(first, second));
            WeightId(module.weights.len() as u32 - 1)
        });
        *on_disk = true;
        node.inputs = vec![x, table, Operand::Weight(neurons)];
    }
    module.entries = entries;
    crate::rewrite::drop_weights(module, |name| parts.iter().any(|part| part == name));
}

/// The weight of whole neurons, whose order both parts have.
fn join(gates: Weight, up_down: Weight) -> Weight {
    let columns = |of| WeightExpr::Concat { axis: Axis::Cols, of };
    let expr = match (gates.expr, up_down.expr) {
        (WeightExpr::Arrange { order, of: gate }, WeightExpr::Arrange { order: other, of: rest })
            if order == other =>
        {
            WeightExpr::Arrange { order, of: Box::new(columns(vec![*gate, *rest])) }
        }
        (gate, rest) => columns(vec![gate, rest]),
    };
    let stem = gates.name.strip_suffix("gates").unwrap_or(&gates.name);
    let shape = gates.shape.iter().zip(&up_down.shape).enumerate();
    let shape = shape.map(|(axis, (a, b))| if axis == 2 { a + b } else { *a }).collect();
    Weight { name: format!("{stem}neurons"), shape, class: gates.class, format: gates.format, expr }
}
