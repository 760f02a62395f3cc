//! `moec self-test`: builds and runs a small model on this machine, and says whether it computes what it should.
//!
//! The model, `golden/models/ferris`, travels with moec: 12.4 MB of the program are its checkpoint and tokenizer, and 9 KB what the
//! reference implementation says. What is tested is what a user does: `moec build`, and `BUNDLE/run`, in processes of their own.

use super::output;
use crate::bundle::read::Bundle;
use crate::progress::Progress;
use crate::scratch::Scratch;
use crate::{Error, Result};
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

/// The checkpoint, file by file.
const MODEL: [(&str, &[u8]); 5] = [
    ("config.json", include_bytes!("../../../golden/models/ferris/config.json")),
    ("generation_config.json", include_bytes!("../../../golden/models/ferris/generation_config.json")),
    ("tokenizer.json", include_bytes!("../../../golden/models/ferris/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../../../golden/models/ferris/tokenizer_config.json")),
    ("model.safetensors", include_bytes!("../../../golden/models/ferris/model.safetensors")),
];
/// What transformers says, in f32: 64 tokens of a prompt and the 64 likeliest behind it, and the logits behind the prompt.
const EXPECTED: &[u8] = include_bytes!("../../../golden/models/ferris/self_test.safetensors");
/// Tokens of the prompt.
const PROMPT: usize = 64;
/// How far logits may be from the reference's, with activations in f32.
const NEAR: f32 = 2e-3;
/// Bytes of disk: checkpoint, bundle, and what a build has beside it.
const DISK: u64 = 256 << 20;
/// How it is built. Activations in f32 are those of the reference.
const TOML: &str = "[model]\nsource = \"hf\"\n[shapes]\nmax_context = 256\nprefill_chunk = 64\ndecode_batch = [1]\n\
                    [weights]\nexperts = \"bf16\"\nattention = \"bf16\"\nembeddings = \"bf16\"\nactivations = \"f32\"\n";

/// Build and run a small model on this machine, and say whether it computes what it should
///
/// Takes some ten seconds. The last line says version, processor, verdict and speed: send it along with what you report.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Print one JSON object to stdout
    #[arg(long)]
    pub json: bool,
}

/// What was found.
struct Found {
    cpu: String,
    features: Vec<String>,
    build_s: f64,
    /// How many of the tokens are the reference's, up to the first that is not, and all.
    tokens: (usize, usize),
    /// The largest distance of a logit.
    distance: f32,
    tokens_per_s: Option<f64>,
}

impl Found {
    fn is_right(&self) -> bool {
        // A distance that is no number is not near.
        self.tokens.0 == self.tokens.1 && self.distance <= NEAR
    }
}

/// Runs it; gives 1 where what was computed is wrong.
///
/// # Errors
/// A step that fails, with what it said.
pub fn run(args: &Args, progress: &Progress) -> Result<ExitCode> {
    let found = found(progress).map_err(|e| {
        let hint = e.hint.clone().map_or_else(String::new, |h| format!("{h}; "));
        e.context("the self-test did not come to its end")
            .hint(format!("{hint}report all of this with the output of `moec doctor`, and `{}`", version()))
    })?;
    let verdict = if found.is_right() { "ok" } else { "WRONG" };
    if args.json {
        output::json(&value(&found, verdict))?;
    } else {
        output::data(&line(&found, verdict))?;
    }
    if found.is_right() {
        return Ok(ExitCode::SUCCESS);
    }
    progress.warn("what this machine computes is not what it should be: report the line with the output of `moec doctor`");
    Ok(ExitCode::FAILURE)
}

fn version() -> String {
    format!("moec {} on {}-{}", env!("CARGO_PKG_VERSION"), std::env::consts::ARCH, std::env::consts::OS)
}

fn line(f: &Found, verdict: &str) -> String {
    let rate = f.tokens_per_s.map_or("no rate".to_owned(), |r| format!("{r:.0} tokens/s"));
    let (same, all) = f.tokens;
    format!(
        "{}, {} ({}): {verdict}, {same} of {all} tokens as expected, logits within {:.1e}, {rate}, built in {:.1} s\n",
        version(),
        f.cpu,
        f.features.join(" "),
        f.distance,
        f.build_s
    )
}

fn value(f: &Found, verdict: &str) -> Value {
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "machine": format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS),
        "cpu": f.cpu,
        "features": f.features,
        "verdict": verdict,
        "tokens": {"same": f.tokens.0, "of": f.tokens.1},
        "largest_distance_of_a_logit": f.distance,
        "decode_tokens_per_s": f.tokens_per_s,
        "build_s": f.build_s,
    })
}

fn found(progress: &Progress) -> Result<Found> {
    let scratch = Scratch::with_room("test moec", DISK)?;
    let folder = scratch.path();
    let (ids, logits) = expected()?;
    write(&folder.join("hf"), &MODEL)?;
    write(folder, &[("model.toml", TOML.as_bytes())])?;
    let bundle = folder.join("out.moec");
    progress.stage("Building", "a model of 6 million parameters");
    let start = Instant::now();
    let moec =
        std::env::current_exe().map_err(|e| Error::environment("moec does not find itself").because(e))?;
    let mut build = Command::new(moec);
    build.arg("build").arg(folder.join("model.toml")).args(["--quiet", "-o"]).arg(&bundle);
    ran(&mut build)?;
    let build_s = start.elapsed().as_secs_f64();
    progress.stage("Running", "it");
    let list = |ids: &[u32]| ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let (prompt, rest) = ids.split_at(PROMPT.min(ids.len()));
    let program = bundle.join("run");
    let made = ran(Command::new(&program).args([
        "generate",
        "--json",
        "--ids",
        &list(prompt),
        "-n",
        &rest.len().to_string(),
    ]))?;
    let made: Value =
        serde_json::from_slice(&made).map_err(|e| Error::bug("`run generate` prints no JSON").because(e))?;
    let got = made["ids"].as_array().map(Vec::as_slice).unwrap_or_default();
    let same = got.iter().zip(rest).take_while(|(got, want)| got.as_u64() == Some(u64::from(**want))).count();
    let file = folder.join("logits.safetensors");
    ran(Command::new(&program).args(["logits", "--ids", &list(prompt), "--out"]).arg(&file))?;
    let target = Bundle::open(&bundle)?.plan.target;
    Ok(Found {
        cpu: target.cpu,
        features: target.features,
        build_s,
        tokens: (same, rest.len()),
        distance: distance(&last_row(&file, logits.len())?, &logits),
        tokens_per_s: made["decode_tokens_per_s"].as_f64(),
    })
}

/// Runs a program; gives what it prints.
fn ran(command: &mut Command) -> Result<Vec<u8>> {
    let out = crate::interrupt::output(command)
        .map_err(|e| Error::environment("a program does not start").because(e))?;
    if out.status.success() {
        return Ok(out.stdout);
    }
    let words: Vec<_> = command.get_args().take(1).map(|a| a.to_string_lossy().into_owned()).collect();
    Err(Error::environment(format!("`{}` failed ({})", words.join(" "), out.status))
        .because(String::from_utf8_lossy(&out.stderr).trim()))
}

fn write(folder: &Path, files: &[(&str, &[u8])]) -> Result<()> {
    fs::create_dir_all(folder).map_err(|e| crate::error::io_error("create", folder, &e))?;
    files.iter().try_for_each(|(name, bytes)| {
        let path = folder.join(name);
        fs::write(&path, bytes).map_err(|e| crate::error::io_error("write", &path, &e))
    })
}

/// The reference's ids and logits.
fn expected() -> Result<(Vec<u32>, Vec<f32>)> {
    let wrong = |e: &dyn std::fmt::Display| Error::bug("the self-test's own data cannot be read").because(e);
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
    let bytes = fs::read(path).map_err(|e| crate::error::io_error("read", path, &e))?;
    let wrong = || Error::bug("`run logits` wrote no logits");
    let tensors = SafeTensors::deserialize(&bytes).map_err(|e| wrong().because(e))?;
    let logits = tensors.tensor("logits").map_err(|e| wrong().because(e))?;
    let row = logits.data().len().checked_sub(4 * vocab).filter(|_| logits.dtype() == Dtype::F32);
    Ok(words(&logits.data()[row.ok_or_else(wrong)?..]).map(f32::from_le_bytes).collect())
}

/// The largest distance; not a number where one of them is none.
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
    fn what_travels_is_what_the_reference_says() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden/models/ferris");
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
    fn a_wrong_token_or_logit_is_wrong() {
        let right = Found {
            cpu: "c".into(),
            features: vec![],
            build_s: 1.0,
            tokens: (64, 64),
            distance: 1e-4,
            tokens_per_s: None,
        };
        assert!(right.is_right());
        assert!(!Found { tokens: (63, 64), ..right }.is_right());
        for distance in [1e-2, f32::NAN, f32::INFINITY] {
            let wrong = Found {
                cpu: "c".into(),
                features: vec![],
                build_s: 1.0,
                tokens: (64, 64),
                distance,
                tokens_per_s: None,
            };
            assert!(!wrong.is_right() && line(&wrong, "WRONG").contains("WRONG"));
        }
        assert!(
            distance(&[1.0, 2.0], &[1.5, 2.0]) == 0.5 && distance(&[f32::NAN, 1.0], &[0.0, 1.0]).is_nan()
        );
    }
}
