//! SmallThinker (arXiv 2507.20984): experts with ReGLU; layers without rotation, and layers with a sliding
//! window. The router reads the stream before the layer, before any norm.
//!
//! Routing weights are a softmax of the chosen experts' logits, or sigmoids divided by their sum. Both grow
//! with the logit, so experts are chosen by logits: in f32, sigmoids of large logits are equal. Published
//! configs have `norm_topk_prob`, but the published code does not use it, so it is ignored.

use super::Family;
use crate::checkpoint::Checkpoint;
use crate::common::{Base, PRE_NORMS, only_act};
use crate::config::Config;
use crate::mixers::{Fused, GqaOptions, Moe, PROJ, Parts, RouterInput, plain_router};
use crate::rope;
use crate::spec::ModelSpec;
use moec_base::error::{Error, Result};
use moec_ir::op::{Renorm, Score, WeightFrom};
use moec_ir::{Activation, Glu};

pub(super) static FAMILY: Family = Family {
    name: "smallthinker",
    title: "SmallThinker",
    architectures: &["SmallThinkerForCausalLM", "SmallthinkerForCausalLM"],
    examples: &["PowerInfer/SmallThinker-4BA0.6B-Instruct", "PowerInfer/SmallThinker-21BA3B-Instruct"],
    read,
};

/// Names of the parts of experts.
const PLAIN: Parts = Parts { gate: "gate", up: "up", down: "down", ..PROJ };
/// Keys of counts and sizes, in the spellings of published and of earlier configs.
const EXPERTS: [&str; 2] = ["moe_num_primary_experts", "num_experts"];
const CHOSEN: [&str; 2] = ["moe_num_active_primary_experts", "num_experts_per_tok"];
const INNER: [&str; 2] = ["moe_ffn_hidden_size", "moe_intermediate_size"];
const WINDOW: [&str; 2] = ["sliding_window_size", "sliding_window"];

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    only_act(config, &["relu"])?;
    let mut b = Base::read_with_glu(Glu::Gated(Activation::Relu), config, checkpoint)?;
    b.tied = true;
    plans(config, b.layers)?;
    let (experts, k) = b.expert_counts_of(&EXPERTS, &CHOSEN)?;
    let inner = config.size(&INNER)?.into();
    let rotates = config.opt_layout("rope_layout", b.layers)?;
    let slides = config.opt_layout("sliding_window_layout", b.layers)?;
    let window = config.opt_size(&WINDOW)?.map_or(4096, |s| s.n);
    let (weight_from, renorm) = if config.flag_or("moe_primary_router_apply_softmax", false)? {
        (WeightFrom::SoftmaxTopk, Renorm::None)
    } else {
        (WeightFrom::SigmoidTopk, Renorm::Sum { eps: 0.0 })
    };
    let set = |layout: Option<&[bool]>, layer: usize| layout.and_then(|l| l.get(layer).copied());
    b.pre_norm_model(&FAMILY, PRE_NORMS, |b, l| {
        let at = b.layer(l);
        let attention = GqaOptions {
            window: set(slides.as_deref(), l).unwrap_or(false).then_some(window),
            rope: set(rotates.as_deref(), l)
                .unwrap_or(true)
                .then_some(rope::Defaults { theta: 1e6, ..rope::Defaults::default() }),
            ..GqaOptions::default()
        };
        let router = plain_router(experts.n, k, Score::Identity, weight_from, renorm);
        let block = format!("{at}.block_sparse_moe");
        let read = b.experts(&format!("{block}.experts"), PLAIN, Fused::OutIn, &experts, &inner, b.glu)?;
        let moe = b.simple_moe(&format!("{block}.primary_router"), router, &experts, read)?;
        let moe = Moe { router_reads: RouterInput::Layer, ..moe };
        Ok([b.gqa(l, attention)?.into(), moe.into()])
    })
}

/// Refuses features of earlier configs that no published checkpoint has.
fn plans(config: &Config, layers: usize) -> Result<()> {
    for (key, usual) in
        [("use_qk_norm", false), ("moe_enable_secondary_experts", false), ("moe_enable_early_router", true)]
    {
        if config.flag_or(key, usual)? != usual {
            return Err(config.unsupported(key, !usual, &[if usual { "true" } else { "false" }]));
        }
    }
    if let Some(shared) = config.opt_count(&["moe_shared_primary_experts"])?.filter(|s| s.n > 0) {
        return Err(config.unsupported(shared.key, shared.n, &["0"]));
    }
    for key in ["moe_layer_layout", "moe_layout"] {
        if let Some(dense) = config.opt_layout(key, layers)?.and_then(|l| l.iter().position(|moe| !moe)) {
            return Err(Error::limit(format!("{} has no experts in layer {dense}", config.name(key)))
                .because("no published checkpoint says how the tensors of such a layer are called")
                .hint("supported: experts in every layer"));
        }
    }
    Ok(())
}
