//! Pass `format`: the storage format of every weight, by class.

use crate::config::Weights;
use moec_ir::Module;

/// Sets the formats that `model.toml` asks for. Norms, biases, routers and frequencies stay f32.
pub fn format(module: &mut Module, weights: &Weights) {
    for weight in &mut module.weights {
        weight.format = weights.format(weight.class);
    }
}
