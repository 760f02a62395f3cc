//! Tests of the choice of policy and pinned experts, and of its reasons.

use super::*;
use moec_sim::cache::synthetic::trace as synthetic;
use moec_sim::cache::{MARGIN, Pin, Reason, Row, SHARES, TraceError, choose, hottest_share, replay_pinned};

/// Popularity that falls like 1/n, in each of three layers.
fn skewed(n: usize) -> moec_sim::cache::synthetic::Popularity {
    (0..3).map(|l| (l, (0..n).map(|e| 1.0 / (1.0 + ((e * 7 + l as usize) % n) as f64)).collect())).collect()
}

#[test]
fn lru_is_not_chosen_for_skew_without_persistence() {
    let trace = synthetic(&experts(3, 16, 2), &skewed(16), 0.0, 1500, 1).unwrap();
    let (seen, later) = (trace.part(0..1000), trace.part(1000..1500));
    for slots in [12, 24, 36] {
        let choice = choose(&seen, slots, Pin::Percent(0)).unwrap();
        assert_eq!(choice.reason, Reason::BeatsLru, "{slots}");
        assert_ne!(choice.chosen.setting.info().name, "lru");
        let [own, lru] =
            [&choice.chosen.setting, &Setting::lru()].map(|s| replay(&later, slots, s, 1).unwrap().total());
        assert!(own.hit_rate() > lru.hit_rate(), "{slots}: {own:?} {lru:?}");
        assert!(choice.held_out.hit_rate() >= choice.held_out_lru.hit_rate() + choice.margin());
        assert!(choice.margin() > MARGIN);
        assert!(choice.rows.iter().all(|r| r.counters.read >= choice.optimum.read));
        assert_eq!(choice.rows[0].setting, Setting::lru());
        let best = choice.best_of_each();
        assert_eq!(
            best.iter().map(|r| r.setting.info().name).collect::<Vec<_>>(),
            ["lru", "lfu", "mrs", "page-cache"]
        );
        assert!(choice.chosen.counters.read <= best[0].counters.read);
    }
}

#[test]
fn lru_is_chosen_if_experts_are_indistinguishable() {
    let even = vec![(0, vec![1.0; 16])];
    let trace = synthetic(&experts(1, 16, 2), &even, 0.0, 4000, 2).unwrap();
    let choice = choose(&trace, 8, Pin::Auto).unwrap();
    assert_eq!((choice.reason, choice.chosen.setting), (Reason::NothingBeatsLru, Setting::lru()));
}

#[test]
fn cache_that_fits_all_experts_needs_no_policy_choice() {
    let trace = synthetic(&experts(3, 16, 2), &skewed(16), 0.5, 500, 3).unwrap();
    let choice = choose(&trace, 48, Pin::Auto).unwrap();
    assert_eq!(choice.chosen.setting, Setting::lru());
    assert_eq!(choice.chosen.counters.read, choice.optimum.read);
    assert_eq!(choose(&trace, 0, Pin::Auto).unwrap().chosen.setting, Setting::lru());
}

#[test]
fn too_short_trace_is_an_error() {
    let trace = synthetic(&experts(1, 4, 1), &vec![(0, vec![1.0; 4])], 0.0, 63, 1).unwrap();
    assert_eq!(choose(&trace, 2, Pin::Auto), Err(TraceError::TooShort { found: 63, least: 64 }));
}

#[test]
fn score_policies_are_skipped_for_traces_without_scores() {
    let mut trace = Trace::new(experts(1, 8, 1), false);
    // Two experts that are used again and again, and a scan.
    (0..300).for_each(|t| trace.push(&[if t % 3 < 2 { t % 3 } else { 2 + t / 3 % 6 }], &[]).unwrap());
    let choice = choose(&trace, 2, Pin::Auto).unwrap();
    assert!(choice.rows.iter().all(|r| !r.setting.info().scored));
    // LRU never hits; a policy that keeps the two does.
    assert_eq!(choice.rows[0].counters.hits, 0);
    assert_eq!(choice.reason, Reason::BeatsLru);
}

/// A layer of 64 experts, of which each token uses two: one of 20 equally popular experts, and one of four
/// that change every 12 tokens. After every `drift` tokens, other experts are popular.
fn hot_and_bursts(tokens: usize, drift: usize) -> Trace {
    let mut state = 7_u64;
    // Knuth's generator; its upper bits are the random ones.
    let mut below = |n: u16| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % u64::from(n)) as u16
    };
    let mut trace = Trace::new(experts(1, 64, 2), false);
    let mut burst = 0;
    for token in 0..tokens {
        if token % 12 == 0 {
            burst = 20 + below(40);
        }
        let moved = |e: u16| (e + 23 * (token / drift) as u16) % 64;
        trace.push(&[moved(below(20)), moved(burst + below(4))], &[]).unwrap();
    }
    trace
}

#[test]
fn experts_that_are_always_hot_are_pinned() {
    let trace = hot_and_bursts(2000, usize::MAX);
    let (seen, later) = (trace.part(0..1500), trace.part(1500..2000));
    let choice = choose(&seen, 24, Pin::Auto).unwrap();
    let Row { setting, pinned, .. } = &choice.chosen;
    assert!(*pinned > 0 && choice.reason == Reason::BeatsLru, "{}", choice.chosen);
    assert_eq!(choice.pinned.len(), 24 * usize::from(*pinned) / 100);
    assert!(choice.pinned.iter().all(|k| k.expert < 20), "{:?}", choice.pinned);
    assert!(choice.held_out.hit_rate() > choice.held_out_unpinned.hit_rate() + MARGIN);
    assert_eq!(choice.held_out.accesses(), choice.held_out_lru.accesses());
    let own = replay_pinned(&later, 24, setting, &choice.pinned, 1).unwrap().total();
    for other in &choice.rows {
        let other = replay(&later, 24, &other.setting, 1).unwrap().total();
        assert!(own.hit_rate() > other.hit_rate() + 0.02, "{own:?} {other:?}");
    }
    let tried: Vec<_> =
        SHARES.iter().filter(|s| choice.pinned_rows.iter().any(|r| r.pinned == **s)).collect();
    assert_eq!(tried.len(), SHARES.len());
    assert!(choice.pinned_rows.contains(&choice.chosen) && !choice.rows.contains(&choice.chosen));
    assert!(choice.pinned_rows.iter().all(|r| r.counters.read >= choice.optimum.read));
}

#[test]
fn experts_that_are_hot_for_a_while_are_not_pinned() {
    let trace = hot_and_bursts(2000, 250);
    let choice = choose(&trace, 24, Pin::Auto).unwrap();
    assert_eq!((choice.chosen.pinned, choice.pinned.len()), (0, 0), "{}", choice.chosen);
    assert_eq!(choice.held_out, choice.held_out_unpinned);
    assert!(choice.best_pinned().is_some());
    let with = choose(&trace, 24, Pin::Percent(75)).unwrap();
    assert!(with.held_out.read > choice.held_out.read, "{with:?}");
}

#[test]
fn requested_share_of_the_cache_is_pinned() {
    let trace = hot_and_bursts(1000, 250);
    let choice = choose(&trace, 24, Pin::Percent(50)).unwrap();
    assert_eq!((choice.chosen.pinned, choice.pinned.len()), (50, 12));
    assert_eq!(choice.pinned, hottest_share(&trace, 24, 50));
    assert!(choice.pinned_rows.iter().all(|r| r.pinned == 50));
    let none = choose(&trace, 24, Pin::Percent(0)).unwrap();
    assert_eq!((none.chosen.pinned, none.pinned.len(), none.pinned_rows.len()), (0, 0, 0));
    // A quarter of three places is less than one.
    assert_eq!(choose(&trace, 3, Pin::Percent(25)).unwrap().chosen.pinned, 0);
}
