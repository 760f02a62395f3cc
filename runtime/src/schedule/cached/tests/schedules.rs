//! Tests that timelines are feasible.

use super::*;

fn run(policy: Solver, costs: &Costs, tasks: &[Task], free: Free) -> Timelines {
    scheduler(costs).schedule(policy, tasks, free).expect("a schedule").clone()
}

#[test]
fn every_expert_runs_once_and_unit_tasks_never_overlap() {
    let mut random = SplitMix64(5);
    for _ in 0..300 {
        let (costs, tasks) = random_layer(&mut random, 24);
        let [gpu, cpu, link] = [0; 3].map(|_| 100.0 * random.unit());
        let free = Free { gpu, cpu, link };
        for (name, policy) in solvers() {
            let made = run(policy, &costs, &tasks, free);
            let mut experts: Vec<u16> = made.runs.iter().map(|r| r.expert).collect();
            experts.sort_unstable();
            assert_eq!(experts, (0..tasks.len() as u16).collect::<Vec<_>>(), "{name}");
            let (mut ends, mut link) = ([free.gpu, free.cpu], free.link);
            for r in &made.runs {
                let (task, end) = (&tasks[r.task], &mut ends[usize::from(r.unit == ExpertUnit::Cpu)]);
                assert!(r.start >= *end - 1e-9 && r.end >= r.start, "{name}: {r:?}");
                *end = r.end;
                assert_eq!(task.expert, r.expert);
                if r.unit == ExpertUnit::Gpu {
                    assert_eq!(r.transfer.is_some(), task.held.is_none(), "{name}: {r:?}");
                    assert!(r.start >= r.transfer.map_or(task.held.unwrap_or(0.0), |t| t.1), "{name}: {r:?}");
                }
                if let Some((from, to)) = r.transfer {
                    assert!(from >= link - 1e-9 && to >= from + costs.bring_us - 1e-9, "{name}: {r:?}");
                    link = to;
                }
            }
            let last = ends[0].max(ends[1]);
            assert!((made.makespan - last).abs() < 1e-9, "{name}");
            assert_eq!(made.done.link.to_bits(), link.to_bits());
            // The makespan that is computed without timelines is the same, except for improvements of the
            // search.
            let short = scheduler(&costs).makespan(policy, &tasks, free);
            let searched = policy == Solver::Best && short > made.makespan;
            assert!(searched || (short - made.makespan).abs() < 1e-6, "{name}: {short} {}", made.makespan);
            assert_eq!(made, run(policy, &costs, &tasks, free), "{name}");
        }
    }
}

/// Figure 5 of the paper: an expert takes 1 on the GPU, its number of tokens on the CPU, and 3 to transfer.
/// The paper does not print the loads; with these the CPU computes the cached E while the GPU gets the
/// uncached C.
#[test]
fn schedule_matches_the_papers_example() {
    let costs = costs([1.0, 0.0], [1.0, 1.0], 0.0, 3.0);
    let loads = [(0, 4, true), (1, 1, false), (2, 5, false), (3, 2, false), (4, 1, true)];
    let task = |(expert, load, held): (u16, u32, bool)| Task { expert, load, held: held.then_some(0.0) };
    let tasks = loads.map(task);
    for policy in [Solver::Best, Solver::Paper(Order::Free)] {
        let made = run(policy, &costs, &tasks, Free::default());
        let unit = |e: u16| made.runs.iter().find(|r| r.expert == e).expect("a run");
        // Uncached experts by load, then cached ones, if the CPU is idle.
        let on_cpu: Vec<u16> =
            made.runs.iter().filter(|r| r.unit == ExpertUnit::Cpu).map(|r| r.expert).collect();
        assert!(on_cpu.starts_with(&[1, 3]) && [4].starts_with(&on_cpu[2..]), "{policy:?}: {on_cpu:?}");
        assert_eq!((made.makespan, unit(2).transfer), (4.0, Some((0.0, 3.0))), "{policy:?}: {made:?}");
        assert_eq!((unit(1).unit, unit(3).unit), (ExpertUnit::Cpu, ExpertUnit::Cpu));
    }
    // Transferred or not, the fixed split takes all that is not held: 1 + 2 + 5.
    assert_eq!(run(Solver::Fixed, &costs, &tasks, Free::default()).makespan, 8.0);
    assert_eq!(run(Solver::Gpu, &costs, &tasks, Free::default()).makespan, 10.0);
    assert_eq!(run(Solver::Cpu, &costs, &tasks, Free::default()).makespan, 13.0);
}

#[test]
fn first_tasks_take_longer() {
    let tasks = [0, 1].map(|expert| Task { expert, load: 1, held: None });
    let warm =
        |first| run(Solver::Cpu, &costs([1.0, 0.0], [10.0, 1.0], first, 50.0), &tasks, Free::default());
    assert_eq!((warm(0.0).makespan, warm(7.0).makespan), (20.0, 27.0));
    assert_eq!(warm(7.0).runs[0].end, 17.0);
}

/// Experts that the GPU holds share a launch; each that arrives has one of its own.
#[test]
fn arrivals_have_launches_of_their_own() {
    let tasks = [(0, 3, Some(0.0)), (1, 2, Some(0.0)), (2, 5, Some(30.0)), (3, 4, None), (4, 6, None)];
    let tasks = tasks.map(|(expert, load, held)| Task { expert, load, held });
    let costs = Costs { launch_us: 2.0, ..costs([8.0, 0.0], [100.0, 50.0], 0.0, 10.0) };
    let made = run(Solver::Gpu, &costs, &tasks, Free { link: 30.0, ..Free::default() });
    let spans: Vec<_> = made.runs.iter().map(|r| (r.expert, r.start, r.end)).collect();
    assert_eq!(spans, [(0, 0.0, 8.0), (1, 8.0, 16.0), (2, 30.0, 40.0), (4, 40.0, 50.0), (3, 50.0, 60.0)]);
    assert_eq!(made.transferred().collect::<Vec<_>>(), [4, 3]);
}

#[test]
fn expert_in_transfer_is_awaited_if_that_is_sooner() {
    let costs = costs([1.0, 0.0], [10.0, 1.0], 0.0, 50.0);
    let made =
        |held| run(Solver::Best, &costs, &[Task { expert: 0, load: 1, held: Some(held) }], Free::default());
    assert_eq!((made(5.0).makespan, made(5.0).runs[0].unit), (6.0, ExpertUnit::Gpu));
    assert_eq!((made(30.0).makespan, made(30.0).runs[0].unit), (10.0, ExpertUnit::Cpu));
}

#[test]
fn invalid_schedule_inputs_are_rejected() {
    let good = costs([1.0, 0.0], [10.0, 1.0], 0.0, 50.0);
    let task = Task { expert: 3, load: 1, held: None };
    let why =
        |tasks: &[Task], free| scheduler(&good).schedule(Solver::Best, tasks, free).map(|_| ()).unwrap_err();
    assert_eq!(why(&[Task { load: 0, ..task }], Free::default()), ScheduleError::NoTokens { expert: 3 });
    assert_eq!(why(&[task, task], Free::default()), ScheduleError::Twice { expert: 3 });
    for free in [Free { gpu: f64::NAN, ..Free::default() }, Free { link: -1.0, ..Free::default() }] {
        assert!(matches!(why(&[task], free), ScheduleError::Time { .. }));
    }
    let bad = Costs { bring_us: f64::INFINITY, ..good };
    let e = TimelineScheduler::new(bad).map(|_| ()).unwrap_err().to_string();
    assert_eq!(e, "an expert on its way to the GPU must be a number of microseconds from 0 on, not inf");
}

#[test]
fn empty_layer_ends_when_its_units_are_free() {
    let costs = costs([1.0, 0.0], [10.0, 1.0], 5.0, 50.0);
    let free = Free { gpu: 4.0, cpu: 2.0, link: 9.0 };
    for (_, policy) in solvers() {
        let made = run(policy, &costs, &[], free);
        assert_eq!((made.makespan, made.done), (4.0, free));
    }
}
