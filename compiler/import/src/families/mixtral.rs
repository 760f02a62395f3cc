//! Mixtral: softmax over all experts, weights always renormalised.

use super::Family;
use crate::checkpoint::Checkpoint;
use crate::common::{Base, PRE_NORMS};
use crate::config::Config;
use crate::mixers::{Fused, GqaOptions, W123, plain_router, renorm};
use crate::rope;
use crate::spec::ModelSpec;
use moec_base::error::Result;
use moec_ir::op::{Score, WeightFrom};

pub(super) static FAMILY: Family = Family {
    name: "mixtral",
    title: "Mixtral",
    architectures: &["MixtralForCausalLM"],
    examples: &["mistralai/Mixtral-8x7B-Instruct-v0.1", "mistralai/Mixtral-8x22B-Instruct-v0.1"],
    read,
};

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    model(&FAMILY, Base::read(config, checkpoint)?)
}

/// Reads a model with Mixtral's tensors and equations; only the function that combines gate and up is a
/// parameter.
///
/// # Errors
/// Fails if keys or tensors do not fit.
pub(super) fn model(family: &Family, b: Base<'_>) -> Result<ModelSpec> {
    let config = b.config;
    let (experts, k) = b.expert_counts()?;
    let inner = config.size(&["intermediate_size"])?.into();
    let attention = GqaOptions {
        window: config.opt_size(&["sliding_window"])?.map(|s| s.n),
        rope: Some(rope::Defaults { theta: 1e6, ..rope::Defaults::default() }),
        ..GqaOptions::default()
    };
    b.pre_norm_model(family, PRE_NORMS, |b, l| {
        let at = b.layer(l);
        let gate = b.first_of(&["block_sparse_moe", "mlp"].map(|m| format!("{at}.{m}.gate.weight")));
        let gate = gate.trim_end_matches(".weight");
        let block = gate.trim_end_matches(".gate");
        let router = plain_router(experts.n, k, Score::Softmax, WeightFrom::Score, renorm(true));
        let read = b.experts(&format!("{block}.experts"), W123, Fused::OutIn, &experts, &inner, b.glu)?;
        Ok([b.gqa(l, attention)?.into(), b.simple_moe(gate, router, &experts, read)?.into()])
    })
}
