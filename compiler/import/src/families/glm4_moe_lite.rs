//! GLM-4.7-Flash: latent attention, DeepSeek-V3's routing.

use super::Family;
use crate::checkpoint::Checkpoint;
use crate::common::{Base, PRE_NORMS};
use crate::config::Config;
use crate::mixers::{Mixture, MlaOptions, MoeNames};
use crate::spec::ModelSpec;
use moec_base::error::Result;
use moec_ir::RopeStyle;

pub(super) static FAMILY: Family = Family {
    name: "glm4_moe_lite",
    title: "GLM-4.7-Flash",
    architectures: &["Glm4MoeLiteForCausalLM"],
    examples: &["zai-org/GLM-4.7-Flash"],
    read,
};

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    let b = Base::read(config, checkpoint)?;
    let moe = Mixture::noaux_tc(&b, (1, 1), 1.0, MoeNames::DEEPSEEK)?;
    let dense = b.dense_layers(1)?;
    let style =
        if config.flag_or("rope_interleave", true)? { RopeStyle::Interleaved } else { RopeStyle::Half };
    b.pre_norm_model(&FAMILY, PRE_NORMS, |b, l| {
        let ffn = if dense(l) { b.dense(l, false)? } else { moe.moe(b, l)?.into() };
        Ok([b.mla(l, MlaOptions::of(style))?.into(), ffn])
    })
}
