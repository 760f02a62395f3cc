//! dots.llm1: grouped-query attention with norms of query and key, DeepSeek-V3's routing.

use super::Family;
use crate::checkpoint::Checkpoint;
use crate::common::{Base, PRE_NORMS};
use crate::config::Config;
use crate::mixers::{GqaOptions, Mixture, MoeNames, QkNormKind};
use crate::spec::ModelSpec;
use moec_base::error::Result;

pub(super) static FAMILY: Family = Family {
    name: "dots1",
    title: "dots.llm1",
    architectures: &["Dots1ForCausalLM"],
    examples: &["rednote-hilab/dots.llm1.inst"],
    read,
};

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    let b = Base::read(config, checkpoint)?;
    let moe = Mixture::noaux_tc(&b, (1, 1), 1.0, MoeNames::DEEPSEEK)?;
    let dense = b.dense_layers(1)?;
    let window = b.windows()?;
    b.pre_norm_model(&FAMILY, PRE_NORMS, |b, l| {
        let attention =
            GqaOptions { qk_norm: Some(QkNormKind::PerHead), window: window(l), ..GqaOptions::default() };
        let ffn = if dense(l) { b.dense(l, false)? } else { moe.moe(b, l)?.into() };
        Ok([b.gqa(l, attention)?.into(), ffn])
    })
}
