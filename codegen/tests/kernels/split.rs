//! Neurons with split storage: gates are stored together, and up and down of each neuron at any address.
//! Scales have addresses of their own. Or all is at any address: gates with scales, up with down.

use crate::harness::{Case, Expect, Operand, Rng, check, random, rows_as, stored, strided};
use crate::neurons::{LAYOUTS, Network};
use moec_codegen::spec::NeuronClusters;
use moec_codegen::{ComputeType, WeightOrder};
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

/// Gates, up and down of clusters, in memory and on disk: neurons that are not listed, hot ones and those that a
/// predictor takes to be inactive for a row add nothing.
#[test]
fn clusters_add_up_the_active_neurons() {
    let rng = &mut Rng::new(50);
    let mut cases = Vec::new();
    for layout in LAYOUTS {
        for (format, compute) in KINDS {
            let net = Network::new(rng, layout, format);
            let (layout, hidden, inter, n) = (net.layout, net.hidden, net.inter, net.n);
            let ld = hidden + 3;
            // Products of about 1, so that errors of sums stay small beside them.
            let row = random(rng, n, hidden, ld).into_iter().map(|x| x / f32::from(hidden as u16).sqrt());
            let (rows, x_ld, x) = rows_as(compute, &row.collect::<Vec<_>>(), [1, hidden, ld]);
            let joined = net.joined(RELU, &x, ld);
            let zeros = |n| Operand::Floats(vec![0.0; n]);
            let hot = rng.pick(&[None, Some(1), Some(inter / 2), Some(inter - 1)]).filter(|&n| n > 0);
            let [gates, up_down] = operands(&net, format);
            let clusters = |hot, bundled| NeuronClusters {
                layout,
                hidden,
                inter,
                format,
                compute,
                x_ld,
                glu: RELU,
                hot,
                bundled,
            };
            let mut case = |spec: NeuronClusters, operands: [Operand; 4], expected| {
                let mut all = vec![rows.clone(), Operand::Ints(net.table.clone())];
                all.extend(operands);
                all.push(zeros(net.slots() * hidden));
                let expect = vec![(6, Expect::Floats(expected, 5e-5))];
                cases.push(Case { spec: spec.into(), n, operands: all, expect });
            };
            let cold = net.sums(&joined, |_, i| hot.is_none_or(|hot| i >= hot));
            let operands = [gates, up_down, zeros(net.slots() * inter), zeros(net.words())];
            case(clusters(hot, false), operands, cold);
            // Two of three neurons are listed, and taken to be active for rows with an even slot.
            let listed = |e: usize, i: usize| !(e + i).is_multiple_of(3);
            let takes = |slot: usize, i: usize| {
                slot.is_multiple_of(2) && net.of_slot.get(slot).is_some_and(|&e| listed(e, i))
            };
            let taken = strided(net.slots(), inter, inter, |slot, i| if takes(slot, i) { 1.0 } else { -1.0 });
            let bundles = bundles(&net, format);
            let operands = [bundles, Operand::Same(2), Operand::Floats(taken), net.lists(listed)];
            case(clusters(None, true), operands, net.sums(&joined, takes));
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
        let ([gates, up_down], bundles) = (operands(&net, format), bundles(&net, format));
        let places = vec![
            (WeightOrder::Split, [vec![gates, up_down.clone()], vec![up_down]]),
            (WeightOrder::Bundles, [vec![bundles.clone()], vec![bundles]]),
        ];
        cases.extend(net.panels(rng, (format, compute), places));
    }
    check(&cases);
}
