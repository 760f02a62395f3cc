//! A memory budget whose border between artifacts of graphs and the cache of neurons moves with the batch.

use super::{Case, PHONE};
use crate::support::{fails, ferris, ok};
use moec_base::progress::Progress;
use moec_bundle::read::Bundle;
use moec_ir::EntryKind;
use moec_ir::plan::{Paging, Plan, Regions, UnitRef};
use moec_measure::host_build::HostBuild;
use moec_runtime::offload::paging::Report;
use moec_runtime::{CheckLevel, Engine, LogitRows, Options};
use moec_targets::backends;
use serde_json::Value;
use std::fs;

/// Most bytes of a run of the tests' model.
const BUDGET: u64 = 33 << 20;

/// `ferris-relu` with hot neurons in networks for batches of 1 and 4, and a budget.
fn hot(budget: &str) -> Case {
    let keys = format!(
        "hot = \"npu\"\n[experts]\ngroup = 24\nsizes = 1\nskip = \"on\"\n[memory]\nbudget = \"{budget}\"\n\
         threads = 2\n"
    );
    let case = Case::of("ferris-relu", 64, &keys);
    let text = fs::read_to_string(&case.toml).unwrap();
    let text = text.replace("decode_batch = [1]", "decode_batch = [1, 4]");
    fs::write(&case.toml, text.replace("experts = \"npu\"", "experts = \"cpu\"")).unwrap();
    case
}

/// The regions of an entry point.
fn regions(plan: &Plan, kind: EntryKind) -> Regions {
    let entry = plan.entries.iter().position(|e| e.kind == kind).unwrap();
    plan.paging.as_ref().unwrap().regions_of(entry)
}

/// Bytes of a plan's artifacts in an entry point: all, and those of any two neighbours.
fn artifacts(plan: &Plan, kind: EntryKind) -> (u64, u64) {
    let entry = plan.entries.iter().find(|e| e.kind == kind).unwrap();
    plan.paging.as_ref().unwrap().artifact_bytes(&plan.artifacts_of(entry)).unwrap()
}

/// Opens an engine whose units are emulated. `resident` holds everything in memory.
fn with_engine<T>(bundle: &Bundle, resident: bool, body: impl FnOnce(&mut Engine<'_>) -> T) -> T {
    let host_build = HostBuild::of(bundle, &Progress::silent()).unwrap();
    let options = Options { threads: Some(1), resident, ..Options::default() };
    let host = &mut |unit: &UnitRef| backends::host(&unit.backend, &unit.name);
    let files = bundle.files(CheckLevel::Small).unwrap();
    let engine = Engine::with_units(host_build.program(), host_build.folder(), host, &files, options);
    body(&mut engine.unwrap())
}

/// Tokens of a prompt, alike in all sequences, and those that are decoded.
fn token(i: usize) -> u32 {
    (i * 37 % 200 + 5) as u32
}

/// Decodes one token of each of the first `batch` sequences. Returns their logits.
fn decode(engine: &mut Engine<'_>, batch: u32) -> moec_runtime::Result<Vec<f32>> {
    let row = |slot| {
        let at = engine.len(slot);
        (slot, at, token(at + slot as usize))
    };
    let rows: Vec<_> = (0..batch).map(row).collect();
    let mut all = Vec::new();
    let mut keep = |_: usize, logits: &[f32]| {
        all.extend_from_slice(logits);
        Ok(())
    };
    engine.decode(&rows, &mut keep)?;
    Ok(all)
}

fn prompts(engine: &mut Engine<'_>, tokens: usize) -> Vec<f32> {
    let ids: Vec<u32> = (0..tokens).map(token).collect();
    let mut all = Vec::new();
    for slot in 0..engine.program().model.slots {
        let mut keep = |_: usize, logits: &[f32]| {
            all.extend_from_slice(logits);
            Ok(())
        };
        engine.prefill(slot, 0, &ids, LogitRows::Last, &mut keep).unwrap();
    }
    all
}

/// Batch sizes in turn.
const BATCHES: [u32; 10] = [1, 4, 1, 4, 1, 1, 4, 4, 1, 4];

/// Logits of prompts, then of batches in turn; with the reports after each call.
fn alternating(engine: &mut Engine<'_>) -> (Vec<Vec<f32>>, Vec<Option<Report>>) {
    let mut logits = vec![prompts(engine, 6)];
    let mut reports = Vec::new();
    for batch in BATCHES {
        logits.push(decode(engine, batch).unwrap());
        reports.push(engine.paging());
    }
    (logits, reports)
}

/// Bytes that a run holds after a call, at most what the plan says.
fn held(paging: &Paging, report: &Report) -> u64 {
    let frames = u64::from(report.current_frames) + u64::from(paging.staging);
    paging.resident + paging.process + report.loads.held + frames * paging.frame_bytes
}

/// A larger batch has more bytes of hot neurons, and a smaller cache of cold ones; both fit the budget in
/// every call. Results do not depend on where the border is, and batches in turn read no artifact again.
#[test]
fn border_moves_with_the_batch_and_results_stay_the_same() {
    let case = hot("33 MiB");
    case.build(PHONE, "a.moec");
    let bundle = Bundle::open(&case.path("a.moec")).unwrap();
    let (plan, paging) = (&bundle.plan, bundle.plan.paging.as_ref().unwrap());
    let [one, four] = [1, 4].map(|batch| regions(plan, EntryKind::Decode(batch)));
    assert!(0 < one.graphs && one.graphs < four.graphs && one.frames > four.frames, "{one:?} {four:?}");
    assert!(paging.peak().unwrap() <= BUDGET && paging.budget == BUDGET, "{paging:?}");
    // Each cluster has an artifact of its own. All verify, alone and together.
    let names: Vec<&str> = paging.artifacts.iter().map(|a| &*a.package).collect();
    assert!(names.contains(&"artifacts/layers.0.hot.qnn") && names.contains(&"artifacts/layers.0.hot1.qnn"));
    let source = ferris().with_file_name("ferris-relu");
    let report = case.json("verify", &["--source", source.to_str().unwrap()]);
    assert_eq!(report["verdict"], "right", "{}", report["failures"]);
    let of_second = report["packages"].as_array().unwrap();
    let of_second = of_second.iter().filter(|f| f["package"].as_str().unwrap().ends_with(".hot1.qnn"));
    assert_eq!(of_second.count(), 4 * 24, "{report}");

    let (expected, _) = with_engine(&bundle, true, alternating);
    let (found, reports) = with_engine(&bundle, false, alternating);
    assert!(found == expected, "logits differ from those in memory");
    let reports: Vec<Report> = reports.into_iter().flatten().collect();
    assert!(reports.iter().all(|r| held(paging, r) <= BUDGET), "{reports:?}");
    let (first, second) = (&reports[0], &reports[1]);
    assert!(first.loads.held <= one.graphs && first.current_frames == one.frames, "{first:?}");
    assert!(second.loads.held <= four.graphs && second.current_frames == four.frames, "{second:?}");
    // Every artifact is read once: the larger batch reads the clusters that it adds, and frees those of
    // prompts.
    let last = &reports[reports.len() - 1].loads;
    let all: u64 = paging.artifacts.iter().map(|a| a.bytes).sum();
    let prompts = names.iter().filter(|name| !name.contains(".hot")).count() as u64;
    assert_eq!((last.bytes, last.freed, last.peak), (all, prompts, four.graphs), "{last:?}");
    assert!(last.ahead > 0 && last.ahead + last.waited == names.len() as u64, "{last:?}");
    println!("regions: {one:?} for one sequence, {four:?} for four; {last:?}");
}

/// After all but one sequence have ended, its cache of cold neurons grows after some reads, and the clusters of the
/// larger batch are freed.
#[test]
fn cache_of_cold_neurons_grows_when_the_batch_shrinks() {
    let case = hot("33 MiB");
    case.build(PHONE, "a.moec");
    let bundle = Bundle::open(&case.path("a.moec")).unwrap();
    let paging = bundle.plan.paging.as_ref().unwrap();
    let [one, four] = [1, 4].map(|batch| regions(&bundle.plan, EntryKind::Decode(batch)));
    let all = |engine: &mut Engine<'_>| {
        let mut logits = vec![prompts(engine, 6)];
        let mut moves = Vec::new();
        for batch in [4].into_iter().chain([1; 200]) {
            logits.push(decode(engine, batch).unwrap());
            moves
                .extend(engine.paging().map(|r| (r.current_frames, r.disk.bytes, r.loads, held(paging, &r))));
        }
        (logits, moves)
    };
    let (expected, _) = with_engine(&bundle, true, all);
    let (found, calls) = with_engine(&bundle, false, all);
    assert!(found == expected, "logits differ from those in memory");
    let grown = calls.iter().position(|call| call.0 == one.frames);
    let grown = grown.expect("the cache never grew");
    assert!(calls[..grown].iter().all(|call| call.0 == four.frames));
    assert!(calls[grown..].iter().all(|call| call.0 == one.frames && call.2.held == one.graphs));
    assert!(calls.iter().all(|call| call.3 <= BUDGET));
    // The reads before amount to what is freed.
    let (before, after) = (calls[0], calls[grown]);
    assert!(after.1 - before.1 >= four.graphs - one.graphs, "{before:?} {after:?}");
    assert!(after.2.freed > before.2.freed, "{before:?} {after:?}");
    println!(
        "{grown} calls of one sequence, and {} bytes of neurons, before the border moved",
        after.1 - before.1
    );
}

/// Builds with the smallest budget that works, which the error for a smaller one names.
fn smallest(case: &Case, name: &str) -> Bundle {
    let mut build = case.moec("build");
    build.arg(&case.toml).args(["--target", PHONE, "--no-run", "-o"]).arg(case.path(name));
    let (code, stderr) = fails(&mut build);
    assert!(code == 1 && stderr.contains("too small"), "{stderr}");
    let least = stderr.split("the minimum is ").nth(1).unwrap().split(';').next().unwrap();
    let text = fs::read_to_string(&case.toml).unwrap();
    let (before, after) = text.split_once("budget = \"").unwrap();
    let after = after.split_once('"').unwrap().1;
    fs::write(&case.toml, format!("{before}budget = \"{least}\"{after}")).unwrap();
    case.build(PHONE, name);
    Bundle::open(&case.path(name)).unwrap()
}

/// If memory lacks room for all hot neurons, each layer's are read while earlier steps compute.
#[test]
fn hot_neurons_are_read_ahead_where_memory_does_not_hold_them() {
    let case = hot("24 MiB");
    let bundle = smallest(&case, "a.moec");
    let paging = bundle.plan.paging.as_ref().unwrap();
    let (all, window) = artifacts(&bundle.plan, EntryKind::Decode(4));
    let least = regions(&bundle.plan, EntryKind::Decode(4)).graphs;
    assert!(window <= least && least < all, "{paging:?}");
    let (expected, _) = with_engine(&bundle, true, alternating);
    let (found, reports) = with_engine(&bundle, false, alternating);
    assert!(found == expected, "logits differ from those in memory");
    let reports: Vec<Report> = reports.into_iter().flatten().collect();
    assert!(reports.iter().all(|r| held(paging, r) <= paging.budget), "{reports:?}");
    let loads = reports[reports.len() - 1].loads;
    // Every call reads the layers that it lacks, most of them while others compute.
    assert!(loads.peak <= least && loads.freed > 0 && loads.ahead > loads.waited, "{loads:?}");
    println!("room for {least} of {all} bytes: {loads:?}");
}

/// Prompts stream the graphs of whole experts through a window of two artifacts (PowerInfer-2, §4.1.1).
#[test]
fn prompts_read_the_next_layers_graphs_while_one_computes() {
    let keys = "[experts]\ngroup = 24\nskip = \"off\"\n[memory]\nbudget = \"1 MiB\"\nthreads = 2\n";
    let case = Case::of("ferris", 16, keys);
    let bundle = smallest(&case, "a.moec");
    let paging = bundle.plan.paging.as_ref().unwrap();
    let (all, window) = artifacts(&bundle.plan, EntryKind::Prefill(16));
    let prefill = regions(&bundle.plan, EntryKind::Prefill(16));
    assert!(prefill.graphs == window && window < all, "{paging:?}");
    let both = |engine: &mut Engine<'_>| {
        let mut found = prompts(engine, 48);
        found.extend(decode(engine, 1).unwrap());
        (found, engine.paging())
    };
    let (expected, _) = with_engine(&bundle, true, both);
    let (found, report) = with_engine(&bundle, false, both);
    assert!(found == expected, "logits differ from those in memory");
    let loads = report.unwrap().loads;
    assert!(loads.peak <= window && loads.freed > 0 && loads.ahead > loads.waited, "{loads:?}");
    println!("a window of {window} of {all} bytes: {loads:?}");
}

/// An artifact that has changed when it is read again is an error that names it, and not another token.
#[test]
fn artifact_that_changed_is_reported_when_it_is_loaded_again() {
    let case = hot("24 MiB");
    let bundle = smallest(&case, "a.moec");
    let weights = case.path("a.moec/artifacts/layers.2.hot1.qnn/weights.bin");
    let whole = fs::read(&weights).unwrap();
    let mut other = whole.clone();
    let middle = other.len() / 2;
    other[middle] ^= 0x40;
    with_engine(&bundle, false, |engine| {
        prompts(engine, 6);
        decode(engine, 4).unwrap();
        decode(engine, 4).unwrap();
        fs::write(&weights, &other).unwrap();
        let e = decode(engine, 4).or_else(|_| decode(engine, 4)).and_then(|_| decode(engine, 4)).unwrap_err();
        let text = e.to_string();
        assert!(text.contains("layers.2.hot1") && text.contains("changed"), "{text}");
        // Batches of one do not use the cluster; the others work again with the right file.
        decode(engine, 1).unwrap();
        fs::write(&weights, &whole).unwrap();
        decode(engine, 4).unwrap();
    });
    let mut run = case.moec("run");
    run.arg("--emulate").arg(&bundle.folder).args(["generate", "--prompt", "fn main", "-n", "4", "--json"]);
    let report: Value = serde_json::from_slice(&ok(&mut run).stdout).unwrap();
    assert!(report["graphs"]["read_ahead"].as_u64().unwrap() > 0, "{report}");
}
