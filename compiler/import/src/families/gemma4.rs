//! Gemma 4: the text part. A dense network next to the experts, each between norms. Full-attention layers
//! have wider heads, whose values are their keys.

use super::Family;
use crate::checkpoint::Checkpoint;
use crate::common::{Base, EXPERTS, PRE_NORMS, activation_of};
use crate::config::Config;
use crate::config::Size;
use crate::mixers::{Fused, GqaOptions, Mixer, Normed, PROJ, QkNormKind, RouterInput, plain_router};
use crate::rope;
use crate::spec::{Block, LayerSpec, ModelSpec};
use crate::tensors::Dim;
use moec_base::error::Result;
use moec_ir::op::{Renorm, Score, WeightFrom};
use moec_ir::{Glu, WeightExpr};

pub(super) static FAMILY: Family = Family {
    name: "gemma4",
    title: "Gemma 4",
    architectures: &["Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"],
    examples: &["google/gemma-4-26B-A4B-it"],
    read,
};

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    let text = config.opt_section("text_config")?;
    let config = text.as_ref().unwrap_or(config);
    only_plain(config)?;
    let glu = Glu::Gated(activation_of(config, "hidden_activation", "gelu_pytorch_tanh")?);
    let mut b = Base::read_with_glu(glu, config, checkpoint)?;
    b.tied = true;
    b.multipliers.embed = (b.hidden.n as f64).sqrt() as f32;
    b.logit_cap = config.opt_number("final_logit_softcapping")?.map(|cap| cap as f32);
    let (experts, k) = b.expert_counts_of(&EXPERTS, &["top_k_experts"])?;
    let inner = Dim::from(config.size(&["moe_intermediate_size"])?);
    let window = b.windows()?;
    let [heads, dims] = ["num_key_value_heads", "head_dim"].map(|key| of_layers(config, key, b.layers));
    let (heads, dims) = (heads?, dims?);
    let (wide_heads, wide_dim) =
        (config.opt_size(&["num_global_key_value_heads"])?, config.opt_size(&["global_head_dim"])?);
    let k_is_v = config.flag_or("attention_k_eq_v", false)?;
    let layers = b.each_layer(|l| {
        let (at, all) = (b.layer(l), window(l).is_none());
        let of = |list: &[Option<usize>], wide: Option<Size>| list[l].or(wide.filter(|_| all).map(|s| s.n));
        let attention = GqaOptions {
            kv_heads: of(&heads, wide_heads.filter(|_| k_is_v)),
            head_dim: of(&dims, wide_dim),
            qk_norm: Some(QkNormKind::PerHead),
            k_is_v: all && k_is_v,
            v_norm: true,
            window: window(l),
            rope: Some(rope::Defaults::of_window(window(l))),
            scale: Some(1.0),
            ..GqaOptions::default()
        };
        let router = plain_router(experts.n, k, Score::Softmax, WeightFrom::Score, Renorm::Sum { eps: 0.0 });
        let mut weights = b.experts(&format!("{at}.experts"), PROJ, Fused::OutIn, &experts, &inner, glu)?;
        // The result of each expert is multiplied by a factor of its own.
        let by = b.tensors.take(&format!("{at}.router.per_expert_scale"), &[&experts])?;
        weights.down = WeightExpr::ScaleMatrices { of: Box::new(weights.down), by: Box::new(by) };
        let mut moe = b.simple_moe(&format!("{at}.router.proj"), router, &experts, weights)?;
        let scale = b.tensors.take(&format!("{at}.router.scale"), &[&b.hidden])?;
        moe.logits.weight = WeightExpr::ScaleCols { of: Box::new(moe.logits.weight), by: Box::new(scale) };
        moe.router_reads = RouterInput::Block { eps: b.eps, to: (b.hidden.n as f64).powf(-0.5) as f32 };
        let norm = |name: &str| b.rms_norm(&format!("{at}.{name}"));
        let normed = |[before, after]: [&str; 2], mixer| -> Result<Mixer> {
            Ok(Normed { before: norm(before)?, mixer, after: norm(after)? }.into())
        };
        let mixers = vec![
            normed(["pre_feedforward_layernorm", "post_feedforward_layernorm_1"], b.dense(l, false)?)?,
            normed(["pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"], moe.into())?,
        ];
        let post_norm = Some(norm("post_feedforward_layernorm")?);
        let scale = b.tensors.take_if(
            b.tensors.has(&format!("{at}.layer_scalar")),
            &format!("{at}.layer_scalar"),
            &[&Dim::new(1, "a factor of the layer")],
        )?;
        Ok(LayerSpec {
            blocks: vec![
                b.sandwich(l, PRE_NORMS, b.gqa(l, attention)?.into())?,
                Block { norm: None, mixers, post_norm },
            ],
            scale: scale.map(|of| WeightExpr::Repeat { each: b.hidden.n, of: Box::new(of) }),
        })
    })?;
    let norm = b.final_norm()?;
    b.finish(&FAMILY, layers, norm, false)
}

/// A size of each layer, from `per_layer_config`.
fn of_layers(config: &Config, key: &'static str, layers: usize) -> Result<Vec<Option<usize>>> {
    let Some(all) = config.opt_section("per_layer_config")? else { return Ok(vec![None; layers]) };
    let of = |l: usize| match all.opt_section(&l.to_string())? {
        Some(layer) => Ok(layer.opt_size(&[key])?.map(|s| s.n)),
        None => Ok(None),
    };
    (0..layers).map(of).collect()
}

/// Refuses features of the family's smaller models.
fn only_plain(config: &Config) -> Result<()> {
    for key in ["hidden_size_per_layer_input", "num_kv_shared_layers"] {
        if let Some(n) = config.opt_count(&[key])?.filter(|s| s.n > 0) {
            return Err(config.unsupported(key, n.n, &["0"]));
        }
    }
    for (key, usual) in [("enable_moe_block", true), ("use_double_wide_mlp", false)] {
        if config.flag_or(key, usual)? != usual {
            return Err(config.unsupported(key, !usual, &[if usual { "true" } else { "false" }]));
        }
    }
    Ok(())
}
