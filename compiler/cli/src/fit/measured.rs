//! Building the chosen candidate, measuring it, and correcting the predictions of all others.

use super::Args;
use super::candidate::{Candidate, Model, rate};
use moec_base::progress::Progress;
use moec_base::scratch::Scratch;
use moec_base::{Error, Result, human};
use moec_bundle::read::Bundle;
use moec_measure::evaluate::{self, Tasks};
use moec_measure::job::Job;
use moec_pipeline::Stops;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Windows of text that a loss is measured on, at most, and tokens of each.
const WINDOWS: usize = 64;
const WINDOW: usize = 512;
/// Losses below this, in nats per token, are within the noise of a text: they correct nothing.
const NOISE: f64 = 1e-3;

/// Measurements of a bundle.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Measured {
    /// Tokens per second of decoding and of reading a prompt; `None` if the bundle is for another machine.
    decode: Option<f64>,
    prefill: Option<f64>,
    /// Bytes that the measured process took at most, its own program included.
    peak: Option<u64>,
    /// Increase of the loss in nats per token.
    loss: Option<f64>,
}

/// Builds a model.toml, as `moec build` does, and returns the folder of the bundle.
///
/// # Errors
/// Those of the build.
pub(super) fn build(
    args: &Args,
    toml: &Path,
    output: Option<&Path>,
    link: bool,
    progress: &Progress,
) -> Result<PathBuf> {
    let request = moec_driver::Request {
        config: toml,
        target: &args.target,
        output,
        gpu_experts: None,
        tune: None,
        link,
        from_source: false,
        sources: false,
        reuse: true,
        stops: Stops::default(),
        job: Job::ALONE,
    };
    let built = moec_driver::build(&request, progress, &mut |_| {})?;
    let built = built.ok_or_else(|| Error::bug("a build without a bundle"))?;
    let (shown, bytes) = (built.folder.display(), human::bytes(built.summary.weight_bytes));
    progress.stage("Built", &format!("`{shown}`, {bytes}"));
    Ok(built.folder)
}

/// Measures the bundle of a candidate: its speed, and on a text its loss.
///
/// # Errors
/// Fails if a run or the measurement of the loss does.
pub(super) fn measure(
    args: &Args,
    model: &Model<'_>,
    chosen: &Candidate,
    (folder, text): (&Path, Option<&str>),
    progress: &Progress,
) -> Result<Measured> {
    let bundle = Bundle::open(folder)?;
    let mut found = Measured::default();
    if bundle.needs_host_build() || bundle.is_foreign() {
        progress.stage("Note", "the bundle is for another machine: its speed is not measured here");
    } else {
        let report = bench(folder, progress)?;
        let of = |key: &str| report[key].as_f64();
        found.decode = of("decode_tokens_per_s");
        found.prefill = of("prefill_tokens_per_s");
        found.peak = report["peak_memory_bytes"].as_u64();
    }
    if let Some(text) = text {
        found.loss = Some(loss(args, model, chosen, &bundle, text, progress)?);
    }
    Ok(found)
}

/// Report of `bench` on a bundle, in a process of its own.
fn bench(bundle: &Path, progress: &Progress) -> Result<Value> {
    let _phase = progress.phase("Measuring", &bundle.display().to_string());
    let failed = || Error::environment(format!("`moec run {} bench` failed", bundle.display()));
    let moec = std::env::current_exe().map_err(|e| failed().because(e))?;
    let mut bench = Command::new(moec);
    bench.arg("run").arg(bundle).args(["bench", "--json"]).stdin(Stdio::null());
    let output = bench.output().map_err(|e| failed().because(e))?;
    if !output.status.success() {
        return Err(failed().because(String::from_utf8_lossy(&output.stderr).trim()));
    }
    serde_json::from_slice(&output.stdout).map_err(|e| failed().because(e))
}

/// Increase of the loss over that of the model in bf16, with activations and KV cache in f32, in nats per token.
fn loss(
    args: &Args,
    model: &Model<'_>,
    chosen: &Candidate,
    bundle: &Bundle,
    text: &str,
    progress: &Progress,
) -> Result<f64> {
    let bytes = model.facts.by_class.iter().map(|(_, n)| n).sum::<u64>() * 2;
    let scratch = Scratch::with_room("measure the loss", bytes + bytes / 8)?;
    let source = std::path::absolute(model.source).unwrap_or_else(|_| model.source.to_owned());
    let mut settings: Vec<super::candidate::Setting> =
        ["experts", "attention", "embeddings"].map(|key| ("weights", key, "\"bf16\"".to_owned())).to_vec();
    settings.push(("weights", "activations", "\"f32\"".to_owned()));
    settings.push(("memory", "kv_cache", "\"f32\"".to_owned()));
    settings.push(("shapes", "max_context", chosen.context.to_string()));
    let toml = scratch.path().join("model.toml");
    crate::init::write(&toml, &moec_config::template(&source, model.facts, false, &settings), true)?;
    let reference = build(args, &toml, Some(&scratch.path().join("bf16.moec")), false, progress)?;
    let tasks =
        Tasks { text: Some(text.to_owned()), questions: None, window: WINDOW, windows: Some(WINDOWS) };
    let quality = evaluate::evaluate(bundle, Some(&Bundle::open(&reference)?), &tasks, Job::ALONE, progress)?;
    quality.increase.map(f64::ln_1p).ok_or_else(|| Error::bug("a text without a perplexity"))
}

/// Replaces the predictions of a candidate by measurements, and corrects those of all others by the same factors:
/// speeds where experts are in the same place, and losses. What is not measured stays.
pub(super) fn correct(candidates: &mut [Candidate], at: usize, found: &Measured) {
    let Some(own) = candidates.get(at).cloned() else { return };
    let factor = |measured: Option<f64>, predicted: Option<f64>| match (measured, predicted) {
        (Some(m), Some(p)) if m > 0.0 && p > 0.0 => m / p,
        _ => 1.0,
    };
    let decode = factor(found.decode, own.decode);
    let prefill = factor(found.prefill, own.prefill);
    let loud = |nats: Option<f64>| nats.filter(|nats| *nats > NOISE);
    let loss = factor(loud(found.loss), loud(own.loss));
    for (i, c) in candidates.iter_mut().enumerate() {
        if i == at {
            c.decode = found.decode.or(c.decode);
            c.prefill = found.prefill.or(c.prefill);
            c.loss = found.loss.or(c.loss);
            c.measured = true;
        } else if !c.measured {
            if c.kept() == own.kept() {
                c.decode = c.decode.map(|rate| rate * decode);
                c.prefill = c.prefill.map(|rate| rate * prefill);
            }
            c.loss = c.loss.map(|nats| nats * loss);
        }
    }
}

impl Measured {
    /// Measurements beside predictions.
    pub(super) fn line(&self, predicted: &Value) -> String {
        let of = |key: &str| predicted[key].as_f64();
        let mut parts = Vec::new();
        for (what, found, key) in [
            ("decode", self.decode, "decode_tokens_per_s"),
            ("prefill", self.prefill, "prefill_tokens_per_s"),
        ] {
            if found.is_some() {
                parts.push(format!("{what} {} tokens/s, predicted {}", rate(found), rate(of(key))));
            }
        }
        if let Some(peak) = self.peak {
            let most = predicted["memory_bytes"].as_u64().map_or_else(|| "-".to_owned(), human::bytes);
            parts.push(format!("peak memory {}, predicted at most {most}", human::bytes(peak)));
        }
        if let Some(nats) = self.loss {
            let share = |share: f64| format!("{:+.2} %", 100.0 * share);
            let before = of("loss_share").map_or_else(|| "-".to_owned(), share);
            parts.push(format!("loss {}, predicted {before}", share(nats.exp_m1())));
        }
        if parts.is_empty() { "nothing".to_owned() } else { parts.join("; ") }
    }

    /// The measurements as JSON.
    pub(super) fn json(&self) -> Value {
        json!({
            "decode_tokens_per_s": self.decode,
            "prefill_tokens_per_s": self.prefill,
            "peak_memory_bytes": self.peak,
            "loss_share": self.loss.map(f64::exp_m1),
        })
    }
}
