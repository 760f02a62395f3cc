//! Qwen3-MoE: query and key normalised per head, head width independent of the hidden size.

use super::Family;
use crate::checkpoint::Checkpoint;
use crate::common::{Base, PRE_NORMS};
use crate::config::Config;
use crate::mixers::{Fused, GqaOptions, PROJ, QkNormKind, plain_router, renorm, sparse_layers};
use crate::spec::ModelSpec;
use moec_base::error::Result;
use moec_ir::op::{Score, WeightFrom};

pub(super) static FAMILY: Family = Family {
    name: "qwen3_moe",
    title: "Qwen3-MoE",
    architectures: &["Qwen3MoeForCausalLM"],
    examples: &["Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B"],
    read,
};

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    let b = Base::read(config, checkpoint)?;
    let (experts, k) = b.expert_counts()?;
    let inner = config.size(&["moe_intermediate_size"])?.into();
    let renorm = renorm(config.flag_or("norm_topk_prob", false)?);
    let sparse = sparse_layers(config)?;
    let bias = config.flag_or("attention_bias", false)?;
    let window = if config.flag_or("use_sliding_window", false)? {
        config.opt_size(&["sliding_window"])?
    } else {
        None
    };
    let attention = GqaOptions {
        qkv_bias: bias,
        o_bias: bias,
        qk_norm: Some(QkNormKind::PerHead),
        window: window.map(|s| s.n),
        ..GqaOptions::default()
    };
    b.pre_norm_model(&FAMILY, PRE_NORMS, |b, l| {
        let at = b.layer(l);
        let ffn = if sparse(l) {
            let router = plain_router(experts.n, k, Score::Softmax, WeightFrom::Score, renorm);
            let read =
                b.experts(&format!("{at}.mlp.experts"), PROJ, Fused::OutIn, &experts, &inner, b.glu)?;
            b.simple_moe(&format!("{at}.mlp.gate"), router, &experts, read)?.into()
        } else {
            b.dense(l, false)?
        };
        Ok([b.gqa(l, attention)?.into(), ffn])
    })
}
