//! Graphs of several types: conversions to and from quantised values, biases, and a whole feed-forward
//! network.

use crate::support::{
    Weights, covering, installation, load, newest, numbers, product, relative, rounded, store, worker,
};
use moec_qnn_sys::{Context, DType, Data, GraphSpec, Node, Quant, SOCS, Scalar, TensorId};

/// Floats outside and 16-bit codes inside, for callers that do not quantise.
#[test]
fn floats_are_quantised_and_dequantised() {
    let Some(installation) = installation() else { return };
    let device = newest(&installation);
    for (outside, into, back) in [
        (DType::F32, "Quantize", "Dequantize"),
        (DType::F16, "Quantize", "Dequantize"),
        (DType::F16, "Convert", "Convert"),
        (DType::F32, "Cast", "Cast"),
    ] {
        let mut spec = GraphSpec::new(format!("{into}_{outside}"));
        let x = numbers(1, 256);
        let quant = Quant::covering(-1.0, 1.0, 16);
        // A cast is between float types, so it has no scales.
        let (inner, inner_quant) =
            if into == "Cast" { (DType::F16, Quant::None) } else { (DType::U16, quant.clone()) };
        let x_id = spec.input("x", outside, &[4, 64], Quant::None).unwrap();
        let inside = spec.native("inside", inner, &[4, 64], inner_quant.clone()).unwrap();
        let after = spec.native("after", inner, &[4, 64], inner_quant).unwrap();
        let y = spec.output("y", outside, &[4, 64], Quant::None).unwrap();
        spec.node(Node::new(into, &[x_id], &[inside])).unwrap();
        spec.node(Node::new("Relu", &[inside], &[after])).unwrap();
        spec.node(Node::new(back, &[after], &[y])).unwrap();
        let want: Vec<f64> = x.iter().map(|v| v.max(0.0)).collect();
        let mut context = Context::new(&device, false).unwrap();
        let graph = context.compose(&spec).unwrap_or_else(|e| panic!("{into} of {outside}: {e}"));
        let out = graph.execute(&[&store(&x, outside, &Quant::None)]).unwrap();
        let error = relative(&load(&out[0], outside, &Quant::None), &want);
        println!("{into} of {outside} and back: {error:.1e}");
        assert!(error < 1e-3, "{into} of {outside}: {error:.1e}");
    }
}

/// A bias is stored in 32 bits, with the product of the scales of input and weights.
#[test]
fn a_linear_layer_with_a_bias() {
    let Some(installation) = installation() else { return };
    let (batch, inner, outer) = (2u32, 64u32, 32u32);
    let mut spec = GraphSpec::new("bias");
    let x = numbers(1, (batch * inner) as usize);
    let xq = Quant::covering(-1.0, 1.0, 16);
    let weights = Weights::by_row(&numbers(2, (outer * inner) as usize), inner as usize, 8);
    let (Quant::Tensor { scale, .. }, Quant::Channels { scales, .. }) = (&xq, &weights.quant) else {
        unreachable!()
    };
    let scales: Vec<f32> = scales.iter().map(|s| s * scale).collect();
    let bias = numbers(3, outer as usize);
    let stored = bias.iter().zip(&scales).map(|(b, s)| (b / f64::from(*s)).round() as i32);
    let bytes = stored.flat_map(i32::to_le_bytes).collect();
    let mut want = product(&rounded(&x, DType::U16, &xq), &weights.real, inner as usize);
    want.iter_mut().zip(bias.iter().cycle()).for_each(|(y, b)| *y += b);
    let yq = covering(DType::U16, &want);
    let x_id = spec.input("x", DType::U16, &[batch, inner], xq.clone()).unwrap();
    let w =
        spec.constant("w", DType::S8, &[outer, inner], weights.quant, Data::Bytes(weights.bytes)).unwrap();
    let quant = Quant::Channels { axis: 0, bits: 32, scales };
    let b = spec.constant("b", DType::S32, &[outer], quant, Data::Bytes(bytes)).unwrap();
    let y = spec.output("y", DType::U16, &[batch, outer], yq.clone()).unwrap();
    spec.node(Node::new("FullyConnected", &[x_id, w, b], &[y])).unwrap();
    let mut context = Context::new(&newest(&installation), false).unwrap();
    let out = context.compose(&spec).unwrap().execute(&[&store(&x, DType::U16, &xq)]).unwrap();
    let error = relative(&load(&out[0], DType::U16, &yq), &want);
    println!("with a bias: {error:.1e}");
    assert!(error < 2e-4, "{error:.1e}");
}

/// `down · (relu(gate · x) ∘ (up · x))`: the hot neurons of PowerInfer-2 (§4.1.2), for one to four tokens.
#[test]
fn gated_network_runs_at_every_batch_size() {
    let Some(installation) = installation() else { return };
    let (hidden, neurons) = (256u32, 512u32);
    for (soc, bits, bound) in [(SOCS[0], 8, 1e-3), (SOCS[0], 4, 1e-3), (SOCS[1], 4, 5e-3)] {
        let mut worker = worker(&installation, soc, true);
        for batch in 1..=4u32 {
            let mut spec = GraphSpec::new(format!("batch_{batch}"));
            let x = numbers(u64::from(batch), (batch * hidden) as usize);
            let xq = Quant::covering(-1.0, 1.0, 16);
            let real = rounded(&x, DType::U16, &xq);
            let input = spec.input("x", DType::U16, &[batch, hidden], xq.clone()).unwrap();
            let matrix = |seed, rows: u32, columns: u32| {
                Weights::by_row(&numbers(seed, (rows * columns) as usize), columns as usize, bits)
            };
            let (gate, up, down) =
                (matrix(10, neurons, hidden), matrix(11, neurons, hidden), matrix(12, hidden, neurons));
            let gated: Vec<f64> =
                product(&real, &gate.real, hidden as usize).into_iter().map(|v| v.max(0.0)).collect();
            let raised = product(&real, &up.real, hidden as usize);
            let mixed: Vec<f64> = gated.iter().zip(&raised).map(|(g, u)| g * u).collect();
            let want = product(&mixed, &down.real, neurons as usize);
            let value = |spec: &mut GraphSpec, name: &str, of: &[f64], columns: u32| -> TensorId {
                spec.native(name, DType::U16, &[batch, columns], covering(DType::U16, of)).unwrap()
            };
            let before = product(&real, &gate.real, hidden as usize);
            let (g, r) = (value(&mut spec, "g", &before, neurons), value(&mut spec, "r", &gated, neurons));
            let (u, m) = (value(&mut spec, "u", &raised, neurons), value(&mut spec, "m", &mixed, neurons));
            let quant = covering(DType::U16, &want);
            let y = spec.output("y", DType::U16, &[batch, hidden], quant.clone()).unwrap();
            let mut weights = |name: &str, dims: &[u32], w: Weights| {
                spec.constant(name, DType::S8, dims, w.quant, Data::Bytes(w.bytes)).unwrap()
            };
            let gate = weights("gate", &[neurons, hidden], gate);
            let up = weights("up", &[neurons, hidden], up);
            let down = weights("down", &[hidden, neurons], down);
            spec.node(Node::new("FullyConnected", &[input, gate], &[g])).unwrap();
            spec.node(Node::new("Relu", &[g], &[r])).unwrap();
            spec.node(Node::new("FullyConnected", &[input, up], &[u])).unwrap();
            spec.node(Node::new("ElementWiseMultiply", &[r, u], &[m])).unwrap();
            spec.node(Node::new("FullyConnected", &[m, down], &[y])).unwrap();
            let graph = worker.compose(&spec).unwrap();
            let out = worker.execute(graph, vec![store(&x, DType::U16, &xq)]).unwrap();
            let error = relative(&load(&out[0], DType::U16, &quant), &want);
            println!("{}, {bits} bits, {batch} tokens: {error:.1e}", soc.name);
            assert!(error < bound, "{}, {bits} bits, {batch} tokens: {error:.1e}", soc.name);
        }
        let bytes = worker.binary().unwrap();
        println!("{}, {bits} bits, four graphs: {} bytes", soc.name, bytes.len());
        let weights = 3 * u64::from(hidden * neurons) * u64::from(bits) / 8;
        let overhead = 4 * (96 << 10);
        assert!((bytes.len() as u64) < weights + overhead, "weights are there once: {} bytes", bytes.len());
    }
}

/// Rows times a row, and rows times a column: one operand is broadcast.
#[test]
fn shorter_operand_is_broadcast() {
    let Some(installation) = installation() else { return };
    let mut spec = GraphSpec::new("repeated");
    let (x, row) = (numbers(1, 256), numbers(2, 64));
    let quant = Quant::covering(-1.0, 1.0, 16);
    let x_id = spec.input("x", DType::U16, &[4, 64], quant.clone()).unwrap();
    let row_bytes = Data::Bytes(store(&row, DType::U16, &quant));
    let row_id = spec.constant("row", DType::U16, &[1, 64], quant.clone(), row_bytes).unwrap();
    let real = rounded(&x, DType::U16, &quant);
    let row = rounded(&row, DType::U16, &quant);
    let want: Vec<f64> = real.iter().zip(row.iter().cycle()).map(|(a, b)| a * b).collect();
    let y = spec.output("y", DType::U16, &[4, 64], quant.clone()).unwrap();
    let node = Node::new("ElementWiseBinary", &[x_id, row_id], &[y]).scalar("operation", Scalar::U32(13));
    spec.node(node).unwrap();
    let mut context = Context::new(&newest(&installation), false).unwrap();
    let out = context.compose(&spec).unwrap().execute(&[&store(&x, DType::U16, &quant)]).unwrap();
    assert!(relative(&load(&out[0], DType::U16, &quant), &want) < 2e-4);
}
