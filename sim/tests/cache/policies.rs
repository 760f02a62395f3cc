//! Tests of every policy on traces computed by hand.

use super::*;
use moec_runtime::offload::cache::{Cache, Key};
use moec_sim::cache::optimum;

#[test]
fn lru_evicts_what_was_used_longest_ago() {
    assert_eq!(letters(&one_layer(3, &[0, 1, 0, 2, 0, 1]), 2, "lru"), "mmhmhm");
    // A loop one longer than the cache never hits.
    assert_eq!(letters(&one_layer(3, &[0, 1, 2, 0, 1, 2]), 2, "lru"), "mmmmmm");
}

#[test]
fn lfu_keeps_what_is_used_often() {
    let trace = one_layer(3, &[0, 0, 1, 1, 2, 0]);
    assert_eq!(letters(&trace, 2, "lfu half_life=0 bypass=1"), "mhmhsh");
    // Without bypass, the third expert replaces the older of two equally frequent ones.
    assert_eq!(letters(&trace, 2, "lfu half_life=0 bypass=0"), "mhmhmm");
}

#[test]
fn lfu_forgets_with_age() {
    // Three uses of the first expert weigh 2 + 4 + 8; the first use of the second weighs 16.
    let trace = one_layer(2, &[0, 0, 0, 1, 1]);
    assert_eq!(letters(&trace, 1, "lfu half_life=1 bypass=1"), "mhhmh");
    assert_eq!(letters(&trace, 1, "lfu half_life=0 bypass=1"), "mhhss");
}

/// A trace of one layer with three experts, of which one is used; p = 2.
fn scored(tokens: &[(u16, [(u16, f32); 2])]) -> Trace {
    let mut trace = Trace::new(experts(1, 3, 1), true);
    for (e, s) in tokens {
        trace.push(&[*e], s).unwrap();
    }
    trace
}

#[test]
fn mrs_averages_the_largest_scores() {
    // S of expert 0: 0.3, 0.4, 0.325; of expert 1: 0.2, 0.35, 0.425.
    let trace = scored(&[(0, [(0, 0.6), (1, 0.4)]), (1, [(1, 0.5), (0, 0.5)]), (1, [(1, 0.5), (0, 0.25)])]);
    assert_eq!(letters(&trace, 1, "mrs alpha=0.5 depth=2 bypass=1"), "msm");
    assert_eq!(letters(&trace, 1, "mrs alpha=0.5 depth=2 bypass=0"), "mmh");
    // With p = K only the first score of a token counts: S of expert 0 is 0.3, 0.15; of expert 1 0, 0.25.
    assert_eq!(letters(&trace, 1, "mrs alpha=0.5 depth=1 bypass=1"), "mmh");
}

#[test]
fn mrs_keeps_what_scored_high_without_being_used() {
    // Expert 1 is used once, then its scores are just below the best; LRU forgets it.
    let just_below = |used: u16| (used, [(used, 0.5), (1, 0.4)]);
    let mut tokens = vec![(1, [(1, 0.6), (0, 0.3)])];
    tokens.extend([0, 2, 0, 2].map(just_below));
    tokens.push((1, [(1, 0.6), (0, 0.3)]));
    let trace = scored(&tokens);
    assert!(letters(&trace, 2, "mrs alpha=0.5 depth=2 bypass=0").ends_with('h'));
    assert!(letters(&trace, 2, "lru").ends_with('m'));
}

/// Experts of one page each.
fn pages(n: usize, uses: &[u16]) -> Trace {
    let of = ExpertIndex::uniform(1, CachedLayer { experts: n, k: 1, bytes: 4096 }).unwrap();
    let mut trace = Trace::new(of, false);
    for &e in uses {
        trace.push(&[e], &[]).unwrap();
    }
    trace
}

#[test]
fn page_cache_keeps_twice_used_experts_through_a_scan() {
    let trace = pages(6, &[0, 0, 1, 2, 3, 4, 5, 0]);
    assert_eq!(letters(&trace, 4 * 4096, "page-cache"), "mhmmmmmh");
    assert_eq!(letters(&trace, 4 * 4096, "lru"), "mhmmmmmm");
}

#[test]
fn page_cache_activates_quickly_refaulted_experts() {
    // Expert 1 is evicted for 3 and read again soon: it is active, and outlives 4 and 5.
    let trace = pages(7, &[6, 6, 1, 2, 3, 1, 4, 5, 1]);
    assert_eq!(letters(&trace, 3 * 4096, "page-cache"), "mhmmmmmmh");
}

#[test]
fn belady_uses_future_requests() {
    let trace = one_layer(3, &[0, 1, 2, 0, 1]);
    let best = optimum(&trace, 2, 1).total();
    assert_eq!((best.hits, best.misses), (2, 3));
    assert_eq!(total(&trace, 2, "lru").hits, 0);
    assert_eq!(optimum(&trace, 0, 1).total().hits, 0);
    assert_eq!(optimum(&trace, 3, 1).total().hits, 2);
}

#[test]
fn bound_for_unequal_experts_counts_bytes() {
    // A large and a small expert with two bytes of room: the bound may keep half of the large one.
    let layers = [CachedLayer { experts: 1, k: 1, bytes: 2 }, CachedLayer { experts: 1, k: 1, bytes: 1 }];
    let mut trace = Trace::new(ExpertIndex::new(&layers).unwrap(), false);
    (0..3).for_each(|_| trace.push(&[0, 0], &[]).unwrap());
    let best = optimum(&trace, 2, 1).total();
    assert_eq!((best.used, best.read), (9, 3 + 1 + 1));
    assert_eq!(total(&trace, 2, "lru").read, 9);
}

#[test]
fn experts_of_a_step_are_not_evicted_during_it() {
    // Of the second step's experts, the resident one is not evicted for the missing one.
    let mut trace = Trace::new(experts(1, 4, 2), false);
    for t in [[0, 1], [2, 1], [1, 0]] {
        trace.push(&t, &[]).unwrap();
    }
    assert_eq!(letters(&trace, 2, "lru"), "mmhmhm");
    // The cache is too small for a step: experts that do not fit are read for this step only.
    assert_eq!(letters(&trace, 1, "lru"), "msmsms");
}

#[test]
fn layers_with_their_own_share_do_not_disturb_each_other() {
    // Two layers: the second uses every expert once, and would evict the first layer's expert from a shared
    // cache.
    let mut trace = Trace::new(experts(2, 8, 1), false);
    (0..8).for_each(|t| trace.push(&[0, t], &[]).unwrap());
    assert_eq!(total(&trace, 2, "lru per-layer").hits, 7);
    assert_eq!(total(&trace, 1, "lru").hits, 0);
    // An odd place goes to one of the layers.
    let cache = Cache::new(trace.experts(), 3, &setting("lru per-layer"));
    assert_eq!(cache.capacity(), 3);
}

#[test]
fn prefetched_expert_is_resident_but_not_counted_as_used() {
    let of = experts(1, 4, 1);
    let key = |expert| Key { layer: 0, expert };
    let mut cache = Cache::new(&of, 2, &setting("lru"));
    let mut events = Vec::new();
    assert!(cache.ahead(key(3), |e| events.push(e)).unwrap());
    assert!(!cache.ahead(key(3), |_| panic!("it is there")).unwrap());
    cache.step(0, &[3], &[], |e| events.push(e)).unwrap();
    assert_eq!(events, [Event::Load(key(3)), Event::Hit(key(3))]);
    events.clear();
    // With a full cache, experts of the current step stay when others are read ahead.
    cache.step(0, &[0], &[], |_| {}).unwrap();
    assert!(cache.ahead(key(1), |e| events.push(e)).unwrap());
    assert_eq!(events, [Event::Evict(key(3)), Event::Load(key(1))]);
    assert!(!cache.ahead(key(2), |_| panic!("both are in use")).unwrap());
    // An expert that the policy would not keep is not read ahead.
    let mut cache = Cache::new(&of, 1, &setting("lfu"));
    cache.step(0, &[0], &[], |_| {}).unwrap();
    cache.step(0, &[], &[], |_| {}).unwrap();
    assert!(!cache.ahead(key(1), |_| panic!("it was never used")).unwrap());
    assert!(cache.contains(key(0)) && !cache.contains(Key { layer: 9, expert: 0 }));
}

#[test]
fn unknown_experts_are_rejected_by_the_cache() {
    let mut cache = Cache::new(&experts(2, 4, 1), 2, &setting("lru"));
    let e = cache.step(1, &[4], &[], |_| panic!("nothing happens")).unwrap_err();
    assert_eq!(e.to_string(), "layer 1 has no expert 4");
    assert!(cache.step(2, &[0], &[], |_| {}).is_err());
    assert!(cache.step(2, &[], &[], |_| {}).is_err());
    assert!(cache.ahead(Key { layer: 2, expert: 0 }, |_| {}).is_err());
}
