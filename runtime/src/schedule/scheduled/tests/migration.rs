//! Tests of migration and of the compared systems, in small cases.

use super::drawn::{Drift, MODELS, costs, setup};
use crate::schedule::scheduled::*;
use crate::schedule::*;

const NEVER: System = trimoe("", Solver::Refined, false);
const ALWAYS: System = trimoe("", Solver::Best, true);

fn place(layout: Layout, cached: bool) -> Place {
    Place { layout, cached }
}

/// One layer on two memories, with a placement and the usual loads.
fn scheduler(system: System, places: &[Place], loads: &[f64], frames: usize) -> ExpertScheduler {
    with_costs(costs(&MODELS[0]), system, places, loads, frames)
}

/// Costs in which the host reads a memory in no time.
fn free() -> Costs {
    let mut costs = costs(&MODELS[0]);
    costs.localized_us = 0.0;
    costs
}

fn with_costs(
    costs: Costs,
    system: System,
    places: &[Place],
    loads: &[f64],
    frames: usize,
) -> ExpertScheduler {
    let window = Window { pcie_us: 1e6, link_us: 1e6 };
    let setup = Setup { system, costs, layers: 1, experts: places.len(), memories: 2, frames, window };
    let mut scheduler = ExpertScheduler::new(setup).expect("a sound setup");
    scheduler.profile(0, loads).expect("a layer");
    let placement = Placement::new(places.to_vec(), 2, frames).expect("memories and frames that are there");
    scheduler.place(0, &placement).expect("a layer");
    scheduler
}

fn actions(scheduler: &mut ExpertScheduler, window: Window) -> Vec<Action> {
    scheduler.moves_for(0, window).expect("a layer").iter().map(|m| m.action).collect()
}

const WIDE: Window = Window { pcie_us: 1e6, link_us: 1e6 };

#[test]
fn hot_expert_replaces_the_coldest_in_its_frame() {
    let places = [
        place(Layout::Striped, true),
        place(Layout::Striped, false),
        place(Layout::Striped, true),
        place(Layout::Striped, false),
    ];
    let mut s = with_costs(free(), ALWAYS, &places, &[300.0, 400.0, 100.0, 99.0], 2);
    assert_eq!(actions(&mut s, WIDE), [Action::Prefetch { expert: 1, evict: Some(2) }]);
    assert_eq!(actions(&mut s, WIDE), [], "what is where it should be stays");
    let cached: Vec<bool> = s.placement(0).expect("a layer").places().iter().map(|p| p.cached).collect();
    assert_eq!(cached, [true, true, false, false]);
    // A system without migration makes no moves.
    let mut s = with_costs(free(), NEVER, &places, &[300.0, 400.0, 100.0, 99.0], 2);
    assert_eq!(actions(&mut s, WIDE), []);
}

#[test]
fn experts_migrate_to_the_layout_of_their_class() {
    // Many warm experts, one of them localized; some cold ones, one of them striped.
    let mut places = vec![place(Layout::Striped, false); 6];
    places[2] = place(Layout::Local(0), false);
    places.extend([place(Layout::Local(0), false), place(Layout::Striped, false)]);
    let loads = [90.0, 90.0, 90.0, 90.0, 90.0, 90.0, 1.5, 1.0];
    let mut s = scheduler(ALWAYS, &places, &loads, 0);
    let mut found = actions(&mut s, WIDE);
    found.sort_by_key(|a| a.expert());
    assert_eq!(
        found,
        [
            Action::Relayout { expert: 2, to: Layout::Striped },
            Action::Relayout { expert: 7, to: Layout::Local(1) },
        ]
    );
}

#[test]
fn cold_experts_move_from_the_busiest_to_the_idlest_dimm() {
    let places = [place(Layout::Local(0), false); 4];
    let mut s = scheduler(ALWAYS, &places, &[3.0, 3.0, 3.0, 3.0], 0);
    let found = actions(&mut s, WIDE);
    assert_eq!(found.len(), 2, "half of them: {found:?}");
    assert!(found.iter().all(|a| matches!(a, Action::Rebalance { from: 0, to: 1, .. })), "{found:?}");
    assert_eq!(actions(&mut s, WIDE), []);
}

#[test]
fn a_transfer_longer_than_a_window_ends_in_a_later_one() {
    // 47 185 920 bytes at 25 GB/s are 1887 µs on both links.
    let places = [place(Layout::Local(0), false); 2];
    let mut s = scheduler(ALWAYS, &places, &[3.0, 3.0], 0);
    let narrow = Window { pcie_us: 0.0, link_us: 700.0 };
    let moved = [Action::Rebalance { expert: 0, from: 0, to: 1 }];
    assert_eq!(actions(&mut s, narrow), moved);
    // Until it has ended, its old memory computes the expert.
    for window in 1..5 {
        let layout = s.placement(0).expect("a layer").places()[0].layout;
        assert_eq!(layout, Layout::Local(u16::from(window > 3)), "window {window}");
        let units = s.dispatch(0, &[3, 3]).expect("a layer").units.clone();
        let ended = u16::from(window > 2);
        assert_eq!(units[0], Some(ScheduledUnit::Near(ended)), "window {window}");
        assert_eq!(actions(&mut s, narrow), [], "window {window}");
    }
}

#[test]
fn no_expert_moves_twice_in_a_window() {
    let mut kinds = [0; 3];
    for frames in [2, 16] {
        let setup = Setup { frames, window: WIDE, ..setup(ALWAYS, &MODELS[1]) };
        let mut scheduler = ExpertScheduler::new(setup.clone()).expect("a sound setup");
        let mut drift = Drift::new(5, setup.experts);
        for i in 0..200 {
            let layer = i % setup.layers;
            let loads = drift.loads(layer, 8, 256);
            let s = scheduler.step(layer, &loads).expect("a layer");
            let mut touched = Vec::new();
            for m in &s.moves {
                touched.push(m.action.expert());
                match m.action {
                    Action::Prefetch { evict, .. } => {
                        touched.extend(evict);
                        kinds[0] += 1;
                    }
                    Action::Relayout { .. } => kinds[1] += 1,
                    Action::Rebalance { .. } => kinds[2] += 1,
                }
            }
            let count = touched.len();
            touched.sort_unstable();
            touched.dedup();
            assert_eq!(touched.len(), count, "{:?}", s.moves);
        }
    }
    assert!(kinds.iter().all(|&k| k > 20), "{kinds:?}");
}

#[test]
fn split_by_load_is_optimal() {
    let places: Vec<Place> = (0..12u16).map(|e| place(Layout::Striped, e < 2)).collect();
    let loads: Vec<u32> = (0..12u32).map(|e| 40 * (e * 7 % 12)).collect();
    let units = Units { misses: true, cpu: true, near: false };
    let hottest = System::of_sums(
        "",
        Solver::Hottest(ExpertUnit::Cpu),
        units,
        GpuResidents::Popular,
        Prediction::Nothing,
        "",
    );
    let mut s = with_costs(free(), hottest, &places, &[1.0; 12], 2);
    let found = s.dispatch(0, &loads).expect("a layer").clone();
    let c = free();
    let mut order: Vec<usize> = (2..12).collect();
    order.sort_by_key(|&e| std::cmp::Reverse(loads[e]));
    let cut = |h: usize| {
        let hit: f64 = (0..2).filter(|&e| loads[e] > 0).map(|e| c.t_gpu_hit(f64::from(loads[e]))).sum();
        let gpu: f64 = order[..h].iter().map(|&e| c.t_gpu_miss(f64::from(loads[e]), Layout::Striped)).sum();
        let cpu: f64 = order[h..].iter().map(|&e| c.t_cpu(f64::from(loads[e]), Layout::Striped)).sum();
        (hit + gpu).max(cpu)
    };
    let least = (0..=10).map(cut).fold(f64::INFINITY, f64::min);
    assert!((found.makespan_us - least).abs() < 1e-3, "{} is not {least}", found.makespan_us);
    assert!(found.units[2..].contains(&Some(ScheduledUnit::Gpu)), "nothing was cut off");
}
