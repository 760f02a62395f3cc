//! Tests of the search for a hot share.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use super::super::pipeline::Order;
use super::super::simulate::{Job, simulate};
use super::super::synthetic::Recipe;
use super::*;
use crate::neurons::Activations;
use proptest::prelude::*;

/// 14336 neurons of 8 KiB, activity falling with a power of the rank, NPU and CPU at the paper's rates
/// (§2.3.1).
fn layer(batch: i32) -> Tables {
    let once = |i: usize| (0.9 * (1.0 + i as f64 / 60.0).powf(-0.75)).min(1.0);
    let active = (0..14_336).map(|i| 1.0 - (1.0 - once(i)).powi(batch)).collect();
    Tables {
        active,
        cluster: 128,
        dense: vec![(128, 30e-6 + 128.0 * 8192.0 / 56e9), (14_336, 30e-6 + 14_336.0 * 8192.0 / 56e9)],
        sparse: 8192.0 / 43.9e9 * f64::from(batch).sqrt(),
        predict: 1e-8,
        gate: 0.0,
        attention: 1e-3,
        bytes: 8192.0,
        disk: 4e9,
        read: 8192.0 / 1e9,
        memory: 59.6e9,
        held: 14_336,
    }
}

#[test]
fn larger_batches_have_more_hot_neurons() {
    let hot: Vec<usize> = (1..=4).map(|b| hot_share(&layer(b), None).unwrap().hot).collect();
    assert!(hot.windows(2).all(|w| w[0] < w[1]), "{hot:?}");
    assert!(hot[0] > 0 && hot[3] < 14_336, "{hot:?}");
}

#[test]
fn neurons_not_hidden_by_attention_stay_cold() {
    let free = hot_share(&layer(4), None).unwrap().hot;
    // The time of attention is enough for 128 neurons.
    let window = 128.0 * 8192.0 / 4e9;
    let tight = Tables { held: 256, attention: window, read: 0.0, ..layer(4) };
    let found = hot_share(&tight, None).unwrap().hot;
    assert_eq!(found, 384);
    assert!(found < free && hides(&tight, found) && !hides(&tight, found + 128));
}

#[test]
fn invalid_hot_share_tables_are_rejected() {
    for bad in [
        Tables { active: vec![], ..layer(1) },
        Tables { active: vec![0.1, 1.2], ..layer(1) },
        Tables { active: vec![f64::NAN], ..layer(1) },
        Tables { cluster: 0, ..layer(1) },
        Tables { cluster: 3, ..layer(1) },
        Tables { dense: vec![], ..layer(1) },
        Tables { dense: vec![(1, 1.0), (1, 1.0)], ..layer(1) },
        Tables { sparse: -1.0, ..layer(1) },
        Tables { disk: 0.0, ..layer(1) },
        Tables { memory: f64::NAN, ..layer(1) },
        // Which neurons are missing is known only from a trace.
        Tables { held: 14_335, ..layer(1) },
    ] {
        assert!(hot_share(&bad, None).is_err());
    }
    assert!(time_of(&layer(1), None, 14_337).is_err() && time_of(&layer(1), None, 100).is_err());
    // Without attention there is no time to hide reads, but these reads take no time.
    let fast = Tables { attention: 0.0, disk: f64::INFINITY, ..layer(1) };
    assert!(hides(&fast, 0) && hot_share(&fast, None).is_ok());
    let one = Tables { dense: vec![(100, 1.0)], memory: f64::INFINITY, ..layer(1) };
    assert!((time_of(&one, None, 256).unwrap().dense - 2.56).abs() < 1e-12);
}

/// A dense layer of 64 neurons, half of which are decoded first. Neurons keep their state for some tokens.
fn sampled(batch: usize, sparsity: f64, persistence: f64) -> Activations {
    let recipe = Recipe {
        layers: 1,
        experts: 1,
        k: 1,
        neurons: 64,
        sparsity,
        skew: 0.6,
        persistence,
        tokens: 48 * batch as u32,
        seed: 7,
    };
    recipe.sample().unwrap().batched(batch)
}

/// Tables of the layer, in milliseconds per neuron: computing on each unit, and reading from disk.
fn small(trace: &Activations, held: usize, dense: f64, sparse: f64, read: f64) -> Tables {
    Tables {
        active: trace.frequencies(),
        cluster: 8,
        dense: vec![(8, 8.0 * dense)],
        sparse,
        predict: 0.02,
        gate: 0.0,
        attention: 4.0,
        bytes: 1.0,
        disk: 8.0,
        read,
        memory: f64::INFINITY,
        held,
    }
}

/// Time of a share if every neuron passes through the pipeline separately, with one worker that computes and
/// one that reads.
fn simulated(tables: &Tables, recorded: &Recorded<'_>, hot: usize) -> f64 {
    let ns = |time: f64| Some((time * 1e6) as u64);
    let steps = recorded.replay(hot, tables.held, tables.cluster).unwrap();
    let step = |demand: &Demand| {
        let job = |i: usize| {
            let is = |of: f64| i < of as usize;
            // Missing neurons are read first.
            let stages = [
                ns(tables.predict),
                ns(tables.read).filter(|_| is(demand.missing)),
                ns(tables.sparse).filter(|_| is(demand.active)),
                None,
                None,
            ];
            Job { block: 0, stages }
        };
        let jobs: Vec<Job> = (0..tables.active.len() - hot).map(job).collect();
        let cold = simulate(&jobs, 1, Order::Cluster).unwrap().makespan as f64 * 1e-6;
        tables.attention + cold.max(dense(tables, hot))
    };
    steps.iter().map(step).sum::<f64>() / steps.len() as f64
}

#[test]
fn planned_hot_share_matches_exhaustive_simulation() {
    let mut chosen = Vec::new();
    for (batch, sparsity, persistence) in [(1, 0.7, 0.9), (4, 0.7, 0.9), (1, 0.5, 0.6), (2, 0.85, 0.9)] {
        let trace = sampled(batch, sparsity, persistence);
        let recorded = Recorded { activations: &trace, warmup: 16 };
        for (held, dense, sparse, read) in
            [(64, 0.5, 1.0, 1.0), (32, 0.5, 1.0, 2.0), (32, 0.2, 1.0, 4.0), (48, 1.0, 1.0, 3.0)]
        {
            let tables = small(&trace, held, dense, sparse, read);
            let best = hot_share(&tables, Some(&recorded)).unwrap();
            let shares = (0..=64).step_by(8).filter(|&hot| hides(&tables, hot));
            let all: Vec<(f64, usize)> =
                shares.map(|hot| (simulated(&tables, &recorded, hot), hot)).collect();
            let least = all.iter().map(|a| a.0).fold(f64::INFINITY, f64::min);
            let own = all.iter().find(|a| a.1 == best.hot).unwrap().0;
            // At the beginning and the end of the simulation, one worker waits for the other.
            assert!(own <= least * 1.01, "{batch} {sparsity} {held} {dense} {read}: {best:?} {all:?}");
            chosen.push(best.hot);
        }
    }
    chosen.sort_unstable();
    chosen.dedup();
    assert!(chosen.len() > 3, "{chosen:?}");
}

#[test]
fn reads_depend_on_more_than_frequencies() {
    // Both traces have the same frequencies. In one, tokens are independent; in the other, neighbouring
    // tokens activate similar neurons.
    let [anew, same] = [0.0, 0.97].map(|p| sampled(1, 0.7, p));
    let hot = |trace: &Activations| {
        let tables = Tables { active: same.frequencies(), ..small(trace, 32, 0.9, 1.0, 6.0) };
        hot_share(&tables, Some(&Recorded { activations: trace, warmup: 16 })).unwrap()
    };
    let (anew, same) = (hot(&anew), hot(&same));
    assert!(same.hot < anew.hot && same.reads < anew.reads, "{same:?} {anew:?}");
}

#[test]
fn mismatched_activation_traces_are_rejected() {
    let trace = sampled(1, 0.7, 0.5);
    let tables = small(&trace, 32, 0.5, 1.0, 1.0);
    let error_of = |trace: &Activations, warmup| {
        hot_share(&tables, Some(&Recorded { activations: trace, warmup })).unwrap_err().to_string()
    };
    assert!(error_of(&Activations { neurons: 65, ..trace.clone() }, 0).contains("another layer"));
    assert!(error_of(&trace, 48).contains("no step"));
    let with = |step| Activations { tokens: vec![vec![(0, step)]], ..trace.clone() };
    assert!(error_of(&with(vec![64]), 0).contains("do not exist"));
    assert!(error_of(&with(vec![3, 2]), 0).contains("not in order"));
}

proptest! {
    #[test]
    fn no_other_hot_share_is_better(
        cluster in 1..9_usize, batch in 1..4_usize, persistence in 0.0..0.95_f64, sparsity in 0.1..0.9_f64,
        dense in proptest::collection::vec(0.0..3.0_f64, 1..6), sparse in 0.0..1.0_f64, predict in 0.0..0.1_f64, gate in 0.0..1.0_f64,
        attention in 0.0..4.0_f64, read in 0.0..2.0_f64, held in 0..80_usize, memory in 1.0..30.0_f64, is_recorded: bool
    ) {
        let trace = sampled(batch, sparsity, persistence);
        let dense = dense.into_iter().enumerate().map(|(i, t)| (1 + 7 * i, t)).collect();
        let held = if is_recorded { held } else { 64 };
        let tables = Tables {
            active: trace.frequencies(), cluster, dense, sparse, predict, gate, attention, bytes: 1.0, disk: 4.0, read, memory, held,
        };
        let recorded = Recorded { activations: &trace, warmup: 8 };
        let recorded = is_recorded.then_some(&recorded);
        let best = hot_share(&tables, recorded).unwrap();
        prop_assert!(hides(&tables, best.hot));
        for hot in (0..64).step_by(cluster).chain([64]).filter(|&h| hides(&tables, h)) {
            let other = time_of(&tables, recorded, hot).unwrap();
            prop_assert!((best.seconds, best.hot) <= (other.seconds, other.hot), "{best:?} {other:?}");
        }
    }
}
