//! Tests of the invariants of every schedule.

use super::drawn::Random;
use super::systems::{GPU_ALONE, SYSTEMS};
use super::workload::{ALL, assignment};
use crate::schedule::scheduled::*;
use crate::schedule::sums::assignment::{Assignment, UNITS};
use crate::schedule::sums::bound::bound;
use crate::schedule::sums::prices::Prices;
use crate::schedule::sums::refine::refine;
use crate::schedule::sums::search::Search;
use crate::schedule::*;
use proptest::prelude::*;

/// Times, occasionally extreme ones.
fn time() -> impl Strategy<Value = f64> {
    prop_oneof![8 => 0.0..2000.0, 1 => Just(0.0), 1 => Just(f64::INFINITY), 1 => 1e9..1e300]
}

fn table() -> impl Strategy<Value = Table> {
    proptest::collection::btree_map(0u32..2000, time(), 1..5)
        .prop_map(|points| Table::new(points.into_iter().collect()).expect("keys ascend"))
}

pub(super) fn any_costs() -> impl Strategy<Value = Costs> {
    let near = (table(), time(), time()).prop_map(|(table, internal_us, link_us)| NearCosts {
        table,
        internal_us,
        link_us,
    });
    (
        proptest::option::weighted(0.9, table()),
        table(),
        proptest::option::weighted(0.9, near),
        [time(), time(), time()],
    )
        .prop_map(|(gpu, cpu, near, [bring_us, striped_us, localized_us])| Costs {
            gpu: gpu.map(Into::into),
            cpu: cpu.into(),
            near,
            bring_us,
            first_bring_us: 0.0,
            launch_us: 0.0,
            striped_us,
            localized_us,
            row_us: bring_us * 1e-3,
        })
}

fn any_setup() -> impl Strategy<Value = Setup> {
    let window = prop_oneof![4 => 0.0..3000.0, 1 => Just(0.0), 1 => Just(f64::NAN)];
    (0..SYSTEMS.len(), any_costs(), [1usize..3, 0..14, 0..5, 0..6], [window.clone(), window]).prop_map(
        |(system, costs, [layers, experts, memories, frames], [pcie_us, link_us])| Setup {
            system: SYSTEMS[system],
            costs,
            layers,
            experts,
            memories,
            frames,
            window: Window { pcie_us, link_us },
        },
    )
}

fn a_case(costs: &Costs, memories: usize, seed: u64) -> Assignment {
    let mut random = Random(seed);
    let places: Vec<Place> = (0..12)
        .map(|_| Place {
            layout: match random.below(memories + 1) {
                0 => Layout::Striped,
                d => Layout::Local(d as u16 - 1),
            },
            cached: random.below(4) == 0,
        })
        .collect();
    let loads: Vec<u32> = (0..12).map(|_| random.below(40) as u32).collect();
    assignment(&Prices::new(costs.clone(), ALL, memories), &places, &loads, memories)
}

/// Equations 1 to 7 of a schedule, computed from the costs alone.
pub(super) fn again(
    setup: &Setup,
    placement: &Placement,
    loads: &[u32],
    units: &[Option<ScheduledUnit>],
) -> f64 {
    let c = &setup.costs;
    let (mut calc, mut transfer) = (0.0, 0.0);
    let (mut gpu, mut cpu, mut memories) = (0.0, 0.0, vec![0.0; setup.memories]);
    for ((place, &load), unit) in placement.places().iter().zip(loads).zip(units) {
        let tokens = f64::from(load);
        let reads = match unit {
            None => continue,
            Some(ScheduledUnit::Near(d)) => {
                memories[usize::from(*d)] += c.t_near(tokens);
                false
            }
            Some(ScheduledUnit::Gpu) if place.cached => {
                gpu += c.t_gpu_hit(tokens);
                calc += c.t_gpu_hit(tokens);
                false
            }
            Some(ScheduledUnit::Gpu) => {
                gpu += c.t_gpu_miss(tokens, place.layout);
                calc += c.t_gpu_hit(tokens);
                transfer += c.bring_us.max(c.t_dram(place.layout));
                true
            }
            Some(ScheduledUnit::Cpu) => {
                cpu += c.t_cpu(tokens, place.layout);
                true
            }
        };
        for (d, time) in memories.iter_mut().enumerate().filter(|_| reads) {
            if place.layout.memory().is_none_or(|own| usize::from(own) == d) {
                *time += c.contention(place.layout, setup.memories);
            }
        }
    }
    let gpu = if setup.system == GPU_ALONE { f64::max(calc, transfer) } else { gpu };
    memories.into_iter().fold(f64::max(gpu, cpu), f64::max)
}

/// Placements after moves.
fn moved(placement: &Placement, moves: &[Move]) -> Vec<Place> {
    let mut places = placement.places().to_vec();
    for m in moves {
        match m.action {
            Action::Prefetch { expert, evict } => {
                assert!(!places[usize::from(expert)].cached, "it is there already");
                if let Some(evict) = evict {
                    assert!(std::mem::take(&mut places[usize::from(evict)].cached), "it was not there");
                }
                places[usize::from(expert)].cached = true;
            }
            Action::Relayout { expert, to } => {
                assert_ne!(places[usize::from(expert)].layout.memory().is_some(), to.memory().is_some());
                places[usize::from(expert)].layout = to;
            }
            Action::Rebalance { expert, from, to } => {
                assert_eq!(places[usize::from(expert)].layout, Layout::Local(from));
                assert_ne!(from, to);
                places[usize::from(expert)].layout = Layout::Local(to);
            }
        }
    }
    places
}

/// Adds the times of moves to PCIe and to each link.
fn charge(setup: &Setup, before: &Placement, moves: &[Move], pcie: &mut f64, links: &mut [f64]) {
    let link = setup.costs.near.as_ref().map_or(0.0, |n| n.link_us);
    let mut layouts: Vec<Layout> = before.places().iter().map(|p| p.layout).collect();
    for m in moves {
        match m.action {
            Action::Prefetch { .. } => *pcie += m.time_us,
            Action::Relayout { expert, to } => {
                let one = to.memory().or(layouts[usize::from(expert)].memory());
                let share = link / setup.memories as f64;
                for (d, time) in links.iter_mut().enumerate() {
                    *time += if one == Some(d as u16) { share * (setup.memories - 1) as f64 } else { share };
                }
                layouts[usize::from(expert)] = to;
            }
            Action::Rebalance { expert, from, to } => {
                links[usize::from(from)] += link;
                links[usize::from(to)] += link;
                layouts[usize::from(expert)] = Layout::Local(to);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn moves_update_unit_times_exactly(
        costs in any_costs(),
        memories in 0usize..5,
        seed: u64,
        moves in proptest::collection::vec((0usize..12, 0usize..3), 0..40),
    ) {
        let mut a = a_case(&costs, memories, seed);
        for (task, unit) in moves {
            if task < a.tasks.len() && a.tasks[task].can(UNITS[unit]) {
                a.reassign(task, UNITS[unit]);
            }
        }
        let mut fresh = Assignment::default();
        fresh.clear(memories);
        a.tasks.iter().zip(&a.units).for_each(|(&t, &u)| fresh.push(t, u));
        prop_assert_eq!(&a, &fresh);
    }

    #[test]
    fn refinement_never_worsens_and_the_bound_holds(
        costs in any_costs(),
        memories in 0usize..5,
        seed: u64,
    ) {
        let mut a = a_case(&costs, memories, seed);
        let greedy = a.makespan();
        refine(&mut a, 1000);
        let paper = a.makespan();
        prop_assert!(paper <= greedy);
        Search::default().improve(&mut a);
        prop_assert!(a.makespan() <= paper);
        let possible = a.tasks.iter().all(|t| t.can(t.cheapest()));
        prop_assert!(!possible || bound(&a, &mut Vec::new()) <= a.makespan());
    }

    #[test]
    fn expert_schedules_are_valid(
        setup in any_setup(),
        steps in proptest::collection::vec(proptest::collection::vec(prop_oneof![3 => 0u32..100, 1 => Just(0)], 14), 1..6),
    ) {
        // Klotski and MoNDE require a GPU, and report an error without one.
        let Ok(mut scheduler) = ExpertScheduler::new(setup.clone()) else {
            prop_assert!(setup.costs.gpu.is_none());
            return Ok(());
        };
        let mut replica = scheduler.clone();
        let (mut pcie, mut links) = (0.0, vec![0.0; setup.memories]);
        let (mut windows, mut longest) = (0.0, 0.0);
        for (i, step) in steps.iter().enumerate() {
            let (layer, next) = (i % setup.layers, (i + 1) % setup.layers);
            let loads = &step[..setup.experts];
            scheduler.end_moves(layer);
            let before = scheduler.placement(layer).expect("a layer").clone();
            let before_next = scheduler.planned(next);
            let s = scheduler.step(layer, loads).expect("a layer").clone();
            prop_assert_eq!(&s, replica.step(layer, loads).expect("a layer"));
            for ((place, &load), unit) in before.places().iter().zip(loads).zip(&s.units) {
                prop_assert_eq!(unit.is_some(), load > 0);
                if let Some(ScheduledUnit::Near(d)) = unit {
                    prop_assert_eq!(place.layout, Layout::Local(*d));
                    prop_assert!(setup.costs.near.is_some());
                }
                prop_assert!(*unit != Some(ScheduledUnit::Gpu) || setup.costs.gpu.is_some());
            }
            let makespan = again(&setup, &before, loads, &s.units);
            // Times beyond the largest finite one are clamped there.
            if makespan < 4e6 {
                prop_assert!((makespan - s.makespan_us).abs() <= 1e-5 * (1.0 + makespan), "{makespan} {}", s.makespan_us);
            }
            let after = &scheduler.planned(next);
            let now = scheduler.placement(next).expect("a layer").clone();
            let late = |e: usize| scheduler.is_under_way(next, e as u16);
            for (e, (now, after)) in now.places().iter().zip(after.places()).enumerate() {
                prop_assert_eq!(now != after, late(e), "expert {}", e);
            }
            prop_assert!(Placement::new(now.places().to_vec(), setup.memories, setup.frames).is_ok());
            let mut movers: Vec<u16> = s.moves.iter().map(|m| m.action.expert()).collect();
            movers.sort_unstable();
            prop_assert!(movers.windows(2).all(|w| w[0] != w[1]), "an expert moves twice: {:?}", s.moves);
            prop_assert!(s.moves.iter().all(|m| m.benefit_us > 0.0 && m.time_us.is_finite()));
            prop_assert_eq!(moved(&before_next, &s.moves), after.places());
            let cached = after.places().iter().filter(|p| p.cached).count();
            prop_assert_eq!(cached, after.cached());
            prop_assert!(cached <= setup.frames);
            prop_assert!(Placement::new(after.places().to_vec(), setup.memories, setup.frames).is_ok());
            charge(&setup, &before_next, &s.moves, &mut pcie, &mut links);
            windows += 1.0;
            // The last transfer of a link may end in a later window.
            longest = s.moves.iter().map(|m| m.time_us).fold(longest, f64::max);
            prop_assert!(pcie <= windows * setup.window.pcie_us.max(0.0) + longest + 1e-6);
            prop_assert!(links.iter().all(|&l| l <= windows * setup.window.link_us.max(0.0) + longest + 1e-6));
        }
    }
}

#[test]
fn largest_scheduler_accepts_the_largest_costs() {
    let forever = Table::new(vec![(1, f64::INFINITY)]).expect("a point");
    let costs = Costs {
        gpu: Some(forever.clone().into()),
        cpu: forever.clone().into(),
        near: Some(NearCosts { table: forever, internal_us: f64::INFINITY, link_us: 0.0 }),
        bring_us: f64::INFINITY,
        first_bring_us: 0.0,
        launch_us: 0.0,
        striped_us: f64::INFINITY,
        localized_us: f64::INFINITY,
        row_us: f64::INFINITY,
    };
    for system in SYSTEMS {
        let mut scheduler = ExpertScheduler::new(Setup {
            system,
            costs: costs.clone(),
            layers: 1,
            experts: MOST_EXPERTS,
            memories: MOST_MEMORIES,
            frames: 7,
            window: Window { pcie_us: f64::INFINITY, link_us: f64::INFINITY },
        })
        .expect("as large as can be");
        for _ in 0..2 {
            let s = scheduler.step(0, &[u32::MAX; MOST_EXPERTS]).expect("a layer");
            assert!(s.units.iter().all(Option::is_some) && s.makespan_us > 4e6);
        }
    }
}
