//! Experts by neurons: inactive neurons are not read, and gate bounds do not change any bit.

use crate::experts::{dispatch, experts_of_slots};
use crate::harness::{Case, Expect, Operand, Rng, check, random, rows_as, run, stored, strided};
use crate::machines::machines;
use crate::simple::glu;
use moec_codegen::jit::Loaded;
use moec_codegen::spec::{ExpertDown, ExpertGateUp, NeuronDown, NeuronUp};
use moec_codegen::{ComputeType, KernelSpec, RowFormat, Schedule, WeightOrder, active_list_words, compile};
use moec_ir::op::{Activation, DispatchLayout, Glu};
use moec_ir::types::Format;

/// Rows, experts per token, experts, valid rows.
pub(crate) const LAYOUTS: [(usize, usize, usize, usize); 3] = [(4, 2, 16, 1), (4, 2, 3, 4), (8, 3, 4, 5)];
/// Neurons per block.
pub(crate) const BLOCK: usize = 32;
pub(crate) const KINDS: [(Format, bool, ComputeType); 10] = [
    (Format::F32, false, ComputeType::F32),
    (Format::F32, true, ComputeType::F32),
    (Format::Bf16, false, ComputeType::F32),
    (Format::Bf16, true, ComputeType::F32),
    (Format::F16, false, ComputeType::F32),
    (Format::F16, true, ComputeType::F32),
    (Format::Q8, false, ComputeType::F32),
    (Format::Q4, false, ComputeType::F32),
    (Format::Q8, false, ComputeType::I8),
    (Format::Q4, false, ComputeType::I8),
];
/// Row widths. Some are whole multiples of every machine's step; some leave a remainder after a vector of
/// scales, some do not.
const WIDTHS: [usize; 9] = [17, 64, 80, 128, 288, 333, 500, 640, 1200];

/// Experts with their dispatch table, inputs and weights.
pub(crate) struct Network {
    pub(crate) layout: DispatchLayout,
    pub(crate) n: usize,
    pub(crate) table: Vec<i32>,
    pub(crate) of_slot: Vec<usize>,
    pub(crate) hidden: usize,
    pub(crate) inter: usize,
    pub(crate) weights: Vec<f32>,
    /// The weights after rounding to the format.
    pub(crate) held: Vec<f32>,
}

impl Network {
    pub(crate) fn new(
        rng: &mut Rng,
        (rows, k, experts, n): (usize, usize, usize, usize),
        format: Format,
    ) -> Self {
        let layout = DispatchLayout { rows, k, experts };
        let (hidden, inter) = (rng.pick(&WIDTHS), rng.pick(&[5, 32, 33, 70]));
        let table = dispatch(rng, layout, n);
        let of_slot = experts_of_slots(layout, &table);
        let weights = rng.floats(experts * inter * 3 * hidden);
        let held = stored(format, ComputeType::F32, [3 * inter, hidden], &weights);
        Self { layout, n, table, of_slot, hidden, inter, weights, held }
    }

    /// Part `part` of a neuron of a slot's expert; `None` for an empty slot.
    pub(crate) fn part(&self, slot: usize, neuron: usize, part: usize) -> Option<&[f32]> {
        let e = *self.of_slot.get(slot)?;
        Some(&self.held[((e * self.inter + neuron) * 3 + part) * self.hidden..][..self.hidden])
    }

    pub(crate) fn operand(&self, format: Format) -> Operand {
        Operand::Weight(format, [self.layout.experts, self.inter, 3 * self.hidden], self.weights.clone())
    }

    pub(crate) fn slots(&self) -> usize {
        self.layout.rows * self.layout.k
    }

    pub(crate) fn words(&self) -> usize {
        active_list_words(self.layout, self.inter)
    }

    /// Lists of the active experts' neurons for which `is_active(expert, neuron)` is true, as words.
    pub(crate) fn lists(&self, is_active: impl Fn(usize, usize) -> bool) -> Operand {
        let (blocks, mut words) = (self.inter.div_ceil(BLOCK), vec![-1_i32; self.words()]);
        for active in 0..self.table[0] as usize {
            let e = self.table[self.layout.expert() + active] as usize;
            for block in 0..blocks {
                let own = block * BLOCK..self.inter.min((block + 1) * BLOCK);
                let listed: Vec<usize> = own.filter(|&i| is_active(e, i)).collect();
                let list = &mut words[(active * blocks + block) * (BLOCK + 1)..];
                list[0] = listed.len() as i32;
                list[1..].iter_mut().zip(listed).for_each(|(to, i)| *to = i as i32);
            }
        }
        Operand::Floats(words.iter().map(|w| f32::from_bits(w.cast_unsigned())).collect())
    }

    /// Gate and up of every slot and neuron, joined; `ld` is the distance of the rows of `x`. 0 for empty slots.
    pub(crate) fn joined(&self, g: Glu, x: &[f32], ld: usize) -> Vec<f32> {
        strided(self.slots(), self.inter, self.inter, |slot, i| {
            let (Some(gate), Some(up)) = (self.part(slot, i, 0), self.part(slot, i, 1)) else { return 0.0 };
            let row = &x[self.table[self.layout.token() + slot] as usize * ld..][..self.hidden];
            glu(g, dot(row, gate), dot(row, up))
        })
    }

    /// Down of every slot: sums over the neurons for which `is_active(slot, neuron)` is true.
    pub(crate) fn sums(&self, h: &[f32], is_active: impl Fn(usize, usize) -> bool) -> Vec<f32> {
        strided(self.slots(), self.hidden, self.hidden, |slot, c| {
            let down = |i| self.part(slot, i, 2).map_or(0.0, |d| d[c]);
            let own = (0..self.inter).filter(|&i| slot < self.of_slot.len() && is_active(slot, i));
            own.map(|i| f64::from(h[slot * self.inter + i]) * f64::from(down(i))).sum::<f64>() as f32
        })
    }

    /// Many rows times all neurons, by panels: gate and up, then down, for each order with its operands of either.
    pub(crate) fn panels(
        &self,
        rng: &mut Rng,
        (format, compute): (Format, ComputeType),
        places: Vec<(WeightOrder, [Vec<Operand>; 2])>,
    ) -> Vec<Case> {
        let &Self { layout, hidden, inter, n, .. } = self;
        let (g, bias, schedule) = (Glu::Gated(Activation::Relu), false, Schedule::default());
        let (rows, x_ld, x) = rows_as(compute, &random(rng, n, hidden, hidden), [1, hidden, hidden]);
        let (factors, h_ld, h) = rows_as(compute, &rng.floats(self.slots() * inter), [1, inter, inter]);
        let case = |spec: KernelSpec, rows: &Operand, weights: Vec<Operand>, expected: Vec<f32>| {
            let mut operands = vec![rows.clone(), Operand::Ints(self.table.clone())];
            operands.extend(weights);
            operands.push(Operand::Floats(vec![0.0; expected.len()]));
            let expect = vec![(operands.len() - 1, Expect::Floats(expected, 2e-4))];
            Case { spec, n, operands, expect }
        };
        let mut cases = Vec::new();
        for (order, [of_up, of_down]) in places {
            let (out, glu) = (RowFormat::f32(inter), g);
            let up = ExpertGateUp {
                layout,
                hidden,
                inter,
                format,
                compute,
                x_ld,
                glu,
                bias,
                out,
                order,
                schedule,
            };
            let down = ExpertDown { layout, inter, hidden, format, compute, h_ld, bias, order, schedule };
            cases.push(case(up.into(), &rows, of_up, self.joined(g, &x, hidden)));
            cases.push(case(down.into(), &factors, of_down, self.sums(&h, |_, _| true)));
        }
        cases
    }
}

pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() as f32
}

pub(crate) fn up_cases(rng: &mut Rng) -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, layout) in LAYOUTS.into_iter().enumerate() {
        for (format, gate_bound, compute) in KINDS {
            let net = Network::new(rng, layout, format);
            let (hidden, inter) = (net.hidden, net.inter);
            let g = [Glu::Gated(Activation::Relu), Glu::DRelu, Glu::FatRelu { threshold: 0.5 }][i];
            let ld = hidden + 3;
            let (rows, x_ld, x) = rows_as(compute, &random(rng, net.n, hidden, ld), [1, hidden, ld]);
            let expected = strided(net.slots(), inter, inter, |slot, c| {
                let (Some(gate), Some(up)) = (net.part(slot, c, 0), net.part(slot, c, 1)) else {
                    return f32::NAN;
                };
                let row = &x[net.table[net.layout.token() + slot] as usize * ld..][..hidden];
                let gate = dot(row, gate);
                // Not compared, since rounding decides whether a neuron with so small a gate is active.
                let least = if let Glu::FatRelu { threshold } = g { threshold } else { 0.0 };
                if gate < least + 1e-4 { f32::NAN } else { glu(g, gate, dot(row, up)) }
            });
            let layout = net.layout;
            cases.push(Case {
                spec: NeuronUp {
                    layout,
                    hidden,
                    inter,
                    format,
                    compute,
                    gate_bound,
                    predicted: false,
                    x_ld,
                    glu: g,
                }
                .into(),
                n: net.n,
                operands: vec![
                    rows,
                    Operand::Ints(net.table.clone()),
                    net.operand(format),
                    Operand::Floats(vec![0.0; net.slots() * inter]),
                    Operand::Floats(vec![0.0; net.words()]),
                ],
                expect: vec![(3, Expect::Floats(expected, 5e-5))],
            });
        }
    }
    cases
}

#[test]
fn gates_first_then_up_of_active_neurons() {
    check(&up_cases(&mut Rng::new(40)));
}

#[test]
fn columns_of_active_neurons() {
    let rng = &mut Rng::new(41);
    let mut cases = Vec::new();
    for layout in LAYOUTS {
        for (format, gate_bound, _) in KINDS {
            let net = Network::new(rng, layout, format);
            let (hidden, inter) = (net.hidden, net.inter);
            // All neurons active, none, or one in five.
            let share = rng.pick(&[1, 0, 5]);
            let is_active: Vec<bool> =
                (0..net.layout.experts * inter).map(|_| share > 0 && rng.below(share.max(1)) == 0).collect();
            // The values of inactive neurons are NaN, since they must not be read.
            let h = strided(net.slots(), inter, inter, |slot, i| match net.of_slot.get(slot) {
                Some(e) if is_active[e * inter + i] => rng.float(),
                _ => f32::NAN,
            });
            let expected = net.sums(&h, |slot, i| is_active[net.of_slot[slot] * inter + i]);
            let layout = net.layout;
            cases.push(Case {
                spec: NeuronDown { layout, hidden, inter, format, gate_bound }.into(),
                n: net.n,
                operands: vec![
                    Operand::Floats(h),
                    Operand::Ints(net.table.clone()),
                    net.operand(format),
                    net.lists(|e, i| is_active[e * inter + i]),
                    Operand::Floats(vec![0.0; net.slots() * hidden]),
                ],
                expect: vec![(4, Expect::Floats(expected, 5e-5))],
            });
        }
    }
    check(&cases);
}

/// Lists of the active neurons of every active expert and block.
pub(crate) fn is_active(case: &Case, words: &[u32]) -> Vec<Vec<u32>> {
    let (Operand::Ints(table), KernelSpec::NeuronUp(NeuronUp { inter, .. })) =
        (&case.operands[1], &case.spec)
    else {
        unreachable!()
    };
    let lists = words.chunks_exact(BLOCK + 1).take(table[0] as usize * inter.div_ceil(BLOCK));
    lists.map(|list| list[1..=list[0] as usize].to_vec()).collect()
}

#[test]
fn gate_bounds_change_no_bit() {
    let mut cases = up_cases(&mut Rng::new(42));
    cases.retain(|c| matches!(c.spec, KernelSpec::NeuronUp(NeuronUp { gate_bound: true, .. })));
    for machine in machines() {
        let isa = machine.isa();
        for bounded in &cases {
            let mut plain = bounded.clone();
            if let KernelSpec::NeuronUp(NeuronUp { gate_bound, .. }) = &mut plain.spec {
                *gate_bound = false;
            }
            let specs = [bounded.spec.clone(), plain.spec.clone()];
            let loaded = Loaded::new(&compile(&machine, &specs, &()).unwrap()).unwrap();
            let ran = [bounded, &plain].map(|c| {
                let words = run(loaded.kernel(&c.spec.symbol(&isa)).unwrap(), &isa, c, usize::MAX);
                (is_active(c, &words[4]), words[3].clone())
            });
            let [(who, h), (all, plain)] = ran;
            assert_eq!(who, all, "{:?}", bounded.spec);
            let KernelSpec::NeuronUp(NeuronUp { inter, layout, .. }) = bounded.spec else { unreachable!() };
            let Operand::Ints(table) = &bounded.operands[1] else { unreachable!() };
            for (list, ids) in who.iter().enumerate() {
                let active = list / inter.div_ceil(BLOCK);
                for slot in table[layout.start() + active]..table[layout.start() + active + 1] {
                    for &i in ids {
                        let at = slot as usize * inter + i as usize;
                        assert_eq!(h[at], plain[at], "{:?}", bounded.spec);
                    }
                }
            }
        }
    }
}

/// Formats, and the compute types of panels made of neurons.
const PANELS: [(Format, bool, ComputeType); 9] = [
    (Format::F32, false, ComputeType::F32),
    (Format::Bf16, true, ComputeType::F32),
    (Format::F16, false, ComputeType::F32),
    (Format::Q8, false, ComputeType::F32),
    (Format::Q4, false, ComputeType::F32),
    (Format::Bf16, false, ComputeType::Bf16),
    (Format::Bf16, true, ComputeType::Bf16),
    (Format::Q8, false, ComputeType::Bf16),
    (Format::Q4, false, ComputeType::Bf16),
];

#[test]
fn many_rows_are_multiplied_by_panels_of_neuron_bundles() {
    let rng = &mut Rng::new(43);
    let mut cases = Vec::new();
    for layout in [(40, 2, 3, 40), (33, 4, 8, 9)] {
        for (format, gate_bound, compute) in PANELS {
            let mut net = Network::new(rng, layout, format);
            net.held = stored(format, compute, [3 * net.inter, net.hidden], &net.weights);
            let weights = || vec![net.operand(format)];
            let order = WeightOrder::Neurons { gate_bound };
            cases.extend(net.panels(rng, (format, compute), vec![(order, [weights(), weights()])]));
        }
    }
    check(&cases);
}
