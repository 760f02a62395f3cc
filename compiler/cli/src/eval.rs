//! `moec eval`.

use super::output;
use moec_base::error::io_error;
use moec_base::progress::Progress;
use moec_base::{Error, Result};
use moec_bundle::read::Bundle;
use moec_measure::evaluate::{self, Tasks};
use moec_measure::job::{self, Job};
use moec_runtime::platform::regular;
use serde_json::json;
use std::path::{Path, PathBuf};

/// Measure a bundle's quality: perplexity, exact match
///
/// Emulates instructions, accelerators and architectures that this machine lacks, as `moec verify` does, and
/// prints a warning. The results are the same. Started by `mpirun -n 2`, two hosts divide the text and the questions,
/// with the results of one.
#[derive(Clone, Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("what").required(true).multiple(true).args(["text", "qa"]))]
pub struct Args {
    /// The bundle
    pub bundle: PathBuf,
    /// Text whose perplexity is measured
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// Questions: one `{"prompt": …, "answer": …}` per line; an answer is correct if every token of it is the
    /// greedy choice
    #[arg(long, value_name = "FILE.JSONL")]
    pub qa: Option<PathBuf>,
    /// Tokens per window of the text; windows do not overlap and share no context
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = clap::value_parser!(u32).range(2..=1 << 20))]
    pub window: u32,
    /// Windows to measure [default: the whole text]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub windows: Option<u32>,
    /// Another bundle of the same checkpoint: also measure the increase of perplexity, the rate of equal next
    /// tokens, and the Kullback-Leibler divergence
    #[arg(long, value_name = "BUNDLE", requires = "text")]
    pub against: Option<PathBuf>,
    /// Measure big-little decoding for each `--gamma`: the text token by token, the answers, and the share of
    /// tokens that were decoded with all experts
    #[arg(long, conflicts_with = "against")]
    pub big_little: bool,
    /// Thresholds from 0 to 1, separated by commas: a token that was decoded with fewer experts is kept if
    /// its largest probability exceeds the threshold [default: that of the bundle]
    #[arg(long, value_name = "G,G,…", requires = "big_little", value_delimiter = ',', value_parser = gamma, allow_negative_numbers = true)]
    pub gamma: Vec<f64>,
    /// No effect, accepted for consistency with `moec run`: missing hardware is always emulated, with a
    /// warning
    #[arg(long)]
    pub emulate: bool,
    /// Print one JSON object to stdout
    #[arg(long)]
    pub json: bool,
}

/// A probability.
fn gamma(text: &str) -> Result<f64, String> {
    let gamma = text.parse().ok().filter(|g| (0.0..=1.0).contains(g));
    gamma.ok_or_else(|| "must be a number from 0 to 1".to_owned())
}

/// Measures the quality of a bundle.
///
/// # Errors
/// Fails if the bundle cannot be executed here, or a file cannot be read.
pub fn run(args: &Args, progress: &Progress) -> Result<()> {
    job::run(progress, |job, progress| evaluate(args, job, progress))
}

fn evaluate(args: &Args, job: Job<'_>, progress: &Progress) -> Result<()> {
    let read = |path: &Path| regular::read_text(path, regular::TEXT).map_err(|e| io_error("read", path, &e));
    let questions = |path: &Path| evaluate::questions(&read(path)?, &path.display().to_string());
    let tasks = Tasks {
        text: args.text.as_deref().map(read).transpose()?,
        questions: args.qa.as_deref().map(questions).transpose()?,
        window: args.window as usize,
        windows: args.windows.map(|w| w as usize),
    };
    let bundle = Bundle::open(&args.bundle)?;
    if args.big_little {
        let measured = evaluate::big_little::evaluate(&bundle, &args.gamma, &tasks, job, progress)?;
        if !job.is_first() {
            return Ok(());
        }
        if args.json {
            return output::json(&serde_json::to_value(&measured).map_err(|e| Error::bug(e.to_string()))?);
        }
        return output::data(&output::table(&big_little_rows(&measured)));
    }
    let against = args.against.as_deref().map(Bundle::open).transpose()?;
    let quality = evaluate::evaluate(&bundle, against.as_ref(), &tasks, job, progress)?;
    if !job.is_first() {
        return Ok(());
    }
    if args.json {
        let mut value = serde_json::to_value(&quality).map_err(|e| Error::bug(e.to_string()))?;
        if let Some([dropped, spilled, padded]) = quality.rates() {
            value["rates"] = json!({"dropped": dropped, "spilled": spilled, "padded": padded});
        }
        return output::json(&value);
    }
    let mut rows = Vec::new();
    if let (Some(p), Some(n), Some(w)) = (quality.perplexity, quality.tokens, quality.windows) {
        rows.push(vec!["perplexity".to_owned(), format!("{p:.4}"), format!("{n} tokens in {w} windows")]);
    }
    if let (Some(same), Some(kl)) = (quality.same_choice, quality.divergence) {
        rows.push(vec![
            "same choice".to_owned(),
            format!("{:.2} %", 100.0 * same),
            "of next tokens".to_owned(),
        ]);
        rows.push(vec![
            "divergence".to_owned(),
            format!("{kl:.6}"),
            "nats per token (Kullback-Leibler)".to_owned(),
        ]);
    }
    if let Some(increase) = quality.increase {
        let over = "of the perplexity, over that of the other bundle";
        rows.push(vec!["increase".to_owned(), format!("{:+.3} %", 100.0 * increase), over.to_owned()]);
    }
    if let Some([drop, spill, padding]) = quality.rates() {
        let percent = |x: f64| format!("{:.2} %", 100.0 * x);
        let pairs = "of the (token, expert) pairs";
        rows.push(vec!["dropped".to_owned(), percent(drop), pairs.to_owned()]);
        rows.push(vec!["spilled".to_owned(), percent(spill), pairs.to_owned()]);
        rows.push(vec!["padding".to_owned(), percent(padding), "of the rows of static graphs".to_owned()]);
    }
    if let (Some(x), Some(n)) = (quality.exact_match, quality.questions) {
        rows.push(vec!["exact match".to_owned(), format!("{:.2} %", 100.0 * x), format!("{n} questions")]);
    }
    output::data(&output::table(&rows))
}

/// One row for each γ.
fn big_little_rows(measured: &evaluate::big_little::BigLittle) -> Vec<Vec<String>> {
    let head = ["gamma", "perplexity", "all experts", "exact match", "all experts in answers"];
    let share = |x: Option<f64>| x.map_or_else(|| "-".to_owned(), |x| format!("{:.2} %", 100.0 * x));
    let rows = measured.gammas.iter().map(|g| {
        vec![
            g.gamma.to_string(),
            g.perplexity.map_or_else(|| "-".to_owned(), |p| format!("{p:.4}")),
            share(g.fallback_ratio),
            share(g.exact_match),
            share(g.answer_fallback_ratio),
        ]
    });
    std::iter::once(head.map(str::to_owned).to_vec()).chain(rows).collect()
}
