//! LongCat-Flash: a layer of the checkpoint is two here, each with latent attention and a network. Experts,
//! some of which compute nothing, read the first network's input, and their result is added after the second
//! network.

use super::Family;
use crate::checkpoint::Checkpoint;
use crate::common::{Base, EXPERTS};
use crate::config::Config;
use crate::mixers::{Fused, Mixer, MlaOptions, Moe, PROJ, Shared, plain_router};
use crate::spec::{LayerSpec, ModelSpec};
use crate::tensors::Dim;
use moec_base::error::Result;
use moec_ir::op::{Renorm, Score, WeightFrom};
use moec_ir::{RopeStyle, RouterDesc};
use serde_json::json;

pub(super) static FAMILY: Family = Family {
    name: "longcat_flash",
    title: "LongCat-Flash",
    architectures: &["LongcatFlashForCausalLM"],
    examples: &["meituan-longcat/LongCat-Flash-Chat"],
    read,
};

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    for (key, usual) in [
        ("zero_expert_type", json!("identity")),
        ("router_bias", json!(false)),
        ("norm_topk_prob", json!(false)),
        ("attention_method", json!("MLA")),
    ] {
        if let Some(other) = config.value(key).filter(|value| **value != usual) {
            return Err(config.unsupported(key, format_args!("{other}"), &[&usual.to_string()]));
        }
    }
    let b = Base::read(config, checkpoint)?;
    let zero = config.opt_count(&["zero_expert_num"])?.filter(|s| s.n > 0);
    let (experts, k) = b.expert_counts_of(&EXPERTS, &["moe_topk"])?;
    let all = zero.map_or_else(|| experts.clone(), |zero| experts.plus(&zero.into()));
    let router = RouterDesc {
        zero: zero.map(|s| s.n),
        select_bias: true,
        scale: config.number_or("routed_scaling_factor", 1.0)? as f32,
        ..plain_router(experts.n, k, Score::Softmax, WeightFrom::Score, Renorm::None)
    };
    let inner = Dim::from(config.size(&["expert_ffn_hidden_size"])?);
    let wide = Dim::from(config.size(&["ffn_hidden_size"])?);
    let factor = |switch: &str, rank: &'static str| -> Result<f32> {
        let on = config.flag_or(switch, true)?;
        let rank = config.opt_size(&[rank])?.filter(|_| on);
        Ok(rank.map_or(1.0, |rank| (b.hidden.n as f64 / rank.n as f64).sqrt() as f32))
    };
    let factors = [factor("mla_scale_q_lora", "q_lora_rank")?, factor("mla_scale_kv_lora", "kv_lora_rank")?];
    let attention = MlaOptions { factors, ..MlaOptions::of(RopeStyle::Interleaved) };
    let mut layers = Vec::new();
    for l in 0..b.layers {
        let at = b.layer(l);
        let norms = |half: usize| -> Result<_> {
            let norm = |name: &str| b.rms_norm(&format!("{at}.{name}.{half}"));
            Ok([norm("input_layernorm")?, norm("post_attention_layernorm")?])
        };
        let [own, next] = ["mlps.0", "mlps.1"].map(|name| b.mlp(&format!("{at}.{name}"), &wide, false));
        let read = b.experts(&format!("{at}.mlp.experts"), PROJ, Fused::OutIn, &experts, &inner, b.glu)?;
        let moe = b.simple_moe(&format!("{at}.mlp.router.classifier"), router.clone(), &all, read)?;
        let bias = b.tensors.take_squeezed(&format!("{at}.mlp.router.e_score_correction_bias"), &[&all])?;
        let moe = Moe {
            reads_previous_layer: true,
            select_bias: Some(bias),
            shared: Some(Shared { mlp: next?, gate: None }),
            ..moe
        };
        let channels: [Mixer; 2] = [own?.into(), moe.into()];
        for (half, (name, channels)) in ["self_attn.0", "self_attn.1"].into_iter().zip(channels).enumerate() {
            let [first, second] = norms(half)?;
            let tokens = b.mla(l, MlaOptions { at: name, ..attention })?.into();
            layers.push(LayerSpec::pre_norm([(first, tokens), (second, channels)]));
        }
    }
    let norm = b.final_norm()?;
    b.finish(&FAMILY, layers, norm, false)
}
