//! Neurons that are skipped although their gates are not 0: by a predictor, or by a threshold.

use crate::harness::{
    Case, Expect, Operand, Rng, can_multiply, check, random, rows_as, run, stored, strided,
};
use crate::machines::machines;
use crate::neurons::{BLOCK, KINDS, LAYOUTS, Network, dot, is_active, up_cases};
use crate::simple::glu;
use moec_codegen::jit::Loaded;
use moec_codegen::spec::{NeuronDown, NeuronPredict, NeuronUp};
use moec_codegen::{ComputeType, KernelSpec, compile};
use moec_ir::op::{Activation, DispatchLayout, Glu};
use moec_ir::types::Format;

/// Predictions for the neurons of slots by the evaluator's formula. `right` is used if there is one; the rows
/// have `cols` numbers.
fn predictions(
    net: &Network,
    x: &[f32],
    [right, left]: [&[f32]; 2],
    margins: &[f32],
    rank: Option<usize>,
) -> Vec<f32> {
    let (inter, hidden) = (net.inter, net.hidden);
    let cols = rank.unwrap_or(hidden);
    strided(net.slots(), inter, inter, |slot, i| {
        let Some(&e) = net.of_slot.get(slot) else { return 0.0 };
        let row = &x[net.table[net.layout.token() + slot] as usize * (hidden + 3)..][..hidden];
        let t: Vec<f32> = match rank {
            Some(rank) => {
                right[e * rank * hidden..].chunks_exact(hidden).take(rank).map(|r| dot(r, row)).collect()
            }
            None => row.to_vec(),
        };
        dot(&left[(e * inter + i) * cols..][..cols], &t) + margins[e * inter + i]
    })
}

#[test]
fn neuron_predictors_equal_their_matrices() {
    let rng = &mut Rng::new(44);
    let mut cases = Vec::new();
    for layout in LAYOUTS {
        for (format, rank) in [
            (Format::Bf16, Some(5)),
            (Format::Bf16, Some(32)),
            (Format::F32, Some(48)),
            (Format::Q4, None),
            (Format::Q8, None),
            (Format::Bf16, None),
        ] {
            let net = Network::new(rng, layout, Format::F32);
            let (hidden, inter, experts) = (net.hidden, net.inter, net.layout.experts);
            let cols = rank.unwrap_or(hidden);
            let right = rng.floats(experts * rank.unwrap_or(0) * hidden);
            let (left, margins) = (rng.floats(experts * inter * cols), rng.floats(experts * inter));
            let x = random(rng, net.n, hidden, hidden + 3);
            let rounded = |rows: usize, cols, w: &[f32]| stored(format, ComputeType::F32, [rows, cols], w);
            let (r, l) =
                (rank.map_or_else(Vec::new, |n| rounded(n, hidden, &right)), rounded(inter, cols, &left));
            let expected = predictions(&net, &x, [&r, &l], &margins, rank);
            let expected = expected
                .iter()
                .enumerate()
                .map(|(at, &x)| if net.of_slot.get(at / inter).is_some() { x } else { f32::NAN });
            let mut operands = vec![Operand::Floats(x.clone()), Operand::Ints(net.table.clone())];
            operands.extend(rank.map(|n| Operand::Weight(format, [experts, n, hidden], right.clone())));
            operands.push(Operand::Weight(format, [experts, inter, cols], left.clone()));
            operands.push(Operand::Weight(Format::F32, [experts, 1, inter], margins.clone()));
            operands.push(Operand::Floats(vec![0.0; net.slots() * inter]));
            operands.push(Operand::Floats(vec![0.0; net.words()]));
            let (layout, x_ld) = (net.layout, hidden + 3);
            let hot = rng.pick(&[None, Some(inter / 2)]).filter(|&hot| hot > 0);
            let expected = expected.enumerate().map(|(at, x)| match hot {
                Some(hot) if at % inter < hot && !x.is_nan() => 0.0,
                _ => x,
            });
            cases.push(Case {
                spec: NeuronPredict { layout, hidden, inter, rank, format, x_ld, hot }.into(),
                n: net.n,
                expect: vec![(operands.len() - 2, Expect::Floats(expected.collect(), 5e-5))],
                operands,
            });
        }
    }
    check(&cases);
}

/// Neurons that are predicted inactive are not computed and give 0. Results of the others are bit-identical
/// to those of a kernel that evaluates every gate.
#[test]
fn gates_are_evaluated_of_neurons_predicted_active() {
    let mut cases = up_cases(&mut Rng::new(45));
    let rng = &mut Rng::new(46);
    // Gate bounds change no result, so one of the two variants is enough.
    cases.retain(|c| matches!(c.spec, KernelSpec::NeuronUp(NeuronUp { compute: ComputeType::F32, .. })));
    for machine in machines() {
        let isa = machine.isa();
        for plain in &cases {
            let mut predicted = plain.clone();
            let KernelSpec::NeuronUp(NeuronUp { predicted: flag, inter, layout, .. }) = &mut predicted.spec
            else {
                unreachable!()
            };
            *flag = true;
            let (inter, layout) = (*inter, *layout);
            let Operand::Floats(h) = &mut predicted.operands[3] else { unreachable!() };
            for x in h.iter_mut() {
                *x = if rng.below(2) == 0 { 1.0 } else { -rng.float().abs() };
            }
            let taken: Vec<bool> = h.iter().map(|&x| x > 0.0).collect();
            let Operand::Ints(table) = &plain.operands[1] else { unreachable!() };
            let Operand::Floats(lists) = &mut predicted.operands[4] else { unreachable!() };
            let listed = predicted_lists(table, layout, inter, lists.len(), &taken);
            *lists = listed.into_iter().map(f32::from_bits).collect();
            let specs = [predicted.spec.clone(), plain.spec.clone()];
            let loaded = Loaded::new(&compile(&machine, &specs, &()).unwrap()).unwrap();
            let [(who, h), (all, exact)] = [&predicted, plain].map(|c| {
                let words = run(loaded.kernel(&c.spec.symbol(&isa)).unwrap(), &isa, c, usize::MAX);
                (is_active(c, &words[4]), words[3].clone())
            });
            let (mut lost, mut kept) = (0, 0);
            for (list, ids) in who.iter().enumerate() {
                let active = list / inter.div_ceil(BLOCK);
                let slots =
                    table[layout.start() + active] as usize..table[layout.start() + active + 1] as usize;
                // A neuron is listed if one of the rows for which it is predicted active activates it.
                for &i in &all[list] {
                    let at = |slot: usize| slot * inter + i as usize;
                    let wakes =
                        slots.clone().any(|slot| taken[at(slot)] && f32::from_bits(exact[at(slot)]) != 0.0);
                    if wakes {
                        assert!(ids.contains(&i), "{:?}", predicted.spec);
                    }
                    lost += usize::from(!ids.contains(&i));
                }
                for &i in ids {
                    assert!(all[list].contains(&i), "{:?}", predicted.spec);
                    for slot in slots.clone() {
                        let at = slot * inter + i as usize;
                        let expected = if taken[at] { exact[at] } else { 0.0_f32.to_bits() };
                        assert_eq!(h[at], expected, "{:?}", predicted.spec);
                        kept += 1;
                    }
                }
            }
            assert!(inter < 32 || (lost > 0 && kept > 0), "{lost} lost, {kept} kept: {:?}", predicted.spec);
        }
    }
}

/// Lists of the neurons that are `taken` by any row of their expert; `taken` is by slot and neuron.
fn predicted_lists(
    table: &[i32],
    layout: DispatchLayout,
    inter: usize,
    words: usize,
    taken: &[bool],
) -> Vec<u32> {
    let mut lists = vec![u32::MAX; words];
    let blocks = inter.div_ceil(BLOCK);
    for (at, list) in lists.chunks_mut(BLOCK + 1).take(table[0] as usize * blocks).enumerate() {
        let active = layout.start() + at / blocks;
        let slots = table[active] as usize..table[active + 1] as usize;
        let first = at % blocks * BLOCK;
        let any = |i: &usize| slots.clone().any(|slot| taken[slot * inter + i]);
        let found: Vec<usize> = (first..inter.min(first + BLOCK)).filter(any).collect();
        list[0] = found.len() as u32;
        list[1..].iter_mut().zip(found).for_each(|(to, i)| *to = i as u32);
    }
    lists
}

/// Lists of active neurons that contain every neuron of every active expert.
fn all_active(table: &[i32], inter: usize, words: usize) -> Vec<u32> {
    let mut lists = vec![0; words];
    let blocks = inter.div_ceil(BLOCK);
    for (at, list) in lists.chunks_mut(BLOCK + 1).take(table[0] as usize * blocks).enumerate() {
        let first = at % blocks * BLOCK;
        let count = BLOCK.min(inter - first);
        list[0] = count as u32;
        list[1..].iter_mut().zip(first..first + count).for_each(|(to, i)| *to = i as u32);
    }
    lists
}

/// Skipping a neuron below a SiLU threshold is bit-identical to computing it and setting it to 0.
#[test]
fn threshold_skips_the_neurons_that_it_sets_to_zero() {
    let rng = &mut Rng::new(44);
    let least = 0.3_f32;
    for machine in machines() {
        let isa = machine.isa();
        for (i, (format, compute)) in
            KINDS.into_iter().filter(|k| !k.1).map(|(format, _, compute)| (format, compute)).enumerate()
        {
            let net = Network::new(rng, LAYOUTS[i % LAYOUTS.len()], format);
            let (layout, hidden, inter, n) = (net.layout, net.hidden, net.inter, net.n);
            let (rows, x_ld, x) = rows_as(compute, &random(rng, n, hidden, hidden), [1, hidden, hidden]);
            let [table, weights] = [Operand::Ints(net.table.clone()), net.operand(format)];
            let zeros = |n: usize| Operand::Floats(vec![0.0; n]);
            let up = |threshold| Case {
                spec: NeuronUp {
                    layout,
                    hidden,
                    inter,
                    format,
                    compute,
                    gate_bound: false,
                    x_ld,
                    predicted: false,
                    glu: Glu::Cats { threshold },
                }
                .into(),
                n,
                operands: vec![
                    rows.clone(),
                    table.clone(),
                    weights.clone(),
                    zeros(net.slots() * inter),
                    zeros(net.words()),
                ],
                expect: Vec::new(),
            };
            let (all, some) = (up(0.0), up(least));
            if !can_multiply(&isa, &all.spec) {
                continue;
            }
            let down =
                KernelSpec::NeuronDown(NeuronDown { layout, hidden, inter, format, gate_bound: false });
            let specs = [all.spec.clone(), some.spec.clone(), down.clone()];
            let loaded = Loaded::new(&compile(&machine, &specs, &()).unwrap()).unwrap();
            let go = |c: &Case| run(loaded.kernel(&c.spec.symbol(&isa)).unwrap(), &isa, c, usize::MAX);
            let [full, thin] = [&all, &some].map(|c| {
                let words = go(c);
                (is_active(c, &words[4]), words[3].clone(), words[4].clone())
            });
            // No magnitude is below a threshold of 0, so all neurons are active.
            let mut cut = full.1.clone();
            let (mut slept, mut woke) = (0, 0);
            for active in 0..net.table[0] as usize {
                let blocks = inter.div_ceil(BLOCK);
                let lists = &thin.0[active * blocks..(active + 1) * blocks];
                assert_eq!(full.0[active * blocks..(active + 1) * blocks].concat().len(), inter);
                for slot in net.table[layout.start() + active]..net.table[layout.start() + active + 1] {
                    let slot = slot as usize;
                    let row = &x[net.table[layout.token() + slot] as usize * hidden..][..hidden];
                    for neuron in 0..inter {
                        let at = slot * inter + neuron;
                        let gate = dot(row, net.part(slot, neuron, 0).unwrap());
                        let size = glu(Glu::Gated(Activation::Silu), gate, 1.0).abs();
                        let listed = lists[neuron / BLOCK].contains(&(neuron as u32));
                        let zero = !listed || f32::from_bits(thin.1[at]) == 0.0;
                        assert!(if zero { size < least + 1e-3 } else { size > least - 1e-3 }, "{size}");
                        assert!(zero || thin.1[at] == full.1[at], "{:?}", some.spec);
                        if zero {
                            cut[at] = 0;
                        }
                        (slept, woke) = (slept + usize::from(zero), woke + usize::from(!zero));
                    }
                }
            }
            assert!(slept > 0 && woke > 0, "{slept} slept and {woke} woke of {format:?}");
            let bits = |words: &[u32]| Operand::Floats(words.iter().map(|w| f32::from_bits(*w)).collect());
            let sum = |h: &[u32], lists: &[u32]| {
                let operands =
                    vec![bits(h), table.clone(), weights.clone(), bits(lists), zeros(net.slots() * hidden)];
                go(&Case { spec: down.clone(), n, operands, expect: Vec::new() })[4].clone()
            };
            let whole = sum(&cut, &all_active(&net.table, inter, net.words()));
            assert_eq!(sum(&thin.1, &thin.2), whole, "{:?}", some.spec);
        }
    }
}
