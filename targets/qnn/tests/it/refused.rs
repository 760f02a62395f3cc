//! Invalid networks are refused, with the name of the tensor or node.

use super::fixture::*;
use moec_qnn::net::{Data, Dtype, Network, NetworkBuilder, Op, Quant, Scale, Tensor, TensorId};
use moec_qnn::quant::{Range, Ranges, coded};

/// A quantised network: a projection with a bias, a slice of it, and a sum.
fn right() -> Network {
    let mut b = NetworkBuilder::new("net");
    let x = b.input("x", &[2, 8]).unwrap();
    let w = b.constant(eight_bit(&numbers(1, 32), 8).tensor("w")).unwrap();
    let bias = b.constant(Tensor::floats("bias", [4], &[0.5; 4])).unwrap();
    let y = b.op("y", Op::FullyConnected, &[x, w, bias]).unwrap();
    let part = b.part("part", y, 1, 0, 2).unwrap();
    let z = b.op("z", Op::Add, &[part, part]).unwrap();
    let network = b.finish(&[z]).unwrap();
    let wide = |t: &Tensor| (t.name.clone(), Range { least: -8.0, most: 8.0 });
    let ranges: Ranges = network.activations().map(|(_, t)| wide(t)).collect();
    coded(&network, &ranges).unwrap()
}

fn tensor<'n>(network: &'n mut Network, name: &str) -> &'n mut Tensor {
    network.tensors.iter_mut().find(|t| t.name == name).unwrap()
}

type Change = fn(&mut Network);

#[test]
fn every_fault_of_a_network_has_its_message() {
    right().verify().unwrap();
    let cases: [(Change, &str); 17] = [
        (|n| tensor(n, "y").name = "x".into(), "tensor `x`: the name is a duplicate"),
        (|n| tensor(n, "y").name = "a/b".into(), "a name is letters"),
        (|n| tensor(n, "y").shape = vec![2, 5], "node 0 (FullyConnected): `y` is [2, 4], not [2, 5]"),
        (|n| tensor(n, "y").shape = vec![2, 0], "is empty, too large"),
        (|n| tensor(n, "y").shape = vec![1; 6], "has more than 5 axes"),
        (|n| tensor(n, "y").quant = Quant::None, "u16 cannot have no scale here"),
        (|n| tensor(n, "y").quant = Quant::Tensor(Scale { scale: 0.0, offset: 0 }), "are invalid for u16"),
        (|n| tensor(n, "y").quant = Quant::Tensor(Scale { scale: 1.0, offset: 1 }), "are invalid for u16"),
        (
            |n| tensor(n, "part").quant = Quant::Tensor(Scale { scale: 1.0, offset: 0 }),
            "`y` is only moved, but its codes",
        ),
        (|n| tensor(n, "w").quant = Quant::Channels([1.0; 3].into()), "one positive scale for each"),
        (|n| tensor(n, "w").data = Some(Data::Here([0; 31].into())), "31 bytes, expected 32"),
        (|n| tensor(n, "w").ty = Dtype::U16, "u16 cannot have a scale for each channel"),
        (
            |n| tensor(n, "bias").quant = Quant::Channels([1.0; 4].into()),
            "scales of the bias `bias` are not products",
        ),
        (|n| n.nodes.swap(0, 1), "node 0 (StridedSlice): operand"),
        (|n| drop(n.nodes.pop()), "it has no result, or one that no node computes"),
        (|n| n.outputs.push(n.outputs[0]), "it has a duplicate result"),
        (|n| n.nodes[2].inputs = vec![TensorId(99); 2], "operand 99 is not defined"),
    ];
    for (i, (change, expected)) in cases.into_iter().enumerate() {
        let mut network = right();
        change(&mut network);
        let error = network.verify().expect_err(expected).to_string();
        assert!(error.contains(expected), "{i}: {error}");
    }
}

#[test]
fn mismatched_network_shapes_are_rejected_while_built() {
    let mut b = NetworkBuilder::new("net");
    let x = b.input("x", &[2, 8]).unwrap();
    let far = b.constant(Tensor::indices("far", [1], &[8])).unwrap();
    let wide = b.constant(Tensor::floats("wide", [3, 7], &[0.0; 21])).unwrap();
    let cases = [
        (Op::FullyConnected, vec![x, wide], "expected [T, K], [N, K]"),
        (Op::MatMul, vec![x, wide], "cannot be multiplied"),
        (Op::Add, vec![x, wide], "do not match"),
        (Op::Add, vec![x], "1 operands, of 2 to 2"),
        (Op::Concat { axis: 2 }, vec![x, x], "has no axis 2"),
        (Op::Reshape { shape: vec![3, 5] }, vec![x], "cannot become [3, 5]"),
        (Op::Transpose { perm: vec![0, 0] }, vec![x], "does not order the axes"),
        (
            Op::StridedSlice { ranges: vec![[0, 2, 1], [4, 9, 1]] },
            vec![x],
            "entries 4 to 9 by 1 of an axis of 8",
        ),
        (Op::RmsNorm { eps: 0.0 }, vec![x, wide], "does not fit rows"),
    ];
    for (op, inputs, expected) in cases {
        let error = b.op("y", op, &inputs).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
    }
    let y = b.op("y", Op::Gather { axis: 1 }, &[x, far]).unwrap();
    let error = b.finish(&[y]).expect_err("an index too far").to_string();
    assert!(error.contains("not static indices of 8 entries"), "{error}");
}
