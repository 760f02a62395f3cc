//! Tests of three levels, and of the experts that stay on them.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]

use moec_runtime::offload::cache::{CachedLayer, ExpertIndex, Key, Setting};
use moec_sim::cache::{Level, Levels, Moved, Trace, synthetic};
use moec_sim::resident::{Prices, Uses, replay, resident};
use std::collections::BTreeSet;

const BYTES: u64 = 10;

fn experts() -> ExpertIndex {
    ExpertIndex::uniform(3, CachedLayer { experts: 16, k: 2, bytes: BYTES }).expect("experts")
}

/// Random routing, in which an expert's share falls with its index, or all experts have the same share.
fn trace(skewed: bool, persistence: f64, tokens: usize) -> Trace {
    let share = |e: usize| if skewed { 0.6_f64.powi(e as i32) } else { 1.0 };
    let popularity = vec![(0, (0..16).map(share).collect())];
    synthetic::trace(&experts(), &popularity, persistence, tokens, 3).expect("a trace")
}

fn setting(text: &str) -> Setting {
    text.parse().expect("a setting")
}

/// Events and queries agree, and every expert on the GPU is also in host memory.
#[test]
fn gpu_level_is_included_in_the_host_level() {
    let trace = trace(true, 0.5, 200);
    for policy in ["lru", "mrs alpha=0.3 bypass=1", "mrs bypass=0 per-layer", "lfu bypass=1"] {
        let of = setting(policy);
        let pinned = [Key { layer: 1, expert: 3 }];
        let mut levels = Levels::new(&experts(), [150, 60], [&of, &of], &pinned).expect("levels");
        let (mut host, mut gpu) = (BTreeSet::new(), BTreeSet::new());
        let mut moved = 0;
        for (token, layer, step) in trace.steps() {
            let mut on = |m: Moved| {
                moved += 1;
                let fits = match m {
                    Moved::Read(key) => host.insert(key),
                    Moved::Streamed(key) => !host.contains(&key),
                    Moved::Transferred(key) => host.contains(&key) && gpu.insert(key),
                    Moved::LeavesGpu(key) => gpu.remove(&key),
                    Moved::LeavesHost(key) => !gpu.contains(&key) && host.remove(&key),
                };
                assert!(fits, "{policy}: {m:?}");
            };
            levels.step(layer, step.chosen, &step.chosen[token % 2..], step.ranked, &mut on).expect("a step");
            if token % 3 == 0 {
                let key = Key { layer: (layer as u16 + 1) % 3, expert: step.chosen[0] };
                let there = levels.ahead(key, &mut on).expect("an expert");
                assert_eq!(there, levels.level(key) == Level::Gpu);
            }
            for layer in 0..3 {
                for expert in 0..16 {
                    let key = Key { layer, expert };
                    let level = match (gpu.contains(&key), host.contains(&key)) {
                        (true, _) => Level::Gpu,
                        (_, true) => Level::Host,
                        _ => Level::Disk,
                    };
                    assert_eq!(levels.level(key), level, "{policy}: {key:?}");
                }
            }
            assert_eq!(levels.used(), [&host, &gpu].map(|of| of.len() as u64 * BYTES));
            assert!(host.len() <= 15 && gpu.len() <= 6);
        }
        assert!(moved > 100, "{policy}: {moved}");
    }
}

#[test]
fn cpu_computed_experts_are_not_transferred() {
    let of = setting("lru");
    let mut levels = Levels::new(&experts(), [100, 50], [&of, &of], &[]).expect("levels");
    let mut step = |chosen: &[u16], transferred: &[u16]| {
        levels.step(0, chosen, transferred, &[], |_| ()).expect("a step");
        [0, 1].map(|expert| levels.level(Key { layer: 0, expert }))
    };
    assert_eq!(step(&[0, 1], &[1]), [Level::Host, Level::Gpu]);
    assert_eq!(step(&[0, 1], &[0]), [Level::Gpu, Level::Gpu]);
}

const PRICES: Prices = Prices { gpu: 1.0, host: 10.0, disk: 50.0, transfer: 2.0 };

#[test]
fn chosen_residency_is_no_worse_than_its_candidates() {
    for (skewed, persistence) in [(true, 0.0), (true, 0.8), (false, 0.9)] {
        let trace = trace(skewed, persistence, 256);
        let bytes = [240, 80];
        let chosen = resident(&trace, bytes, &PRICES).expect("a choice");
        let seen = trace.part(0..128);
        let us = |pinned: &[Key], of: &Setting| {
            replay(&seen, bytes, [of, of], pinned).expect("a replay").us(&PRICES)
        };
        let own = us(&chosen.pinned, &chosen.setting);
        for other in ["lru", "mrs alpha=0.1 depth=2 bypass=0", "lfu half_life=0 bypass=1"] {
            assert!(own <= us(&[], &setting(other)), "{chosen:?}");
        }
        assert!(chosen.pinned.len() as u64 * BYTES <= bytes[1] * u64::from(chosen.share) / 100);
        let [held_out, fixed] = [chosen.held_out, chosen.held_out_fixed];
        let all = |u: Uses| u.gpu + u.host + u.disk;
        assert_eq!((all(held_out), all(fixed), fixed.transfers), (128 * 6, 128 * 6, 0));
        if !skewed {
            // No expert is popular, but choices repeat, so a fixed set of experts is worse.
            assert!(chosen.share < 100 && held_out.us(&PRICES) < 0.8 * fixed.us(&PRICES), "{chosen:?}");
        }
    }
}

#[test]
fn more_cache_memory_is_no_slower() {
    let trace = trace(true, 0.5, 128);
    let us = |bytes| resident(&trace, bytes, &PRICES).expect("a choice").held_out.us(&PRICES);
    let all = 3 * 16 * BYTES;
    let times =
        [[all / 4, all / 8], [all / 2, all / 8], [all / 2, all / 4], [all, all / 2], [all, all]].map(us);
    assert!(times.is_sorted_by(|a, b| b < a), "{times:?}");
    assert!(resident(&trace.part(0..1), [all, all], &PRICES).is_err());
}
