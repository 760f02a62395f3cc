//! Architectures before 2026.

use super::super::names::FACTORS;
use super::{
    Model, Settings, decimals, experts_are_intermediate, latents, of, partial, put, shared_and_groups, window,
};
use moec_base::error::Result;
use serde_json::{Value, json};

/// Mixtral, which is a llama with experts.
pub(in super::super) fn mixtral(model: &Model<'_>, s: &mut Settings) -> Result<()> {
    of(s, "MixtralForCausalLM", "mixtral");
    experts_are_intermediate(s);
    put(s, "sliding_window", window(&model.keys)?);
    if s.get("rope_theta").is_none() {
        put(s, "rope_theta", Some(10_000.0));
    }
    Ok(())
}

/// Qwen1.5-MoE and Qwen2-MoE: weights of experts are not renormalised.
pub(in super::super) fn qwen2_moe(model: &Model<'_>, s: &mut Settings) -> Result<()> {
    of(s, "Qwen2MoeForCausalLM", "qwen2_moe");
    let width = model.width(".expert_shared_feed_forward_length", ".ffn_up_shexp.weight")?;
    put(s, "shared_expert_intermediate_size", width);
    let norm = model.keys.flag(".expert_weights_norm")?.unwrap_or(false);
    put(s, "norm_topk_prob", Some(norm));
    put(s, "qkv_bias", Some(model.has("blk.0.attn_q.bias")));
    Ok(())
}

/// Qwen3-MoE: weights of experts are renormalised.
pub(in super::super) fn qwen3_moe(model: &Model<'_>, s: &mut Settings) -> Result<()> {
    of(s, "Qwen3MoeForCausalLM", "qwen3_moe");
    let norm = model.keys.flag(".expert_weights_norm")?.unwrap_or(true);
    put(s, "norm_topk_prob", Some(norm));
    put(s, "attention_bias", Some(model.has("blk.0.attn_q.bias")));
    Ok(())
}

/// OLMoE: weights of experts are not renormalised.
pub(in super::super) fn olmoe(model: &Model<'_>, s: &mut Settings) -> Result<()> {
    of(s, "OlmoeForCausalLM", "olmoe");
    experts_are_intermediate(s);
    put(s, "norm_topk_prob", Some(model.keys.flag(".expert_weights_norm")?.unwrap_or(false)));
    put(s, "clip_qkv", model.keys.number(".attention.clamp_kqv")?);
    Ok(())
}

/// DeepSeek-V2 and V3, which differ in the scoring of experts.
pub(in super::super) fn deepseek(model: &Model<'_>, s: &mut Settings) -> Result<()> {
    let keys = &model.keys;
    const GATING: &str = ".expert_gating_func";
    let biased = model.tensors.keys().any(|name| name.ends_with(".exp_probs_b.bias"));
    let third = match keys.count(GATING)? {
        None => biased,
        Some(1) => false,
        Some(2) => true,
        Some(other) => return Err(keys.unsupported(GATING, &other.to_string(), &["1", "2"])),
    };
    let (class, family) = if third {
        ("DeepseekV3ForCausalLM", "deepseek_v3")
    } else {
        ("DeepseekV2ForCausalLM", "deepseek_v2")
    };
    of(s, class, family);
    const TEMPERATURE: &str = ".attention.temperature_scale";
    if let Some(scale) = keys.number(TEMPERATURE)?.filter(|scale| *scale != 0.0) {
        return Err(keys.unsupported(TEMPERATURE, &scale.to_string(), &["0"]));
    }
    latents(model, s)?;
    shared_and_groups(model, s)?;
    if !third {
        let several = s.get("n_group").and_then(Value::as_u64).is_some_and(|n| n > 1);
        put(s, "topk_method", Some(if several { "group_limited_greedy" } else { "greedy" }));
    }
    Ok(())
}

/// GLM-4.5.
pub(in super::super) fn glm4_moe(model: &Model<'_>, s: &mut Settings) -> Result<()> {
    of(s, "Glm4MoeForCausalLM", "glm4_moe");
    shared_and_groups(model, s)?;
    put(s, "attention_bias", Some(model.has("blk.0.attn_q.bias")));
    put(s, "use_qk_norm", Some(model.has("blk.0.attn_q_norm.weight")));
    put(s, "partial_rotary_factor", partial(model)?);
    Ok(())
}

/// Phi-3.5-MoE and its descendants.
pub(in super::super) fn phimoe(model: &Model<'_>, s: &mut Settings) -> Result<()> {
    of(s, "PhimoeForCausalLM", "phimoe");
    experts_are_intermediate(s);
    // Converters write hidden size by heads, which is wrong for Phi-tiny and Phi-mini.
    s.remove("head_dim");
    put(s, "attention_bias", Some(model.has("blk.0.attn_q.bias")));
    put(s, "lm_head_bias", Some(model.has("output.bias")));
    put(s, "sliding_window", window(&model.keys)?);
    let [short, long, _] = FACTORS.map(|name| model.vector(name));
    if let (Some(short), Some(long)) = (short, long) {
        let original = ".rope.scaling.original_context_length";
        let mut scaling = Settings::new();
        put(&mut scaling, "rope_type", Some("longrope"));
        put(&mut scaling, "short_factor", Some(decimals(&short)));
        put(&mut scaling, "long_factor", Some(decimals(&long)));
        put(&mut scaling, "original_max_position_embeddings", Some(model.keys.needed(original)?));
        put(s, "rope_scaling", Some(scaling));
    }
    Ok(())
}

/// gpt-oss: every second layer from the first on has a window, and YaRN's ramp is not rounded.
pub(in super::super) fn gpt_oss(model: &Model<'_>, s: &mut Settings) -> Result<()> {
    of(s, "GptOssForCausalLM", "gpt_oss");
    experts_are_intermediate(s);
    put(s, "attention_bias", Some(model.has("blk.0.attn_q.bias")));
    put(s, "sliding_window", window(&model.keys)?);
    match s.get_mut("rope_scaling") {
        Some(Value::Object(scaling)) => put(scaling, "truncate", Some(false)),
        _ => put(s, "rope_scaling", Some(json!({"rope_type": "default"}))),
    }
    Ok(())
}

/// SmallThinker: if there is a window, every fourth layer from the first on has neither the window nor a
/// rotation.
pub(in super::super) fn smallthinker(model: &Model<'_>, s: &mut Settings) -> Result<()> {
    of(s, "SmallThinkerForCausalLM", "smallthinker");
    let softmax = model.keys.count(".expert_gating_func")? == Some(1);
    put(s, "moe_primary_router_apply_softmax", Some(softmax));
    let layers = s.get("num_hidden_layers").and_then(Value::as_u64).unwrap_or(0);
    let window = window(&model.keys)?;
    let each =
        |of: &dyn Fn(u64) -> bool| (0..layers.min(1 << 16)).map(|l| u64::from(of(l))).collect::<Vec<_>>();
    put(s, "rope_layout", Some(each(&|l| window.is_none() || l % 4 != 0)));
    put(s, "sliding_window_layout", Some(each(&|l| window.is_some() && l % 4 != 0)));
    put(s, "sliding_window_size", window);
    Ok(())
}
