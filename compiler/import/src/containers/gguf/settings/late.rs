//! Architectures of 2026.
#![expect(clippy::cast_possible_truncation, reason = "models compute with their factors in f32")]

use super::{Model, ROPE_FREQS, Settings, decimals, latents, of, partial, put, shared_and_groups, window};
use moec_base::error::{Error, Result};
use serde_json::{Map, Value, json};

/// Sets a list with the kind of each layer: the first kind where `first` is true.
fn kinds(s: &mut Settings, key: &str, first: &[bool], [yes, no]: [&str; 2]) {
    let kinds: Vec<&str> = first.iter().map(|first| if *first { yes } else { no }).collect();
    put(s, key, Some(kinds));
}

const FOLDS: [&str; 2] = ["linear_attention", "full_attention"];
const SLIDES: [&str; 2] = ["sliding_attention", "full_attention"];
const SPARSE: [&str; 2] = ["sparse", "dense"];

/// Whether each layer has a sliding window: by a list, or for all layers but every n-th. `usual` is the
/// default of n.
fn slides(model: &Model<'_>, usual: u64) -> Result<Vec<bool>> {
    const KEY: &str = ".attention.sliding_window_pattern";
    if model.keys.get(KEY).is_some_and(|v| v.as_array().is_some()) {
        return Ok(model.by_layer(KEY)?.unwrap_or_default().into_iter().map(|n| n > 0).collect());
    }
    let every = model.keys.count(KEY)?.unwrap_or(usual);
    model.each(|l| !(l as u64 + 1).is_multiple_of(every))
}

/// Sets the sliding window and `layer_types`. Returns whether each layer has the window.
fn windows(model: &Model<'_>, s: &mut Settings, usual: u64) -> Result<Vec<bool>> {
    let of = slides(model, usual)?;
    put(s, "sliding_window", window(&model.keys)?);
    kinds(s, "layer_types", &of, SLIDES);
    Ok(of)
}

/// Sets which layers have experts.
fn sparse(model: &Model<'_>, s: &mut Settings) -> Result<()> {
    kinds(s, "mlp_layer_types", &model.having("ffn_gate_inp.weight")?, SPARSE);
    Ok(())
}

/// Sets the factor of routing weights and their normalisation. `usual` is the default of the latter.
fn weights(model: &Model<'_>, s: &mut Settings, scale: &str, usual: bool) -> Result<()> {
    put(s, scale, Some(model.keys.number(".expert_weights_scale")?.filter(|x| *x != 0.0).unwrap_or(1.0)));
    put(s, "norm_topk_prob", Some(model.keys.flag(".expert_weights_norm")?.unwrap_or(usual)));
    Ok(())
}

/// Refuses a gating function other than that of the architecture: 1 is softmax, 2 sigmoid.
fn scored(model: &Model<'_>, by: u64) -> Result<()> {
    const GATING: &str = ".expert_gating_func";
    match model.keys.count(GATING)?.filter(|n| *n != by && *n != 0) {
        Some(other) => Err(model.keys.unsupported(GATING, &other.to_string(), &[&by.to_string()])),
        None => Ok(()),
    }
}

/// Width of the shared expert.
fn shared_width(model: &Model<'_>) -> Result<Option<u64>> {
    model.width(".expert_shared_feed_forward_length", ".ffn_up_shexp.weight")
}

/// RoPE with frequency factors: LongRoPE with the same factors for short and long contexts.
fn divided(factors: &[f32], context: Value) -> Map<String, Value> {
    let mut rope = Settings::new();
    put(&mut rope, "rope_type", Some("longrope"));
    put(&mut rope, "short_factor", Some(decimals(factors)));
    put(&mut rope, "long_factor", Some(decimals(factors)));
    put(&mut rope, "attention_factor", Some(1.0));
    put(&mut rope, "original_max_position_embeddings", Some(context));
    rope
}

/// Sets RoPE with the frequency factors of the file, if there are any.
fn frequency_factors(model: &Model<'_>, s: &mut Settings) {
    let context = s.get("max_position_embeddings").cloned().unwrap_or_default();
    put(s, "rope_scaling", model.vector(ROPE_FREQS).map(|factors| divided(&factors, context)));
}

/// Sets RoPE of layers with full attention and of layers with a sliding window.
fn rotations(
    model: &Model<'_>,
    s: &mut Settings,
    full: Map<String, Value>,
    partial: Option<f64>,
) -> Result<()> {
    let mut sliding = Settings::new();
    let base = model.keys.number(".rope.freq_base_swa")?.unwrap_or(10_000.0);
    put(&mut sliding, "rope_theta", Some(base));
    put(&mut sliding, "partial_rotary_factor", partial);
    let mut full = full;
    put(&mut full, "rope_theta", s.remove("rope_theta"));
    s.remove("rope_scaling");
    put(s, "rope_parameters", Some(json!({"full_attention": full, "sliding_attention": sliding})));
    Ok(())
}

/// Qwen3-Next. Layers with `ssm_a` are delta-rule layers.
pub(in super::super) fn qwen3_next(model: &Model<'_>, s: &mut Settings) -> Result<()> {
    of(s, "Qwen3NextForCausalLM", "qwen3_next");
    let keys = &model.keys;
    let heads = keys.needed(".ssm.time_step_rank")?;
    put(s, "linear_num_value_heads", Some(heads));
    put(s, "linear_num_key_heads", Some(keys.needed(".ssm.group_count")?));
    put(s, "linear_key_head_dim", Some(keys.needed(".ssm.state_size")?));
    put(s, "linear_value_head_dim", keys.needed(".ssm.inner_size")?.checked_div(heads));
    put(s, "linear_conv_kernel_dim", Some(keys.needed(".ssm.conv_kernel")?));
    kinds(s, "layer_types", &model.having("ssm_a")?, FOLDS);
    put(s, "shared_expert_intermediate_size", shared_width(model)?);
    put(s, "partial_rotary_factor", partial(model)?);
    Ok(())
}

/// Qwen3.5-MoE, as Qwen3-Next.
pub(in super::super) fn qwen3_5_moe(model: &Model<'_>, s: &mut Settings) -> Result<()> {
    qwen3_next(model, s)?;
    of(s, "Qwen3_5MoeForCausalLM", "qwen3_5_moe");
    Ok(())
}

/// LFM2-MoE.
pub(in super::super) fn lfm2_moe(model: &Model<'_>, s: &mut Settings) -> Result<()> {
    of(s, "Lfm2MoeForCausalLM", "lfm2_moe");
    scored(model, 2)?;
    kinds(s, "layer_types", &model.having("shortconv.conv.weight")?, ["conv", "full_attention"]);
    put(s, "conv_L_cache", Some(model.keys.needed(".shortconv.l_cache")?));
    put(s, "num_dense_layers", model.keys.count(".leading_dense_block_count")?);
    weights(model, s, "routed_scaling_factor", true)
}

/// Gemma 4. In full-attention layers a factor of 10³⁰ marks pairs that are not rotated.
pub(in super::super) fn gemma4(model: &Model<'_>, s: &mut Settings) -> Result<()> {
    of(s, "Gemma4ForCausalLM", "gemma4");
    let keys = &model.keys;
    let experts = s.get("num_experts_per_tok").cloned();
    put(s, "top_k_experts", experts);
    put(s, "final_logit_softcapping", keys.number(".final_logit_softcapping")?);
    put(s, "hidden_size_per_layer_input", keys.count(".embedding_length_per_layer_input")?);
    put(s, "num_kv_shared_layers", keys.count(".attention.shared_kv_layers")?);
    let of = windows(model, s, 6)?;
    let wide = keys.needed(".attention.key_length")?;
    let narrow = keys.count(".attention.key_length_swa")?.unwrap_or(wide);
    put(s, "head_dim", Some(narrow));
    let kv = model.by_layer(".attention.head_count_kv")?;
    let kv = kv.ok_or_else(|| keys.missing(".attention.head_count_kv"))?;
    let mut each = Settings::new();
    for ((l, slides), kv) in of.iter().enumerate().zip(kv) {
        if *slides {
            put(s, "num_key_value_heads", Some(kv));
        } else {
            each.insert(l.to_string(), json!({"head_dim": wide, "num_key_value_heads": kv}));
        }
    }
    put(s, "per_layer_config", Some(each));
    let values = model.having("attn_v.weight")?;
    put(s, "attention_k_eq_v", Some(of.iter().zip(values).any(|(slides, has)| !slides && !has)));
    let mut full = Settings::new();
    if let Some(factors) = model.vector(ROPE_FREQS) {
        let turned = factors.iter().take_while(|x| **x == 1.0).count();
        if factors.len() as u64 * 2 != wide || factors.iter().skip(turned).any(|x| *x < 1e20) {
            return Err(Error::limit(format!(
                "tensor `{ROPE_FREQS}` in `{}` has factors other than 1 and 1e30, which is not supported",
                keys.file()
            )));
        }
        put(&mut full, "rope_type", Some("proportional"));
        put(&mut full, "partial_rotary_factor", Some(turned as f64 / factors.len() as f64));
    }
    rotations(model, s, full, None)
}

/// Sets the keys of Mamba-2.
fn state_space(model: &Model<'_>, s: &mut Settings, names: [&str; 5]) -> Result<()> {
    let keys = &model.keys;
    let heads = keys.needed(".ssm.time_step_rank")?;
    let [of_heads, of_dim, of_groups, of_state, of_taps] = names;
    put(s, of_heads, Some(heads));
    put(s, of_dim, keys.needed(".ssm.inner_size")?.checked_div(heads));
    put(s, of_groups, Some(keys.needed(".ssm.group_count")?));
    put(s, of_state, Some(keys.needed(".ssm.state_size")?));
    put(s, of_taps, Some(keys.needed(".ssm.conv_kernel")?));
    Ok(())
}

/// Nemotron 3. The kind of each layer follows from its tensors.
pub(in super::super) fn nemotron_h(model: &Model<'_>, s: &mut Settings) -> Result<()> {
    of(s, "NemotronHForCausalLM", "nemotron_h");
    let keys = &model.keys;
    scored(model, 2)?;
    state_space(
        model,
        s,
        ["mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"],
    )?;
    let [folds, attends, routes] =
        ["ssm_a", "attn_q.weight", "ffn_gate_inp.weight"].map(|of| model.having(of));
    let (folds, attends, routes) = (folds?, attends?, routes?);
    let kinds: Vec<&str> = (0..folds.len())
        .map(|l| match (folds[l], attends[l], routes[l]) {
            (true, ..) => "linear_attention",
            (_, true, _) => "full_attention",
            (.., true) => "moe",
            _ => "mlp",
        })
        .collect();
    put(s, "layers_block_type", Some(kinds));
    put(s, "use_conv_bias", Some(model.extent_of_any(".ssm_conv1d.bias", 0).is_some()));
    put(s, "intermediate_size", model.extent_of_any(".ffn_up.weight", 1).map(|n| n as u64));
    put(s, "moe_shared_expert_intermediate_size", shared_width(model)?);
    put(s, "moe_latent_size", keys.count(".moe_latent_size")?.filter(|n| *n > 0));
    put(s, "n_group", keys.count(".expert_group_count")?);
    put(s, "topk_group", keys.count(".expert_group_used_count")?);
    if !s.contains_key("rms_norm_eps") {
        put(s, "layer_norm_epsilon", keys.number(".attention.layer_norm_epsilon")?);
    }
    weights(model, s, "routed_scaling_factor", true)
}

/// Granite MoE, with a shared expert or without.
pub(in super::super) fn granite_moe(model: &Model<'_>, s: &mut Settings) -> Result<()> {
    let keys = &model.keys;
    let shared = shared_width(model)?.filter(|n| *n > 0);
    match shared {
        Some(_) => of(s, "GraniteMoeSharedForCausalLM", "granitemoeshared"),
        None => of(s, "GraniteMoeForCausalLM", "granitemoe"),
    }
    put(s, "shared_intermediate_size", shared);
    for (from, to) in [
        (".attention.scale", "attention_multiplier"),
        (".embedding_scale", "embedding_multiplier"),
        (".residual_scale", "residual_multiplier"),
        (".logit_scale", "logits_scaling"),
    ] {
        put(s, to, keys.number(from)?.filter(|x| *x != 0.0));
    }
    if !s.contains_key("attention_multiplier") {
        return Err(keys.missing(".attention.scale"));
    }
    put(s, "attention_bias", Some(model.extent_of_any(".attn_q.bias", 0).is_some()));
    Ok(())
}

/// Granite 4. Attention has RoPE only with `rope.scaling.finetuned`.
pub(in super::super) fn granite_hybrid(model: &Model<'_>, s: &mut Settings) -> Result<()> {
    granite_moe(model, s)?;
    of(s, "GraniteMoeHybridForCausalLM", "granitemoehybrid");
    let keys = &model.keys;
    state_space(
        model,
        s,
        ["mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"],
    )?;
    let (inner, hidden) = (keys.needed(".ssm.inner_size")?, keys.needed(".embedding_length")?);
    put(s, "mamba_expand", inner.checked_div(hidden).map(|n| n.max(1)));
    put(s, "mamba_conv_bias", Some(model.extent_of_any(".ssm_conv1d.bias", 0).is_some()));
    kinds(s, "layer_types", &model.having("ssm_a")?, FOLDS);
    let rotated = keys.flag(".rope.scaling.finetuned")?.unwrap_or(false);
    put(s, "position_embedding_type", rotated.then_some("rope"));
    Ok(())
}

/// Mistral Small 4: latent attention with a temperature that depends on the position.
pub(in super::super) fn mistral4(model: &Model<'_>, s: &mut Settings) -> Result<()> {
    of(s, "Mistral4ForCausalLM", "mistral4");
    let keys = &model.keys;
    scored(model, 1)?;
    latents(model, s)?;
    shared_and_groups(model, s)?;
    weights(model, s, "routed_scaling_factor", true)?;
    const SCALE: &str = ".attention.temperature_scale";
    const LENGTH: &str = ".attention.temperature_length";
    let Some(beta) = keys.number(SCALE)?.filter(|beta| *beta != 0.0) else { return Ok(()) };
    let Some(Value::Object(scaling)) = s.get_mut("rope_scaling") else {
        return Err(keys.missing(".rope.scaling.original_context_length"));
    };
    let original = scaling.get("original_max_position_embeddings").and_then(Value::as_f64);
    if let Some(length) = keys.count(LENGTH)?.filter(|n| original.is_none_or(|o| o != *n as f64)) {
        return Err(keys.unsupported(LENGTH, &length.to_string(), &["the original context"]));
    }
    put(scaling, "original_max_position_embeddings", original.map(|n| n as u64));
    put(scaling, "llama_4_scaling_beta", Some(beta));
    Ok(())
}

/// ERNIE 4.5.
pub(in super::super) fn ernie4_5_moe(model: &Model<'_>, s: &mut Settings) -> Result<()> {
    of(s, "Ernie4_5_MoeForCausalLM", "ernie4_5_moe");
    let keys = &model.keys;
    scored(model, 1)?;
    put(s, "moe_layer_interval", keys.count(".interleave_moe_layer_step")?);
    put(s, "moe_layer_start_index", keys.count(".leading_dense_block_count")?);
    put(s, "moe_num_shared_experts", keys.count(".expert_shared_count")?);
    put(s, "use_bias", Some(model.has("blk.0.attn_q.bias")));
    Ok(())
}

/// MiniMax-M2.
pub(in super::super) fn minimax_m2(model: &Model<'_>, s: &mut Settings) -> Result<()> {
    of(s, "MiniMaxM2ForCausalLM", "minimax_m2");
    scored(model, 2)?;
    put(s, "rotary_dim", model.keys.count(".rope.dimension_count")?);
    Ok(())
}

/// Kimi Linear. Layers with `ssm_a` are delta attention, the others latent attention.
pub(in super::super) fn kimi_linear(model: &Model<'_>, s: &mut Settings) -> Result<()> {
    of(s, "KimiLinearForCausalLM", "kimi_linear");
    let keys = &model.keys;
    scored(model, 2)?;
    latents(model, s)?;
    shared_and_groups(model, s)?;
    weights(model, s, "routed_scaling_factor", true)?;
    kinds(s, "layer_types", &model.having("ssm_a")?, FOLDS);
    let heads = s.get("num_attention_heads").cloned();
    put(s, "linear_num_heads", heads);
    put(s, "linear_head_dim", Some(keys.needed(".kda.head_dim")?));
    put(s, "linear_conv_kernel_dim", Some(keys.needed(".ssm.conv_kernel")?));
    Ok(())
}

/// Attention chunk and temperature step of Llama 4, which are constants in llama.cpp.
const CHUNK: u64 = 8192;
/// Number of experts of Maverick, which has no QK norm.
const MAVERICK: u64 = 128;

/// Llama 4.
pub(in super::super) fn llama4(model: &Model<'_>, s: &mut Settings) -> Result<()> {
    of(s, "Llama4ForCausalLM", "llama4");
    let keys = &model.keys;
    const WINDOW: &str = ".attention.sliding_window";
    if let Some(0) = keys.count(WINDOW)? {
        return Err(keys.unsupported(WINDOW, "0", &["8192"]));
    }
    let dense = s.remove("intermediate_size");
    put(s, "intermediate_size_mlp", dense);
    let inner = s.remove("moe_intermediate_size");
    put(s, "intermediate_size", inner);
    put(s, "interleave_moe_layer_step", keys.count(".interleave_moe_layer_step")?);
    let rotated = slides(model, 4)?;
    put(s, "no_rope_layers", Some(rotated.iter().map(|r| u64::from(*r)).collect::<Vec<_>>()));
    put(s, "attention_chunk_size", Some(CHUNK));
    put(s, "floor_scale", Some(CHUNK));
    put(s, "use_qk_norm", Some(keys.count(".expert_count")? != Some(MAVERICK)));
    frequency_factors(model, s);
    Ok(())
}

/// Hunyuan-A13B. The file has the RoPE base after scaling.
#[expect(clippy::unnecessary_wraps, reason = "a row of a table of functions")]
pub(in super::super) fn hunyuan_v1_moe(model: &Model<'_>, s: &mut Settings) -> Result<()> {
    of(s, "HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe");
    put(s, "use_qk_norm", Some(model.has("blk.0.attn_q_norm.weight")));
    Ok(())
}

/// dots.llm1.
pub(in super::super) fn dots1(model: &Model<'_>, s: &mut Settings) -> Result<()> {
    of(s, "Dots1ForCausalLM", "dots1");
    scored(model, 2)?;
    shared_and_groups(model, s)?;
    weights(model, s, "routed_scaling_factor", false)
}

/// Jamba. The kind of each layer follows from its tensors.
pub(in super::super) fn jamba(model: &Model<'_>, s: &mut Settings) -> Result<()> {
    of(s, "JambaForCausalLM", "jamba");
    let keys = &model.keys;
    for (tensor, period, offset) in [
        ("attn_q.weight", "attn_layer_period", "attn_layer_offset"),
        ("ffn_gate_inp.weight", "expert_layer_period", "expert_layer_offset"),
    ] {
        let having = model.having(tensor)?;
        let (every, first) = periodic(&having).ok_or_else(|| {
            Error::limit(format!("layers of `{}` with `{tensor}` are not evenly spaced", keys.file()))
        })?;
        put(s, period, Some(every as u64));
        put(s, offset, Some(first as u64));
    }
    let (inner, hidden) = (keys.needed(".ssm.inner_size")?, keys.needed(".embedding_length")?);
    put(s, "mamba_expand", inner.checked_div(hidden));
    put(s, "mamba_dt_rank", Some(keys.needed(".ssm.time_step_rank")?));
    put(s, "mamba_d_state", Some(keys.needed(".ssm.state_size")?));
    put(s, "mamba_d_conv", Some(keys.needed(".ssm.conv_kernel")?));
    put(s, "mamba_conv_bias", Some(model.extent_of_any(".ssm_conv1d.bias", 0).is_some()));
    Ok(())
}

/// Period and offset of the layers that are `true`; `None` if they are not periodic.
fn periodic(of: &[bool]) -> Option<(usize, usize)> {
    let mut at = of.iter().enumerate().filter(|(_, is)| **is).map(|(l, _)| l);
    let first = at.next()?;
    let every = at.next().map_or(of.len(), |second| second - first);
    let fits = of.iter().enumerate().all(|(l, is)| *is == (l % every == first));
    (first < every && fits).then_some((every, first))
}

/// Trinity. llama.cpp always scales its embeddings.
pub(in super::super) fn afmoe(model: &Model<'_>, s: &mut Settings) -> Result<()> {
    of(s, "AfmoeForCausalLM", "afmoe");
    scored(model, 2)?;
    put(s, "mup_enabled", Some(true));
    put(s, "num_dense_layers", Some(model.keys.count(".leading_dense_block_count")?.unwrap_or(0)));
    put(s, "num_shared_experts", model.keys.count(".expert_shared_count")?);
    windows(model, s, 4)?;
    weights(model, s, "route_scale", true)
}

/// Step 3.5. Full-attention layers rotate half of each head, with frequency factors if the file has them.
pub(in super::super) fn step3p5(model: &Model<'_>, s: &mut Settings) -> Result<()> {
    of(s, "Step3p5ForCausalLM", "step3p5");
    let keys = &model.keys;
    scored(model, 2)?;
    let of = windows(model, s, 4)?;
    sparse(model, s)?;
    let one = |key: &str, slide: bool| -> Result<Option<u64>> {
        let list = model.by_layer(key)?.ok_or_else(|| keys.missing(key))?;
        let mut numbers = list.into_iter().zip(&of).filter(|(_, is)| **is == slide).map(|(n, _)| n);
        let first = numbers.next();
        if numbers.any(|n| Some(n) != first) {
            return Err(Error::limit(format!("{} differs among layers of one kind", keys.name(key))));
        }
        Ok(first)
    };
    let (heads, groups) = (".attention.head_count", ".attention.head_count_kv");
    put(s, "num_attention_heads", one(heads, false)?);
    put(s, "num_key_value_heads", one(groups, false)?);
    let mut other = Settings::new();
    put(&mut other, "num_attention_heads", one(heads, true)?);
    put(&mut other, "num_attention_groups", one(groups, true)?);
    put(s, "attention_other_setting", Some(other));
    put(s, "share_expert_dim", shared_width(model)?);
    put(s, "moe_router_scaling_factor", keys.number(".expert_weights_scale")?.filter(|x| *x != 0.0));
    for (from, to) in
        [(".swiglu_clamp_exp", "swiglu_limits"), (".swiglu_clamp_shexp", "swiglu_limits_shared")]
    {
        put(s, to, keys.numbers(from)?);
    }
    const HALF: f64 = 0.5;
    let context = s.get("max_position_embeddings").cloned().unwrap_or_default();
    let head = keys.needed(".attention.key_length")?;
    let pairs = (head as f64 * HALF / 2.0) as usize;
    let factors = model.vector(ROPE_FREQS);
    let mut full = factors.map(|of| divided(of.get(..pairs).unwrap_or(&of), context)).unwrap_or_default();
    put(&mut full, "partial_rotary_factor", Some(HALF));
    rotations(model, s, full, Some(1.0))
}

/// Published factor of values, which earlier converters did not write.
const VALUE_SCALE: f64 = 0.707;

/// MiMo-V2-Flash. Layers with a sliding window have twice as many KV heads.
pub(in super::super) fn mimo_v2_flash(model: &Model<'_>, s: &mut Settings) -> Result<()> {
    of(s, "MiMoV2FlashForCausalLM", "mimo_v2_flash");
    let keys = &model.keys;
    scored(model, 2)?;
    let of = windows(model, s, 6)?;
    // The file's window does not include the token itself.
    let before = s.remove("sliding_window");
    put(s, "sliding_window_size", before);
    put(s, "hybrid_layer_pattern", Some(of.iter().map(|&slides| u8::from(slides)).collect::<Vec<_>>()));
    sparse(model, s)?;
    const HEADS: &str = ".attention.head_count_kv";
    let kv = model.by_layer(HEADS)?.ok_or_else(|| keys.missing(HEADS))?;
    let least = kv.iter().copied().min().unwrap_or(0);
    if kv.iter().zip(&of).any(|(n, slides)| *n != if *slides { 2 * least } else { least }) {
        return Err(Error::limit(format!(
            "{} is not twice as much in layers with a window, which is not supported",
            keys.name(HEADS)
        )));
    }
    put(s, "num_key_value_heads", Some(least));
    put(s, "v_head_dim", keys.count(".attention.value_length")?);
    put(s, "attention_value_scale", Some(keys.number(".attention.value_scale")?.unwrap_or(VALUE_SCALE)));
    put(s, "n_group", keys.count(".expert_group_count")?);
    put(s, "topk_group", keys.count(".expert_group_used_count")?);
    weights(model, s, "routed_scaling_factor", true)?;
    let partial = partial(model)?;
    let mut full = Settings::new();
    put(&mut full, "partial_rotary_factor", partial);
    rotations(model, s, full, partial)
}

/// K-EXAONE.
pub(in super::super) fn exaone_moe(model: &Model<'_>, s: &mut Settings) -> Result<()> {
    of(s, "ExaoneMoeForCausalLM", "exaone_moe");
    scored(model, 2)?;
    shared_and_groups(model, s)?;
    weights(model, s, "routed_scaling_factor", true)?;
    windows(model, s, 4)?;
    frequency_factors(model, s);
    Ok(())
}
