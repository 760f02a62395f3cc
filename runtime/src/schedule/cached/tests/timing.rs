//! How long deciding takes, printed: `cargo test -p moec-runtime hybrid -- --ignored --nocapture`.

use super::*;
use std::hint::black_box;
use std::time::Instant;

#[test]
#[ignore = "it measures"]
fn time_of_a_layer() {
    for (what, experts, tokens) in
        [("decoding, 8 of 64", 8, 1), ("prefill, 64 of 64", 64, 32), ("prefill, 8 of 8", 8, 64)]
    {
        let costs = costs([60.0, 0.5], [200.0, 90.0], 100.0, 1000.0);
        let mut random = SplitMix64(2);
        let tasks = (0..experts).map(|expert| Task {
            expert,
            load: 1 + (random.unit() * f64::from(tokens - 1)) as u32,
            held: (expert % 4 == 0).then_some(0.0),
        });
        let tasks: Vec<Task> = tasks.collect();
        let mut s = divider(&costs);
        for (name, policy) in solvers() {
            let mut times: Vec<f64> = (0..501)
                .map(|_| {
                    let t = Instant::now();
                    black_box(s.schedule(policy, black_box(&tasks), Free::default()).expect("a schedule"));
                    t.elapsed().as_secs_f64() * 1e6
                })
                .collect();
            times.sort_by(f64::total_cmp);
            let (us, layer) =
                (times[times.len() / 2], s.schedule(policy, &tasks, Free::default()).expect("it").makespan);
            println!(
                "{what:18} {name:10} {us:7.1} us, {:.3} % of a layer of {layer:.0} us",
                us / layer * 100.0
            );
        }
    }
}
