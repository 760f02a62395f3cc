//! gpt-oss: attention sinks, every second layer with a sliding window, experts with biases and a clamped
//! activation, usually stored as MXFP4.

use super::Family;
use crate::checkpoint::Checkpoint;
use crate::common::{Base, PRE_NORMS};
use crate::config::Config;
use crate::mixers::{Fused, GqaOptions, Moe, PROJ, RouterInput, plain_router};
use crate::rope;
use crate::spec::ModelSpec;
use moec_base::error::{Error, Result};
use moec_ir::Glu;
use moec_ir::op::{Renorm, Score, WeightFrom};

pub(super) static FAMILY: Family = Family {
    name: "gpt_oss",
    title: "gpt-oss",
    architectures: &["GptOssForCausalLM"],
    examples: &["openai/gpt-oss-20b", "openai/gpt-oss-120b"],
    read,
};

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    let b = Base::read(config, checkpoint)?;
    if !config.has("rope_scaling") && !config.has("rope_parameters") {
        return Err(Error::input(format!(
            "{} and `rope_parameters` are both absent",
            config.name("rope_scaling")
        ))
        .hint("the file may be damaged; download it again"));
    }
    let (experts, k) = b.expert_counts()?;
    let inner = config.size(&["intermediate_size"])?.into();
    let bias = config.flag_or("attention_bias", true)?;
    let window = config.opt_size(&["sliding_window"])?.map(|s| s.n);
    let types = config.opt_texts("layer_types")?;
    let slides = |l: usize| match &types {
        Some(types) => types.get(l).is_some_and(|t| t == "sliding_attention"),
        None => l.is_multiple_of(2),
    };
    // Older configs do not have alpha; all known limits are 7.
    let glu = Glu::Clamped {
        alpha: config.positive_or("swiglu_alpha", 1.702)? as f32,
        limit: config.positive_or("swiglu_limit", 7.0)? as f32,
    };
    b.pre_norm_model(&FAMILY, PRE_NORMS, |b, l| {
        let at = b.layer(l);
        let attention = GqaOptions {
            qkv_bias: bias,
            o_bias: bias,
            window: window.filter(|_| slides(l)),
            sinks: Some("sinks"),
            rope: Some(rope::Defaults { theta: 150_000.0, ..rope::Defaults::default() }),
            ..GqaOptions::default()
        };
        let router = plain_router(experts.n, k, Score::Identity, WeightFrom::SoftmaxTopk, Renorm::None);
        let moe = Moe {
            router,
            router_reads: RouterInput::Experts,
            weighs_input: false,
            reads_previous_layer: false,
            logits: b.router(&format!("{at}.mlp.router"), &experts, true)?,
            select_bias: None,
            latent: None,
            experts: b.experts(&format!("{at}.mlp.experts"), PROJ, Fused::InOut, &experts, &inner, glu)?,
            shared: None,
            sum_scale: 1.0,
        };
        Ok([b.gqa(l, attention)?.into(), moe.into()])
    })
}
