//! Every operator, compared with a reference.

use crate::support::{Single, installation, numbers, worker};
use moec_qnn_sys::{DType, Error, Node, Quant, SOCS, Scalar};
use std::path::Path;

/// An operator: its name, the function that builds its graph, and its types in the emulator with the largest
/// relative error of each.
type Row = (&'static str, fn(&mut Single), &'static [(DType, f64)]);

/// Operators that require a later architecture: operator, type, first architecture.
const SINCE: &[(&str, DType, u32)] = &[("LayerNorm", U16, 73), ("MatMul", U16, 73)];

const U16: DType = DType::U16;
const U8: DType = DType::U8;
const F16: DType = DType::F16;
const F32: DType = DType::F32;

#[rustfmt::skip]
const ROWS: &[Row] = &[
    ("ElementWiseAdd", |s| binary(s, "ElementWiseAdd", |a, b| a + b), &[(U16, 1e-4), (U8, 1e-2), (F16, 1e-3), (F32, 1e-3)]),
    ("ElementWiseSubtract", |s| binary(s, "ElementWiseSubtract", |a, b| a - b), &[(U16, 1e-4), (U8, 1e-2), (F16, 1e-3), (F32, 1e-3)]),
    ("ElementWiseMultiply", |s| binary(s, "ElementWiseMultiply", |a, b| a * b), &[(U16, 1e-4), (U8, 2e-2), (F16, 1e-3), (F32, 1e-3)]),
    ("ElementWiseDivide", |s| binary(s, "ElementWiseDivide", |a, b| a / b), &[(U16, 1e-3), (U8, 2e-2), (F16, 1e-3), (F32, 1e-3)]),
    ("ElementWiseMaximum", |s| binary(s, "ElementWiseMaximum", f64::max), &[(U16, 1e-4), (U8, 1e-2), (F16, 1e-3), (F32, 1e-3)]),
    ("ElementWiseMinimum", |s| binary(s, "ElementWiseMinimum", f64::min), &[(U16, 1e-4), (U8, 1e-2), (F16, 1e-3), (F32, 1e-3)]),
    ("ElementWiseBinary", |s| operation(s, 13, |a, b| a * b), &[(U16, 1e-4), (U8, 2e-2), (F16, 1e-3), (F32, 1e-3)]),
    ("Relu", |s| unary(s, "Relu", |x| x.max(0.0)), &[(U16, 1e-4), (U8, 1e-2), (F16, 1e-3), (F32, 1e-3)]),
    ("Sigmoid", |s| unary(s, "Sigmoid", |x| 1.0 / (1.0 + (-x).exp())), &[(U16, 1e-3), (U8, 1e-2), (F16, 1e-3), (F32, 1e-3)]),
    ("ElementWiseSign", |s| unary(s, "ElementWiseSign", |x| if x == 0.0 { 0.0 } else { x.signum() }), &[(U16, 1e-3), (U8, 1e-2), (F16, 1e-3), (F32, 1e-3)]),
    ("Tanh", tanh, &[(U16, 1e-3), (U8, 1e-2), (F16, 2e-3), (F32, 2e-3)]),
    ("Gelu", |s| unary(s, "Gelu", gelu), &[(U16, 1e-3), (U8, 2e-2), (F16, 2e-3), (F32, 2e-3)]),
    ("ElementWiseNeuron", |s| neuron(s, 6, |x| 1.0 / (1.0 + (-x).exp())), &[(U16, 1e-3), (U8, 1e-2), (F16, 1e-3), (F32, 1e-3)]),
    ("ElementWiseExp", |s| unary(s, "ElementWiseExp", f64::exp), &[(U16, 1e-3), (U8, 2e-2), (F16, 2e-3), (F32, 2e-3)]),
    ("ElementWiseNeg", |s| unary(s, "ElementWiseNeg", |x| -x), &[(U16, 1e-4), (U8, 1e-2), (F16, 1e-3), (F32, 1e-3)]),
    ("ElementWiseSquareRoot", |s| positive(s, "ElementWiseSquareRoot", f64::sqrt), &[(U16, 1e-3), (U8, 2e-2), (F16, 1e-3), (F32, 1e-3)]),
    ("ElementWiseRsqrt", |s| positive(s, "ElementWiseRsqrt", |x| 1.0 / x.sqrt()), &[(U16, 1e-3), (U8, 2e-2), (F16, 2e-3), (F32, 2e-3)]),
    ("Softmax", softmax, &[(U16, 2e-3), (U8, 3e-2), (F16, 2e-3), (F32, 2e-3)]),
    ("RmsNorm", rms_norm, &[(U16, 2e-3), (U8, 3e-2), (F16, 3e-3), (F32, 3e-3)]),
    ("LayerNorm", layer_norm, &[(U16, 2e-3), (U8, 3e-2), (F16, 3e-3), (F32, 3e-3)]),
    ("Concat", concat, &[(U16, 1e-4), (U8, 1e-2), (F16, 1e-3), (F32, 1e-3)]),
    ("StridedSlice", strided_slice, &[(U16, 1e-4), (U8, 1e-2), (F16, 1e-3), (F32, 1e-3)]),
    ("Split", split, &[(U16, 1e-4), (U8, 1e-2), (F16, 1e-3), (F32, 1e-3)]),
    ("Gather", gather, &[(U16, 1e-4), (U8, 1e-2), (F16, 1e-3), (F32, 1e-3)]),
    ("Reshape", reshape, &[(U16, 1e-4), (U8, 1e-2), (F16, 1e-3), (F32, 1e-3)]),
    ("Transpose", transpose, &[(U16, 1e-4), (U8, 1e-2), (F16, 1e-3), (F32, 1e-3)]),
    ("ReduceSum", |s| reduce(s, "ReduceSum", |row| row.iter().sum()), &[(U16, 1e-3), (U8, 2e-2), (F16, 2e-3), (F32, 2e-3)]),
    ("ReduceMean", |s| reduce(s, "ReduceMean", |row| row.iter().sum::<f64>() / row.len() as f64), &[(U16, 1e-3), (U8, 3e-2), (F16, 5e-3), (F32, 5e-3)]),
    ("ReduceMax", |s| reduce(s, "ReduceMax", |row| row.iter().copied().fold(f64::MIN, f64::max)), &[(U16, 1e-3), (U8, 2e-2), (F16, 1e-3), (F32, 1e-3)]),
    ("MatMul", mat_mul, &[(U16, 1e-3), (U8, 2e-2), (F16, 3e-3), (F32, 3e-3)]),
    ("MatMul of u8", mat_mul_mixed, &[(U16, 5e-3)]),
    ("Conv2d", conv, &[(F16, 3e-3), (F32, 3e-3)]),
];

/// Two inputs of four rows.
fn two(s: &mut Single) -> [(moec_qnn_sys::TensorId, Vec<f64>); 2] {
    let b: Vec<f64> = numbers(2, 256).iter().map(|x| x + x.signum() * 0.5).collect();
    [s.input(&[4, 64], &numbers(1, 256)), s.input(&[4, 64], &b)]
}

fn binary(s: &mut Single, op: &str, of: fn(f64, f64) -> f64) {
    let [(a, a_real), (b, b_real)] = two(s);
    let y = s.output(&[4, 64], a_real.iter().zip(&b_real).map(|(a, b)| of(*a, *b)).collect());
    s.spec.node(Node::new(op, &[a, b], &[y])).unwrap();
}

fn operation(s: &mut Single, number: u32, of: fn(f64, f64) -> f64) {
    let [(a, a_real), (b, b_real)] = two(s);
    let y = s.output(&[4, 64], a_real.iter().zip(&b_real).map(|(a, b)| of(*a, *b)).collect());
    let node = Node::new("ElementWiseBinary", &[a, b], &[y]).scalar("operation", Scalar::U32(number));
    s.spec.node(node).unwrap();
}

/// An input of four rows, scaled by a factor.
fn some(s: &mut Single, factor: f64) -> (moec_qnn_sys::TensorId, Vec<f64>) {
    let values: Vec<f64> = numbers(3, 256).iter().map(|x| x * factor).collect();
    s.input(&[4, 64], &values)
}

fn unary(s: &mut Single, op: &str, of: fn(f64) -> f64) {
    let (x, real) = some(s, 4.0);
    let y = s.output(&[4, 64], real.into_iter().map(of).collect());
    s.spec.node(Node::new(op, &[x], &[y])).unwrap();
}

/// The output's range ends one step below 1.
fn tanh(s: &mut Single) {
    let (x, real) = some(s, 4.0);
    let quant = s.dtype.bits().map_or(Quant::None, |bits| Quant::symmetric(1.0, bits));
    let y = s.output_as(&[4, 64], real.into_iter().map(f64::tanh).collect(), quant);
    s.spec.node(Node::new("Tanh", &[x], &[y])).unwrap();
}

fn positive(s: &mut Single, op: &str, of: fn(f64) -> f64) {
    let values: Vec<f64> = numbers(3, 256).iter().map(|x| x.abs() + 0.5).collect();
    let (x, real) = s.input(&[4, 64], &values);
    let y = s.output(&[4, 64], real.into_iter().map(of).collect());
    s.spec.node(Node::new(op, &[x], &[y])).unwrap();
}

fn neuron(s: &mut Single, number: u32, of: fn(f64) -> f64) {
    let (x, real) = some(s, 4.0);
    let y = s.output(&[4, 64], real.into_iter().map(of).collect());
    let node = Node::new("ElementWiseNeuron", &[x], &[y]).scalar("operation", Scalar::U32(number));
    s.spec.node(node).unwrap();
}

/// By the error function, approximated by Abramowitz and Stegun's formula 7.1.26 with an error of 1.5e-7.
fn gelu(x: f64) -> f64 {
    let z = x.abs() / std::f64::consts::SQRT_2;
    let t = 1.0 / (1.0 + 0.327_591_1 * z);
    let poly = t
        * (0.254_829_592
            + t * (-0.284_496_736 + t * (1.421_413_741 + t * (-1.453_152_027 + t * 1.061_405_429))));
    let erf = 1.0 - poly * (-z * z).exp();
    0.5 * x * (1.0 + erf.copysign(x))
}

fn softmax(s: &mut Single) {
    let (x, real) = some(s, 4.0);
    let rows = real.chunks_exact(64).flat_map(|row| {
        let sum: f64 = row.iter().map(|x| x.exp()).sum();
        row.iter().map(move |x| x.exp() / sum)
    });
    let y = s.output(&[4, 64], rows.collect());
    let node =
        Node::new("Softmax", &[x], &[y]).scalar("axis", Scalar::U32(1)).scalar("beta", Scalar::F32(1.0));
    s.spec.node(node).unwrap();
}

fn rms_norm(s: &mut Single) {
    let (x, real) = some(s, 2.0);
    let gain: Vec<f64> = numbers(5, 64).iter().map(|x| x.abs() + 0.5).collect();
    let (gamma, gain) = s.constant("gamma", &[64], &gain);
    let (beta, _) = s.constant("beta", &[64], &[0.0; 64]);
    let axes = s.spec.numbers("axes", &[1], &[1]).unwrap();
    let rows = real.chunks_exact(64).flat_map(|row| {
        let mean = row.iter().map(|x| x * x).sum::<f64>() / 64.0;
        row.iter().zip(&gain).map(move |(x, g)| x / (mean + 1e-6).sqrt() * g)
    });
    let rows = rows.collect();
    let y = s.output(&[4, 64], rows);
    let node = Node::new("RmsNorm", &[x, gamma, beta], &[y]);
    s.spec.node(node.scalar("epsilon", Scalar::F32(1e-6)).tensor("axes", axes)).unwrap();
}

fn layer_norm(s: &mut Single) {
    let (x, real) = some(s, 2.0);
    let gain: Vec<f64> = numbers(5, 64).iter().map(|x| x.abs() + 0.5).collect();
    let (gamma, gain) = s.constant("gamma", &[64], &gain);
    let (beta, _) = s.constant("beta", &[64], &[0.0; 64]);
    let axes = s.spec.numbers("axes", &[1], &[1]).unwrap();
    let rows = real.chunks_exact(64).flat_map(|row| {
        let mean = row.iter().sum::<f64>() / 64.0;
        let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 64.0;
        row.iter().zip(&gain).map(move |(x, g)| (x - mean) / (variance + 1e-5).sqrt() * g)
    });
    let rows = rows.collect();
    let y = s.output(&[4, 64], rows);
    let node = Node::new("LayerNorm", &[x, gamma, beta], &[y]);
    s.spec.node(node.scalar("epsilon", Scalar::F32(1e-5)).tensor("axes", axes)).unwrap();
}

fn concat(s: &mut Single) {
    let [(a, a_real), (b, b_real)] =
        [s.input(&[4, 64], &numbers(1, 256)), s.input(&[4, 32], &numbers(2, 128))];
    let rows = a_real.chunks_exact(64).zip(b_real.chunks_exact(32));
    let y = s.output(&[4, 96], rows.flat_map(|(a, b)| a.iter().chain(b).copied()).collect());
    s.spec.node(Node::new("Concat", &[a, b], &[y]).scalar("axis", Scalar::U32(1))).unwrap();
}

fn strided_slice(s: &mut Single) {
    let (x, real) = some(s, 1.0);
    let ranges = s.spec.integers("ranges", &[2, 3], &[1, 3, 1, 0, 64, 2]).unwrap();
    let rows = real.chunks_exact(64).skip(1).take(2);
    let quant = s.spec.tensors()[x.index()].quant.clone();
    let y = s.output_as(&[2, 32], rows.flat_map(|row| row.iter().step_by(2).copied()).collect(), quant);
    s.spec.node(Node::new("StridedSlice", &[x], &[y]).tensor("ranges", ranges)).unwrap();
}

fn split(s: &mut Single) {
    let (x, real) = some(s, 1.0);
    let at = s.spec.numbers("at", &[1], &[48]).unwrap();
    let quant = s.spec.tensors()[x.index()].quant.clone();
    let part = |from: usize, to: usize| real.chunks_exact(64).flat_map(|r| r[from..to].to_vec()).collect();
    let first = s.output_as(&[4, 48], part(0, 48), quant.clone());
    let second = s.output_as(&[4, 16], part(48, 64), quant);
    let node = Node::new("Split", &[x], &[first, second]).scalar("axis", Scalar::U32(1));
    s.spec.node(node.tensor("split_index", at)).unwrap();
}

fn gather(s: &mut Single) {
    let (x, real) = some(s, 1.0);
    let rows = s.spec.integers("rows", &[3], &[2, 0, 3]).unwrap();
    let quant = s.spec.tensors()[x.index()].quant.clone();
    let taken = [2, 0, 3].iter().flat_map(|&r| real[r * 64..][..64].to_vec()).collect();
    let y = s.output_as(&[3, 64], taken, quant);
    s.spec.node(Node::new("Gather", &[x, rows], &[y]).scalar("axis", Scalar::I32(0))).unwrap();
}

fn reshape(s: &mut Single) {
    let (x, real) = some(s, 1.0);
    let quant = s.spec.tensors()[x.index()].quant.clone();
    let y = s.output_as(&[1, 8, 2, 16], real, quant);
    s.spec.node(Node::new("Reshape", &[x], &[y])).unwrap();
}

fn transpose(s: &mut Single) {
    let (x, real) = some(s, 1.0);
    let quant = s.spec.tensors()[x.index()].quant.clone();
    let transposed =
        (0..64).flat_map(|c| (0..4).map(move |r| (r, c))).map(|(r, c)| real[r * 64 + c]).collect();
    let y = s.output_as(&[64, 4], transposed, quant);
    let order = s.spec.numbers("order", &[2], &[1, 0]).unwrap();
    s.spec.node(Node::new("Transpose", &[x], &[y]).tensor("perm", order)).unwrap();
}

fn reduce(s: &mut Single, op: &str, of: fn(&[f64]) -> f64) {
    let values: Vec<f64> = numbers(3, 256).iter().map(|x| x + 0.5).collect();
    let (x, real) = s.input(&[4, 64], &values);
    let axes = s.spec.numbers("axes", &[1], &[1]).unwrap();
    let y = s.output(&[4, 1], real.chunks_exact(64).map(of).collect());
    let node = Node::new(op, &[x], &[y]).tensor("axes", axes);
    s.spec.node(node.scalar("keep_dims", Scalar::Bool(true))).unwrap();
}

fn mat_mul(s: &mut Single) {
    let (a, a_real) = s.input(&[2, 4, 32], &numbers(1, 256));
    let (b, b_real) = s.centred(&[2, 8, 32], &numbers(2, 512));
    let each = a_real.chunks_exact(128).zip(b_real.chunks_exact(256));
    let y = s.output(&[2, 4, 8], each.flat_map(|(a, b)| crate::support::product(a, b, 32)).collect());
    let node = Node::new("MatMul", &[a, b], &[y]).scalar("transpose_in0", Scalar::Bool(false));
    s.spec.node(node.scalar("transpose_in1", Scalar::Bool(true))).unwrap();
}

/// With an 8-bit second factor, which every architecture supports.
fn mat_mul_mixed(s: &mut Single) {
    let (a, a_real) = s.input(&[2, 4, 32], &numbers(1, 256));
    s.dtype = U8;
    let (b, b_real) = s.centred(&[2, 8, 32], &numbers(2, 512));
    s.dtype = U16;
    let each = a_real.chunks_exact(128).zip(b_real.chunks_exact(256));
    let y = s.output(&[2, 4, 8], each.flat_map(|(a, b)| crate::support::product(a, b, 32)).collect());
    let node = Node::new("MatMul", &[a, b], &[y]).scalar("transpose_in0", Scalar::Bool(false));
    s.spec.node(node.scalar("transpose_in1", Scalar::Bool(true))).unwrap();
}

/// A 1×1 convolution, as linear layers are written for the tensor unit: `[1, rows, 1, 32]` to `[1, rows, 1,
/// 16]`.
fn conv(s: &mut Single) {
    let (x, real) = s.input(&[1, 8, 1, 32], &numbers(1, 256));
    let (w, w_real) = s.constant("w", &[1, 1, 32, 16], &numbers(2, 512));
    let transposed: Vec<f64> =
        (0..16).flat_map(|n| (0..32).map(move |k| (k, n))).map(|(k, n)| w_real[k * 16 + n]).collect();
    let y = s.output(&[1, 8, 1, 16], crate::support::product(&real, &transposed, 32));
    let stride = s.spec.numbers("stride", &[2], &[1, 1]).unwrap();
    let pad = s.spec.numbers("pad", &[2, 2], &[0; 4]).unwrap();
    s.spec
        .node(Node::new("Conv2d", &[x, w], &[y]).tensor("stride", stride).tensor("pad_amount", pad))
        .unwrap();
}

/// On both chips, the emulator's errors are within the bounds of the table.
#[test]
fn operators_match_the_table_of_bounds() {
    let Some(installation) = installation() else { return };
    let mut wrong = Vec::new();
    for soc in SOCS {
        let mut worker = worker(&installation, soc, false);
        for (name, build, types) in ROWS {
            for (dtype, bound) in *types {
                let mut single = Single::new(*dtype);
                single.spec.name = format!("{name}_{dtype}");
                build(&mut single);
                let since = SINCE.iter().find(|(op, of, _)| op == name && of == dtype);
                let there = since.is_none_or(|(_, _, arch)| soc.arch >= *arch);
                match single.error(&mut worker) {
                    Err(Error::Node { .. }) if !there => {}
                    Ok(_) if !there => wrong.push(format!("{}: {name} of {dtype} is there", soc.part)),
                    Ok(error) => {
                        println!("{} {name} {dtype}: {error:.1e}", soc.part);
                        if error > *bound {
                            wrong.push(format!("{}: {name} of {dtype} is off by {error:.1e}", soc.part));
                        }
                    }
                    Err(e) => wrong.push(format!("{}: {name} of {dtype}: {e}", soc.part)),
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The documentation has a row for every operator, with a figure for every tested type and no other.
#[test]
fn qnn_page_lists_every_operator() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../docs/qnn.md");
    let text = std::fs::read_to_string(page).unwrap();
    for (name, _, types) in ROWS {
        let row = text.lines().find(|line| line.starts_with(&format!("| `{name}` |")));
        let row = row.unwrap_or_else(|| panic!("docs/qnn.md has no row for {name}"));
        let cells: Vec<&str> = row.split('|').map(str::trim).skip(3).take(4).collect();
        for (of, cell) in [U16, U8, F16, F32].into_iter().zip(cells) {
            let tested = types.iter().any(|(dtype, _)| *dtype == of) || (*name, of) == ("Conv2d", U16);
            assert_eq!(tested, !cell.is_empty(), "{name} of {of}: the page has `{cell}`");
        }
    }
}

/// Floats have no [`Quant`].
#[test]
fn floats_have_no_quantisation() {
    let mut single = Single::new(F16);
    let (x, _) = single.input(&[2, 2], &[1.0; 4]);
    assert_eq!(single.spec.tensors()[x.index()].quant, Quant::None);
}
