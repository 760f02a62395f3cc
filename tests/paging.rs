//! Experts on disk: for any budget, policy, prefetching, threads and reader, logits are bit-identical to
//! those of the same model in memory. If the disk fails there is an error, or the same logits.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, reason = "a test fails by panicking")]

#[path = "paging/clock.rs"]
mod clock;
#[cfg(target_os = "linux")]
#[path = "paging/core_binding.rs"]
mod core_binding;
#[path = "paging/pins.rs"]
mod pins;
#[path = "paging/prefetched.rs"]
mod prefetched;
use crate::support;

use moec_bundle::read::Bundle;
use moec_ir::plan::Plan;
use moec_runtime::exec::engine::LogitRows;
use moec_runtime::offload::disk::{self, Choice};
use moec_runtime::offload::paging::{Paging, Report, Wrap};
use moec_runtime::platform::cores;
use moec_runtime::{Engine, Options, Program};
use moec_sim::disk::fault::{Gate, Injected};
use std::path::{Path, PathBuf};
use std::time::Duration;
use support::{
    IN_RAM, built, checkpoint, expected, failing, fails, faulty, ferris, logits, mixtures, moec, ok, recovers,
};

/// Maximum bytes of a read: small, so that an expert takes several.
const BLOCK: u32 = 16 << 10;

fn build(source: &Path, folder: &Path, memory: &str, experts: &str) -> PathBuf {
    let toml = folder.join("model.toml");
    let text = format!(
        "[model]\nsource = \"{}\"\n[shapes]\nmax_context = 96\nprefill_chunk = 20\ndecode_batch = [1, 2]\n\
         [weights]\nexperts = \"{experts}\"\n[memory]\nthreads = 3\n{memory}\n",
        source.display(),
    );
    std::fs::write(&toml, text).unwrap();
    let bundle = folder.join("b");
    built(&toml, &["--target", "native"], &bundle);
    bundle
}

/// Settings of a run that replace the plan's.
#[derive(Clone, Copy, Debug)]
struct Case {
    frames: u32,
    staging: u32,
    policy: &'static str,
    ahead: usize,
    threads: usize,
    reader: Choice,
}

const USUAL: Case =
    Case { frames: 5, staging: 2, policy: "lru", ahead: 3, threads: 2, reader: Choice::Threads };

fn paging(case: Case, wrap: Option<Wrap>) -> Paging {
    let disk = disk::Options { reader: case.reader, ..disk::Options::default() };
    Paging { disk, ahead: case.ahead, budget: None, preload: true, wrap, hooks: None, cores: cores::SYS }
}

/// Opens the bundle with a case's settings, and passes the engine on.
fn with_engine<R>(
    bundle: &Bundle,
    case: Case,
    wrap: Option<Wrap>,
    f: impl FnOnce(&mut Engine<'_>) -> R,
) -> R {
    let mut plan: Plan = bundle.plan.clone();
    let own = plan.paging.as_mut().unwrap();
    (own.frames, own.staging) = (case.frames, case.staging);
    own.block_bytes = BLOCK;
    case.policy.clone_into(&mut own.policy);
    let unit = bundle.unit().unwrap();
    let program = Program::new(plan, &|s| unit.resolve(s)).unwrap();
    let options =
        Options { threads: Some(case.threads), paging: Some(paging(case, wrap)), ..Options::default() };
    f(&mut Engine::open(&program, &bundle.folder, options).unwrap())
}

fn in_memory(bundle: &Bundle, prompt: &[u32]) -> Vec<u32> {
    let unit = bundle.unit().unwrap();
    let program = Program::new(bundle.plan.clone(), &|s| unit.resolve(s)).unwrap();
    let options = Options { threads: Some(2), resident: true, ..Options::default() };
    let mut engine = Engine::open(&program, &bundle.folder, options).unwrap();
    assert_eq!(engine.paging(), None);
    logits(&mut engine, prompt).unwrap()
}

fn run(bundle: &Bundle, case: Case, prompt: &[u32]) -> (Vec<u32>, Report) {
    with_engine(bundle, case, None, |engine| {
        let found = logits(engine, prompt).unwrap();
        (found, engine.paging().unwrap())
    })
}

#[test]
fn logits_are_those_of_the_model_in_memory() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = Bundle::open(&build(&ferris(), folder.path(), "budget = \"1 GiB\"", "bf16")).unwrap();
    let all: u32 = bundle.plan.paging.as_ref().unwrap().layers.iter().map(|l| l.experts).sum();
    assert_eq!(bundle.plan.paging.as_ref().unwrap().frames, all, "a large budget holds all experts");
    let prompt = &expected(&ferris()).ids[..44];
    let want = in_memory(&bundle, prompt);
    let mut cases = Vec::new();
    for frames in [1, 17, all] {
        for (policy, staging) in
            [("lru", 2), ("lfu", 3), ("mrs alpha=0.2 depth=2 bypass=1", 4), ("page-cache", 2)]
        {
            for (threads, ahead) in [(1, 0), (2, 3), (3, 1)] {
                cases.push(Case { frames, staging, policy, ahead, threads, reader: Choice::Threads });
            }
        }
    }
    cases.push(Case { policy: "lru per-layer", frames: 40, ..USUAL });
    cases.push(Case { reader: Choice::Auto, ..USUAL });
    for case in cases {
        let (found, report) = run(&bundle, case, prompt);
        assert!(found == want, "{case:?} gives other logits");
        assert!(report.misses > 0 && report.disk.bytes > 0, "{case:?}: {report:?}");
        if case.frames == all {
            // Experts stay in memory once they are read.
            assert!(report.misses + report.ahead <= u64::from(all), "{case:?}: {report:?}");
        }
        if case.ahead == 0 {
            assert_eq!(report.ahead, 0, "{case:?}");
        }
    }
}

#[test]
fn families_run_from_disk() {
    for family in mixtures().filter(|family| !IN_RAM.contains(family)) {
        let folder = tempfile::tempdir().unwrap();
        let source = checkpoint(family);
        let experts = if family == "olmoe" { "q4" } else { "q8" };
        let bundle = Bundle::open(&build(&source, folder.path(), "budget = \"1 GiB\"", experts)).unwrap();
        let want = expected(&source);
        let prompt = &want.ids[..want.ids.len().min(40)];
        let in_memory = in_memory(&bundle, prompt);
        for policy in ["lru", "mrs alpha=0.2 depth=2 bypass=1"] {
            let (found, _) = run(&bundle, Case { frames: 2, policy, ..USUAL }, prompt);
            assert!(found == in_memory, "{family}, {policy}");
        }
    }
}

/// Returns the fault of the read with this number.
type Stumble = fn(u32) -> Injected;

#[test]
fn cache_policy_is_chosen_by_replaying_the_profile() {
    let folder = tempfile::tempdir().unwrap();
    let text = ferris().join("eval/calibration.txt");
    let memory = format!("budget = \"30 MiB\"\n[calibrate]\ntokens = 4096\ntext = [\"{}\"]", text.display());
    let path = build(&ferris(), folder.path(), &memory, "bf16");
    let bundle = Bundle::open(&path).unwrap();
    let all = bundle.decisions().unwrap().decisions;
    let decision = all.iter().find(|d| d.subject == "cache of experts").unwrap();
    assert!(decision.chosen.starts_with(&bundle.plan.paging.unwrap().policy), "{decision:?}");
    let figures = &decision.figures;
    assert!(figures["held_out_hit_share"] >= figures["lru_held_out_hit_share"], "{decision:?}");
    let rates = || decision.alternatives.iter().map(|a| a.figures["hit_share"]);
    assert!(rates().count() > 1 && rates().all(|rate| rate <= figures["bound_hit_share"]), "{decision:?}");
    let stdout = String::from_utf8(ok(moec().arg("explain").arg(&path)).stdout).unwrap();
    assert!(stdout.contains("bound hit") && stdout.contains(&decision.chosen), "{stdout}");
}

#[test]
fn more_threads_than_budgeted_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = build(&ferris(), folder.path(), "budget = \"1 GiB\"", "q8");
    let run = |extra: &[&str]| {
        let mut command = moec();
        command.arg("run").arg(&bundle).args(["generate", "--ids", "1,2,3", "-n", "4", "--threads", "4"]);
        command.args(extra);
        command
    };
    let (_, stderr) = fails(&mut run(&[]));
    assert!(stderr.contains("3 threads") && stderr.contains("--no-budget"), "{stderr}");
    ok(&mut run(&["--no-budget"]));
    let (_, stderr) = fails(moec().arg("run").arg(&bundle).args(["bench", "--budget", "3MiB"]));
    assert!(stderr.contains("too small"), "{stderr}");
    ok(moec().arg("run").arg(&bundle).args(["bench", "--gen", "4", "--prompt", "4", "--budget", "40MiB"]));
    let output = ok(moec().arg("run").arg(&bundle).args([
        "generate",
        "--ids",
        "1,2,3",
        "-n",
        "4",
        "--json",
        "--prefetch",
        "0",
    ]));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let disk = &report["disk"];
    assert!(disk["bytes"].as_u64() > Some(0) && disk["checked"].as_u64() > Some(0), "{report}");
    let mut unchecked = moec();
    unchecked.arg("run").arg(&bundle).args([
        "generate",
        "--ids",
        "1,2,3",
        "-n",
        "4",
        "--json",
        "--no-verify-reads",
    ]);
    let output = ok(&mut unchecked);
    let unchecked: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(unchecked["disk"]["checked"], 0, "{unchecked}");
    assert_eq!(unchecked["ids"], report["ids"], "{unchecked}");
    assert_eq!(report["cache"]["read_ahead"], 0, "{report}");
    let text = String::from_utf8(ok(moec().arg("run").arg(&bundle).arg("info")).stdout).unwrap();
    assert!(text.contains("budget") && text.contains("on disk"), "{text}");
}

#[test]
fn big_little_decoding_gives_the_same_tokens_from_disk() {
    let folder = tempfile::tempdir().unwrap();
    let memory = "budget = \"1 GiB\"\n[decode]\nbig_little = true";
    let bundle = build(&ferris(), folder.path(), memory, "bf16");
    let run = |extra: &[&str]| -> serde_json::Value {
        let mut command = moec();
        command.arg("run").arg(&bundle).args(["generate", "--ids", "1,20,300", "-n", "40", "--json"]);
        serde_json::from_slice(&ok(command.args(extra)).stdout).unwrap()
    };
    let least = Bundle::open(&bundle).unwrap().plan.paging.unwrap();
    let small =
        (least.resident + least.process + u64::from(least.staging + 9) * least.frame_bytes).to_string();
    for gamma in ["0", "0.5", "0.9", "1"] {
        let (all, few) =
            (run(&["--gamma", gamma, "--no-budget"]), run(&["--gamma", gamma, "--budget", &small]));
        assert_eq!(all["ids"], few["ids"], "{gamma}");
        assert_eq!(all["fallback_ratio"], few["fallback_ratio"], "{gamma}");
        assert!(few["cache"]["experts"] == 9 && few["disk"]["bytes"].as_u64() > Some(0), "{few}");
    }
    assert_eq!(run(&["--gamma", "1"])["ids"], run(&["--no-big-little", "--budget", &small])["ids"]);
}

#[test]
fn disk_with_transient_errors_gives_the_same_logits() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = Bundle::open(&build(&ferris(), folder.path(), "budget = \"1 GiB\"", "bf16")).unwrap();
    let prompt = &expected(&ferris()).ids[..44];
    let want = in_memory(&bundle, prompt);
    let stumbles: [(&str, Stumble); 4] = [
        ("short reads", |n| if n % 3 == 0 { Injected::Short(4096) } else { Injected::Nothing }),
        ("EINTR", |n| if n % 2 == 0 { Injected::Error(libc::EINTR) } else { Injected::Nothing }),
        ("EIO now and then", |n| if n % 7 == 0 { Injected::Error(libc::EIO) } else { Injected::Nothing }),
        ("answers twice", |n| if n % 5 == 0 { Injected::Twice } else { Injected::Nothing }),
    ];
    for (what, plan) in stumbles {
        let wrap = faulty(plan, Gate::default());
        let found = with_engine(&bundle, USUAL, Some(wrap), |e| logits(e, prompt).unwrap());
        assert!(found == want, "{what} changes logits");
    }
}

#[test]
fn failing_disk_is_reported_and_the_next_call_works() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = Bundle::open(&build(&ferris(), folder.path(), "budget = \"1 GiB\"", "bf16")).unwrap();
    let prompt = &expected(&ferris()).ids[..44];
    let want = in_memory(&bundle, prompt);
    for case in [USUAL, Case { threads: 1, ahead: 0, ..USUAL }, Case { frames: 1, threads: 3, ..USUAL }] {
        with_engine(&bundle, case, Some(failing()), |engine| {
            recovers(engine, prompt, &want);
        });
    }
}

#[test]
fn corrupted_expert_is_never_used() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = Bundle::open(&build(&ferris(), folder.path(), "budget = \"1 GiB\"", "bf16")).unwrap();
    let prompt = &expected(&ferris()).ids[..44];
    let want = in_memory(&bundle, prompt);
    // One in fifty reads has a flipped bit.
    let wrap = faulty(|n| if n % 50 == 9 { Injected::Flip(7) } else { Injected::Nothing }, Gate::default());
    let settings = paging(USUAL, Some(wrap));
    let unit = bundle.unit().unwrap();
    let program = Program::new(bundle.plan.clone(), &|s| unit.resolve(s)).unwrap();
    let options = Options { paging: Some(settings), ..Options::default() };
    let mut engine = Engine::open(&program, &bundle.folder, options).unwrap();
    assert!(logits(&mut engine, prompt).unwrap() == want, "a flipped bit changes logits");
    let report = engine.paging().unwrap();
    assert!(report.disk.repeated > 0 && report.disk.checked > 0, "{report:?}");
}

#[test]
fn stalled_disk_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = Bundle::open(&build(&ferris(), folder.path(), "budget = \"1 GiB\"", "bf16")).unwrap();
    let gate = Gate::default();
    let wrap = faulty(|n| if n == 30 { Injected::Stall } else { Injected::Nothing }, gate.clone());
    let mut settings = paging(USUAL, Some(wrap));
    settings.disk.time_limit = Duration::from_millis(200);
    let unit = bundle.unit().unwrap();
    let program = Program::new(bundle.plan.clone(), &|s| unit.resolve(s)).unwrap();
    let options = Options { paging: Some(settings), ..Options::default() };
    let mut engine = Engine::open(&program, &bundle.folder, options).unwrap();
    let error = logits(&mut engine, &expected(&ferris()).ids[..44]).unwrap_err().to_string();
    assert!(error.contains("experts.bin"), "{error}");
    gate.open();
}

#[test]
fn truncated_weight_file_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let path = build(&ferris(), folder.path(), "budget = \"1 GiB\"", "bf16");
    let bundle = Bundle::open(&path).unwrap();
    let prompt = &expected(&ferris()).ids[..44];
    with_engine(&bundle, Case { frames: 1, ..USUAL }, None, |engine| {
        logits(engine, prompt).unwrap();
        let file = std::fs::OpenOptions::new().write(true).open(path.join("weights/experts.bin")).unwrap();
        file.set_len(8192).unwrap();
        let error = logits(engine, prompt).unwrap_err().to_string();
        assert!(error.contains("experts.bin"), "{error}");
    });
}

/// Bytes that are corrupted on disk during a run are detected before they are used. They are read again, and
/// then there is an error that names the expert.
#[test]
fn bytes_corrupted_during_a_run_are_reported_and_not_used() {
    let folder = tempfile::tempdir().unwrap();
    let path = build(&ferris(), folder.path(), "budget = \"1 GiB\"", "bf16");
    let bundle = Bundle::open(&path).unwrap();
    let prompt = &expected(&ferris()).ids[..44];
    let weights = path.join("weights/experts.bin");
    let sound = std::fs::read(&weights).unwrap();
    with_engine(&bundle, Case { frames: 1, ..USUAL }, None, |engine| {
        let want = logits(engine, prompt).unwrap();
        let before = engine.paging().unwrap().disk;
        assert!(before.checked > 0 && before.repeated == 0, "{before:?}");
        // One bit in a thousand bytes.
        let spoilt: Vec<u8> =
            sound.iter().enumerate().map(|(i, b)| if i % 1000 == 500 { b ^ 1 } else { *b }).collect();
        std::fs::write(&weights, spoilt).unwrap();
        let error = logits(engine, prompt).unwrap_err();
        let message = error.to_string();
        for word in ["cannot read expert ", " of layer ", "experts.bin", "CRC-32C", "4 attempts"] {
            assert!(message.contains(word), "`{word}` is not in: {message}");
        }
        assert!(error.hint().is_some_and(|hint| hint.contains("copy the bundle again")), "{message}");
        assert!(engine.paging().unwrap().disk.repeated >= 3);
        std::fs::write(&weights, &sound).unwrap();
        assert!(logits(engine, prompt).unwrap() == want, "the engine does not recover");
    });
}

#[test]
fn too_small_budget_is_refused_with_the_smallest_valid_one() {
    let folder = tempfile::tempdir().unwrap();
    let toml = folder.path().join("model.toml");
    let write = |budget: &str| {
        let text = format!(
            "[model]\nsource = {:?}\n[shapes]\nmax_context = 96\ndecode_batch = [1, 2]\n[memory]\nbudget = \"{budget}\"\n",
            ferris()
        );
        std::fs::write(&toml, text).unwrap();
    };
    let build = || {
        let mut command = moec();
        let out = folder.path().join("b");
        command.arg("build").arg(&toml).args(["--target", "native", "--no-run", "--quiet", "-o"]).arg(out);
        command
    };
    write("5 MiB");
    let (_, stderr) = fails(&mut build());
    let least = stderr.split("the minimum is ").nth(1).and_then(|s| s.split(';').next());
    let least = least.unwrap_or_else(|| panic!("{stderr}")).to_owned();
    assert!(stderr.contains("the KV cache"), "{stderr}");
    let mib: u64 = least.trim_end_matches(" MiB").parse().unwrap();
    write(&format!("{} MiB", mib - 1));
    fails(&mut build());
    write(&least);
    ok(&mut build());
    let bundle = Bundle::open(&folder.path().join("b")).unwrap();
    let paging = bundle.plan.paging.as_ref().unwrap();
    assert!(paging.peak().unwrap() <= mib << 20);
    let (found, _) = run(
        &bundle,
        Case { frames: paging.frames, staging: paging.staging, ..USUAL },
        &expected(&ferris()).ids[..44],
    );
    assert_eq!(found, in_memory(&bundle, &expected(&ferris()).ids[..44]));
}
