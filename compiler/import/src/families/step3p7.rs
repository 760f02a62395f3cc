//! Step 3.5 and 3.7: the text part. Layers with a window have another number of heads, heads are gated, and
//! activations of networks have bounds for each layer.

use super::Family;
use crate::checkpoint::Checkpoint;
use crate::common::{Base, PRE_NORMS, only_act};
use crate::config::Config;
use crate::mixers::{Gated, Gating, GqaOptions, Mixture, Mlp, MoeNames, PROJ, QkNormKind};
use crate::rope;
use crate::spec::ModelSpec;
use moec_base::error::Result;
use moec_ir::Glu;
use moec_ir::op::{Renorm, Score, WeightFrom};
use serde_json::{Value, json};

pub(super) static FAMILY: Family = Family {
    name: "step3p7",
    title: "Step 3.5 and 3.7",
    architectures: &["Step3p7ForConditionalGeneration", "Step3p5ForCausalLM"],
    examples: &["stepfun-ai/Step-3.7-Flash"],
    read,
};

const NAMES: MoeNames = MoeNames {
    gate: "moe.gate",
    bias: Some("moe.router_bias"),
    experts: "moe",
    parts: PROJ,
    shared: "share_expert",
};

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    let config = &rope::by_kind(config.opt_section("text_config")?.unwrap_or_else(|| config.clone()))?;
    only_act(config, &["silu"])?;
    for (key, usual) in [
        ("use_moe", json!(true)),
        ("use_moe_router_bias", json!(true)),
        ("use_head_wise_attn_gate", json!(true)),
        ("use_qk_norm", json!(true)),
        ("use_mfa", json!(false)),
        ("sink", json!(false)),
        ("use_rope_layers", json!([])),
        ("yarn_only_types", json!(["full_attention"])),
        ("moe_router_activation", json!("sigmoid")),
    ] {
        if let Some(other) = config.value(key).filter(|value| **value != usual) {
            return Err(config.unsupported(key, format_args!("{other}"), &[&usual.to_string()]));
        }
    }
    let mut b = Base::read(config, checkpoint)?;
    b.zero_centred = true;
    let mut moe = Mixture::of(&b, Score::Sigmoid, WeightFrom::Score, Renorm::Sum { eps: 0.0 }, NAMES)?;
    moe.router.scale = config.number_or("moe_router_scaling_factor", 1.0)? as f32;
    moe.shared = Some(config.size(&["share_expert_dim"])?.into());
    let (window, dense) = (b.windows()?, dense(&b)?);
    let other = config.opt_section("attention_other_setting")?;
    let of_other = |key| other.as_ref().map(|c| c.opt_size(&[key])).transpose().map(Option::flatten);
    let heads = config.opt_size(&["num_sliding_attention_heads"])?.or(of_other("num_attention_heads")?);
    let (groups, dim) = (of_other("num_attention_groups")?, of_other("head_dim")?);
    let scale = config.opt_number("query_pre_attn_scalar")?.map(|n| n.powf(-0.5) as f32);
    let [routed, shared] = ["swiglu_limits", "swiglu_limits_shared"].map(|key| limits(config, key, b.layers));
    let (routed, shared) = (routed?, shared?);
    b.pre_norm_model(&FAMILY, PRE_NORMS, |b, l| {
        let window = window(l);
        let attention = GqaOptions {
            heads: heads.filter(|_| window.is_some()).map(|s| s.n),
            kv_heads: groups.filter(|_| window.is_some()).map(|s| s.n),
            head_dim: dim.filter(|_| window.is_some()).map(|s| s.n),
            qk_norm: Some(QkNormKind::PerHead),
            gate: Some(Gated::Projected { name: "g_proj", per_head: true, by: Gating::Sigmoid }),
            window,
            rope: Some(rope::Defaults::of_window(window)),
            scale,
            ..GqaOptions::default()
        };
        let ffn = if dense(l) {
            let inner = config.size(&["intermediate_size"])?.into();
            Mlp { glu: shared[l], ..b.mlp(&format!("{}.mlp", b.layer(l)), &inner, false)? }.into()
        } else {
            moe.moe_with_glu(b, l, [routed[l], shared[l]])?.into()
        };
        Ok([b.gqa(l, attention)?.into(), ffn])
    })
}

/// Whether each layer is dense: by `mlp_layer_types`, or all that `moe_layers_enum` does not name.
fn dense(b: &Base<'_>) -> Result<impl Fn(usize) -> bool + use<>> {
    const KEY: &str = "moe_layers_enum";
    let of_types = b.dense_layers(0)?;
    let list =
        b.config.opt_text(KEY)?.map(|list| list.split(',').map(|n| n.trim().parse::<usize>()).collect());
    let list: Option<Vec<usize>> =
        list.transpose().map_err(|_| b.config.unfit(KEY, "numbers of layers with commas between them"))?;
    Ok(move |l: usize| list.as_ref().map_or_else(|| of_types(l), |sparse| !sparse.contains(&l)))
}

/// Functions that combine gate and up in each layer's networks, with a bound if the list has a number above
/// 0.
fn limits(config: &Config, key: &str, layers: usize) -> Result<Vec<Glu>> {
    const SILU: Glu = Glu::Gated(moec_ir::Activation::Silu);
    let Some(list) = config.value(key) else { return Ok(vec![SILU; layers]) };
    let of = |limit: &Value| match limit.as_f64() {
        None if limit.is_null() => Some(SILU),
        Some(0.0) => Some(SILU),
        limit => limit.filter(|x| *x > 0.0).map(|limit| Glu::Limited { limit: limit as f32 }),
    };
    let all = list.as_array().and_then(|list| list.iter().map(of).collect::<Option<Vec<_>>>());
    all.filter(|all| all.len() >= layers)
        .ok_or_else(|| config.unfit(key, "a number of at least 0, or null, for each layer"))
}
