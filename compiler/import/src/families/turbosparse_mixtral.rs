//! TurboSparse-Mixtral (arXiv 2406.05955): Mixtral with dReLU: one ReLU after the gate and one after up.
//!
//! Published checkpoints have predictors of neurons next to the experts. They are not read, which a warning
//! reports.

use super::{Family, mixtral};
use crate::checkpoint::Checkpoint;
use crate::common::{Base, only_act};
use crate::config::Config;
use crate::spec::ModelSpec;
use moec_base::error::Result;
use moec_ir::Glu;

pub(super) static FAMILY: Family = Family {
    name: "turbosparsemixtral",
    title: "TurboSparse-Mixtral",
    architectures: &["TurboSparseMixtralForCausalLM"],
    examples: &["PowerInfer/TurboSparse-Mixtral"],
    read,
};

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    only_act(config, &["relu"])?;
    mixtral::model(&FAMILY, Base::read_with_glu(Glu::DRelu, config, checkpoint)?)
}
