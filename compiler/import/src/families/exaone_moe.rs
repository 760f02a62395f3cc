//! K-EXAONE: only layers with a window are rotated, full-attention layers are not; DeepSeek-V3's routing.

use super::Family;
use crate::checkpoint::Checkpoint;
use crate::common::{Base, PRE_NORMS};
use crate::config::Config;
use crate::mixers::{GqaOptions, Mixture, MoeNames, QkNormKind};
use crate::rope;
use crate::spec::ModelSpec;
use moec_base::error::Result;

pub(super) static FAMILY: Family = Family {
    name: "exaone_moe",
    title: "K-EXAONE",
    architectures: &["ExaoneMoeForCausalLM"],
    examples: &["LGAI-EXAONE/K-EXAONE-236B-A23B"],
    read,
};

const NAMES: MoeNames = MoeNames { bias: Some("mlp.e_score_correction_bias"), ..MoeNames::DEEPSEEK };

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    let b = Base::read(config, checkpoint)?;
    let moe = Mixture::noaux_tc(&b, (1, 1), 1.0, NAMES)?;
    let dense = b.dense_layers(1)?;
    let window = b.windows()?;
    // Without windows every layer is rotated.
    let all = !config.has("sliding_window");
    b.pre_norm_model(&FAMILY, PRE_NORMS, |b, l| {
        let attention = GqaOptions {
            qk_norm: Some(QkNormKind::PerHead),
            window: window(l),
            rope: (all || window(l).is_some()).then(rope::Defaults::default),
            ..GqaOptions::default()
        };
        let ffn = if dense(l) { b.dense(l, false)? } else { moe.moe(b, l)?.into() };
        Ok([b.gqa(l, attention)?.into(), ffn])
    })
}
