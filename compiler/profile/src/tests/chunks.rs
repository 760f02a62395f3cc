//! Tests of loads by chunk, and of their overflow and padding at given capacities.

use super::*;
use crate::loads::{Account, loads};

#[test]
fn chunk_loads_are_joined_and_scaled_to_the_build() {
    let p = example();
    // As read: the half chunk counts, scaled up.
    let own = loads(&p, 64).unwrap();
    assert_eq!(own.layers[0].samples, [[63, 1], [64, 0]]);
    assert!(own.origin.contains("1 of 2 scaled to 64"), "{}", own.origin);
    assert_eq!(loads(&p, 32).unwrap().layers[0].samples, [[32, 1], [32, 0]]);
    // Joined to one of 100 tokens, scaled to 128; halves round up.
    let joined = loads(&p, 128).unwrap();
    assert_eq!(joined.layers[0].samples, [[127, 2]]);
    assert_eq!(
        loads(&Profile { trace: Trace::default(), ..p }, 64).unwrap_err().fault,
        moec_base::Fault::Input
    );
}

#[test]
fn short_last_chunk_is_ignored() {
    let mut p = example();
    p.trace.sequences = vec![vec![chunk(64, 63), chunk(31, 31)]];
    assert_eq!(loads(&p, 64).unwrap().layers[0].samples, [[63, 1]]);
    p.trace.sequences = vec![vec![chunk(31, 31)]];
    assert_eq!(loads(&p, 64).unwrap().layers[0].samples, [[64, 0]], "there is nothing else");
}

#[test]
fn quantiles_and_means_are_those_of_the_samples() {
    let mut layer = loads(&example(), 64).unwrap().layers.remove(0);
    layer.samples = vec![vec![4, 0], vec![1, 3], vec![2, 2], vec![3, 1]];
    assert_eq!([0.0, 0.25, 0.5, 0.75, 1.0].map(|q| layer.quantile(0, q)), [1, 1, 2, 3, 4]);
    assert_eq!((layer.mean(0, 100), layer.mean(1, 100)), (99.0, 1.0));
    assert_eq!(layer.imbalance(), 99.0 * 2.0 / 100.0);
}

/// NPUMoE, §4.2: four experts with 64, 32, 32 and 0 tokens, and with room for 64 each.
#[test]
fn rows_past_a_capacity_and_padding_are_counted() {
    let mut layer = loads(&example(), 64).unwrap().layers.remove(0);
    (layer.chosen, layer.samples) = (vec![64, 32, 32, 0], vec![vec![64, 32, 32, 0]]);
    let grouped = layer.account(&|_| Some(64), &|_| 0);
    assert_eq!(grouped, Account { routed: 128, overflow: 0, rows: 256, padding: 128 });
    // In its own graph, the expert without tokens is not launched.
    let separate = layer.account(&|_| Some(48), &|e| e);
    assert_eq!(separate, Account { routed: 128, overflow: 16, rows: 144, padding: 32 });
    let free = layer.account(&|e| (e > 0).then_some(16), &|e| e);
    assert_eq!((free.overflow, free.rows), (32, 32));
    assert_eq!((separate.and(separate).overflow_rate(), separate.padding_rate()), (0.125, 32.0 / 144.0));
}

/// Capacities that cover all of their own text do not cover other text.
#[test]
fn held_out_overflow_counts_unseen_text() {
    let mut layer = loads(&example(), 64).unwrap().layers.remove(0);
    // Ten chunks of two texts: the second loads expert 1 twice as much.
    let sample = |i: usize| if i < 8 { vec![40, 20] } else { vec![20, 40] };
    layer.samples = (0..10).map(sample).collect();
    layer.chosen = vec![360, 240];
    let capacity = |rows: [u32; 2]| move |e: usize| Some(rows[e]);
    assert_eq!(layer.account(&capacity([40, 40]), &|e| e).overflow, 0);
    // Without the last fold, expert 1 has room for 20 rows of the 40 of both its chunks.
    assert_eq!(layer.held_out_overflow(&capacity([40, 40])), 40.0 / 600.0);
    // With half as much room again as its loads, it has room for 30.
    assert_eq!(layer.held_out_overflow(&capacity([60, 60])), 20.0 / 600.0);
    assert_eq!(layer.held_out_overflow(&|_| None), 0.0);
    // Only equal loads leave no overflow on held-out text.
    layer.samples = vec![vec![40, 20]; 10];
    assert_eq!(layer.held_out_overflow(&capacity([40, 20])), 0.0);
    layer.samples.truncate(1);
    assert_eq!(layer.held_out_overflow(&capacity([30, 20])), 10.0 / 60.0);
}
