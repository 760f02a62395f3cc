//! `moec synth`: a checkpoint of random weights in a real model's shapes. Hidden; for benchmarks and tests.

use crate::progress::Progress;
use crate::synth::{self, Cut, Like};
use crate::{Result, interrupt};
use std::path::PathBuf;

/// Write a checkpoint of random weights in the shapes of a real model
///
/// For measuring speed and memory without a download. The text that it generates is noise.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Folder to write; it must not exist
    pub out_dir: PathBuf,
    /// Which model
    #[arg(long, value_enum)]
    pub like: Like,
    /// Layers [default: as many as the model has]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=512))]
    pub layers: Option<u32>,
    /// Vocabulary [default: as large as the model's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub vocab: Option<u32>,
    /// Seed of the weights
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub seed: u64,
}

/// Writes it.
///
/// # Errors
/// The folder is there already, or the disk is full.
pub fn run(args: &Args, progress: &Progress) -> Result<()> {
    interrupt::install();
    let size = |n: Option<u32>| n.map(|n| n as usize);
    let cut = Cut { layers: size(args.layers), vocab: size(args.vocab) };
    synth::write(&args.out_dir, args.like, cut, args.seed, progress)
}
