//! Thresholds of SiLU gates: their loss is measured and reported, a limit is kept, and skipped neurons equal
//! those set to 0. `MOEC_BLESS=1` updates the loss curve of `docs/neurons.md`.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::unnecessary_debug_formatting,
    reason = "what fails here fails the test; paths are quoted as in TOML"
)]

use crate::support;

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::{cache, calibration, checkpoint, fails, ferris, moec, ok, recorded, root};
use tempfile::TempDir;

/// The ferris model with a profile of a few thousand tokens.
struct Case {
    folder: TempDir,
    /// Keys under `[shapes]`.
    shapes: &'static str,
}

impl Case {
    fn new(tokens: usize, shapes: &'static str) -> Self {
        let case = Self { folder: tempfile::tempdir().unwrap(), shapes };
        let args = ["--text", &calibration(), "--tokens", &tokens.to_string()];
        recorded(&case.toml(&ferris(), ""), &args, &case.path("t.trace"));
        case
    }

    fn moec(&self, subcommand: &str) -> Command {
        let mut command = moec();
        command.env("MOEC_CACHE", cache(self.folder.path())).arg(subcommand);
        command
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn toml(&self, source: &Path, more: &str) -> PathBuf {
        let path = self.path("model.toml");
        let text = format!("[model]\nsource = {source:?}\n[shapes]\n{}\n{more}\n", self.shapes);
        fs::write(&path, text).unwrap();
        path
    }

    /// Builds ferris with its profile, these keys under `[experts]`, and what follows them.
    fn build(&self, experts: &str, name: &str) -> Command {
        let profile = self.path("t.trace");
        let toml =
            self.toml(&ferris(), &format!("[calibrate]\nprofile = {profile:?}\n[experts]\n{experts}\n"));
        let mut command = self.moec("build");
        command.arg(toml).args(["--no-run", "-o"]).arg(self.path(name));
        command
    }

    fn json(&self, subcommand: &str, name: &str, more: &[&str]) -> Value {
        let mut command = self.moec(subcommand);
        command.arg(self.path(name)).args(more).arg("--json");
        serde_json::from_slice(&ok(&mut command).stdout).unwrap()
    }

    /// Evaluates a bundle on text, compared with another bundle.
    fn eval(&self, name: &str, against: &str, windows: usize) -> Value {
        let text = ferris().join("eval/text.txt").display().to_string();
        let against = self.path(against).display().to_string();
        self.json("eval", name, &["--text", &text, "--windows", &windows.to_string(), "--against", &against])
    }

    fn shown(&self, subcommand: &str, name: &str) -> String {
        String::from_utf8(ok(self.moec(subcommand).arg(self.path(name))).stdout).unwrap()
    }
}

/// Keys for a short text to measure on: the beginning of the evaluation text.
fn quality(case: &Case) -> String {
    let text = fs::read_to_string(ferris().join("eval/text.txt")).unwrap();
    let end = text.char_indices().map(|(i, _)| i).find(|i| *i >= 24_000).unwrap();
    fs::write(case.path("held-out.txt"), &text[..end]).unwrap();
    format!("[quality]\ntext = [{:?}]\n", case.path("held-out.txt"))
}

fn number(v: &Value) -> f64 {
    v.as_f64().unwrap_or_else(|| panic!("{v} is not a number"))
}

#[test]
fn skipping_half_of_the_neurons_is_reported() {
    let case = Case::new(8192, "max_context = 512\nprefill_chunk = 64");
    let quality = quality(&case);
    let threshold = |skip: &str| format!("skip = \"{skip}\"\nthreshold = \"50%\"\n{quality}");
    ok(&mut case.build("skip = \"off\"", "exact.moec"));
    ok(&mut case.build(&threshold("off"), "whole.moec"));
    ok(&mut case.build(&threshold("auto"), "auto.moec"));
    ok(&mut case.build(&threshold("on"), "neurons.moec"));
    let plan = |name: &str| fs::read_to_string(case.path(name).join("plan.txt")).unwrap();
    for (name, neurons) in
        [("exact.moec", false), ("whole.moec", false), ("auto.moec", true), ("neurons.moec", true)]
    {
        assert_eq!(plan(name).contains("neuron_up"), neurons, "{name}");
        assert_eq!(plan(name).contains("_cats_at"), name != "exact.moec", "{name}");
        // Gate bounds are not used with these thresholds.
        assert!(!plan(name).contains("bounded"), "{name}");
        ok(case.moec("verify").arg(case.path(name)).arg("--quiet"));
    }

    let found = decided(&case.json("explain", "neurons.moec", &[]));
    let cost = taken(&found);
    let (rise, same) = (number(&cost["perplexity_increase_share"]), number(&cost["same_choice_share"]));
    assert!(rise > 0.0 && rise < 0.2 && same > 0.7 && number(&cost["divergence_nats"]) > 0.0, "{cost}");
    let text = case.shown("explain", "neurons.moec");
    assert!(
        text.contains("50 % of the neurons of experts count as 0: an approximation: perplexity"),
        "{text}"
    );
    assert!(text.contains("threshold of |silu(gate)|"), "{text}");
    assert!(case.shown("inspect", "neurons.moec").contains("an approximation"));
    let info = ok(case.moec("run").arg(case.path("neurons.moec")).arg("info")).stdout;
    assert!(String::from_utf8(info).unwrap().contains("50.0 % of the neurons of experts count as 0"));
    assert!(!case.shown("inspect", "exact.moec").contains("thresholds"));

    // Skipping neurons and setting them to 0 in whole experts gives the same results, up to the order of
    // sums.
    let (neurons, whole) =
        (case.eval("neurons.moec", "whole.moec", 4), case.eval("neurons.moec", "exact.moec", 4));
    let (off, lost) = (number(&neurons["divergence"]), number(&whole["divergence"]));
    assert!(off.abs() < 0.02 * lost && number(&neurons["same_choice"]) > 0.99, "{neurons}, {whole}");
}

/// `explain`'s decision about the share of neurons that count as 0.
fn decided(explained: &Value) -> Value {
    let all = explained["decisions"].as_array().unwrap();
    all.iter().find(|d| d["subject"] == "neurons of experts").unwrap().clone()
}

/// Figures of the chosen alternative.
fn taken(decision: &Value) -> &Value {
    let all = decision["alternatives"].as_array().unwrap();
    &all.iter().find(|a| a["what"] == decision["chosen"]).unwrap()["figures"]
}

#[test]
fn quality_limit_selects_the_largest_threshold() {
    let case = Case::new(8192, "max_context = 512\nprefill_chunk = 64");
    let config = format!("threshold = \"auto\"\n{}max_perplexity_increase = \"2%\"\n", quality(&case));
    ok(&mut case.build(&config, "auto.moec"));
    let found = decided(&case.json("explain", "auto.moec", &[]));
    let tried = found["alternatives"].as_array().unwrap().iter().map(|t| &t["figures"]);
    let tried: Vec<(f64, f64)> =
        tried.map(|t| (number(&t["zeros_share"]), number(&t["perplexity_increase_share"]))).collect();
    let share = number(&found["figures"]["zeros_share"]);
    assert!(share >= 0.1 && number(&taken(&found)["perplexity_increase_share"]) <= 0.02, "{found}");
    // The next share, one percent more, exceeds the limit.
    let next = tried.iter().find(|(s, _)| (s - share - 0.01).abs() < 1e-9);
    assert!(next.is_some_and(|(_, rise)| *rise > 0.02), "{found}");
    let info: Value = serde_json::from_slice(
        &ok(case.moec("run").arg(case.path("auto.moec")).args(["info", "--json"])).stdout,
    )
    .unwrap();
    assert!((number(&info["model"]["thresholded_percent"]) - 100.0 * share).abs() < 0.1, "{info}");

    let gates = &case.json("inspect", "t.trace", &[])["gates"];
    assert_eq!(gates.as_array().unwrap().len(), 4, "one row for each layer: {gates}");
    assert!(case.shown("inspect", "t.trace").contains("50 % below"));

    for (keys, expected) in [
        ("threshold = \"auto\"\n", "needs a limit if it is \"auto\""),
        ("threshold = \"auto\"\n[quality]\nmax_perplexity_increase = \"1%\"\n", "needs text to measure on"),
    ] {
        let error = fails(&mut case.build(keys, "no.moec")).1;
        assert!(error.contains(expected) && error.contains("hint:"), "{error}");
    }
    let no_profile = case.toml(&ferris(), "[experts]\nthreshold = \"50%\"");
    let error = fails(case.moec("build").arg(no_profile).args(["--no-run", "-o"]).arg(case.path("no"))).1;
    assert!(error.contains("needs a profile"), "{error}");
    let error = fails(case.build("threshold = \"50%\"", "no.moec").args(["--target", "m2-ultra"])).1;
    assert!(error.contains("static graphs"), "{error}");
}

/// The first layer of GLM-4.5 is dense: its network has a threshold, too, and becomes neurons; shared experts have
/// none.
#[test]
fn dense_networks_have_thresholds_as_experts_do() {
    let case = Case { folder: tempfile::tempdir().unwrap(), shapes: "max_context = 64" };
    let source = checkpoint("glm4_moe");
    let ids: Vec<String> = support::expected(&source).ids.iter().map(ToString::to_string).collect();
    fs::write(case.path("ids.txt"), ids.join(" ")).unwrap();
    let mut calibrate = case.moec("calibrate");
    calibrate.arg(case.toml(&source, "")).arg("--quiet").arg("--ids").arg(case.path("ids.txt"));
    ok(calibrate.arg("-o").arg(case.path("t.trace")));
    let profile = case.path("t.trace");
    let build = |skip: &str| {
        let experts = format!("skip = \"{skip}\"\nthreshold = \"50%\"");
        let formats = "[weights]\nexperts = \"f32\"\nattention = \"f32\"";
        let more = format!("{formats}\n[calibrate]\nprofile = {profile:?}\n[experts]\n{experts}\n");
        let bundle = case.path(&format!("{skip}.moec"));
        ok(case
            .moec("build")
            .arg(case.toml(&source, &more))
            .args(["--no-run", "--quiet", "-o"])
            .arg(&bundle));
        ok(case.moec("verify").arg(&bundle).arg("--quiet"));
        let out = case.path(&format!("{skip}.safetensors"));
        let mut run = case.moec("run");
        run.arg(&bundle).args(["logits", "--ids", &ids[..32].join(","), "--out"]).arg(&out);
        ok(&mut run);
        (fs::read_to_string(bundle.join("plan.txt")).unwrap(), support::logits_file(&out).1)
    };
    let ((whole, expected), (neurons, found)) = (build("off"), build("on"));
    assert!(whole.contains("_cats_at") && neurons.contains("_cats_at"));
    assert!(neurons.contains("layers.0.ffn.neurons") && !neurons.contains("shared.neurons"), "{neurons}");
    let off = support::distance(&found, &expected);
    assert!(off < 1e-3, "a logit is off by {off}");
}

#[test]
fn threshold_is_refused_for_relu_gates() {
    let case = Case { folder: tempfile::tempdir().unwrap(), shapes: "max_context = 64" };
    let source = checkpoint("smallthinker_4b");
    let toml = case.toml(&source, "");
    fs::write(case.path("ids.txt"), "1 2 3 4 5 6 7 8 ".repeat(8)).unwrap();
    let mut calibrate = case.moec("calibrate");
    calibrate.arg(toml).arg("--quiet").arg("--ids").arg(case.path("ids.txt")).arg("-o");
    ok(calibrate.arg(case.path("t.trace")));
    let profile = case.path("t.trace");
    let toml =
        case.toml(&source, &format!("[calibrate]\nprofile = {profile:?}\n[experts]\nthreshold = \"50%\""));
    let error = fails(case.moec("build").arg(toml).args(["--no-run", "-o"]).arg(case.path("no"))).1;
    assert!(error.contains("no expert of this model has SiLU in its gate"), "{error}");
}

/// Shares of the loss curve, in percent.
const SHARES: [u32; 5] = [0, 30, 50, 70, 90];

/// Builds ferris with this share of its neurons at 0, by whole experts or by neurons.
fn bundle(case: &Case, percent: u32, skip: &str) -> String {
    let name = format!("{percent}-{skip}.moec");
    ok(case.build(&format!("skip = \"{skip}\"\nthreshold = \"{percent}%\""), &name).arg("--quiet"));
    name
}

/// Tokens per second with one sequence and one thread.
fn decode(case: &Case, name: &str) -> f64 {
    let more = ["bench", "--prompt", "16", "--gen", "128", "--threads", "1", "--repeat", "1"];
    number(&case.json("run", name, &more)["decode_tokens_per_s"])
}

/// Median ratio of alternating measurements.
fn faster(case: &Case, neurons: &str, whole: &str) -> f64 {
    let mut ratios: Vec<f64> = (0..9).map(|_| decode(case, neurons) / decode(case, whole)).collect();
    ratios.sort_by(f64::total_cmp);
    ratios[ratios.len() / 2]
}

#[test]
fn loss_curve_of_the_page_is_current() {
    const PAGE: &str = "docs/neurons.md";
    const MARKS: [&str; 2] = ["<!-- thresholds -->\n", "<!-- /thresholds -->"];
    let case = Case::new(16_384, "max_context = 512\nprefill_chunk = 256");
    ok(&mut case.build("skip = \"off\"", "exact.moec"));
    let page = fs::read_to_string(root().join(PAGE)).unwrap();
    let (before, rest) = page.split_once(MARKS[0]).unwrap();
    let (written, after) = rest.split_once(MARKS[1]).unwrap();
    let row = |percent: u32, speed: &dyn Fn(&str) -> String| {
        let name = bundle(&case, percent, "on");
        let found = case.eval(&name, "exact.moec", 40);
        let of = |key: &str| number(&found[key]);
        let (perplexity, divergence, same) = (of("perplexity"), of("divergence"), 100.0 * of("same_choice"));
        format!("| {percent} % | {perplexity:.3} | {divergence:.5} | {same:.1} % | {} |", speed(&name))
    };
    if std::env::var_os("MOEC_BLESS").is_some() {
        let whole = "exact.moec";
        let rows = SHARES.map(|p| row(p, &|name| format!("{:.2}×", faster(&case, name, whole)))).join("\n");
        let head = "| neurons at 0 | perplexity | divergence | same next token | decoding, beside whole experts |\n\
                    |---|---|---|---|---|";
        let page = format!("{before}{}\n{head}\n{rows}\n\n{}{after}", MARKS[0], MARKS[1]);
        return fs::write(root().join(PAGE), page).unwrap();
    }
    // Measures a row again; rounding differs slightly between machines.
    let found = row(50, &|_| String::new());
    let line = written.lines().find(|l| l.starts_with("| 50 %")).unwrap();
    let numbers = |line: &str| -> Vec<f64> {
        line.split('|')
            .filter_map(|cell| cell.trim().trim_end_matches([' ', '%']).parse().ok())
            .take(4)
            .collect()
    };
    let (stand, found) = (numbers(line), numbers(&found));
    let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 0.05 * b.abs();
    assert!(found.len() == 4 && stand.iter().zip(&found).all(near), "{PAGE} says {stand:?}, not {found:?}");
}
