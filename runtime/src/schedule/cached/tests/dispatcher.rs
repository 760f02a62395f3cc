//! Tests of a dispatcher's invariants: each frame holds one expert, and an expert that the GPU computes is in
//! a frame.

use super::*;
use crate::offload::cache::{CacheError, CachedLayer, ExpertIndex, Key};
use crate::schedule::cached::dispatcher::{CachedDispatcher, Setup};
use crate::schedule::decision::{Bring, Transfer};
use moec_ir::op::Score;
use std::collections::BTreeMap;

const LAYERS: usize = 6;
const EXPERTS: usize = 16;
const K: usize = 4;

/// Settings with `frames` frames over these layers, each of which has some initial experts.
fn setup(shape: [usize; 3], keeps: &str, divides: [Solver; 2], frames: usize) -> Setup {
    let [layers, experts, k] = shape;
    let key = |i: usize| Key { layer: (i % layers) as u16, expert: (i / layers) as u16 };
    let cached: Vec<Key> = (0..frames).map(key).collect();
    Setup {
        costs: costs([6.0, 0.5], [30.0, 20.0], 5.0, 25.0),
        experts: ExpertIndex::uniform(layers, CachedLayer { experts, k, bytes: 1 }).expect("experts"),
        divides,
        keeps: keeps.parse().expect("a policy"),
        ahead: 3,
        window_us: 40.0,
        pinned: cached[..2].to_vec(),
        cached,
        score: Score::Softmax,
    }
}

fn loads(random: &mut SplitMix64, experts: usize, chosen: usize) -> Vec<u32> {
    let mut loads = vec![0; experts];
    (0..chosen).for_each(|_| loads[(random.unit().powi(2) * experts as f64) as usize] += 1);
    loads
}

fn logits(random: &mut SplitMix64, experts: usize) -> Vec<f32> {
    (0..experts).map(|_| random.unit() as f32 * 4.0).collect()
}

/// Tracks transfers: the expert in each frame.
struct Replica(BTreeMap<u32, Key>);

impl Replica {
    fn bring(&mut self, dispatcher: &CachedDispatcher, brings: &[Bring], pinned: &[Key]) {
        for &Bring { key, frame } in brings {
            let left = self.0.insert(frame, key);
            assert!(left.is_some_and(|left| !pinned.contains(&left)), "{left:?} in {frame}");
        }
        for layer in 0..LAYERS as u16 {
            for expert in 0..EXPERTS as u16 {
                let key = Key { layer, expert };
                let frame = dispatcher.frame(key);
                assert!(frame.is_none_or(|f| self.0.get(&f) == Some(&key)), "{key:?} is not in {frame:?}");
            }
        }
    }
}

#[test]
fn frames_hold_one_expert_each_and_the_gpu_computes_whom_they_hold() {
    for (policy, keeps) in [
        (Solver::Best, "mrs alpha=0.9 depth=2 bypass=1"),
        (Solver::Paper(Order::Next), "mrs alpha=0.9 depth=2 bypass=0"),
        (Solver::Gpu, "lru"),
        (Solver::Cheapest, "lru"),
        (Solver::Fixed, "lfu"),
    ] {
        let setup = setup([LAYERS, EXPERTS, K], keeps, [policy; 2], 20);
        let (mut dispatcher, mut again) =
            [0; 2].map(|_| CachedDispatcher::new(setup.clone()).expect("a dispatcher")).into();
        let mut replica = Replica((0..).zip(setup.cached.clone()).collect());
        let mut random = SplitMix64(5);
        for step in 0..400 {
            let prompt = step % 50 == 0;
            // Some experts are not in the host's memory, and occasionally one leaves it.
            let there = |key: Key| (usize::from(key.expert) + step) % 7 != 0;
            for layer in 0..LAYERS {
                let gone = Key { layer: layer as u16, expert: (step % EXPERTS) as u16 };
                if step % 3 == 0 {
                    dispatcher.lose(gone);
                    again.lose(gone);
                    assert!(!dispatcher.holds(gone) || setup.pinned.contains(&gone));
                }
                let loads = loads(&mut random, EXPERTS, if prompt { 60 } else { K });
                let said = dispatcher.divide(layer, &loads, prompt, &there).expect("a division").clone();
                assert_eq!(&said, again.divide(layer, &loads, prompt, &there).expect("it"), "not repeated");
                let brings = said.transfers.iter().filter_map(|t| match t {
                    Transfer::Bring(bring) => Some(*bring),
                    Transfer::Relocate { .. } => None,
                });
                replica.bring(&dispatcher, &brings.collect::<Vec<_>>(), &setup.pinned);
                for (expert, _) in said.units.iter().enumerate().filter(|on| *on.1 == ExpertUnit::Gpu) {
                    let key = Key { layer: layer as u16, expert: expert as u16 };
                    assert!(loads[expert] > 0, "no token chose it");
                    assert_eq!(dispatcher.frame(key).and_then(|f| replica.0.get(&f)), Some(&key));
                }
                let ahead = if prompt { 0 } else { 4.min(LAYERS - layer) };
                let scores: Vec<_> = (0..ahead).map(|_| logits(&mut random, EXPERTS)).collect();
                let brings = dispatcher.predict(ahead, &|i| &scores[i], &there).expect("a plan").to_vec();
                again.predict(ahead, &|i| &scores[i], &there).expect("a plan");
                assert!(brings.iter().all(|b| there(b.key)));
                replica.bring(&dispatcher, &brings, &setup.pinned);
                assert!(setup.pinned.iter().all(|&key| dispatcher.holds(key)));
            }
        }
        let counts = dispatcher.counts();
        assert_eq!(counts, again.counts());
        assert!(counts.hits > 0 && counts.misses > 0 && counts.makespan_us > 0.0, "{counts:?}");
        assert_eq!(counts.fetched > 0, policy != Solver::Fixed, "{policy:?}: {counts:?}");
        assert!(counts.ahead >= counts.predicted, "{counts:?}");
    }
}

/// A correctly predicted expert is on the GPU when it is requested, and layers take less time.
#[test]
fn correctly_predicted_experts_are_resident() {
    let mut spans = Vec::new();
    for predicts in [false, true] {
        let mut setup = setup([LAYERS, EXPERTS, 2], "mrs", [Solver::Best; 2], 12);
        setup.costs = costs([6.0, 0.5], [200.0, 20.0], 5.0, 60.0);
        setup.window_us = 200.0;
        let mut dispatcher = CachedDispatcher::new(setup).expect("a dispatcher");
        let mut random = SplitMix64(3);
        for _ in 0..100 {
            let wanted: Vec<_> = (0..LAYERS).map(|_| logits(&mut random, EXPERTS)).collect();
            for layer in 0..LAYERS {
                let mut order: Vec<usize> = (0..EXPERTS).collect();
                order.sort_by(|&a, &b| wanted[layer][b].total_cmp(&wanted[layer][a]));
                let mut loads = vec![0; EXPERTS];
                order[..2].iter().for_each(|&e| loads[e] = 1);
                dispatcher.divide(layer, &loads, false, &|_| true).expect("a division");
                let scored = if predicts { 4.min(LAYERS - layer) } else { 1 };
                dispatcher.predict(scored, &|i| &wanted[layer + i], &|_| true).expect("a plan");
            }
        }
        let counts = dispatcher.counts();
        assert_eq!(counts.predicted, counts.ahead, "none was wrong");
        spans.push((counts.makespan_us, counts.hits));
    }
    assert!(spans[1].1 > spans[0].1 * 3 / 2, "hits without and with: {spans:?}");
    assert!(spans[1].0 < spans[0].0 * 0.9, "{spans:?}");
}

#[test]
fn what_cannot_be_is_refused() {
    let refused = |change: &dyn Fn(&mut Setup)| {
        let mut setup = setup([LAYERS, EXPERTS, K], "lru", [Solver::Best; 2], 8);
        change(&mut setup);
        CachedDispatcher::new(setup).err().expect("refused")
    };
    let frames = |e| matches!(e, ScheduleError::Begin(_));
    assert!(frames(refused(&|s| s.cached[7] = s.cached[0])));
    assert!(frames(refused(&|s| s.keeps = "lru per-layer".parse().expect("a policy"))));
    assert!(matches!(refused(&|s| s.window_us = f64::NAN), ScheduleError::Time { .. }));
    let no_expert = |e| matches!(e, ScheduleError::Cache(CacheError::NoExpert { .. }));
    assert!(no_expert(refused(&|s| s.cached[7].expert = EXPERTS as u16)));
    let mut dispatcher =
        CachedDispatcher::new(setup([LAYERS, EXPERTS, K], "lru", [Solver::Best; 2], 8)).expect("one");
    assert!(dispatcher.divide(LAYERS, &[1], false, &|_| true).is_err());
}
