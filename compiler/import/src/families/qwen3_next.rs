//! Qwen3-Next: one layer of gated attention after every three of the gated delta rule; a shared expert with a
//! gate.

use super::Family;
use super::qwen2_moe::feed_forward;
use crate::checkpoint::Checkpoint;
use crate::common::{Base, PRE_NORMS};
use crate::config::Config;
use crate::mixers::{Gated, GqaOptions, Mixer, QkNormKind, renorm, sparse_layers};
use crate::rope;
use crate::spec::ModelSpec;
use moec_base::error::Result;
use moec_ir::op::Renorm;

pub(super) static FAMILY: Family = Family {
    name: "qwen3_next",
    title: "Qwen3-Next",
    architectures: &["Qwen3NextForCausalLM"],
    examples: &["Qwen/Qwen3-Next-80B-A3B-Instruct"],
    read,
};

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    let weights = renorm(config.flag_or("norm_topk_prob", true)?);
    let sparse = sparse_layers(config)?;
    let b = Base::read(config, checkpoint)?;
    hybrid(b, &FAMILY, weights, sparse)
}

/// Reads a model with such layers. `renorm` is the normalisation of routing weights; `sparse` says which
/// layers have experts.
pub(super) fn hybrid(
    mut b: Base<'_>,
    family: &Family,
    renorm: Renorm,
    sparse: impl Fn(usize) -> bool,
) -> Result<ModelSpec> {
    b.zero_centred = true;
    let config = b.config;
    let feed_forward = feed_forward(&b, renorm, sparse)?;
    let bias = config.flag_or("attention_bias", false)?;
    let attends = attends(config)?;
    let attention = GqaOptions {
        qkv_bias: bias,
        o_bias: bias,
        gate: Some(Gated::InQuery),
        qk_norm: Some(QkNormKind::PerHead),
        rope: Some(rope::Defaults { partial: 0.25, ..rope::Defaults::default() }),
        ..GqaOptions::default()
    };
    b.pre_norm_model(family, PRE_NORMS, |b, l| {
        let mixer: Mixer = if attends(l) { b.gqa(l, attention)?.into() } else { b.gated_delta(l)?.into() };
        let ffn = feed_forward(b, l)?;
        Ok([mixer, ffn])
    })
}

/// Whether each layer has attention: by `layer_types`, or every `full_attention_interval`-th.
fn attends(config: &Config) -> Result<impl Fn(usize) -> bool + use<>> {
    const KINDS: [&str; 2] = ["linear_attention", "full_attention"];
    let types = config.opt_texts("layer_types")?;
    if let Some(other) = types.iter().flatten().find(|t| !KINDS.contains(&t.as_str())) {
        return Err(config.unsupported("layer_types", other, &KINDS));
    }
    let interval = config.opt_size(&["full_attention_interval"])?.map_or(4, |s| s.n);
    Ok(move |layer: usize| match &types {
        Some(types) => types.get(layer).is_some_and(|t| t == KINDS[1]),
        None => (layer + 1).is_multiple_of(interval),
    })
}
