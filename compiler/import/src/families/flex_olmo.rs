//! FlexOlmo: norms after attention and experts, and none before them.

use super::Family;
use crate::checkpoint::Checkpoint;
use crate::common::Base;
use crate::config::Config;
use crate::mixers::{GqaOptions, Mixture, MoeNames, QkNormKind, renorm};
use crate::spec::{Block, LayerSpec, ModelSpec};
use moec_base::error::Result;
use moec_ir::op::{Score, WeightFrom};

pub(super) static FAMILY: Family = Family {
    name: "flex_olmo",
    title: "FlexOlmo",
    architectures: &["FlexOlmoForCausalLM"],
    examples: &["allenai/FlexOlmo-7x7B-1T"],
    read,
};

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    let b = Base::read(config, checkpoint)?;
    let renorm = renorm(config.flag_or("norm_topk_prob", false)?);
    let names = MoeNames { bias: None, ..MoeNames::DEEPSEEK };
    let moe = Mixture::of(&b, Score::Softmax, WeightFrom::Score, renorm, names)?;
    let attention = GqaOptions { qk_norm: Some(QkNormKind::Full), ..GqaOptions::default() };
    let layers = b.each_layer(|l| {
        let after = |name: &str, mixer| -> Result<Block> {
            let post_norm = Some(b.rms_norm(&format!("{}.{name}", b.layer(l)))?);
            Ok(Block { norm: None, mixers: vec![mixer], post_norm })
        };
        let attention = after("post_attention_layernorm", b.gqa(l, attention)?.into());
        let moe = after("post_feedforward_layernorm", moe.moe(&b, l)?.into());
        Ok(LayerSpec { blocks: vec![attention?, moe?], scale: None })
    })?;
    let norm = b.final_norm()?;
    b.finish(&FAMILY, layers, norm, false)
}
