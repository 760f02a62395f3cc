//! Auto-tuned schedules compared with those of the cost model, and `moec explain`'s output about them.
#![allow(
    clippy::unnecessary_debug_formatting,
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

use crate::support;

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::{fails, ferris, moec, ok, tree};

fn model_toml(folder: &Path) -> PathBuf {
    let path = folder.join("model.toml");
    let text = format!(
        "[model]\nsource = {:?}\n[shapes]\nmax_context = 128\nprefill_chunk = 64\n[weights]\nexperts = \"q4\"\n\
         attention = \"bf16\"\nembeddings = \"q8\"\n",
        ferris()
    );
    fs::write(&path, text).unwrap();
    path
}

fn build(folder: &Path, bundle: &str, more: &[&str]) -> Command {
    let mut command = moec();
    command.env("MOEC_CACHE", folder.join("cache"));
    command.arg("build").arg(model_toml(folder)).args(["--no-run", "-o"]).arg(folder.join(bundle)).args(more);
    command
}

fn explain(bundle: &Path, more: &[&str]) -> String {
    let output = ok(moec().arg("explain").arg(bundle).args(more));
    String::from_utf8(output.stdout).unwrap()
}

fn logits(folder: &Path, bundle: &str) -> Vec<u8> {
    let out = folder.join("logits.safetensors");
    let ids: Vec<String> = (1..60).map(|i| (i * 7 % 200).to_string()).collect();
    ok(moec()
        .arg("run")
        .arg(folder.join(bundle))
        .args(["logits", "--ids", &ids.join(","), "--out"])
        .arg(&out));
    fs::read(out).unwrap()
}

#[test]
fn tuning_is_cached_explained_and_changes_no_result() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    ok(&mut build(folder, "plain", &[]));
    let known_counts = |bundle: &str| {
        let output = ok(&mut build(folder, bundle, &["--tune", "--tune-time", "900"]));
        let text = String::from_utf8(output.stderr).unwrap();
        let line = text.lines().find(|l| l.contains("from the cache")).unwrap_or_else(|| panic!("{text}"));
        let mut numbers = line.split_whitespace().filter_map(|w| w.parse::<usize>().ok());
        (numbers.next().unwrap(), numbers.next().unwrap())
    };
    let (timed, known) = known_counts("tuned");
    assert!(timed > 0 && known == 0, "{timed} {known}");
    // The second build measures nothing, and gives the same bytes.
    assert_eq!(known_counts("again"), (0, timed));
    assert!(tree(&folder.join("tuned")) == tree(&folder.join("again")), "two tuned builds differ");
    // Schedules with unreadable records are measured again.
    let kept = fs::read_dir(folder.join("cache/schedules")).unwrap().next().unwrap().unwrap().path();
    fs::write(kept, "{\"kernel\": 1}").unwrap();
    assert_eq!(known_counts("mended"), (1, timed - 1));

    assert!(logits(folder, "plain") == logits(folder, "tuned"), "a schedule changed a result");

    let report: Value = serde_json::from_str(&explain(&folder.join("tuned"), &["--json"])).unwrap();
    let kernels = report["kernels"].as_array().unwrap();
    assert!(report["threads"].as_u64().unwrap() > 0 && kernels.len() >= timed);
    for k in kernels {
        let measured = k["measured"].as_array().unwrap();
        assert!(k["by"] == "clock" && measured.len() > 1, "{k}");
        assert!(measured.iter().any(|m| m["schedule"] == k["schedule"]), "{k}");
        let times = measured.iter().map(|m| m["ms"].as_f64().unwrap());
        let least = times.fold(f64::INFINITY, f64::min);
        assert!(least > 0.0);
        assert!(k["symbol"].as_str().unwrap().starts_with("moec_"), "{k}");
    }
    let text = explain(&folder.join("tuned"), &[]);
    assert!(text.contains("← chosen") && text.contains("measured with"), "{text}");
}

#[test]
fn explain_shows_the_costs_of_kernels() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    ok(&mut build(folder, "plain", &["--target", "x86-64-v3"]));
    let bundle = folder.join("plain");
    let manifest = fs::read_to_string(bundle.join("manifest.json")).unwrap();
    assert!(manifest.contains("\"decisions.json\""), "{manifest}");

    let report: Value = serde_json::from_str(&explain(&bundle, &["--json"])).unwrap();
    let kernels = report["kernels"].as_array().unwrap();
    let of = |key: &str, value: &str| kernels.iter().filter(|k| k[key] == value).count();
    assert!(of("kind", "linear") > 0 && of("kind", "expert_gate_up") > 0 && of("kind", "expert_down") > 0);
    assert!(of("entry", "prefill[64]") > 0 && of("entry", "decode[1]") > 0);
    assert_eq!(of("by", "model"), kernels.len());
    for k in kernels {
        let p = &k["predicted"];
        assert!(p["ms"].as_f64().unwrap() > 0.0 && p["overhead"].as_f64().unwrap() >= 1.0, "{k}");
        assert!(["arithmetic", "memory"].contains(&p["bound"].as_str().unwrap()) && k["why"] != "", "{k}");
        assert!(k.get("measured").is_none() && k["steps"].as_u64().unwrap() > 0, "{k}");
    }
    let weights = report["weights"].as_array().unwrap();
    let experts = weights.iter().find(|w| w["class"] == "experts").unwrap();
    assert!(experts["format"] == "q4" && experts["bits_per_weight"].as_f64().unwrap() < 6.0, "{experts}");
    assert!(report["kv_cache"]["bits_per_number"].as_f64().unwrap() >= 8.0);

    let text = explain(&bundle, &[]);
    for part in ["prefill[64]", "arithmetic ", "by the cost model", "bound by", "layers.*.", "assumed"] {
        assert!(text.contains(part), "`{part}` is missing:\n{text}");
    }
    // Every matrix has a name, and nothing is empty or unexplained.
    for part in [
        "linear layers.*.attn.q",
        "linear layers.*.attn.o",
        "layers.*.attn.k, layers.*.attn.v",
        "linear embed",
        "bits each",
    ] {
        assert!(text.contains(part), "`{part}` is missing:\n{text}");
    }
    for part in ["beside the products", "schedule     (", "schedule    ("] {
        assert!(!text.contains(part), "`{part}` says nothing:\n{text}");
    }
    for line in text.lines().filter(|l| l.starts_with("  linear ")) {
        assert!(!line.contains("linear 1"), "no name of the matrix: {line}");
    }
    let named = kernels.iter().filter(|k| k["kind"] == "linear");
    assert!(named.clone().count() > 0);
    for k in named {
        assert!(!k["matrices"].as_array().unwrap().is_empty(), "{k}");
    }
    // An f32 number has 32 bits; the rest of the stored bytes is reported as padding.
    let exact: Vec<&str> = text.lines().filter(|l| l.starts_with("weights") && l.contains(": f32")).collect();
    assert!(!exact.is_empty() && exact.iter().all(|l| l.contains("f32, 32 bits each")), "{exact:?}");
    let shown = explain(&bundle, &["--expert", "0"]);
    assert!(shown.contains("experts have no capacities"), "{shown}");
    let (code, stderr) = fails(moec().arg("explain").arg(&bundle).args(["--expert", "999"]));
    assert!(
        code == 2
            && stderr.contains("expert 999 of `--expert` does not exist")
            && stderr.contains("counted from 0"),
        "{stderr}"
    );

    let layer = explain(&bundle, &["--layer", "0"]);
    assert!(
        layer.contains("layers.0.") && !layer.contains(" head") && !layer.contains("layers.1."),
        "{layer}"
    );
    let (code, stderr) = fails(moec().arg("explain").arg(&bundle).args(["--layer", "99"]));
    assert!(code == 2 && stderr.contains("no layer 99") && stderr.contains("hint"), "{stderr}");
    let shown = ok(moec().arg("inspect").arg(&bundle)).stdout;
    assert!(String::from_utf8_lossy(&shown).contains("moec explain"));

    // A changed file is refused; the error for a bundle of an earlier moec has a hint.
    fs::write(bundle.join("decisions.json"), "{}").unwrap();
    assert!(fails(moec().arg("explain").arg(&bundle)).1.contains("changed after the build"));
}

#[test]
fn tuning_for_another_machine_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let elsewhere = if cfg!(target_arch = "x86_64") { "neoverse-v2" } else { "x86-64-v3" };
    let (code, stderr) = fails(&mut build(dir.path(), "b", &["--tune", "--target", elsewhere]));
    assert_eq!(code, 2, "{stderr}");
    assert!(stderr.contains(&format!("which is not a `{elsewhere}`")) && stderr.contains("hint"), "{stderr}");
    assert!(!dir.path().join("b").exists());
}
