//! GLM-4.5: grouped-query attention with half of each head rotated, DeepSeek-V3's routing.

use super::Family;
use crate::checkpoint::Checkpoint;
use crate::common::{Base, PRE_NORMS};
use crate::config::Config;
use crate::mixers::{GqaOptions, Mixture, MoeNames, QkNormKind, dense_first};
use crate::rope;
use crate::spec::ModelSpec;
use moec_base::error::Result;

pub(super) static FAMILY: Family = Family {
    name: "glm4_moe",
    title: "GLM-4.5",
    architectures: &["Glm4MoeForCausalLM"],
    examples: &["zai-org/GLM-4.5-Air", "zai-org/GLM-4.5", "zai-org/GLM-4.6"],
    read,
};

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    let b = Base::read(config, checkpoint)?;
    let moe = Mixture::noaux_tc(&b, (1, 1), 1.0, MoeNames::DEEPSEEK)?;
    let dense = dense_first(config, 1)?;
    let attention = GqaOptions {
        qkv_bias: config.flag_or("attention_bias", false)?,
        qk_norm: config.flag_or("use_qk_norm", false)?.then_some(QkNormKind::PerHead),
        rope: Some(rope::Defaults { partial: 0.5, ..rope::Defaults::default() }),
        ..GqaOptions::default()
    };
    b.pre_norm_model(&FAMILY, PRE_NORMS, |b, l| {
        let ffn = if dense(l) { b.dense(l, false)? } else { moe.moe(b, l)?.into() };
        Ok([b.gqa(l, attention)?.into(), ffn])
    })
}
