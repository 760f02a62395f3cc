//! Routers of every kind.

use crate::harness::{Case, Expect, Operand, Rng, check, strided};
use moec_codegen::KernelSpec;
use moec_ir::op::{GroupScore, Groups, Renorm, RouterDesc, Score, WeightFrom};

fn base(experts: usize, k: usize) -> RouterDesc {
    RouterDesc {
        experts,
        k,
        score: Score::Softmax,
        select_bias: false,
        groups: None,
        weight_from: WeightFrom::Score,
        renorm: Renorm::None,
        scale: 1.0,
    }
}

/// Indices of the `n` largest, the lowest of equals first.
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
            let one = |max: f64, gone: Option<usize>| {
                let near = |v: f64| (max - v) / v.abs().max(max) <= 2.0 * f64::from(eps);
                let kept = (0..d.experts).filter(|&j| Some(j) != gone && near(z[j]));
                1.0 / kept.map(|j| (z[j] - max).exp()).sum::<f64>()
            };
            let gone = std::iter::once(None).chain(ids.iter().map(|&i| Some(i)));
            ids.iter().zip(gone).map(|(&i, gone)| one(z[i], gone)).collect()
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
        spec: KernelSpec::Router { desc, logits_ld },
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

#[test]
fn ids_stay_in_range_when_logits_are_nan() {
    let desc = base(8, 2);
    check(&[Case {
        spec: KernelSpec::Router { desc, logits_ld: 8 },
        n: 1,
        operands: vec![
            Operand::Floats(vec![f32::NAN; 8]),
            Operand::Ints(vec![-1; 2]),
            Operand::Floats(vec![0.0; 2]),
        ],
        expect: vec![(1, Expect::Ints(vec![7, 7]))],
    }]);
}
