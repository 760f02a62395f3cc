//! Bamboo and TurboSparse-Mistral: Mistral's dense layers with dReLU: one ReLU after the gate and one after
//! up (arXiv 2406.05955, eq. 2).
//!
//! TurboSparse-Mistral has predictors of neurons next to each network. They are not read, which a warning
//! reports.

use super::Family;
use crate::checkpoint::Checkpoint;
use crate::common::{Base, only_act};
use crate::config::Config;
use crate::mixers::GqaOptions;
use crate::spec::ModelSpec;
use moec_base::error::Result;
use moec_ir::Glu;

pub(super) static FAMILY: Family = Family {
    name: "bamboo",
    title: "Bamboo",
    architectures: &["BambooForCausalLM"],
    examples: &[
        "PowerInfer/Bamboo-base-v0_1",
        "PowerInfer/Bamboo-DPO-v0_1",
        "PowerInfer/TurboSparse-Mistral-Instruct",
    ],
    read,
};

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    only_act(config, &["relu"])?;
    let b = Base::read_with_glu(Glu::DRelu, config, checkpoint)?;
    let window = config.opt_size(&["sliding_window"])?.map(|s| s.n);
    let attention = GqaOptions { window, ..GqaOptions::default() };
    b.dense_model(&FAMILY, attention, false)
}
