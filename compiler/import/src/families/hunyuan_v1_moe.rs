//! Hunyuan-A13B: norms of query and key after the rotation, an expert for every token.

use super::Family;
use crate::checkpoint::Checkpoint;
use crate::common::{Base, PRE_NORMS};
use crate::config::Config;
use crate::mixers::{GqaOptions, Mixture, MoeNames, QkNormKind};
use crate::spec::ModelSpec;
use moec_base::error::Result;
use moec_ir::op::{Renorm, Score, WeightFrom};

pub(super) static FAMILY: Family = Family {
    name: "hunyuan_v1_moe",
    title: "Hunyuan-A13B",
    architectures: &["HunYuanMoEV1ForCausalLM"],
    examples: &["tencent/Hunyuan-A13B-Instruct"],
    read,
};

const NAMES: MoeNames =
    MoeNames { gate: "mlp.gate.wg", bias: None, shared: "mlp.shared_mlp", ..MoeNames::DEEPSEEK };

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    let b = Base::read(config, checkpoint)?;
    let mut moe = Mixture::of(&b, Score::Softmax, WeightFrom::Score, Renorm::Sum { eps: 0.0 }, NAMES)?;
    moe.shared = Some(moe.intermediate.clone());
    let attention = GqaOptions {
        norms: ["query_layernorm", "key_layernorm"],
        qk_norm: config.flag_or("use_qk_norm", true)?.then_some(QkNormKind::PerHead),
        norm_rotated: true,
        ..GqaOptions::default()
    };
    b.pre_norm_model(&FAMILY, PRE_NORMS, |b, l| Ok([b.gqa(l, attention)?.into(), moe.moe(b, l)?.into()]))
}
