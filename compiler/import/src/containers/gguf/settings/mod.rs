//! Conversion of the metadata to the keys of `config.json`.
//!
//! The metadata lacks values that llama.cpp has as constants of an architecture. They are given here as in
//! the published configurations.
//!
//! [`late`] has the architectures of 2026, [`early`] the earlier ones.

#![expect(clippy::cast_possible_truncation, reason = "models compute with their factors in f32")]

pub(super) mod early;
pub(super) mod late;

use super::architectures::Architecture;
use super::keys::Keys;
use crate::map::Map;
use indexmap::IndexMap;
use moec_base::error::{Error, Result};
use moec_gguf::Tensor;
use serde_json::{Map as Object, Value, json};

/// A configuration under construction.
pub(super) type Settings = Object<String, Value>;

/// Adds the keys that only one architecture has.
pub(super) type ExtraSettings = fn(&Model<'_>, &mut Settings) -> Result<()>;

/// A model's metadata and tensors.
pub(super) struct Model<'a> {
    pub(super) keys: Keys<'a>,
    /// Tensors by name, with the index of their file.
    pub(super) tensors: &'a IndexMap<&'a str, (usize, &'a Tensor<'a>)>,
    /// The files.
    pub(super) maps: &'a [Map],
}

impl Model<'_> {
    fn has(&self, tensor: &str) -> bool {
        self.tensors.contains_key(tensor)
    }

    /// An extent of a tensor; axes are counted from the last one.
    fn extent(&self, tensor: &str, back: usize) -> Option<usize> {
        self.tensors.get(tensor)?.1.shape.iter().rev().nth(back).copied()
    }

    /// An extent of the first tensor whose name has this suffix.
    fn extent_of_any(&self, end: &str, back: usize) -> Option<usize> {
        let name = self.tensors.keys().find(|name| name.ends_with(end))?;
        self.extent(name, back)
    }

    /// The elements of a vector.
    fn vector(&self, tensor: &str) -> Option<Vec<f32>> {
        let (file, t) = self.tensors.get(tensor)?;
        let ([n], Some(decode)) = (&t.shape[..], t.kind.decode) else { return None };
        let mut out = vec![0.0; *n];
        decode(self.maps.get(*file)?.get(t.bytes.clone())?, 0, &mut out);
        Some(out)
    }

    /// Number of layers. Layers for multi-token prediction, which come last, are not counted.
    fn layers(&self) -> Result<usize> {
        let all = self.keys.needed(".block_count")?;
        Ok(all.saturating_sub(self.keys.count(".nextn_predict_layers")?.unwrap_or(0)) as usize)
    }

    /// One value per layer, for at most 65536 layers.
    fn each<T>(&self, of: impl FnMut(usize) -> T) -> Result<Vec<T>> {
        Ok((0..self.layers()?.min(1 << 16)).map(of).collect())
    }

    /// Whether each layer has a tensor of this name.
    fn having(&self, tensor: &str) -> Result<Vec<bool>> {
        self.each(|l| self.has(&format!("blk.{l}.{tensor}")))
    }

    /// A number per layer: a list, or one number for all.
    fn by_layer(&self, key: &str) -> Result<Option<Vec<u64>>> {
        if self.keys.get(key).is_none_or(|v| v.as_array().is_none()) {
            return self.keys.count(key)?.map(|n| self.each(|_| n)).transpose();
        }
        let list = self.keys.counts(key)?.unwrap_or_default();
        let layers = self.layers()?;
        if list.len() < layers {
            return Err(Error::input(format!(
                "{} has {} values, but the model has {layers} layers",
                self.keys.name(key),
                list.len()
            ))
            .hint("the file is damaged, or was converted in an unknown way"));
        }
        Ok(Some(list.into_iter().take(layers).collect()))
    }

    /// A number for all layers. A list is refused, unless `uneven`; then its maximum is returned.
    fn of_layers(&self, key: &str, uneven: bool) -> Result<Option<u64>> {
        match self.keys.get(key).and_then(|v| v.as_array()) {
            Some(_) if uneven => Ok(self.by_layer(key)?.and_then(|list| list.into_iter().max())),
            Some(list) => Err(Error::limit(format!(
                "{} differs by layer ({} values), which is not supported",
                self.keys.name(key),
                list.len()
            ))),
            None => self.keys.count(key),
        }
    }

    /// A width: the value of a key, or else the rows of the first tensor with this suffix.
    fn width(&self, key: &str, end: &str) -> Result<Option<u64>> {
        Ok(self.keys.count(key)?.or_else(|| self.extent_of_any(end, 1).map(|n| n as u64)))
    }
}

/// Tensor of factors that divide the RoPE frequencies.
const ROPE_FREQS: &str = "rope_freqs.weight";

/// Adds a key if there is a value.
fn put(settings: &mut Settings, key: &str, value: Option<impl Into<Value>>) {
    if let Some(value) = value {
        settings.insert(key.to_owned(), value.into());
    }
}

/// Returns the configuration of a model of an architecture, with the architecture's own keys.
///
/// # Errors
/// Fails if keys are missing or invalid, or if the model is not supported.
pub(super) fn config(row: &Architecture, model: &Model<'_>) -> Result<Settings> {
    let keys = &model.keys;
    if model.has(ROPE_FREQS) && !row.rope_freqs {
        return Err(Error::limit(format!(
            "tensor `{ROPE_FREQS}` in `{}` changes the rotation in a way that is not supported",
            keys.file()
        )));
    }
    let mut s = Settings::new();
    let tokens = model.extent("token_embd.weight", 1).map(|n| n as u64);
    let tokens = tokens.map_or_else(|| keys.needed(".vocab_size"), Ok)?;
    put(&mut s, "vocab_size", Some(tokens));
    put(&mut s, "hidden_size", Some(keys.needed(".embedding_length")?));
    put(&mut s, "num_hidden_layers", Some(model.layers()? as u64));
    let of_layers = |key| model.of_layers(key, row.uneven);
    let heads = of_layers(".attention.head_count")?.ok_or_else(|| keys.missing(".attention.head_count"))?;
    put(&mut s, "num_attention_heads", Some(heads));
    put(&mut s, "num_key_value_heads", of_layers(".attention.head_count_kv")?);
    put(&mut s, "head_dim", keys.count(".attention.key_length")?);
    put(&mut s, "rms_norm_eps", keys.number(".attention.layer_norm_rms_epsilon")?);
    put(&mut s, "max_position_embeddings", Some(keys.needed(".context_length")?));
    put(&mut s, "tie_word_embeddings", Some(!model.has("output.weight")));
    put(&mut s, "num_experts", keys.count(".expert_count")?);
    put(&mut s, "num_experts_per_tok", keys.count(".expert_used_count")?);
    let inner = model.width(".expert_feed_forward_length", ".ffn_up_exps.weight")?;
    put(&mut s, "moe_intermediate_size", inner);
    put(&mut s, "intermediate_size", of_layers(".feed_forward_length")?);
    rotation(keys, &mut s)?;
    special_tokens(keys, &mut s)?;
    (row.settings)(model, &mut s)?;
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

/// Adds base and scaling of the rotation.
fn rotation(keys: &Keys<'_>, s: &mut Settings) -> Result<()> {
    put(s, "rope_theta", keys.number(".rope.freq_base")?);
    const TYPE: &str = ".rope.scaling.type";
    let mut scaling = Settings::new();
    match keys.text(TYPE)?.unwrap_or("none") {
        kind @ ("linear" | "yarn") => put(&mut scaling, "rope_type", Some(kind)),
        // LongRoPE's factors are tensors.
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

/// First and last tokens of texts.
fn special_tokens(keys: &Keys<'_>, s: &mut Settings) -> Result<()> {
    put(s, "bos_token_id", keys.count("tokenizer.ggml.bos_token_id")?);
    let mut ends: Vec<u64> = Vec::new();
    for key in ["eos_token_id", "eot_token_id", "eom_token_id"] {
        ends.extend(keys.count(&format!("tokenizer.ggml.{key}"))?.filter(|id| !ends.contains(id)));
    }
    put(s, "eos_token_id", (!ends.is_empty()).then_some(ends));
    Ok(())
}

/// Adds the architecture as `config.json` names it.
fn of(s: &mut Settings, architecture: &str, family: &str) {
    s.insert("architectures".to_owned(), json!([architecture]));
    s.insert("model_type".to_owned(), family.into());
}

/// Adds the width of experts, for families with it in `intermediate_size`.
fn experts_are_intermediate(s: &mut Settings) {
    if let Some(width) = s.remove("moe_intermediate_size") {
        s.insert("intermediate_size".to_owned(), width);
    }
}

/// Adds a window of attention, unless it is 0.
fn window(keys: &Keys<'_>) -> Result<Option<u64>> {
    Ok(keys.count(".attention.sliding_window")?.filter(|n| *n > 0))
}

/// Some converters did not write groups. The values for their models: number of experts, groups, and groups
/// that are kept (DeepSeek-V2, and V3 with R1). All other models have one group.
const GROUPS: [(u64, u64, u64); 2] = [(160, 8, 3), (256, 8, 4)];

/// Adds keys that DeepSeek's models and GLM-4.5 share.
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

/// Numbers as JSON. Infinities and NaN become `null`, which no key accepts.
fn decimals(numbers: &[f32]) -> Vec<Value> {
    numbers.iter().map(|x| decimal(*x)).collect()
}

/// The shortest decimal number with this f32 value.
fn decimal(x: f32) -> Value {
    x.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

/// Adds keys of multi-head latent attention, which llama.cpp describes as one wide KV head.
fn latents(model: &Model<'_>, s: &mut Settings) -> Result<()> {
    let keys = &model.keys;
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
    // The file has 0.1 · `mscale_all_dim`, which equals `mscale` in all published models.
    if let (Some(log), Some(Value::Object(scaling))) =
        (keys.number(".rope.scaling.yarn_log_multiplier")?, s.get_mut("rope_scaling"))
    {
        let all = decimal((log * 10.0) as f32);
        put(scaling, "mscale", Some(all.clone()));
        put(scaling, "mscale_all_dim", Some(all));
    }
    Ok(())
}

/// Fraction of a head's channels that is rotated, if the file has it.
fn partial(model: &Model<'_>) -> Result<Option<f64>> {
    let keys = &model.keys;
    let (rotated, head) = (keys.count(".rope.dimension_count")?, keys.count(".attention.key_length")?);
    Ok(rotated.zip(head).filter(|(_, head)| *head > 0).map(|(rotated, head)| rotated as f64 / head as f64))
}
