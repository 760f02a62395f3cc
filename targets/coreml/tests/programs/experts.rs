//! Groups of experts and dense networks.

use crate::interpret::{Rounding, States, call, difference};
use crate::store::{Store, ane};
use moec_coreml::emit::{Dense, EmitError, Expert, Gate, Layout, Limits};
use moec_ir::eval::{self, Tensor};
use moec_ir::{Activation, Glu, Op};

#[test]
fn a_group_reads_as_slices_experts_and_their_join() {
    let group = Store::default().swiglu(2);
    insta::assert_snapshot!(group.emit(&ane()).unwrap());
}

/// What the reference says of rows that an expert meets.
fn reference(store: &Store, expert: &Expert, glu: Glu, rows: &[f32], hidden: usize) -> Vec<f32> {
    let op = |op: &Op, args: &[&Tensor]| {
        eval::op(op, args.iter().map(|t| eval::Arg::Tensor(t)).collect()).unwrap().remove(0)
    };
    let x = Tensor::f32([rows.len() / hidden, hidden], rows.to_vec());
    let weights = |weight, bias: &Option<_>| -> Vec<Tensor> {
        [Some(weight), bias.as_ref()].into_iter().flatten().map(|raw| store.tensor(raw)).collect()
    };
    let (gate_up, down) =
        (weights(&expert.gate_up, &expert.gate_up_bias), weights(&expert.down, &expert.down_bias));
    let bias = gate_up.len() == 2;
    let inner = op(&Op::LinearGlu { glu, bias }, &[&[&x], &*gate_up.iter().collect::<Vec<_>>()].concat());
    let y = op(&Op::Linear { bias }, &[&[&inner], &*down.iter().collect::<Vec<_>>()].concat());
    y.as_f32().to_vec()
}

#[test]
fn a_group_gives_each_expert_its_slice_whatever_the_activation_the_biases_and_the_layout() {
    let gates = Activation::ALL.map(Glu::Gated);
    let glus = gates.into_iter().chain([Glu::DRelu, Glu::Clamped { alpha: 1.702, limit: 0.5 }]);
    for glu in glus {
        for (bias, layout) in [(false, Layout::Rows), (true, Layout::Rows), (true, Layout::Columns)] {
            let mut store = Store::default();
            let group = store.group(3, glu, bias, layout);
            let program = group.emit(&ane()).unwrap();
            for capacity in [16, 32] {
                let x = store.rows(3 * capacity * group.hidden);
                let name = format!("cap{capacity}");
                let got = call(&program, &name, &store, &[("x", &x)], &mut States::new(), Rounding::None);
                let slices = x.chunks(capacity * group.hidden).zip(&group.experts);
                let want: Vec<f32> =
                    slices.flat_map(|(rows, e)| reference(&store, e, glu, rows, group.hidden)).collect();
                let error = difference(&got["y"], &want);
                assert!(error < 1e-6, "{glu:?}, biases {bias}, {layout:?}, capacity {capacity}: {error}");
            }
        }
    }
}

#[test]
fn a_shared_expert_is_gated_by_a_number_per_row() {
    for layout in [Layout::Rows, Layout::Columns] {
        let mut store = Store::default();
        let glu = Glu::Gated(Activation::Silu);
        let group = store.group(1, glu, false, layout);
        let gate = store.matrix(1, group.hidden);
        let dense = Dense {
            name: "layer0.shared".into(),
            hidden: group.hidden,
            intermediate: group.intermediate,
            glu,
            weights: group.experts[0].clone(),
            gate: Some(Gate { weight: gate.clone() }),
            rows: vec![16],
            layout,
        };
        let program = dense.emit(&ane()).unwrap();
        let x = store.rows(16 * dense.hidden);
        let got = call(&program, "rows16", &store, &[("x", &x)], &mut States::new(), Rounding::None);
        let mut want = reference(&store, &dense.weights, glu, &x, dense.hidden);
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
fn a_group_over_the_limit_is_refused_with_what_fits() {
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
fn capacities_and_weights_that_do_not_fit_are_refused() {
    let mut store = Store::default();
    for (capacities, what) in [
        (vec![], "there are no capacities"),
        (vec![16, 24], "24 is not among possible capacities"),
        (vec![16, 32, 16], "16 is not among possible capacities"),
        (vec![0], "0 is not among possible capacities"),
    ] {
        let mut group = store.swiglu(1);
        group.capacities = capacities;
        let error = group.emit(&ane()).unwrap_err().to_string();
        assert!(error.contains(what) && error.contains("different multiples of 16"), "{error}");
    }
    let mut group = store.swiglu(2);
    group.experts[1].down.shape = vec![32, 47];
    let error = group.emit(&ane()).unwrap_err().to_string();
    assert_eq!(error, "graph `layer0.group0`: `expert1.down` is [32, 47], [32, 48] is wanted");
}
