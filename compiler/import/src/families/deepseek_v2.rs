//! DeepSeek-V2: latent attention, softmax routing that may be limited to groups, shared experts.

use super::Family;
use crate::checkpoint::Checkpoint;
use crate::common::{Base, PRE_NORMS};
use crate::config::Config;
use crate::mixers::{Fused, MlaOptions, PROJ, Shared, dense_first, plain_router};
use crate::spec::ModelSpec;
use crate::tensors::Dim;
use moec_base::error::Result;
use moec_ir::RopeStyle;
use moec_ir::op::{GroupScore, Groups, Renorm, Score, WeightFrom};

pub(super) static FAMILY: Family = Family {
    name: "deepseek_v2",
    title: "DeepSeek-V2",
    architectures: &["DeepseekV2ForCausalLM"],
    examples: &["deepseek-ai/DeepSeek-V2-Lite-Chat", "deepseek-ai/DeepSeek-V2-Chat"],
    read,
};

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    let b = Base::read(config, checkpoint)?;
    let (experts, k) = b.expert_counts()?;
    let inner = Dim::from(config.size(&["moe_intermediate_size"])?);
    let scoring = config.opt_text("scoring_func")?.unwrap_or("softmax");
    if scoring != "softmax" {
        return Err(config.unsupported("scoring_func", scoring, &["softmax"]));
    }
    // transformers ignores this key, and DeepSeek's own code renormalises; no checkpoint sets it.
    if config.flag_or("norm_topk_prob", false)? {
        return Err(config.unsupported("norm_topk_prob", true, &["false"]));
    }
    let mut router = plain_router(experts.n, k, Score::Softmax, WeightFrom::Score, Renorm::None);
    router.scale = config.number_or("routed_scaling_factor", 1.0)? as f32;
    match config.opt_text("topk_method")?.unwrap_or("greedy") {
        "greedy" => {}
        "group_limited_greedy" => {
            let (n, keep) = (config.size(&["n_group"])?.n, config.size(&["topk_group"])?.n);
            let groups = Groups { n, keep, score: GroupScore::Max, mask_neg_inf: false };
            router.groups = b.groups(groups, &experts, k)?;
        }
        other => return Err(config.unsupported("topk_method", other, &["greedy", "group_limited_greedy"])),
    }
    let shared = config.opt_count(&["n_shared_experts"])?.filter(|s| s.n > 0);
    let dense = dense_first(config, 0)?;
    let mlp_bias = config.flag_or("mlp_bias", false)?;
    b.pre_norm_model(&FAMILY, PRE_NORMS, |b, l| {
        let at = b.layer(l);
        let ffn = if dense(l) {
            b.dense(l, mlp_bias)?
        } else {
            let read =
                b.experts(&format!("{at}.mlp.experts"), PROJ, Fused::OutIn, &experts, &inner, b.glu)?;
            let mut moe = b.simple_moe(&format!("{at}.mlp.gate"), router.clone(), &experts, read)?;
            if let Some(n) = shared {
                let mlp = b.mlp(&format!("{at}.mlp.shared_experts"), &inner.times(&n.into()), mlp_bias)?;
                moe.shared = Some(Shared { mlp, gate: None });
            }
            moe.into()
        };
        Ok([b.mla(l, MlaOptions::of(RopeStyle::Interleaved))?.into(), ffn])
    })
}
