//! What is chosen, and when it is not.

use super::*;
use moec_runtime::cache::synthetic::trace as synthetic;
use moec_runtime::cache::{CacheError, MARGIN, Reason, choose};

/// Popularity that falls like 1/n, in each of three layers.
fn skewed(n: usize) -> moec_runtime::cache::synthetic::Popularity {
    (0..3).map(|l| (l, (0..n).map(|e| 1.0 / (1.0 + ((e * 7 + l as usize) % n) as f64)).collect())).collect()
}

#[test]
fn skew_without_persistence_is_not_for_lru() {
    let trace = synthetic(&experts(3, 16, 2), &skewed(16), 0.0, 1500, 1).unwrap();
    let (seen, later) = (trace.part(0..1000), trace.part(1000..1500));
    for slots in [12, 24, 36] {
        let choice = choose(&seen, slots).unwrap();
        assert_eq!(choice.reason, Reason::BeatsLru, "{slots}");
        assert_ne!(choice.setting.info().name, "lru");
        let [own, lru] =
            [&choice.setting, &Setting::lru()].map(|s| replay(&later, slots, s, 1).unwrap().total());
        assert!(own.hit_rate() > lru.hit_rate(), "{slots}: {own:?} {lru:?}");
        assert!(choice.held_out.hit_rate() >= choice.held_out_lru.hit_rate() + choice.margin());
        assert!(choice.margin() > MARGIN);
        assert!(choice.rows.iter().all(|r| r.tally.read >= choice.optimum.read));
        assert_eq!(choice.rows[0].setting, Setting::lru());
        let best = choice.best_of_each();
        assert_eq!(
            best.iter().map(|r| r.setting.info().name).collect::<Vec<_>>(),
            ["lru", "lfu", "mrs", "page-cache"]
        );
        assert!(choice.chosen().read <= best[0].tally.read);
    }
}

#[test]
fn where_nothing_tells_experts_apart_lru_stays() {
    let even = vec![(0, vec![1.0; 16])];
    let trace = synthetic(&experts(1, 16, 2), &even, 0.0, 4000, 2).unwrap();
    let choice = choose(&trace, 8).unwrap();
    assert_eq!((choice.reason, choice.setting), (Reason::NothingBeatsLru, Setting::lru()));
}

#[test]
fn a_cache_for_everything_needs_no_choice() {
    let trace = synthetic(&experts(3, 16, 2), &skewed(16), 0.5, 500, 3).unwrap();
    let choice = choose(&trace, 48).unwrap();
    assert_eq!(choice.setting, Setting::lru());
    assert_eq!(choice.chosen().read, choice.optimum.read);
    assert_eq!(choose(&trace, 0).unwrap().setting, Setting::lru());
}

#[test]
fn a_short_trace_decides_nothing() {
    let trace = synthetic(&experts(1, 4, 1), &vec![(0, vec![1.0; 4])], 0.0, 63, 1).unwrap();
    assert_eq!(choose(&trace, 2), Err(CacheError::TooShort { found: 63, least: 64 }));
}

#[test]
fn without_scores_no_policy_that_needs_them_is_tried() {
    let mut trace = Trace::new(experts(1, 8, 1), false);
    // Two experts that are used again and again, and a scan.
    (0..300).for_each(|t| trace.push(&[if t % 3 < 2 { t % 3 } else { 2 + t / 3 % 6 }], &[]).unwrap());
    let choice = choose(&trace, 2).unwrap();
    assert!(choice.rows.iter().all(|r| !r.setting.info().scored));
    // LRU never hits; what keeps the two does.
    assert_eq!(choice.rows[0].tally.hits, 0);
    assert_eq!(choice.reason, Reason::BeatsLru);
}
