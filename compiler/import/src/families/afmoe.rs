//! Trinity: norms before and after each block, gated attention, full-attention layers without a rotation.

use super::Family;
use crate::checkpoint::Checkpoint;
use crate::common::Base;
use crate::config::Config;
use crate::mixers::{Gated, Gating, GqaOptions, Mixture, MoeNames, QkNormKind};
use crate::rope;
use crate::spec::{LayerSpec, ModelSpec};
use moec_base::error::Result;

pub(super) static FAMILY: Family = Family {
    name: "afmoe",
    title: "Trinity",
    architectures: &["AfmoeForCausalLM"],
    examples: &["arcee-ai/Trinity-Mini", "arcee-ai/Trinity-Nano-Preview"],
    read,
};

const NAMES: MoeNames =
    MoeNames { gate: "mlp.router.gate", bias: Some("mlp.expert_bias"), ..MoeNames::DEEPSEEK };

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    let mut b = Base::read(config, checkpoint)?;
    if config.flag_or("mup_enabled", false)? {
        b.multipliers.embed = (b.hidden.n as f64).sqrt() as f32;
    }
    let moe = Mixture::noaux_tc(&b, (1, 1), 1.0, NAMES)?;
    let (dense, window) = (b.dense_layers(0)?, b.windows()?);
    let layers = b.each_layer(|l| {
        let attention = GqaOptions {
            qk_norm: Some(QkNormKind::PerHead),
            gate: Some(Gated::Projected { name: "gate_proj", per_head: false, by: Gating::Sigmoid }),
            window: window(l),
            rope: window(l).map(|_| rope::Defaults::default()),
            ..GqaOptions::default()
        };
        let ffn = if dense(l) { b.dense(l, false)? } else { moe.moe(&b, l)?.into() };
        Ok(LayerSpec {
            blocks: vec![
                b.sandwich(l, ["input_layernorm", "post_attention_layernorm"], b.gqa(l, attention)?.into())?,
                b.sandwich(l, ["pre_mlp_layernorm", "post_mlp_layernorm"], ffn)?,
            ],
            scale: None,
        })
    })?;
    let norm = b.final_norm()?;
    b.finish(&FAMILY, layers, norm, false)
}
