//! Pass `format`: the storage format of every weight, by class.

use crate::config::Weights;
use crate::mix::Formats;
use moec_ir::{Module, WeightClass};

/// Sets the formats that `model.toml` asks for, but for weights that `chosen` names. Norms, biases, routers and frequencies stay f32, as does
/// whatever has one axis only: its kernels read plain numbers.
pub fn format(module: &mut Module, weights: &Weights, chosen: &Formats) {
    for weight in &mut module.weights {
        let class = if weight.shape.len() > 1 { weight.class } else { WeightClass::Exact };
        weight.format = chosen.get(&weight.name).copied().unwrap_or_else(|| weights.format(class));
    }
}
