//! Llama 4: the text part. Rotated layers see only their own chunk of tokens. The others have full attention,
//! with a position-dependent factor on queries. The weight of a token's expert multiplies the expert's input.

use super::Family;
use crate::checkpoint::Checkpoint;
use crate::common::{Base, PRE_NORMS};
use crate::config::Config;
use crate::mixers::{Fused, GqaOptions, Mixer, Moe, PROJ, QkNormKind, Shared, Temperature, plain_router};
use crate::rope;
use crate::spec::ModelSpec;
use crate::tensors::Dim;
use moec_base::error::Result;
use moec_ir::RopeStyle;
use moec_ir::op::{Renorm, Score, WeightFrom};
use serde_json::Value;

pub(super) static FAMILY: Family = Family {
    name: "llama4",
    title: "Llama 4",
    architectures: &["Llama4ForCausalLM", "Llama4ForConditionalGeneration"],
    examples: &["meta-llama/Llama-4-Scout-17B-16E-Instruct", "meta-llama/Llama-4-Maverick-17B-128E-Instruct"],
    read,
};

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    let text = config.opt_section("text_config")?;
    let config = text.as_ref().unwrap_or(config);
    let b = Base::read(config, checkpoint)?;
    let (experts, k) = b.expert_counts()?;
    if k != 1 {
        return Err(config.unsupported("num_experts_per_tok", k, &["1"]));
    }
    let router = plain_router(experts.n, k, Score::Identity, WeightFrom::SigmoidTopk, Renorm::None);
    let inner = Dim::from(config.size(&["intermediate_size"])?);
    let (rotated, sparse) = (rotated(config, b.layers)?, sparse(config)?);
    const KINDS: [&str; 2] = ["chunked_attention", "full_attention"];
    let kinds = config.has("layer_types").then(|| b.is_first_kind(KINDS)).transpose()?;
    let chunk = config.opt_size(&["attention_chunk_size"])?.map(|s| s.n);
    let temperature = temperature(config)?;
    let bias = config.flag_or("attention_bias", false)?;
    let qk_norm = config.flag_or("use_qk_norm", true)?;
    b.pre_norm_model(&FAMILY, PRE_NORMS, |b, l| {
        let at = format!("{}.feed_forward", b.layer(l));
        let rotated = rotated(l);
        let chunked = kinds.as_ref().map_or(rotated, |chunked| chunked(l));
        let attention = GqaOptions {
            qkv_bias: bias,
            o_bias: bias,
            qk_norm: (qk_norm && rotated).then_some(QkNormKind::Plain),
            norm_rotated: true,
            window: chunk.filter(|_| chunked),
            chunked,
            temperature: temperature.filter(|_| !rotated),
            rope: rotated.then(|| rope::Defaults { theta: 500_000.0, ..rope::Defaults::default() }),
            style: RopeStyle::Interleaved,
            ..GqaOptions::default()
        };
        let ffn: Mixer = if sparse(l) {
            let read = b.experts(&format!("{at}.experts"), PROJ, Fused::OutIn, &experts, &inner, b.glu)?;
            let moe = b.simple_moe(&format!("{at}.router"), router.clone(), &experts, read)?;
            let mlp = b.mlp(&format!("{at}.shared_expert"), &inner, false)?;
            Moe { weighs_input: true, shared: Some(Shared { mlp, gate: None }), ..moe }.into()
        } else {
            b.mlp(&at, &config.size(&["intermediate_size_mlp"])?.into(), false)?.into()
        };
        Ok([b.gqa(l, attention)?.into(), ffn])
    })
}

/// Whether each layer has rotation: those with 1 in `no_rope_layers`, or all but every n-th if the list is
/// empty.
fn rotated(config: &Config, layers: usize) -> Result<impl Fn(usize) -> bool + use<>> {
    const LIST: &str = "no_rope_layers";
    let empty = config.value(LIST).and_then(Value::as_array).is_none_or(Vec::is_empty);
    let list = if empty { None } else { config.opt_layout(LIST, layers)? };
    let every = config.opt_size(&["no_rope_layer_interval"])?.map_or(4, |s| s.n);
    Ok(move |l: usize| match &list {
        Some(list) => list.get(l).copied().unwrap_or(true),
        None => !(l + 1).is_multiple_of(every),
    })
}

/// Whether each layer has experts: those of `moe_layers`, or every n-th.
fn sparse(config: &Config) -> Result<impl Fn(usize) -> bool + use<>> {
    let list = config.opt_ids("moe_layers")?;
    let every = config.opt_size(&["interleave_moe_layer_step"])?.map_or(1, |s| s.n);
    Ok(move |l: usize| match &list {
        Some(list) => list.iter().any(|&n| n as usize == l),
        None => (l + 1).is_multiple_of(every),
    })
}

/// The factor on queries of layers without rotation. `attn_temperature_tuning` is a Boolean or a number.
fn temperature(config: &Config) -> Result<Option<Temperature>> {
    const SWITCH: &str = "attn_temperature_tuning";
    let on = match config.value(SWITCH) {
        Some(Value::Number(n)) => n.as_f64() != Some(0.0),
        _ => config.flag_or(SWITCH, true)?,
    };
    let beta = config.number_or("attn_scale", 0.1)? as f32;
    let every = config.opt_size(&["floor_scale"])?.map_or(8192, |s| s.n);
    Ok(on.then_some(Temperature { beta, every, offset: 1 }))
}
