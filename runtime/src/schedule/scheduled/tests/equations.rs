//! Tests of the equations, with numbers computed by hand.

use super::drawn::{MODELS, costs};
use crate::schedule::scheduled::*;
use crate::schedule::*;

fn table(points: &[(u32, f64)]) -> Table {
    Table::new(points.to_vec()).expect("tokens ascend")
}

fn near(a: f64, b: f64) {
    assert!((a - b).abs() <= 1e-6 * b.abs().max(1.0), "{a} is not {b}");
}

#[test]
fn cost_tables_interpolate_linearly() {
    let t = table(&[(2, 10.0), (4, 20.0), (8, 100.0)]);
    let cases = [
        (0.0, 10.0),
        (1.0, 10.0),
        (2.0, 10.0),
        (3.0, 15.0),
        (4.0, 20.0),
        (6.0, 60.0),
        (8.0, 100.0),
        (10.0, 140.0),
    ];
    for (tokens, us) in cases {
        near(t.at(tokens), us);
    }
    near(table(&[(4, 7.0)]).at(1e6), 7.0);
    // A falling line ends at 0.
    near(table(&[(1, 10.0), (2, 4.0)]).at(9.0), 0.0);
    let wall = table(&[(1, 5.0), (2, f64::INFINITY), (3, f64::INFINITY)]);
    near(wall.at(1.0), 5.0);
    assert!([1.5, 2.0, 2.5, 3.0, 4.0].iter().all(|&n| wall.at(n) == f64::INFINITY));
}

#[test]
fn invalid_cost_tables_are_rejected() {
    assert_eq!(Table::new(Vec::new()), Err(ScheduleError::NoPoints));
    assert_eq!(Table::new(vec![(2, 1.0), (2, 3.0)]), Err(ScheduleError::Order { tokens: 2, next: 2 }));
    for value in [-1.0, f64::NAN] {
        assert!(matches!(Table::new(vec![(1, value)]), Err(ScheduleError::Time { .. })));
    }
}

#[test]
fn deepseek_v2_costs_match_the_paper_table() {
    // 3 · 5120 · 1536 weights in bf16 are 47 185 920 bytes; the rates are those of Table 1.
    let c = costs(&MODELS[0]);
    near(c.t_dram(Layout::Striped), 153.6);
    near(c.t_dram(Layout::Local(3)), 1228.8);
    near(c.bring_us, 737.28);
    near(c.t_gpu_hit(1.0), 47_185_920.0 / 2.04e6);
    near(c.t_gpu_miss(1.0, Layout::Striped), 737.28);
    near(c.t_gpu_miss(1.0, Layout::Local(0)), 1228.8);
    near(c.t_cpu(1.0, Layout::Striped), 153.6);
    // 512 tokens, 47 185 920 operations each, at half of 90.1 TFLOPS.
    near(c.t_cpu(512.0, Layout::Striped), 512.0 * 47_185_920.0 / 45.05e6);
    // One token is bound by the memory, two by the arithmetic: 184.32 µs a token.
    near(c.t_near(1.0), 307.2);
    near(c.t_near(2.0), 368.64);
    // Each of 16 memories reads a 16th at 38.4 GB/s.
    near(c.contention(Layout::Striped, 16), 76.8);
    near(c.contention(Layout::Local(0), 16), 1228.8);
}

#[test]
fn step_time_follows_equations_5_to_7() {
    let setup = Setup {
        system: trimoe("", Solver::Cheapest, false),
        costs: costs(&MODELS[0]),
        layers: 1,
        experts: 4,
        memories: 2,
        frames: 1,
        window: Window::default(),
    };
    let mut scheduler = ExpertScheduler::new(setup).expect("a sound setup");
    let place = |layout, cached| Place { layout, cached };
    let places = vec![
        place(Layout::Striped, true),
        place(Layout::Striped, false),
        place(Layout::Local(1), false),
        place(Layout::Local(0), false),
    ];
    let placement = Placement::new(places, 2, 1).expect("memories and frames that are there");
    scheduler.place(0, &placement).expect("a layer");
    let s = scheduler.dispatch(0, &[4, 2, 2, 0]).expect("a layer").clone();
    assert_eq!(
        s.units,
        [Some(ScheduledUnit::Gpu), Some(ScheduledUnit::Cpu), Some(ScheduledUnit::Near(1)), None]
    );
    near(s.gpu_us, 47_185_920.0 / 2.04e6);
    near(s.cpu_us, 153.6);
    // The striped read takes half of 1228.8 of each memory.
    near(s.memory_us[0], 614.4);
    near(s.memory_us[1], 614.4 + 368.64);
    near(s.near_us[1], 368.64);
    near(s.makespan_us, 614.4 + 368.64);
}

#[test]
fn moving_average_follows_equation_8() {
    let system = TRIMOE;
    let mut scheduler = ExpertScheduler::new(super::drawn::setup(system, &MODELS[1])).expect("a sound setup");
    let mut loads = vec![0; 128];
    for (load, average) in [(10, 3.0), (0, 2.1), (20, 7.47)] {
        loads[5] = load;
        scheduler.dispatch(2, &loads).expect("a layer");
        near(f64::from((scheduler.predictor().expected(2)[5] * 1e4).round() / 1e4), average);
    }
    assert!(scheduler.predictor().expected(1).iter().all(|&e| e == 0.0));
    assert!(scheduler.predictor().expected(99).is_empty());
}

#[test]
fn mismatched_scheduler_inputs_are_rejected() {
    let sound = super::drawn::setup(super::systems::GPU_ALONE, &MODELS[0]);
    let mut scheduler = ExpertScheduler::new(sound.clone()).expect("a sound setup");
    assert_eq!(scheduler.dispatch(4, &[0; 160]).err(), Some(ScheduleError::Layer { layer: 4, layers: 4 }));
    assert_eq!(scheduler.step(0, &[0; 7]).err(), Some(ScheduleError::Loads { found: 7, experts: 160 }));
    let no_gpu = Setup { costs: Costs { gpu: None, ..sound.costs.clone() }, ..sound.clone() };
    let error = ExpertScheduler::new(no_gpu).expect_err("the GPU alone without one");
    assert_eq!(
        error.to_string(),
        "policy GPU computes on the GPU, and there are no costs of it: give them, or take another policy"
    );
    assert!(ExpertScheduler::new(Setup { experts: MOST_EXPERTS + 1, ..sound.clone() }).is_err());
    let costs = Costs { bring_us: f64::NAN, ..sound.costs.clone() };
    assert!(ExpertScheduler::new(Setup { costs, ..sound }).is_err());
    let local = vec![Place { layout: Layout::Local(2), cached: true }; 3];
    assert!(matches!(
        Placement::new(local.clone(), 2, 3),
        Err(ScheduleError::Memory { expert: 0, memory: 2, .. })
    ));
    assert!(matches!(Placement::new(local, 3, 2), Err(ScheduleError::Frames { cached: 3, frames: 2 })));
}
