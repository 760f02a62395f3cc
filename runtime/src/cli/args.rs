//! Arguments of the subcommands.
//!
//! A group that several subcommands share has its own heading. It is flattened after the subcommand's own
//! options, because a heading applies to all options after it.

use crate::platform::cpu::MAX_THREADS;
use crate::serving::sampler::{MAX_TOP_LOGPROBS, Sampling};
use crate::weights::Weights;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser as _};
use clap::{Args, Parser, Subcommand};
use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;

/// A Mixture-of-Experts language model, compiled by moec.
#[derive(Parser)]
#[command(no_binary_name = true, version, subcommand_required = true, arg_required_else_help = true)]
pub(super) struct Cli {
    #[command(subcommand)]
    pub(super) command: Commands,
}

#[derive(Subcommand)]
pub(super) enum Commands {
    /// Continue a text.
    Generate(Box<Generate>),
    /// Write the logits of every position to a file.
    Logits(Logits),
    /// Measure speed and memory.
    Bench(Bench),
    /// Describe the model, its target and its requirements.
    Info(Info),
}

/// Options of every subcommand that opens the model.
#[derive(Args)]
#[command(next_help_heading = "Memory and threads")]
pub struct Common {
    /// Threads, on each NUMA node if the bundle has several [default: `MOEC_THREADS`, else one per core]
    #[arg(long, value_name = "N", value_parser = between(1..=MAX_THREADS, "from 1 to 1024"), allow_negative_numbers = true)]
    pub(super) threads: Option<usize>,
    /// Pin every worker thread to a core of its own, if the operating system supports it; the main thread is
    /// not pinned
    #[arg(long)]
    pub(super) pin: bool,
    /// Check size and SHA-256 of every file of the bundle first, including this program; without this option, only of
    /// the tokenizer and of weights up to 64 MiB
    #[arg(long)]
    pub(super) check: bool,
    /// Memory limit of the run, such as `4.5GiB`, instead of the bundle's own budget
    #[arg(long, value_name = "SIZE", value_parser = size, allow_negative_numbers = true, conflicts_with = "no_budget")]
    pub(super) budget: Option<u64>,
    /// Ignore the bundle's memory budget; keep all weights in RAM
    #[arg(long)]
    pub(super) no_budget: bool,
    /// Location of weights: `ram` reads them into memory of this process, in huge pages, without the page
    /// cache; `mmap` maps them from the page cache, which processes share; `auto` uses `ram` if enough memory
    /// is free
    #[arg(long, value_name = "WHERE", default_value = "auto", value_parser = PossibleValuesParser::new(weights_values()).map(parse_weights))]
    pub(super) weights: Weights,
    /// Lock memory: pages that were used stay in RAM, mapped weights among them (Linux)
    #[arg(long)]
    pub(super) mlock: bool,
    /// Map weights and read them when they are first needed, instead of all of them after the first prompt
    #[arg(long)]
    pub(super) no_preload: bool,
    /// Divide experts between CPU and GPU by the costs of the bundle, which the first calls else correct by
    /// what they measure: equal runs then divide alike
    #[arg(long)]
    pub(super) fixed_costs: bool,
    /// Do not check the checksums of experts that are read from disk, to measure their cost
    #[arg(long, conflicts_with = "no_budget")]
    pub(super) no_verify_reads: bool,
    /// Maximum number of layers ahead whose experts are read from disk, or transferred to the frames of a GPU,
    /// before they are requested [default: as compiled]
    #[arg(long, value_name = "N", value_parser = between(0..=3usize, "from 0 to 3"), allow_negative_numbers = true, conflicts_with = "no_budget")]
    pub(super) prefetch: Option<usize>,
}

/// Sampling options.
#[derive(Args, Clone)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Sampling temperature; 0 is greedy [default: 0; in `chat` as the checkpoint recommends, else 1]
    #[arg(long, value_name = "T", value_parser = sampling("temperature"), allow_negative_numbers = true)]
    pub temperature: Option<f32>,
    /// Nucleus sampling: keep the most probable tokens with this cumulative probability [default: 1; in
    /// `chat` as recommended]
    #[arg(long, value_name = "P", value_parser = sampling("top_p"), allow_negative_numbers = true)]
    pub top_p: Option<f32>,
    /// Keep only this many of the most probable tokens; 0 keeps all [default: 0; in `chat` as recommended]
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    pub top_k: Option<usize>,
    /// Discard tokens less probable than this share of the most probable one; 0 keeps all [default: 0; in
    /// `chat` as recommended]
    #[arg(long, value_name = "P", value_parser = sampling("min_p"), allow_negative_numbers = true)]
    pub min_p: Option<f32>,
    /// Typical sampling: keep the tokens nearest to the entropy that together have this probability [default:
    /// 1; in `chat` as recommended]
    #[arg(long, value_name = "P", value_parser = sampling("typical_p"), allow_negative_numbers = true)]
    pub typical_p: Option<f32>,
    /// Divide positive logits of tokens of the prompt and the answer by this, and multiply negative ones; 1
    /// disables it [default: 1; in `chat` as recommended]
    #[arg(long, value_name = "R", value_parser = sampling("repetition_penalty"), allow_negative_numbers = true)]
    pub repetition_penalty: Option<f32>,
    /// Subtract this from the logit of every token of the answer [default: 0]
    #[arg(long, value_name = "A", value_parser = sampling("presence_penalty"), allow_negative_numbers = true)]
    pub presence_penalty: Option<f32>,
    /// Subtract this from the logit of a token once for every time that the answer has it [default: 0]
    #[arg(long, value_name = "A", value_parser = sampling("frequency_penalty"), allow_negative_numbers = true)]
    pub frequency_penalty: Option<f32>,
    /// Add to the logits of tokens: `42:1.5,7:-inf`
    #[arg(long, value_name = "ID:BIAS,…", value_delimiter = ',', value_parser = bias, allow_hyphen_values = true)]
    pub logit_bias: Vec<(u32, f32)>,
    /// Random seed [default: 0; in `chat` a random one, which is shown]
    #[arg(long, value_name = "S", allow_negative_numbers = true)]
    pub seed: Option<u64>,
}

impl SamplingArgs {
    /// Options of a sampler: those that are given, and `others` for the rest. Log-probabilities are not among
    /// these arguments.
    pub fn over(&self, others: &Sampling) -> Sampling {
        Sampling {
            temperature: self.temperature.unwrap_or(others.temperature),
            top_p: self.top_p.unwrap_or(others.top_p),
            top_k: self.top_k.unwrap_or(others.top_k),
            min_p: self.min_p.unwrap_or(others.min_p),
            typical_p: self.typical_p.unwrap_or(others.typical_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(others.repetition_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(others.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(others.frequency_penalty),
            bias: self.logit_bias.clone(),
            seed: self.seed.unwrap_or(others.seed),
            log_probabilities: others.log_probabilities,
        }
    }
}

#[derive(Args)]
pub(super) struct Generate {
    /// Text to continue; with `-`, or without this option, it is read from standard input
    #[arg(long, value_name = "TEXT", conflicts_with = "ids", allow_hyphen_values = true)]
    pub(super) prompt: Option<String>,
    /// Token ids to continue, unchanged: no token is prepended, and end tokens do not end the answer
    #[arg(long, value_name = "ID,ID,…", value_delimiter = ',', num_args = 1, allow_hyphen_values = true)]
    pub(super) ids: Option<Vec<u32>>,
    /// Maximum number of tokens to generate [default: 128, or as many as the context has left]
    #[arg(short = 'n', long = "tokens", value_name = "N", value_parser = between(1..=u32::MAX as usize, "from 1 up"), allow_negative_numbers = true)]
    pub(super) n: Option<usize>,
    /// Stop sequence: generation ends when it appears (it is not printed); may be given several times
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(super) stop: Vec<String>,
    /// Keep a token that was decoded with fewer experts if its largest probability exceeds this; 1 keeps none
    /// [default: that of the bundle]
    #[arg(long, value_name = "G", value_parser = between(0f32..=1.0, "from 0 to 1"), allow_negative_numbers = true)]
    pub(super) gamma: Option<f32>,
    /// Decode every token with all experts
    #[arg(long, conflicts_with = "gamma")]
    pub(super) no_big_little: bool,
    /// Sample N sequences, with the seeds from `--seed` on, and print the one whose tokens are most probable
    /// on average
    #[arg(long, value_name = "N", value_parser = between(1..=64usize, "from 1 to 64"), allow_negative_numbers = true)]
    pub(super) best_of: Option<usize>,
    /// Print all N sequences, the best first, each after a line with its score
    #[arg(long, requires = "best_of", conflicts_with = "json")]
    pub(super) all: bool,
    /// Save the prompt's ids and the model's states after them to this file, for a later `--load-prompt`
    #[arg(long, value_name = "FILE", conflicts_with = "best_of")]
    pub(super) save_prompt: Option<PathBuf>,
    /// Reuse the states of a file from `--save-prompt` for the tokens that both prompts begin with; without
    /// `--prompt` and `--ids`, continue the saved prompt
    #[arg(long, value_name = "FILE", conflicts_with = "best_of")]
    pub(super) load_prompt: Option<PathBuf>,
    /// Speculative decoding: draft up to N tokens by prompt lookup, and verify them in one call; the tokens
    /// stay the same
    #[arg(long, value_name = "N", value_parser = between(1..=64usize, "from 1 to 64"), allow_negative_numbers = true, conflicts_with_all = ["best_of", "gamma"])]
    pub(super) speculate: Option<usize>,
    /// End at an end token, also with `--ids`
    #[arg(long, conflicts_with = "ignore_eos")]
    pub(super) stop_at_eos: bool,
    /// Do not end at an end token
    #[arg(long)]
    pub(super) ignore_eos: bool,
    /// Print one JSON object at the end
    #[arg(long)]
    pub(super) json: bool,
    /// Give the log-probability of every token, and those of the N most probable ones, in the JSON object
    #[arg(long, value_name = "N", value_parser = between(0..=MAX_TOP_LOGPROBS, "from 0 to 20"), allow_negative_numbers = true, requires = "json", conflicts_with = "best_of")]
    pub(super) log_probabilities: Option<usize>,
    /// Write a timeline of all threads and the disk to this file, for <https://ui.perfetto.dev>
    #[arg(long, value_name = "FILE")]
    pub(super) timeline: Option<PathBuf>,
    /// Do not print the rates
    #[arg(long, short)]
    pub(super) quiet: bool,
    #[command(flatten)]
    pub(super) sampling: SamplingArgs,
    #[command(flatten)]
    pub(super) common: Common,
}

#[derive(Args)]
pub(super) struct Logits {
    /// Token ids
    #[arg(
        long,
        value_name = "ID,ID,…",
        value_delimiter = ',',
        num_args = 1,
        allow_hyphen_values = true,
        required = true
    )]
    pub(super) ids: Vec<u32>,
    /// File to write: safetensors with one tensor, `logits`, f32 [ids, vocabulary]
    #[arg(long, value_name = "FILE")]
    pub(super) out: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    pub(super) json: bool,
    #[command(flatten)]
    pub(super) common: Common,
}

#[derive(Args)]
pub(super) struct Bench {
    /// Tokens of the prompt [default: 512, or half the context]
    #[arg(long, value_name = "N", value_parser = between(1..=u32::MAX as usize, "from 1 up"), allow_negative_numbers = true)]
    pub(super) prompt: Option<usize>,
    /// Tokens to generate [default: 64, or as many as the context has left]
    #[arg(long, value_name = "N", value_parser = between(1..=u32::MAX as usize, "from 1 up"), allow_negative_numbers = true)]
    pub(super) r#gen: Option<usize>,
    /// Sequences that are decoded together, each with a prompt of its own
    #[arg(long, value_name = "B", default_value = "1", value_parser = between(1..=1000usize, "from 1 to 1000"), allow_negative_numbers = true)]
    pub(super) batch: usize,
    /// Measure N sequences sampled after one prompt together, against N runs of one sequence each
    #[arg(long, value_name = "N", value_parser = between(1..=64usize, "from 1 to 64"), allow_negative_numbers = true, conflicts_with = "batch")]
    pub(super) best_of: Option<usize>,
    /// Measure once per line `PROMPT GEN BATCH` of standard input instead, and answer each with one JSON
    /// object: for programs that alternate between measurements
    #[arg(long, conflicts_with_all = ["prompt", "gen", "repeat", "batch", "best_of", "json"])]
    pub(super) stdin: bool,
    /// Number of measurements; the medians are reported
    #[arg(long, value_name = "R", default_value = "3", value_parser = between(1..=1000usize, "from 1 to 1000"), allow_negative_numbers = true)]
    pub(super) repeat: usize,
    /// Print one JSON object
    #[arg(long)]
    pub(super) json: bool,
    #[command(flatten)]
    pub(super) common: Common,
}

#[derive(Args)]
pub(super) struct Info {
    /// Print one JSON object
    #[arg(long)]
    pub(super) json: bool,
}

/// Values of `--weights`: [`Weights::NAMES`], with the former spellings as hidden aliases.
fn weights_values() -> [PossibleValue; 3] {
    let [auto, ram, mmap] = Weights::NAMES.map(PossibleValue::new);
    [auto, ram.alias("own"), mmap.alias("mapped")]
}

/// Reads one of [`Weights::NAMES`].
#[allow(clippy::needless_pass_by_value, reason = "clap hands it over")]
fn parse_weights(name: String) -> Weights {
    Weights::parse(&name).unwrap_or_default()
}

/// Reads a size: a number with `KiB`, `MiB` or `GiB`, or bytes.
fn size(text: &str) -> Result<u64, String> {
    const UNITS: [(&str, f64); 4] =
        [("GiB", (1_u64 << 30) as f64), ("MiB", (1 << 20) as f64), ("KiB", 1024.0), ("", 1.0)];
    let found = UNITS.iter().find_map(|(unit, factor)| {
        let number = text.trim().strip_suffix(unit)?.trim().parse::<f64>().ok()?;
        Some(number * factor)
    });
    let fits = |bytes: &f64| (1.0..9e18).contains(bytes);
    found
        .filter(fits)
        .map(|b| {
            #[allow(clippy::cast_possible_truncation, reason = "it is in the range of the filter")]
            let bytes = b as u64;
            bytes
        })
        .ok_or_else(|| "must be a size such as `4.5GiB`: a number of KiB, MiB or GiB, or of bytes".to_owned())
}

/// Reads a token and the number to add to its logit: `42:1.5`.
fn bias(text: &str) -> Result<(u32, f32), String> {
    let read = |text: &str| {
        let (id, bias) = text.split_once(':')?;
        Some((id.trim().parse().ok()?, bias.trim().parse::<f32>().ok()?))
    };
    read(text).filter(|(_, bias)| !bias.is_nan() && *bias != f32::INFINITY).ok_or_else(|| {
        "must be a token id and a number below infinity, as in `42:1.5` or `7:-inf`".to_owned()
    })
}

/// Parser of a number of [`Sampling`].
fn sampling(name: &'static str) -> impl Fn(&str) -> Result<f32, String> + Clone + Send + Sync + 'static {
    move |text| Sampling::parse(name, text)
}

/// Parser of numbers in a range, which `words` describe. NaN is in no range.
fn between<T>(
    range: RangeInclusive<T>,
    words: &'static str,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static
where
    T: FromStr + PartialOrd + Display + Clone + Send + Sync + 'static,
{
    move |text| match text.parse() {
        Ok(n) if range.contains(&n) => Ok(n),
        Err(_) if !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) => {
            Err(format!("must be {} at most", range.end()))
        }
        _ => Err(format!("must be a number {words}")),
    }
}
