//! Qwen1.5-MoE and Qwen2-MoE: biases on query, key and value; a shared expert with a sigmoid gate.

use super::Family;
use crate::checkpoint::Checkpoint;
use crate::common::{Base, PRE_NORMS};
use crate::config::Config;
use crate::mixers::{Fused, GqaOptions, Mixer, PROJ, Shared, plain_router, renorm, sparse_layers};
use crate::spec::ModelSpec;
use crate::tensors::Dim;
use moec_base::error::Result;
use moec_ir::op::{Renorm, Score, WeightFrom};

pub(super) static FAMILY: Family = Family {
    name: "qwen2_moe",
    title: "Qwen1.5-MoE and Qwen2-MoE",
    architectures: &["Qwen2MoeForCausalLM"],
    examples: &["Qwen/Qwen1.5-MoE-A2.7B", "Qwen/Qwen2-57B-A14B-Instruct"],
    read,
};

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    let b = Base::read(config, checkpoint)?;
    let feed_forward =
        feed_forward(&b, renorm(config.flag_or("norm_topk_prob", false)?), sparse_layers(config)?)?;
    let windows = windows(config)?;
    let qkv_bias = config.flag_or("qkv_bias", true)?;
    b.pre_norm_model(&FAMILY, PRE_NORMS, |b, l| {
        let options = GqaOptions { qkv_bias, window: windows(l), ..GqaOptions::default() };
        let ffn = feed_forward(b, l)?;
        Ok([b.gqa(l, options)?.into(), ffn])
    })
}

/// The feed-forward network of each layer. If `sparse` is true for it, that is experts and a shared expert
/// with a sigmoid gate. `renorm` is the normalisation of routing weights.
pub(super) fn feed_forward<S: Fn(usize) -> bool>(
    b: &Base<'_>,
    renorm: Renorm,
    sparse: S,
) -> Result<impl Fn(&Base<'_>, usize) -> Result<Mixer> + use<S>> {
    let (experts, k) = b.expert_counts()?;
    let inner = b.config.size(&["moe_intermediate_size"])?.into();
    let shared_inner = b.config.size(&["shared_expert_intermediate_size"])?.into();
    Ok(move |b: &Base<'_>, l: usize| {
        if !sparse(l) {
            return b.dense(l, false);
        }
        let at = b.layer(l);
        let router = plain_router(experts.n, k, Score::Softmax, WeightFrom::Score, renorm);
        let read = b.experts(&format!("{at}.mlp.experts"), PROJ, Fused::OutIn, &experts, &inner, b.glu)?;
        let mut moe = b.simple_moe(&format!("{at}.mlp.gate"), router, &experts, read)?;
        let one = Dim::new(1, "the shared expert's gate");
        let gate = b.tensors.take(&format!("{at}.mlp.shared_expert_gate.weight"), &[&one, &b.hidden])?;
        let mlp = b.mlp(&format!("{at}.mlp.shared_expert"), &shared_inner, false)?;
        moe.shared = Some(Shared { mlp, gate: Some(gate) });
        Ok(moe.into())
    })
}

/// The sliding window of each layer: by `layer_types`, or for every second layer below `max_window_layers`.
fn windows(config: &Config) -> Result<impl Fn(usize) -> Option<usize> + use<>> {
    let window = if config.flag_or("use_sliding_window", false)? {
        config.opt_size(&["sliding_window"])?.map(|s| s.n)
    } else {
        None
    };
    let types = config.opt_texts("layer_types")?;
    let below = config.opt_count(&["max_window_layers"])?.map_or(28, |s| s.n);
    Ok(move |layer: usize| {
        let slides = match &types {
            Some(types) => types.get(layer).is_some_and(|t| t == "sliding_attention"),
            None => layer.is_multiple_of(2) && layer < below,
        };
        window.filter(|_| slides)
    })
}
