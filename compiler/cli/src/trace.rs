//! `moec inspect` of a profile.

use super::{heat, loads, neurons, output};
use moec_base::error::io_error;
use moec_base::hashing::hex;
use moec_base::{Result, human};
use moec_profile::correlations::Correlations;
use moec_profile::{Confidence, FormatLoss, Moments, Profile, Routing, file};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Least-used experts that are shown of each layer.
const SHOWN: usize = 4;
/// Shares of fallbacks for which γ is shown.
const FALLBACKS: [f64; 6] = [0.05, 0.1, 0.15, 0.2, 0.3, 0.5];

/// Options for profiles.
#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
pub(super) struct Args {
    /// Write a profile as an HTML page with heat maps
    #[arg(long, value_name = "FILE.HTML", conflicts_with = "against")]
    pub(super) html: Option<PathBuf>,
    /// Write the mean squares of the input channels of each matrix, and the tokens that it saw, as JSON
    #[arg(long, value_name = "FILE.JSON", conflicts_with = "against")]
    pub(super) moments: Option<PathBuf>,
    /// Compare a profile with this one by the busiest experts of each layer (Overlap@K)
    #[arg(long, value_name = "FILE.TRACE")]
    pub(super) against: Option<PathBuf>,
    /// Numbers of busiest experts for `--against` (K of Overlap@K) [default: 4,8]
    #[arg(long, value_name = "K", value_delimiter = ',', requires = "against", value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) top: Vec<u32>,
}

impl Args {
    /// Whether one of them is given.
    pub(super) const fn any(&self) -> bool {
        self.html.is_some() || self.moments.is_some() || self.against.is_some()
    }
}

/// Whether a path is to be read as a profile.
pub(super) fn is_one(path: &Path) -> bool {
    path.is_file() && (path.extension().is_some_and(|e| e == "trace") || file::looks_like_one(path))
}

/// Shows a profile.
///
/// # Errors
/// Fails if the profile cannot be read.
pub(super) fn inspect(path: &Path, args: &Args, as_json: bool) -> Result<()> {
    let profile = Profile::read(path)?;
    if let Some(other) = &args.against {
        return loads::overlap(&profile, &Profile::read(other)?, &args.top, as_json);
    }
    if let Some(page) = &args.html {
        std::fs::write(page, heat::page(&profile)).map_err(|e| io_error("write", page, &e))?;
    }
    if let Some(file) = &args.moments {
        std::fs::write(file, moments(&profile).to_string()).map_err(|e| io_error("write", file, &e))?;
    }
    if as_json {
        return output::json(&json(&profile));
    }
    let origin = &profile.origin;
    let reading = &profile.reading;
    let row = |a: &str, b: String| vec![a.to_owned(), b];
    let numbers: usize = profile.weights.values().map(|m| m.matrices() * m.cols).sum();
    let mut rows = vec![
        row("profile", path.display().to_string()),
        row(
            "model",
            format!(
                "{}, {} layers, {} hidden, {} vocabulary",
                origin.family, origin.layers, origin.hidden, origin.vocab
            ),
        ),
        row("read", format!("{} tokens of {} texts", reading.tokens(), reading.texts.len())),
    ];
    if let Some(perplexity) = reading.perplexity() {
        rows.push(row("perplexity", format!("{perplexity:.4} over {} predictions", reading.predicted)));
    }
    let numbers = human::count(numbers as u64);
    rows.push(row("importance", format!("{numbers} input channels of {} weights", profile.weights.len())));
    let pairs: u64 = profile.correlations.iter().map(Correlations::pairs).sum();
    let inputs = profile.correlations.len();
    let recorded = match inputs {
        0 => "none: weights are rounded to the nearest codes".to_owned(),
        _ => format!("{} pairs of channels of {inputs} inputs", human::count(pairs)),
    };
    rows.push(row("correlations", recorded));
    rows.push(row("neurons", neurons::counted(&profile)));
    if let Some(of) = &profile.confidence {
        let gammas = FALLBACKS.map(|share| format!("{:.3} for {:.0} %", of.quantile(share), 100.0 * share));
        let experts = format!("{} tokens with {} experts each", of.tokens(), of.experts);
        rows.push(row("confidences", format!("{experts}; γ by fallbacks: {}", gammas.join(", "))));
    }
    if !profile.losses.is_empty() {
        let of = |l: &FormatLoss| format!("{} {} {:+.2} %", l.key, l.format, 100.0 * l.mean().exp_m1());
        let all = profile.losses.iter().map(of).collect::<Vec<_>>().join(", ");
        rows.push(row("losses", format!("perplexity with {all}")));
    }
    let mut text = output::table(&rows);
    if !profile.layers.is_empty() {
        let head = ["layer", "tokens", "experts used", "busiest / mean", "least used (tokens)"];
        let mut rows = vec![head.map(str::to_owned).to_vec()];
        rows.extend(profile.layers.iter().map(layer_row));
        text.push('\n');
        text += &output::table(&rows);
    }
    text += &loads::tables(&profile);
    text += &neurons::table(&profile);
    text += &neurons::gates(&profile);
    output::data(&text)
}

fn layer_row(layer: &Routing) -> Vec<String> {
    let least = layer.least_used().into_iter().take(SHOWN);
    let least: Vec<String> = least.map(|e| format!("{e} ({})", layer.chosen[e])).collect();
    vec![
        layer.layer.to_string(),
        layer.tokens.to_string(),
        format!("{} of {}", layer.used(), layer.chosen.len()),
        format!("{:.2}", layer.imbalance()),
        least.join(", "),
    ]
}

/// Confidences of the little pass as JSON, with γ for some shares of fallbacks.
fn confidence_json(of: &Confidence) -> Value {
    let gammas = FALLBACKS.map(|share| json!({ "gamma": of.quantile(share), "fallback_share": share }));
    json!({ "experts_per_token": of.experts, "tokens": of.tokens(), "gammas": gammas })
}

/// The loss of a format as JSON.
fn loss_json(of: &FormatLoss) -> Value {
    json!({"key": of.key, "format": of.format.name(), "tokens": of.tokens, "nats_per_token": of.mean()})
}

/// The input channels of every weight: `mean_square[matrix][channel]`.
fn moments(profile: &Profile) -> Value {
    let of = |m: &Moments| {
        let rows: Vec<&[f32]> = (0..m.matrices()).map(|matrix| m.of(matrix)).collect();
        json!({"tokens": m.tokens, "mean_square": rows})
    };
    profile.weights.iter().map(|(name, m)| (name.clone(), of(m))).collect()
}

/// A profile as JSON, without the channels.
pub(super) fn json(profile: &Profile) -> Value {
    let origin = &profile.origin;
    let reading = &profile.reading;
    let layer = |l: &Routing| {
        let mean: Vec<f64> = (0..l.chosen.len()).map(|e| l.mean_weight(e)).collect();
        json!({
            "layer": l.layer,
            "tokens": l.tokens,
            "experts": l.chosen.len(),
            "experts_per_token": l.k,
            "experts_used": l.used(),
            "imbalance": l.imbalance(),
            "least_used": l.least_used().into_iter().take(SHOWN).collect::<Vec<_>>(),
            "tokens_per_expert": l.chosen,
            "mean_weight_per_expert": mean,
        })
    };
    json!({
        "kind": "profile",
        "version": file::VERSION,
        "model": {
            "family": origin.family,
            "hidden": origin.hidden,
            "vocab": origin.vocab,
            "layers": origin.layers,
            "checkpoint": hex(&origin.checkpoint),
        },
        "tokens": reading.tokens(),
        "texts": reading.texts.iter().map(|(hash, n)| json!({"sha256": hex(hash), "tokens": n})).collect::<Vec<_>>(),
        "predicted": reading.predicted,
        "perplexity": reading.perplexity(),
        "loads": loads::json(profile),
        "neurons": neurons::json(profile),
        "gates": neurons::gates_json(profile),
        "confidence": profile.confidence.as_ref().map(confidence_json),
        "losses": profile.losses.iter().map(loss_json).collect::<Vec<_>>(),
        "layers": profile.layers.iter().map(layer).collect::<Vec<_>>(),
        "weights": profile.weights.iter().map(|(name, m)| json!({
            "name": name,
            "matrices": m.matrices(),
            "channels": m.cols,
            "least_tokens": m.tokens.iter().min(),
        })).collect::<Vec<_>>(),
    })
}
