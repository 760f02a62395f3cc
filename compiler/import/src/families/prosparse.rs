//! ProSparse-Llama (arXiv 2402.13516): Llama 2 with FATReLU, which keeps values that are not below a
//! threshold.

use super::Family;
use crate::checkpoint::Checkpoint;
use crate::common::{Base, only_act};
use crate::config::Config;
use crate::mixers::GqaOptions;
use crate::spec::ModelSpec;
use moec_base::error::{Error, Result};
use moec_ir::{Activation, Glu};

pub(super) static FAMILY: Family = Family {
    name: "sparsellama",
    title: "ProSparse-Llama",
    architectures: &["SparseLlamaForCausalLM"],
    examples: &["SparseLLM/prosparse-llama-2-7b", "SparseLLM/prosparse-llama-2-13b"],
    read,
};

fn read(config: &Config, checkpoint: &Checkpoint) -> Result<ModelSpec> {
    let glu = match only_act(config, &["fatrelu", "relu"])? {
        "fatrelu" => Glu::FatRelu { threshold: threshold(config)? },
        _ => Glu::Gated(Activation::Relu),
    };
    let b = Base::read_with_glu(glu, config, checkpoint)?;
    let bias = config.flag_or("attention_bias", false)?;
    let attention = GqaOptions { qkv_bias: bias, o_bias: bias, ..GqaOptions::default() };
    b.dense_model(&FAMILY, attention, config.flag_or("mlp_bias", false)?)
}

/// FATReLU's threshold, at least 0; a gate below it becomes 0.
fn threshold(config: &Config) -> Result<f32> {
    const KEY: &str = "hidden_act_param";
    let threshold = config.number(KEY)?;
    if !(0.0..=f64::from(f32::MAX)).contains(&threshold) {
        return Err(Error::input(format!(
            "{} is {threshold}, expected a number of at least 0",
            config.name(KEY)
        )));
    }
    Ok(threshold as f32)
}
