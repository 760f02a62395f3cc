//! LFM2: short convolutions between two gates, attention in some layers, sigmoid routing with a selection bias.

use super::Family;
use crate::checkpoint::Checkpoint;
use crate::common::Base;
use crate::config::Config;
use crate::mixers::{GqaOptions, Mixture, MoeNames, QkNormKind, W123};
use crate::spec::ModelSpec;
use crate::tensors::Dim;
use moec_base::error::Result;
use moec_ir::op::{Renorm, Score, WeightFrom};

pub(super) static FAMILY: Family = Family {
    name: "lfm2_moe",
    title: "LFM2-MoE",
    architectures: &["Lfm2MoeForCausalLM"],
    examples: &["LiquidAI/LFM2-8B-A1B", "LiquidAI/LFM2.5-8B-A1B"],
    read,
};

const NAMES: MoeNames = MoeNames {
    gate: "feed_forward.gate",
    bias: Some("feed_forward.expert_bias"),
    experts: "feed_forward.experts",
    parts: W123,
    ..MoeNames::DEEPSEEK
};
const KINDS: [&str; 2] = ["conv", "full_attention"];

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    let mut b = Base::read(config, checkpoint)?;
    b.tied = config.flag_or("tie_embedding", true)?;
    let names =
        if config.flag_or("use_expert_bias", true)? { NAMES } else { MoeNames { bias: None, ..NAMES } };
    let renorm =
        if config.flag_or("norm_topk_prob", true)? { Renorm::Sum { eps: 1e-6 } } else { Renorm::None };
    let mut moe = Mixture::of(&b, Score::Sigmoid, WeightFrom::Score, renorm, names)?;
    moe.router.scale = config.number_or("routed_scaling_factor", 1.0)? as f32;
    let dense = config.opt_count(&["num_dense_layers"])?.map_or(0, |s| s.n);
    let wide = Dim::from(config.size(&["intermediate_size"])?);
    let convolves = b.is_first_kind(KINDS)?;
    let bias = config.flag_or("conv_bias", false)?;
    let attention = GqaOptions {
        norms: ["q_layernorm", "k_layernorm"],
        out: "out_proj",
        qk_norm: Some(QkNormKind::PerHead),
        ..GqaOptions::default()
    };
    b.pre_norm_model(&FAMILY, ["operator_norm", "ffn_norm"], |b, l| {
        let mixer = if convolves(l) { b.short_conv(l, bias)?.into() } else { b.gqa(l, attention)?.into() };
        let ffn = if l < dense {
            b.mlp_of(&format!("{}.feed_forward", b.layer(l)), W123, &wide, false)?.into()
        } else {
            moe.moe(b, l)?.into()
        };
        Ok([mixer, ffn])
    })
}
