//! Placements for devices with a neural processing unit from a user's view: profiles, packages that verify,
//! and the commands' output about them.

use crate::support::{Setup, cache, coreml, fails, ferris, moec, ok, recorded};
use moec_ir::text::parse_placement;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

/// ferris with a profile of two thousand tokens, recorded by the command line.
struct Calibrated {
    folder: tempfile::TempDir,
    toml: PathBuf,
}

impl Calibrated {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let setup = Setup { format: "f16", chunk: 64, batch: &[1], context: 256 };
        let toml = setup.write(&ferris(), folder.path());
        Self { folder, toml }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn moec(&self, subcommand: &str) -> Command {
        let mut command = moec();
        command
            .env("MOEC_CACHE", cache(self.folder.path()))
            .env("MOEC_THREADS", "1")
            .arg(subcommand)
            .arg("--quiet");
        command
    }

    fn calibrate(&self, text: &str, out: &str) {
        let text = ferris().join("eval").join(text).display().to_string();
        recorded(&self.toml, &["--text", &text, "--tokens", "2048", "--window", "256"], &self.path(out));
    }

    /// Builds for a target, with further arguments.
    fn build(&self, more: &[&str]) -> Command {
        let mut command = self.moec("build");
        command.arg(&self.toml).args(["--target", "m2-ultra", "-o"]).arg(self.path("out.moec")).args(more);
        command
    }
}

fn stdout(command: &mut Command) -> String {
    String::from_utf8(ok(command).stdout).unwrap()
}

#[test]
fn groups_on_the_neural_engine_become_packages_that_verify() {
    let case = Calibrated::new();
    case.calibrate("calibration.txt", "a.trace");
    let toml = fs::read_to_string(&case.toml).unwrap();
    let config = "[calibrate]\nprofile = \"a.trace\"\n[placement]\nexperts = \"npu\"\n";
    fs::write(&case.toml, toml + config).unwrap();
    let build = || case.build(&["--no-run"]);

    // Without coremltools the error has the command to install it, and no files remain.
    let mut without = build();
    without.env("MOEC_COREML_HELPER", case.path("none")).env("MOEC_COREML_PYTHON", case.path("none"));
    let (code, stderr) = fails(&mut without);
    assert!(code == 1 && stderr.contains("cargo xtask coreml"), "{stderr}");
    assert!(!case.path("out.moec").exists());

    let Some(found) = coreml() else { return };
    ok(build().envs(found));
    let mut verify = case.moec("verify");
    verify.arg(case.path("out.moec")).arg("--json");
    let report: Value = serde_json::from_str(&stdout(&mut verify)).unwrap();
    let functions = report["packages"].as_array().unwrap();
    // A package has a function per size.
    let packages: BTreeMap<&str, u64> =
        functions.iter().map(|f| (f["package"].as_str().unwrap(), f["experts"].as_u64().unwrap())).collect();
    assert_eq!(packages.values().sum::<u64>(), 4 * 24, "{report}");
    assert!(functions.len() > packages.len(), "{report}");
    for f in functions {
        let error = f["error"]["relative"].as_f64().unwrap();
        assert!(error > 0.0 && error < 2e-3, "{f}");
        assert_eq!((&f["refused"], f["findings"].as_array().unwrap().len()), (&false.into(), 0), "{f}");
    }

    // One weight is changed: the package no longer computes the checkpoint's results, and its hash differs.
    let weights =
        case.path("out.moec/artifacts/layers.0.group.0.mlpackage/Data/com.apple.CoreML/weights/weight.bin");
    let mut bytes = fs::read(&weights).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x40;
    fs::write(&weights, bytes).unwrap();
    let mut verify = case.moec("verify");
    let (code, stderr) = fails(verify.arg(case.path("out.moec")));
    assert!(code == 1 && stderr.contains("weight.bin") && stderr.contains("changed"), "{stderr}");
}

/// Graphs with one size and with four give the same results; four sizes compute less padding.
#[test]
fn a_graph_of_several_sizes_computes_the_same_with_less_padding() {
    let Some(found) = coreml() else { return };
    let case = Calibrated::new();
    case.calibrate("calibration.txt", "a.trace");
    let toml = fs::read_to_string(&case.toml).unwrap();
    let mut reports = Vec::new();
    for sizes in [1, 4] {
        let config =
            "[calibrate]\nprofile = \"a.trace\"\n[placement]\nexperts = \"npu\"\nattention = \"cpu\"\n";
        fs::write(&case.toml, format!("{toml}{config}[experts]\ntiers = 1\nsizes = {sizes}\n")).unwrap();
        ok(case.build(&["--no-run"]).envs(found.clone()));
        let mut eval = case.moec("eval");
        eval.arg(case.path("out.moec")).arg("--text").arg(ferris().join("eval/text.txt"));
        eval.args(["--windows", "2", "--window", "100", "--json"]);
        reports.push(serde_json::from_str::<Value>(&stdout(&mut eval)).unwrap());
        fs::remove_dir_all(case.path("out.moec")).unwrap();
    }
    let of = |i: usize, key: &str| {
        let found = reports[i].get(key).or_else(|| reports[i]["rates"].get(key));
        found.and_then(Value::as_f64).unwrap_or_else(|| panic!("no `{key}` in {}", reports[i]))
    };
    assert_eq!(of(0, "perplexity"), of(1, "perplexity"));
    assert_eq!(of(0, "dropped"), of(1, "dropped"));
    assert!(of(1, "padded") < of(0, "padded") - 0.03, "{reports:?}");
}

#[test]
fn a_profile_decides_a_placement_and_is_shown() {
    let case = Calibrated::new();
    let (code, stderr) = fails(&mut case.build(&[]));
    assert!(code == 1 && stderr.contains("no profile") && stderr.contains("moec calibrate"), "{stderr}");

    case.calibrate("calibration.txt", "a.trace");
    case.calibrate("text.txt", "b.trace");
    let toml = fs::read_to_string(&case.toml).unwrap();
    fs::write(&case.toml, toml + "[calibrate]\nprofile = \"a.trace\"\n[experts]\ntiers = 2\n").unwrap();
    let text =
        stdout(&mut case.build(&["--stop-after", "assign_residency", "--print-after", "assign_residency"]));
    let p = parse_placement(&text).unwrap();
    moec_ir::verify::placement(&p).unwrap();
    assert_eq!((p.chunk, p.experts.len(), p.experts[0].experts.len()), (64, 4, 24));
    assert!(
        p.experts.iter().all(|t| (1..=2).contains(&t.tiers.len()) && t.expected.unwrap().imbalance > 1.0)
    );
    // Launches cost more than they save, so there are no packages, and Python is not started.
    assert!(p.ops.iter().all(|o| o.unit == 0));
    ok(&mut case.build(&["--no-run"]));
    assert!(!case.path("out.moec/artifacts/layers.0.group.0.mlpackage").exists());

    let shown = stdout(case.moec("inspect").arg(case.path("a.trace")));
    for words in [
        "tokens per expert and chunk of 64",
        "capacity of all experts",
        "norm of attention output",
        "chosen together most often",
    ] {
        assert!(shown.contains(words), "`{words}` is not in:\n{shown}");
    }
    let json: Value =
        serde_json::from_str(&stdout(case.moec("inspect").arg(case.path("a.trace")).arg("--json"))).unwrap();
    assert_eq!((&json["loads"]["chunk"], &json["loads"]["chunks"]), (&64.into(), &32.into()));
    let rates = json["loads"]["capacities"].as_array().unwrap();
    let rate = |i: usize, of: &str| rates[i][of].as_f64().unwrap();
    let last = rates.len() - 1;
    assert!(rate(0, "overflow") > 0.0 && rate(last, "overflow") == 0.0);
    assert!(rate(0, "padding") < rate(last, "padding"));

    let page = case.path("a.html");
    ok(case.moec("inspect").arg(case.path("a.trace")).arg("--html").arg(&page));
    let page = fs::read_to_string(page).unwrap();
    assert!(page.starts_with("<!doctype html>") && page.trim_end().ends_with("</html>"));
    assert_eq!(page.matches("<svg").count(), page.matches("</svg>").count());
    // One cell for each expert of each layer, and no external resources.
    assert_eq!(page.matches("× the mean</title>").count(), 4 * 24);
    assert!(!page.contains("http") && !page.contains("<script") && page.contains("prefers-color-scheme"));

    let against = |other: &str| {
        let mut command = case.moec("inspect");
        command.arg(case.path("a.trace")).arg("--against").arg(case.path(other)).arg("--json");
        serde_json::from_str::<Value>(&stdout(&mut command)).unwrap()["overlap"].clone()
    };
    let (own, other) = (against("a.trace"), against("b.trace"));
    assert_eq!((&own[0]["k"], &own[1]["k"], &own[0]["median"]), (&4.into(), &8.into(), &1.0.into()));
    // Popular experts are mostly the same on held-out text of the same kind.
    assert!((0.5..=1.0).contains(&other[1]["median"].as_f64().unwrap()), "{other}");
    let mut command = case.moec("inspect");
    command.arg(case.path("a.trace")).arg("--against").arg(case.path("b.trace")).args(["--top", "2,24"]);
    let table = stdout(&mut command);
    assert!(table.contains("Overlap@2") && table.contains("median") && table.contains("100.0 %"), "{table}");
    let mut command = case.moec("inspect");
    command.arg(case.path("a.trace")).arg("--against").arg(case.path("b.trace")).args(["--top", "25"]);
    assert!(fails(&mut command).1.contains("24 experts"));
    let (code, stderr) = fails(case.moec("inspect").arg(&case.toml).arg("--html").arg(case.path("x.html")));
    assert!(code == 2 && stderr.contains("require a profile"), "{stderr}");
}
