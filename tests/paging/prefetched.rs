//! Experts that are read before they are requested: at the start those that recorded routing used most, later
//! those that the next layer probably requests. The logits are the same, and less is read, or earlier.

use super::*;
use moec_ir::paging::Paging as Planned;

/// The demo model with recorded routing, and the number of frames of its plan.
fn recorded(folder: &Path, memory: &str) -> PathBuf {
    let text = ferris().join("eval/calibration.txt");
    let memory = format!("{memory}\n[calibrate]\ntokens = 1024\ntext = [\"{}\"]", text.display());
    build(&ferris(), folder, &memory, "bf16")
}

/// Runs the plan with another policy.
fn as_planned(bundle: &Bundle, policy: &str, settings: Paging, prompt: &[u32]) -> (Vec<u32>, Report) {
    let mut plan: Plan = bundle.plan.clone();
    policy.clone_into(&mut plan.paging.as_mut().unwrap().policy);
    let unit = bundle.unit().unwrap();
    let program = Program::new(plan, &|s| unit.resolve(s)).unwrap();
    let options = Options { threads: Some(2), paging: Some(settings), ..Options::default() };
    let mut engine = Engine::open(&program, &bundle.folder, options).unwrap();
    let found = logits(&mut engine, prompt).unwrap();
    (found, engine.paging().unwrap())
}

#[test]
fn recorded_routing_fills_the_cache_and_changes_no_logits() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = Bundle::open(&recorded(folder.path(), "budget = \"30 MiB\"")).unwrap();
    let Planned { uses, frames, layers, .. } = bundle.plan.paging.clone().unwrap();
    let experts: u32 = layers.iter().map(|l| l.experts).sum();
    assert!(frames < experts && uses.len() == experts as usize, "{frames} of {experts}");
    // In every layer, every token used k experts.
    let seen =
        |l: usize| uses[l * uses.len() / layers.len()..][..uses.len() / layers.len()].iter().sum::<u32>();
    assert!(
        (0..layers.len()).all(|l| seen(l) == seen(0) && seen(l) > 0 && seen(l) % layers[l].k == 0),
        "{uses:?}"
    );
    let prompt = &expected(&ferris()).ids[..44];
    let want = in_memory(&bundle, prompt);
    for policy in
        ["lru", "lfu half_life=0 bypass=1", "mrs alpha=0.2 depth=2 bypass=1", "page-cache", "lru per-layer"]
    {
        for ahead in [0, 3] {
            let settings = |preload| Paging { preload, ..paging(Case { ahead, ..USUAL }, None) };
            let (cold, without) = as_planned(&bundle, policy, settings(false), prompt);
            let (warm, with) = as_planned(&bundle, policy, settings(true), prompt);
            assert!(cold == want && warm == want, "{policy} gives other logits");
            assert_eq!(without.preloaded, 0);
            assert!(with.preloaded <= u64::from(frames), "{policy}: {with:?}");
            if ahead == 0 {
                // Experts that are still being read from the start count as hits.
                assert!(with.misses < without.misses, "{policy}: {} and {}", with.misses, without.misses);
            }
        }
    }
}

#[test]
fn prefetched_entries_do_not_change_the_cache_or_logits() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = Bundle::open(&build(&ferris(), folder.path(), "budget = \"1 GiB\"", "bf16")).unwrap();
    let prompt = expected(&ferris()).ids[..44].to_vec();
    let want = in_memory(&bundle, &prompt);
    for (frames, staging) in [(40, 2), (40, 3), (12, 5), (40, 7), (1, 40)] {
        for policy in ["lru", "lfu half_life=0 bypass=1", "mrs alpha=0.2 depth=2 bypass=1"] {
            let case = |ahead| Case { frames, staging, policy, ahead, threads: 2, reader: Choice::Threads };
            let (found, with) = run(&bundle, case(3), &prompt);
            assert!(found == want, "{policy} with {staging} staging frames gives other logits");
            let (found, without) = run(&bundle, case(0), &prompt);
            assert!(found == want);
            assert_eq!((without.ahead, without.predicted), (0, 0));
            assert!(with.predicted <= with.ahead, "{with:?}");
            let uses = |r: &Report| r.hits + r.misses;
            assert_eq!(uses(&with), uses(&without));
        }
    }
}

#[test]
fn staging_frames_for_prefetching_are_reserved_in_large_caches() {
    let folder = tempfile::tempdir().unwrap();
    let of = |memory: &str| {
        let path = build(&ferris(), folder.path(), memory, "bf16");
        Bundle::open(&path).unwrap().plan.paging.unwrap()
    };
    let none = of("budget = \"30 MiB\"\nprefetch = 0\npolicy = \"lru\"");
    let some = of("budget = \"30 MiB\"\nprefetch = 1\npolicy = \"lru\"");
    assert_eq!((none.staging, some.staging), (2, 5));
    assert_eq!(none.frames + none.staging, some.frames + some.staging);
    assert_eq!(some.uses, [0_u32; 0]);
    // With few frames, staging gets no additional ones.
    let least = some.resident + some.process + 12 * some.frame_bytes;
    let few = of(&format!("budget = \"{least}\"\nprefetch = 1\npolicy = \"lru\""));
    assert_eq!((few.staging, few.frames), (2, 10));
}
