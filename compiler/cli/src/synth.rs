//! `moec synth`: a checkpoint of random weights in a real model's shapes. Hidden; for benchmarks and tests.

use super::output;
use moec_base::progress::Progress;
use moec_base::{Error, Result};
use moec_runtime::platform::regular;
use moec_synth::{Like, Popular, Popularity, ReducedDims};
use serde_json::json;
use std::path::{Path, PathBuf};

/// Write a checkpoint of random weights in the shapes of a real model
///
/// For measuring speed and memory without a download. The text that it generates is noise.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Folder to write; it must not exist
    pub out_dir: PathBuf,
    /// Model to imitate
    #[arg(long, value_enum)]
    pub like: Like,
    /// Layers [default: as many as the model has]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=512))]
    pub layers: Option<u32>,
    /// Vocabulary [default: as large as the model's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub vocab: Option<u32>,
    /// Counts of how often tokens chose each expert, in lines `model,domain,layer,expert,count`: the routers
    /// choose in these proportions, summed over all domains. Without it, all experts are equally likely
    #[arg(long, value_name = "FILE.CSV")]
    pub popularity: Option<PathBuf>,
    /// Model whose counts are taken [default: the only model in the file]
    #[arg(long, value_name = "NAME", requires = "popularity")]
    pub model: Option<String>,
    /// Use ReLU gates that set this share of a token's neurons to 0, some neurons much more often than others
    #[arg(long, value_name = "SHARE", requires = "popularity", value_parser = share)]
    pub zeros: Option<f64>,
    /// Seed of the weights
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub seed: u64,
    /// Print one JSON object to stdout
    #[arg(long)]
    pub json: bool,
}

/// Writes the checkpoint.
///
/// # Errors
/// Fails if the folder exists, the disk is full, or the counts cannot be read or are of another model.
pub fn run(args: &Args, progress: &Progress) -> Result<()> {
    let size = |n: Option<u32>| n.map(|n| n as usize);
    let cut = ReducedDims { layers: size(args.layers), vocab: size(args.vocab) };
    let popularity =
        args.popularity.as_deref().map(|path| counts(path, args.model.as_deref())).transpose()?;
    let popular = popularity.as_ref().map(|popularity| Popular { popularity, zeros: args.zeros });
    moec_synth::write(&args.out_dir, args.like, cut, args.seed, popular, progress)?;
    if args.json { output::json(&json!({"checkpoint": args.out_dir, "seed": args.seed})) } else { Ok(()) }
}

fn share(text: &str) -> std::result::Result<f64, String> {
    let share = text.parse().ok().filter(|x| (0.05..=0.99).contains(x));
    share.ok_or_else(|| "a share from 0.05 to 0.99".to_owned())
}

fn counts(path: &Path, model: Option<&str>) -> Result<Popularity> {
    let shown = path.display();
    let text = regular::read_text(path, regular::TEXT)
        .map_err(|e| Error::input(format!("`{shown}` cannot be read")).because(e))?;
    Popularity::parse(&text, model)
        .map_err(|e| e.context(format!("`{shown}` has no valid counts of experts")))
}
