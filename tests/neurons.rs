//! Experts by neurons, built and run from a user's view, compared with whole experts of the same model.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::support;

use std::fs;
use std::path::{Path, PathBuf};
use support::{Setup, checkpoint, copy_checkpoint, distance, expected, fails, list, logits_file, moec, ok};

/// Number of generated tokens.
const TOKENS: usize = 16;

/// A copy of a golden checkpoint whose gates are changed to ReLU.
fn with_relu(family: &str, folder: &Path) -> PathBuf {
    let (from, to) = (checkpoint(family), folder.join(family));
    copy_checkpoint(&from, &to);
    let config = fs::read_to_string(from.join("config.json")).unwrap();
    let relu = config.replace("\"hidden_act\": \"silu\"", "\"hidden_act\": \"relu\"");
    assert_ne!(relu, config, "{family} names its activation otherwise");
    fs::write(to.join("config.json"), relu).unwrap();
    to
}

/// Tokens and logits of a build with this `skip`; checks that they are the same with one thread and two.
fn run(source: &Path, skip: &str, format: &str, batch: usize) -> (Vec<u32>, Vec<f32>) {
    let folder = tempfile::tempdir().unwrap();
    // Chunks with a remainder, so that the same weights are multiplied with many rows and with few.
    let toml = Setup { format, chunk: 20, batch: &[batch], context: 96 }.write(source, folder.path());
    let text = fs::read_to_string(&toml).unwrap();
    fs::write(&toml, format!("{text}[experts]\nskip = \"{skip}\"\n")).unwrap();
    let bundle = folder.path().join("b");
    ok(moec().arg("build").arg(&toml).args(["--no-run", "--quiet", "-o"]).arg(&bundle));
    let plan = fs::read_to_string(bundle.join("plan.txt")).unwrap();
    assert_eq!(plan.contains("neuron_up"), skip == "on", "{skip}");
    ok(moec().arg("verify").arg(&bundle).arg("--quiet"));
    let ids = expected(source).ids;
    let of = |threads: &str| {
        let out = folder.path().join("logits.safetensors");
        let mut command = moec();
        command.arg("run").arg(&bundle).args(["logits", "--ids", &list(&ids), "--threads", threads, "--out"]);
        ok(command.arg(&out));
        let mut command = moec();
        command.arg("run").arg(&bundle).args(["generate", "--ids", &list(&ids[..24]), "--json"]);
        let stdout = ok(command.args(["-n", &TOKENS.to_string(), "--threads", threads])).stdout;
        let report: serde_json::Value = serde_json::from_slice(&stdout).unwrap();
        let tokens: Vec<u32> = serde_json::from_value(report["ids"].clone()).unwrap();
        (tokens, logits_file(&out).1)
    };
    let (one, two) = (of("1"), of("2"));
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!((&one.0, bits(&one.1)), (&two.0, bits(&two.1)), "{skip}, {format}: threads change results");
    one
}

#[test]
fn neurons_give_the_tokens_of_whole_experts() {
    for (family, format, batch) in
        [("mixtral", "f32", 1), ("olmoe", "bf16", 1), ("qwen3_moe", "bf16", 4), ("qwen2_moe", "f16", 2)]
    {
        let folder = tempfile::tempdir().unwrap();
        let source = with_relu(family, folder.path());
        let (whole, neurons) = (run(&source, "off", format, batch), run(&source, "on", format, batch));
        assert_eq!(neurons.0, whole.0, "{family} in {format}");
        let worst = distance(&neurons.1, &whole.1);
        assert!(worst < 1e-3, "{family} in {format}: a logit is off by {worst}");
    }
}

/// Bamboo and ProSparse-Llama have dense networks, which run as one expert that every row chooses.
#[test]
fn dense_networks_run_as_one_expert_of_all_rows() {
    for (family, format, batch) in [("bamboo", "f32", 1), ("bamboo", "bf16", 4), ("prosparse", "f16", 2)] {
        let source = checkpoint(family);
        let (whole, neurons) = (run(&source, "off", format, batch), run(&source, "on", format, batch));
        assert_eq!(neurons.0, whole.0, "{family} in {format}");
        let worst = distance(&neurons.1, &whole.1);
        assert!(worst < 1e-3, "{family} in {format}: a logit is off by {worst}");
        if format == "f32" {
            let off = distance(&neurons.1, &expected(&source).logits);
            assert!(off < 1e-3, "{family}: a logit is {off} off the reference");
        }
    }
}

#[test]
fn quantisation_groups_along_neurons_lose_no_accuracy() {
    for (family, format) in [("olmoe", "q8"), ("mixtral", "q4")] {
        let folder = tempfile::tempdir().unwrap();
        let source = with_relu(family, folder.path());
        let exact = run(&source, "off", "f32", 1).1;
        let off = |skip: &str| {
            let found = run(&source, skip, format, 1).1;
            let sum = found.iter().zip(&exact).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
            (sum / exact.len() as f64).sqrt()
        };
        let (whole, neurons) = (off("off"), off("on"));
        assert!(
            neurons < 1.5 * whole,
            "{family} in {format}: {neurons} of neurons, {whole} of whole experts"
        );
    }
}

#[test]
fn models_without_skippable_neurons_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let build = |source: &Path, more: &str| {
        let toml = Setup { format: "bf16", chunk: 16, batch: &[1], context: 64 }.write(source, folder.path());
        let text = fs::read_to_string(&toml).unwrap();
        fs::write(&toml, format!("{text}{more}")).unwrap();
        let bundle = folder.path().join("b");
        fails(moec().arg("build").arg(&toml).args(["--no-run", "--quiet", "-o"]).arg(&bundle)).1
    };
    let error = build(&checkpoint("olmoe"), "[experts]\nskip = \"on\"\n");
    assert!(
        error.contains("no expert and no dense network of this model can be skipped")
            && error.contains("hint:"),
        "{error}"
    );
}
