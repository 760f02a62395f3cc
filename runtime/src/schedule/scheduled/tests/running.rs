//! Tests of the invariants of a running scheduler: the placement is that of the frames.

use super::drawn::Random;
use super::properties::{again, any_costs};
use crate::schedule::policy::{Solver, trimoe};
use crate::schedule::scheduled::*;
use proptest::prelude::*;

const EXPERTS: usize = 10;
const LAYERS: usize = 2;

/// Experts that the placement of a layer has on the GPU.
fn cached(running: &Running, layer: usize) -> Vec<u16> {
    let places = running.scheduler().placement(layer).expect("a layer").places();
    (0..).zip(places).filter(|e| e.1.cached).map(|e| e.0).collect()
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
        let system = trimoe("", solver, true);
        let setup = Setup { system, costs, layers: LAYERS, experts: EXPERTS, memories, frames, window };
        let mut running = Running::new(ExpertScheduler::new(setup).expect("a scheduler"), true);
        let mut random = Random(seed);
        for step in 0..20 {
            let prompt = step % 5 == 0;
            for layer in 0..LAYERS {
                let loads = loads(&mut random, if prompt { 60 } else { 8 });
                let room = in_frames(&running, layer).len();
                let before = running.scheduler().placement(layer).expect("a layer").clone();
                let expected = running.scheduler().predictor().expected(layer).to_vec();
                let decision = running.divide(layer, &loads, prompt).expect("a decision").clone();
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
                    prop_assert_eq!(cached(&running, layer), in_frames(&running, layer));
                }
            }
        }
    }
}
