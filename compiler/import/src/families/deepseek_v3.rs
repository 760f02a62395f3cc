//! DeepSeek-V3 and models with its architecture (Kimi K2, Moonlight): latent attention, sigmoid routing with
//! a selection bias (`noaux_tc`).

use super::Family;
use crate::checkpoint::Checkpoint;
use crate::common::{Base, PRE_NORMS};
use crate::config::Config;
use crate::mixers::{Mixture, MlaOptions, MoeNames, dense_first};
use crate::spec::ModelSpec;
use moec_base::error::Result;
use moec_ir::RopeStyle;

pub(super) static FAMILY: Family = Family {
    name: "deepseek_v3",
    title: "DeepSeek-V3",
    architectures: &["DeepseekV3ForCausalLM"],
    examples: &[
        "deepseek-ai/DeepSeek-V3",
        "deepseek-ai/DeepSeek-R1",
        "moonshotai/Kimi-K2-Instruct",
        "moonshotai/Moonlight-16B-A3B-Instruct",
    ],
    read,
};

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    let b = Base::read(config, checkpoint)?;
    let moe = Mixture::noaux_tc(&b, (8, 4), 2.5, MoeNames::DEEPSEEK)?;
    let dense = dense_first(config, 3)?;
    let style =
        if config.flag_or("rope_interleave", true)? { RopeStyle::Interleaved } else { RopeStyle::Half };
    b.pre_norm_model(&FAMILY, PRE_NORMS, |b, l| {
        let ffn = if dense(l) { b.dense(l, false)? } else { moe.moe(b, l)?.into() };
        Ok([b.mla(l, MlaOptions::of(style))?.into(), ffn])
    })
}
