//! Routers of all kinds.

use crate::harness::{Case, Expect, Operand, Rng, check, strided};
use moec_codegen::spec::Router;
use moec_ir::eval::{self, Tensor};
use moec_ir::op::{GroupScore, Groups, NO_EXPERT, Op, Renorm, RouterDesc, Score, WeightFrom};
use moec_ir::types::Type;

fn base(experts: usize, k: usize) -> RouterDesc {
    RouterDesc {
        experts,
        zero: None,
        k,
        score: Score::Softmax,
        select_bias: false,
        groups: None,
        weight_from: WeightFrom::Score,
        renorm: Renorm::None,
        scale: 1.0,
    }
}

/// Indices of the `n` largest numbers; of equal ones, the lowest index first.
fn top(x: &[f64], n: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..x.len()).collect();
    order.sort_by(|&a, &b| x[b].total_cmp(&x[a]).then(a.cmp(&b)));
    order.truncate(n);
    order
}

fn softmax(z: &[f64]) -> Vec<f64> {
    let max = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = z.iter().map(|v| (v - max).exp()).sum();
    z.iter().map(|v| (v - max).exp() / sum).collect()
}

fn route(d: &RouterDesc, z: &[f32], bias: &[f32]) -> (Vec<i32>, Vec<f32>) {
    let z: Vec<f64> = z.iter().map(|&v| f64::from(v)).collect();
    let sigmoid = |v: f64| 1.0 / (1.0 + (-v).exp());
    let s = match d.score {
        Score::Softmax => softmax(&z),
        Score::Sigmoid => z.iter().map(|&v| sigmoid(v)).collect(),
        Score::Identity => z.clone(),
    };
    let mut c: Vec<f64> = s.iter().zip(bias).map(|(s, &b)| s + f64::from(b)).collect();
    if let Some(g) = d.groups {
        let size = d.experts / g.n;
        let best: Vec<f64> = c
            .chunks(size)
            .map(|group| {
                let n = if g.score == GroupScore::Max { 1 } else { 2 };
                top(group, n).into_iter().map(|i| group[i]).sum()
            })
            .collect();
        let kept = top(&best, g.keep);
        for (i, c) in c.iter_mut().enumerate() {
            if !kept.contains(&(i / size)) {
                *c = if g.mask_neg_inf { f64::NEG_INFINITY } else { 0.0 };
            }
        }
    }
    let ids = top(&c, d.k);
    let mut w: Vec<f64> = match d.weight_from {
        WeightFrom::Score => ids.iter().map(|&i| s[i]).collect(),
        WeightFrom::SoftmaxTopk => softmax(&ids.iter().map(|&i| z[i]).collect::<Vec<_>>()),
        WeightFrom::SigmoidTopk => ids.iter().map(|&i| sigmoid(z[i])).collect(),
        WeightFrom::SparseMixer { eps } => {
            let one = |max: f64, removed: Option<usize>| {
                let near = |v: f64| (max - v) / v.abs().max(max) <= 2.0 * f64::from(eps);
                let kept = (0..d.experts).filter(|&j| Some(j) != removed && near(z[j]));
                1.0 / kept.map(|j| (z[j] - max).exp()).sum::<f64>()
            };
            let removed = std::iter::once(None).chain(ids.iter().map(|&i| Some(i)));
            ids.iter().zip(removed).map(|(&i, removed)| one(z[i], removed)).collect()
        }
    };
    let sum: f64 = w.iter().sum();
    let divisor = match d.renorm {
        Renorm::None => 1.0,
        Renorm::Sum { eps } => sum + f64::from(eps),
        Renorm::Clamp { min } => sum.max(f64::from(min)),
    };
    for w in &mut w {
        *w *= f64::from(d.scale) / divisor;
    }
    (ids.iter().map(|&i| i as i32).collect(), w.iter().map(|&w| w as f32).collect())
}

fn case(desc: RouterDesc, logits: &[Vec<f32>], bias: &[f32]) -> Case {
    let (n, e) = (logits.len(), desc.experts);
    let logits_ld = e + 3;
    let (mut ids, mut weights) = (Vec::new(), Vec::new());
    for z in logits {
        let (i, w) = route(&desc, z, bias);
        ids.extend(i);
        weights.extend(w);
    }
    let mut operands = vec![Operand::Floats(strided(n, e, logits_ld, |r, c| logits[r][c]))];
    if desc.select_bias {
        operands.push(Operand::Floats(bias.to_vec()));
    }
    let at = operands.len();
    operands.extend([Operand::Ints(vec![-1; n * desc.k]), Operand::Floats(vec![0.0; n * desc.k])]);
    Case {
        spec: Router { desc, logits_ld }.into(),
        n,
        operands,
        expect: vec![(at, Expect::Ints(ids)), (at + 1, Expect::Floats(weights, 2e-6))],
    }
}

#[test]
fn routers_of_the_families() {
    let mut rng = Rng::new(30);
    let group = |n, keep, score, mask_neg_inf| Some(Groups { n, keep, score, mask_neg_inf });
    let descs = [
        base(8, 2),
        RouterDesc { renorm: Renorm::Sum { eps: 0.0 }, ..base(60, 4) },
        RouterDesc { renorm: Renorm::Clamp { min: 1e-12 }, select_bias: true, ..base(64, 6) },
        RouterDesc { score: Score::Identity, weight_from: WeightFrom::SoftmaxTopk, ..base(32, 4) },
        RouterDesc {
            score: Score::Identity,
            weight_from: WeightFrom::SigmoidTopk,
            renorm: Renorm::Sum { eps: 1e-6 },
            ..base(33, 5)
        },
        RouterDesc { groups: group(8, 3, GroupScore::Max, false), scale: 16.0, ..base(160, 6) },
        RouterDesc {
            score: Score::Sigmoid,
            select_bias: true,
            groups: group(8, 4, GroupScore::Top2Sum, true),
            renorm: Renorm::Sum { eps: 1e-20 },
            scale: 2.5,
            ..base(256, 8)
        },
        RouterDesc {
            score: Score::Sigmoid,
            select_bias: true,
            groups: group(3, 2, GroupScore::Top2Sum, false),
            ..base(15, 5)
        },
        RouterDesc { groups: group(4, 2, GroupScore::Top2Sum, true), ..base(4, 2) },
        RouterDesc { groups: group(1, 1, GroupScore::Max, true), ..base(17, 17) },
        RouterDesc {
            score: Score::Identity,
            weight_from: WeightFrom::SparseMixer { eps: 0.01 },
            ..base(16, 2)
        },
        RouterDesc {
            score: Score::Identity,
            weight_from: WeightFrom::SparseMixer { eps: 0.2 },
            ..base(5, 2)
        },
        RouterDesc {
            score: Score::Identity,
            weight_from: WeightFrom::SparseMixer { eps: 0.2 },
            ..base(16, 1)
        },
    ];
    let mut cases = Vec::new();
    for desc in descs {
        let n = 1 + rng.below(13);
        let logits: Vec<Vec<f32>> =
            (0..n).map(|_| (0..desc.experts).map(|_| 3.0 * rng.float()).collect()).collect();
        let bias: Vec<f32> =
            (0..desc.experts).map(|_| if desc.select_bias { 0.3 * rng.float() } else { 0.0 }).collect();
        cases.push(case(desc, &logits, &bias));
    }
    check(&cases);
}

#[test]
fn the_lowest_index_wins_ties() {
    let flat = vec![vec![0.5; 40], vec![-1.0; 40], (0..40).map(|i| (i % 3) as f32).collect()];
    let zero = vec![0.0; 40];
    let groups = Some(Groups { n: 5, keep: 2, score: GroupScore::Top2Sum, mask_neg_inf: true });
    check(&[
        case(base(40, 6), &flat, &zero),
        case(RouterDesc { groups, score: Score::Sigmoid, ..base(40, 6) }, &flat, &zero),
    ]);
}

/// A router over one row: the evaluator's result, and the case for the kernel.
fn one_row(desc: &RouterDesc, logits: &[f32]) -> (Result<Vec<i32>, String>, Case) {
    let (experts, k) = (desc.experts, desc.k);
    let tensor = |values: &[f32]| Tensor {
        ty: Type::f32(vec![1, values.len()]),
        data: eval::Data::F32(values.to_vec()),
    };
    let z = tensor(logits);
    let evaluated = eval::op(&Op::Router(desc.clone()), vec![eval::Arg::Tensor(&z)]);
    let ids = evaluated.map(|out| out[0].as_i32().to_vec()).map_err(|e| e.to_string());
    let none = vec![NO_EXPERT; k];
    let case = Case {
        spec: Router { desc: desc.clone(), logits_ld: experts }.into(),
        n: 1,
        operands: vec![
            Operand::Floats(logits.to_vec()),
            Operand::Ints(vec![-1; k]),
            Operand::Floats(vec![0.0; k]),
        ],
        expect: vec![(1, Expect::Ints(ids.clone().unwrap_or(none)))],
    };
    (ids, case)
}

#[test]
fn no_expert_is_chosen_if_all_scores_are_nan() {
    let group = |n, keep, score, mask_neg_inf| Some(Groups { n, keep, score, mask_neg_inf });
    let mut cases = Vec::new();
    for groups in [
        None,
        group(4, 2, GroupScore::Max, true),
        group(4, 2, GroupScore::Top2Sum, true),
        group(4, 1, GroupScore::Top2Sum, false),
    ] {
        for score in [Score::Softmax, Score::Sigmoid, Score::Identity] {
            let desc = RouterDesc { groups, score, ..base(24, 2) };
            let (ids, case) = one_row(&desc, &[f32::NAN; 24]);
            let error = ids.unwrap_err();
            assert!(error.contains("router") && error.contains("0 are numbers"), "{error}");
            cases.push(case);
        }
    }
    check(&cases);
}

#[test]
fn expert_with_a_nan_score_is_never_chosen() {
    let group = |n, keep, score, mask_neg_inf| Some(Groups { n, keep, score, mask_neg_inf });
    let mut logits: Vec<f32> = (0..24).map(|i| ((i * 7) % 24) as f32 / 8.0).collect();
    for i in [0, 5, 6, 7, 12, 13, 14, 15, 16, 17] {
        logits[i] = f32::NAN;
    }
    let mut cases = Vec::new();
    for groups in [
        None,
        group(4, 2, GroupScore::Max, true),
        group(4, 2, GroupScore::Top2Sum, true),
        group(4, 1, GroupScore::Top2Sum, false),
    ] {
        let desc = RouterDesc { groups, score: Score::Sigmoid, ..base(24, 3) };
        let (ids, case) = one_row(&desc, &logits);
        assert!(ids.unwrap().iter().all(|&i| !logits[i as usize].is_nan()));
        cases.push(case);
    }
    check(&cases);
}
