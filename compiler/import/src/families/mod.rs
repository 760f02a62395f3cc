//! The supported families, one row and one file each.
#![expect(clippy::cast_possible_truncation, reason = "models compute with their factors in f32")]

mod afmoe;
mod bailing_hybrid;
mod bamboo;
mod cohere2_moe;
mod deepseek_v2;
mod deepseek_v3;
mod dots1;
mod ernie4_5_moe;
mod exaone_moe;
mod flex_olmo;
mod gemma4;
mod glm4_moe;
mod glm4_moe_lite;
mod gpt_oss;
mod granitemoe;
mod granitemoehybrid;
mod granitemoeshared;
mod hunyuan_v1_moe;
mod hy_v3;
mod jamba;
mod kimi_linear;
mod laguna;
mod lfm2_moe;
mod llama4;
mod longcat_flash;
mod mellum;
mod mimo_v2_flash;
mod minimax_m2;
mod mistral4;
mod mixtral;
mod nemotron_h;
mod olmoe;
mod phimoe;
mod prosparse;
mod qwen2_moe;
mod qwen3_5_moe;
mod qwen3_moe;
mod qwen3_next;
mod smallthinker;
mod solar_open;
mod step3p7;
mod turbosparse_mixtral;

use super::checkpoint::Checkpoint;
use super::config::Config;
use super::spec::ModelSpec;
use moec_base::error::{Error, Result};

/// A family of models.
#[derive(Clone, Copy, Debug)]
pub struct Family {
    /// `model_type` in `config.json`.
    pub name: &'static str,
    /// Name for people.
    pub title: &'static str,
    /// Values of `architectures[0]` for this family.
    pub architectures: &'static [&'static str],
    /// Published checkpoints, for messages.
    pub examples: &'static [&'static str],
    /// Reads a checkpoint.
    pub read: fn(&Config, &Checkpoint) -> Result<ModelSpec>,
}

/// Every supported family.
pub const FAMILIES: [&Family; 42] = [
    &mixtral::FAMILY,
    &qwen2_moe::FAMILY,
    &qwen3_moe::FAMILY,
    &qwen3_next::FAMILY,
    &qwen3_5_moe::FAMILY,
    &afmoe::FAMILY,
    &cohere2_moe::FAMILY,
    &dots1::FAMILY,
    &ernie4_5_moe::FAMILY,
    &exaone_moe::FAMILY,
    &flex_olmo::FAMILY,
    &glm4_moe_lite::FAMILY,
    &granitemoe::FAMILY,
    &granitemoeshared::FAMILY,
    &hunyuan_v1_moe::FAMILY,
    &hy_v3::FAMILY,
    &laguna::FAMILY,
    &lfm2_moe::FAMILY,
    &mellum::FAMILY,
    &mimo_v2_flash::FAMILY,
    &minimax_m2::FAMILY,
    &solar_open::FAMILY,
    &mistral4::FAMILY,
    &llama4::FAMILY,
    &step3p7::FAMILY,
    &longcat_flash::FAMILY,
    &gemma4::FAMILY,
    &granitemoehybrid::FAMILY,
    &kimi_linear::FAMILY,
    &bailing_hybrid::FAMILY,
    &nemotron_h::FAMILY,
    &jamba::FAMILY,
    &olmoe::FAMILY,
    &deepseek_v2::FAMILY,
    &deepseek_v3::FAMILY,
    &glm4_moe::FAMILY,
    &phimoe::FAMILY,
    &gpt_oss::FAMILY,
    &smallthinker::FAMILY,
    &turbosparse_mixtral::FAMILY,
    &bamboo::FAMILY,
    &prosparse::FAMILY,
];

/// Returns the family of a config, by `architectures[0]`, or by `model_type` if that is absent.
///
/// # Errors
/// Fails if it is not supported, or if the config does not give it.
pub fn of(config: &Config) -> Result<&'static Family> {
    let find = |is: &dyn Fn(&Family) -> bool| FAMILIES.into_iter().find(|f| is(f));
    let architectures = config.opt_texts("architectures")?.unwrap_or_default();
    if let Some(architecture) = architectures.first() {
        let known: Vec<&str> = FAMILIES.iter().flat_map(|f| f.architectures).copied().collect();
        return find(&|f| f.architectures.contains(&architecture.as_str()))
            .ok_or_else(|| config.unsupported("architectures", architecture, &known));
    }
    let Some(model_type) = config.opt_text("model_type")? else {
        return Err(Error::input(format!(
            "{} and `model_type` are both absent",
            config.name("architectures")
        ))
        .hint("the file does not describe a language model; download it again"));
    };
    find(&|f| f.name == model_type)
        .ok_or_else(|| config.unsupported("model_type", model_type, &FAMILIES.map(|f| f.name)))
}
