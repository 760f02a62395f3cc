//! Kernels that process each row independently.

pub(crate) use crate::gates::{activation, glu};

use crate::harness::{Case, Expect, Operand, Rng, check, random, strided};
use moec_codegen::spec::{CopyColumns, Embed, GatherRows, Map, Norm, Rope, Softmax, ZeroExperts};
use moec_codegen::{MapOp, NormKind, Rotation, RowFormat, pack};
use moec_ir::op::{Activation, Glu, NO_EXPERT, RopeStyle};
use moec_ir::types::Format;

const COLUMNS: [usize; 8] = [1, 5, 15, 16, 17, 24, 80, 129];

#[test]
fn norms() {
    let mut rng = Rng::new(10);
    let mut cases = Vec::new();
    for (i, width) in COLUMNS.into_iter().enumerate() {
        for kind in [NormKind::Rms, NormKind::Layer] {
            let (n, groups, eps) = (1 + rng.below(9), 1 + i % 3, 1e-5);
            let (x_ld, out_ld) = (width * groups + rng.below(4), width * groups + rng.below(4));
            let x = random(&mut rng, n, width * groups, x_ld);
            let weight = (i % 2 == 0).then(|| rng.floats(width));
            let bias = rng.floats(width);
            let layer = kind == NormKind::Layer;
            let expected = strided(n, width * groups, out_ld, |r, c| {
                let row = &x[r * x_ld + c / width * width..][..width];
                let mean = if layer { row.iter().sum::<f32>() / width as f32 } else { 0.0 };
                let square = row.iter().map(|v| (v - mean) * (v - mean)).sum::<f32>() / width as f32;
                let y = (row[c % width] - mean) / (square + eps).sqrt();
                let y = y * weight.as_ref().map_or(1.0, |w| w[c % width]);
                if layer { y + bias[c % width] } else { y }
            });
            let with_weight = weight.is_some();
            let mut operands = vec![Operand::Floats(x)];
            operands.extend(weight.map(Operand::Floats));
            operands.extend(layer.then(|| Operand::Floats(bias.clone())));
            let at = operands.len();
            operands.push(Operand::Floats(strided(n, width * groups, out_ld, |_, _| 0.0)));
            cases.push(Case {
                spec: Norm {
                    kind,
                    width,
                    groups,
                    x_ld,
                    outs: vec![RowFormat::f32(out_ld)],
                    eps,
                    weight: with_weight,
                }
                .into(),
                n,
                operands,
                expect: vec![(at, Expect::Floats(expected, 1e-5))],
            });
        }
    }
    check(&cases);
}

#[test]
fn norm_in_place() {
    let x: Vec<f32> = (0..40).map(|i| i as f32 - 20.0).collect();
    let square = x.iter().map(|v| v * v).sum::<f32>() / 40.0;
    let expected = x.iter().map(|v| v / square.sqrt()).collect();
    check(&[Case {
        spec: Norm {
            kind: NormKind::Rms,
            width: 40,
            groups: 1,
            x_ld: 40,
            outs: vec![RowFormat::f32(40)],
            eps: 0.0,
            weight: false,
        }
        .into(),
        n: 1,
        operands: vec![Operand::Floats(x), Operand::Same(0)],
        expect: vec![(0, Expect::Floats(expected, 1e-5))],
    }]);
}

fn map_case(rng: &mut Rng, op: MapOp, cols: usize, values: impl Fn(&mut Rng) -> f32) -> Case {
    let n = 1 + rng.below(7);
    let (a_ld, out_ld) = (cols + rng.below(3), cols + rng.below(3));
    let a = strided(n, cols, a_ld, |_, _| values(rng));
    let (b, b_ld) = match op {
        MapOp::Add { b_ld, broadcast_b: true } | MapOp::Mul { b_ld, broadcast_b: true } => {
            (strided(n, 1, b_ld, |_, _| rng.float()), b_ld)
        }
        MapOp::Add { b_ld, .. } | MapOp::Mul { b_ld, .. } | MapOp::Glu { b_ld, .. } => {
            (random(rng, n, cols, b_ld), b_ld)
        }
        MapOp::MulHeads { heads, b_ld } => (strided(n, heads, b_ld, |_, _| rng.float()), b_ld),
        MapOp::ScaleCols => (rng.floats(cols), 0),
        _ => (Vec::new(), 0),
    };
    let positions: Vec<i32> = (0..n).map(|r| [-1, 0, 7, 8, 9_999_999, 31][r % 6] + (r / 6) as i32).collect();
    let expected = strided(n, cols, out_ld, |r, c| {
        let x = a[r * a_ld + c];
        match op {
            MapOp::Add { broadcast_b, .. } => x + b[r * b_ld + if broadcast_b { 0 } else { c }],
            MapOp::Mul { broadcast_b, .. } => x * b[r * b_ld + if broadcast_b { 0 } else { c }],
            MapOp::Glu { glu: g, .. } => glu(g, x, b[r * b_ld + c]),
            MapOp::ScaleCols => x * b[c],
            MapOp::Scale { factor } => factor * x,
            MapOp::Clamp { lo, hi } => x.max(lo).min(hi),
            MapOp::MulHeads { heads, b_ld } => x * b[r * b_ld + c / (cols / heads)],
            MapOp::SoftCap { cap } => (f64::from(cap) * f64::from(x / cap).tanh()) as f32,
            MapOp::Act(act) => activation(act, x),
            MapOp::ScaleByPosition { beta, every, offset } => {
                let steps = (positions[r].max(0) as usize + offset) / every;
                (f64::from(x) * (1.0 + f64::from(beta) * (steps as f64).ln_1p())) as f32
            }
            MapOp::Softplus => (x.max(0.0) as f64 + (-f64::from(x.abs())).exp().ln_1p()) as f32,
        }
    });
    let mut operands = vec![Operand::Floats(a)];
    if !b.is_empty() {
        operands.push(Operand::Floats(b));
    }
    if let MapOp::ScaleByPosition { .. } = op {
        operands.push(Operand::Ints(positions));
    }
    let at = operands.len();
    operands.push(Operand::Floats(strided(n, cols, out_ld, |_, _| 0.0)));
    Case {
        spec: Map { op, cols, a_ld, out_ld }.into(),
        n,
        operands,
        expect: vec![(at, Expect::Floats(expected, 2e-6))],
    }
}

#[test]
fn element_wise() {
    let mut rng = Rng::new(11);
    let mut cases = Vec::new();
    for cols in COLUMNS {
        let b_ld = cols + 2;
        let mut ops = vec![
            MapOp::Add { b_ld, broadcast_b: false },
            MapOp::Mul { b_ld, broadcast_b: false },
            MapOp::Mul { b_ld: 3, broadcast_b: true },
            MapOp::ScaleCols,
            MapOp::Scale { factor: -2.5 },
            MapOp::Clamp { lo: -0.25, hi: 0.5 },
            MapOp::MulHeads { heads: if cols % 3 == 0 { 3 } else { 1 }, b_ld: 5 },
            MapOp::SoftCap { cap: 3.0 },
            MapOp::ScaleByPosition { beta: 0.3, every: 8, offset: cols % 2 },
            MapOp::ScaleByPosition { beta: 0.1, every: 1, offset: 0 },
            MapOp::Glu { glu: Glu::Limited { limit: 0.6 }, b_ld },
            MapOp::Glu { glu: Glu::Clamped { alpha: 1.702, limit: 0.8 }, b_ld },
            MapOp::Glu { glu: Glu::Gated(Activation::Silu), b_ld },
        ];
        ops.push(MapOp::Softplus);
        ops.extend(Activation::ALL.map(MapOp::Act));
        for op in ops {
            cases.push(map_case(&mut rng, op, cols, |rng| 8.0 * rng.float()));
        }
    }
    check(&cases);
}

#[test]
fn activations_over_the_whole_range() {
    let mut rng = Rng::new(12);
    let mut cases = Vec::new();
    for op in Activation::ALL.map(MapOp::Act).into_iter().chain([MapOp::Softplus]) {
        cases.push(map_case(&mut rng, op, 4001, |rng| 120.0 * rng.float().powi(3)));
    }
    check(&cases);
}

#[test]
fn exponentials_are_accurate_to_three_epsilons() {
    // Far below 0 the sigmoid equals the exponential function.
    let x: Vec<f32> = (0..3000).map(|i| -87.0 + 0.0237 * i as f32).collect();
    let n = x.len();
    let case = |op: MapOp, want: Vec<f32>| Case {
        spec: Map { op, cols: n, a_ld: n, out_ld: n }.into(),
        n: 1,
        operands: vec![Operand::Floats(x.clone()), Operand::Floats(vec![0.0; n])],
        expect: vec![(1, Expect::Relative(want, 3.0 * f32::EPSILON))],
    };
    let sigmoid = x.iter().map(|&x| activation(Activation::Sigmoid, x)).collect();
    check(&[case(MapOp::Act(Activation::Sigmoid), sigmoid)]);
    let softplus = x.iter().map(|&x| f64::from(x).exp().ln_1p() as f32).collect();
    check(&[case(MapOp::Softplus, softplus)]);
}

#[test]
fn extreme_values_stay_finite_or_exact() {
    let inputs = [0.0, -0.0, 1e30, -1e30, f32::MAX, f32::MIN, 1e-40, -1e-40, 88.8, -88.8, -104.5, 60.0];
    let run = |act: Activation, want: Vec<f32>| Case {
        spec: Map { op: MapOp::Act(act), cols: 12, a_ld: 12, out_ld: 12 }.into(),
        n: 1,
        operands: vec![Operand::Floats(inputs.to_vec()), Operand::Floats(vec![0.0; 12])],
        expect: vec![(1, Expect::Floats(want, 0.0))],
    };
    let sigmoid = [0.5, 0.5, 1.0, 0.0, 1.0, 0.0, 0.5, 0.5, 1.0, f32::NAN, 0.0, 1.0];
    let relu = inputs.map(|x| x.max(0.0));
    check(&[run(Activation::Sigmoid, sigmoid.to_vec()), run(Activation::Relu, relu.to_vec())]);
}

#[test]
fn softmax_of_rows() {
    let mut rng = Rng::new(13);
    let mut cases = Vec::new();
    for cols in COLUMNS {
        let (n, x_ld, out_ld) = (1 + rng.below(6), cols + 1, cols + 2);
        let x = strided(n, cols, x_ld, |_, _| 90.0 * rng.float());
        let expected = strided(n, cols, out_ld, |r, c| {
            let row = &x[r * x_ld..][..cols];
            let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let e = |v: f32| f64::from(v - max).exp();
            (e(row[c]) / row.iter().map(|&v| e(v)).sum::<f64>()) as f32
        });
        cases.push(Case {
            spec: Softmax { cols, x_ld, out_ld }.into(),
            n,
            operands: vec![Operand::Floats(x), Operand::Floats(strided(n, cols, out_ld, |_, _| 0.0))],
            expect: vec![(1, Expect::Floats(expected, 2e-6))],
        });
    }
    check(&cases);
}

#[test]
fn embedding_of_every_format() {
    let mut rng = Rng::new(14);
    let mut cases = Vec::new();
    for (i, hidden) in COLUMNS.into_iter().enumerate() {
        let orders = Format::ALL.into_iter().flat_map(|f| [(f, false), (f, true)]);
        let able = |f: Format, panels| f.holds_rows() || panels && f.has_fine_scales();
        for (format, panels) in orders.filter(|(f, panels)| able(*f, *panels) && (!panels || i % 2 == 0)) {
            // More rows than a panel of any machine has, and not a multiple of a panel.
            let (vocab, n, out_ld) = (if panels { 75 } else { 7 }, 11, hidden + 3);
            let mut table = rng.floats(vocab * hidden);
            table[0] = 1e-6; // subnormal in f16
            let ids: Vec<i32> = (0..n).map(|_| rng.below(vocab) as i32).collect();
            let mut held = table.clone();
            pack::round_rows(format, hidden, &mut held);
            let expected = strided(n, hidden, out_ld, |r, c| held[ids[r] as usize * hidden + c]);
            cases.push(Case {
                spec: Embed { vocab, hidden, format, panels, out_ld }.into(),
                n,
                operands: vec![
                    Operand::Ints(ids),
                    Operand::Weight(format, [1, vocab, hidden], table),
                    Operand::Floats(strided(n, hidden, out_ld, |_, _| 0.0)),
                ],
                expect: vec![(2, Expect::Floats(expected, 0.0))],
            });
        }
    }
    check(&cases);
}

#[test]
fn rows_gathered_and_copied() {
    let mut rng = Rng::new(15);
    let mut cases = Vec::new();
    for cols in COLUMNS {
        let (n, x_ld, out_ld) = (6, cols + 1, cols + 2);
        let x = random(&mut rng, 4, cols, x_ld);
        let rows = vec![3, -1, 0, 0, 2, -7];
        let expected =
            strided(n, cols, out_ld, |r, c| if rows[r] < 0 { 0.0 } else { x[rows[r] as usize * x_ld + c] });
        cases.push(Case {
            spec: GatherRows { cols, x_ld, out_ld }.into(),
            n,
            operands: vec![
                Operand::Floats(x),
                Operand::Ints(rows.clone()),
                Operand::Floats(strided(n, cols, out_ld, |_, _| 5.0)),
            ],
            expect: vec![(2, Expect::Floats(expected, 0.0))],
        });
        let (groups, in_group, out_group) = (3, cols + 2, cols);
        let (in_ld, out_ld) = (2 * in_group + cols + 4, 3 * cols);
        let x = random(&mut rng, n, 2 * in_group + cols, in_ld);
        let expected = strided(n, 3 * cols, out_ld, |r, c| x[r * in_ld + c / cols * in_group + c % cols]);
        cases.push(Case {
            spec: CopyColumns { groups, cols, in_group, out_group, in_ld, out_ld }.into(),
            n,
            operands: vec![Operand::Floats(x), Operand::Floats(vec![0.0; n * out_ld])],
            expect: vec![(1, Expect::Floats(expected, 0.0))],
        });
    }
    check(&cases);
}

#[test]
fn rotations() {
    let mut rng = Rng::new(16);
    let mut cases = Vec::new();
    for (dim, rotary, offset) in
        [(24, 24, 0), (80, 80, 0), (34, 12, 5), (64, 64, 0), (192, 64, 128), (6, 2, 1)]
    {
        for style in [RopeStyle::Half, RopeStyle::Interleaved] {
            for in_place in [false, true] {
                let (heads, n, half) = (3, 1 + rng.below(6), rotary / 2);
                let (ld, angles_ld) = (heads * dim + 2, rotary + 1);
                let x = random(&mut rng, n, heads * dim, ld);
                let angles = random(&mut rng, n, rotary, angles_ld);
                let expected = strided(n, heads * dim, ld, |r, c| {
                    let at = (c % dim).wrapping_sub(offset);
                    let head = &x[r * ld + c / dim * dim + offset..];
                    if at >= rotary {
                        return x[r * ld + c];
                    }
                    let (pair, second) = match style {
                        RopeStyle::Half => (at % half, at >= half),
                        RopeStyle::Interleaved => (at / 2, at % 2 == 1),
                    };
                    let (a, b) = match style {
                        RopeStyle::Half => (head[pair], head[pair + half]),
                        RopeStyle::Interleaved => (head[2 * pair], head[2 * pair + 1]),
                    };
                    let (cos, sin) = (angles[r * angles_ld + pair], angles[r * angles_ld + half + pair]);
                    if second { b * cos + a * sin } else { a * cos - b * sin }
                });
                let out = if in_place {
                    Operand::Same(0)
                } else {
                    Operand::Floats(strided(n, heads * dim, ld, |_, _| 0.0))
                };
                cases.push(Case {
                    spec: Rope {
                        heads,
                        dim,
                        norm: None,
                        rotation: Rotation { rotary, offset, style, angles_ld },
                        x_ld: ld,
                        out_ld: ld,
                    }
                    .into(),
                    n,
                    operands: vec![Operand::Floats(x), Operand::Floats(angles), out],
                    expect: vec![(if in_place { 0 } else { 2 }, Expect::Floats(expected, 1e-6))],
                });
            }
        }
    }
    check(&cases);
}

#[test]
fn experts_that_compute_nothing() {
    let mut rng = Rng::new(17);
    let cases: Vec<Case> = [(8, 4, 3, 5), (1, 1, 1, 1), (512, 256, 12, 9)]
        .into_iter()
        .map(|(experts, zero, k, n)| {
            // Entries without an expert, and −1, are kept.
            let mut id = || [rng.below(experts + zero) as i32, -1, NO_EXPERT][[0, 0, 0, 1, 2][rng.below(5)]];
            let ids: Vec<i32> = (0..n * k).map(|_| id()).collect();
            let is_zero = |id: i32| id >= experts as i32 && id < (experts + zero) as i32;
            let weights = rng.floats(n * k);
            let served = ids.iter().map(|&id| if is_zero(id) { -1 } else { id }).collect();
            let sums = ids.chunks(k).zip(weights.chunks(k)).map(|(ids, weights)| {
                ids.iter().zip(weights).filter(|(id, _)| is_zero(**id)).map(|(_, w)| w).sum()
            });
            let sums = sums.collect();
            Case {
                spec: ZeroExperts { experts, zero, k }.into(),
                n,
                operands: vec![
                    Operand::Ints(ids),
                    Operand::Floats(weights),
                    Operand::Ints(vec![7; n * k]),
                    Operand::Floats(vec![3.0; n]),
                ],
                expect: vec![(2, Expect::Ints(served)), (3, Expect::Floats(sums, 1e-6))],
            }
        })
        .collect();
    check(&cases);
}
