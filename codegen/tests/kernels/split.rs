//! Neurons with split storage: gates are stored together, and up and down of each neuron at any address.
//! Scales have addresses of their own. Or all is at any address: gates with scales, up with down.

use crate::harness::{Case, Expect, Operand, Rng, check, random, rows_as, stored, strided};
use crate::neurons::{BLOCK, LAYOUTS, Network, dot};
use crate::simple::glu;
use moec_codegen::spec::{ExpertDown, ExpertGateUp, NeuronDownAt, NeuronGate, NeuronUpAt};
use moec_codegen::{ComputeType, RowFormat, Schedule, WeightOrder};
use moec_ir::op::{Activation, Glu};
use moec_ir::plan::Layout;
use moec_ir::types::Format;

/// Formats with their compute types for gate and up.
const KINDS: [(Format, ComputeType); 7] = [
    (Format::F32, ComputeType::F32),
    (Format::Bf16, ComputeType::F32),
    (Format::F16, ComputeType::F32),
    (Format::Q8, ComputeType::F32),
    (Format::Q4, ComputeType::F32),
    (Format::Q8, ComputeType::I8),
    (Format::Q4, ComputeType::I8),
];
const RELU: Glu = Glu::Gated(Activation::Relu);

/// Gates of a network, and its up and down weights.
fn operands(net: &Network, format: Format) -> [Operand; 2] {
    let rows = net.weights.chunks_exact(3 * net.hidden);
    let gates = rows.clone().flat_map(|row| &row[..net.hidden]).copied().collect();
    let up_down = rows.flat_map(|row| &row[net.hidden..]).copied().collect();
    let shape = |parts| [net.layout.experts, net.inter, parts * net.hidden];
    [Operand::Weight(format, shape(1), gates), Operand::OnDisk(Layout::UpDown, format, shape(2), up_down)]
}

/// A network whose gates are read with the rest.
fn bundles(net: &Network, format: Format) -> Operand {
    let shape = [net.layout.experts, net.inter, 3 * net.hidden];
    Operand::OnDisk(Layout::Bundles, format, shape, net.weights.clone())
}

/// Lists of the active experts' neurons for which `is_active(expert, neuron)` is true, as words.
fn lists(net: &Network, is_active: impl Fn(usize, usize) -> bool) -> Operand {
    let (blocks, mut words) = (net.inter.div_ceil(BLOCK), vec![-1_i32; net.words()]);
    for active in 0..net.table[0] as usize {
        let e = net.table[net.layout.expert() + active] as usize;
        for block in 0..blocks {
            let listed = (block * BLOCK..net.inter.min((block + 1) * BLOCK)).filter(|&i| is_active(e, i));
            let listed: Vec<usize> = listed.collect();
            let list = &mut words[(active * blocks + block) * (BLOCK + 1)..];
            list[0] = listed.len() as i32;
            list[1..].iter_mut().zip(listed).for_each(|(to, i)| *to = i as i32);
        }
    }
    Operand::Floats(words.iter().map(|w| f32::from_bits(w.cast_unsigned())).collect())
}

#[test]
fn gates_by_themselves_then_up_of_active_neurons() {
    let rng = &mut Rng::new(50);
    let mut cases = Vec::new();
    for layout in LAYOUTS {
        for (format, compute) in KINDS {
            let net = Network::new(rng, layout, format);
            let (layout, hidden, inter, n) = (net.layout, net.hidden, net.inter, net.n);
            let ld = hidden + 3;
            let (rows, x_ld, x) = rows_as(compute, &random(rng, n, hidden, ld), [1, hidden, ld]);
            let row = |slot: usize| &x[net.table[layout.token() + slot] as usize * ld..][..hidden];
            let part = |slot, i, part| net.part(slot, i, part).map(|w| dot(row(slot), w));
            let [gates, up_down] = operands(&net, format);
            let found = strided(net.slots(), inter, inter, |slot, i| part(slot, i, 0).unwrap_or(f32::NAN));
            let zeros = |n| Operand::Floats(vec![0.0; n]);
            // Two of three neurons are listed, some of them with gates that are not positive.
            let listed = |e: usize, i: usize| !(e + i).is_multiple_of(3);
            let (bundled, hot) = (true, None);
            // A predictor takes the listed neurons to be active, of rows with an even slot.
            let takes = |slot: usize, i: usize| {
                slot.is_multiple_of(2) && net.of_slot.get(slot).is_some_and(|&e| listed(e, i))
            };
            let taken = strided(net.slots(), inter, inter, |slot, i| if takes(slot, i) { 1.0 } else { -1.0 });
            let gated = strided(net.slots(), inter, inter, |slot, i| match net.of_slot.get(slot) {
                Some(&e) if listed(e, i) && takes(slot, i) => found[slot * inter + i],
                // Minus infinity, which has no distance.
                Some(&e) if listed(e, i) => f32::NAN,
                _ => -1.0,
            });
            cases.push(Case {
                spec: NeuronGate { layout, hidden, inter, format, compute, x_ld, glu: RELU, hot, bundled }
                    .into(),
                n,
                operands: vec![
                    rows.clone(),
                    Operand::Ints(net.table.clone()),
                    bundles(&net, format),
                    Operand::Floats(taken),
                    lists(&net, listed),
                ],
                expect: vec![(3, Expect::Floats(gated, 5e-5))],
            });
            // Gates of hot neurons are not computed, so that these are not listed either.
            let hot = rng.pick(&[None, Some(1), Some(inter / 2), Some(inter - 1)]).filter(|&n| n > 0);
            let cold = strided(net.slots(), inter, inter, |slot, i| match found[slot * inter + i] {
                _ if hot.is_some_and(|hot| i < hot) => 0.0,
                gate => gate,
            });
            cases.push(Case {
                spec: NeuronGate {
                    layout,
                    hidden,
                    inter,
                    format,
                    compute,
                    x_ld,
                    glu: RELU,
                    hot,
                    bundled: false,
                }
                .into(),
                n,
                operands: vec![
                    rows.clone(),
                    Operand::Ints(net.table.clone()),
                    gates,
                    zeros(net.slots() * inter),
                    zeros(net.words()),
                ],
                expect: vec![(3, Expect::Floats(cold, 5e-5))],
            });
            let h = strided(net.slots(), inter, inter, |slot, i| match found[slot * inter + i] {
                gate if gate.is_nan() => 0.0,
                gate => gate,
            });
            let joined = strided(net.slots(), inter, inter, |slot, i| {
                let (gate, e) = (h[slot * inter + i], net.of_slot.get(slot));
                match (part(slot, i, 1), e) {
                    (Some(up), Some(&e)) if listed(e, i) => glu(RELU, gate, up),
                    _ => gate,
                }
            });
            for (bundled, weights) in [(false, up_down), (true, bundles(&net, format))] {
                cases.push(Case {
                    spec: NeuronUpAt { layout, hidden, inter, format, compute, x_ld, glu: RELU, bundled }
                        .into(),
                    n,
                    operands: vec![
                        rows.clone(),
                        Operand::Ints(net.table.clone()),
                        weights,
                        Operand::Floats(h.clone()),
                        lists(&net, listed),
                    ],
                    expect: vec![(3, Expect::Floats(joined.clone(), 5e-5))],
                });
            }
        }
    }
    check(&cases);
}

#[test]
fn columns_of_active_neurons_in_split_storage() {
    let rng = &mut Rng::new(51);
    let mut cases = Vec::new();
    for layout in LAYOUTS {
        for (format, _) in KINDS.into_iter().filter(|k| k.1 == ComputeType::F32) {
            let net = Network::new(rng, layout, format);
            let (layout, hidden, inter) = (net.layout, net.hidden, net.inter);
            let share = rng.pick(&[1, 2, 5]);
            let is_active: Vec<bool> = (0..layout.experts * inter).map(|_| rng.below(share) == 0).collect();
            let h = strided(net.slots(), inter, inter, |slot, i| match net.of_slot.get(slot) {
                Some(e) if is_active[e * inter + i] => rng.float(),
                _ => f32::NAN,
            });
            let expected = strided(net.slots(), hidden, hidden, |slot, c| {
                let Some(e) = net.of_slot.get(slot) else { return 0.0 };
                let down = |i| net.part(slot, i, 2).map_or(0.0, |d| d[c]);
                let is_active = (0..inter).filter(|i| is_active[e * inter + i]);
                is_active.map(|i| f64::from(h[slot * inter + i]) * f64::from(down(i))).sum::<f64>() as f32
            });
            let [_, up_down] = operands(&net, format);
            for (bundled, weights) in [(false, up_down), (true, bundles(&net, format))] {
                cases.push(Case {
                    spec: NeuronDownAt { layout, hidden, inter, format, bundled }.into(),
                    n: net.n,
                    operands: vec![
                        Operand::Floats(h.clone()),
                        Operand::Ints(net.table.clone()),
                        weights,
                        lists(&net, |e, i| is_active[e * inter + i]),
                        Operand::Floats(vec![0.0; net.slots() * hidden]),
                    ],
                    expect: vec![(4, Expect::Floats(expected.clone(), 5e-5))],
                });
            }
        }
    }
    check(&cases);
}

/// Formats, and the compute types of panels made of neurons.
const PANELS: [(Format, ComputeType); 6] = [
    (Format::Bf16, ComputeType::F32),
    (Format::Q8, ComputeType::F32),
    (Format::Q4, ComputeType::F32),
    (Format::Bf16, ComputeType::Bf16),
    (Format::Q8, ComputeType::Bf16),
    (Format::Q4, ComputeType::Bf16),
];

#[test]
fn many_rows_are_multiplied_by_panels_of_split_neurons() {
    let rng = &mut Rng::new(52);
    let mut cases = Vec::new();
    for (format, compute) in PANELS {
        let mut net = Network::new(rng, (33, 4, 8, 9), format);
        net.held = stored(format, compute, [3 * net.inter, net.hidden], &net.weights);
        let (layout, hidden, inter, n) = (net.layout, net.hidden, net.inter, net.n);
        let schedule = Schedule::default();
        let (rows, x_ld, x) = rows_as(compute, &random(rng, n, hidden, hidden), [1, hidden, hidden]);
        let joined = strided(net.slots(), inter, inter, |slot, i| {
            let (Some(gate), Some(up)) = (net.part(slot, i, 0), net.part(slot, i, 1)) else { return 0.0 };
            let row = &x[net.table[layout.token() + slot] as usize * hidden..][..hidden];
            glu(RELU, dot(row, gate), dot(row, up))
        });
        let [gates, up_down] = operands(&net, format);
        let (table, zeros) = (Operand::Ints(net.table.clone()), |n| Operand::Floats(vec![0.0; n]));
        let out = RowFormat::f32(inter);
        let places = [
            (WeightOrder::Split, vec![gates, up_down.clone()]),
            (WeightOrder::Bundles, vec![bundles(&net, format)]),
        ];
        for (order, weights) in places {
            let mut operands = vec![rows.clone(), table.clone()];
            operands.extend(weights);
            operands.push(zeros(net.slots() * inter));
            cases.push(Case {
                spec: ExpertGateUp {
                    layout,
                    hidden,
                    inter,
                    format,
                    compute,
                    x_ld,
                    glu: RELU,
                    bias: false,
                    out,
                    order,
                    schedule,
                }
                .into(),
                n,
                expect: vec![(operands.len() - 1, Expect::Floats(joined.clone(), 2e-4))],
                operands,
            });
        }
        let (rows, h_ld, h) = rows_as(compute, &rng.floats(net.slots() * inter), [1, inter, inter]);
        let expected = strided(net.slots(), hidden, hidden, |slot, c| {
            let down = |i| net.part(slot, i, 2).map_or(0.0, |d| d[c]);
            (0..inter).map(|i| f64::from(h[slot * inter + i]) * f64::from(down(i))).sum::<f64>() as f32
        });
        for (order, weights) in [(WeightOrder::Split, up_down), (WeightOrder::Bundles, bundles(&net, format))]
        {
            cases.push(Case {
                spec: ExpertDown {
                    layout,
                    inter,
                    hidden,
                    format,
                    compute,
                    h_ld,
                    bias: false,
                    order,
                    schedule,
                }
                .into(),
                n,
                operands: vec![rows.clone(), table.clone(), weights, zeros(net.slots() * hidden)],
                expect: vec![(3, Expect::Floats(expected.clone(), 2e-4))],
            });
        }
    }
    check(&cases);
}
