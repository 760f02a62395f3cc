//! Pinned experts, which are read at the start and never evicted: the logits are the same, and less is read.

use super::*;
use moec_ir::paging::Paging as Planned;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Experts of the demo model, from its last layer on.
fn pins(n: u32) -> Vec<(u32, u32)> {
    (0..n).map(|i| (3 - i % 4, i * 7 / 4 % 24)).collect()
}

/// Opens the bundle with pinned experts, and passes the engine on.
fn with_pins<R>(
    bundle: &Bundle,
    case: Case,
    pinned: Vec<(u32, u32)>,
    settings: Paging,
    f: impl FnOnce(&mut Engine<'_>) -> R,
) -> R {
    let mut plan: Plan = bundle.plan.clone();
    let own = plan.paging.as_mut().unwrap();
    (own.frames, own.staging, own.pinned) = (case.frames, case.staging, pinned);
    own.block_bytes = BLOCK;
    case.policy.clone_into(&mut own.policy);
    let unit = bundle.unit().unwrap();
    let program = Program::new(plan, &|s| unit.resolve(s)).unwrap();
    let options = Options { threads: Some(case.threads), paging: Some(settings), ..Options::default() };
    f(&mut Engine::open(&program, &bundle.folder, options).unwrap())
}

/// Waits until the report satisfies a condition.
fn wait_until(engine: &Engine<'_>, there: impl Fn(&Report) -> bool) -> Report {
    let start = Instant::now();
    loop {
        let report = engine.paging().unwrap();
        if there(&report) {
            return report;
        }
        assert!(start.elapsed() < Duration::from_mins(1), "{report:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn demo(folder: &Path) -> (Bundle, Vec<u32>, Vec<u32>) {
    let bundle = Bundle::open(&build(&ferris(), folder, "budget = \"1 GiB\"", "bf16")).unwrap();
    let prompt = expected(&ferris()).ids[..44].to_vec();
    let want = in_memory(&bundle, &prompt);
    (bundle, prompt, want)
}

#[test]
fn pinned_experts_change_no_logits() {
    let folder = tempfile::tempdir().unwrap();
    let (bundle, prompt, want) = demo(folder.path());
    for (frames, pinned) in [(2, 1), (17, 4), (17, 16), (60, 45), (96, 90)] {
        for (policy, staging, threads, ahead) in
            [("lru", 2, 1, 0), ("lru per-layer", 2, 2, 3), ("mrs alpha=0.2 depth=2 bypass=1", 4, 3, 1)]
        {
            let case = Case { frames, staging, policy, ahead, threads, reader: Choice::Threads };
            for waits in [false, true] {
                with_pins(&bundle, case, pins(pinned), paging(case, None), |engine| {
                    if waits {
                        // No expert has been requested yet.
                        let report = wait_until(engine, |r| r.preloaded == u64::from(pinned));
                        assert!(
                            report.hits == 0 && report.misses == 0 && report.disk.bytes > 0,
                            "{report:?}"
                        );
                    }
                    assert!(logits(engine, &prompt).unwrap() == want, "{case:?} gives other logits");
                    let report = engine.paging().unwrap();
                    assert_eq!(report.pinned, pinned, "{case:?}");
                    assert!(report.preloaded <= u64::from(pinned), "{report:?}");
                    assert!(report.pinned_bytes < report.frame_bytes, "{report:?}");
                    if frames == 96 {
                        // Experts stay in memory once they are read, so none is read twice.
                        let read = report.misses + report.ahead + u64::from(report.pinned);
                        assert!(read <= 96, "{case:?}: {report:?}");
                    }
                    if ahead == 0 {
                        assert_eq!((report.ahead, report.predicted), (0, 0), "{case:?}");
                    }
                });
            }
        }
    }
}

#[test]
fn a_smaller_budget_pins_the_same_share() {
    let folder = tempfile::tempdir().unwrap();
    let (bundle, prompt, want) = demo(folder.path());
    let Planned { resident, process, frame_bytes, .. } = bundle.plan.paging.clone().unwrap();
    let case = Case { frames: 48, ..USUAL };
    for (frames, pinned) in [(1, 0), (4, 1), (12, 5), (47, 19), (48, 20), (70, 20)] {
        let budget = resident + process + u64::from(frames + case.staging) * frame_bytes;
        let settings = Paging { budget: Some(budget), ..paging(case, None) };
        with_pins(&bundle, case, pins(20), settings, |engine| {
            assert!(logits(engine, &prompt).unwrap() == want, "{frames} frames give other logits");
            let report = engine.paging().unwrap();
            assert_eq!((report.frames, report.pinned), (frames, pinned));
            assert_eq!(report.pinned_bytes, u64::from(pinned) * frame_bytes);
        });
    }
}

#[test]
fn pins_that_fail_to_preload_are_read_on_demand() {
    let folder = tempfile::tempdir().unwrap();
    let (bundle, prompt, want) = demo(folder.path());
    let gone = Arc::new(AtomicBool::new(true));
    let disk = Arc::clone(&gone);
    let plan =
        move |_| if disk.load(Ordering::SeqCst) { Injected::Error(libc::EIO) } else { Injected::Nothing };
    let case = Case { frames: 40, ..USUAL };
    let settings = paging(case, Some(faulty(plan, Gate::default())));
    with_pins(&bundle, case, pins(30), settings, |engine| {
        let report = wait_until(engine, |r| r.disk.failed == 30);
        assert_eq!(report.preloaded, 0);
        gone.store(false, Ordering::SeqCst);
        assert!(logits(engine, &prompt).unwrap() == want, "what was not read at the start is missed");
        assert_eq!(engine.paging().unwrap().preloaded, 0);
    });
}

#[test]
fn failing_disk_with_pinned_experts_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let (bundle, prompt, want) = demo(folder.path());
    // Some reads at the start fail, and some on demand.
    let plan = |n: u32| if (10..100).contains(&n) { Injected::Error(libc::EIO) } else { Injected::Nothing };
    for threads in [1, 3] {
        let case = Case { frames: 24, threads, ..USUAL };
        let settings = paging(case, Some(faulty(plan, Gate::default())));
        with_pins(&bundle, case, pins(12), settings, |engine| {
            let failures = (0..100).find(|_| match logits(engine, &prompt) {
                Ok(found) => {
                    assert!(found == want, "{case:?} gives other logits");
                    true
                }
                Err(e) => {
                    assert!(e.to_string().contains("experts.bin"), "{e}");
                    false
                }
            });
            assert!(failures.is_some(), "it never recovers");
        });
    }
}

#[test]
fn invalid_pins_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (bundle, ..) = demo(folder.path());
    let unit = bundle.unit().unwrap();
    let opened = |pinned: Vec<(u32, u32)>| {
        let mut plan: Plan = bundle.plan.clone();
        let own = plan.paging.as_mut().unwrap();
        (own.frames, own.pinned) = (3, pinned);
        let program = Program::new(plan, &|s| unit.resolve(s)).map_err(|e| e.to_string())?;
        Engine::open(&program, &bundle.folder, Options::default()).map(drop).map_err(|e| e.to_string())
    };
    assert_eq!(opened(vec![(3, 23), (0, 0)]), Ok(()));
    for (pinned, words) in [
        (vec![(4, 0)], "layer 4 has no expert 0"),
        (vec![(0, 24)], "layer 0 has no expert 24"),
        (vec![(0, 1), (0, 1)], "expert 1 of layer 0 occurs twice"),
        (vec![(0, 1), (0, 2), (0, 3)], "3 experts in 3 frames"),
    ] {
        let error = opened(pinned).unwrap_err();
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn requested_share_is_pinned() {
    let folder = tempfile::tempdir().unwrap();
    let text = ferris().join("eval/calibration.txt");
    let with = |memory: &str| {
        let memory = format!(
            "budget = \"30 MiB\"\n{memory}\n[calibrate]\ntokens = 1024\ntext = [\"{}\"]",
            text.display()
        );
        build(&ferris(), folder.path(), &memory, "bf16")
    };
    let path = with("pin = 0\npolicy = \"lru\"");
    assert_eq!(Bundle::open(&path).unwrap().plan.paging.unwrap().pinned, []);
    let path = with("pin = \"50%\"");
    let bundle = Bundle::open(&path).unwrap();
    let own = bundle.plan.paging.clone().unwrap();
    let pinned = own.pinned.len() as u32;
    assert!(pinned > 0 && pinned <= own.frames / 2 && own.frames < 96, "{own:?}");
    let stdout = |command: &mut std::process::Command| String::from_utf8(ok(command).stdout).unwrap();
    let explained = stdout(moec().arg("explain").arg(&path));
    assert!(
        explained.contains("cache of experts") && explained.contains("50 % pinned to the hottest experts"),
        "{explained}"
    );
    assert!(stdout(moec().arg("run").arg(&path).arg("info")).contains(&format!("{pinned} of them pinned")));
    let generate = |extra: &[&str]| -> serde_json::Value {
        let mut command = moec();
        command
            .arg("run")
            .arg(&path)
            .args(["generate", "--ids", "1,20,300", "-n", "8", "--json"])
            .args(extra);
        serde_json::from_str(&stdout(&mut command)).unwrap()
    };
    let all = generate(&[]);
    assert_eq!(all["cache"]["pinned"], pinned, "{all}");
    assert_eq!(all["memory"]["pinned"], u64::from(pinned) * own.frame_bytes, "{all}");
    // The rest of the cache begins with the experts that calibration used most.
    assert!(all["cache"]["preloaded"].as_u64() <= Some(own.frames.into()), "{all}");
    let small = own.resident + own.process + u64::from(own.staging + own.frames / 2) * own.frame_bytes;
    let few = generate(&["--budget", &small.to_string()]);
    assert_eq!(few["cache"]["pinned"], u64::from(pinned * (own.frames / 2) / own.frames), "{few}");
    assert_eq!(all["ids"], few["ids"]);
    // With the policy given by name, the configured share is used unchanged.
    let path = with("pin = \"50%\"\npolicy = \"lru\"");
    let own = Bundle::open(&path).unwrap().plan.paging.unwrap();
    assert_eq!((own.policy.as_str(), own.pinned.len() as u32), ("lru", own.frames / 2));
}

#[test]
fn pinned_share_requires_a_profile() {
    let folder = tempfile::tempdir().unwrap();
    let toml = folder.path().join("model.toml");
    let text = format!("[model]\nsource = {:?}\n[memory]\nbudget = \"1 GiB\"\npin = \"25%\"\n", ferris());
    std::fs::write(&toml, text).unwrap();
    let mut command = moec();
    command.arg("build").arg(&toml).args(["--target", "native", "--no-run", "--quiet"]);
    let (_, stderr) = fails(command.arg("-o").arg(folder.path().join("b")));
    assert!(stderr.contains("`pin`") && stderr.contains("[calibrate]"), "{stderr}");
}
