//! How long deciding takes, printed: `cargo test --release -p moec-runtime makespan -- --ignored --nocapture`.

use super::policies::{Drift, setup};
use super::workload::*;
use crate::schedule::scheduled::*;
use crate::schedule::sums::prices::Prices;
use crate::schedule::sums::refine::refine;
use crate::schedule::sums::search::Search;
use crate::schedule::sums::ticks::us;
use crate::schedule::{Solver, trimoe};
use std::time::Instant;

#[test]
#[ignore = "it measures"]
fn time_of_a_layer() {
    let memories = 16;
    println!("model        batch  greedy   paper    full     us: build  refine  search   ratio");
    for model in &MODELS {
        let prices = Prices::new(costs(model), ALL, memories);
        for batch in [32, 64, 128, 256, 512, 768, 1024] {
            let mut random = Random(7);
            let mut search = Search::default();
            let (mut greedy, mut paper, mut full) = (0.0, 0.0, 0.0);
            let mut spent = [0.0; 3];
            let cases = 200;
            let (mut times, mut low) = (Vec::new(), 0.0);
            for _ in 0..cases {
                let shares = popularity(&mut random, model.experts);
                let loads = loads(&mut random, &shares, model.k, batch);
                let places = places(&mut random, &shares, memories, 8, 0.1);
                let t = Instant::now();
                let mut a = assignment(&prices, &places, &loads, memories);
                spent[0] += t.elapsed().as_secs_f64() * 1e6;
                greedy += us(a.makespan());
                let t = Instant::now();
                refine(&mut a, 1000);
                spent[1] += t.elapsed().as_secs_f64() * 1e6;
                paper += us(a.makespan());
                let before = us(a.makespan());
                let t = Instant::now();
                search.improve(&mut a);
                let s = t.elapsed().as_secs_f64() * 1e6;
                times.push(s);
                full += us(a.makespan());
                low += us(crate::schedule::sums::bound::bound(&a, &mut Vec::new()));
                assert!(us(a.makespan()) <= before);
            }
            times.sort_by(f64::total_cmp);
            spent[2] = times[times.len() / 2] * f64::from(cases);
            let worst = times[times.len() * 99 / 100];
            let n = f64::from(cases);
            println!(
                "{:12} {batch:5} {:8.1} {:8.1} {:8.1}   {:7.2} {:7.2} {:7.2} (99 %: {worst:.1})  {:.3} bound {:.3}",
                model.name,
                greedy / n,
                paper / n,
                full / n,
                spent[0] / n,
                spent[1] / n,
                spent[2] / n,
                paper / full,
                full / low,
            );
        }
    }
}

#[test]
#[ignore = "it measures"]
fn time_of_the_scheduler() {
    println!("model        batch  us: dispatch moves_for  of a step of");
    for model in &MODELS {
        for batch in [1, 32, 128, 512, 1024] {
            let system = trimoe("", Solver::Best, true);
            let setup = setup(system, model);
            let mut scheduler = Scheduler::new(setup.clone()).expect("a sound setup");
            let mut drift = Drift::new(3, model.experts);
            let (mut dispatch, mut moves, mut step) = (Vec::new(), Vec::new(), 0.0);
            for i in 0..400 {
                let layer = i % setup.layers;
                let loads = drift.loads(layer, model.k, batch);
                let t = Instant::now();
                let s = scheduler.dispatch(layer, &loads).expect("a layer");
                dispatch.push(t.elapsed().as_secs_f64() * 1e6);
                step += s.makespan_us;
                let t = Instant::now();
                scheduler.moves_for((layer + 1) % setup.layers, setup.window).expect("a layer");
                moves.push(t.elapsed().as_secs_f64() * 1e6);
            }
            let median = |times: &mut Vec<f64>| {
                times.sort_by(f64::total_cmp);
                times[times.len() / 2]
            };
            println!(
                "{:12} {batch:5} {:13.2} {:9.2} {:13.1}",
                model.name,
                median(&mut dispatch),
                median(&mut moves),
                step / 400.0
            );
        }
    }
}
