//! Every family, compiled and run from a user's view, compared with transformers.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "golden/choices.rs"]
mod choices;
use crate::support;

use std::path::Path;
use support::{
    FAMILIES, FOLDED, Setup, checkpoint, clean, distance, expected, ferris, ferris_relu, list, logits_file,
    moec, ok, runs_here,
};

/// Largest difference of any logit of the demo model.
const TOLERANCE: f32 = 2e-3;

/// Builds `source`, and compares logits and greedy tokens with each number of threads. `own_binary` runs
/// `BUNDLE/run`, otherwise `moec run`.
fn compare(source: &Path, target: &str, setup: Setup<'_>, own_binary: bool) {
    let folder = tempfile::tempdir().expect("a folder");
    let toml = setup.write(source, folder.path());
    let bundle = folder.path().join("b");
    let mut build = moec();
    build.arg("build").arg(&toml).args(["--target", target, "--quiet", "-o"]).arg(&bundle);
    if !own_binary {
        build.arg("--no-run");
    }
    ok(&mut build);
    let run = || {
        if own_binary {
            clean(std::process::Command::new(bundle.join("run")))
        } else {
            let mut command = moec();
            command.arg("run").arg(&bundle);
            command
        }
    };
    let want = expected(source);
    let what = format!("{} for {target}, {setup:?}", source.display());
    let prompt = want.greedy.len() - 24;
    for threads in ["1", "2"] {
        let out = folder.path().join("logits.safetensors");
        ok(run().args(["logits", "--ids", &list(&want.ids), "--threads", threads, "--out"]).arg(&out));
        let (shape, logits) = logits_file(&out);
        assert_eq!(shape, [want.ids.len(), want.logits.len() / want.ids.len()], "{what}");
        let worst = distance(&logits, &want.logits);
        assert!(worst <= want.tolerance(), "{what}, {threads} threads: a logit is off by {worst}");

        let ids = list(&want.greedy[..prompt]);
        let output = ok(run().args(["generate", "--ids", &ids, "-n", "24", "--json", "--threads", threads]));
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
        let ids: Vec<u32> = serde_json::from_value(report["ids"].clone()).expect("a list of ids");
        assert_eq!(ids, want.greedy[prompt..], "{what}, {threads} threads");
    }
}

/// Tokens per chunk: 7 does not divide the prompt of 48, 16 does, 48 holds it whole.
const CHUNKS: [usize; 3] = [7, 16, 48];
/// More chunk sizes for models whose chunks continue from a state: other rows that remain, and none.
const MORE_CHUNKS: [usize; 5] = [7, 16, 48, 20, 64];

/// Compares every family with every chunk size. With `turn`, each family gets one size in turn, since the
/// effect of the size is the same for every format.
fn matrix(target: &str, format: &str, turn: Option<usize>) {
    if !runs_here(target) {
        return;
    }
    for (i, family) in FAMILIES.into_iter().enumerate() {
        let chunks = if FOLDED.contains(&family) { &MORE_CHUNKS[..] } else { &CHUNKS };
        for (j, &chunk) in chunks.iter().enumerate() {
            if turn.is_none_or(|turn| (i + turn) % chunks.len() == j) {
                let setup = Setup { format, chunk, batch: &[1], context: 96 };
                compare(&checkpoint(family), target, setup, false);
            }
        }
    }
}

#[test]
fn families_in_f32_for_avx2() {
    matrix("x86-64-v3", "f32", None);
}

#[test]
fn families_in_f32_for_avx512() {
    matrix("x86-64-v4", "f32", None);
}

#[test]
fn families_in_bf16_for_avx2() {
    matrix("x86-64-v3", "bf16", Some(0));
}

#[test]
fn families_in_bf16_for_avx512() {
    matrix("x86-64-v4", "bf16", Some(1));
}

/// Targets of the families of 2026.
const TARGETS: [&str; 3] = ["native", "x86-64-v3", "x86-64-v4"];

/// Compares a family for a target, with chunks of this many tokens. Bundles for this machine in chunks that do
/// not divide the prompt run by their own binary.
fn late(family: &str, target: &str, chunk: usize) {
    if runs_here(target) {
        let setup = Setup { format: "f32", chunk, batch: &[1], context: 96 };
        compare(&checkpoint(family), target, setup, target == "native" && chunk == 7);
    }
}

/// Delta rules with one decay per head and per channel, in chunks that are computed together, with and
/// without remaining rows.
#[test]
fn delta_rules_in_long_chunks() {
    for family in ["bailing_hybrid", "kimi_linear", "qwen3_5_moe"] {
        for chunk in [20, 48] {
            let setup = Setup { format: "f32", chunk, batch: &[1], context: 96 };
            compare(&checkpoint(family), "native", setup, false);
        }
    }
}

/// The families of 2026 that a plain run compiles.
const SIX: [&str; 6] = ["gemma4", "glm4_moe_lite", "jamba", "kimi_linear", "minimax_m2", "nemotron_h"];

/// Each with one target, and with two chunk sizes over all six.
#[test]
fn six_families_of_2026() {
    for (i, family) in SIX.into_iter().enumerate() {
        late(family, TARGETS[i % 3], CHUNKS[i % 2]);
    }
}

#[test]
fn all_families_of_2026() {
    for family in moec_testing::checkpoints::late_checkpoints() {
        for (target, chunk) in TARGETS.into_iter().flat_map(|target| CHUNKS.map(|chunk| (target, chunk))) {
            late(family, target, chunk);
        }
    }
}

#[test]
fn families_through_their_own_binary() {
    for family in FAMILIES {
        let setup = Setup { format: "f32", chunk: 20, batch: &[1, 2], context: 96 };
        compare(&checkpoint(family), "native", setup, true);
    }
}

#[test]
fn the_demo_model_in_its_own_format() {
    in_its_own_format(&ferris());
}

/// The prompt is also longer than the window of 512 tokens.
#[test]
fn the_demo_model_with_relu_in_its_own_format() {
    in_its_own_format(&ferris_relu());
}

fn in_its_own_format(source: &Path) {
    let folder = tempfile::tempdir().expect("a folder");
    let toml = Setup { format: "bf16", chunk: 256, batch: &[1], context: 1024 }.write(source, folder.path());
    let bundle = folder.path().join("b");
    ok(moec().arg("build").arg(&toml).args(["--quiet", "--no-run", "-o"]).arg(&bundle));
    let want = expected(source);
    let out = folder.path().join("logits.safetensors");
    ok(moec().arg("run").arg(&bundle).args(["logits", "--ids", &list(&want.ids), "--out"]).arg(&out));
    let worst = distance(&logits_file(&out).1, &want.logits);
    assert!(worst <= TOLERANCE, "a logit is off by {worst}");
    let ids = list(&want.greedy[..64]);
    let output = ok(moec().arg("run").arg(&bundle).args(["generate", "--ids", &ids, "-n", "64", "--json"]));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    let ids: Vec<u32> = serde_json::from_value(report["ids"].clone()).expect("a list of ids");
    assert_eq!(ids, want.greedy[64..]);
}

#[test]
fn the_demo_model_is_as_good_as_its_reference() {
    is_as_good_as_its_reference(&ferris());
}

#[test]
fn the_demo_model_with_relu_is_as_good_as_its_reference() {
    is_as_good_as_its_reference(&ferris_relu());
}

fn is_as_good_as_its_reference(source: &Path) {
    let folder = tempfile::tempdir().expect("a folder");
    let toml = Setup { format: "bf16", chunk: 128, batch: &[1], context: 1024 }.write(source, folder.path());
    let bundle = folder.path().join("b");
    ok(moec().arg("build").arg(&toml).args(["--quiet", "--no-run", "-o"]).arg(&bundle));
    let mut eval = moec();
    eval.arg("eval")
        .arg(&bundle)
        .args(["--windows", "40", "--json", "--text"])
        .arg(ferris().join("eval/text.txt"));
    let output = ok(eval.arg("--qa").arg(ferris().join("eval/needle.jsonl")));
    let got: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    let text =
        std::fs::read_to_string(source.join("reference_metrics.json")).expect("the reference is there");
    let want: serde_json::Value = serde_json::from_str(&text).expect("the reference is well-formed");
    let number = |v: &serde_json::Value| v.as_f64().expect("a number");
    let (perplexity, reference) = (number(&got["perplexity"]), number(&want["perplexity"]));
    assert!((perplexity / reference - 1.0).abs() < 1e-5, "perplexity {perplexity} instead of {reference}");
    assert_eq!(number(&got["exact_match"]), number(&want["needle"]));
}
