//! Tests that the tables of `docs/neuron-cache.md` are the results of the neuron policies. `MOEC_BLESS=1`
//! rewrites them.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]

use moec_runtime::offload::cache::{Cache, CachedLayer, Event, ExpertIndex};
use moec_runtime::offload::neurons::Shape;
use moec_sim::neurons::Activations;
use moec_sim::neurons::replay::replay;
use moec_sim::neurons::synthetic::Recipe;
use moec_sim::neurons::{Bundle, Job, Order, Phases, QuantFormat, simulate};
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

/// Lock for tests that write to the same page.
static PAGE: Mutex<()> = Mutex::new(());

/// Compares the text between a name's tags on the page with a table, or writes the table there.
fn check(name: &str, table: &str) {
    let _one = PAGE.lock().unwrap_or_else(PoisonError::into_inner);
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs/neuron-cache.md");
    let page = fs::read_to_string(&path).expect("the page is there");
    let (open, close) = (format!("<!-- {name}:"), format!("<!-- /{name} -->"));
    let from =
        page.find(&open).and_then(|at| Some(at + page[at..].find('\n')? + 1)).expect("an opening mark");
    let to = from + page[from..].find(&close).expect("a closing mark");
    if std::env::var_os("MOEC_BLESS").is_some() {
        fs::write(path, format!("{}{table}{}", &page[..from], &page[to..])).expect("the page can be written");
    } else {
        assert_eq!(&page[from..to], table, "docs/neuron-cache.md is stale: run the test with MOEC_BLESS=1");
    }
}

/// Bytes per token with LFU eviction, by the cache of experts with neurons in place of experts.
fn lfu(sampled: &Activations, shape: Shape, capacity: u64, from: usize) -> f64 {
    let bytes = shape.neuron_bytes();
    let neurons = CachedLayer { experts: shape.neurons as usize, k: 1, bytes };
    let index = ExpertIndex::uniform(shape.matrices as usize, neurons).expect("few enough");
    let mut cache = Cache::new(&index, capacity, &"lfu".parse().expect("a policy"));
    let mut read = 0;
    for (at, token) in sampled.tokens.iter().enumerate() {
        for (matrix, active) in token {
            let active: Vec<u16> = active.iter().map(|&n| n as u16).collect();
            let missing = |e| matches!(e, Event::Load(_) | Event::Stream(_));
            let on = |e| read += if at >= from && missing(e) { bytes } else { 0 };
            cache.step(*matrix as usize, &active, &[], on).expect("neurons that exist");
        }
    }
    read as f64 / (sampled.tokens.len() - from) as f64
}

#[test]
fn bytes_per_token_match_the_documentation() {
    const LAYERS: u32 = 1;
    let bundle = Bundle::new(2048, QuantFormat::Q4, 512, Phases::Two).unwrap();
    let shape = Shape {
        matrices: LAYERS * 64,
        neurons: 1024,
        cluster: 64,
        gate: bundle.gate().bytes,
        up_down: bundle.up_down().bytes,
    };
    let all = shape.neuron_bytes() * u64::from(shape.matrices) * u64::from(shape.neurons);
    let mut table =
        "\n| zeros | memory | experts | gates stay | active | half hot | LFU | least |\n|---|---|---|---|---|---|---|---|\n"
            .to_owned();
    for sparsity in [0.5, 0.7, 0.9] {
        let recipe = Recipe {
            layers: LAYERS,
            experts: 64,
            k: 8,
            neurons: 1024,
            sparsity,
            skew: 0.6,
            persistence: 0.6,
            tokens: 1024,
            seed: 5,
        };
        let sampled = recipe.sample().unwrap();
        for percent in [25, 50, 75] {
            let bytes = replay(&sampled, shape, all * percent / 100, 768).unwrap();
            let mb = |bytes: f64| format!("{:.2}", bytes / f64::from(LAYERS) / 1e6);
            let gates = bytes.gates.map_or("do not fit".to_owned(), mb);
            let [experts, active, hot, least] =
                [bytes.experts, bytes.neurons, bytes.hot, bytes.least].map(mb);
            let counted = mb(lfu(&sampled, shape, all * percent / 100, 768));
            let zeros = 100.0 * sparsity;
            writeln!(
                table,
                "| {zeros} % | {percent} % | {experts} | {gates} | {active} | {hot} | {counted} | {least} |"
            )
            .unwrap();
            // The page's claims do not depend on exact figures.
            assert!(bytes.least <= bytes.hot && bytes.hot < bytes.neurons && bytes.neurons < bytes.experts);
        }
    }
    table.push('\n');
    check("bytes", &table);
}

#[test]
fn barrier_free_gains_match_the_documentation() {
    let mut table =
        "\n| reads to computation | with barriers | without | faster | the disk works, with barriers | without |\n\
         |---|---|---|---|---|---|\n"
            .to_owned();
    for percent in [25, 50, 75, 100, 150, 200] {
        // 128 computations of 1000 ns on four threads, and 64 reads.
        let read = Some(128 * 1000 / 4 * percent / 100 / 64);
        let job = |i: u32| {
            let io = read.filter(|_| i % 2 == 1);
            Job { block: i / 8, stages: [None, io, Some(1000), io, Some(1000)] }
        };
        let jobs: Vec<Job> = (0..64).map(job).collect();
        let [matrix, cluster] =
            [Order::Matrix, Order::Cluster].map(|order| simulate(&jobs, 4, order).unwrap());
        let gain = matrix.makespan as f64 / cluster.makespan as f64;
        let busy = |o: &moec_sim::neurons::Outcome| 100.0 * o.reading as f64 / o.makespan as f64;
        writeln!(
            table,
            "| {:.2} | {} | {} | {gain:.2}× | {:.0} % | {:.0} % |",
            percent as f64 / 100.0,
            matrix.makespan,
            cluster.makespan,
            busy(&matrix),
            busy(&cluster)
        )
        .unwrap();
        assert!(cluster.makespan <= matrix.makespan);
    }
    table.push('\n');
    check("pipeline", &table);
}
