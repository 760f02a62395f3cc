//! Granite 4: layers of Mamba-2 and of attention, with an expert for every token next to the others.

use super::Family;
use super::granitemoe::{attention, mixture, multiplied};
use super::granitemoeshared::shared;
use crate::checkpoint::Checkpoint;
use crate::common::{Base, PRE_NORMS};
use crate::config::Config;
use crate::mixers::{GqaOptions, Mixer, Moe, StateSpaceSizes};
use crate::spec::ModelSpec;
use crate::tensors;
use crate::tensors::Dim;
use moec_base::error::Result;
use serde_json::Value;

pub(super) static FAMILY: Family = Family {
    name: "granitemoehybrid",
    title: "Granite 4",
    architectures: &["GraniteMoeHybridForCausalLM"],
    examples: &["ibm-granite/granite-4.0-h-small", "ibm-granite/granite-4.0-h-tiny"],
    read,
};

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    let b = multiplied(Base::read(config, checkpoint)?)?;
    let (attention, moe) = (attention(&b)?, mixture(&b)?);
    let rotated = config.opt_text("position_embedding_type")? == Some("rope");
    let attention = GqaOptions { rope: attention.rope.filter(|_| rotated), ..attention };
    const KINDS: [&str; 2] = ["linear_attention", "full_attention"];
    const PUBLISHED: [&str; 2] = ["mamba", "attention"];
    let published =
        config.opt_texts("layer_types")?.is_some_and(|t| t.iter().any(|t| PUBLISHED.contains(&t.as_str())));
    let folds = b.is_first_kind(if published { PUBLISHED } else { KINDS })?;
    let heads = Dim::from(config.size(&["mamba_n_heads"])?);
    let wide = b.hidden.times(&config.size(&["mamba_expand"])?.into());
    let dim = match config.value("mamba_d_head").and_then(Value::as_u64) {
        Some(_) => config.size(&["mamba_d_head"])?.into(),
        None => Dim::new(wide.n / heads.n, format!("{} / {}", wide.why, heads.why)),
    };
    let sizes = StateSpaceSizes {
        heads,
        dim,
        groups: config.size(&["mamba_n_groups"])?.into(),
        state: config.size(&["mamba_d_state"])?.into(),
        taps: tensors::taps(config, &["mamba_d_conv"])?,
        conv_bias: config.flag_or("mamba_conv_bias", true)?,
        bias: config.flag_or("mamba_proj_bias", false)?,
    };
    b.pre_norm_model(&FAMILY, PRE_NORMS, |b, l| {
        let mixer: Mixer = if folds(l) {
            b.state_space(&format!("{}.mamba", b.layer(l)), &sizes)?.into()
        } else {
            b.gqa(l, attention)?.into()
        };
        Ok([mixer, Moe { shared: shared(b, l)?, ..moe.moe(b, l)? }.into()])
    })
}
