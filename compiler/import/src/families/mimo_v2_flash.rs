//! MiMo-V2-Flash: layers with a short window have sinks and twice the key-value heads; values are narrower
//! than keys.

use super::Family;
use crate::checkpoint::Checkpoint;
use crate::common::{Base, PRE_NORMS};
use crate::config::Config;
use crate::mixers::{GqaOptions, Mixture, MoeNames};
use crate::rope;
use crate::spec::ModelSpec;
use moec_base::error::Result;

pub(super) static FAMILY: Family = Family {
    name: "mimo_v2_flash",
    title: "MiMo-V2-Flash",
    architectures: &["MiMoV2FlashForCausalLM"],
    examples: &["XiaomiMiMo/MiMo-V2-Flash"],
    read,
};

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    let b = Base::read(config, checkpoint)?;
    let moe = Mixture::noaux_tc(&b, (1, 1), 1.0, MoeNames::DEEPSEEK)?;
    let dense = b.dense_layers(1)?;
    let pattern = config.opt_layout("hybrid_layer_pattern", b.layers)?;
    let of_types = b.windows()?;
    // The config's window does not include the token itself.
    let window = config
        .opt_size(&["sliding_window_size"])?
        .map(|s| s.n + 1)
        .or(config.opt_size(&["sliding_window"])?.map(|s| s.n));
    let slides = |l: usize| {
        pattern.as_ref().map_or_else(|| of_types(l).is_some(), |p| p.get(l).copied().unwrap_or(false))
    };
    let value = config.opt_size(&["v_head_dim"])?.map(|s| s.n);
    let scale = config.positive_or("attention_value_scale", 1.0)? as f32;
    b.pre_norm_model(&FAMILY, PRE_NORMS, |b, l| {
        let window = window.filter(|_| slides(l));
        let key =
            if window.is_some() && config.has("swa_rope_theta") { "swa_rope_theta" } else { "rope_theta" };
        let rope = rope::Defaults { partial: 0.334, key, ..rope::Defaults::of_window(window) };
        let attention = GqaOptions {
            kv_heads: window.map(|_| 2 * b.kv_heads.n),
            v_dim: value,
            v_scale: scale,
            window,
            sinks: window.map(|_| "attention_sink_bias"),
            rope: Some(rope),
            ..GqaOptions::default()
        };
        let ffn = if dense(l) { b.dense(l, false)? } else { moe.moe(b, l)?.into() };
        Ok([b.gqa(l, attention)?.into(), ffn])
    })
}
