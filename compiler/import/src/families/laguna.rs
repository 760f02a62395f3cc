//! Laguna: heads gated by a softplus, with head counts by the kind of layer; sigmoid routing with a selection
//! bias.

use super::Family;
use crate::checkpoint::Checkpoint;
use crate::common::{Base, PRE_NORMS};
use crate::config::Config;
use crate::mixers::{Gated, Gating, GqaOptions, Mixture, MoeNames, QkNormKind};
use crate::rope;
use crate::spec::ModelSpec;
use moec_base::error::Result;
use moec_ir::op::{Renorm, Score, WeightFrom};
use serde_json::Value;

pub(super) static FAMILY: Family = Family {
    name: "laguna",
    title: "Laguna",
    architectures: &["LagunaForCausalLM"],
    examples: &["poolside/Laguna-XS.2"],
    read,
};

const NAMES: MoeNames = MoeNames {
    bias: Some("mlp.experts.e_score_correction_bias"),
    shared: "mlp.shared_expert",
    ..MoeNames::DEEPSEEK
};

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    let b = Base::read(config, checkpoint)?;
    let cap = config.number_or("moe_router_logit_softcapping", 0.0)?;
    if cap != 0.0 {
        return Err(config.unsupported("moe_router_logit_softcapping", cap, &["0"]));
    }
    let mut moe = Mixture::of(&b, Score::Sigmoid, WeightFrom::Score, Renorm::Sum { eps: 0.0 }, NAMES)?;
    moe.router.scale = config.number_or("moe_routed_scaling_factor", 1.0)? as f32;
    moe.shared = config.opt_size(&["shared_expert_intermediate_size"])?.map(Into::into);
    let per_head = match config.value("gating") {
        None | Some(Value::Bool(true)) => true,
        Some(Value::String(kind)) => kind == "per-head",
        Some(_) => false,
    };
    let heads = config.opt_ids("num_attention_heads_per_layer")?;
    let (dense, window) = (b.dense_layers(1)?, b.windows()?);
    b.pre_norm_model(&FAMILY, PRE_NORMS, |b, l| {
        let attention = GqaOptions {
            heads: heads.as_ref().and_then(|heads| heads.get(l)).map(|&n| n as usize),
            qk_norm: Some(QkNormKind::PerHead),
            gate: Some(Gated::Projected { name: "g_proj", per_head, by: Gating::Softplus }),
            window: window(l),
            rope: Some(rope::Defaults::of_window(window(l))),
            ..GqaOptions::default()
        };
        let ffn = if dense(l) { b.dense(l, false)? } else { moe.moe(b, l)?.into() };
        Ok([b.gqa(l, attention)?.into(), ffn])
    })
}
