//! Tests of a dispatcher's invariants: each frame holds one expert, and an expert that the GPU computes is in
//! a frame.

use super::*;
use crate::offload::cache::{CacheError, CachedLayer, EvictedExpertCounts, ExpertIndex, Key};
use crate::schedule::cached::dispatcher::{CachedDispatcher, RowScores, Rows, Setup};
use crate::schedule::decision::{FrameTransfer, Transfer};
use moec_ir::op::Score;
use std::collections::BTreeMap;

const LAYERS: usize = 6;
const EXPERTS: usize = 16;
const K: usize = 4;

/// Settings with `frames` frames over these layers, each of which has some initial experts.
fn setup(shape: [usize; 3], cache_policy: &str, solvers: [Solver; 2], frames: usize) -> Setup {
    let [layers, experts, k] = shape;
    let key = |i: usize| Key { layer: (i % layers) as u16, expert: (i / layers) as u16 };
    let cached: Vec<Key> = (0..frames).map(key).collect();
    Setup {
        costs: costs([6.0, 0.5], [30.0, 20.0], 5.0, 25.0),
        experts: ExpertIndex::uniform(layers, CachedLayer { experts, k, bytes: 1 }).expect("experts"),
        solvers,
        cache_policy: cache_policy.parse().expect("a policy"),
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
    fn transfer(&mut self, dispatcher: &CachedDispatcher, transfers: &[FrameTransfer], pinned: &[Key]) {
        for &FrameTransfer { key, frame } in transfers {
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
fn gpu_computes_the_experts_in_its_cache_frames() {
    for (policy, cache_policy) in [
        (Solver::Best, "mrs alpha=0.9 depth=2 bypass=1"),
        (Solver::Paper(Order::Next), "mrs alpha=0.9 depth=2 bypass=0"),
        (Solver::Gpu, "lru"),
        (Solver::Cheapest, "lru"),
        (Solver::Fixed, "lfu"),
    ] {
        let setup = setup([LAYERS, EXPERTS, K], cache_policy, [policy; 2], 20);
        let (mut dispatcher, mut again) =
            [0; 2].map(|_| CachedDispatcher::new(setup.clone()).expect("a dispatcher")).into();
        let mut replica = Replica((0..).zip(setup.cached.clone()).collect());
        let mut random = SplitMix64(5);
        for step in 0..400 {
            let prompt = step % 50 == 0;
            // Some experts are not in the host's memory, and occasionally one leaves it.
            let in_host_memory = |key: Key| (usize::from(key.expert) + step) % 7 != 0;
            for layer in 0..LAYERS {
                let gone = Key { layer: layer as u16, expert: (step % EXPERTS) as u16 };
                if step % 3 == 0 {
                    dispatcher.remove(gone);
                    again.remove(gone);
                    assert!(!dispatcher.holds(gone) || setup.pinned.contains(&gone));
                }
                let loads = loads(&mut random, EXPERTS, if prompt { 60 } else { K });
                let rows = Rows { loads: &loads, prompt, k: K };
                let decision = dispatcher.divide(layer, rows, &in_host_memory).expect("a division").clone();
                assert_eq!(
                    &decision,
                    again.divide(layer, rows, &in_host_memory).expect("it"),
                    "not repeated"
                );
                let transfers = decision.transfers.iter().filter_map(|t| match t {
                    Transfer::ToFrame(transfer) => Some(*transfer),
                    Transfer::Relocate { .. } => None,
                });
                replica.transfer(&dispatcher, &transfers.collect::<Vec<_>>(), &setup.pinned);
                for (expert, _) in decision.units.iter().enumerate().filter(|on| *on.1 == ExpertUnit::Gpu) {
                    let key = Key { layer: layer as u16, expert: expert as u16 };
                    assert!(loads[expert] > 0, "no token chose it");
                    assert_eq!(dispatcher.frame(key).and_then(|f| replica.0.get(&f)), Some(&key));
                }
                let (layers, rows) = (4.min(LAYERS - layer), if prompt { 60 / K } else { 1 });
                let scores: Vec<_> = (0..layers * rows).map(|_| logits(&mut random, EXPERTS)).collect();
                let scores = RowScores { rows, layers, logits: &|i, row| &scores[i * rows + row] };
                let transfers = dispatcher.predict(scores, &in_host_memory).expect("a plan").to_vec();
                again.predict(scores, &in_host_memory).expect("a plan");
                assert!(transfers.iter().all(|b| in_host_memory(b.key)));
                replica.transfer(&dispatcher, &transfers, &setup.pinned);
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

/// Logits of every row for every layer.
fn row_logits(random: &mut SplitMix64, rows: usize) -> Vec<Vec<Vec<f32>>> {
    let mut layer = || (0..rows).map(|_| logits(random, EXPERTS)).collect();
    (0..LAYERS).map(|_| layer()).collect()
}

/// Loads if every row uses its `k` best experts.
fn loads_of(rows: &[Vec<f32>], k: usize) -> Vec<u32> {
    let mut loads = vec![0; EXPERTS];
    for row in rows {
        let mut order: Vec<usize> = (0..EXPERTS).collect();
        order.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
        order[..k].iter().for_each(|&e| loads[e] += 1);
    }
    loads
}

/// Settings with slow transfers and experts of two a token.
fn slow_link() -> Setup {
    let mut setup = setup([LAYERS, EXPERTS, 2], "mrs", [Solver::Best; 2], 12);
    setup.costs = costs([6.0, 0.5], [200.0, 20.0], 5.0, 60.0);
    setup.window_us = 200.0;
    setup
}

/// A correctly predicted expert is on the GPU when it is requested, and layers take less time: when one token
/// is decoded, several are, and in a prompt.
#[test]
fn correctly_predicted_experts_are_resident() {
    for (rows, prompt) in [(1, false), (3, false), (6, true)] {
        let mut spans = Vec::new();
        for predicts in [false, true] {
            let mut dispatcher = CachedDispatcher::new(slow_link()).expect("a dispatcher");
            let mut random = SplitMix64(3);
            for _ in 0..100 {
                let logits = row_logits(&mut random, rows);
                for layer in 0..LAYERS {
                    let loads = loads_of(&logits[layer], 2);
                    let step = Rows { loads: &loads, prompt, k: 2 };
                    dispatcher.divide(layer, step, &|_| true).expect("a division");
                    let layers = if predicts { 4.min(LAYERS - layer) } else { 1 };
                    let scores = RowScores { rows, layers, logits: &|i, row| &logits[layer + i][row] };
                    dispatcher.predict(scores, &|_| true).expect("a plan");
                }
            }
            let counts = dispatcher.counts();
            assert_eq!(counts.predicted, counts.ahead, "none was wrong");
            spans.push((counts.makespan_us, counts.hits));
        }
        assert!(spans[1].1 > spans[0].1 * 5 / 4, "{rows} rows, hits without and with: {spans:?}");
        // Several rows leave the link less idle time.
        let most = if rows == 1 { 0.9 } else { 1.0 };
        assert!(spans[1].0 < spans[0].0 * most, "{rows} rows: {spans:?}");
    }
}

/// After a little pass, the experts that its routers named for a full one are prefetched in the second pass.
#[test]
fn second_pass_has_the_experts_of_the_evicted_token() {
    let mut spans = Vec::new();
    for names in [false, true] {
        let mut dispatcher = CachedDispatcher::new(slow_link()).expect("a dispatcher");
        let mut random = SplitMix64(4);
        for _ in 0..100 {
            let logits = row_logits(&mut random, 1);
            for k in [1, 2] {
                for (layer, logits) in logits.iter().enumerate() {
                    let loads = loads_of(logits, k);
                    let step = Rows { loads: &loads, prompt: false, k };
                    dispatcher.divide(layer, step, &|_| true).expect("a division");
                    let layers = usize::from(names || k == 2);
                    let scores = RowScores { rows: 1, layers, logits: &|_, row| &logits[row] };
                    dispatcher.predict(scores, &|_| true).expect("a plan");
                }
            }
        }
        let counts = dispatcher.counts();
        let used = 100 * 2 * LAYERS as u64;
        assert_eq!(counts.second_pass, EvictedExpertCounts { used, named: if names { used } else { 0 } });
        assert_eq!(counts.ahead > 0, names, "{counts:?}");
        spans.push((counts.makespan_us, counts.hits));
    }
    assert!(spans[1].1 > spans[0].1 && spans[1].0 < spans[0].0 * 0.95, "{spans:?}");
}

#[test]
fn invalid_dispatcher_setups_are_rejected() {
    let refused = |change: &dyn Fn(&mut Setup)| {
        let mut setup = setup([LAYERS, EXPERTS, K], "lru", [Solver::Best; 2], 8);
        change(&mut setup);
        CachedDispatcher::new(setup).err().expect("refused")
    };
    let frames = |e| matches!(e, ScheduleError::Begin(_));
    assert!(frames(refused(&|s| s.cached[7] = s.cached[0])));
    assert!(frames(refused(&|s| s.cache_policy = "lru per-layer".parse().expect("a policy"))));
    assert!(matches!(refused(&|s| s.window_us = f64::NAN), ScheduleError::Time { .. }));
    let no_expert = |e| matches!(e, ScheduleError::Cache(CacheError::NoExpert { .. }));
    assert!(no_expert(refused(&|s| s.cached[7].expert = EXPERTS as u16)));
    let mut dispatcher =
        CachedDispatcher::new(setup([LAYERS, EXPERTS, K], "lru", [Solver::Best; 2], 8)).expect("one");
    let rows = Rows { loads: &[1], prompt: false, k: K };
    assert!(dispatcher.divide(LAYERS, rows, &|_| true).is_err());
}
