//! Saturated tensors are counted and named, and measured margins prevent saturation.

use super::fixture::*;
use moec_qnn::exec::{Executor, share_of_spread};
use moec_qnn::quant::{Ranges, coded};
use moec_qnn::ranges::RangeObserver;
use std::sync::Arc;

#[test]
fn too_narrow_range_is_named_and_dominates_the_error() {
    let network = Arc::new(ffn(MatrixRounding::Eight, RELU, 64, &[96], 3).graph("b4", 4, 1).unwrap());
    let executor = Executor::new(network.clone(), None).unwrap();
    let rows = |seed| numbers(seed, 4 * 64);
    let mut watch = RangeObserver::default();
    for i in 0..8 {
        watch.run(&executor, &[&rows(i + 40)], i % 2 == 1).unwrap();
    }
    let want = executor.run(&[&rows(1)]).unwrap().outputs.remove(0);
    let of = |ranges: &Ranges| {
        let codes = coded(&network, ranges).unwrap();
        let outcome = Executor::new(Arc::new(codes), None).unwrap().run(&[&rows(1)]).unwrap();
        (share_of_spread(&outcome.outputs[0], &want), outcome.saturated)
    };
    let (measured, saturated) = of(&watch.ranges(1.25));
    assert!(measured < 1e-3, "{measured}");
    assert!(saturated.iter().all(|s| s.count * 1000 < s.of), "{saturated:?}");
    let mut narrow: Ranges = watch.ranges(1.25);
    let h = narrow.get_mut("e3.c0.h").unwrap();
    *h = h.widened(0.2);
    let (off, saturated) = of(&narrow);
    let named: Vec<_> = saturated.iter().filter(|s| s.count * 1000 >= s.of).map(|s| &*s.tensor).collect();
    assert_eq!(named, ["e3.c0.h"]);
    assert!(saturated.iter().any(|s| s.to_string().starts_with("`e3.c0.h` saturates in ")));
    assert!(off > 20.0 * measured, "{off} {measured}");
}

#[test]
fn tensor_without_a_range_is_rejected_by_name() {
    let network = ffn(MatrixRounding::Eight, RELU, 16, &[16], 1).graph("b1", 1, 1).unwrap();
    let error = coded(&network, &Ranges::new()).unwrap_err().to_string();
    assert!(error.contains("tensor `x`: its range is unknown"), "{error}");
}
