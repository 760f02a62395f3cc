//! Jamba: layers of Mamba, attention without rotation in every few layers, experts in every second layer.

use super::Family;
use crate::checkpoint::Checkpoint;
use crate::common::Base;
use crate::config::Config;
use crate::mixers::{GqaOptions, Mixer, Mixture, MoeNames, ScanSizes};
use crate::spec::ModelSpec;
use crate::tensors;
use crate::tensors::Dim;
use moec_base::error::{Error, Result};
use moec_ir::op::{Renorm, Score, WeightFrom};
use serde_json::Value;

pub(super) static FAMILY: Family = Family {
    name: "jamba",
    title: "Jamba",
    architectures: &["JambaForCausalLM"],
    examples: &["ai21labs/AI21-Jamba-1.5-Mini", "ai21labs/AI21-Jamba-1.5-Large"],
    read,
};

const NAMES: MoeNames = MoeNames {
    gate: "feed_forward.router",
    bias: None,
    experts: "feed_forward.experts",
    ..MoeNames::DEEPSEEK
};

/// Whether each layer is of a kind that recurs with a period and an offset, given by two keys; `usual` is the
/// default.
fn every(
    config: &Config,
    keys: [&'static str; 2],
    usual: [usize; 2],
) -> Result<impl Fn(usize) -> bool + use<>> {
    let period = config.opt_size(&[keys[0]])?.map_or(usual[0], |s| s.n);
    let offset = config.opt_count(&[keys[1]])?.map_or(usual[1], |s| s.n);
    if offset >= period {
        let [period_name, offset_name] = keys.map(|key| config.name(key));
        return Err(Error::input(format!(
            "{offset_name} is {offset}, not below {period_name}, which is {period}"
        )));
    }
    Ok(move |layer: usize| layer % period == offset)
}

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    let b = Base::read(config, checkpoint)?;
    let attends = every(config, ["attn_layer_period", "attn_layer_offset"], [8, 4])?;
    let sparse = every(config, ["expert_layer_period", "expert_layer_offset"], [2, 1])?;
    let moe = Mixture::of(&b, Score::Softmax, WeightFrom::Score, Renorm::None, NAMES)?;
    let channels = b.hidden.times(&config.size(&["mamba_expand"])?.into());
    let rank = match config.value("mamba_dt_rank") {
        Some(Value::String(auto)) if auto == "auto" => b.hidden.blocks(16),
        _ => config.size(&["mamba_dt_rank"])?.into(),
    };
    let sizes = ScanSizes {
        channels,
        state: config.size(&["mamba_d_state"])?.into(),
        rank,
        taps: tensors::taps(config, &["mamba_d_conv"])?,
        conv_bias: config.flag_or("mamba_conv_bias", true)?,
        bias: config.flag_or("mamba_proj_bias", false)?,
    };
    let inner = Dim::from(config.size(&["intermediate_size"])?);
    let attention = GqaOptions { rope: None, ..GqaOptions::default() };
    b.pre_norm_model(&FAMILY, ["input_layernorm", "pre_ff_layernorm"], |b, l| {
        let at = b.layer(l);
        let mixer: Mixer = if attends(l) {
            b.gqa(l, attention)?.into()
        } else {
            b.selective_scan(&format!("{at}.mamba"), &sizes)?.into()
        };
        // A single expert is a network without a router.
        let ffn = if sparse(l) && moe.experts.n > 1 {
            moe.moe(b, l)?.into()
        } else {
            b.mlp(&format!("{at}.feed_forward"), &inner, false)?.into()
        };
        Ok([mixer, ffn])
    })
}
