//! Granite MoE: factors on embeddings, residuals, scores and logits; experts in two stacked tensors.

use super::Family;
use crate::checkpoint::Checkpoint;
use crate::common::{Base, PRE_NORMS};
use crate::config::Config;
use crate::mixers::{GqaOptions, Mixture, MoeNames, STACKS};
use crate::spec::{ModelSpec, Multipliers};
use moec_base::error::Result;
use moec_ir::op::{Renorm, Score, WeightFrom};

pub(super) static FAMILY: Family = Family {
    name: "granitemoe",
    title: "Granite MoE",
    architectures: &["GraniteMoeForCausalLM"],
    examples: &["ibm-granite/granite-3.1-3b-a800m-instruct"],
    read,
};

const NAMES: MoeNames = MoeNames {
    gate: "block_sparse_moe.router.layer",
    bias: None,
    experts: "block_sparse_moe",
    parts: STACKS,
    ..MoeNames::DEEPSEEK
};

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    let b = multiplied(Base::read(config, checkpoint)?)?;
    let (attention, moe) = (attention(&b)?, mixture(&b)?);
    b.pre_norm_model(&FAMILY, PRE_NORMS, |b, l| Ok([b.gqa(l, attention)?.into(), moe.moe(b, l)?.into()]))
}

/// Granite's factors, and a tied head.
pub(super) fn multiplied(mut b: Base<'_>) -> Result<Base<'_>> {
    let factor = |key| -> Result<f32> { Ok(b.config.positive_or(key, 1.0)? as f32) };
    b.multipliers = Multipliers {
        embed: factor("embedding_multiplier")?,
        residual: factor("residual_multiplier")?,
        logits: 1.0 / factor("logits_scaling")?,
    };
    b.tied = true;
    Ok(b)
}

/// Granite's attention.
pub(super) fn attention(b: &Base<'_>) -> Result<GqaOptions> {
    let bias = b.config.flag_or("attention_bias", false)?;
    let scale = Some(b.config.positive("attention_multiplier")? as f32);
    Ok(GqaOptions { qkv_bias: bias, o_bias: bias, scale, ..GqaOptions::default() })
}

/// Granite's mixture.
pub(super) fn mixture(b: &Base<'_>) -> Result<Mixture> {
    Mixture::of(b, Score::Identity, WeightFrom::SoftmaxTopk, Renorm::None, NAMES)
}
