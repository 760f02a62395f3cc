//! Pass `format`: the storage format of every weight, by class.

use moec_base::error::{Error, Result};
use moec_config::Weights;
use moec_ir::{Format, Module, Weight, WeightClass};
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

/// Checks that static graphs of `unit` hold no weights in a format of a checkpoint's codes, or with bits in
/// planes. Graphs have formats of their own and would round the codes again.
///
/// # Errors
/// Fails at the first such weight.
pub fn suits_graphs(module: &Module, unit: &str) -> Result<()> {
    let Some(weight) = module.weights.iter().find(|w| w.format.is_published() || w.format.is_by_planes())
    else {
        return Ok(());
    };
    let Weight { name, class, format, .. } = weight;
    Err(Error::limit(format!("weight `{name}` cannot be {format} on a target with static graphs, which `{unit}` has"))
        .hint(format!("graphs hold weights in formats of their own: set `{}` under `[weights]` to \"q8\", \"q4\" or \"bf16\"", class.name())))
}
