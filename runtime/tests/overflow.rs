//! Tokens past a capacity: no expert gets more than fits, spilling loses no token, and pruned tokens have the
//! lowest saliency.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

use moec_ir::placement::{Expected, ExpertTable, Placement};
use moec_runtime::exec::overflow::{
    Choices, Decider, Fate, Misrouted, Overflow, OverflowCounters, Overflowed,
};
use proptest::prelude::*;

fn decide(
    ids: &[i32],
    k: usize,
    saliency: &[f32],
    capacities: &[u32],
    policy: Overflow,
) -> (Vec<Fate>, OverflowCounters) {
    let (mut decider, mut counters) = (Decider::default(), OverflowCounters::default());
    let choices = Choices { ids, k, saliency };
    let fates = decider.decide(&choices, capacities, policy, &mut counters).unwrap().to_vec();
    (fates, counters)
}

#[test]
fn least_salient_tokens_are_pruned_first() {
    use Fate::{Pruned as P, Spilled, Stays as S};
    let ids = [0, 0, 0, 1, 0];
    assert_eq!(decide(&ids, 1, &[1.0, 3.0, 2.0, 0.0, 2.0], &[2, 2], Overflow::Prune).0, [P, S, S, S, P]);
    assert_eq!(decide(&ids, 1, &[1.0; 5], &[2, 1], Overflow::Prune).0, [S, S, P, S, P]);
    assert_eq!(decide(&ids, 1, &[1.0; 5], &[0, 1], Overflow::Prune).0, [S; 5]);
    assert_eq!(decide(&ids, 1, &[1.0; 5], &[3, 1], Overflow::Spill).0[4], Spilled);
    // NaN is kept: it is an error that must become visible.
    assert_eq!(decide(&[0, 0], 1, &[9.0, f32::NAN], &[1], Overflow::Prune).0, [P, S]);
}

/// Counts of a layer that expects 1 % of its rows past capacities.
fn overflowed(routed: u64, spilled: u64) -> Overflowed {
    let expected = Expected { imbalance: 1.0, overflow: 0.01, padding: 0.0 };
    let table = ExpertTable {
        layer: 3,
        k: 2,
        tiers: vec![16],
        expected: Some(expected),
        groups: Vec::new(),
        experts: Vec::new(),
    };
    let placement = Placement { chunk: 64, experts: vec![table], ..Placement::default() };
    let counters = OverflowCounters { routed, spilled, ..OverflowCounters::default() };
    Overflowed::of(&[(3, counters)], &placement).unwrap()
}

#[test]
fn significant_excess_overflow_is_reported() {
    // As expected; twice as much with few rows; twice as much with many rows.
    assert!(!overflowed(100_000, 1000).exceeds());
    assert!(!overflowed(10_000, 200).exceeds());
    let over = overflowed(1_000_000, 20_000);
    assert!(over.exceeds());
    assert_eq!(
        over.to_string(),
        "2.00 % of the rows of experts found no room and ran on the CPU; 1.00 % were expected"
    );
    assert!(!overflowed(0, 0).exceeds());
    assert_eq!(Overflowed::of(&[], &Placement::default()), None);
}

#[test]
fn rates_are_counted() {
    let ids = [0, 1, 0, 1, 0, 1, 0, 2];
    let (_, mut counters) = decide(&ids, 2, &[1.0; 4], &[2, 0, 16], Overflow::Prune);
    counters.executed(2, [2]);
    counters.executed(16, [1]);
    assert_eq!(counters, OverflowCounters { routed: 8, pruned: 2, spilled: 0, rows: 18, padding: 15 });
    assert_eq!((counters.drop_rate(), counters.spill_rate()), (0.25, 0.0));
    let mut both = counters;
    both.add(&counters);
    assert_eq!((both.routed, both.padding_rate()), (16, counters.padding_rate()));
    assert_eq!(OverflowCounters::default().drop_rate() + OverflowCounters::default().padding_rate(), 0.0);
}

#[test]
fn invalid_overflow_inputs_are_rejected() {
    let (mut decider, mut counters) = (Decider::default(), OverflowCounters::default());
    let mut run = |ids: &[i32], k, rows: usize| {
        let saliency = vec![0.0; rows];
        decider
            .decide(&Choices { ids, k, saliency: &saliency }, &[1, 1], Overflow::Prune, &mut counters)
            .err()
    };
    assert_eq!(run(&[0, 2], 1, 2), Some(Misrouted::Expert { expert: 2, experts: 2 }));
    assert_eq!(run(&[0, -1], 1, 2), Some(Misrouted::Expert { expert: -1, experts: 2 }));
    assert_eq!(run(&[0, 1, 0], 2, 2), Some(Misrouted::Shape { choices: 3, k: 2, rows: 2 }));
    assert_eq!(run(&[], usize::MAX, 2), Some(Misrouted::Shape { choices: 0, k: usize::MAX, rows: 2 }));
    assert_eq!(run(&[], 2, 0), None);
    assert_eq!(counters, OverflowCounters::default());
}

/// Routing of a chunk with distinct experts per token, saliency with ties, capacities with and without a
/// limit.
fn chunk() -> impl Strategy<Value = (Vec<i32>, usize, Vec<f32>, Vec<u32>)> {
    (1_usize..=160, 0_usize..100).prop_flat_map(|(experts, rows)| {
        let k = experts.min(8);
        let choice = prop::sample::subsequence((0..experts as i32).collect::<Vec<_>>(), k);
        let ids = prop::collection::vec(choice, rows).prop_map(|rows| rows.concat());
        let saliency = prop::collection::vec((0_u8..6).prop_map(f32::from), rows);
        let capacities = prop::collection::vec(prop::sample::select(vec![0, 1, 2, 16, 32]), experts);
        (ids, Just(k), saliency, capacities)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn capacities_are_respected_and_filled_before_overflow(
        (ids, k, saliency, capacities) in chunk(),
        spill in any::<bool>(),
    ) {
        let policy = if spill { Overflow::Spill } else { Overflow::Prune };
        let (fates, counters) = decide(&ids, k, &saliency, &capacities, policy);
        prop_assert_eq!(fates.len(), ids.len());
        let mut gone = 0;
        for (e, &capacity) in capacities.iter().enumerate() {
            let of = |fate: Fate| ids.iter().zip(&fates).filter(|(id, f)| **id as usize == e && **f == fate).count();
            let load = ids.iter().filter(|id| **id as usize == e).count();
            let room = if capacity == 0 { load } else { capacity as usize };
            prop_assert_eq!(of(Fate::Stays), load.min(room));
            // Spilling prunes no pair, and pruning spills none.
            prop_assert_eq!(of(if spill { Fate::Pruned } else { Fate::Spilled }), 0);
            gone += load - load.min(room);
        }
        prop_assert_eq!(counters.routed, ids.len() as u64);
        prop_assert_eq!((counters.pruned, counters.spilled), if spill { (0, gone as u64) } else { (gone as u64, 0) });
    }

    #[test]
    fn pruned_rows_have_the_lowest_saliency((ids, k, saliency, capacities) in chunk()) {
        let (fates, _) = decide(&ids, k, &saliency, &capacities, Overflow::Prune);
        for a in 0..ids.len() {
            for b in 0..ids.len() {
                if ids[a] == ids[b] && fates[a] == Fate::Pruned && fates[b] == Fate::Stays {
                    let (x, y) = (saliency[a / k], saliency[b / k]);
                    prop_assert!(x < y || (x == y && a > b), "{x} at {a} went, {y} at {b} stayed");
                }
            }
        }
        // A decider that is used again gives the same result.
        let mut decider = Decider::default();
        for _ in 0..2 {
            let choices = Choices { ids: &ids, k, saliency: &saliency };
            let again = decider.decide(&choices, &capacities, Overflow::Prune, &mut OverflowCounters::default()).unwrap();
            prop_assert_eq!(again, &fates[..]);
        }
    }
}
