//! Import: from a checkpoint to a [`ModelSpec`].
//!
//! Only this crate knows Hugging Face and its containers. Model files are not trusted: all data in them is
//! checked before use, and no file outside the checkpoint's folder is read.
#![cfg_attr(test, allow(clippy::cast_possible_truncation, reason = "numbers of tests are small"))]

mod chat;
pub mod checkpoint;
pub mod common;
pub mod config;
pub mod containers;
pub mod encodings;
pub mod families;
pub mod hub;
pub mod lower;
pub mod map;
pub mod mixers;
pub mod quantised;
mod rectangles;
pub mod rope;
mod sampling;
pub mod spec;
pub mod tensors;
mod tokenizer;

pub use checkpoint::{Checkpoint, ImportOptions};
pub use config::Config;
pub use families::{FAMILIES, Family};
pub use spec::ModelSpec;

use moec_base::error::Result;
use std::path::Path;

/// Opens the checkpoint at a path and reads its specification.
///
/// # Errors
/// Fails if files are missing or wrong; errors of [`read`] are returned.
pub fn open(path: &Path, options: &ImportOptions) -> Result<(Checkpoint, ModelSpec)> {
    let container = containers::open(path, |config| families::of(config).map(|_| ()))?;
    let checkpoint = Checkpoint::of(container, options);
    let spec = read(&checkpoint)?;
    Ok((checkpoint, spec))
}

/// Ends of the names of optional tensors in a checkpoint of which only the configuration is known: experts are
/// stacked where a family has both spellings.
const STACKED: &[&str] = &["experts.gate_up_proj", "experts.gate_up_proj_bias"];

/// Opens the checkpoint at a path, or the shapes of one: a folder with a `config.json` and no weights has the
/// tensors that its family requests. They count as stored in bf16, whatever `quantization_config` says. Reading
/// their numbers is an error.
///
/// # Errors
/// Those of [`open`].
pub fn open_shapes(path: &Path, options: &ImportOptions) -> Result<(Checkpoint, ModelSpec)> {
    let kind = containers::find(path).filter(|_| containers::is_config_alone(path));
    let Some(kind) = kind else { return open(path, options) };
    shapes(path, (kind.config)(path)?)
}

/// The shapes of a checkpoint with this configuration, as [`open_shapes`] opens them.
///
/// # Errors
/// Those of [`read`] that do not need tensors.
pub fn shapes(path: &Path, config: Config) -> Result<(Checkpoint, ModelSpec)> {
    let config = config.with("quantization_config", serde_json::Value::Null);
    families::of(&config)?;
    let tensors = requested(config.clone(), STACKED)?.1;
    let checkpoint = Checkpoint::of(containers::shapes(path, config, tensors), &ImportOptions::default());
    let spec = read(&checkpoint)?;
    Ok((checkpoint, spec))
}

/// Names and shapes of the tensors that a family requests.
pub type RequestedTensors = Vec<(String, Vec<usize>)>;

/// Names and shapes of the tensors that a checkpoint with this `config.json` has, and its specification, whose
/// weights cannot be read. `optional` is the suffixes of optional tensors that exist, since families choose
/// between spellings by them (`experts.gate_up_proj`: experts are stacked).
///
/// # Errors
/// Those of [`read`] that do not need tensors.
pub fn without_weights(
    config: serde_json::Map<String, serde_json::Value>,
    optional: &'static [&'static str],
) -> Result<(ModelSpec, RequestedTensors)> {
    requested(Config::of("config.json", config), optional)
}

/// The specification, and the tensors that a family requests.
fn requested(config: Config, optional: &'static [&'static str]) -> Result<(ModelSpec, RequestedTensors)> {
    let container = containers::weightless::WeightlessCheckpoint::new(config, optional);
    let checkpoint = Checkpoint::of(Box::new(container), &ImportOptions::default());
    let spec = read(&checkpoint)?;
    Ok((spec, checkpoint.requested().map_or_else(Vec::new, containers::weightless::RequestedTensors::all)))
}

/// Reads the specification of a checkpoint.
///
/// # Errors
/// Fails if tensors do not fit the config, or if this version does not support something, which the message
/// names.
pub fn read(checkpoint: &Checkpoint) -> Result<ModelSpec> {
    let config = checkpoint.config();
    (families::of(config)?.read)(config, checkpoint)
}
