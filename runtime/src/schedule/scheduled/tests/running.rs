//! Tests of the invariants of a running scheduler: the placement is that of the frames.

use super::drawn::Random;
use super::properties::{again, any_costs};
use crate::offload::cache::Key;
use crate::schedule::costs::{Costs, Table};
use crate::schedule::policy::{Solver, System, trimoe};
use crate::schedule::scheduled::*;
use proptest::prelude::*;

const EXPERTS: usize = 10;
const LAYERS: usize = 2;

/// Experts that the placement of a layer has on the GPU.
fn cached(running: &Running, layer: usize) -> Vec<u16> {
    let places = running.scheduler().placement(layer).expect("a layer").places();
    (0..).zip(places).filter(|e| e.1.cached).map(|e| e.0).collect()
}

fn windows() -> Windows {
    let table = || Table::new(vec![(1, 500.0)]).expect("a point");
    Windows { prompt: table(), decode: table(), traffic: None }
}

/// Experts in the frames of a layer.
fn in_frames(running: &Running, layer: usize) -> Vec<u16> {
    let keys = running.begins().into_iter().filter(|key| usize::from(key.layer) == layer);
    let mut experts: Vec<u16> = keys.map(|key| key.expert).collect();
    experts.sort_unstable();
    experts
}

fn loads(random: &mut Random, tokens: usize) -> Vec<u32> {
    let mut loads = vec![0; EXPERTS];
    (0..tokens).for_each(|_| loads[random.below(EXPERTS)] += 1);
    loads
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn placement_follows_the_frames(
        costs in any_costs(),
        frames in 0usize..6,
        memories in 1usize..4,
        solver in prop::sample::select(vec![Solver::Cheapest, Solver::Refined, Solver::Best]),
        seed in any::<u64>(),
    ) {
        let window = Window { pcie_us: 500.0, link_us: 500.0 };
        let system = System { prefill: Solver::Refined, ..trimoe("", solver, true) };
        let setup = Setup { system, costs, layers: LAYERS, experts: EXPERTS, memories, frames, window };
        let mut running = Running::new(ExpertScheduler::new(setup).expect("a scheduler"), Some(windows()));
        let mut random = Random(seed);
        for step in 0..20 {
            let prompt = step % 5 == 0;
            for layer in 0..LAYERS {
                let loads = loads(&mut random, if prompt { 60 } else { 8 });
                let room = in_frames(&running, layer).len();
                running.scheduler.end_moves(layer);
                let before = running.scheduler().placement(layer).expect("a layer").clone();
                let expected = running.scheduler().predictor().expected(layer).to_vec();
                let step = StepLoads { loads: &loads, rows: 8, prompt };
                let decision = running.divide(layer, step).expect("a decision").clone();
                let on_gpu = decision.units.iter().filter(|&&unit| unit == ExpertUnit::Gpu).count();
                prop_assert!(on_gpu <= room, "{on_gpu} experts in {room} frames");
                let units = decision.units.iter().zip(&loads).zip(before.places());
                let units: Vec<_> = units
                    .map(|((unit, &load), place)| match unit {
                        _ if load == 0 => None,
                        ExpertUnit::Gpu => Some(ScheduledUnit::Gpu),
                        ExpertUnit::Cpu => Some(ScheduledUnit::Cpu),
                        ExpertUnit::Near => place.layout.memory().map(ScheduledUnit::Near),
                    })
                    .collect();
                let makespan = again(running.scheduler().setup(), &before, &loads, &units);
                // Times beyond a month count as one.
                if makespan < 1e9 {
                    let error = (decision.makespan_us - makespan).abs();
                    prop_assert!(error <= 1e-3 + 1e-6 * makespan, "{} for {makespan}", decision.makespan_us);
                }
                let learned = running.scheduler().predictor().expected(layer) != expected;
                prop_assert!(!(prompt && learned), "a prompt was learned from");
                for layer in 0..LAYERS {
                    // The others in frames are under way.
                    let in_frames = in_frames(&running, layer);
                    let late = |e: &u16| running.scheduler().is_prefetched(layer, *e);
                    let there: Vec<u16> = in_frames.into_iter().filter(|e| !late(e)).collect();
                    prop_assert_eq!(cached(&running, layer), there);
                }
            }
        }
    }
}

/// Two layers of four experts, two of each on the GPU, which computes in no time; nothing else does.
fn prompts(prefill: Solver) -> Running {
    let table = |us| Table::new(vec![(1, us), (2, 2.0 * us)]).expect("points");
    let costs = Costs {
        launch_us: 0.0,
        localized_us: 100.0,
        ..Costs::of_two(table(1.0).into(), table(1000.0).into(), 10.0)
    };
    let window = Window { pcie_us: 100.0, link_us: 100.0 };
    let system = System { prefill, ..trimoe("", Solver::Refined, true) };
    let setup = Setup { system, costs, layers: 2, experts: 4, memories: 1, frames: 2, window };
    Running::new(ExpertScheduler::new(setup).expect("a scheduler"), Some(windows()))
}

/// A prompt has all its experts on the GPU: those of the layer stay, the others go through frames of both
/// layers. Decoding then brings the evicted experts back.
#[test]
fn prompts_are_streamed_through_the_frames_of_all_layers() {
    for prefill in [Solver::Gpu, Solver::Best] {
        let mut running = prompts(prefill);
        let held = in_frames(&running, 0);
        for layer in [0, 1, 0, 1] {
            let step = StepLoads { loads: &[3, 3, 3, 3], rows: 12, prompt: true };
            let decision = running.divide(layer, step).expect("a decision").clone();
            assert_eq!(decision.units, [ExpertUnit::Gpu; 4]);
            assert!(decision.moves.is_empty());
            let mut frames: Vec<u32> = (0..4)
                .map(|expert| running.frame(Key { layer: layer as u16, expert }).expect("a frame"))
                .collect();
            frames.sort_unstable();
            assert_eq!(frames, [0, 1, 2, 3], "one expert in each");
            assert_eq!(cached(&running, layer), in_frames(&running, layer));
            assert!(cached(&running, 1 - layer).is_empty(), "its frames are lent");
        }
        assert_eq!(running.counts().streamed, 4);
        for _ in 0..8 {
            for layer in 0..2 {
                let mut loads = [0; 4];
                for &e in &held {
                    loads[usize::from(e)] = 4;
                }
                running
                    .divide(layer, StepLoads { loads: &loads, rows: 8, prompt: false })
                    .expect("a decision");
            }
        }
        for layer in 0..2 {
            assert_eq!(in_frames(&running, layer), held, "{:?}", running.counts());
        }
    }
    // By another policy prompts are scheduled like decoding; more experts than frames cannot be streamed.
    let mut running = prompts(Solver::Refined);
    let step = StepLoads { loads: &[3, 3, 3, 3], rows: 12, prompt: true };
    let units = running.divide(0, step).expect("a decision").units.clone();
    assert_eq!(units.iter().filter(|&&u| u == ExpertUnit::Gpu).count(), 2, "{units:?}");
}
