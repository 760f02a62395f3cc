//! How far from the best schedule each policy is.

use super::*;

/// Makespans over the least one, of random layers of up to eight experts: mean and largest.
fn over(policy: Policy) -> (f64, f64) {
    let mut random = SplitMix64(3);
    let (mut sum, mut most) = (0.0, 0.0_f64);
    for _ in 0..1000 {
        let (costs, tasks) = random_layer(&mut random, 8);
        let least = least(&costs, &tasks);
        let made = scheduler(&costs).schedule(policy, &tasks, Free::default()).expect("a schedule").makespan;
        assert!(
            made >= least * (1.0 - 1e-9),
            "{policy:?} made {made}, the least is {least}: {costs:?} {tasks:?}"
        );
        sum += made / least;
        most = most.max(made / least);
    }
    (sum / 1000.0, most)
}

#[test]
fn the_cut_is_nearly_the_best() {
    let (mean, most) = over(Policy::Cut);
    assert!(most <= 1.03 && mean < 1.001, "{mean} {most}");
}

/// One reading of the paper's simulation is. In the other, who is free takes a task even if another would be done with it
/// sooner.
#[test]
fn the_papers_simulation_hangs_on_how_it_is_read() {
    let [next, free] = [Order::Next, Order::Free].map(|order| over(Policy::Paper(order)));
    assert!(next.1 <= 1.03 && next.1 > over(Policy::Cut).1, "{next:?}");
    assert!(free.0 > 1.2, "{free:?}");
}

#[test]
fn no_fixed_split_is_better() {
    let mut random = SplitMix64(11);
    for _ in 0..1000 {
        let (costs, tasks) = random_layer(&mut random, 64);
        let mut s = scheduler(&costs);
        let mut made = |policy| s.schedule(policy, &tasks, Free::default()).expect("a schedule").makespan;
        let cut = made(Policy::Cut);
        for (name, policy, _) in POLICIES {
            let other = made(*policy);
            assert!(cut <= other * 1.03, "{name}: {other} < {cut}: {costs:?} {tasks:?}");
            if matches!(policy, Policy::Fixed | Policy::Gpu | Policy::Cpu) {
                assert!(cut <= other * (1.0 + 1e-9), "{name}: {other} < {cut}");
            }
        }
    }
}
