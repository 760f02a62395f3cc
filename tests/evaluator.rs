//! The evaluator and the compiled code agree layer by layer, and rewriting keeps the meaning of the Graph.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, reason = "a test fails by panicking")]

use crate::support;

use moec_base::progress::Progress;
use moec_bundle::read::Bundle;
use moec_config::Config;
use moec_driver::{Request, build};
use moec_import::ImportOptions;
use moec_ir::eval::Evaluator;
use moec_measure::job::Job;
use moec_measure::verify::{BOUND, Report, verify};
use moec_pipeline::{Compilation, Inputs, Stops};
use moec_targets::target;
use std::path::Path;
use support::{FAMILIES, FOLDED, Setup, cache, checkpoint, distance, expected, fails, ferris, moec, ok};

/// Largest relative difference of any value between evaluator and compiled code.
const CHAINED: f64 = 2e-5;

/// Output of `moec verify`: a table with a legend, the verdict as JSON, and only the verdict with `--quiet`.
#[test]
fn verify_prints_its_verdict_as_data() {
    let folder = tempfile::tempdir().unwrap();
    let toml = Setup { format: "bf16", chunk: 16, batch: &[1], context: 32 }
        .write(&checkpoint("olmoe"), folder.path());
    let bundle = folder.path().join("b");
    ok(moec().arg("build").arg(&toml).args(["--no-run", "--quiet", "-o"]).arg(&bundle));
    let verify = |args: &[&str]| {
        let output = ok(moec().arg("verify").arg(&bundle).args(args));
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let (whole, stages) = verify(&[]);
    assert!(stages.contains("Finished") && !stages.contains("is OK"), "the verdict is said twice: {stages}");
    let head = whole.lines().find(|l| l.starts_with("entry point")).unwrap();
    for column in ["own error", "up to", "summed error"] {
        assert!(head.contains(column), "{head}");
        assert!(whole.lines().any(|l| l.starts_with(column)), "`{column}` is not explained:\n{whole}");
    }
    assert!(whole.contains("relative to the reference"), "{whole}");
    let verdict = whole.lines().last().unwrap();
    assert!(verdict.contains("is OK") && verdict.contains("steps of 2 entry points"), "{verdict}");
    // With `--quiet`, only errors and the verdict, which is the data of this command.
    let (quiet, stderr) = verify(&["--quiet"]);
    assert!(quiet.contains(verdict) && !quiet.contains("own error") && stderr.is_empty(), "{quiet}{stderr}");
    let data: serde_json::Value = serde_json::from_str(&verify(&["--json"]).0).unwrap();
    assert!(data["verdict"] == "right" && data["failures"] == serde_json::json!([]), "{data}");

    // With a bound that is too small, the verdict is also on stdout, and the exit code is 1.
    let output = support::finish(moec().arg("verify").arg(&bundle).args(["--bound", "0", "--quiet"]));
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.code() == Some(1) && stdout.contains("is wrong"), "{stdout}");
    let output = support::finish(moec().arg("verify").arg(&bundle).args(["--bound", "0", "--json"]));
    let data: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(data["verdict"] == "wrong" && !data["failures"].as_array().unwrap().is_empty(), "{data}");
}

/// Every family in f32 and in three of five other formats, so that each format is tested with most families.
#[test]
fn compiled_steps_agree_with_the_evaluator_layer_by_layer() {
    for (i, family) in FAMILIES.into_iter().enumerate() {
        let others = ["bf16", "f16", "q8", "q4", "q4o"].into_iter().cycle().skip(3 * i).take(3);
        for format in std::iter::once("f32").chain(others) {
            let folder = tempfile::tempdir().unwrap();
            let source = checkpoint(family);
            let bundle = built(&source, format, "f32", folder.path());
            let (checkpoint, _) = moec_import::open(&source, &ImportOptions::default()).unwrap();
            // Compared with the bundle's own weights, and with the checkpoint's weights after rounding.
            for source in [None, Some(&checkpoint)] {
                let report = verify(&bundle, source, None, &Progress::silent()).unwrap();
                assert_eq!(report.failures(), Vec::<String>::new(), "{family} in {format}");
                assert_eq!(report.entries.len(), 3);
                for entry in &report.entries {
                    assert!(
                        entry.nodes.len() > 20,
                        "{family}: only {} nodes were looked at",
                        entry.nodes.len()
                    );
                    for node in &entry.nodes {
                        let chained = node.chained.unwrap_or_default();
                        // A gate with one column may be near 0 and have a large relative error. Recurrent
                        // states accumulate rounding errors.
                        let least = if FOLDED.contains(&family) { 1e-5 } else { 1e-6 };
                        let same = chained.within(CHAINED) || chained.max_abs < least;
                        assert!(same, "{family} {format} {}: {node:?}", entry.entry);
                    }
                }
            }
        }
    }
}

/// A bundle of a checkpoint for this machine.
fn built(source: &Path, format: &str, activations: &str, folder: &Path) -> Bundle {
    let toml = Setup { format, chunk: 16, batch: &[1, 3], context: 64 }.write(source, folder);
    let text = std::fs::read_to_string(&toml).unwrap();
    let setting = format!("activations = \"{activations}\"");
    std::fs::write(&toml, text.replace("activations = \"f32\"", &setting)).unwrap();
    let bundle = folder.join("b");
    let request = Request {
        config: &toml,
        target: "native",
        output: Some(&bundle),
        gpu_experts: None,
        tune: None,
        link: false,
        from_source: false,
        sources: false,
        reuse: false,
        stops: Stops::default(),
        job: Job::ALONE,
    };
    build(&request, &Progress::silent(), &mut |_| {}).unwrap();
    Bundle::open(&bundle).unwrap()
}

/// The largest error of any step, as a share of its permitted error.
fn share(report: &Report) -> f64 {
    let nodes = report.entries.iter().flat_map(|e| &e.nodes);
    nodes.map(|n| n.local.relative / report.allowed(n)).fold(0.0, f64::max)
}

#[test]
fn rounding_steps_are_within_their_error_bounds() {
    let sources = FAMILIES.map(checkpoint).into_iter().chain([ferris()]);
    let mut rounded = 0;
    for source in sources {
        for (format, activations) in [("bf16", "auto"), ("q8", "auto"), ("q4", "auto"), ("q4o", "auto")] {
            let folder = tempfile::tempdir().unwrap();
            let bundle = built(&source, format, activations, folder.path());
            let report = verify(&bundle, None, None, &Progress::silent()).unwrap();
            eprintln!("{} in {format}: {:.2} of what is allowed", source.display(), share(&report));
            assert_eq!(report.failures(), Vec::<String>::new(), "{} in {format}", source.display());
            let nodes = report.entries.iter().flat_map(|e| &e.nodes);
            let off =
                nodes.filter(|n| n.op == "linear" && n.rounding > 0.0 && !n.local.within(BOUND)).count();
            rounded += off;
            // With the bound of f32, steps that round would fail.
            let strict = Report { bound: Some(BOUND), ..report };
            assert_eq!(off > 0, strict.failures().iter().any(|f| f.contains("`linear`")));
        }
    }
    assert!(rounded > 0, "every target multiplies bytes");
}

#[test]
fn rewriting_keeps_the_logits() {
    for family in FAMILIES {
        let folder = tempfile::tempdir().unwrap();
        let setup = Setup { format: "f32", chunk: 20, batch: &[1], context: 64 };
        let config = Config::load(&setup.write(&checkpoint(family), folder.path())).unwrap();
        let (source, spec) = moec_import::open(&config.model.source, &ImportOptions::default()).unwrap();
        let target = target("x86-64-v3").unwrap();
        let want = expected(&checkpoint(family));
        let logits = |pass| {
            let mut c = Compilation::new(Inputs::new(&config, &source, &spec, &target));
            let stops = Stops { stop_after: Some(pass), ..Stops::default() };
            c.run(stops, &Progress::silent(), &mut |_| {}).unwrap();
            Evaluator::new(&c.module, &source).logits(&want.ids).unwrap().as_f32().to_vec()
        };
        let (before, after) = (logits("lower"), logits("rewrite"));
        assert!(distance(&before, &want.logits) <= 1e-4, "{family}: the graph is not the model");
        let (off, most) = (distance(&before, &after), if FOLDED.contains(&family) { 1e-4 } else { 1e-5 });
        assert!(off <= most, "{family}: rewriting changed the result by {off}");
    }
}

#[test]
fn weights_rounded_by_importance_verify() {
    // ferris has a tokenizer; its embedding table is also its head, and both are rounded separately.
    ["q4", "q4o"].into_iter().for_each(rounded_by_importance);
}

fn rounded_by_importance(format: &str) {
    let folder = tempfile::tempdir().unwrap();
    let toml = Setup { format, chunk: 16, batch: &[1], context: 64 }.write(&ferris(), folder.path());
    let text = ferris().join("eval/text.txt");
    let calibrate = format!("[calibrate]\ntext = ['{}']\ntokens = 512\n", text.display());
    std::fs::write(&toml, std::fs::read_to_string(&toml).unwrap() + &calibrate).unwrap();
    let bundle = folder.path().join("b");
    let mut build = moec();
    build.env("MOEC_CACHE", cache(folder.path()));
    ok(build.arg("build").arg(&toml).args(["--no-run", "--quiet", "-o"]).arg(&bundle));
    ok(moec().arg("verify").arg(&bundle));
    ok(moec().arg("verify").arg(&bundle).arg("--source").arg(ferris()));
}

#[test]
fn verify_reports_a_step_out_of_tolerance() {
    let folder = tempfile::tempdir().unwrap();
    let toml = Setup { format: "bf16", chunk: 16, batch: &[1], context: 64 }
        .write(&checkpoint("qwen3_moe"), folder.path());
    let bundle = folder.path().join("b");
    ok(moec().arg("build").arg(&toml).args(["--no-run", "--quiet", "-o"]).arg(&bundle));
    ok(moec().arg("verify").arg(&bundle));
    // No compiled step satisfies a bound of 0.
    let (code, stderr) = fails(moec().arg("verify").arg(&bundle).args(["--bound", "0"]));
    assert_eq!(code, 1);
    assert!(stderr.contains("out of tolerance") && stderr.contains("`linear` in `layers."), "{stderr}");
}
