//! Gates on disk (PowerInfer-2, §4.3 and §4.4): a predictor names the neurons whose gates are read, and gates name
//! those whose up and down are. For any memory size, threads and reader, logits are bit-identical to those of the
//! same predictor in memory, and gates take no memory.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::neurons_on_disk::{
    Case, build, computed_beside_a_held_read, frames, in_memory, run, with_engine, write,
};
use crate::support::{calibration, expected, failing, fails, ferris_relu, moec, ok, recorded, recovers};
use moec_bundle::read::Bundle;
use moec_ir::plan::Paging;
use moec_runtime::offload::disk::Choice;
use moec_runtime::offload::paging::ClusterPart;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Profile of ferris-relu.
fn profile() -> &'static Path {
    static PLACE: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, path) = PLACE.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let toml = write(&ferris_relu(), folder.path(), "bf16", "");
        let out = folder.path().join("p.trace");
        recorded(&toml, &["--text", &calibration(), "--tokens", "4096"], &out);
        (folder, out)
    });
    path
}

/// Keys of a build with a predictor, within a budget.
fn keys(predict: &str, budget: Option<&str>) -> String {
    let memory = budget.map_or_else(String::new, |b| format!("[memory]\nbudget = \"{b}\"\nthreads = 3\n"));
    format!(
        "[experts]\nskip = \"on\"\npredict = \"{predict}\"\n[calibrate]\nprofile = \"{}\"\n{memory}",
        profile().display()
    )
}

fn paging(bundle: &Bundle) -> &Paging {
    bundle.plan.paging.as_ref().unwrap()
}

/// Bytes of all gates of a bundle of ferris-relu: four layers of 24 experts of 96 neurons.
fn all_gates(bundle: &Bundle) -> u64 {
    let of = |l: &moec_ir::plan::PagedLayer| {
        let segment = &bundle.plan.segments[l.down as usize];
        let (experts, inter, _) = segment.extents();
        let gate = segment.on_disk().unwrap().gate().unwrap();
        u64::from(experts * inter) * gate.pitch as u64
    };
    paging(bundle).layers.iter().map(of).sum()
}

#[test]
fn gates_on_disk_give_the_logits_of_the_predictor_in_memory() {
    let prompt = &expected(&ferris_relu()).ids[..44];
    for (format, predict) in [("f32", "low-rank"), ("bf16", "coarse"), ("q8", "low-rank"), ("q4", "low-rank")]
    {
        let folder = tempfile::tempdir().unwrap();
        let resident = build(&ferris_relu(), folder.path(), format, &keys(predict, None));
        let want = in_memory(&resident, prompt);
        let folder = tempfile::tempdir().unwrap();
        let exact = build(&ferris_relu(), folder.path(), format, "[experts]\nskip = \"on\"");
        assert!(in_memory(&exact, prompt) != want, "{format}: the predictor misses nothing");
        let folder = tempfile::tempdir().unwrap();
        let bundle = build(&ferris_relu(), folder.path(), format, &keys(predict, Some("1 GiB")));
        assert!(paging(&bundle).gates_on_disk() && in_memory(&bundle, prompt) == want, "{format}");
        let [one, all] = frames(&bundle);
        assert_eq!(paging(&bundle).frames, all, "a large budget holds all neurons");
        let staging = paging(&bundle).staging;
        for (frames, staging, threads, reader) in
            [(all, staging, 2, Choice::Threads), (all / 4, 9, 3, Choice::Auto), (one, 2, 1, Choice::Threads)]
        {
            let case = Case { frames, staging, threads, reader };
            let (found, report, _) = run(&bundle, case, prompt);
            assert!(found == want, "{format}, {case:?}: other bits");
            assert!(0 < report.gate_bytes && report.gate_bytes < report.disk.bytes, "{case:?}: {report:?}");
        }
    }
}

/// Decoding reads the gates that the predictor names, and not all gates of the chosen experts.
#[test]
fn tokens_read_the_gates_of_predicted_neurons() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = build(&ferris_relu(), folder.path(), "bf16", &keys("low-rank", Some("1 GiB")));
    let text = &expected(&ferris_relu()).ids[..32];
    let [one, _] = frames(&bundle);
    // One expert is cached: nearly all is read again and again.
    let case = Case { frames: one, staging: 4, threads: 1, reader: Choice::Threads };
    with_engine(&bundle, Some(case), (None, None), |engine| {
        for (pos, &id) in text.iter().enumerate() {
            engine.decode(&[(0, pos, id)], &mut |_, _| Ok(())).unwrap();
        }
        let report = engine.paging().unwrap();
        // A token takes 4 of 24 experts.
        let chosen = all_gates(&bundle) / 6 * text.len() as u64;
        assert!(0 < report.gate_bytes && report.gate_bytes < chosen, "{} of {chosen}", report.gate_bytes);
        assert!(report.gate_bytes < report.disk.bytes, "{report:?}");
        println!("gates read: {} of {chosen} bytes of the chosen experts", report.gate_bytes);
    });
}

/// Up and down of an expert are computed while gates of another one are read: no barrier between matrices
/// (PowerInfer-2, Figure 6b).
#[test]
fn experts_are_computed_while_gates_of_another_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = build(&ferris_relu(), folder.path(), "bf16", &keys("low-rank", Some("1 GiB")));
    for threads in [1, 2] {
        let parts = computed_beside_a_held_read(&bundle, threads);
        let down = parts.iter().position(|part| matches!(part, ClusterPart::Down { .. })).unwrap();
        assert!(parts[..down].contains(&ClusterPart::Up), "{threads} threads: {parts:?}");
        assert!(parts[down..].contains(&ClusterPart::Gate), "{threads} threads: {parts:?}");
    }
}

/// A budget that is too small for gates in memory is enough with a predictor, and a run stays within it.
#[test]
fn a_budget_that_is_too_small_for_gates_in_memory_suffices() {
    let folder = tempfile::tempdir().unwrap();
    let built = |predict: &str, budget: &str| {
        let toml = write(&ferris_relu(), folder.path(), "f32", &keys(predict, Some(budget)));
        let mut build = moec();
        let out = folder.path().join(format!("{predict}-{budget}"));
        build.arg("build").arg(&toml).args(["--quiet", "-o"]).arg(&out);
        (build, out)
    };
    let least = |predict: &str| {
        let error = fails(&mut built(predict, "1 MiB").0).1;
        let (_, rest) = error.split_once("the minimum is ").unwrap();
        rest.split_once(" MiB").unwrap().0.parse::<f64>().unwrap()
    };
    let [exact, predicted] = ["off", "low-rank"].map(least);
    println!("the least budgets: {exact} MiB with gates in memory, {predicted} MiB with a predictor");
    // All gates are 7.1 MB; predictors take a part of that, and one expert's gates a frame.
    assert!(predicted + 3.0 < exact, "{predicted} MiB, with gates in memory {exact} MiB");
    let budget = format!("{} MiB", (exact - 2.0).floor());
    let (code, stderr) = fails(&mut built("off", &budget).0);
    assert!(code == 1 && stderr.contains("too small"), "{stderr}");
    let (mut build, out) = built("low-rank", &budget);
    ok(&mut build);
    let plan = Bundle::open(&out).unwrap().plan;
    let own = plan.paging.as_ref().unwrap();
    assert!(own.gates_on_disk() && own.peak().unwrap() <= own.budget, "{own:?}");
    let mut run = moec();
    run.arg("run").arg(&out).args(["generate", "--prompt", "fn main", "-n", "24", "--json"]);
    let report: Value = serde_json::from_slice(&ok(&mut run).stdout).unwrap();
    let bytes = |place: &str, key: &str| report[place][key].as_u64().unwrap();
    assert!(
        0 < bytes("disk", "gate_bytes") && bytes("disk", "gate_bytes") < bytes("disk", "bytes"),
        "{report}"
    );
    if cfg!(target_os = "linux") {
        let peak = std::process::Command::new(out.join("run"))
            .args(["generate", "--prompt", "fn main", "-n", "24", "--json", "--threads", "2"])
            .output()
            .unwrap();
        let report: Value = serde_json::from_slice(&peak.stdout).unwrap();
        let peak = report["memory"]["peak"].as_u64().unwrap();
        assert!(peak <= own.budget, "{peak} of {} bytes", own.budget);
    }
    // Tokens are those of the same bundle with all weights mapped.
    run = moec();
    run.arg("run").arg(&out);
    run.args(["generate", "--prompt", "fn main", "-n", "24", "--json", "--no-budget"]);
    let mapped: Value = serde_json::from_slice(&ok(&mut run).stdout).unwrap();
    assert_eq!(report["ids"], mapped["ids"]);
    // Users see where gates are.
    let stdout = |command: &str| String::from_utf8(ok(moec().arg(command).arg(&out)).stdout).unwrap();
    for command in ["explain", "inspect"] {
        let text = stdout(command);
        assert!(text.contains("gates read where predictors name them"), "{command}: {text}");
    }
    assert!(stdout("explain").contains("gates of neurons"), "{}", stdout("explain"));
    let info = ok(moec().arg("run").arg(&out).arg("info")).stdout;
    let info = String::from_utf8(info).unwrap();
    assert!(info.contains("neurons in memory") && !info.contains("gates and"), "{info}");
    ok(moec().arg("verify").arg(&out).arg("--quiet"));
}

#[test]
fn failing_reads_of_gates_are_an_error_and_the_next_call_is_correct() {
    let prompt = &expected(&ferris_relu()).ids[..44];
    let folder = tempfile::tempdir().unwrap();
    let bundle = build(&ferris_relu(), folder.path(), "f32", &keys("low-rank", Some("1 GiB")));
    let want = in_memory(&bundle, prompt);
    let [one, all] = frames(&bundle);
    for (frames, threads) in [(all, 1), (3 * one, 2)] {
        let case = Case { frames, staging: 8, threads, reader: Choice::Threads };
        with_engine(&bundle, Some(case), (Some(failing()), None), |engine| {
            recovers(engine, prompt, &want);
        });
    }
}
