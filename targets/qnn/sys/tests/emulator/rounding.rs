//! Differences between stored and exact results, in steps: the accuracy that an evaluator of the same
//! networks can rely on.

use crate::support::{Single, installation, linear, numbers, worker};
use moec_qnn_sys::{
    DType, GraphSpec, Node, Quant, SNAPDRAGON_8_GEN_3, SNAPDRAGON_8_PLUS_GEN_1, SOCS, Soc, TensorId,
};

/// Lowest, highest and mean difference of stored numbers from the exact results before rounding, in steps.
fn steps(stored: &[u8], want: &[f64], quant: &Quant) -> (f64, f64, f64) {
    let Quant::Tensor { scale, offset } = quant else { unreachable!() };
    let right = want.iter().map(|w| (w / f64::from(*scale) - f64::from(*offset)).clamp(0.0, 65535.0));
    let stored = stored.chunks_exact(2).map(|b| f64::from(u16::from_le_bytes([b[0], b[1]])));
    let off: Vec<f64> = stored.zip(right).map(|(s, r)| s - r).collect();
    let (low, high) = off.iter().fold((f64::MAX, f64::MIN), |(l, h), d| (l.min(*d), h.max(*d)));
    (low, high, off.iter().sum::<f64>() / off.len() as f64)
}

/// The newer chip sums with all bits: results are low by up to half a step for 8-bit weights, and three for
/// 4-bit ones. The older chip is off by up to 2⁻¹¹ of the range.
#[test]
fn linear_layers_are_exact_within_rounding_steps() {
    let Some(installation) = installation() else { return };
    let cases: [(Soc, u32, f64); 4] = [
        (SNAPDRAGON_8_GEN_3, 8, 1.0),
        (SNAPDRAGON_8_GEN_3, 4, 3.0),
        (SNAPDRAGON_8_PLUS_GEN_1, 8, 32.0),
        (SNAPDRAGON_8_PLUS_GEN_1, 4, 40.0),
    ];
    for (soc, bits, bound) in cases {
        let mut worker = worker(&installation, soc, false);
        for (batch, inner, outer) in [(4, 256, 512), (1, 1024, 256), (64, 256, 256)] {
            let case = linear(&format!("{batch}_{inner}_{outer}"), batch, inner, outer, bits, 7, 1.0);
            let graph = worker.compose(&case.spec).unwrap();
            let out = worker.execute(graph, vec![case.x]).unwrap();
            let (low, high, mean) = steps(&out[0], &case.y, &case.quant);
            println!(
                "{}, {bits} bits, {batch}×{inner}×{outer}: {low:.2} to {high:.2}, mean {mean:.2}",
                soc.part
            );
            assert!(-low < bound && high < bound, "{} {bits} {low} {high}", soc.part);
        }
    }
}

/// The function of two numbers that an operator computes.
type Of = fn(f64, f64) -> f64;

/// At most one step, on both chips.
#[test]
fn elementwise_operators_are_exact_within_rounding_steps() {
    let Some(installation) = installation() else { return };
    let ops: [(&str, Of); 3] = [
        ("Relu", |a, _| a.max(0.0)),
        ("ElementWiseAdd", |a, b| a + b),
        ("ElementWiseMultiply", |a, b| a * b),
    ];
    for soc in SOCS {
        let mut worker = worker(&installation, soc, false);
        for (op, of) in ops {
            let mut single = Single::new(DType::U16);
            single.spec.name = op.into();
            let (a, a_real) = single.input(&[4, 64], &numbers(1, 256));
            let (mut inputs, mut b_real): (Vec<TensorId>, _) = (vec![a], a_real.clone());
            if op != "Relu" {
                let (b, real) = single.input(&[4, 64], &numbers(2, 256));
                inputs.push(b);
                b_real = real;
            }
            let want: Vec<f64> = a_real.iter().zip(&b_real).map(|(a, b)| of(*a, *b)).collect();
            let y = single.output(&[4, 64], want.clone());
            single.spec.node(Node::new(op, &inputs, &[y])).unwrap();
            let quant = single.spec.tensors()[y.index()].quant.clone();
            let graph = worker.compose(&single.spec).unwrap();
            let out = worker.execute(graph, single.inputs).unwrap();
            let (low, high, mean) = steps(&out[0], &want, &quant);
            println!("{} {op}: {low:.2} to {high:.2}, mean {mean:.2}", soc.part);
            assert!(-low < 1.2 && high < 1.2, "{} {op} {low} {high}", soc.part);
        }
    }
}

/// Halves are rounded up: 1/2 becomes 1, 5/2 becomes 3.
#[test]
fn ties_round_up() {
    let Some(installation) = installation() else { return };
    for soc in SOCS {
        let quant = |scale: f32| Quant::Tensor { scale: scale / 65536.0, offset: 0 };
        let mut spec = GraphSpec::new("halves");
        let x = spec.input("x", DType::U16, &[1, 64], quant(1.0)).unwrap();
        let y = spec.output("y", DType::U16, &[1, 64], quant(2.0)).unwrap();
        spec.node(Node::new("Convert", &[x], &[y])).unwrap();
        let mut worker = worker(&installation, soc, false);
        let graph = worker.compose(&spec).unwrap();
        let out = worker.execute(graph, vec![(0..64u16).flat_map(u16::to_le_bytes).collect()]).unwrap();
        let halves: Vec<u16> = out[0].chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect();
        assert_eq!(halves, (0..64).map(|x: u16| x.div_ceil(2)).collect::<Vec<_>>(), "{}", soc.part);
    }
}
