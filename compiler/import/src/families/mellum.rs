//! Mellum: Qwen3-MoE with sliding-window layers, which have another rotation.

use super::Family;
use crate::checkpoint::Checkpoint;
use crate::common::{Base, PRE_NORMS};
use crate::config::Config;
use crate::mixers::{GqaOptions, Mixture, MoeNames, QkNormKind, renorm};
use crate::rope;
use crate::spec::ModelSpec;
use moec_base::error::Result;
use moec_ir::op::{Score, WeightFrom};

pub(super) static FAMILY: Family =
    Family { name: "mellum", title: "Mellum", architectures: &["MellumForCausalLM"], examples: &[], read };

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    let b = Base::read(config, checkpoint)?;
    let renorm = renorm(config.flag_or("norm_topk_prob", false)?);
    let names = MoeNames { bias: None, ..MoeNames::DEEPSEEK };
    let moe = Mixture::of(&b, Score::Softmax, WeightFrom::Score, renorm, names)?;
    let (dense, window) = (b.dense_layers(0)?, b.windows()?);
    b.pre_norm_model(&FAMILY, PRE_NORMS, |b, l| {
        let attention = GqaOptions {
            qk_norm: Some(QkNormKind::PerHead),
            window: window(l),
            rope: Some(rope::Defaults::of_window(window(l))),
            ..GqaOptions::default()
        };
        let ffn = if dense(l) { b.dense(l, false)? } else { moe.moe(b, l)?.into() };
        Ok([b.gqa(l, attention)?.into(), ffn])
    })
}
