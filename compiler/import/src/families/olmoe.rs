//! OLMoE: query and key normalised over their full width, and optionally clipped.

use super::Family;
use crate::checkpoint::Checkpoint;
use crate::common::{Base, PRE_NORMS};
use crate::config::Config;
use crate::mixers::{Fused, GqaOptions, PROJ, QkNormKind, plain_router, renorm};
use crate::spec::ModelSpec;
use moec_base::error::Result;
use moec_ir::op::{Score, WeightFrom};

pub(super) static FAMILY: Family = Family {
    name: "olmoe",
    title: "OLMoE",
    architectures: &["OlmoeForCausalLM"],
    examples: &["allenai/OLMoE-1B-7B-0924", "allenai/OLMoE-1B-7B-0125-Instruct"],
    read,
};

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    let b = Base::read(config, checkpoint)?;
    let (experts, k) = b.expert_counts()?;
    let inner = config.size(&["intermediate_size"])?.into();
    let renorm = renorm(config.flag_or("norm_topk_prob", false)?);
    let bias = config.flag_or("attention_bias", false)?;
    let clip = if config.has("clip_qkv") { Some(config.positive_or("clip_qkv", 0.0)? as f32) } else { None };
    let attention = GqaOptions {
        qkv_bias: bias,
        o_bias: bias,
        qk_norm: Some(QkNormKind::Full),
        clip,
        ..GqaOptions::default()
    };
    b.pre_norm_model(&FAMILY, PRE_NORMS, |b, l| {
        let at = b.layer(l);
        let router = plain_router(experts.n, k, Score::Softmax, WeightFrom::Score, renorm);
        let read = b.experts(&format!("{at}.mlp.experts"), PROJ, Fused::OutIn, &experts, &inner, b.glu)?;
        Ok([
            b.gqa(l, attention)?.into(),
            b.simple_moe(&format!("{at}.mlp.gate"), router, &experts, read)?.into(),
        ])
    })
}
