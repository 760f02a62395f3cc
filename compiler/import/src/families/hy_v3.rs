//! Hunyuan 3: grouped-query attention with norms of query and key, DeepSeek-V3's routing.

use super::Family;
use crate::checkpoint::Checkpoint;
use crate::common::{Base, PRE_NORMS};
use crate::config::Config;
use crate::mixers::{GqaOptions, Mixture, MoeNames, QkNormKind};
use crate::spec::ModelSpec;
use moec_base::error::Result;

pub(super) static FAMILY: Family =
    Family { name: "hy_v3", title: "Hunyuan 3", architectures: &["HYV3ForCausalLM"], examples: &[], read };

const NAMES: MoeNames = MoeNames {
    gate: "mlp.router.gate",
    bias: Some("mlp.expert_bias"),
    shared: "mlp.shared_mlp",
    ..MoeNames::DEEPSEEK
};

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    let b = Base::read(config, checkpoint)?;
    let moe = Mixture::noaux_tc(&b, (1, 1), 1.0, NAMES)?;
    let dense = b.dense_layers(1)?;
    let attention = GqaOptions { qk_norm: Some(QkNormKind::PerHead), ..GqaOptions::default() };
    b.pre_norm_model(&FAMILY, PRE_NORMS, |b, l| {
        let ffn = if dense(l) { b.dense(l, false)? } else { moe.moe(b, l)?.into() };
        Ok([b.gqa(l, attention)?.into(), ffn])
    })
}
