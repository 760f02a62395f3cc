//! Tests of the importance of channels, through expressions of weights.

use super::*;
use crate::importance::{ENOUGH, too_few};
use moec_cpu::WeightImportance;
use moec_ir::{Axis, Encoding, Format, Leaf, Module, Source, Weight, WeightClass, WeightExpr};
use std::ops::Range;

/// Every number is 2.
struct Twos;

impl Source for Twos {
    fn read(
        &self,
        _: &Leaf,
        _: usize,
        _: Range<usize>,
        _: Range<usize>,
        out: &mut [f32],
    ) -> std::result::Result<(), Box<dyn std::error::Error + Send + Sync>> {
        out.fill(2.0);
        Ok(())
    }
}

fn leaf(tensor: &str, shape: &[usize]) -> WeightExpr {
    WeightExpr::Leaf(Leaf { tensor: tensor.into(), shape: shape.into(), encoding: Encoding::Plain })
}

fn weight(name: &str, expr: WeightExpr) -> Weight {
    let shape = expr.shape().unwrap();
    Weight { name: name.into(), shape, class: WeightClass::Attention, format: Format::F32, expr }
}

/// Two matrices with one input, of mean squares 3 and 1, and two experts, one of them with few tokens.
fn profile() -> Profile {
    let seen = |tokens: &[u64], sums: &[f32]| Moments::from_sums(2, tokens.to_vec(), sums).unwrap();
    let weights = [
        ("gate".to_owned(), seen(&[100], &[300.0, 100.0])),
        ("up".to_owned(), seen(&[100], &[300.0, 100.0])),
        ("experts".to_owned(), seen(&[ENOUGH, ENOUGH - 1], &[64.0, 64.0, 63.0, 0.0])),
    ];
    Profile { weights: weights.into(), ..example() }
}

fn importance(lowered: Vec<Weight>, rewritten: Weight) -> Result<Option<Vec<f32>>> {
    let module = |weights| Module { weights, ..Module::default() };
    let (matrices, lowered, rewritten) = (rewritten.matrices(), module(lowered), module(vec![rewritten]));
    let found = Importance::new(&profile(), &lowered, &rewritten, &Twos, |_| true)?;
    assert_eq!(found.importance("w", matrices), None);
    Ok((0..matrices)
        .map(|matrix| found.importance("w", matrix))
        .collect::<Option<Vec<_>>>()
        .map(|c| c.concat()))
}

fn of(expr: WeightExpr) -> Option<Vec<f32>> {
    let lowered = vec![
        weight("gate", leaf("g", &[4, 2])),
        weight("up", leaf("u", &[4, 2])),
        weight("experts", leaf("e", &[2, 4, 2])),
        weight("norm", leaf("n", &[2])),
    ];
    importance(lowered, weight("w", expr)).unwrap()
}

#[allow(clippy::ref_option, reason = "what is looked at is an option")]
fn near(got: &Option<Vec<f32>>, want: &[f32]) {
    let got = got.as_ref().expect("there is an importance");
    assert_eq!(got.len(), want.len());
    assert!(got.iter().zip(want).all(|(a, b)| (a - b).abs() < 0.02), "{got:?} instead of {want:?}");
}

#[test]
fn importance_follows_the_expression_of_a_rewritten_weight() {
    let (gate, up) = (leaf("g", &[4, 2]), leaf("u", &[4, 2]));
    near(&of(gate.clone()), &[1.5, 0.5]);
    let joined = WeightExpr::Concat { axis: Axis::Rows, of: vec![gate.clone(), up.clone()] };
    near(&of(joined), &[1.5, 0.5]);
    let rows = WeightExpr::Slice { axis: Axis::Rows, start: 1, step: 1, len: 2, of: Box::new(gate.clone()) };
    near(&of(rows), &[1.5, 0.5]);
    let wide = WeightExpr::Concat { axis: Axis::Cols, of: vec![gate.clone(), up] };
    near(&of(wide), &[1.5, 0.5, 1.5, 0.5]);
    let by = Box::new(WeightExpr::Const(vec![1.0, 0.5]));
    // The input of the scaled matrix is the recorded one divided by the factors: 3 and 4.
    near(&of(WeightExpr::ScaleCols { of: Box::new(gate), by }), &[6.0 / 7.0, 8.0 / 7.0]);
    assert_eq!(of(leaf("other", &[4, 2])), None);
}

#[test]
fn importance_of_a_rarely_used_expert_is_that_of_its_layer() {
    // Mean over both: 127/127 and 64/127.
    near(&of(leaf("e", &[2, 4, 2])), &[1.0, 1.0, 1.33, 0.67]);
}

/// Experts of a host, and a whole weight that is joined of those of all hosts.
#[test]
fn importance_of_some_experts_is_that_of_the_whole_weight() {
    let some = |first: usize| {
        let joined = Box::new(WeightExpr::Join(Box::new(leaf("e", &[2, 4, 2]))));
        let rows = WeightExpr::Slice { axis: Axis::Rows, start: first * 4, step: 1, len: 4, of: joined };
        WeightExpr::Split { heads: 1, of: Box::new(rows) }
    };
    near(&of(some(0)), &[1.0, 1.0]);
    near(&of(some(1)), &[1.33, 0.67]);
    let parts = [0, 1].map(|first| WeightExpr::Join(Box::new(some(first)))).to_vec();
    let rows = WeightExpr::Concat { axis: Axis::Rows, of: parts };
    near(&of(WeightExpr::Split { heads: 2, of: Box::new(rows) }), &[1.0, 1.0, 1.33, 0.67]);
}

#[test]
fn importance_is_never_zero() {
    let mut profile = profile();
    profile.weights = [("w".to_owned(), Moments::from_sums(2, vec![100], &[100.0, 0.0]).unwrap())].into();
    let module = Module { weights: vec![weight("w", leaf("w", &[4, 2]))], ..Module::default() };
    let found = Importance::new(&profile, &module, &module, &Twos, |_| true).unwrap();
    let channels = found.importance("w", 0).unwrap();
    assert!(channels[1] > 0.0 && channels[1] < 0.02, "{channels:?}");
    let none = Importance::new(&profile, &module, &module, &Twos, |_| false).unwrap();
    assert_eq!(none.importance("w", 0), None);
}

#[test]
fn importance_of_another_shape_is_refused() {
    let e = importance(vec![weight("gate", leaf("g", &[4, 3]))], weight("w", leaf("g", &[4, 3])));
    assert!(e.expect_err("three channels").to_string().contains("`gate`"));
}

#[test]
fn experts_with_little_text_are_named() {
    let warning = too_few(&example()).unwrap();
    assert!(warning.starts_with("1 of 2 experts have fewer than 64 tokens (1 in layer 0)"), "{warning}");
}
