//! The evaluator and the compiled code agree, layer by layer; rewriting keeps the meaning of the Graph.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, reason = "a test fails by panicking")]

use crate::support;

use moec_base::progress::Progress;
use moec_bundle::read::Bundle;
use moec_config::Config;
use moec_driver::{Request, build};
use moec_import::ImportOptions;
use moec_ir::eval::Evaluator;
use moec_measure::verify::{BOUND, Report, verify};
use moec_pipeline::{Compilation, Inputs, Stops};
use moec_targets::target;
use std::path::Path;
use support::{FAMILIES, FOLDED, Setup, cache, checkpoint, distance, expected, fails, ferris, moec, ok};

/// Largest relative error of any value anywhere in a model, evaluator against compiled code.
const CHAINED: f64 = 2e-5;

/// Output of `moec verify`: columns that are explained, a verdict as data, and that alone where it is to be
/// quiet.
#[test]
fn the_verdict_is_data() {
    let folder = tempfile::tempdir().unwrap();
    let toml = Setup { format: "bf16", chunk: 16, batch: &[1], context: 32 }
        .write(&checkpoint("olmoe"), folder.path());
    let bundle = folder.path().join("b");
    ok(moec().arg("build").arg(&toml).args(["--no-run", "--quiet", "-o"]).arg(&bundle));
    let says = |args: &[&str]| {
        let output = ok(moec().arg("verify").arg(&bundle).args(args));
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let (whole, stages) = says(&[]);
    assert!(stages.contains("Finished") && !stages.contains("is OK"), "the verdict is said twice: {stages}");
    let head = whole.lines().find(|l| l.starts_with("entry point")).unwrap();
    for column in ["own error", "up to", "summed error"] {
        assert!(head.contains(column), "{head}");
        assert!(whole.lines().any(|l| l.starts_with(column)), "`{column}` is not explained:\n{whole}");
    }
    assert!(whole.contains("relative to what is right"), "{whole}");
    let verdict = whole.lines().last().unwrap();
    assert!(verdict.contains("is OK") && verdict.contains("steps of 2 entry points"), "{verdict}");
    // Quiet: errors and data, which is the verdict. Here bundles have no other lines to compare by than it.
    let (quiet, said) = says(&["--quiet"]);
    assert!(quiet.contains(verdict) && !quiet.contains("own error") && said.is_empty(), "{quiet}{said}");
    let data: serde_json::Value = serde_json::from_str(&says(&["--json"]).0).unwrap();
    assert!(data["verdict"] == "right" && data["failures"] == serde_json::json!([]), "{data}");

    // And of one that is held to more than it can: the same on stdout, exit code 1.
    let output = support::finish(moec().arg("verify").arg(&bundle).args(["--bound", "0", "--quiet"]));
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.code() == Some(1) && stdout.contains("is wrong"), "{stdout}");
    let output = support::finish(moec().arg("verify").arg(&bundle).args(["--bound", "0", "--json"]));
    let data: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(data["verdict"] == "wrong" && !data["failures"].as_array().unwrap().is_empty(), "{data}");
}

/// Every family in f32 and in three of five other formats, each of which most families have.
#[test]
fn compiled_steps_agree_with_the_evaluator_layer_by_layer() {
    for (i, family) in FAMILIES.into_iter().enumerate() {
        let others = ["bf16", "f16", "q8", "q4", "q4o"].into_iter().cycle().skip(3 * i).take(3);
        for format in std::iter::once("f32").chain(others) {
            let folder = tempfile::tempdir().unwrap();
            let source = checkpoint(family);
            let bundle = built(&source, format, "f32", folder.path());
            let (checkpoint, _) = moec_import::open(&source, &ImportOptions::default()).unwrap();
            // Against the bundle's own weights, and against the checkpoint's, rounded.
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
                        // A gate of one column may be next to nothing, and is then far off in proportion;
                        // states that fold tokens fold what was rounded, too.
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
    let asked = format!("activations = \"{activations}\"");
    std::fs::write(&toml, text.replace("activations = \"f32\"", &asked)).unwrap();
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
    };
    build(&request, &Progress::silent(), &mut |_| {}).unwrap();
    Bundle::open(&bundle).unwrap()
}

/// The largest share that any step takes of the error that is allowed to it.
fn share(report: &Report) -> f64 {
    let nodes = report.entries.iter().flat_map(|e| &e.nodes);
    nodes.map(|n| n.local.relative / report.allowed(n)).fold(0.0, f64::max)
}

#[test]
fn steps_that_round_are_held_to_what_their_arithmetic_explains() {
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
            // What rounds would not pass as f32.
            let strict = Report { bound: Some(BOUND), ..report };
            assert_eq!(off > 0, strict.failures().iter().any(|f| f.contains("`linear`")));
        }
    }
    assert!(rounded > 0, "every target multiplies bytes");
}

#[test]
fn rewriting_keeps_what_the_graph_means() {
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
fn what_was_rounded_by_importance_verifies() {
    // The demo model has a tokenizer, and its table is its head: they are rounded apart from each other.
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
fn a_wrong_step_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let toml = Setup { format: "bf16", chunk: 16, batch: &[1], context: 64 }
        .write(&checkpoint("qwen3_moe"), folder.path());
    let bundle = folder.path().join("b");
    ok(moec().arg("build").arg(&toml).args(["--no-run", "--quiet", "-o"]).arg(&bundle));
    ok(moec().arg("verify").arg(&bundle));
    // No compiled step keeps to a bound of nothing.
    let (code, said) = fails(moec().arg("verify").arg(&bundle).args(["--bound", "0"]));
    assert_eq!(code, 1);
    assert!(said.contains("out of tolerance") && said.contains("`linear` in `layers."), "{said}");
}
