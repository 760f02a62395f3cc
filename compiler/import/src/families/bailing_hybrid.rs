//! Ling 3.0: delta attention with a bounded decay, latent attention with gated heads in every few layers;
//! DeepSeek-V3's routing.

use super::Family;
use crate::checkpoint::Checkpoint;
use crate::common::{Base, PRE_NORMS};
use crate::config::Config;
use crate::mixers::{KdaSizes, Mixer, Mixture, MlaOptions, MoeNames};
use crate::spec::ModelSpec;
use crate::tensors;
use moec_base::error::Result;
use moec_ir::RopeStyle;

pub(super) static FAMILY: Family = Family {
    name: "bailing_hybrid",
    title: "Ling 3.0",
    architectures: &["BailingHybridForCausalLM", "BailingMoeV3ForCausalLM"],
    examples: &["inclusionAI/Ling-3.0-Flash"],
    read,
};

const NAMES: MoeNames = MoeNames { bias: Some("mlp.gate.expert_bias"), ..MoeNames::DEEPSEEK };

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    let b = Base::read(config, checkpoint)?;
    let moe = Mixture::noaux_tc(&b, (8, 4), 2.5, NAMES)?;
    let dense = b.dense_layers(1)?;
    let every = config.size(&["layer_group_size"])?.n;
    let folds: Box<dyn Fn(usize) -> bool> = if config.has("layer_types") {
        Box::new(b.is_first_kind(["linear_attention", "full_attention"])?)
    } else {
        Box::new(move |l| !(l + 1).is_multiple_of(every))
    };
    let sizes = KdaSizes {
        heads: config.size(&["linear_num_heads", "num_attention_heads"])?.into(),
        dim: config.size(&["linear_head_dim", "head_dim"])?.into(),
        taps: tensors::taps(config, &["linear_conv_kernel_dim", "short_conv_kernel_size"])?,
    };
    let bound = if config.flag_or("kda_safe_gate", true)? {
        Some(config.number_or("kda_lower_bound", -5.0)? as f32)
    } else {
        None
    };
    let attention = MlaOptions {
        at: "attention",
        out: "dense",
        gate: Some("g_proj"),
        ..MlaOptions::of(RopeStyle::Interleaved)
    };
    b.pre_norm_model(&FAMILY, PRE_NORMS, |b, l| {
        let at = format!("{}.attention", b.layer(l));
        let out = if b.tensors.has(&format!("{at}.o_proj.weight")) { "o_proj" } else { "dense" };
        let mixer: Mixer =
            if folds(l) { b.kda(&at, &sizes, bound, out)?.into() } else { b.mla(l, attention)?.into() };
        Ok([mixer, if dense(l) { b.dense(l, false)? } else { moe.moe(b, l)?.into() }])
    })
}
