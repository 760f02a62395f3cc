//! `moec eval`.

use super::verbs;
use crate::Result;
use crate::progress::Progress;
use std::path::PathBuf;

/// Measure a bundle's quality: perplexity, exact match
#[derive(Clone, Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("what").required(true).multiple(true).args(["text", "qa"]))]
pub struct Args {
    /// The bundle
    pub bundle: PathBuf,
    /// Text whose perplexity is measured
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// Questions: one `{"prompt": …, "answer": …}` per line; counted when every token of the answer is the
    /// greedy choice
    #[arg(long, value_name = "FILE.JSONL")]
    pub qa: Option<PathBuf>,
    /// Tokens per window of the text; windows do not overlap and share no context
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = clap::value_parser!(u32).range(2..=1 << 20))]
    pub window: u32,
    /// Windows to measure [default: the whole text]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub windows: Option<u32>,
    /// Another bundle of the same checkpoint: also measure how often both choose the same next token of the text,
    /// and how far their probabilities are apart
    #[arg(long, value_name = "BUNDLE", requires = "text")]
    pub against: Option<PathBuf>,
    /// Measure big-little decoding: the text token by token, the answers, and how many tokens needed all experts, for each
    /// `--gamma`
    #[arg(long, conflicts_with = "against")]
    pub big_little: bool,
    /// Keep a token that was decoded with fewer experts if its largest probability exceeds this: from 0 to 1, several
    /// with commas between them [default: what the bundle was built with]
    #[arg(long, value_name = "G,G,…", requires = "big_little", value_delimiter = ',', value_parser = gamma, allow_negative_numbers = true)]
    pub gamma: Vec<f64>,
    /// Print one JSON object to stdout
    #[arg(long)]
    pub json: bool,
}

/// A probability.
fn gamma(text: &str) -> Result<f64, String> {
    let gamma = text.parse().ok().filter(|g| (0.0..=1.0).contains(g));
    gamma.ok_or_else(|| "must be a number from 0 to 1".to_owned())
}

/// Measures.
///
/// # Errors
/// The bundle cannot be executed here, or a file cannot be read.
pub fn run(args: &Args, progress: &Progress) -> Result<()> {
    verbs::eval(args, progress)
}
