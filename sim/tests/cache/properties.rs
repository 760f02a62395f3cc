//! Tests of invariants on random traces.

use super::*;
use moec_runtime::offload::cache::{Cache, Key};
use moec_sim::cache::{grid, optimum};
use proptest::collection::vec;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// A random trace with scores, of small layers with experts of equal or of different sizes. Scores are
/// sixteenths, so that averages by halves are exact.
pub(crate) fn traces(equal: bool) -> impl Strategy<Value = Trace> {
    let layer = (2_usize..7, 1_usize..3, 1_u64..5);
    (vec(layer, 1..4), 1_usize..50).prop_flat_map(move |(layers, tokens)| {
        let sized = |&(experts, k, bytes): &(usize, usize, u64)| CachedLayer {
            experts,
            k: k.min(experts),
            bytes: if equal { 3 } else { bytes },
        };
        let of = ExpertIndex::new(&layers.iter().map(sized).collect::<Vec<_>>()).unwrap();
        let width: usize = of.layers().iter().map(|l| l.experts).sum();
        vec(vec(0_u8..=16, width), tokens).prop_map(move |numbers| {
            let mut trace = Trace::new(of.clone(), true);
            for token in &numbers {
                let (mut chosen, mut ranked, mut at) = (Vec::new(), Vec::new(), 0);
                for (l, layer) in of.layers().iter().enumerate() {
                    let own = token[at..at + layer.experts].iter();
                    let mut order: Vec<(u16, f32)> = (0..).zip(own.map(|&s| f32::from(s) / 16.0)).collect();
                    order.sort_by(|a, b| b.1.total_cmp(&a.1));
                    chosen.extend(order.iter().take(layer.k).map(|o| o.0));
                    ranked.extend_from_slice(&order[..Trace::ranks(&of, l)]);
                    at += layer.experts;
                }
                trace.push(&chosen, &ranked).unwrap();
            }
            trace
        })
    })
}

pub(crate) fn any_setting() -> impl Strategy<Value = Setting> {
    proptest::sample::select(grid(true))
}

type OnStep<'a, S> = dyn Fn(&mut S, usize, &[(u16, f32)]) + 'a;

/// Results of a slow and simple cache over all layers. The victim is the expert with the lowest `rank`, if it
/// is below the newcomer's or `bypass` is off. `on_step` is called before each step, `used` after each use.
struct Naive<'a, S> {
    state: S,
    on_step: &'a OnStep<'a, S>,
    used: &'a dyn Fn(&mut S, (usize, u16)),
    rank: &'a dyn Fn(&S, (usize, u16)) -> f64,
    bypass: bool,
}

impl<S> Naive<'_, S> {
    fn run(mut self, trace: &Trace, slots: usize) -> String {
        let mut out = String::new();
        let mut resident: BTreeMap<(usize, u16), usize> = BTreeMap::new();
        let mut tick = 0;
        for (_, layer, step) in trace.steps() {
            (self.on_step)(&mut self.state, layer, step.ranked);
            let keys: Vec<_> = step.chosen.iter().map(|&e| (layer, e)).collect();
            let (hits, misses): (Vec<_>, Vec<_>) = keys.iter().partition(|k| resident.contains_key(*k));
            for key in hits {
                (self.used)(&mut self.state, key);
                tick += 1;
                resident.insert(key, tick);
                out.push('h');
            }
            for key in misses {
                (self.used)(&mut self.state, key);
                let rank = |key: &(usize, u16), tick: usize| ((self.rank)(&self.state, *key), tick);
                let mut kept = slots > 0;
                if resident.len() >= slots {
                    let others = resident.iter().filter(|(k, _)| !keys.contains(k));
                    let least =
                        others.map(|(k, &t)| (rank(k, t), *k)).min_by(|a, b| a.partial_cmp(b).unwrap());
                    kept &= least.is_some_and(|(r, _)| !self.bypass || r <= rank(&key, tick + 1));
                    if let Some((_, victim)) = least.filter(|_| kept) {
                        resident.remove(&victim);
                    }
                }
                if kept {
                    tick += 1;
                    resident.insert(key, tick);
                }
                out.push(if kept { 'm' } else { 's' });
            }
        }
        out
    }
}

/// Fewest misses of any cache, by exhaustive search.
fn fewest(trace: &Trace, slots: usize) -> u64 {
    let mut states: BTreeMap<BTreeSet<(usize, u16)>, u64> = [(BTreeSet::new(), 0)].into();
    for (_, layer, step) in trace.steps() {
        let mut next: BTreeMap<BTreeSet<(usize, u16)>, u64> = BTreeMap::new();
        for (held, misses) in &states {
            let new = step.chosen.iter().filter(|&&e| !held.contains(&(layer, e))).count() as u64;
            let all: Vec<_> = held.iter().copied().chain(step.chosen.iter().map(|&e| (layer, e))).collect();
            for mask in 0_u32..1 << all.len() {
                let part = all.iter().enumerate().filter(|(i, _)| mask >> i & 1 == 1).map(|(_, k)| *k);
                let kept: BTreeSet<_> = part.collect();
                if kept.len() <= slots {
                    let best = next.entry(kept).or_insert(u64::MAX);
                    *best = (*best).min(misses + new);
                }
            }
        }
        states = next;
    }
    states.values().copied().min().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn cache_respects_capacity_and_reports_truthfully(
        trace in traces(false), capacity in 0_u64..40, setting in any_setting()
    ) {
        let of = trace.experts().clone();
        let bytes = |k: Key| of.layers()[usize::from(k.layer)].bytes;
        let mut cache = Cache::new(&of, capacity, &setting);
        prop_assert!(cache.capacity() <= capacity);
        let mut held: BTreeSet<Key> = BTreeSet::new();
        for (_, layer, step) in trace.steps() {
            let mut events = Vec::new();
            cache.step(layer, step.chosen, step.ranked, |e| events.push(e)).unwrap();
            let used = |k: Key| usize::from(k.layer) == layer && step.chosen.contains(&k.expert);
            let mut seen = Vec::new();
            for event in events {
                match event {
                    Event::Hit(k) => prop_assert!(held.contains(&k)),
                    Event::Load(k) => prop_assert!(held.insert(k)),
                    Event::Stream(k) => prop_assert!(!held.contains(&k)),
                    Event::Evict(k) => prop_assert!(held.remove(&k) && !used(k)),
                }
                if let Event::Hit(k) | Event::Load(k) | Event::Stream(k) = event {
                    prop_assert!(used(k));
                    seen.push(k.expert);
                }
                prop_assert!(held.iter().map(|&k| bytes(k)).sum::<u64>() <= capacity);
            }
            seen.sort_unstable();
            let mut chosen = step.chosen.to_vec();
            chosen.sort_unstable();
            prop_assert_eq!(seen, chosen);
            prop_assert_eq!(held.iter().map(|&k| bytes(k)).sum::<u64>(), cache.used());
            prop_assert!(held.iter().all(|&k| cache.contains(k)));
        }
    }

    #[test]
    fn no_policy_hits_more_than_the_bound(trace in traces(true), slots in 0_u64..12, setting in any_setting()) {
        let best = optimum(&trace, 3 * slots + 2, 1).total();
        let own = replay(&trace, 3 * slots + 2, &setting, 1).unwrap().total();
        prop_assert!(own.hits <= best.hits, "{} has {:?}, the bound {:?}", setting, own, best);
        prop_assert_eq!(best.accesses(), trace.accesses() as u64);
        prop_assert_eq!(best.read, best.misses * 3);
    }

    #[test]
    fn no_policy_reads_less_than_the_bound(trace in traces(false), capacity in 0_u64..40, setting in any_setting()) {
        let best = optimum(&trace, capacity, 1).total();
        let own = replay(&trace, capacity, &setting, 1).unwrap().total();
        prop_assert!(own.read >= best.read, "{} reads {:?}, the bound {:?}", setting, own, best);
        prop_assert_eq!(own.used, best.used);
    }

    #[test]
    fn cache_counters_add_up_and_are_deterministic(
        trace in traces(false), capacity in 0_u64..40, setting in any_setting(), folds in 1_usize..5
    ) {
        let run = replay(&trace, capacity, &setting, folds).unwrap();
        prop_assert_eq!(&run, &replay(&trace, capacity, &setting, folds).unwrap());
        let total = run.total();
        prop_assert_eq!(total.accesses(), trace.accesses() as u64);
        let mut sum = CacheCounters::default();
        for f in &run.folds {
            sum += *f;
        }
        prop_assert_eq!(sum, total);
        for (counters, layer) in run.layers.iter().zip(trace.experts().layers()) {
            prop_assert_eq!(counters.accesses(), (trace.tokens() * layer.k) as u64);
            prop_assert_eq!(counters.read, counters.misses * layer.bytes);
        }
        // With room for the whole model, everything is read once.
        let all = replay(&trace, trace.experts().bytes(), &setting, 1).unwrap().total();
        let distinct: BTreeSet<_> =
            trace.steps().flat_map(|(_, l, s)| s.chosen.iter().map(move |&e| (l, e))).collect();
        prop_assert_eq!(all.misses, distinct.len() as u64);
    }

    #[test]
    fn reset_cache_behaves_like_a_new_one(trace in traces(false), capacity in 0_u64..40, setting in any_setting()) {
        let mut cache = Cache::new(trace.experts(), capacity, &setting);
        let run = |cache: &mut Cache| {
            let mut events = Vec::new();
            for (_, layer, step) in trace.steps() {
                cache.step(layer, step.chosen, step.ranked, |e| events.push(e)).unwrap();
            }
            events
        };
        let first = run(&mut cache);
        cache.reset();
        prop_assert_eq!(cache.used(), 0);
        prop_assert_eq!(first, run(&mut cache));
    }

    #[test]
    fn lru_matches_its_naive_model(trace in traces(true), slots in 0_usize..12) {
        let model = Naive { state: 0, on_step: &|_, _, _| {}, used: &|_, _| {}, rank: &|_, _| 0.0, bypass: false };
        prop_assert_eq!(letters(&trace, 3 * slots as u64, "lru"), model.run(&trace, slots));
    }

    #[test]
    fn lfu_matches_its_naive_model(trace in traces(true), slots in 0_usize..12, bypass in any::<bool>(), ages in any::<bool>()) {
        let last = trace.experts().layers().len() - 1;
        type Counts = BTreeMap<(usize, u16), f64>;
        let model = Naive {
            state: Counts::new(),
            // Counts halve after the last layer of a token.
            on_step: &|s, layer, _| if ages && layer == last { s.values_mut().map(|c| *c /= 2.0).collect() },
            used: &|s, key| *s.entry(key).or_default() += 1.0,
            rank: &|s, key| s.get(&key).copied().unwrap_or(0.0),
            bypass,
        };
        let text = format!("lfu half_life={} bypass={}", u8::from(ages), u8::from(bypass));
        prop_assert_eq!(letters(&trace, 3 * slots as u64, &text), model.run(&trace, slots));
    }

    #[test]
    fn mrs_matches_its_naive_model(trace in traces(true), slots in 0_usize..12, bypass in any::<bool>(), depth in 1_usize..3) {
        type Scores = BTreeMap<(usize, u16), f64>;
        let of = trace.experts().clone();
        let model = Naive {
            state: Scores::new(),
            on_step: &|s, layer, ranked| {
                s.iter_mut().filter(|(k, _)| k.0 == layer).for_each(|(_, s)| *s *= 0.5);
                for &(e, score) in ranked.iter().take(depth * of.layers()[layer].k) {
                    *s.entry((layer, e)).or_default() += 0.5 * f64::from(score);
                }
            },
            used: &|_, _| {},
            rank: &|s, key| s.get(&key).copied().unwrap_or(0.0),
            bypass,
        };
        let text = format!("mrs alpha=0.5 depth={depth} bypass={}", u8::from(bypass));
        prop_assert_eq!(letters(&trace, 3 * slots as u64, &text), model.run(&trace, slots));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn bound_matches_exhaustive_search(
        uses in vec((0_u16..4, 1_u16..4), 1..12), slots in 0_usize..4
    ) {
        let mut trace = Trace::new(experts(1, 4, 2), false);
        for &(a, b) in &uses {
            trace.push(&[a, (a + b) % 4], &[]).unwrap();
        }
        prop_assert_eq!(optimum(&trace, slots as u64, 1).total().misses, fewest(&trace, slots));
    }
}

/// Growing weights and decaying factors are rescaled in time, which does not change the results.
#[test]
fn long_runs_match_the_naive_models() {
    let mut trace = Trace::new(experts(1, 6, 1), true);
    for t in 0_u32..1200 {
        let expert = ((t * t / 7 + t / 3) % 6) as u16;
        trace.push(&[expert], &[(expert, 0.5), ((expert + 1) % 6, 0.25)]).unwrap();
    }
    let counts = Naive {
        state: [0.0; 6],
        on_step: &|s: &mut [f64; 6], _, _| *s = s.map(|c| c / 2.0),
        used: &|s, key| s[usize::from(key.1)] += 1.0,
        rank: &|s, key| s[usize::from(key.1)],
        bypass: true,
    };
    assert_eq!(letters(&trace, 2, "lfu half_life=1 bypass=1"), counts.run(&trace, 2));
    let scores = Naive {
        state: [0.0; 6],
        on_step: &|s: &mut [f64; 6], _, ranked: &[(u16, f32)]| {
            *s = s.map(|s| s / 2.0);
            for &(e, x) in ranked {
                s[usize::from(e)] += 0.5 * f64::from(x);
            }
        },
        used: &|_, _| {},
        rank: &|s, key| s[usize::from(key.1)],
        bypass: true,
    };
    assert_eq!(letters(&trace, 2, "mrs alpha=0.5 depth=2 bypass=1"), scores.run(&trace, 2));
}
