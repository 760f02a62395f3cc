//! From the metadata to the keys of `config.json`.
//!
//! llama.cpp leaves out of its metadata what is the same in every model of an architecture that it knows. That is said here, as
//! the published configurations have it.
#![expect(clippy::cast_possible_truncation, reason = "models compute with their factors in f32")]

use super::keys::Keys;
use super::names::FACTORS;
use crate::map::Map;
use indexmap::IndexMap;
use moec_base::error::{Error, Result};
use moec_gguf::Tensor;
use serde_json::{Map as Object, Value, json};

/// A configuration being put together.
pub(super) type Settings = Object<String, Value>;

/// Adds the keys that are an architecture's own.
pub(super) type Own = fn(&Model<'_>, &mut Settings) -> Result<()>;

/// A model's metadata and tensors.
pub(super) struct Model<'a> {
    pub(super) keys: Keys<'a>,
    /// By name, with the file that each is in.
    pub(super) tensors: &'a IndexMap<&'a str, (usize, &'a Tensor<'a>)>,
    /// The files.
    pub(super) maps: &'a [Map],
}

impl Model<'_> {
    fn has(&self, tensor: &str) -> bool {
        self.tensors.contains_key(tensor)
    }

    /// An extent of a tensor, counted from the last axis.
    fn extent(&self, tensor: &str, back: usize) -> Option<usize> {
        self.tensors.get(tensor)?.1.shape.iter().rev().nth(back).copied()
    }

    /// An extent of the first tensor whose name ends so.
    fn extent_of_any(&self, end: &str, back: usize) -> Option<usize> {
        let name = self.tensors.keys().find(|name| name.ends_with(end))?;
        self.extent(name, back)
    }

    /// The numbers of a vector.
    fn vector(&self, tensor: &str) -> Option<Vec<f32>> {
        let (file, t) = self.tensors.get(tensor)?;
        let ([n], Some(decode)) = (&t.shape[..], t.kind.decode) else { return None };
        let mut out = vec![0.0; *n];
        decode(self.maps.get(*file)?.get(t.bytes.clone())?, 0, &mut out);
        Some(out)
    }

    /// Heads of every layer, or how wide something of them is; models whose layers differ are refused.
    fn heads(&self, key: &str) -> Result<Option<u64>> {
        if let Some(list) = self.keys.get(key).and_then(|v| v.as_array()) {
            return Err(Error::limit(format!(
                "{} differs by layer ({} values), which is not supported",
                self.keys.name(key),
                list.len()
            )));
        }
        self.keys.count(key)
    }
}

/// Adds a key, if there is a value.
fn put(settings: &mut Settings, key: &str, value: Option<impl Into<Value>>) {
    if let Some(value) = value {
        settings.insert(key.to_owned(), value.into());
    }
}

/// The configuration of a model of an architecture, which has keys of its own.
///
/// # Errors
/// Keys that are missing or cannot be, and models that are not supported.
pub(super) fn config(own: Own, model: &Model<'_>) -> Result<Settings> {
    let keys = &model.keys;
    if model.has("rope_freqs.weight") {
        return Err(Error::limit(format!(
            "tensor `rope_freqs.weight` in `{}` changes the rotation in a way that is not supported",
            keys.file()
        )));
    }
    let mut s = Settings::new();
    let tokens = model.extent("token_embd.weight", 1).map(|n| n as u64);
    let tokens = tokens.map_or_else(|| keys.needed(".vocab_size"), Ok)?;
    put(&mut s, "vocab_size", Some(tokens));
    put(&mut s, "hidden_size", Some(keys.needed(".embedding_length")?));
    // Layers that predict several tokens at once stand after the others.
    let layers = keys.needed(".block_count")?;
    let beyond = keys.count(".nextn_predict_layers")?.unwrap_or(0);
    put(&mut s, "num_hidden_layers", Some(layers.saturating_sub(beyond)));
    let heads = model.heads(".attention.head_count")?.ok_or_else(|| keys.missing(".attention.head_count"))?;
    put(&mut s, "num_attention_heads", Some(heads));
    put(&mut s, "num_key_value_heads", model.heads(".attention.head_count_kv")?);
    put(&mut s, "head_dim", keys.count(".attention.key_length")?);
    put(&mut s, "rms_norm_eps", keys.number(".attention.layer_norm_rms_epsilon")?);
    put(&mut s, "max_position_embeddings", Some(keys.needed(".context_length")?));
    put(&mut s, "tie_word_embeddings", Some(!model.has("output.weight")));
    put(&mut s, "num_experts", keys.count(".expert_count")?);
    put(&mut s, "num_experts_per_tok", keys.count(".expert_used_count")?);
    let width = |key: &str, end: &str| -> Result<Option<u64>> {
        Ok(keys.count(key)?.or_else(|| model.extent_of_any(end, 1).map(|n| n as u64)))
    };
    put(&mut s, "moe_intermediate_size", width(".expert_feed_forward_length", ".ffn_up_exps.weight")?);
    put(&mut s, "intermediate_size", model.heads(".feed_forward_length")?);
    rotation(keys, &mut s)?;
    special_tokens(keys, &mut s)?;
    own(model, &mut s)?;
    if s.get("num_experts").and_then(Value::as_u64).unwrap_or(0) == 0 {
        return Err(Error::limit(format!(
            "`{}` is a dense model of architecture `{}`, which is not supported",
            keys.file(),
            keys.architecture()?
        ))
        .hint("models with experts are read from GGUF files"));
    }
    Ok(s)
}

/// Base and scaling of the rotation.
fn rotation(keys: &Keys<'_>, s: &mut Settings) -> Result<()> {
    put(s, "rope_theta", keys.number(".rope.freq_base")?);
    const TYPE: &str = ".rope.scaling.type";
    let mut scaling = Settings::new();
    match keys.text(TYPE)?.unwrap_or("none") {
        kind @ ("linear" | "yarn") => put(&mut scaling, "rope_type", Some(kind)),
        // Its factors are tensors.
        "none" | "longrope" => return Ok(()),
        other => return Err(keys.unsupported(TYPE, other, &["none", "linear", "yarn", "longrope"])),
    }
    const ATTENTION: &str = ".rope.scaling.yarn_attn_factor";
    if let Some(factor) = keys.number(ATTENTION)?.filter(|factor| *factor != 1.0) {
        return Err(keys.unsupported(ATTENTION, &factor.to_string(), &["1"]));
    }
    for (from, to) in [
        (".rope.scaling.factor", "factor"),
        (".rope.scaling.original_context_length", "original_max_position_embeddings"),
        (".rope.scaling.yarn_beta_fast", "beta_fast"),
        (".rope.scaling.yarn_beta_slow", "beta_slow"),
    ] {
        put(&mut scaling, to, keys.number(from)?);
    }
    put(s, "rope_scaling", Some(scaling));
    Ok(())
}

/// First and last tokens of a text.
fn special_tokens(keys: &Keys<'_>, s: &mut Settings) -> Result<()> {
    put(s, "bos_token_id", keys.count("tokenizer.ggml.bos_token_id")?);
    let mut ends: Vec<u64> = Vec::new();
    for key in ["eos_token_id", "eot_token_id", "eom_token_id"] {
        ends.extend(keys.count(&format!("tokenizer.ggml.{key}"))?.filter(|id| !ends.contains(id)));
    }
    put(s, "eos_token_id", (!ends.is_empty()).then_some(ends));
    Ok(())
}

/// Names the architecture as `config.json` does.
fn of(s: &mut Settings, architecture: &str, family: &str) {
    s.insert("architectures".to_owned(), json!([architecture]));
    s.insert("model_type".to_owned(), family.into());
}

/// The width of experts where `config.json` calls it `intermediate_size`.
fn experts_are_intermediate(s: &mut Settings) {
    if let Some(width) = s.remove("moe_intermediate_size") {
        s.insert("intermediate_size".to_owned(), width);
    }
}

/// A window of attention, unless it is 0.
fn window(keys: &Keys<'_>) -> Result<Option<u64>> {
    Ok(keys.count(".attention.sliding_window")?.filter(|n| *n > 0))
}

/// Mixtral, which is a llama with experts.
pub(super) fn mixtral(model: &Model<'_>, s: &mut Settings) -> Result<()> {
    of(s, "MixtralForCausalLM", "mixtral");
    experts_are_intermediate(s);
    put(s, "sliding_window", window(&model.keys)?);
    if s.get("rope_theta").is_none() {
        put(s, "rope_theta", Some(10_000.0));
    }
    Ok(())
}

/// Qwen1.5-MoE and Qwen2-MoE: weights of experts are not renormalised.
pub(super) fn qwen2_moe(model: &Model<'_>, s: &mut Settings) -> Result<()> {
    of(s, "Qwen2MoeForCausalLM", "qwen2_moe");
    let width = model.keys.count(".expert_shared_feed_forward_length")?;
    let width = width.or_else(|| model.extent_of_any(".ffn_up_shexp.weight", 1).map(|n| n as u64));
    put(s, "shared_expert_intermediate_size", width);
    let norm = model.keys.flag(".expert_weights_norm")?.unwrap_or(false);
    put(s, "norm_topk_prob", Some(norm));
    put(s, "qkv_bias", Some(model.has("blk.0.attn_q.bias")));
    Ok(())
}

/// Qwen3-MoE: they are.
pub(super) fn qwen3_moe(model: &Model<'_>, s: &mut Settings) -> Result<()> {
    of(s, "Qwen3MoeForCausalLM", "qwen3_moe");
    let norm = model.keys.flag(".expert_weights_norm")?.unwrap_or(true);
    put(s, "norm_topk_prob", Some(norm));
    put(s, "attention_bias", Some(model.has("blk.0.attn_q.bias")));
    Ok(())
}

/// OLMoE: they are not.
pub(super) fn olmoe(model: &Model<'_>, s: &mut Settings) -> Result<()> {
    of(s, "OlmoeForCausalLM", "olmoe");
    experts_are_intermediate(s);
    put(s, "norm_topk_prob", Some(model.keys.flag(".expert_weights_norm")?.unwrap_or(false)));
    put(s, "clip_qkv", model.keys.number(".attention.clamp_kqv")?);
    Ok(())
}

/// DeepSeek-V2 and V3, told apart by how experts are scored.
pub(super) fn deepseek(model: &Model<'_>, s: &mut Settings) -> Result<()> {
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
    // Latents are what llama.cpp counts as one head of keys and values.
    let heads = s.get("num_attention_heads").cloned();
    put(s, "num_key_value_heads", heads);
    s.remove("head_dim");
    let rotated = keys.needed(".rope.dimension_count")?;
    let either = |mla: &str, plain: &str| match keys.count(mla)? {
        Some(n) => Ok(n),
        None => keys.needed(plain),
    };
    let key = either(".attention.key_length_mla", ".attention.key_length")?;
    put(s, "qk_rope_head_dim", Some(rotated));
    put(s, "qk_nope_head_dim", Some(key.saturating_sub(rotated)));
    put(s, "v_head_dim", Some(either(".attention.value_length_mla", ".attention.value_length")?));
    put(s, "kv_lora_rank", Some(keys.needed(".attention.kv_lora_rank")?));
    put(s, "q_lora_rank", keys.count(".attention.q_lora_rank")?.filter(|n| *n > 0));
    shared_and_groups(model, s)?;
    if !third {
        let several = s.get("n_group").and_then(Value::as_u64).is_some_and(|n| n > 1);
        put(s, "topk_method", Some(if several { "group_limited_greedy" } else { "greedy" }));
    }
    // 0.1 · `mscale_all_dim`, which is `mscale` in all that is published.
    if let (Some(log), Some(Value::Object(scaling))) =
        (keys.number(".rope.scaling.yarn_log_multiplier")?, s.get_mut("rope_scaling"))
    {
        let all = (log * 10.0) as f32;
        let all: f64 = all.to_string().parse().unwrap_or(all.into());
        put(scaling, "mscale", Some(all));
        put(scaling, "mscale_all_dim", Some(all));
    }
    Ok(())
}

/// Converters that left groups out, and what the models have that they wrote: the number of experts, groups, groups that are
/// kept (DeepSeek-V2, and V3 with R1). All others have one group.
const GROUPS: [(u64, u64, u64); 2] = [(160, 8, 3), (256, 8, 4)];

/// What DeepSeek's models and GLM-4.5 have in common.
fn shared_and_groups(model: &Model<'_>, s: &mut Settings) -> Result<()> {
    let keys = &model.keys;
    put(s, "first_k_dense_replace", Some(keys.count(".leading_dense_block_count")?.unwrap_or(0)));
    put(s, "n_shared_experts", Some(keys.count(".expert_shared_count")?.unwrap_or(0)));
    put(s, "routed_scaling_factor", Some(keys.number(".expert_weights_scale")?.unwrap_or(1.0)));
    put(s, "norm_topk_prob", Some(keys.flag(".expert_weights_norm")?.unwrap_or(false)));
    let experts = keys.count(".expert_count")?.unwrap_or(0);
    let known =
        GROUPS.iter().find(|(n, _, _)| *n == experts && keys.architecture().ok() == Some("deepseek2"));
    let (n, keep) = known.map_or((1, 1), |(_, n, keep)| (*n, *keep));
    put(s, "n_group", Some(keys.count(".expert_group_count")?.unwrap_or(n)));
    put(s, "topk_group", Some(keys.count(".expert_group_used_count")?.unwrap_or(keep)));
    Ok(())
}

/// GLM-4.5.
pub(super) fn glm4_moe(model: &Model<'_>, s: &mut Settings) -> Result<()> {
    of(s, "Glm4MoeForCausalLM", "glm4_moe");
    shared_and_groups(model, s)?;
    put(s, "attention_bias", Some(model.has("blk.0.attn_q.bias")));
    put(s, "use_qk_norm", Some(model.has("blk.0.attn_q_norm.weight")));
    let rotated = model.keys.count(".rope.dimension_count")?;
    let head = model.keys.count(".attention.key_length")?;
    if let (Some(rotated), Some(head @ 1..)) = (rotated, head) {
        put(s, "partial_rotary_factor", Some(rotated as f64 / head as f64));
    }
    Ok(())
}

/// Phi-3.5-MoE and its like.
pub(super) fn phimoe(model: &Model<'_>, s: &mut Settings) -> Result<()> {
    of(s, "PhimoeForCausalLM", "phimoe");
    experts_are_intermediate(s);
    // What converters write is hidden size by heads, which is not so in Phi-tiny and Phi-mini.
    s.remove("head_dim");
    put(s, "attention_bias", Some(model.has("blk.0.attn_q.bias")));
    put(s, "lm_head_bias", Some(model.has("output.bias")));
    put(s, "sliding_window", window(&model.keys)?);
    let [short, long] = FACTORS.map(|name| model.vector(name));
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

/// Numbers as JSON; what is not finite becomes `null`, which no key takes.
fn decimals(numbers: &[f32]) -> Vec<Value> {
    numbers.iter().map(|x| x.to_string().parse::<f64>().map_or(Value::Null, Value::from)).collect()
}

/// gpt-oss: a window in every second layer from the first on, and a ramp of YaRN that is not rounded.
pub(super) fn gpt_oss(model: &Model<'_>, s: &mut Settings) -> Result<()> {
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

/// SmallThinker: with a window, every fourth layer from the first on has neither it nor a rotation.
pub(super) fn smallthinker(model: &Model<'_>, s: &mut Settings) -> Result<()> {
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
