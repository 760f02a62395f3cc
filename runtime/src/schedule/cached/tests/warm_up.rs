//! Tests of costs that the first calls of a run measure. A modelled device takes the times of its own costs,
//! which the plan does not have right.

use super::*;
use crate::offload::cache::{CachedLayer, ExpertIndex, Key};
use crate::schedule::cached::dispatcher::{CachedDispatcher, Rows, Setup};
use crate::schedule::decision::Decision;
use crate::schedule::warm_up::{MeasuredUnit, SAMPLES, WarmUp};
use moec_ir::op::Score;

/// The first decision about a layer with these loads, whose first two experts are cached. Experts of another
/// layer are in the other frames.
fn decide(dispatcher: &mut CachedDispatcher) -> Decision {
    let rows = Rows { loads: &[3, 1, 6, 5, 2, 1], prompt: false, k: 6 };
    dispatcher.divide(0, rows, &|_| true).expect("a decision").clone()
}

fn dispatcher(costs: Costs) -> CachedDispatcher {
    let layer = CachedLayer { experts: 6, k: 6, bytes: 1 };
    let setup = Setup {
        costs,
        experts: ExpertIndex::uniform(2, layer).expect("experts"),
        solvers: [Solver::Best; 2],
        cache_policy: "lru".parse().expect("a policy"),
        ahead: 0,
        window_us: 10.0,
        cached: (0..6)
            .map(|i| Key { layer: u16::from(i > 1), expert: if i > 1 { i - 2 } else { i } })
            .collect(),
        pinned: Vec::new(),
        score: Score::Softmax,
    };
    CachedDispatcher::new(setup).expect("a dispatcher")
}

/// Measures the transfers of a device until there are enough; some calls are preempted.
fn measure_transfers(warm_up: &mut WarmUp, device: &Costs) -> Costs {
    for call in 0..SAMPLES {
        let work = warm_up.transfer().expect("a transfer is to be measured");
        let preempted = if call % 3 == 1 { 5000.0 } else { 0.0 };
        let corrected = warm_up.add(work, device.first_bring_us + device.bring_us + preempted);
        assert_eq!(corrected.is_some(), call + 1 == SAMPLES);
        if let Some(costs) = corrected {
            assert!(warm_up.transfer().is_none());
            return costs;
        }
    }
    panic!("transfers were measured");
}

#[test]
fn wrong_transfer_costs_are_corrected_and_change_decisions() {
    let device = costs([4.0, 0.1], [30.0, 20.0], 2.0, 24.0);
    for factor in [4.0, 0.25] {
        let planned = Costs {
            bring_us: device.bring_us * factor,
            first_bring_us: device.first_bring_us * factor,
            ..device.clone()
        };
        let mut corrected = dispatcher(planned.clone());
        let before = decide(&mut dispatcher(planned.clone()));
        corrected.set_costs(measure_transfers(&mut WarmUp::new(planned), &device)).expect("costs");
        assert_eq!(corrected.costs(), &device, "{factor}");
        let after = decide(&mut corrected);
        assert_eq!(after, decide(&mut dispatcher(device.clone())), "{factor}");
        assert_ne!((&before.units, &before.transfers), (&after.units, &after.transfers), "{factor}");
    }
}

#[test]
fn costs_of_experts_are_corrected_by_class_of_load() {
    let curve = |one: f64, many: f64| UnitCosts {
        table: Table::new(vec![(1, one), (2, one), (4, one), (8, many), (64, many)]).expect("a table"),
        first_us: 3.0,
    };
    // The device takes four times as long for experts with few tokens; for many the plan is right within a
    // fifth.
    let planned = Costs { launch_us: 5.0, ..Costs::of_two(curve(10.0, 100.0), curve(50.0, 700.0), 20.0) };
    let mut warm_up = WarmUp::new(planned.clone());
    let mut last = None;
    for _ in 0..SAMPLES {
        let few = warm_up.on_gpu(&[1, 1]).expect("few tokens");
        last = warm_up.add(few, 4.0 * (5.0 + 2.0 * 10.0)).or(last);
        let many = warm_up.on_cpu(&[60, 9]).expect("many tokens");
        last = warm_up.add(many, 1.15 * (3.0 + 2.0 * 700.0)).or(last);
    }
    assert!(
        warm_up.on_gpu(&[1]).is_none() && warm_up.on_gpu(&[4]).is_some() && warm_up.on_gpu(&[]).is_none()
    );
    let costs = last.expect("corrected costs");
    assert_eq!(costs.cpu, planned.cpu);
    let gpu = costs.gpu.expect("a GPU");
    // Classes without a measurement follow the nearest one.
    assert_eq!(gpu.table.points(), [(1, 40.0), (2, 40.0), (4, 40.0), (8, 400.0), (64, 400.0)]);
    assert_eq!((costs.launch_us, gpu.first_us, costs.bring_us), (20.0, 18.0, 20.0));
    let checks: Vec<_> = warm_up.checks().into_iter().flatten().collect();
    let of = |unit| checks.iter().find(|c| c.unit == unit).expect("a check");
    assert_eq!((of(MeasuredUnit::Gpu).tokens, of(MeasuredUnit::Cpu).tokens), (1, 8));
    assert_eq!([of(MeasuredUnit::Gpu).factor, of(MeasuredUnit::Cpu).factor], [4.0, 1.0]);
    assert_eq!((of(MeasuredUnit::Gpu).planned_us, of(MeasuredUnit::Gpu).measured_us), (12.5, 50.0));
}

#[test]
fn corrections_are_bounded() {
    let device = costs([4.0, 0.1], [30.0, 20.0], 2.0, 24.0);
    let mut warm_up = WarmUp::new(device.clone());
    let slow = Costs { bring_us: 1e9, ..device.clone() };
    assert_eq!(measure_transfers(&mut warm_up, &slow).bring_us, 64.0 * device.bring_us);
}
