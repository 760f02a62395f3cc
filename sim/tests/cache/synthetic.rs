//! Tests of traces with a given popularity.

use super::*;
use moec_sim::cache::synthetic::{popularity, trace};
use proptest::prelude::*;

const CSV: &str = "model,domain,layer,expert,count\na,c4,0,0,600\na,c4,0,1,300\na,c4,0,2,80\na,c4,0,3,20\n\
                   a,c4,7,3,5\na,c4,7,0,5\na,c4,7,1,5\na,c4,7,2,5\nb,c4,first,0,1\na,web,0,0,9\n";

/// Share of the tokens that chose each expert of a layer.
fn shares(trace: &Trace, layer: usize) -> Vec<f64> {
    let mut shares = vec![0.0; trace.experts().layers()[layer].experts];
    for (_, _, step) in trace.steps().filter(|(_, l, _)| *l == layer) {
        for &e in step.chosen {
            shares[usize::from(e)] += 1.0 / trace.tokens() as f64;
        }
    }
    shares
}

#[test]
fn counts_are_read_by_model_and_domain() {
    let found = popularity(CSV, "a", "c4").unwrap();
    assert_eq!(found, [(0, vec![600.0, 300.0, 80.0, 20.0]), (7, vec![5.0; 4])]);
    for (csv, model) in [(CSV, "c"), (CSV, "b"), ("h\na,c4,0\n", "a"), ("h\na,c4,0,x,1\n", "a"), ("", "a")] {
        assert!(popularity(csv, model, "c4").is_err(), "{csv} {model}");
    }
}

#[test]
fn experts_are_as_popular_as_requested() {
    // The busiest of 32 experts is used by two thirds of the tokens.
    let falling: Vec<f64> = (0..32).map(|e| 1.0 / (2.0 + f64::from(e))).collect();
    let sum: f64 = falling.iter().sum();
    let popularity = vec![(0, falling.clone()), (4, vec![1.0; 32])];
    for persistence in [0.0, 0.6] {
        let trace = trace(&experts(4, 32, 4), &popularity, persistence, 8000, 5).unwrap();
        // The popularity of layer 1 is interpolated mostly from layer 0, that of layer 3 mostly from layer 4.
        for (got, f) in shares(&trace, 1).iter().zip(&falling) {
            assert!((got - 4.0 * f / sum).abs() < 0.03, "{got} instead of {}", 4.0 * f / sum);
        }
        assert!(shares(&trace, 3).iter().all(|got| (got - 0.125).abs() < 0.03));
    }
}

#[test]
fn persistence_makes_choices_repeat() {
    let even = vec![(0, vec![1.0; 16])];
    let repeats = |persistence: f64| {
        let trace = trace(&experts(1, 16, 4), &even, persistence, 4000, 9).unwrap();
        let again = |t: usize| {
            let before = trace.step(t - 1, 0).chosen;
            trace.step(t, 0).chosen.iter().filter(|e| before.contains(e)).count()
        };
        (1..4000).map(again).sum::<usize>() as f64 / (4.0 * 3999.0)
    };
    let found = [0.0, 0.5, 0.9].map(repeats);
    // By chance four of sixteen choices repeat.
    assert!((found[0] - 0.25).abs() < 0.02, "{found:?}");
    assert!(found[1] > found[0] + 0.05 && found[2] > found[1] + 0.1, "{found:?}");
}

#[test]
fn impossible_synthetic_traces_are_rejected() {
    let even = vec![(0, vec![1.0; 4])];
    for (of, popularity, persistence) in [
        (experts(1, 4, 1), &even, 1.0),
        (experts(1, 4, 1), &even, -0.1),
        (experts(1, 5, 1), &even, 0.0),
        (experts(1, 4, 1), &vec![], 0.0),
        (experts(1, 4, 1), &vec![(0, vec![0.0; 4])], 0.0),
        (experts(1, 4, 1), &vec![(0, vec![1.0, -1.0, 1.0, 1.0])], 0.0),
    ] {
        assert!(trace(&of, popularity, persistence, 1, 0).is_err());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]
    #[test]
    fn equal_seeds_give_equal_traces(seed in any::<u64>(), persistence in 0.0_f64..0.99) {
        let even = vec![(0, vec![1.0; 8])];
        let make = |seed| trace(&experts(2, 8, 2), &even, persistence, 20, seed).unwrap();
        prop_assert_eq!(make(seed), make(seed));
        prop_assert_ne!(make(seed), make(seed.wrapping_add(1)));
        let top = make(seed);
        for (_, _, step) in top.steps() {
            let first = [step.ranked[0].0, step.ranked[1].0];
            prop_assert_eq!(first.as_slice(), step.chosen);
            prop_assert!(step.ranked.iter().map(|r| r.1).sum::<f32>() <= 1.0001);
        }
    }
}
