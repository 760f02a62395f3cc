//! Weights that are rounded with error feedback, and formats that are chosen for a size limit.
#![allow(
    clippy::unwrap_used,
    clippy::unnecessary_debug_formatting,
    reason = "what fails here fails the test; paths are quoted as in TOML"
)]

use crate::support;

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use support::{cache, calibration, fails, ferris, moec, ok, recorded};
use tempfile::TempDir;

/// The ferris model with a profile of a few thousand tokens.
struct Case {
    folder: TempDir,
}

impl Case {
    fn new() -> Self {
        let case = Self { folder: tempfile::tempdir().unwrap() };
        recorded(&case.toml(""), &["--text", &calibration(), "--tokens", "8192"], &case.path("t.trace"));
        case
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A `model.toml` with these keys under `[weights]` and after it.
    fn toml(&self, weights: &str) -> PathBuf {
        let path = self.path("model.toml");
        let text = format!(
            "[model]\nsource = {:?}\n[shapes]\nmax_context = 512\n[weights]\nactivations = \"f32\"\n{weights}\n",
            ferris()
        );
        fs::write(&path, text).unwrap();
        path
    }

    fn build(&self, weights: &str, name: &str) -> std::process::Command {
        let mut command = moec();
        command.env("MOEC_CACHE", cache(self.folder.path())).arg("build").arg(self.toml(weights));
        command.args(["--no-run", "-o"]).arg(self.path(name));
        command
    }

    fn profile(&self) -> String {
        format!("[calibrate]\nprofile = {:?}\n", self.path("t.trace"))
    }

    fn json(&self, command: &mut std::process::Command) -> Value {
        let stdout = ok(command.arg("--json").env("MOEC_CACHE", cache(self.folder.path()))).stdout;
        serde_json::from_slice(&stdout).unwrap()
    }
}

fn bytes(bundle: &Path) -> u64 {
    let bundle = moec_bundle::read::Bundle::open(bundle).unwrap();
    bundle.plan.segments.iter().map(|s| s.bytes).sum()
}

/// With error feedback, q4 weights are nearer to the exact model, embedding tables included. The bundle
/// records it, and verifies.
#[test]
fn error_feedback_brings_q4_nearer_to_the_model() {
    let case = Case::new();
    ok(&mut case.build("", "exact.moec"));
    let divergence = |class: &str, rounding: &str| {
        let weights = format!("{class} = \"q4\"\nrounding = \"{rounding}\"\n{}", case.profile());
        ok(&mut case.build(&weights, "out.moec"));
        let mut eval = moec();
        eval.arg("eval").arg(case.path("out.moec")).arg("--against").arg(case.path("exact.moec"));
        eval.arg("--text").arg(ferris().join("eval/text.txt")).args(["--windows", "12"]);
        let explained = case.json(moec().arg("explain").arg(case.path("out.moec")));
        assert_eq!(explained["rounding"], rounding);
        ok(moec().env("MOEC_CACHE", cache(case.folder.path())).arg("verify").arg(case.path("out.moec")));
        case.json(&mut eval)["divergence"].as_f64().unwrap()
    };
    for class in ["attention", "embeddings"] {
        let (nearest, fed) = (divergence(class, "nearest"), divergence(class, "feedback"));
        assert!(fed < 0.75 * nearest, "{class}: {fed} of {nearest}");
    }
}

#[test]
fn requested_size_is_kept_and_reported() {
    let case = Case::new();
    let text = format!("text = [{:?}]\n", ferris().join("eval/calibration.txt"));
    let size = |size: &str, limit: &str| {
        let quality = if limit.is_empty() {
            String::new()
        } else {
            format!("[quality]\nmax_perplexity_increase = \"{limit}\"\n")
        };
        format!("size = \"{size}\"\n{}{text}{quality}", case.profile())
    };
    let built = ok(&mut case.build(&size("5 MiB", ""), "out.moec"));
    let took = bytes(&case.path("out.moec"));
    let stderr = String::from_utf8(built.stderr).unwrap();
    // The output first states the work: every weight is packed once in every format, and then once for the
    // bundle.
    let (_, rest) = stderr.split_once("with up to ").expect(&stderr);
    let most =
        rest.split_once(" of weights").and_then(|(size, _)| moec_base::human::parse_bytes(size)).expect(rest);
    let packed = stderr
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Packing ").and_then(moec_base::human::parse_bytes));
    let packed = packed.sum::<u64>();
    assert!(
        packed - took <= most + most / 50,
        "{packed} bytes were packed, {took} for the bundle; {most} were announced"
    );
    assert!(
        stderr.contains("Estimated up to ") && stderr.find("Estimated") < stderr.find("Measured"),
        "{stderr}"
    );
    let left: Vec<_> = fs::read_dir(case.path("cache")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(left.iter().all(|n| !n.to_string_lossy().starts_with("scratch")), "{left:?}");
    assert!((4 << 20..=5 << 20).contains(&took), "{took} bytes");
    let explained = case.json(moec().arg("explain").arg(case.path("out.moec")));
    let decisions = explained["decisions"].as_array().unwrap();
    let all = decisions.iter().find(|d| d["subject"] == "formats of weights").unwrap();
    assert_eq!(all["figures"]["allowed_bytes"], f64::from(5 << 20));
    let each = decisions.iter().filter(|d| d["subject"] == "format of a weight");
    let formats: Vec<&str> = each.map(|d| d["chosen"].as_str().unwrap()).collect();
    assert!(formats.contains(&"q4") && formats.contains(&"q8"), "{formats:?}");
    let shown = String::from_utf8(ok(moec().arg("explain").arg(case.path("out.moec"))).stdout).unwrap();
    assert!(shown.contains("for 5.0 MiB"), "{shown}");

    let (code, stderr) = fails(&mut case.build(&size("2 MiB", ""), "no.moec"));
    assert!(code != 0 && stderr.contains("2.0 MiB") && stderr.contains("at least"), "{stderr}");
    assert!(!stderr.contains("Packing"), "weights were packed for a size that none has: {stderr}");
    let (code, stderr) = fails(&mut case.build(&size("4 MiB", "0%"), "no.moec"));
    assert!(code != 0 && stderr.contains("max_perplexity_increase"), "{stderr}");
    let (code, stderr) = fails(&mut case.build("size = \"5 MiB\"", "no.moec"));
    assert!(code != 0 && stderr.contains("profile"), "{stderr}");
    let (code, stderr) = fails(&mut case.build(&size("auto", ""), "no.moec"));
    assert!(code != 0 && stderr.contains("max_perplexity_increase"), "{stderr}");
    assert!(!case.path("no.moec").exists());
}
