//! Distance of each policy from the best schedule.

use super::*;

/// Makespans of random layers, divided by the least ones: mean and maximum.
fn over(policy: Solver, layers: usize, most: usize, rise: f64) -> (f64, f64) {
    let mut random = SplitMix64(3);
    let (mut sum, mut worst) = (0.0, 0.0_f64);
    for _ in 0..layers {
        let (costs, tasks) = layer_of(&mut random, most, rise);
        let least = least(&costs, &tasks);
        let made = scheduler(&costs).schedule(policy, &tasks, Free::default()).expect("a schedule").makespan;
        assert!(
            made >= least * (1.0 - 1e-9),
            "{policy:?} made {made}, the least is {least}: {costs:?} {tasks:?}"
        );
        sum += made / least;
        worst = worst.max(made / least);
    }
    (sum / layers as f64, worst)
}

/// The paper's GPU, whose time hardly rises with tokens (Figure 3f), and one whose time does.
const RISES: [f64; 2] = [0.2, 30.0];

#[test]
fn for_few_experts_the_split_is_optimal() {
    for rise in RISES {
        let (_, worst) = over(Solver::Best, 1000, 8, rise);
        assert!(worst < 1.0 + 1e-9, "{rise}: {worst}");
        let (mean, worst) = over(Solver::Best, 100, 13, rise);
        assert!(worst <= 1.03 && mean < 1.001, "{rise}: {mean} {worst}");
    }
}

/// In one reading it is within 3 % on machines like the paper's, and far off on others. In the other, a free
/// unit takes a task even if another unit would finish it sooner.
#[test]
fn paper_simulation_depends_on_its_interpretation() {
    let of = |order, rise| over(Solver::Paper(order), 1000, 8, rise);
    let [flat, rising] = RISES.map(|rise| of(Order::Next, rise));
    assert!(flat.1 <= 1.03 && flat.1 > 1.001, "{flat:?}");
    assert!(rising.0 > 1.01 && rising.1 > 1.2, "{rising:?}");
    let free = of(Order::Free, RISES[0]);
    assert!(free.0 > 1.2, "{free:?}");
}

#[test]
fn no_fixed_split_is_better() {
    let mut random = SplitMix64(11);
    for case in 0..1000 {
        let (costs, tasks) = layer_of(&mut random, 64, if case % 2 == 0 { RISES[0] } else { RISES[1] });
        let mut s = scheduler(&costs);
        let mut made = |policy| s.schedule(policy, &tasks, Free::default()).expect("a schedule").makespan;
        let cut = made(Solver::Best);
        for (name, policy) in solvers() {
            let other = made(policy);
            assert!(cut <= other * 1.03, "{name}: {other} < {cut}: {costs:?} {tasks:?}");
            if matches!(policy, Solver::Fixed | Solver::Gpu | Solver::Cpu) {
                assert!(cut <= other * (1.0 + 1e-9), "{name}: {other} < {cut}");
            }
        }
    }
}
