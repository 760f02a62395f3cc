//! Number of hot neurons of every expert, by the batch that is decoded (PowerInfer-2, §4.1.3 and §5). It is
//! computed for devices with an accelerator for dense work, from the tables of their units and the recorded
//! activity of neurons.
//!
//! [`moec_sim::neurons::plan`] decides for each layer. A step of a batch computes all experts that any of its
//! tokens chose. The hot neurons of each are a dense product of the accelerator, with a launch of its own. Of
//! the others the CPU computes all gates, and up and down of the active ones, which it reads from disk where
//! memory lacks them. Times of units come from their tables of matrix products.

use crate::decisions::Decision;
use moec_backend::{HotBatch, HotLayer, LayerExperts};
use moec_base::error::{Error, Result};
use moec_costs::units::Units;
use moec_cpu::DISK;
use moec_device::DeviceUnit;
use moec_ir::placement::Placement;
use moec_ir::{EntryKind, Glu, Module, Node, Op, Operand};
use moec_profile::{NeuronCounts, Profile};
use moec_sim::neurons::Activations;
use moec_sim::neurons::plan::{Tables, hot_share, time_of};
use moec_sim::neurons::synthetic::Independent;
use moec_sim::neurons::{NeuronError, Recorded};
use serde::Serialize;
use std::collections::BTreeSet;

/// Neurons of a cluster (§4.1.2); fewer if an expert has few.
pub const CLUSTER: usize = 512;
/// Fewest clusters of an expert.
const CLUSTERS: usize = 16;
/// Part of a neuron that is its gate, which stays in memory.
const GATE: f64 = 1.0 / 3.0;
/// Bits of a weight in the tables of phones' device files.
const TABLE_BITS: f64 = 4.0;
/// Bytes of a block of the disk.
const BLOCK: f64 = 4096.0;
/// Simulated steps if memory does not hold all neurons: to fill the cache, and to count.
const DRAWN: [usize; 2] = [32, 32];

/// The experts of a layer, and the costs of the rest of the layer. A dense network is one expert.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Experts {
    /// Layer.
    pub layer: u32,
    /// Function that joins gate and up.
    pub glu: Glu,
    /// Experts.
    pub count: usize,
    /// Experts per token.
    pub k: usize,
    /// Neurons of an expert.
    pub inter: usize,
    /// Channels of a row.
    pub hidden: usize,
    /// Bytes of a neuron.
    pub bytes: f64,
    /// Numbers of the matrices of attention, or of the mixer in its place.
    pub attention: f64,
    /// True if the unit for dense work computes attention while decoding.
    pub attends: bool,
}

impl Experts {
    /// Layers with experts of gate, up and down, as the entry point that decodes one token has them.
    pub fn of(module: &Module, placement: Option<&Placement>, units: &Units<'_>) -> Vec<Self> {
        let Some(graph) = module.entries.iter().find(|g| g.kind == EntryKind::Decode(1)) else {
            return Vec::new();
        };
        let attends = placement.is_some_and(|p| {
            let own = |e| matches!(e, EntryKind::Decode(_));
            p.ops.iter().any(|o| own(o.entry) && o.unit == units.npu_index() && o.op == "attention")
        });
        let router = |layer| {
            let mut own = graph.nodes.iter().filter(|n| n.scope.layer == Some(layer));
            own.find_map(|n| Some(n.op.router()?.k))
        };
        let attention = |layer| -> f64 {
            let mixes = |n: &&Node| n.scope.layer == Some(layer) && n.scope.role().mixes_tokens();
            let own = graph.nodes.iter().filter(mixes);
            let weights = own.flat_map(|n| &n.inputs).filter_map(|input| match input {
                Operand::Weight(id) => Some(module.weight(*id).shape.iter().product::<usize>() as f64),
                Operand::Value(_) | Operand::State(_) => None,
            });
            weights.sum()
        };
        let attended = |layer| {
            graph.nodes.iter().any(|n| n.scope.layer == Some(layer) && matches!(n.op, Op::Attention(_)))
        };
        let layers: BTreeSet<u32> = graph.nodes.iter().filter_map(|n| n.scope.layer).collect();
        let experts = layers.into_iter().filter_map(|layer| {
            // A layer may have its hot neurons in a separate node: prompts take whole experts.
            let experts = LayerExperts::of(module, layer)?;
            let weight = module.weight(experts.gate_up);
            let projections = experts.glu.projections();
            let (count, inter, hidden) = (weight.matrices(), weight.rows() / projections, weight.cols());
            let bytes = ((projections + 1) * hidden) as f64 * weight.format.bits() / 8.0;
            Some(Self {
                layer,
                glu: experts.glu,
                count,
                // Every token takes a dense network.
                k: router(layer).unwrap_or(1),
                inter,
                hidden,
                bytes,
                attention: attention(layer),
                attends: attends && attended(layer),
            })
        });
        experts.collect()
    }

    /// Frequency of their active neurons, by the counts of a profile, and the share of the tokens that takes
    /// each expert; `None` if nothing was counted. Of gates with a threshold these are the counts whose share of
    /// zeros is nearest to that of the threshold.
    pub fn activity(&self, profile: &Profile) -> Option<(NeuronCounts, Vec<f64>)> {
        let counts = profile.neurons(self.layer)?;
        if (counts.experts(), counts.width as usize) != (self.count, self.inter) {
            return None;
        }
        let popularity = if counts.routed {
            let of = profile.layers.iter().find(|l| l.layer == self.layer).filter(|l| l.tokens > 0)?;
            of.chosen.iter().map(|&n| n as f64 / of.tokens as f64).collect()
        } else {
            vec![1.0]
        };
        let level = match self.glu {
            Glu::Cats { threshold } => {
                let zeros = profile.gates.iter().find(|g| g.layer == self.layer)?.below(threshold)?;
                counts.nearest_level(zeros)?
            }
            _ if counts.is_exact() => 0,
            _ => return None,
        };
        Some((counts.of_level(level)?, popularity))
    }

    /// Neurons of a cluster.
    pub fn cluster(&self) -> usize {
        CLUSTER.min(self.inter.div_ceil(CLUSTERS)).max(1)
    }

    /// Seconds of attention for a batch.
    pub fn attention_seconds(&self, units: &Units<'_>, batch: usize) -> f64 {
        let unit = if self.attends { units.npu } else { units.cpu };
        seconds(unit, batch as f64, self.attention) + if self.attends { unit.launch_us() * 1e-6 } else { 0.0 }
    }

    /// Seconds of the unit for dense work for `neurons` neurons of each of `experts` experts: one launch for
    /// each.
    pub fn dense_seconds(&self, units: &Units<'_>, neurons: usize, experts: f64, rows: f64) -> f64 {
        let weights = experts * (neurons * 3 * self.hidden) as f64;
        let launches = experts * units.npu.launch_us() * 1e-6;
        if neurons == 0 { 0.0 } else { launches + seconds(units.npu, rows, weights) }
    }

    /// Seconds of the whole CPU for the gate of one neuron, active or not.
    pub fn gate_seconds(&self, units: &Units<'_>, rows: f64) -> f64 {
        seconds(units.cpu, rows, self.hidden as f64)
    }

    /// Seconds of the whole CPU for up and down of one active neuron.
    pub fn up_down_seconds(&self, units: &Units<'_>, rows: f64) -> f64 {
        seconds(units.cpu, rows, (2 * self.hidden) as f64)
    }

    /// Seconds to read up and down of one neuron from disk; `None` if the device file has no rate.
    pub fn read_seconds(&self, units: &Units<'_>) -> Option<f64> {
        let disk = units.device.memories.iter().find(|m| m.name == DISK)?;
        let bytes = ((1.0 - GATE) * self.bytes / BLOCK).ceil() * BLOCK;
        // Reads are spread over the neurons of the layer.
        let range = bytes * (self.count * self.inter) as f64;
        let (row, gain) = disk.random_reads(bytes as u64, range as u64)?;
        Some(bytes / (row.rate() * gain * 1e9))
    }

    /// Bytes that are read of an expert, of which `hot` neurons are hot and `active` of the others active.
    pub fn bytes_read(&self, hot: usize, active: usize) -> f64 {
        let inactive = self.inter.saturating_sub(hot + active);
        self.bytes * ((hot + active) as f64 + GATE * inactive as f64)
    }

    /// Bytes per second of memory, both units together, as if weights had as many bits as in the tables: a
    /// wider format takes as long there. Infinite if the device file has no rate.
    pub fn memory_rate(&self, units: &Units<'_>) -> f64 {
        let memory = units.device.memories.iter().find(|m| m.name != DISK);
        let rate = memory.and_then(|m| m.bandwidth.last()).map_or(f64::INFINITY, |b| b.rate() * 1e9);
        rate * self.bytes * 8.0 / ((3 * self.hidden) as f64 * TABLE_BITS)
    }

    /// Bytes per second of long reads.
    pub fn sequential(&self, units: &Units<'_>) -> f64 {
        let disk = units.device.memories.iter().find(|m| m.name == DISK);
        let last = disk.and_then(|m| m.sequential.last().or(m.bandwidth.last()));
        last.map_or(f64::INFINITY, |b| b.rate() * 1e9)
    }
}

/// Seconds of a unit for rows and weights, by its table.
fn seconds(unit: &DeviceUnit, rows: f64, weights: f64) -> f64 {
    unit.matmul_us(rows.max(1.0), weights).unwrap_or(0.0) * 1e-6
}

/// Bytes of memory that a program can have on a device; `None` if its file does not say.
pub fn available(units: &Units<'_>) -> Option<f64> {
    let memory = units.device.memories.iter().find(|m| m.name != DISK)?;
    memory.available.as_ref().or(memory.capacity.as_ref()).map(|f| f.value)
}

/// Neurons of each expert of which memory holds up and down, beside all gates, if `room` bytes are left for
/// all experts of all layers.
pub fn resident_neurons(layers: &[Experts], experts: &Experts, room: f64) -> usize {
    let all: f64 = layers.iter().map(|l| l.bytes * (l.count * l.inter) as f64).sum();
    let share = if all <= room { 1.0 } else { ((room / all - GATE) / (1.0 - GATE)).max(0.0) };
    (share * experts.inter as f64) as usize
}

/// The hot neurons of a layer at a batch size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HotShare {
    /// Layer.
    pub layer: u32,
    /// Sequences that are decoded together.
    pub batch: u32,
    /// Hot neurons of each expert: the first ones by activity.
    pub hot: u32,
    /// Neurons of an expert.
    pub neurons: u32,
    /// Expected microseconds of attention and experts.
    pub us: f64,
    /// The same without hot neurons, on the CPU alone.
    pub cold_us: f64,
    /// True if the bundle has networks of the hot neurons.
    pub networks: bool,
}

/// Prefix of decisions about hot neurons.
const SUBJECT: &str = "hot neurons of batches of ";
const NETWORKS: &str = "in networks, beside the CPU, which takes the others";
const TABLES: &str = "none are built";

impl HotShare {
    /// For `decisions.json`.
    pub fn decision(&self) -> Decision {
        let chosen = if self.networks { NETWORKS } else { TABLES };
        let reason = if self.networks {
            "requested by `placement.hot`"
        } else {
            "`placement.hot` does not request them"
        };
        Decision::new("cluster", &format!("{SUBJECT}{}", self.batch), chosen, reason)
            .in_layer(self.layer)
            .with(&[("neurons", self.neurons.into()), ("hot", self.hot.into())])
            .or("with hot neurons", &[("layer_us", self.us)])
            .or("the CPU alone", &[("layer_us", self.cold_us)])
    }

    /// Parses such a decision.
    pub fn of(d: &Decision) -> Option<Self> {
        let batch = d.subject.strip_prefix(SUBJECT)?.parse().ok()?;
        let count = |name: &str| d.figure(name).map(|n| n as u32);
        let us = |at: usize| d.alternatives.get(at)?.figures.get("layer_us").copied();
        let networks = d.chosen == NETWORKS;
        let (hot, neurons) = (count("hot")?, count("neurons")?);
        Some(Self { layer: d.layer?, batch, hot, neurons, us: us(0)?, cold_us: us(1)?, networks })
    }
}

/// Batch by whose counts neurons are ordered: the smallest that is decoded, whose hot neurons all larger
/// batches share.
fn ordering_batch(decoded: &[u32]) -> usize {
    decoded.iter().min().map_or(1, |&batch| batch as usize)
}

/// The hot neurons of every layer whose gates leave zeros by the profile, for each batch size up to the
/// largest counted.
///
/// `room` is the memory for experts, in bytes. If it is too little and the device file has no rate of the
/// disk, there are no hot neurons. For the batches `decoded` networks are requested, and made in any case: if
/// launches do not pay, the count leaves their time out. All batches share one order of neurons, that of the
/// smallest that is decoded.
///
/// # Errors
/// Fails if the tables allow no plan.
pub fn hot(
    layers: &[Experts],
    units: &Units<'_>,
    profile: &Profile,
    room: f64,
    decoded: &[u32],
) -> Result<Vec<HotShare>> {
    let (requested, ordered_by) = (!decoded.is_empty(), ordering_batch(decoded));
    if units.cpu.matmul.is_empty() || units.npu.matmul.is_empty() {
        return Ok(Vec::new());
    }
    let mut all = Vec::new();
    for experts in layers {
        let Some((counts, popularity)) = experts.activity(profile) else { continue };
        let resident = resident_neurons(layers, experts, room);
        let read = if resident < experts.inter { experts.read_seconds(units) } else { Some(0.0) };
        let Some(read) = read else { continue };
        for batch in 1..=counts.batches() {
            let inputs = HotShareInputs {
                experts,
                units,
                batch,
                ordered_by,
                popularity: &popularity,
                resident,
                read,
                requested,
            };
            let planned = inputs.plan(&counts);
            all.push(
                planned.map_err(|e| Error::limit("hot neurons cannot be planned").because(e.to_string()))?,
            );
        }
    }
    Ok(all)
}

/// Makes networks of a unit from hot neurons, for the batches that the build decodes, and marks their shares.
/// Returns them with all neurons of every expert, the hottest first.
///
/// # Errors
/// Fails if no neuron is hot, or if the unit's graphs cannot compute hot neurons.
pub fn networks(
    shares: &mut [HotShare],
    layers: &[Experts],
    module: &Module,
    units: &Units<'_>,
    profile: &Profile,
    decoded: &[u32],
) -> Result<Vec<(HotLayer, Vec<Vec<u32>>)>> {
    let ordered_by = ordering_batch(decoded);
    let nothing = |why: &str| {
        Error::limit("`hot` under `[placement]` requests networks of hot neurons, but none can be made")
            .because(why)
            .hint("remove `hot`: then `experts` places whole experts")
    };
    let mut all: Vec<(HotLayer, Vec<Vec<u32>>)> = Vec::new();
    for share in shares.iter_mut().filter(|s| s.hot > 0 && decoded.contains(&s.batch)) {
        units.graphs.hot(module, share.layer).map_err(|why| {
            nothing(&format!("`{}` cannot have those of layer {}: {why}", units.npu.name, share.layer))
        })?;
        share.networks = true;
        let batch = HotBatch { batch: share.batch, neurons: share.hot };
        match all.iter_mut().find(|(layer, _)| layer.layer == share.layer) {
            Some((layer, _)) => layer.batches.push(batch),
            None => all.push((HotLayer { layer: share.layer, batches: vec![batch] }, Vec::new())),
        }
    }
    for (layer, order) in &mut all {
        let own = layers.iter().find(|e| e.layer == layer.layer).and_then(|e| e.activity(profile));
        let (counts, _) = own.ok_or_else(|| Error::bug("a share of what was not counted"))?;
        let batch = ordered_by.min(counts.batches()).max(1);
        let own = |e: usize| counts.hottest(e, batch).into_iter().map(|n| n as u32).collect();
        *order = (0..counts.experts()).map(own).collect();
    }
    if all.is_empty() {
        return Err(nothing(
            "the profile shows no gates with zeros, or hot neurons do not pay for a batch size of this build",
        ));
    }
    Ok(all)
}

/// The layers whose hot neurons are networks of a bundle, by its decisions.
pub fn layers(decisions: &[Decision]) -> Vec<HotLayer> {
    let mut all: Vec<HotLayer> = Vec::new();
    for share in decisions.iter().filter_map(HotShare::of).filter(|s| s.networks) {
        let batch = HotBatch { batch: share.batch, neurons: share.hot };
        match all.iter_mut().find(|layer| layer.layer == share.layer) {
            Some(layer) => layer.batches.push(batch),
            None => all.push(HotLayer { layer: share.layer, batches: vec![batch] }),
        }
    }
    all
}

/// Experts that a step of a batch uses on average.
pub fn used(popularity: &[f64], batch: usize) -> f64 {
    popularity.iter().map(|p| 1.0 - (1.0 - p).max(0.0).powi(batch as i32)).sum()
}

struct HotShareInputs<'a> {
    experts: &'a Experts,
    units: &'a Units<'a>,
    batch: usize,
    /// Batch by whose counts neurons are ordered.
    ordered_by: usize,
    popularity: &'a [f64],
    resident: usize,
    /// Seconds to read a neuron from disk that memory does not hold.
    read: f64,
    /// True if networks are made although their launches do not pay.
    requested: bool,
}

impl HotShareInputs<'_> {
    fn plan(&self, counts: &NeuronCounts) -> std::result::Result<HotShare, NeuronError> {
        let Self { experts, units, batch, resident: held, .. } = *self;
        let used = used(self.popularity, batch).max(1.0);
        let rows = (batch * experts.k) as f64 / used;
        let cluster = experts.cluster();
        let dense = |n: usize| (n, experts.dense_seconds(units, n, used, rows));
        let ends = if cluster < experts.inter { vec![cluster, experts.inter] } else { vec![experts.inter] };
        let by_rank = by_rank(counts, batch, self.ordered_by.min(counts.batches()).max(1));
        let tables = Tables {
            cluster,
            dense: ends.into_iter().map(dense).collect(),
            sparse: used * experts.up_down_seconds(units, rows),
            predict: used * experts.gate_seconds(units, rows),
            gate: GATE,
            attention: experts.attention_seconds(units, batch),
            bytes: used * experts.bytes,
            disk: experts.sequential(units),
            read: used * self.read,
            memory: experts.memory_rate(units),
            held,
            active: by_rank,
        };
        let drawn = (tables.read > 0.0).then(|| self.draw(&tables.active));
        let recorded = drawn.as_ref().map(|activations| Recorded { activations, warmup: DRAWN[0] });
        let mut share = hot_share(&tables, recorded.as_ref())?;
        if self.requested && share.hot == 0 {
            let launch = used * units.npu.launch_us() * 1e-6;
            let dense = tables.dense.iter().map(|&(n, seconds)| (n, (seconds - launch).max(0.0))).collect();
            let hot = hot_share(&Tables { dense, ..tables.clone() }, recorded.as_ref())?.hot;
            share = time_of(&tables, recorded.as_ref(), hot)?;
        }
        let cold = time_of(&tables, recorded.as_ref(), 0)?;
        Ok(HotShare {
            layer: experts.layer,
            batch: batch as u32,
            hot: share.hot as u32,
            neurons: experts.inter as u32,
            us: share.seconds * 1e6,
            cold_us: cold.seconds * 1e6,
            networks: false,
        })
    }

    /// Simulates steps of the layer: experts by their popularity, neurons by their frequencies, each step
    /// independent of the last. A profile does not record which neurons neighbouring tokens share, so that
    /// more is read here than in fact.
    fn draw(&self, frequencies: &[f64]) -> Activations {
        let mut random = Independent::new(1);
        let tokens = (0..DRAWN.iter().sum()).map(|_| {
            let chosen =
                random.active(self.popularity.iter().map(|p| 1.0 - (1.0 - p).powi(self.batch as i32)));
            let chosen = if chosen.is_empty() { vec![0] } else { chosen };
            chosen.into_iter().map(|e| (e, random.active(frequencies.iter().copied()))).collect()
        });
        let tokens = tokens.collect();
        Activations { matrices: self.experts.count as u32, neurons: self.experts.inter as u32, tokens }
    }
}

/// Mean frequency of an expert's active neurons in the batches that the expert takes part in, by rank: ranks
/// are those of batches of `ordered_by`. Experts are weighted by the number of these batches.
pub fn by_rank(seen: &NeuronCounts, batch: usize, ordered_by: usize) -> Vec<f64> {
    let width = seen.width as usize;
    let (mut sums, mut batches) = (vec![0.0; width], 0.0);
    for expert in 0..seen.experts() {
        let of = seen.active(expert, 0, batch).1 as f64;
        let ranked = seen.hottest(expert, ordered_by).into_iter();
        let counts = ranked.map(|n| seen.active(expert, n, batch).0);
        sums.iter_mut().zip(counts).for_each(|(sum, n)| *sum += n as f64);
        batches += of;
    }
    sums.into_iter().map(|sum| if batches > 0.0 { (sum / batches).min(1.0) } else { 0.0 }).collect()
}

#[cfg(test)]
mod tests;
