//! Linear layers, the tensor unit's main operation: 16-bit activations, 8- and 4-bit weights with one scale
//! per row.

use crate::support::{
    Weights, installation, linear, load, newest, numbers, product, relative, rounded, store, worker,
};
use moec_qnn_sys::{
    Context, DType, Data, GraphSpec, Node, Quant, SNAPDRAGON_8_GEN_3, SNAPDRAGON_8_PLUS_GEN_1, Scalar, Soc,
};

/// Compiles and executes a linear layer; returns its relative error.
fn off(soc: Soc, bits: u32, margin: f64) -> Option<f64> {
    let installation = installation()?;
    let case = linear("linear", 4, 256, 512, bits, 7, margin);
    let mut worker = worker(&installation, soc, false);
    let graph = worker.compose(&case.spec).unwrap();
    let out = worker.execute(graph, vec![case.x]).unwrap();
    Some(relative(&load(&out[0], DType::U16, &case.quant), &case.y))
}

/// The newer chip computes with all 16 bits, the older one with fewer.
#[test]
fn linear_layers_run_with_8_and_4_bit_weights() {
    for (soc, bits, bound) in [
        (SNAPDRAGON_8_GEN_3, 8, 2e-4),
        (SNAPDRAGON_8_GEN_3, 4, 4e-4),
        (SNAPDRAGON_8_PLUS_GEN_1, 8, 2e-3),
        (SNAPDRAGON_8_PLUS_GEN_1, 4, 2e-3),
    ] {
        let Some(error) = off(soc, bits, 1.0) else { return };
        println!("{}, {bits} bits: {error:.1e}", soc.name);
        assert!(error < bound, "{}, {bits} bits: {error:.1e}", soc.name);
    }
}

/// Values outside of a range that is too narrow are clamped to its ends.
#[test]
fn a_narrow_range_saturates() {
    let Some(right) = off(SNAPDRAGON_8_GEN_3, 8, 1.0) else { return };
    let Some(narrow) = off(SNAPDRAGON_8_GEN_3, 8, 0.5) else { return };
    let Some(wide) = off(SNAPDRAGON_8_GEN_3, 8, 3.0) else { return };
    println!("right {right:.1e}, half {narrow:.1e}, three times {wide:.1e}");
    assert!(narrow > 1e-2, "half of the range loses its ends: {narrow:.1e}");
    assert!(wide < 1e-3, "a range three times as wide costs little: {wide:.1e}");
}

/// Rows with 4 bits concatenated with rows that need 8: the format of PowerInfer-2's weights (§7.6).
#[test]
fn rows_of_two_bit_widths_are_joined() {
    let Some(installation) = installation() else { return };
    let (batch, inner, narrow, wide) = (2u32, 256u32, 448u32, 64u32);
    let mut spec = GraphSpec::new("joined");
    let xq = Quant::covering(-1.0, 1.0, 16);
    let x = numbers(1, (batch * inner) as usize);
    let real = rounded(&x, DType::U16, &xq);
    let few = Weights::by_row(&numbers(2, (narrow * inner) as usize), inner as usize, 4);
    let outliers: Vec<f64> = numbers(3, (wide * inner) as usize).iter().map(|v| v * v * v).collect();
    let many = Weights::by_row(&outliers, inner as usize, 8);
    let (y4, y8) = (product(&real, &few.real, inner as usize), product(&real, &many.real, inner as usize));
    let rows = y4.chunks_exact(narrow as usize).zip(y8.chunks_exact(wide as usize));
    let want: Vec<f64> = rows.flat_map(|(a, b)| a.iter().chain(b).copied()).collect();
    let yq = crate::support::covering(DType::U16, &want);
    let x_id = spec.input("x", DType::U16, &[batch, inner], xq.clone()).unwrap();
    let mut parts = Vec::new();
    for (name, rows, weights) in [("few", narrow, few), ("many", wide, many)] {
        let w = spec
            .constant(
                &format!("w_{name}"),
                DType::S8,
                &[rows, inner],
                weights.quant,
                Data::Bytes(weights.bytes),
            )
            .unwrap();
        let y = spec.native(name, DType::U16, &[batch, rows], yq.clone()).unwrap();
        spec.node(Node::new("FullyConnected", &[x_id, w], &[y])).unwrap();
        parts.push(y);
    }
    let y = spec.output("y", DType::U16, &[batch, narrow + wide], yq.clone()).unwrap();
    spec.node(Node::new("Concat", &parts, &[y]).scalar("axis", Scalar::U32(1))).unwrap();
    let mut context = Context::new(&newest(&installation), false).unwrap();
    let out = context.compose(&spec).unwrap().execute(&[&store(&x, DType::U16, &xq)]).unwrap();
    let error = relative(&load(&out[0], DType::U16, &yq), &want);
    println!("joined: {error:.1e}");
    assert!(error < 4e-4, "{error:.1e}");
}

/// The same layer as a 1×1 convolution: the weights are transposed, and the scales are along their last axis.
#[test]
fn one_by_one_convolution_runs() {
    let Some(installation) = installation() else { return };
    for bits in [8, 4] {
        let (rows, inner, outer) = (8u32, 64u32, 32u32);
        let mut spec = GraphSpec::new("conv");
        let xq = Quant::covering(-1.0, 1.0, 16);
        let x = numbers(1, (rows * inner) as usize);
        let weights = Weights::by_row(&numbers(2, (outer * inner) as usize), inner as usize, bits);
        let want = product(&rounded(&x, DType::U16, &xq), &weights.real, inner as usize);
        let yq = crate::support::covering(DType::U16, &want);
        let (k, n) = (inner as usize, outer as usize);
        let transposed =
            (0..k).flat_map(|k_| (0..n).map(move |n_| n_ * k + k_)).map(|at| weights.bytes[at]).collect();
        let Quant::Channels { scales, .. } = weights.quant else { unreachable!() };
        let quant = Quant::Channels { axis: 3, bits, scales };
        let x_id = spec.input("x", DType::U16, &[1, rows, 1, inner], xq.clone()).unwrap();
        let w = spec.constant("w", DType::S8, &[1, 1, inner, outer], quant, Data::Bytes(transposed)).unwrap();
        let y = spec.output("y", DType::U16, &[1, rows, 1, outer], yq.clone()).unwrap();
        let stride = spec.numbers("stride", &[2], &[1, 1]).unwrap();
        let pad = spec.numbers("pad", &[2, 2], &[0; 4]).unwrap();
        let node = Node::new("Conv2d", &[x_id, w], &[y]).tensor("stride", stride);
        spec.node(node.tensor("pad_amount", pad)).unwrap();
        let mut context = Context::new(&newest(&installation), false).unwrap();
        let out = context.compose(&spec).unwrap().execute(&[&store(&x, DType::U16, &xq)]).unwrap();
        let error = relative(&load(&out[0], DType::U16, &yq), &want);
        println!("Conv2d, {bits} bits: {error:.1e}");
        assert!(error < 4e-4, "{bits} bits: {error:.1e}");
    }
}
