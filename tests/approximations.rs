//! Loss by rounding: every storage format and compute type on real text, compared with the exact model.
#![allow(
    clippy::unnecessary_debug_formatting,
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

use crate::support;

use std::path::{Path, PathBuf};
use support::{ferris, ferris_relu, moec, ok};

/// Builds a model for the host in one format.
fn build(source: &Path, folder: &Path, format: &str, activations: &str) -> PathBuf {
    let toml = folder.join(format!("{format}-{activations}.toml"));
    let text = format!(
        "[model]\nsource = {source:?}\n[shapes]\nmax_context = 1024\nprefill_chunk = 256\n[weights]\nexperts = \"{format}\"\n\
         attention = \"{format}\"\nembeddings = \"{format}\"\nactivations = \"{activations}\"\n"
    );
    std::fs::write(&toml, text).unwrap();
    let bundle = toml.with_extension("moec");
    ok(moec().arg("build").arg(&toml).args(["--quiet", "--no-run", "-o"]).arg(&bundle));
    bundle
}

/// Metrics of the reference implementation.
fn reference(source: &Path) -> serde_json::Value {
    let text = std::fs::read_to_string(source.join("reference_metrics.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// A model with ReLU gates is no more sensitive to rounding than one with SiLU gates.
#[test]
fn q8_keeps_the_quality_of_the_relu_model() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = build(&ferris_relu(), folder.path(), "q8", "auto");
    let mut eval = moec();
    eval.arg("eval")
        .arg(&bundle)
        .args(["--windows", "40", "--json", "--text"])
        .arg(ferris().join("eval/text.txt"));
    let output = ok(eval.arg("--qa").arg(ferris().join("eval/needle.jsonl")));
    let got: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let want = reference(&ferris_relu());
    let number = |v: &serde_json::Value| v.as_f64().unwrap();
    let change = number(&got["perplexity"]) / number(&want["perplexity"]) - 1.0;
    println!("{got}, perplexity {:+.4} %", 100.0 * change);
    assert!(change.abs() < 0.002, "{got}, perplexity {:+.4} %", 100.0 * change);
    assert!((number(&got["exact_match"]) - number(&want["needle"])).abs() < 0.02, "{got}");
}

#[test]
fn rounding_costs_match_the_documentation() {
    let folder = tempfile::tempdir().unwrap();
    let exact = build(&ferris(), folder.path(), "bf16", "f32");
    let reference = reference(&ferris())["perplexity"].as_f64().unwrap();
    // Storage format, compute type, largest change of perplexity, smallest share of equal predictions.
    let rows = [
        ("bf16", "auto", 0.0005, 0.995),
        ("q8", "f32", 0.001, 0.98),
        ("q8", "auto", 0.001, 0.98),
        ("q4", "f32", 0.03, 0.85),
        ("q4", "auto", 0.03, 0.85),
    ];
    for (format, activations, most, least) in rows {
        let bundle = build(&ferris(), folder.path(), format, activations);
        let mut eval = moec();
        eval.arg("eval").arg(&bundle).args(["--windows", "40", "--json", "--text"]);
        let output = ok(eval.arg(ferris().join("eval/text.txt")).arg("--against").arg(&exact));
        let got: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let number = |key: &str| got[key].as_f64().unwrap();
        let change = number("perplexity") / reference - 1.0;
        let what = format!("{format}, {activations}: {got}, perplexity {:+.4} %", 100.0 * change);
        println!("{what}");
        assert!(change.abs() < most, "{what}");
        assert!(number("same_choice") >= least, "{what}");
        assert!(number("divergence") >= -1e-6, "{what}");
    }
}
