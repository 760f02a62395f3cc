//! Phi-3.5-MoE and its SlimMoE descendants: layer norms, biases everywhere, SparseMixer routing.
//!
//! Phi-tiny and Phi-mini have code of their own (`auto_map`), in which head widths are independent of the
//! hidden size. Head widths are read from the tensors, so all are one family.

use super::Family;
use crate::checkpoint::Checkpoint;
use crate::common::Base;
use crate::config::Config;
use crate::mixers::{Fused, GqaOptions, W123, plain_router};
use crate::rope;
use crate::spec::{LayerSpec, ModelSpec};
use moec_base::error::Result;
use moec_ir::op::{Renorm, Score, WeightFrom};

pub(super) static FAMILY: Family = Family {
    name: "phimoe",
    title: "Phi-MoE",
    architectures: &["PhimoeForCausalLM", "PhiMoEForCausalLM"],
    examples: &[
        "microsoft/Phi-3.5-MoE-instruct",
        "microsoft/Phi-mini-MoE-instruct",
        "microsoft/Phi-tiny-MoE-instruct",
    ],
    read,
};

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    let b = Base::read(config, checkpoint)?;
    let (experts, k) = b.expert_counts()?;
    if k != 2 {
        return Err(config.unsupported("num_experts_per_tok", k, &["2"]));
    }
    let inner = config.size(&["intermediate_size"])?.into();
    let bias = config.flag_or("attention_bias", false)?;
    // The jitter bounds also decide at inference which near ties share a weight.
    let eps = config.positive_or("router_jitter_noise", 0.01)? as f32;
    let attention = GqaOptions {
        qkv_bias: bias,
        o_bias: bias,
        window: config.opt_size(&["sliding_window"])?.map(|s| s.n),
        rope: Some(rope::Defaults { theta: 1e6, ..rope::Defaults::default() }),
        ..GqaOptions::default()
    };
    let norm = |name: &str| b.tensors.layer_norm(name, &b.hidden, b.eps);
    let layers = b.each_layer(|l| {
        let at = b.layer(l);
        let names = ["block_sparse_moe.gate", "mlp.router", "mlp.gate"];
        let gate = b.first_of(&names.map(|m| format!("{at}.{m}.weight")));
        let gate = gate.trim_end_matches(".weight");
        let block = gate.trim_end_matches(".gate").trim_end_matches(".router");
        let router =
            plain_router(experts.n, k, Score::Identity, WeightFrom::SparseMixer { eps }, Renorm::None);
        let read = b.experts(&format!("{block}.experts"), W123, Fused::OutIn, &experts, &inner, b.glu)?;
        Ok(LayerSpec::pre_norm([
            (norm(&format!("{at}.input_layernorm"))?, b.gqa(l, attention)?.into()),
            (
                norm(&format!("{at}.post_attention_layernorm"))?,
                b.simple_moe(gate, router, &experts, read)?.into(),
            ),
        ]))
    })?;
    let norm = norm("model.norm")?;
    b.finish(&FAMILY, layers, norm, config.flag_or("lm_head_bias", false)?)
}
