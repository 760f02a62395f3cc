//! The feed-forward network of the experts: gate and up, down, combination.

use crate::harness::{Case, Expect, Operand, PRODUCTS, Rng, check, random, rows_as, stored, strided};
use crate::simple::glu;
use half::bf16;
use moec_codegen::spec::{Combine, ExpertDown, ExpertGateUp};
use moec_codegen::{ComputeType, RowFormat, Schedule, WeightOrder};
use moec_ir::op::{Activation, DispatchLayout, Glu};
use moec_ir::types::Format;

/// A random dispatch table in the format of the runtime's builtin.
pub(crate) fn dispatch(rng: &mut Rng, layout: DispatchLayout, n: usize) -> Vec<i32> {
    let DispatchLayout { k, experts, .. } = layout;
    let mut chosen = vec![Vec::new(); experts];
    for t in 0..n {
        let mut free: Vec<usize> = (0..experts).collect();
        for j in 0..k {
            // Experts with low indices are chosen more often.
            let at = rng.below(free.len()).min(rng.below(free.len()));
            chosen[free.remove(at)].push((t, j));
        }
    }
    let mut active: Vec<usize> = (0..experts).filter(|&e| !chosen[e].is_empty()).collect();
    active.sort_by_key(|&e| (usize::MAX - chosen[e].len(), e));
    let mut words = vec![0; layout.words()];
    words[0] = active.len() as i32;
    words[1] = (n * k) as i32;
    let mut slot = 0;
    for (i, &e) in active.iter().enumerate() {
        words[layout.expert() + i] = e as i32;
        words[layout.start() + i] = slot as i32;
        for &(t, j) in &chosen[e] {
            words[layout.token() + slot] = t as i32;
            words[layout.slot() + t * k + j] = slot as i32;
            slot += 1;
        }
    }
    words[layout.start() + active.len()] = slot as i32;
    words
}

/// Expert of each slot of the table.
pub(crate) fn experts_of_slots(layout: DispatchLayout, table: &[i32]) -> Vec<usize> {
    (0..table[0] as usize)
        .flat_map(|a| {
            let slots = table[layout.start() + a + 1] - table[layout.start() + a];
            std::iter::repeat_n(table[layout.expert() + a] as usize, slots as usize)
        })
        .collect()
}

const LAYOUTS: [(usize, usize, usize, usize); 4] =
    [(40, 2, 3, 40), (33, 4, 8, 9), (4, 2, 16, 1), (64, 3, 4, 50)];

pub(crate) fn gate_up_cases(rng: &mut Rng) -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, (rows, k, experts, n)) in LAYOUTS.into_iter().enumerate() {
        for product in PRODUCTS {
            let layout = DispatchLayout { rows, k, experts };
            let extents = (rng.pick(&[80, 56, 24, 17]), rng.pick(&[5, 16, 17, 48]));
            let relu2 = Glu::Ungated(Activation::Relu2);
            let g = [Glu::Gated(Activation::Silu), relu2, relu2, Glu::DRelu][i];
            cases.push(gate_up_case(rng, (layout, n), product, extents, g, i < 2));
        }
    }
    cases
}

/// A case with `n` rows, these formats, and `hidden` and `inter` channels.
pub(crate) fn gate_up_case(
    rng: &mut Rng,
    (layout, n): (DispatchLayout, usize),
    (format, compute): (Format, ComputeType),
    (hidden, inter): (usize, usize),
    g: Glu,
    biased: bool,
) -> Case {
    let DispatchLayout { rows, k, experts } = layout;
    let table = dispatch(rng, layout, n);
    let of_slot = experts_of_slots(layout, &table);
    let x_ld = hidden + 3;
    let x = random(rng, n, hidden, x_ld);
    let both = g.projections() * inter;
    let w = rng.floats(experts * both * hidden);
    let rounded = stored(format, compute, [both, hidden], &w);
    let (rows_operand, row_words, x) = rows_as(compute, &x, [1, hidden, x_ld]);
    let bias = biased.then(|| rng.floats(experts * both));
    let expected = strided(rows * k, inter, inter, |slot, c| {
        let Some(&e) = of_slot.get(slot) else { return 0.0 };
        let row = &x[table[layout.token() + slot] as usize * x_ld..][..hidden];
        let dot = |j: usize| {
            let w = &rounded[(e * both + j) * hidden..][..hidden];
            let sum: f32 = row.iter().zip(w).map(|(a, b)| a * b).sum();
            sum + bias.as_ref().map_or(0.0, |b| b[e * both + j])
        };
        // Without a gate, the rows of up come first.
        glu(g, dot(c), dot(both - inter + c))
    });
    let mut operands =
        vec![rows_operand, Operand::Ints(table), Operand::Weight(format, [experts, both, hidden], w)];
    let with_bias = bias.is_some();
    operands.extend(bias.map(Operand::Floats));
    let at = operands.len();
    operands.push(Operand::Floats(vec![0.0; rows * k * inter]));
    Case {
        spec: ExpertGateUp {
            layout,
            hidden,
            inter,
            format,
            compute,
            x_ld: row_words,
            glu: g,
            bias: with_bias,
            out: RowFormat::f32(inter),
            order: WeightOrder::Panels,
            schedule: Schedule::default(),
        }
        .into(),
        n,
        operands,
        expect: vec![(at, Expect::Floats(expected, 5e-5))],
    }
}

#[test]
fn gate_and_up_of_gathered_rows() {
    check(&gate_up_cases(&mut Rng::new(20)));
}

pub(crate) fn down_cases(rng: &mut Rng) -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, (rows, k, experts, n)) in LAYOUTS.into_iter().enumerate() {
        for product in PRODUCTS {
            let layout = DispatchLayout { rows, k, experts };
            let extents = (rng.pick(&[80, 32, 24, 17]), rng.pick(&[5, 16, 17, 48]));
            cases.push(down_case(rng, (layout, n), product, extents, i % 2 == 0));
        }
    }
    cases
}

/// Like [`gate_up_case`], for down.
pub(crate) fn down_case(
    rng: &mut Rng,
    (layout, n): (DispatchLayout, usize),
    (format, compute): (Format, ComputeType),
    (hidden, inter): (usize, usize),
    biased: bool,
) -> Case {
    let DispatchLayout { rows, k, experts } = layout;
    let table = dispatch(rng, layout, n);
    let of_slot = experts_of_slots(layout, &table);
    let h = rng.floats(rows * k * inter);
    let w = rng.floats(experts * hidden * inter);
    let rounded = stored(format, compute, [hidden, inter], &w);
    let (rows_operand, h_ld, h) = rows_as(compute, &h, [1, inter, inter]);
    let bias = biased.then(|| rng.floats(experts * hidden));
    let expected = strided(rows * k, hidden, hidden, |slot, c| {
        let Some(&e) = of_slot.get(slot) else { return 0.0 };
        let w = &rounded[(e * hidden + c) * inter..][..inter];
        let row = &h[slot * inter..][..inter];
        let sum: f32 = row.iter().zip(w).map(|(a, b)| a * b).sum();
        sum + bias.as_ref().map_or(0.0, |b| b[e * hidden + c])
    });
    let mut operands =
        vec![rows_operand, Operand::Ints(table), Operand::Weight(format, [experts, hidden, inter], w)];
    let with_bias = bias.is_some();
    operands.extend(bias.map(Operand::Floats));
    let at = operands.len();
    operands.push(Operand::Floats(vec![0.0; rows * k * hidden]));
    Case {
        spec: ExpertDown {
            layout,
            inter,
            hidden,
            format,
            compute,
            h_ld,
            bias: with_bias,
            order: WeightOrder::Panels,
            schedule: Schedule::default(),
        }
        .into(),
        n,
        operands,
        expect: vec![(at, Expect::Floats(expected, 5e-5))],
    }
}

#[test]
fn down_projection_of_slots() {
    check(&down_cases(&mut Rng::new(21)));
}

#[test]
fn combination_of_slots() {
    let mut rng = Rng::new(22);
    let mut cases = Vec::new();
    let both = [false, true].into_iter().flat_map(|partial| LAYOUTS.map(|l| (l, partial)));
    for (i, ((rows, k, experts, n), partial)) in both.enumerate() {
        let layout = DispatchLayout { rows, k, experts };
        let hidden = rng.pick(&[80, 56, 24, 17]);
        let mut table = dispatch(&mut rng, layout, n);
        // Products of these numbers are exact, fused or not: only the order of the sum affects the bits.
        let short = |x: Vec<f32>| x.into_iter().map(|x| bf16::from_f32(x).to_f32()).collect::<Vec<_>>();
        let mut y = short(rng.floats(rows * k * hidden));
        if partial {
            // The first slot has no row; it holds NaN, as an unwritten buffer may.
            for slot in &mut table[layout.slot()..] {
                *slot = if *slot == 0 || *slot % 3 == 1 { -1 } else { *slot };
            }
            y[..hidden].fill(f32::NAN);
        }
        let weights = short(rng.floats(rows * k));
        let out_ld = hidden + 1;
        let residual = (i % 2 == 0).then(|| random(&mut rng, n, hidden, out_ld));
        let expected = strided(n, hidden, out_ld, |t, c| {
            let sum = (0..k).fold(0.0_f32, |sum, j| {
                let Ok(slot) = usize::try_from(table[layout.slot() + t * k + j]) else { return sum };
                sum + weights[t * k + j] * y[slot * hidden + c]
            });
            sum + residual.as_ref().map_or(0.0, |r| r[t * out_ld + c])
        });
        let mut operands = vec![Operand::Floats(y), Operand::Ints(table), Operand::Floats(weights)];
        let residual_ld = residual.is_some().then_some(out_ld);
        match residual {
            Some(r) => operands.extend([Operand::Floats(r), Operand::Same(3)]),
            None => operands.push(Operand::Floats(strided(n, hidden, out_ld, |_, _| 0.0))),
        }
        cases.push(Case {
            spec: Combine { layout, hidden, out_ld, residual_ld, partial }.into(),
            n,
            operands,
            expect: vec![(3, Expect::Floats(expected, 0.0))],
        });
    }
    check(&cases);
}
