//! ERNIE 4.5: a softmax over all experts with a selection bias, rotation of neighbouring channels.

use super::Family;
use crate::checkpoint::Checkpoint;
use crate::common::{Base, PRE_NORMS};
use crate::config::Config;
use crate::mixers::{GqaOptions, Mixture, MoeNames};
use crate::spec::ModelSpec;
use moec_base::error::Result;
use moec_ir::RopeStyle;
use moec_ir::op::{Renorm, Score, WeightFrom};

pub(super) static FAMILY: Family = Family {
    name: "ernie4_5_moe",
    title: "ERNIE 4.5",
    architectures: &["Ernie4_5_MoeForCausalLM"],
    examples: &["baidu/ERNIE-4.5-21B-A3B-PT", "baidu/ERNIE-4.5-300B-A47B-PT"],
    read,
};

const NAMES: MoeNames =
    MoeNames { bias: Some("mlp.moe_statics.e_score_correction_bias"), ..MoeNames::DEEPSEEK };

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    let b = Base::read(config, checkpoint)?;
    let renorm = Renorm::Clamp { min: config.positive_or("moe_norm_min", 1e-12)? as f32 };
    let moe = Mixture::of(&b, Score::Softmax, WeightFrom::Score, renorm, NAMES)?;
    let count = |key: &'static str, otherwise: usize| -> Result<usize> {
        Ok(config.opt_count(&[key])?.map_or(otherwise, |s| s.n))
    };
    let (every, first) = (count("moe_layer_interval", 1)?, count("moe_layer_start_index", 1)?);
    // The value −1 means the model's last layer.
    let last = config
        .opt_number("moe_layer_end_index")?
        .filter(|&last| last >= 0.0)
        .map_or(b.layers - 1, |l| l as usize);
    let sparse = move |l: usize| every > 0 && (l + 1).is_multiple_of(every) && (first..=last).contains(&l);
    let bias = config.flag_or("use_bias", false)?;
    let attention =
        GqaOptions { qkv_bias: bias, o_bias: bias, style: RopeStyle::Interleaved, ..GqaOptions::default() };
    b.pre_norm_model(&FAMILY, PRE_NORMS, |b, l| {
        let ffn = if sparse(l) { moe.moe(b, l)?.into() } else { b.dense(l, bias)? };
        Ok([b.gqa(l, attention)?.into(), ffn])
    })
}
