//! Expert groups and dense networks.

use crate::interpret::{Rounding, States, call, difference};
use crate::store::{Store, ane, padded};
use moec_coreml::emit::{Dense, EmitError, Gate, Limits, Networks, Raw};
use moec_coreml::program::Rules;
use moec_ir::eval::{self, Tensor};
use moec_ir::{Activation, Glu, Op};

#[test]
fn printed_expert_group_matches_its_snapshot() {
    let group = Store::default().swiglu(2);
    insta::assert_snapshot!(group.emit(&ane()).unwrap());
}

#[test]
fn padded_last_axis_prints_as_grouped_convolutions() {
    let group = Store::default().swiglu(2);
    insta::assert_snapshot!(group.emit(&padded()).unwrap());
}

/// Reference results of expert `e` for these rows.
fn reference(store: &Store, all: &Networks, e: usize, glu: Glu, rows: &[f32], hidden: usize) -> Vec<f32> {
    let op = |op: &Op, args: &[&Tensor]| {
        eval::op(op, args.iter().map(|t| eval::Arg::Tensor(t)).collect()).unwrap().remove(0)
    };
    let x = Tensor::f32([rows.len() / hidden, hidden], rows.to_vec());
    let inner = all.down.shape[1];
    let own = |raw: &Raw, each: usize| store.tensor(&raw.rows(e * each, each));
    let linear = |x: &Tensor, weight: &Raw, bias: Option<&Raw>, each: usize| {
        let weights: Vec<Tensor> =
            [Some(weight), bias].into_iter().flatten().map(|raw| own(raw, each)).collect();
        let args: Vec<&Tensor> = [x].into_iter().chain(&weights).collect();
        op(&Op::Linear { bias: bias.is_some() }, &args)
    };
    let [gate_bias, up_bias] = all.gate_up_bias.as_ref().map_or([None, None], |b| [Some(&b[0]), Some(&b[1])]);
    let gate = linear(&x, &all.gate, gate_bias, inner);
    let up = linear(&x, &all.up, up_bias, inner);
    let joined = op(&Op::Glu(glu), &[&gate, &up]);
    linear(&joined, &all.down, all.down_bias.as_ref(), hidden).as_f32().to_vec()
}

#[test]
fn expert_groups_match_the_reference_in_every_variant() {
    let gates = Activation::ALL.map(Glu::Gated);
    let glus = gates.into_iter().chain([
        Glu::DRelu,
        Glu::Limited { limit: 0.25 },
        Glu::Clamped { alpha: 1.702, limit: 0.5 },
    ]);
    for glu in glus {
        // A convolution has room for two experts of 48 channels, so the third has one of its own.
        let narrow = Limits { rules: Rules { extent: 96, ..padded().rules }, ..padded() };
        for (bias, limits) in [(false, ane()), (true, ane()), (true, padded()), (true, narrow)] {
            let mut store = Store::default();
            let group = store.group(3, glu, bias);
            let program = group.emit(&limits).unwrap();
            for capacity in [16, 32] {
                let x = store.rows(3 * capacity * group.hidden);
                let name = format!("cap{capacity}");
                let got = call(&program, &name, &store, &[("x", &x)], &mut States::new(), Rounding::None);
                let slices = x.chunks(capacity * group.hidden).enumerate();
                let of = |(e, rows)| reference(&store, &group.weights, e, glu, rows, group.hidden);
                let want: Vec<f32> = slices.flat_map(of).collect();
                let error = difference(&got["y"], &want);
                assert!(error < 1e-6, "{glu:?}, biases {bias}, {limits:?}, capacity {capacity}: {error}");
            }
        }
    }
}

#[test]
fn a_shared_expert_is_gated_by_a_number_per_row() {
    for limits in [ane(), padded()] {
        let mut store = Store::default();
        let glu = Glu::Gated(Activation::Silu);
        let group = store.group(1, glu, false);
        let gate = store.matrix(1, group.hidden);
        let dense = Dense {
            name: "layer0.shared".into(),
            hidden: group.hidden,
            intermediate: group.intermediate,
            glu,
            weights: group.weights.clone(),
            gate: Some(Gate { weight: gate.clone() }),
            rows: vec![16],
        };
        let program = dense.emit(&limits).unwrap();
        let x = store.rows(16 * dense.hidden);
        let got = call(&program, "rows16", &store, &[("x", &x)], &mut States::new(), Rounding::None);
        let mut want = reference(&store, &dense.weights, 0, glu, &x, dense.hidden);
        let gate = store.tensor(&gate);
        for (x, y) in x.chunks(dense.hidden).zip(want.chunks_mut(dense.hidden)) {
            let logit: f32 = x.iter().zip(gate.as_f32()).map(|(x, w)| x * w).sum();
            for y in y {
                *y /= 1.0 + (-logit).exp();
            }
        }
        assert!(difference(&got["y"], &want) < 1e-6);
    }
}

#[test]
fn experts_without_a_gate_are_refused() {
    let group = Store::default().group(1, Glu::Ungated(Activation::Relu2), false);
    let error = group.emit(&ane()).unwrap_err().to_string();
    assert!(error.contains("a network without a gate"), "{error}");
}

#[test]
fn oversized_group_is_rejected_with_the_fitting_size() {
    let group = Store::default().swiglu(8);
    // Per expert three matrices of 32 × 48, each with 64 bytes of description; 64 for the file.
    let expert = 3 * (2 * 32 * 48 + 64);
    let whole = group.emit(&ane()).unwrap().weight_bytes();
    assert_eq!(whole, 8 * expert + 64);
    let limits = |graph_bytes| Limits { graph_bytes, ..ane() };
    assert!(group.emit(&limits(whole)).is_ok());
    for (bytes, most) in [(whole - 1, 7), (5 * expert + 64, 5), (expert + 63, 0)] {
        let error = group.emit(&limits(bytes)).unwrap_err();
        let EmitError::TooLarge { graph, bytes: found, limit, parts, fits, .. } = &error else {
            panic!("{error}")
        };
        assert_eq!((&**graph, *found, *limit, *parts, *fits), ("layer0.group0", whole, bytes, 8, most));
    }
    insta::assert_snapshot!(group.emit(&limits(whole - 1)).unwrap_err(), @r"
    graph `layer0.group0` has 75328 bytes of weights (8 experts); a graph may have 75327
    hint: 7 experts fit in one graph
    ");
}

#[test]
fn mismatched_capacities_and_weights_are_rejected() {
    let mut store = Store::default();
    for (capacities, what) in [
        (vec![], "there are no capacities"),
        (vec![16, 24], "24 is not one of the possible capacities"),
        (vec![16, 32, 16], "16 is not one of the possible capacities"),
        (vec![0], "0 is not one of the possible capacities"),
    ] {
        let mut group = store.swiglu(1);
        group.capacities = capacities;
        let error = group.emit(&ane()).unwrap_err().to_string();
        assert!(error.contains(what) && error.contains("different multiples of 16"), "{error}");
    }
    let mut group = store.swiglu(2);
    group.weights.down.shape = vec![64, 47];
    let error = group.emit(&ane()).unwrap_err().to_string();
    assert_eq!(error, "graph `layer0.group0`: `down` is [64, 47], expected [64, 48]");
}
