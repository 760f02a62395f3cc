//! MiniMax-M2: query and key normalised over their full width, sigmoid routing with a selection bias.

use super::Family;
use crate::checkpoint::Checkpoint;
use crate::common::{Base, PRE_NORMS};
use crate::config::Config;
use crate::mixers::{GqaOptions, Mixture, MoeNames, QkNormKind, W123};
use crate::rope;
use crate::spec::ModelSpec;
use moec_base::error::Result;
use moec_ir::op::{Renorm, Score, WeightFrom};

pub(super) static FAMILY: Family = Family {
    name: "minimax_m2",
    title: "MiniMax-M2",
    architectures: &["MiniMaxM2ForCausalLM"],
    examples: &["MiniMaxAI/MiniMax-M2", "MiniMaxAI/MiniMax-M2.5"],
    read,
};

const NAMES: MoeNames = MoeNames {
    gate: "block_sparse_moe.gate",
    bias: Some("block_sparse_moe.e_score_correction_bias"),
    experts: "block_sparse_moe.experts",
    parts: W123,
    ..MoeNames::DEEPSEEK
};

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    let b = Base::read(config, checkpoint)?;
    let moe = Mixture::of(&b, Score::Sigmoid, WeightFrom::Score, Renorm::Sum { eps: 0.0 }, NAMES)?;
    let rotated = match config.opt_size(&["rotary_dim"])? {
        Some(rotated) => rotated.n as f64 / b.head_dim()?.n as f64,
        None => 1.0,
    };
    let attention = GqaOptions {
        qk_norm: Some(QkNormKind::Full),
        rope: Some(rope::Defaults { partial: rotated, ..rope::Defaults::default() }),
        ..GqaOptions::default()
    };
    b.pre_norm_model(&FAMILY, PRE_NORMS, |b, l| Ok([b.gqa(l, attention)?.into(), moe.moe(b, l)?.into()]))
}
