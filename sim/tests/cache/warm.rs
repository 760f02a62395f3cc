//! Tests of caches that begin with the experts that recorded routing used most.

use super::pinned::{key, step};
use super::properties::{any_setting, traces};
use super::*;
use moec_runtime::offload::cache::{Cache, Key};
use moec_sim::cache::uses;
use proptest::prelude::*;
use std::collections::BTreeSet;

fn warm(cache: &mut Cache, uses: &[u32]) -> Vec<Key> {
    let mut read = Vec::new();
    cache.warm(uses, |key| read.push(key));
    read
}

#[test]
fn warm_cache_starts_with_the_hottest_experts() {
    let mut cache = Cache::new(&experts(2, 3, 1), 3, &setting("lru"));
    // Counts are relative to their layer, so layer 1 with fewer uses is not at a disadvantage.
    assert_eq!(warm(&mut cache, &[50, 10, 40, 0, 9, 1]), [key(1, 1), key(0, 0), key(0, 2)]);
    assert_eq!(cache.used(), 3);
    assert_eq!(step(&mut cache, 0, &[0]), [Event::Hit(key(0, 0))]);
    // The coldest of them is evicted first.
    assert_eq!(step(&mut cache, 1, &[0]), [Event::Evict(key(0, 2)), Event::Load(key(1, 0))]);
}

#[test]
fn recorded_uses_initialize_the_policy_counts() {
    let mut cache = Cache::new(&experts(1, 3, 1), 1, &setting("lfu half_life=0 bypass=1"));
    assert_eq!(warm(&mut cache, &[6, 4, 0]), [key(0, 0)]);
    // First 5 uses against 6; then 6 against 6, and the newer expert wins.
    assert_eq!(step(&mut cache, 0, &[1]), [Event::Stream(key(0, 1))]);
    assert_eq!(step(&mut cache, 0, &[1]), [Event::Evict(key(0, 0)), Event::Load(key(0, 1))]);
}

#[test]
fn pinned_experts_are_not_read_twice() {
    let mut cache = Cache::with_pinned(&experts(1, 4, 1), 2, &setting("lru"), &[key(0, 0)]).unwrap();
    assert_eq!(warm(&mut cache, &[9, 5, 3, 0]), [key(0, 1)]);
    assert!(!cache.contains(key(0, 0)) && cache.contains(key(0, 1)));
    assert_eq!(step(&mut cache, 0, &[0]), [Event::Load(key(0, 0))]);
    assert_eq!(cache.used(), 2);
}

#[test]
fn cache_without_recorded_uses_starts_empty() {
    for uses in [&[][..], &[0; 6]] {
        let mut cache = Cache::new(&experts(2, 3, 1), 3, &setting("lru"));
        assert_eq!(warm(&mut cache, uses), []);
        assert_eq!((cache.used(), step(&mut cache, 0, &[2])), (0, vec![Event::Load(key(0, 2))]));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn warm_cache_never_exceeds_its_capacity(
        trace in traces(false), capacity in 0_u64..40, setting in any_setting()
    ) {
        let mut cache = Cache::new(trace.experts(), capacity, &setting);
        let mut held: BTreeSet<Key> = warm(&mut cache, &uses(&trace)).into_iter().collect();
        let bytes = |held: &BTreeSet<Key>| {
            held.iter().map(|k| trace.experts().layers()[usize::from(k.layer)].bytes).sum::<u64>()
        };
        prop_assert_eq!(bytes(&held), cache.used());
        prop_assert!(cache.used() <= capacity);
        for (_, layer, step) in trace.steps() {
            let mut events = Vec::new();
            cache.step(layer, step.chosen, step.ranked, |e| events.push(e)).unwrap();
            for event in events {
                match event {
                    Event::Hit(k) => prop_assert!(held.contains(&k)),
                    Event::Load(k) => prop_assert!(held.insert(k)),
                    Event::Stream(k) => prop_assert!(!held.contains(&k)),
                    Event::Evict(k) => prop_assert!(held.remove(&k)),
                }
                prop_assert!(bytes(&held) <= capacity);
            }
            prop_assert_eq!(bytes(&held), cache.used());
        }
    }
}
