//! Solar Open: plain grouped-query attention, DeepSeek-V3's routing in every layer.

use super::Family;
use crate::checkpoint::Checkpoint;
use crate::common::{Base, PRE_NORMS};
use crate::config::Config;
use crate::mixers::{GqaOptions, Mixture, MoeNames};
use crate::spec::ModelSpec;
use moec_base::error::Result;

pub(super) static FAMILY: Family = Family {
    name: "solar_open",
    title: "Solar Open",
    architectures: &["SolarOpenForCausalLM"],
    examples: &["upstage/Solar-Open-100B"],
    read,
};

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    let b = Base::read(config, checkpoint)?;
    let moe = Mixture::noaux_tc(&b, (1, 1), 1.0, MoeNames::DEEPSEEK)?;
    let dense = b.dense_layers(0)?;
    b.pre_norm_model(&FAMILY, PRE_NORMS, |b, l| {
        let ffn = if dense(l) { b.dense(l, false)? } else { moe.moe(b, l)?.into() };
        Ok([b.gqa(l, GqaOptions::default())?.into(), ffn])
    })
}
