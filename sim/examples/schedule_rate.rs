//! Benchmark of schedulers: the time to assign experts to units, and the resulting modelled time of a layer.
//!
//! It prints three tables. The first has schedulers over the memories of the host, by system (TriMoE's models
//! and costs, batches of drifting loads). The second has solvers on timelines (HybriMoE), by layer. The third
//! has the dispatcher of cache frames that all layers share. Times are medians.
//!
//! `cargo run --release -p moec-sim --example schedule_rate`
#![allow(clippy::cast_possible_truncation, reason = "numbers of experts are small")]
#![allow(clippy::print_stdout)]

#[path = "../../runtime/src/schedule/scheduled/tests/drawn.rs"]
mod drawn;

use drawn::{Drift, LAYERS, MODELS, Model, Random, run, setup};
use moec_ir::op::Score;
use moec_runtime::offload::cache::{CachedLayer, ExpertIndex, Key};
use moec_runtime::schedule::cached::dispatcher::{
    CachedDispatcher, RowScores, Rows, Setup as DispatcherSetup,
};
use moec_runtime::schedule::scheduled::{ExpertScheduler, Setup, Window};
use moec_runtime::schedule::timelines::{Free, Task, TimelineScheduler};
use moec_runtime::schedule::{Costs, NearCosts, SOLVERS, Solver, System, Table, UnitCosts};
use moec_sim::systems::SCHEDULED;
use std::hint::black_box;
use std::time::Instant;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Adds the microseconds that `body` takes to `times`.
fn timed<T>(times: &mut Vec<f64>, body: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = black_box(body());
    times.push(start.elapsed().as_secs_f64() * 1e6);
    result
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Times in microseconds of a dispatch of a layer, and of the moves before the next one.
fn decisions(system: System, model: &Model, batch: usize) -> Outcome<[f64; 2]> {
    let setup = setup(system, model);
    let mut scheduler = ExpertScheduler::new(setup.clone())?;
    let mut drift = Drift::new(3, model.experts);
    let (mut dispatch, mut moves) = (Vec::new(), Vec::new());
    for step in 0..100 * LAYERS {
        let layer = step % LAYERS;
        let loads = drift.loads(layer, model.k, batch);
        timed(&mut dispatch, || scheduler.dispatch(layer, &loads).map(|schedule| schedule.makespan_us))?;
        let next = (layer + 1) % LAYERS;
        timed(&mut moves, || scheduler.moves_for(next, setup.window).map(<[_]>::len))?;
    }
    Ok([dispatch, moves].map(median))
}

fn schedulers() -> Outcome<()> {
    println!(
        "model        batch  system                        layer, us  dispatch, us  moves, us  accuracy  precision"
    );
    for model in &MODELS {
        for batch in [1, 32, 128, 512, 768] {
            for system in SCHEDULED {
                let (layer, scheduler) = run(system, model, batch, 100);
                let counters = scheduler.counters();
                let [dispatch, moves] = decisions(system, model, batch)?;
                println!(
                    "{:12} {batch:5}  {:28} {layer:10.1} {dispatch:13.2} {moves:10.2} {:9.3} {:10.3}",
                    model.name,
                    system.name,
                    counters.accuracy(),
                    counters.precision()
                );
            }
        }
    }
    Ok(())
}

/// Costs of a GPU and a CPU in microseconds: of the first token and of each further one, of the first expert,
/// and of a transfer.
fn two_units(gpu: [f64; 2], cpu: [f64; 2], first: f64, transfer: f64) -> Outcome<Costs> {
    let line = |[one, more]: [f64; 2]| {
        Table::new(vec![(1, one), (2, one + more)]).map(|table| UnitCosts { table, first_us: first })
    };
    Ok(Costs { first_bring_us: first, ..Costs::of_two(line(gpu)?, line(cpu)?, transfer) })
}

fn timelines() -> Outcome<()> {
    println!("\nexperts of a layer  solver     schedule, us  layer, us  share");
    for (what, experts, tokens) in
        [("decoding, 8 of 64", 8, 1), ("prefill, 64 of 64", 64, 32), ("prefill, 8 of 8", 8, 64)]
    {
        let mut random = Random(2);
        let task = |expert: u16| Task {
            expert,
            load: 1 + (random.unit() * f64::from(tokens - 1)) as u32,
            held: expert.is_multiple_of(4).then_some(0.0),
        };
        let tasks: Vec<Task> = (0..experts).map(task).collect();
        let mut scheduler = TimelineScheduler::new(two_units([60.0, 0.5], [200.0, 90.0], 100.0, 1000.0)?)?;
        for (name, solver, _) in SOLVERS.iter().filter(|(_, solver, _)| solver.has_timelines()) {
            let (mut times, mut layer) = (Vec::new(), 0.0);
            for _ in 0..501 {
                let made = || {
                    scheduler.schedule(*solver, black_box(&tasks), Free::default()).map(|made| made.makespan)
                };
                layer = timed(&mut times, made)?;
            }
            let us = median(times);
            println!("{what:18}  {name:10} {us:12.1} {layer:10.0} {:5.2} %", us / layer * 100.0);
        }
    }
    Ok(())
}

/// Layers of Qwen2-57B with a quarter of the experts in frames, with the costs of an expert on the machine of
/// docs/hybrimoe.md.
fn dispatcher() -> Outcome<()> {
    const LAYERS: usize = 28;
    const EXPERTS: usize = 64;
    const WINDOW_US: f64 = 600.0;
    const TOKENS: usize = 50;
    let key = |i: usize| Key { layer: (i % LAYERS) as u16, expert: (i / LAYERS) as u16 };
    let cached: Vec<Key> = (0..LAYERS * EXPERTS / 4).map(key).collect();
    let mut dispatcher = CachedDispatcher::new(DispatcherSetup {
        costs: two_units([40.0, 0.7], [895.0, 706.0], 0.0, 1042.0)?,
        experts: ExpertIndex::uniform(LAYERS, CachedLayer { experts: EXPERTS, k: 8, bytes: 1 })?,
        solvers: [Solver::Best; 2],
        cache_policy: "mrs alpha=0.9 depth=2 bypass=1".parse()?,
        ahead: 3,
        window_us: WINDOW_US,
        pinned: cached[..2].to_vec(),
        cached,
        score: Score::Softmax,
    })?;
    let mut random = Random(9);
    let (mut divide, mut predict) = (Vec::new(), Vec::new());
    for _ in 0..TOKENS {
        for layer in 0..LAYERS {
            let mut loads = [0; EXPERTS];
            (0..8).for_each(|_| loads[(random.unit().powi(2) * EXPERTS as f64) as usize] += 1);
            let logits = |_| (0..EXPERTS).map(|_| random.unit() as f32 * 4.0).collect();
            let scores: Vec<Vec<f32>> = (0..4.min(LAYERS - layer)).map(logits).collect();
            let rows = Rows { loads: &loads, prompt: false, k: 8 };
            timed(&mut divide, || dispatcher.divide(layer, rows, &|_| true).map(|_| ()))?;
            let scores = RowScores { rows: 1, layers: scores.len(), logits: &|i, _| &scores[i] };
            timed(&mut predict, || dispatcher.predict(scores, &|_| true).map(|_| ()))?;
        }
    }
    let layer = dispatcher.counts().makespan_us / (TOKENS * LAYERS) as f64 + WINDOW_US;
    let [divide, predict] = [divide, predict].map(median);
    let share = (divide + predict) / layer * 100.0;
    println!(
        "\ncache frames: dividing {divide:.1} us, looking ahead {predict:.1} us, {share:.2} % of a layer of {layer:.0} us"
    );
    Ok(())
}

fn main() -> Outcome<()> {
    schedulers()?;
    timelines()?;
    dispatcher()
}
