//! Cohere's mixtures: attention and experts in parallel after one norm, full-attention layers without a
//! rotation.

use super::Family;
use crate::checkpoint::Checkpoint;
use crate::common::Base;
use crate::config::Config;
use crate::mixers::{GqaOptions, Mixer, Mixture, Moe, MoeNames};
use crate::rope;
use crate::spec::{Block, LayerSpec, ModelSpec, Norm};
use crate::tensors::Dim;
use moec_base::error::Result;
use moec_ir::op::{Renorm, Score, WeightFrom};
use moec_ir::{RopeStyle, WeightExpr};

pub(super) static FAMILY: Family = Family {
    name: "cohere2_moe",
    title: "Command A MoE",
    architectures: &["Cohere2MoeForCausalLM"],
    examples: &[],
    read,
};

const NAMES: MoeNames = MoeNames { bias: None, ..MoeNames::DEEPSEEK };

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    let mut b = Base::read(config, checkpoint)?;
    b.tied = true;
    b.multipliers.logits = config.positive_or("logit_scale", 1.0)? as f32;
    let (from, renorm) = match config.opt_text("expert_selection_fn")?.unwrap_or("softmax") {
        "softmax" => (WeightFrom::SoftmaxTopk, Renorm::None),
        "sigmoid" if config.flag_or("norm_topk_prob", true)? => {
            (WeightFrom::SigmoidTopk, Renorm::Sum { eps: 0.0 })
        }
        "sigmoid" => (WeightFrom::SigmoidTopk, Renorm::None),
        other => return Err(config.unsupported("expert_selection_fn", other, &["softmax", "sigmoid"])),
    };
    let mut moe = Mixture::of(&b, Score::Identity, from, renorm, NAMES)?;
    // Experts have the width of `intermediate_size`. The results of routed and shared experts are added or
    // averaged.
    moe.shared = config
        .opt_count(&["num_shared_experts"])?
        .filter(|s| s.n > 0)
        .map(|n| moe.intermediate.times(&n.into()));
    let sum_scale = match config.opt_text("shared_expert_combination_strategy")?.unwrap_or("sum") {
        "sum" => 1.0,
        "average" => 0.5,
        other => {
            return Err(config.unsupported("shared_expert_combination_strategy", other, &["sum", "average"]));
        }
    };
    let wide = config.opt_size(&["prefix_dense_intermediate_size"])?.map(Dim::from);
    let dense = b.dense_layers(0)?;
    let window = b.windows()?;
    let every = config.opt_size(&["prefix_dense_sliding_window_pattern"])?.map_or(1, |s| s.n);
    let zero = WeightExpr::Const(vec![0.0; b.hidden.n]);
    let norm = |name: &str| -> Result<Norm> {
        if config.has("rms_norm_eps") {
            return b.rms_norm(name);
        }
        let weight = b.tensors.take(&format!("{name}.weight"), &[&b.hidden])?;
        Ok(Norm::Layer { eps: b.eps, weight, bias: zero.clone() })
    };
    let layers = b.each_layer(|l| {
        let at = b.layer(l);
        let attention = GqaOptions {
            window: window(l),
            rope: (window(l).is_some() || dense(l) && every == 1).then(rope::Defaults::default),
            style: RopeStyle::Interleaved,
            ..GqaOptions::default()
        };
        let ffn: Mixer = match &wide {
            Some(wide) if dense(l) => b.mlp(&format!("{at}.mlp"), wide, false)?.into(),
            _ => Moe { sum_scale, ..moe.moe(&b, l)? }.into(),
        };
        let mixers = vec![b.gqa(l, attention)?.into(), ffn];
        let norm = Some(norm(&format!("{at}.input_layernorm"))?);
        Ok(LayerSpec { blocks: vec![Block { norm, mixers, post_norm: None }], scale: None })
    })?;
    let last = norm("model.norm")?;
    b.finish(&FAMILY, layers, last, false)
}
