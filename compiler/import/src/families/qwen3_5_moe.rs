//! Qwen3.5-MoE and Qwen3.6: the text part, with the layers of Qwen3-Next; every layer has experts.

use super::Family;
use super::qwen3_next::hybrid;
use crate::checkpoint::Checkpoint;
use crate::common::Base;
use crate::config::Config;
use crate::spec::ModelSpec;
use moec_base::error::Result;
use moec_ir::op::Renorm;

pub(super) static FAMILY: Family = Family {
    name: "qwen3_5_moe",
    title: "Qwen3.5-MoE and Qwen3.6",
    architectures: &["Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"],
    examples: &["Qwen/Qwen3.5-35B-A3B", "Qwen/Qwen3.6-35B-A3B"],
    read,
};

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    let text = config.opt_section("text_config")?;
    let b = Base::read(text.as_ref().unwrap_or(config), checkpoint)?;
    hybrid(b, &FAMILY, Renorm::Sum { eps: 0.0 }, |_| true)
}
