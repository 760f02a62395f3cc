//! Import: from a Hugging Face checkpoint to a [`ModelSpec`].
//!
//! The only place that knows Hugging Face. Model files are not trusted: whatever they say is checked
//! before it is used, and nothing outside of the checkpoint's folder is read.

pub mod checkpoint;
pub mod common;
pub mod config;
pub mod families;
mod folder;
pub mod formats;
mod header;
mod latent;
pub(crate) mod map;
pub mod moe;
mod rectangles;
pub mod rope;
mod shards;
pub mod spec;
pub mod tensors;
pub(crate) mod tokenizer;

pub use checkpoint::{Checkpoint, ImportOptions};
pub use config::Config;
pub use families::{FAMILIES, Family};
pub use spec::ModelSpec;

use crate::error::Result;
use std::path::Path;

/// Opens the checkpoint of a folder and reads what it computes.
///
/// # Errors
/// Files that are missing or wrong, tensors that do not fit the config, and whatever this version does
/// not support, by name.
pub fn open(dir: &Path, options: &ImportOptions) -> Result<(Checkpoint, ModelSpec)> {
    let config = Config::open(dir)?;
    let family = families::of(&config)?;
    let checkpoint = Checkpoint::open(dir, options)?;
    let spec = (family.read)(&config, &checkpoint)?;
    Ok((checkpoint, spec))
}
