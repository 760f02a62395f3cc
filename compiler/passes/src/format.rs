//! Pass `format`: the storage format of every weight, by class.

use moec_base::error::{Error, Result};
use moec_config::Weights;
use moec_ir::{Format, Leaf, Module, Weight, WeightClass};
use std::collections::BTreeMap;

/// Formats of weights by the names that lowering gives them, if they differ from those of their class.
pub type Formats = BTreeMap<String, Format>;

/// Sets the formats that `model.toml` requests, except for weights that `chosen` names. Norms, biases,
/// routers and frequencies stay f32, as do all weights with one axis: their kernels read plain numbers.
pub fn format(module: &mut Module, weights: &Weights, chosen: &Formats) {
    for weight in &mut module.weights {
        let class = if weight.shape.len() > 1 { weight.class } else { WeightClass::Exact };
        weight.format = chosen.get(&weight.name).copied().unwrap_or_else(|| weights.format(class));
    }
}

/// Formats of the matrices of [`Weights::stored`]: what the checkpoint has, which `format_of` says of a leaf,
/// where the matrix is nothing else, in another order. Groups of codes keep to whole rows. Where no format
/// holds a matrix so it is f32.
pub fn stored(module: &Module, weights: &Weights, format_of: &dyn Fn(&Leaf) -> Option<Format>) -> Formats {
    let kept = module.weights.iter().filter(|w| w.shape.len() > 1 && weights.stored.contains(&w.class));
    kept.map(|weight| {
        let mut leaves = weight.expr.leaves().map(format_of);
        let first = leaves.next().flatten().filter(|first| leaves.all(|of| of == Some(*first)));
        let held = first.filter(|format| weight.expr.moves(format.is_quantised()));
        (weight.name.clone(), held.unwrap_or(Format::F32))
    })
    .collect()
}

/// Checks that static graphs of `unit` hold no weights in a format of a checkpoint's codes, of a grid, or with bits
/// in several words. Graphs have formats of their own and would round the codes again.
///
/// # Errors
/// Fails at the first such weight.
pub fn suits_graphs(module: &Module, unit: &str) -> Result<()> {
    let Some(weight) = module.weights.iter().find(|w| !w.format.has_plain_codes()) else {
        return Ok(());
    };
    let Weight { name, class, format, .. } = weight;
    Err(Error::limit(format!("weight `{name}` cannot be {format} on a target with static graphs, which `{unit}` has"))
        .hint(format!("graphs hold weights in formats of their own: set `{}` under `[weights]` to \"q8\", \"q4\" or \"bf16\"", class.name())))
}
