//! Mistral Small 4: the text part. Latent attention with a position-dependent factor on queries; softmax
//! routing, perhaps limited to groups.

use super::Family;
use crate::checkpoint::Checkpoint;
use crate::common::{Base, PRE_NORMS};
use crate::config::Config;
use crate::mixers::{Mixture, MlaOptions, MoeNames, Temperature};
use crate::spec::ModelSpec;
use moec_base::error::Result;
use moec_ir::RopeStyle;
use moec_ir::op::{GroupScore, Groups, Renorm, Score, WeightFrom};

pub(super) static FAMILY: Family = Family {
    name: "mistral4",
    title: "Mistral Small 4",
    architectures: &["Mistral4ForCausalLM", "Mistral3ForConditionalGeneration"],
    examples: &[],
    read,
};

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    let text = config.opt_section("text_config")?;
    let config = text.as_ref().unwrap_or(config);
    // Mistral's older multimodal models have the same class with a dense text part.
    if let Some(other) = config.opt_text("model_type")?.filter(|name| *name != FAMILY.name) {
        return Err(config.unsupported("model_type", other, &[FAMILY.name]));
    }
    let b = Base::read(config, checkpoint)?;
    let norm = config.flag_or("norm_topk_prob", true)?;
    let renorm = if norm { Renorm::Sum { eps: 1e-20 } } else { Renorm::None };
    let names = MoeNames { bias: None, ..MoeNames::DEEPSEEK };
    let mut moe = Mixture::of(&b, Score::Softmax, WeightFrom::Score, renorm, names)?;
    let [n, keep] =
        ["n_group", "topk_group"].map(|key| config.opt_size(&[key]).map(|n| n.map_or(1, |s| s.n)));
    let groups = Groups { n: n?, keep: keep?, score: GroupScore::Top2Sum, mask_neg_inf: false };
    moe.router.groups = b.groups(groups, &moe.experts, moe.router.k)?;
    moe.router.scale = config.number_or("routed_scaling_factor", 1.0)? as f32;
    let style =
        if config.flag_or("rope_interleave", true)? { RopeStyle::Interleaved } else { RopeStyle::Half };
    let attention =
        MlaOptions { partial_of_head: true, temperature: temperature(config)?, ..MlaOptions::of(style) };
    let dense = b.dense_layers(0)?;
    b.pre_norm_model(&FAMILY, PRE_NORMS, |b, l| {
        let ffn = if dense(l) { b.dense(l, false)? } else { moe.moe(b, l)?.into() };
        Ok([b.mla(l, attention)?.into(), ffn])
    })
}

/// The factor on queries, whose keys are among those of the rotation.
fn temperature(config: &Config) -> Result<Option<Temperature>> {
    let section = match config.opt_section("rope_parameters")? {
        Some(section) => Some(section),
        None => config.opt_section("rope_scaling")?,
    };
    let Some(section) = section else { return Ok(None) };
    let Some(beta) = section.opt_number("llama_4_scaling_beta")? else { return Ok(None) };
    let every = section.size(&["original_max_position_embeddings"])?.n;
    Ok(Some(Temperature { beta: beta as f32, every, offset: 0 }))
}
