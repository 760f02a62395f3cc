//! Tests of experts that are never evicted.

use super::properties::{any_setting, traces};
use super::*;
use moec_runtime::offload::cache::{Cache, CacheError, Key, Scope};
use moec_sim::cache::{hottest, hottest_share, replay_pinned};
use proptest::prelude::*;
use std::collections::BTreeSet;

pub(super) fn key(layer: u16, expert: u16) -> Key {
    Key { layer, expert }
}

pub(super) fn step(cache: &mut Cache, layer: usize, chosen: &[u16]) -> Vec<Event> {
    let mut events = Vec::new();
    cache.step(layer, chosen, &[], |e| events.push(e)).unwrap();
    events
}

#[test]
fn pinned_expert_is_loaded_once_and_stays() {
    let mut cache = Cache::with_pinned(&experts(1, 4, 1), 2, &setting("lru"), &[key(0, 3)]).unwrap();
    assert_eq!((cache.capacity(), cache.used()), (2, 0));
    assert!(cache.is_pinned(key(0, 3)) && !cache.is_pinned(key(0, 0)) && !cache.is_pinned(key(1, 3)));
    // One place is left for other experts, even before the pinned one is read.
    assert_eq!(step(&mut cache, 0, &[0]), [Event::Load(key(0, 0))]);
    assert_eq!(step(&mut cache, 0, &[1]), [Event::Evict(key(0, 0)), Event::Load(key(0, 1))]);
    assert!(!cache.contains(key(0, 3)));
    assert_eq!(step(&mut cache, 0, &[3]), [Event::Load(key(0, 3))]);
    assert_eq!(step(&mut cache, 0, &[2]), [Event::Evict(key(0, 1)), Event::Load(key(0, 2))]);
    assert_eq!(step(&mut cache, 0, &[3, 2]), [Event::Hit(key(0, 3)), Event::Hit(key(0, 2))]);
    assert_eq!(cache.used(), 2);
}

#[test]
fn pinned_experts_survive_a_reset_and_are_prefetched() {
    let mut cache = Cache::with_pinned(&experts(2, 2, 1), 2, &setting("lru"), &[key(1, 0)]).unwrap();
    for _ in 0..2 {
        let mut events = Vec::new();
        assert_eq!(cache.ahead(key(1, 0), |e| events.push(e)), Ok(true));
        assert_eq!(cache.ahead(key(1, 0), |e| events.push(e)), Ok(false));
        assert_eq!(events, [Event::Load(key(1, 0))]);
        assert_eq!(step(&mut cache, 1, &[0]), [Event::Hit(key(1, 0))]);
        cache.reset();
        assert!(cache.used() == 0 && !cache.contains(key(1, 0)) && cache.is_pinned(key(1, 0)));
    }
}

#[test]
fn layers_share_the_capacity_left_by_pinned_experts() {
    // Pinned experts take four of ten places, all for layer 0; the others are divided as four experts to
    // eight.
    let pinned: Vec<_> = (0..4).map(|e| key(0, e)).collect();
    let mut cache = Cache::with_pinned(&experts(2, 8, 1), 10, &setting("lru per-layer"), &pinned).unwrap();
    assert_eq!(cache.capacity(), 10);
    for expert in 0..8 {
        step(&mut cache, 0, &[expert]);
        step(&mut cache, 1, &[expert]);
    }
    let there = |layer| (0..8).filter(|&e| cache.contains(key(layer, e))).collect::<Vec<_>>();
    assert_eq!(there(0), [0, 1, 2, 3, 6, 7]);
    assert_eq!(there(1), [4, 5, 6, 7]);
    assert_eq!(cache.used(), 10);
}

#[test]
fn invalid_pinned_experts_are_rejected() {
    let with = |pinned: &[Key]| Cache::with_pinned(&experts(2, 4, 1), 2, &setting("lru"), pinned).err();
    assert_eq!(with(&[key(0, 3), key(1, 3)]), None);
    assert_eq!(with(&[key(0, 4)]), Some(CacheError::NoExpert { layer: 0, expert: 4 }));
    assert_eq!(with(&[key(2, 0)]), Some(CacheError::NoExpert { layer: 2, expert: 0 }));
    for (pinned, words) in [
        (vec![key(1, 2), key(1, 2)], "expert 2 of layer 1 is pinned twice"),
        (vec![key(0, 0), key(0, 1), key(1, 2)], "expert 2 of layer 1 is pinned, and there is no room"),
    ] {
        let message = with(&pinned).unwrap().to_string();
        assert!(message.starts_with(words), "{message}");
    }
}

#[test]
fn hottest_experts_are_listed_first() {
    let trace = one_layer(5, &[2, 0, 2, 1, 2, 0, 4]);
    let of = |bytes| hottest(&trace, bytes, |_| true).iter().map(|k| k.expert).collect::<Vec<_>>();
    assert_eq!(of(2), [2, 0]);
    // Equally frequent experts are in order of index; unused experts are not listed.
    assert_eq!(of(9), [2, 0, 1, 4]);
    assert_eq!(of(0), [0_u16; 0]);
    let late: Vec<_> = hottest(&trace, 1, |token| token > 4).iter().map(|k| k.expert).collect();
    assert_eq!(late, [0]);
    assert_eq!(hottest_share(&trace, 4, 50), hottest(&trace, 2, |_| true));
    assert_eq!(hottest_share(&trace, 4, 49).len(), 1);
}

/// Some experts of a trace that fit together.
fn some(of: &ExpertIndex, capacity: u64, which: u64) -> Vec<Key> {
    let mut left = capacity;
    let all = of
        .layers()
        .iter()
        .enumerate()
        .flat_map(|(l, layer)| (0..layer.experts).map(move |e| (key(l as u16, e as u16), layer.bytes)));
    let wanted = all.enumerate().filter(|(i, _)| which >> (i % 64) & 1 == 1).map(|(_, k)| k);
    let fits = |(key, bytes): (Key, u64)| {
        left = left.checked_sub(bytes)?;
        Some(key)
    };
    wanted.map_while(fits).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn a_pinned_expert_never_leaves_and_bytes_never_exceed(
        trace in traces(false), capacity in 0_u64..40, setting in any_setting(), which: u64
    ) {
        let pinned = some(trace.experts(), capacity, which);
        let mut cache = Cache::with_pinned(trace.experts(), capacity, &setting, &pinned).unwrap();
        prop_assert!(cache.capacity() <= capacity);
        let mut held: BTreeSet<Key> = BTreeSet::new();
        for (_, layer, step) in trace.steps() {
            let mut events = Vec::new();
            cache.step(layer, step.chosen, step.ranked, |e| events.push(e)).unwrap();
            for event in events {
                match event {
                    Event::Hit(k) => prop_assert!(held.contains(&k)),
                    Event::Load(k) => prop_assert!(held.insert(k)),
                    Event::Stream(k) => prop_assert!(!held.contains(&k) && !pinned.contains(&k)),
                    Event::Evict(k) => prop_assert!(held.remove(&k) && !pinned.contains(&k)),
                }
                let used: u64 = held.iter().map(|k| trace.experts().layers()[usize::from(k.layer)].bytes).sum();
                prop_assert!(used <= capacity);
            }
            let used: u64 = held.iter().map(|k| trace.experts().layers()[usize::from(k.layer)].bytes).sum();
            prop_assert_eq!(used, cache.used());
            // A pinned expert is resident from its first use on.
            let own = step.chosen.iter().map(|&e| key(layer as u16, e));
            prop_assert!(own.filter(|k| pinned.contains(k)).all(|k| cache.contains(k)));
        }
    }

    /// Pinned experts make the cache smaller for the others, and the policy gets no requests for them.
    #[test]
    fn policies_receive_no_requests_for_pinned_experts(
        trace in traces(false), capacity in 0_u64..40, setting in any_setting(), which: u64
    ) {
        prop_assume!(setting.scope() == Scope::Shared);
        let pinned = some(trace.experts(), capacity, which);
        let aside: u64 = pinned.iter().map(|k| trace.experts().layers()[usize::from(k.layer)].bytes).sum();
        let mut cache = Cache::with_pinned(trace.experts(), capacity, &setting, &pinned).unwrap();
        let mut small = Cache::new(trace.experts(), capacity - aside, &setting);
        let is_pinned = |k: &Key| pinned.contains(k);
        for (_, layer, step) in trace.steps() {
            let (mut found, mut want) = (Vec::new(), Vec::new());
            cache.step(layer, step.chosen, step.ranked, |e| {
                let (Event::Hit(k) | Event::Evict(k) | Event::Load(k) | Event::Stream(k)) = e;
                if !is_pinned(&k) {
                    found.push(e);
                }
            }).unwrap();
            let others = step.chosen.iter().copied().filter(|&e| !is_pinned(&key(layer as u16, e)));
            let others: Vec<u16> = others.collect();
            small.step(layer, &others, step.ranked, |e| want.push(e)).unwrap();
            prop_assert_eq!(found, want);
        }
    }

    /// A pinned expert is read once, with any policy.
    #[test]
    fn fully_pinned_cache_reads_each_expert_once(trace in traces(true), setting in any_setting()) {
        let all = hottest(&trace, u64::MAX, |_| true);
        let capacity = 3 * all.len() as u64;
        let counters = replay_pinned(&trace, capacity, &setting, &all, 1).unwrap().total();
        prop_assert_eq!(counters.misses, all.len() as u64);
    }
}
