//! Trials: the model of the self-test is built for a unit, run, and compared with the reference.

use moec_base::error::io_error;
use moec_base::progress::Progress;
use moec_base::scratch::Scratch;
use moec_base::{Error, Result};
use moec_bundle::read::Bundle;
use moec_device::NATIVE;
use moec_runtime::platform::busy::{Busy, Others};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// The checkpoint, file by file.
const MODEL: [(&str, &[u8]); 5] = [
    ("config.json", include_bytes!("../../../../golden/models/ferris/config.json")),
    ("generation_config.json", include_bytes!("../../../../golden/models/ferris/generation_config.json")),
    ("tokenizer.json", include_bytes!("../../../../golden/models/ferris/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../../../../golden/models/ferris/tokenizer_config.json")),
    ("model.safetensors", include_bytes!("../../../../golden/models/ferris/model.safetensors")),
];
/// Result of transformers in f32: 64 tokens of a prompt and the 64 most probable after it, and the logits after the prompt.
const EXPECTED: &[u8] = include_bytes!("../../../../golden/models/ferris/self_test.safetensors");
/// Tokens of the prompt.
const PROMPT: usize = 64;
/// Tolerance of logits against the reference's, with activations in f32.
const TOLERANCE: f32 = 2e-3;
/// Bytes of disk: checkpoint, bundle, and what a build has beside it.
const DISK: u64 = 256 << 20;
/// Configuration of its build. Activations in f32 are those of the reference.
const TOML: &str = "[model]\nsource = \"hf\"\n[shapes]\nmax_context = 256\nprefill_chunk = 64\ndecode_batch = [1]\n\
                    [weights]\nexperts = \"bf16\"\nattention = \"bf16\"\nembeddings = \"bf16\"\nactivations = \"f32\"\n";

/// A build of the model.
pub(super) struct Trial<'a> {
    /// Name of the target, or the path of a device file.
    pub(super) target: &'a OsStr,
    /// The unit that experts and attention run on; `None`: the CPU.
    pub(super) unit: Option<&'a str>,
    /// Tolerance of logits against the reference's.
    pub(super) near: f32,
}

/// Result of a trial.
pub(super) struct TrialResult {
    pub(super) cpu: String,
    pub(super) features: Vec<String>,
    pub(super) build_s: f64,
    /// Number of tokens that are the reference's, up to the first that is not, and of all.
    pub(super) tokens: (usize, usize),
    /// The largest distance of a logit.
    pub(super) distance: f32,
    /// Its tolerance.
    pub(super) near: f32,
    pub(super) tokens_per_s: Option<f64>,
    /// CPU time of other programs while it ran, where it was measured.
    pub(super) others: Option<Others>,
}

impl TrialResult {
    /// Whether the results are right. A unit that rounds more than the reference may choose another token of
    /// almost equal probability.
    pub(super) fn is_right(&self) -> bool {
        // A distance of NaN is not near.
        self.distance <= self.near && (self.near > TOLERANCE || self.tokens.0 == self.tokens.1)
    }

    pub(super) fn verdict(&self) -> &'static str {
        if self.is_right() { "ok" } else { "WRONG" }
    }
}

/// The model in a temporary folder, and its reference.
pub(super) struct Trials {
    scratch: Scratch,
    moec: PathBuf,
    ids: Vec<u32>,
    logits: Vec<f32>,
}

impl Trials {
    /// Writes the checkpoint.
    ///
    /// # Errors
    /// Fails if the files cannot be written.
    pub(super) fn new() -> Result<Self> {
        let scratch = Scratch::with_room("test moec", DISK)?;
        let (ids, logits) = expected()?;
        write(&scratch.path().join("hf"), &MODEL)?;
        let moec = std::env::current_exe()
            .map_err(|e| Error::environment("the path of the program `moec` is unknown").because(e))?;
        Ok(Self { scratch, moec, ids, logits })
    }

    /// The temporary folder.
    pub(super) fn folder(&self) -> &Path {
        self.scratch.path()
    }

    /// The bundle of a unit, once [`Trials::of`] has built it.
    pub(super) fn bundle(&self, unit: Option<&str>) -> PathBuf {
        self.folder().join(format!("{}.moec", unit.unwrap_or("out")))
    }

    /// Builds for this machine's CPU, and runs.
    ///
    /// # Errors
    /// Fails if a step fails, with its output.
    pub(super) fn cpu(&self, progress: &Progress) -> Result<TrialResult> {
        self.of(&Trial { target: OsStr::new(NATIVE), unit: None, near: TOLERANCE }, progress)
    }

    /// Builds, and runs.
    ///
    /// # Errors
    /// Fails if a step fails, with its output.
    pub(super) fn of(&self, trial: &Trial<'_>, progress: &Progress) -> Result<TrialResult> {
        let bundle = self.bundle(trial.unit);
        progress.stage("Building", "a model of 6 million parameters");
        let model = self.folder().join("model.toml");
        write(self.folder(), &[("model.toml", TOML.as_bytes())])?;
        if let Some(unit) = trial.unit {
            // Static graphs have capacities, which recorded routing decides. What goes past them is not lost.
            let ids = self.folder().join("ids.txt");
            write(self.folder(), &[("ids.txt", list(&self.ids).as_bytes())])?;
            let mut calibrate = self.moec();
            calibrate.arg("calibrate").arg(&model).args(["--quiet", "--ids"]).arg(&ids);
            ran(calibrate.arg("-o").arg(self.folder().join("ids.trace")))?;
            let more = format!(
                "[calibrate]\nprofile = \"ids.trace\"\n[experts]\noverflow = \"spill\"\n\
                 [placement]\nexperts = \"{unit}\"\nattention = \"{unit}\"\n"
            );
            write(self.folder(), &[("model.toml", (TOML.to_owned() + &more).as_bytes())])?;
        }
        let start = Instant::now();
        let mut build = self.moec();
        build.arg("build").arg(&model).args(["--quiet", "--target"]);
        ran(build.arg(trial.target).arg("-o").arg(&bundle))?;
        let build_s = start.elapsed().as_secs_f64();
        progress.stage("Running", "it");
        let (prompt, rest) = self.ids.split_at(PROMPT.min(self.ids.len()));
        let n = rest.len().to_string();
        let before = Busy::now();
        let made = object(self.run(&bundle).args(["generate", "--json", "--ids", &list(prompt), "-n", &n]))?;
        let others = before.and_then(|before| before.others(Busy::now()));
        let got = made["ids"].as_array().map(Vec::as_slice).unwrap_or_default();
        let same =
            got.iter().zip(rest).take_while(|(got, want)| got.as_u64() == Some(u64::from(**want))).count();
        let file = self.folder().join("logits.safetensors");
        ran(self.run(&bundle).args(["logits", "--ids", &list(prompt), "--out"]).arg(&file))?;
        let target = Bundle::open(&bundle)?.plan.target;
        Ok(TrialResult {
            cpu: target.cpu,
            features: target.features,
            build_s,
            tokens: (same, rest.len()),
            distance: distance(&last_row(&file, self.logits.len())?, &self.logits),
            near: trial.near,
            tokens_per_s: made["decode_tokens_per_s"].as_f64(),
            others,
        })
    }

    /// This program.
    pub(super) fn moec(&self) -> Command {
        Command::new(&self.moec)
    }

    /// The program of a bundle: its own, where this machine could link one.
    pub(super) fn run(&self, bundle: &Path) -> Command {
        let program = bundle.join("run");
        if program.is_file() {
            return Command::new(program);
        }
        let mut command = self.moec();
        command.arg("run").arg(bundle);
        command
    }
}

/// Runs a program and returns the JSON that it prints.
pub(super) fn object(command: &mut Command) -> Result<Value> {
    let out = ran(command)?;
    serde_json::from_slice(&out)
        .map_err(|e| Error::bug(format!("the output of {} is not JSON", shown(command))).because(e))
}

/// Runs a program and returns its output.
fn ran(command: &mut Command) -> Result<Vec<u8>> {
    moec_base::interrupt::check()?;
    moec_base::interrupt::check()?;
    let out = moec_base::interrupt::output(command)
        .map_err(|e| Error::environment("a program cannot be started").because(e))?;
    if out.status.success() {
        return Ok(out.stdout);
    }
    Err(Error::environment(format!("{} failed ({})", shown(command), out.status))
        .because(String::from_utf8_lossy(&out.stderr).trim()))
}

/// `1,2,3`
fn list(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

fn shown(command: &Command) -> String {
    let words: Vec<_> = command.get_args().take(1).map(|a| a.to_string_lossy()).collect();
    format!("`{}`", words.join(" "))
}

fn write(folder: &Path, files: &[(&str, &[u8])]) -> Result<()> {
    fs::create_dir_all(folder).map_err(|e| io_error("create", folder, &e))?;
    files.iter().try_for_each(|(name, bytes)| {
        let path = folder.join(name);
        fs::write(&path, bytes).map_err(|e| io_error("write", &path, &e))
    })
}

/// The reference's ids and logits.
fn expected() -> Result<(Vec<u32>, Vec<f32>)> {
    let wrong = |e: &dyn std::fmt::Display| Error::bug("the data of the self-test cannot be read").because(e);
    let tensors = SafeTensors::deserialize(EXPECTED).map_err(|e| wrong(&e))?;
    let tensor = |name: &str| tensors.tensor(name).map_err(|e| wrong(&e));
    let (ids, logits) = (tensor("greedy_ids")?, tensor("logits")?);
    Ok((
        words(ids.data()).map(u32::from_le_bytes).collect(),
        words(logits.data()).map(f32::from_le_bytes).collect(),
    ))
}

fn words(bytes: &[u8]) -> impl Iterator<Item = [u8; 4]> {
    bytes.chunks_exact(4).map(|w| [w[0], w[1], w[2], w[3]])
}

/// The logits of the last position of a file that `run logits` has written.
fn last_row(path: &PathBuf, vocab: usize) -> Result<Vec<f32>> {
    let bytes = fs::read(path).map_err(|e| io_error("read", path, &e))?;
    let wrong = || Error::bug("`run logits` wrote no logits");
    let tensors = SafeTensors::deserialize(&bytes).map_err(|e| wrong().because(e))?;
    let logits = tensors.tensor("logits").map_err(|e| wrong().because(e))?;
    let row = logits.data().len().checked_sub(4 * vocab).filter(|_| logits.dtype() == Dtype::F32);
    Ok(words(&logits.data()[row.ok_or_else(wrong)?..]).map(f32::from_le_bytes).collect())
}

/// The largest distance; NaN if one of them is NaN.
fn distance(a: &[f32], b: &[f32]) -> f32 {
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, |most: f32, d| if d.is_nan() || d > most { d } else { most })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn embedded_trial_data_equals_the_reference() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../golden/models/ferris");
        let bytes = fs::read(golden.join("expected.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let (ids, logits) = expected().unwrap();
        let greedy: Vec<u32> =
            words(tensors.tensor("greedy_ids").unwrap().data()).map(u32::from_le_bytes).collect();
        assert_eq!(ids, greedy);
        let input: Vec<u32> =
            words(tensors.tensor("input_ids").unwrap().data()).map(u32::from_le_bytes).collect();
        assert_eq!(ids[..PROMPT], input[..PROMPT]);
        let all: Vec<f32> = words(tensors.tensor("logits").unwrap().data()).map(f32::from_le_bytes).collect();
        assert_eq!(logits, all[(PROMPT - 1) * logits.len()..][..logits.len()]);
    }

    #[test]
    fn trial_with_a_wrong_token_or_logit_is_wrong() {
        let found = |same: usize, distance: f32, near: f32| TrialResult {
            cpu: "c".into(),
            features: vec![],
            build_s: 1.0,
            tokens: (same, 64),
            distance,
            near,
            tokens_per_s: None,
            others: None,
        };
        assert!(found(64, 1e-4, TOLERANCE).is_right());
        assert!(!found(63, 1e-4, TOLERANCE).is_right());
        assert!(found(63, 1e-2, 0.1).is_right(), "a unit that rounds may choose another token");
        for distance in [0.2, f32::NAN, f32::INFINITY] {
            assert!(
                !found(64, distance, 0.1).is_right() && found(64, distance, TOLERANCE).verdict() == "WRONG"
            );
        }
        assert!(
            distance(&[1.0, 2.0], &[1.5, 2.0]) == 0.5 && distance(&[f32::NAN, 1.0], &[0.0, 1.0]).is_nan()
        );
    }
}
