//! Linear layers in every format, with every epilogue.

use crate::harness::{
    Case, Expect, Operand, PRODUCTS, Rng, check, every_second, random, rows_as, stored, strided,
};
use crate::simple::glu;
use half::{bf16, f16};
use moec_codegen::spec::{Linear, Quantise};
use moec_codegen::{ComputeType, KernelSpec, Schedule};
use moec_ir::op::{Activation, Glu};
use moec_ir::types::{E2M1, Format, GROUP};

pub(crate) struct Shape {
    pub(crate) n_rows: usize,
    pub(crate) k: usize,
    pub(crate) n: usize,
    pub(crate) groups: usize,
    pub(crate) format: Format,
    pub(crate) compute: ComputeType,
    pub(crate) bias: bool,
    pub(crate) residual: bool,
    pub(crate) glu: Option<Glu>,
}

pub(crate) fn case(rng: &mut Rng, s: &Shape) -> Case {
    spaced(rng, s, None)
}

/// Like [`case`], with this gap between two rows of the result.
fn spaced(rng: &mut Rng, s: &Shape, space: Option<usize>) -> Case {
    let w = rng.floats(s.groups * s.n * s.k);
    let rounded = stored(s.format, s.compute, [s.n, s.k], &w);
    of_weights(rng, s, space, w, &rounded)
}

/// Like [`spaced`], for given weights and their rounded values.
fn of_weights(rng: &mut Rng, s: &Shape, space: Option<usize>, w: Vec<f32>, rounded: &[f32]) -> Case {
    let columns = if s.glu.is_some() { s.n / 2 } else { s.n };
    let (x_ld, space) = (s.k * s.groups + rng.below(3), space.unwrap_or_else(|| rng.below(5)));
    let out_ld = columns * s.groups + space;
    let x = random(rng, s.n_rows, s.k * s.groups, x_ld);
    let (rows, row_words, x) = rows_as(s.compute, &x, [s.groups, s.k, x_ld]);
    let bias = s.bias.then(|| rng.floats(s.groups * s.n));
    let residual = s.residual.then(|| random(rng, s.n_rows, columns * s.groups, out_ld));
    let dot = |row: usize, group: usize, j: usize| -> f32 {
        let sum: f64 = (0..s.k)
            .map(|i| {
                let w = rounded[(group * s.n + j) * s.k + i];
                f64::from(x[row * x_ld + group * s.k + i]) * f64::from(w)
            })
            .sum();
        sum as f32 + bias.as_ref().map_or(0.0, |b| b[group * s.n + j])
    };
    let expected = strided(s.n_rows, columns * s.groups, out_ld, |row, c| {
        let (group, j) = (c / columns, c % columns);
        let value = match s.glu {
            Some(g) => glu(g, dot(row, group, j), dot(row, group, columns + j)),
            None => dot(row, group, j),
        };
        value + residual.as_ref().map_or(0.0, |r| r[row * out_ld + c])
    });
    let mut operands = vec![rows, Operand::Weight(s.format, [s.groups, s.n, s.k], w)];
    operands.extend(bias.map(Operand::Floats));
    let out = operands.len() + usize::from(s.residual);
    let residual_at = operands.len();
    // The residual is updated in place.
    let at = if let Some(r) = residual {
        operands.extend([Operand::Floats(r), Operand::Same(residual_at)]);
        residual_at
    } else {
        operands.push(Operand::Floats(strided(s.n_rows, columns * s.groups, out_ld, |_, _| 0.0)));
        out
    };
    Case {
        spec: Linear {
            k: s.k,
            n: s.n,
            format: s.format,
            compute: s.compute,
            groups: s.groups,
            x_ld: row_words,
            out_ld,
            bias: s.bias,
            residual_ld: s.residual.then_some(out_ld),
            glu: s.glu,
            schedule: Schedule::default(),
        }
        .into(),
        n: s.n_rows,
        operands,
        expect: vec![(at, Expect::Floats(expected, 3e-5))],
    }
}

#[test]
fn linear_equals_plain_loops() {
    let mut rng = Rng::new(1);
    let mut cases = Vec::new();
    for (i, n_rows) in [1, 2, 3, 5, 11, 12, 17, 27, 40, 97].into_iter().enumerate() {
        for (format, compute) in PRODUCTS {
            let shape = Shape {
                n_rows,
                k: rng.pick(&[80, 56, 24, 17, 1, 3, 128]),
                n: rng.pick(&[1, 5, 15, 17, 33, 64, 80]),
                groups: 1,
                format,
                compute,
                bias: rng.pick(&[true, false]),
                residual: i % 3 == 0,
                glu: None,
            };
            cases.push(case(&mut rng, &shape));
        }
    }
    check(&every_second(cases));
}

/// All codes that a checkpoint may contain, even if rounding never gives them. −128 has no negative in a
/// byte, and two products of it with ±127 need the full range of 16 bits.
#[test]
fn every_code_of_a_checkpoint_is_multiplied() {
    let mut rng = Rng::new(6);
    let mut cases = Vec::new();
    for (format, lowest, highest) in [(Format::Q8h, -128, 127), (Format::Q4h, -8, 7), (Format::Mxfp4, 0, 15)]
    {
        for compute in [ComputeType::F32, ComputeType::Bf16, ComputeType::I8] {
            for n_rows in [1, 2, 4, 7, 33] {
                let (k, n) = (96, rng.pick(&[33, 64]));
                // Rows with every code, rows with only the lowest, and rows in which both ends alternate.
                let code = |row: usize, c: usize| match row % 3 {
                    0 => lowest + (row + c * 5) as i32 % (highest - lowest + 1),
                    1 => lowest,
                    _ => [lowest, highest][c % 2],
                };
                let number = |row: usize, c: usize| match format {
                    Format::Mxfp4 => f32::from(E2M1[code(row, c) as usize]) * 0.125 * (1 << (row % 3)) as f32,
                    _ => {
                        code(row, c) as f32 * f16::from_f32(0.001 * (1 + row % 7 + c / GROUP) as f32).to_f32()
                    }
                };
                let w: Vec<f32> = (0..n * k).map(|i| number(i / k, i % k)).collect();
                let round =
                    |x: &f32| if compute == ComputeType::Bf16 { bf16::from_f32(*x).to_f32() } else { *x };
                let rounded: Vec<f32> = w.iter().map(round).collect();
                let (bias, residual, glu, groups) = (false, false, None, 1);
                let shape = Shape { n_rows, k, n, groups, format, compute, bias, residual, glu };
                let mut case = of_weights(&mut rng, &shape, None, w, &rounded);
                if compute == ComputeType::I8 && n_rows % 2 == 1 {
                    case = with_ends(case, &rounded, &shape);
                }
                cases.push(case);
            }
        }
    }
    check(&cases);
}

/// The same case with rows of bytes that are all 127, or in which 127 and −127 alternate.
fn with_ends(mut case: Case, rounded: &[f32], s: &Shape) -> Case {
    let value = |row: usize, c: usize| if row % 2 == 1 && c % 4 < 2 { -1.0 } else { 1.0 };
    let x = strided(s.n_rows, s.k, s.k, value);
    let (rows, x_ld, x) = rows_as(s.compute, &x, [1, s.k, s.k]);
    let KernelSpec::Linear(Linear { x_ld: ld, out_ld, .. }) = &mut case.spec else {
        panic!("no matrix: {case:?}")
    };
    *ld = x_ld;
    let dot = |row: usize, j: usize| -> f32 {
        let terms = x[row * s.k..].iter().zip(&rounded[j * s.k..][..s.k]);
        terms.map(|(x, w)| f64::from(*x) * f64::from(*w)).sum::<f64>() as f32
    };
    let expected = strided(s.n_rows, s.n, *out_ld, dot);
    case.operands[0] = rows;
    case.expect = vec![(2, Expect::Floats(expected, 3e-5))];
    case
}

/// Kernels with tiles store such results past the caches.
#[test]
fn results_that_fill_whole_cache_lines() {
    let mut rng = Rng::new(5);
    let mut cases = Vec::new();
    for (n_rows, k, n, space) in
        [(1, 64, 32, 0), (16, 80, 64, 16), (33, 64, 96, 0), (70, 48, 64, 16), (40, 64, 96, 1)]
    {
        for glu in [None, Some(Glu::Gated(Activation::Silu))] {
            for format in [Format::Bf16, Format::Q8, Format::Q4, Format::Q4o] {
                let (bias, residual) = (n_rows % 2 == 0, glu.is_none() && n_rows % 3 == 0);
                let compute = ComputeType::Bf16;
                let shape = Shape { n_rows, k, n, groups: 1, format, compute, bias, residual, glu };
                cases.push(spaced(&mut rng, &shape, Some(space)));
            }
        }
    }
    check(&cases);
}

#[test]
fn rows_and_channels_that_are_not_whole_blocks() {
    let mut rng = Rng::new(4);
    let mut cases = Vec::new();
    for (i, n_rows) in [1, 15, 16, 17, 33].into_iter().enumerate() {
        for (j, k) in [80, 56, 24, 64].into_iter().enumerate() {
            for format in [Format::Bf16, Format::Q8, Format::Q4, Format::Q4o, Format::Mxfp4] {
                let (bias, residual, glu) = (false, (i + j) % 2 == 0, None);
                let (n, compute) = (rng.pick(&[24, 32, 56, 80]), ComputeType::Bf16);
                cases.push(case(
                    &mut rng,
                    &Shape { n_rows, k, n, groups: 1, format, compute, bias, residual, glu },
                ));
            }
        }
    }
    check(&cases);
}

#[test]
fn linear_joins_gate_and_up() {
    let mut rng = Rng::new(2);
    let glus = [
        Glu::Gated(Activation::Silu),
        Glu::Gated(Activation::Gelu),
        Glu::DRelu,
        Glu::FatRelu { threshold: 0.3 },
        Glu::Clamped { alpha: 1.702, limit: 0.7 },
        // No magnitude is below 0, so this equals SiLU.
        Glu::Cats { threshold: 0.0 },
    ];
    let mut cases = Vec::new();
    for (i, glu) in glus.into_iter().enumerate() {
        for (j, n_rows) in [1, 7, 33, 15, 17].into_iter().enumerate() {
            let (format, compute) = PRODUCTS[(5 * i + j) % PRODUCTS.len()];
            let shape = Shape {
                n_rows,
                k: rng.pick(&[80, 56, 24, 17]),
                n: 2 * rng.pick(&[1, 5, 15, 16, 17, 33]),
                groups: 1,
                format,
                compute,
                bias: i % 2 == 0,
                residual: false,
                glu: Some(glu),
            };
            cases.push(case(&mut rng, &shape));
        }
    }
    check(&cases);
}

#[test]
fn grouped_linear_uses_one_matrix_per_head() {
    let mut rng = Rng::new(3);
    let mut cases = Vec::new();
    for (groups, k, n) in [(2, 24, 33), (4, 17, 16), (3, 8, 64)] {
        for n_rows in [1, 6, 13] {
            let (format, compute) = rng.pick(&PRODUCTS);
            let (bias, residual, glu) = (false, false, None);
            let shape = Shape { n_rows, k, n, groups, format, compute, bias, residual, glu };
            cases.push(case(&mut rng, &shape));
        }
    }
    check(&cases);
}

#[test]
fn rows_are_converted_to_every_compute_type() {
    let mut rng = Rng::new(4);
    let mut cases = Vec::new();
    for (n, per_row, groups, cols) in
        [(5, 1, 1, 80), (3, 4, 1, 17), (9, 1, 3, 33), (1, 1, 2, 64), (2, 2, 1, 1)]
    {
        for to in [ComputeType::Bf16, ComputeType::I8] {
            let x_ld = groups * cols + rng.below(3);
            let mut x = random(&mut rng, n * per_row, groups * cols, x_ld);
            // A group of zeros, and magnitudes far apart.
            x.iter_mut().take(cols).for_each(|x| *x = 0.0);
            x.iter_mut().skip(x_ld * (n * per_row - 1)).for_each(|x| *x *= 1e-20);
            let (packed, out_ld, _) = rows_as(to, &x, [groups, cols, x_ld]);
            let Operand::Ints(words) = packed else { panic!("rows of words") };
            let spec = KernelSpec::Quantise(Quantise { cols, groups, per_row, x_ld, out_ld, to });
            let operands = vec![Operand::Floats(x), Operand::Ints(vec![-1; words.len()])];
            cases.push(Case { spec, n, operands, expect: vec![(1, Expect::Ints(words))] });
        }
    }
    check(&cases);
}

#[test]
fn exact_rows_are_copied_to_a_padded_stride() {
    let mut rng = Rng::new(5);
    let mut cases = Vec::new();
    for (n, per_row, cols, x_ld, out_ld) in [(5, 1, 80, 80, 81), (3, 4, 17, 18, 48), (2, 1, 1024, 1024, 1040)]
    {
        let x = random(&mut rng, n * per_row, cols, x_ld);
        let expected = strided(n * per_row, cols, out_ld, |row, c| x[row * x_ld + c]);
        let out = strided(n * per_row, cols, out_ld, |_, _| 0.0);
        let spec =
            KernelSpec::Quantise(Quantise { cols, groups: 1, per_row, x_ld, out_ld, to: ComputeType::F32 });
        let operands = vec![Operand::Floats(x), Operand::Floats(out)];
        cases.push(Case { spec, n, operands, expect: vec![(1, Expect::Floats(expected, 0.0))] });
    }
    check(&cases);
}
