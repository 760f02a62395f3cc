//! Choice for `skip = "auto"` under a budget: experts that stay on disk are read whole or by neurons.
//!
//! One model predicts the reads of either cache, without an order of tokens. Memory keeps what was used most
//! often in the calibration; everything else is read whenever a token requests it. With neurons, gates,
//! separate scales and tables of addresses take part of that memory. The padding of a neuron to blocks of the
//! disk is read, too (PowerInfer-2, §4.2 to §4.4). Small reads are slower. So bytes of neurons are scaled by
//! the factor of their block size in the device's table, or by that of a measured disk (`READ`).

use crate::decisions::Decision;
use crate::{cluster, size_expert_cache};
use moec_backend::DenseNeurons;
use moec_device::{Bandwidth, Memory};
use moec_ir::bundle::{Bundle, DiskNeurons, PARTS, UnitRead};
use moec_ir::{EntryKind, Format, Module, Operand, WeightId};
use moec_profile::Profile;
use moec_runtime::offload::disk::BLOCK;
use std::collections::BTreeSet;

/// Cost of a read besides its own bytes, in bytes, if no table has rates of block sizes. Measured on the disk
/// of `docs/neuron-cache.md`: random reads of 4, 8, 32 and 512 KiB at 0.30, 0.56, 1.3 and 1.9 GB/s.
const READ: f64 = 20.0 * 1024.0;
/// Share of up and down that memory must hold besides the gates: activations are not known yet, and with less
/// a prompt reads everything twice.
const LEAST: f64 = 0.25;

/// Experts of a layer, and their frequencies of use.
#[derive(Clone, Debug, PartialEq)]
struct Layer {
    bundle: Bundle,
    /// By expert, the share of tokens that choose it.
    chosen: Vec<f64>,
    /// By expert and neuron, the share of these tokens that activate the neuron.
    active: Vec<Vec<f64>>,
}

/// Bytes that are read together, and how often.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Item {
    /// Share of tokens that request it.
    often: f64,
    /// Bytes of the read, and in memory.
    read: f64,
    held: f64,
}

/// Expected reads of a token, in bytes. Those by neurons are `None` if memory has no room for their gates and
/// part of the rest.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Expected {
    experts: f64,
    neurons: Option<f64>,
}

/// Decides for a module whose experts stay on disk, before `cluster`. Returns true if neurons are read one by
/// one, with gates in memory, and false if whole experts are read. `None`: there is no choice, since some
/// experts have no gates that leave zeros or calibration has not seen them.
pub fn decide(
    module: &Module,
    profile: &Profile,
    budget: u64,
    disk: Option<&Memory>,
) -> Option<(bool, Decision)> {
    let (layers, weights) = layers(module, profile)?;
    let other = other_bytes(module, &weights);
    let found = expected(&layers, budget as f64 - other);
    let bundle = layers.first()?.bundle;
    let times = times_slower(disk, (bundle.up_down_pitch() * bundle.read_together()) as u64);
    let by_neurons = found.neurons.is_some_and(|bytes| bytes * times < found.experts);
    let why = match found.neurons {
        None => "gates would leave too little of the budget for active neurons".to_owned(),
        Some(_) => {
            format!("expected bytes per token, where those of small reads count {times:.1} times")
        }
    };
    let [whole, neurons] = ["whole", "by neurons"];
    let mut decision =
        Decision::new("cluster", "experts on disk", if by_neurons { neurons } else { whole }, why)
            .or(whole, &[("token_bytes", found.experts.round())]);
    if let Some(bytes) = found.neurons {
        decision = decision.or(neurons, &[("token_bytes", bytes.round())]);
    }
    Some((by_neurons, decision))
}

/// Layers with experts, and the weights of all experts; `None` unless all have neurons that can be read and
/// were counted. Of a model without experts: its dense networks, which every token takes.
fn layers(module: &Module, profile: &Profile) -> Option<(Vec<Layer>, BTreeSet<WeightId>)> {
    let graph = module.entries.iter().find(|g| matches!(g.kind, EntryKind::Decode(_)))?;
    let (mut layers, mut weights) = (Vec::new(), BTreeSet::new());
    let experts = graph.nodes.iter().filter(|n| n.op.expert_ffn().is_some());
    let mut found =
        experts.map(|n| Some((n.scope.layer?, cluster::halves(module, n)?))).collect::<Option<Vec<_>>>()?;
    if found.is_empty() {
        let all: BTreeSet<u32> = graph.nodes.iter().filter_map(|n| n.scope.layer).collect();
        let of = |layer| Some((layer, DenseNeurons::of(module, graph, layer)?));
        found.extend(all.into_iter().filter_map(of).map(|(layer, n)| (layer, [n.gate_up, n.down])));
    }
    for (layer, [gate_up, down]) in found {
        let weight = module.weight(gate_up);
        let bundle = Bundle { format: weight.format, hidden: weight.cols(), gate_bound: false };
        let (experts, inter) = (weight.matrices(), weight.rows() / 2);
        let (chosen, active) = activity(profile, layer, experts, inter)?;
        layers.push(Layer { bundle, chosen, active });
        weights.extend([gate_up, down]);
    }
    // All layers share frames.
    let first = layers.first()?.bundle;
    layers.iter().all(|l| l.bundle == first).then_some((layers, weights))
}

/// By expert of a layer, the share of tokens that choose it; and by expert and neuron, the share of these that
/// activate the neuron. `None` if they were not counted.
fn activity(
    profile: &Profile,
    layer: u32,
    experts: usize,
    inter: usize,
) -> Option<(Vec<f64>, Vec<Vec<f64>>)> {
    let counts = profile.neurons(layer).filter(|c| c.is_exact())?;
    let share = |(part, all): (u64, u64)| if all > 0 { part as f64 / all as f64 } else { 0.0 };
    let routing = profile.layers.iter().find(|r| r.layer == layer).filter(|r| r.tokens > 0);
    let chosen: Vec<f64> = match routing {
        Some(routing) => routing.chosen.iter().map(|&n| share((n, routing.tokens))).collect(),
        None if !counts.routed => vec![1.0],
        None => return None,
    };
    if (chosen.len(), counts.experts(), counts.width as usize) != (experts, experts, inter) {
        return None;
    }
    let active = |e| (0..inter).map(|i| share(counts.active(e, i, 1))).collect();
    Some((chosen, (0..experts).map(active).collect()))
}

/// A layer's predictor, as the reads of its neurons depend on it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Predicted {
    /// Layer.
    pub layer: u32,
    /// Format and size of its neurons.
    pub bundle: Bundle,
    /// Bytes of its predictors, which stay in memory.
    pub held: f64,
    /// Share of the neurons that are active.
    pub active: f64,
    /// Share of the active neurons that the predictor finds.
    pub recall: f64,
    /// Share of all neurons that it takes to be active.
    pub taken: f64,
}

impl Predicted {
    /// Share of tokens that read the gate of a neuron, by its activity: false positives are spread evenly.
    fn reads_gate(&self, active: f64) -> f64 {
        let wrong = (self.taken - self.active * self.recall) / (1.0 - self.active).max(f64::EPSILON);
        active * self.recall + (1.0 - active) * wrong.clamp(0.0, 1.0)
    }

    /// Reads of a layer's gates, and of up and down.
    fn units(&self, chosen: &[f64], active: &[Vec<f64>]) -> Vec<Item> {
        let stored = DiskNeurons { bundle: self.bundle, gates: true };
        let any = |often: Vec<f64>| 1.0 - often.iter().map(|p| 1.0 - p).product::<f64>();
        let mut items = Vec::new();
        for (&chosen, active) in chosen.iter().zip(active) {
            let mut hot = active.clone();
            hot.sort_unstable_by(|a, b| b.total_cmp(a));
            for unit in hot.chunks(stored.together()) {
                let mut push = |often: f64, read: UnitRead| {
                    let held = (read.bytes * stored.together()) as f64;
                    items.push(Item { often: chosen * often, read: read.read as f64, held });
                };
                push(any(unit.iter().map(|a| a * self.recall).collect()), stored.up_down());
                if let Some(gate) = stored.gate() {
                    push(any(unit.iter().map(|&a| self.reads_gate(a)).collect()), gate);
                }
            }
        }
        items
    }
}

/// Decides where gates of neurons on disk are, if every layer has a predictor: in memory, where all are computed,
/// or on disk, from which those that the predictor names are read (PowerInfer-2, §4.3). `requested` predictors
/// are used in any case. `module` has gates in memory. Returns true if gates stay on disk; `None` if calibration
/// has not counted the activity of neurons.
pub fn gates(
    module: &Module,
    profile: &Profile,
    (budget, disk): (u64, Option<&Memory>),
    predicted: &[Predicted],
    requested: bool,
) -> Option<(bool, Decision)> {
    let nodes = module.entries.iter().flat_map(|g| &g.nodes).filter(|n| n.op.pages_neurons());
    let weights: BTreeSet<WeightId> =
        nodes.flat_map(|n| n.inputs.iter().filter_map(|&input| weight_of(input))).collect();
    let room = budget as f64 - other_bytes(module, &weights);
    let (mut layers, mut units, mut held) = (Vec::new(), Vec::new(), 0.0);
    for own in predicted {
        let stem = format!("layers.{}.", own.layer);
        let gates = weights.iter().map(|&id| module.weight(id)).find(|w| w.name.starts_with(&stem))?;
        let (chosen, active) = activity(profile, own.layer, gates.matrices(), gates.rows())?;
        units.extend(own.units(&chosen, &active));
        held += own.held;
        layers.push(Layer { bundle: own.bundle, chosen, active });
    }
    let neurons: usize = layers.iter().flat_map(|l| &l.active).map(Vec::len).sum();
    let stored = DiskNeurons { bundle: layers.first()?.bundle, gates: true };
    let notes = (neurons as u64 * size_expert_cache::ADDRESS) as f64 * stored.addresses() as f64
        + (units.len() as u64 * size_expert_cache::NOTES) as f64;
    let on_disk = missed(units, (room - held - notes).max(0.0));
    let in_memory = expected(&layers, room).neurons;
    let slower = |read: usize| times_slower(disk, read as u64);
    let bundle = stored.bundle;
    let own = slower(bundle.up_down_pitch() * bundle.read_together());
    let least = stored.gate().map_or(own, |gate| slower(gate.read.min(stored.up_down().read)));
    let stays = requested || in_memory.is_none_or(|bytes| on_disk * least < bytes * own);
    let why = match in_memory {
        _ if requested => "a predictor is requested",
        None => "gates would leave too little of the budget for active neurons",
        Some(_) => "expected bytes per token",
    };
    let [memory, disk] = ["in memory", "on disk"];
    let mut decision = Decision::new("cluster", "gates of neurons", if stays { disk } else { memory }, why)
        .or(disk, &[("token_bytes", on_disk.round()), ("held_bytes", held)]);
    if let Some(bytes) = in_memory {
        let held: f64 = layers.iter().map(Layer::resident).sum();
        decision = decision.or(memory, &[("token_bytes", bytes.round()), ("held_bytes", held)]);
    }
    Some((stays, decision))
}

/// The weight of an operand.
const fn weight_of(operand: Operand) -> Option<WeightId> {
    match operand {
        Operand::Weight(id) => Some(id),
        Operand::Value(_) | Operand::State(_) => None,
    }
}

/// Bytes that a run takes besides experts, without activations: other weights, states in f32 at most, the
/// process.
fn other_bytes(module: &Module, experts: &BTreeSet<WeightId>) -> f64 {
    let numbers = |shape: &[usize]| shape.iter().product::<usize>() as f64;
    let ids = (0..).map(WeightId).zip(&module.weights).filter(|(id, _)| !experts.contains(id));
    let weights: f64 = ids.map(|(_, w)| numbers(&w.shape) * w.format.bits() / 8.0).sum();
    let states: f64 = module.states.iter().map(|s| numbers(&s.ty.shape) * Format::F32.bits() / 8.0).sum();
    weights + states + size_expert_cache::PROCESS as f64
}

/// Expected reads of a token if experts have `room` bytes of memory.
fn expected(layers: &[Layer], room: f64) -> Expected {
    let experts = layers.iter().flat_map(|l| {
        let part = |rows: usize, cols: usize| (rows as f64) * (cols as f64) * l.bundle.format.bits() / 8.0;
        let whole = |bytes: f64| (bytes / BLOCK as f64).ceil() * BLOCK as f64;
        let (inter, hidden) = (l.active.first().map_or(0, Vec::len), l.bundle.hidden);
        let bytes = whole(part(2 * inter, hidden)) + whole(part(hidden, inter));
        l.chosen.iter().map(move |&often| Item { often, read: bytes, held: bytes })
    });
    let experts = missed(experts.collect(), room.max(0.0));
    let neurons: usize = layers.iter().flat_map(|l| &l.active).map(Vec::len).sum();
    let resident: f64 = layers.iter().map(Layer::resident).sum();
    let units: Vec<Item> = layers.iter().flat_map(Layer::units).collect();
    let notes = neurons as f64
        * size_expert_cache::ADDRESS as f64
        * layers.first().map_or(1, |l| l.bundle.up_down_addresses()) as f64
        + units.len() as f64 * size_expert_cache::NOTES as f64;
    let left = room - resident - notes;
    let all: f64 = units.iter().map(|u| u.held).sum();
    Expected { experts, neurons: (left >= LEAST * all).then(|| missed(units, left)) }
}

/// Bytes per token that memory does not hold, if it holds what is used most often.
fn missed(mut items: Vec<Item>, room: f64) -> f64 {
    items.sort_unstable_by(|a, b| b.often.total_cmp(&a.often));
    let mut taken = 0.0;
    let read = items.iter().map(|item| {
        taken += item.held;
        if taken > room { item.often * item.read } else { 0.0 }
    });
    read.sum()
}

impl Layer {
    /// Bytes of gates and of separate scales.
    fn resident(&self) -> f64 {
        let each = self.bundle.part_bytes() + (PARTS - 1) * self.bundle.up_down_scales_bytes();
        (self.active.iter().map(Vec::len).sum::<usize>() * each) as f64
    }

    /// Neurons that are read together: the hottest of an expert come first.
    fn units(&self) -> impl Iterator<Item = Item> + '_ {
        let b = self.bundle;
        let each = b.read_together();
        let [read, held] = [b.up_down_pitch(), b.up_down_bytes()].map(|bytes| (bytes * each) as f64);
        self.chosen.iter().zip(&self.active).flat_map(move |(&chosen, active)| {
            let mut hot = active.clone();
            hot.sort_unstable_by(|a, b| b.total_cmp(a));
            let inactive = |unit: &[f64]| unit.iter().map(|p| 1.0 - p).product::<f64>();
            let often: Vec<f64> = hot.chunks(each).map(|unit| chosen * (1.0 - inactive(unit))).collect();
            often.into_iter().map(move |often| Item { often, read, held })
        })
    }
}

/// Factor by which a byte is slower in reads of `bytes` bytes than in the largest reads.
fn times_slower(disk: Option<&Memory>, bytes: u64) -> f64 {
    let rows = disk.map_or(&[][..], |m| &m.bandwidth);
    let best = rows.iter().map(Bandwidth::rate).fold(0.0, f64::max);
    let own = rows.iter().rfind(|b| b.block_bytes <= bytes).filter(|b| b.gb_per_s > 0.0);
    own.map_or(1.0 + READ / bytes.max(1) as f64, |own| best / own.rate())
}

#[cfg(test)]
mod tests {
    use super::*;
    use moec_device::Bandwidth;

    /// Two experts, one chosen three times as often. Every fifth neuron is active for all tokens, the others
    /// for few.
    fn layer(format: Format, few: f64) -> Layer {
        let active: Vec<f64> = (0..100).map(|i| if i % 5 == 0 { 1.0 } else { few }).collect();
        let bundle = Bundle { format, hidden: 2048, gate_bound: false };
        Layer { bundle, chosen: vec![0.25, 0.75], active: vec![active.clone(), active] }
    }

    #[test]
    fn most_used_items_stay_in_memory() {
        let item = |often, bytes| Item { often, read: bytes, held: bytes };
        let items = || vec![item(0.1, 10.0), item(0.5, 10.0), item(0.4, 10.0)];
        assert_eq!(missed(items(), 0.0), 10.0);
        assert_eq!(missed(items(), 20.0), 1.0);
        assert_eq!(missed(items(), 30.0), 0.0);
    }

    #[test]
    fn active_neurons_are_read_and_gates_take_memory() {
        let layer = layer(Format::Bf16, 0.0);
        let gates = 200.0 * 4096.0;
        // With room for gates and half of up and down, all active neurons fit.
        let found = expected(std::slice::from_ref(&layer), gates + 100.0 * 8192.0 + 200.0 * 56.0);
        assert_eq!(found.neurons, Some(0.0));
        // With room for one expert, the other is read by a quarter of the tokens.
        assert_eq!(found.experts, 0.25 * 100.0 * 12288.0);
        let found = expected(std::slice::from_ref(&layer), gates);
        assert_eq!(found.neurons, None);
        assert_eq!(expected(&[layer], -1.0).experts, 100.0 * 12288.0);
    }

    #[test]
    fn codes_are_read_without_scales_and_in_whole_blocks() {
        let units = |format| layer(format, 0.5).units().collect::<Vec<_>>();
        assert_eq!(units(Format::Q8).len(), 200);
        assert!(units(Format::Q8).iter().all(|u| (u.read, u.held) == (4096.0, 4096.0)));
        // Two neurons share a block of q4, which is read if either is active.
        let q4 = units(Format::Q4);
        assert_eq!((q4.len(), q4[0].often, q4[99].often), (100, 0.25, 0.75 * 0.75));
    }

    #[test]
    fn small_reads_are_weighted_by_the_bandwidth_table() {
        let row = |(block_bytes, gb_per_s)| Bandwidth {
            block_bytes,
            gb_per_s,
            source: String::new(),
            achieved: None,
        };
        let bandwidth = [(4096, 0.5), (65_536, 1.5), (524_288, 2.0)].map(row);
        let memory = Memory { name: "disk".to_owned(), bandwidth: bandwidth.to_vec(), ..Memory::default() };
        assert_eq!([4096, 8192, 1 << 20].map(|n| times_slower(Some(&memory), n)), [4.0, 4.0, 1.0]);
        assert_eq!([4096, 8192].map(|n| times_slower(None, n)), [6.0, 3.5]);
    }
}
