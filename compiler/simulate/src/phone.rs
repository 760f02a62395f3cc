//! Decoding on a phone, neuron by neuron (PowerInfer-2, §4): hot neurons on the unit for dense work, cold
//! ones on the CPU's cores, those that memory lacks from disk. What is kept ([`Segmented`]) and who computes
//! what next ([`neurons::simulate`]) is decided by the runtime's policies, how many neurons are hot by the
//! bundle; how long things take is a model of the device file's tables.
//!
//! Experts are those of recorded routing, with as many sequences side by side as are decoded together. A
//! profile says how often a neuron is active, and not when: neurons are drawn by that, each token
//! independently of the last, which reads more than tokens do that request much the same. As in a bundle,
//! every expert is a launch, the CPU computes the gates of all cold neurons, which are in memory, and up and
//! down of the active ones are read where memory lacks them.

use super::bundle::Request;
use super::costs::Constant;
use super::paged::routing;
use moec_base::error::{Error, Result};
use moec_bundle::read::Bundle;
use moec_costs::timeline::{Span, Task, TaskKind, Timeline};
use moec_costs::units::Units;
use moec_device::DeviceUnit;
use moec_ir::EntryKind;
use moec_passes::hot::HotShare;
use moec_passes::hot::{Experts, available, resident_neurons};
use moec_profile::NeuronCounts;
use moec_runtime::offload::neurons::{Part, Regions, Segmented, Shape};
use moec_sim::cache::Trace;
use moec_sim::neurons::synthetic::Independent;
use moec_sim::neurons::{self, Job, Order, Stage};
use std::collections::{BTreeMap, BTreeSet};

/// Steps that are decoded by default.
pub const DECODED: u32 = 16;
/// Seed of random numbers.
const SEED: u64 = 1;

/// Result.
#[derive(Clone, Debug)]
pub struct Simulated {
    /// Sequences that are decoded together.
    pub batch: u32,
    /// Tokens decoded of each.
    pub decode: u32,
    /// Tokens of recorded routing that there are, 0 of a dense model; more are taken from their start again.
    pub recorded: usize,
    /// The bundle's hot neurons at this batch, by layer.
    pub hot: Vec<HotShare>,
    /// Part of the experts' neurons that memory holds.
    pub held: f64,
    /// Neurons that were active, of routed experts, and of these those that were hot and those that were
    /// read.
    pub active: [u64; 3],
    /// Bytes that were read from disk.
    pub disk_bytes: f64,
    /// Tasks and their times: the unit for dense work, every core, the disk.
    pub timeline: Timeline,
    /// Numbers of the model, and their sources.
    pub constants: Vec<Constant>,
}

impl Simulated {
    /// Tokens per second, of all sequences.
    pub fn speed(&self) -> f64 {
        f64::from(self.batch * self.decode) / (self.timeline.wall_us * 1e-6).max(f64::MIN_POSITIVE)
    }

    /// Bytes read from disk per token.
    pub fn bytes_per_token(&self) -> f64 {
        self.disk_bytes / f64::from((self.batch * self.decode).max(1))
    }
}

/// Simulates decoding with a bundle that knows hot neurons. `memory`: bytes that there are for experts; none:
/// what the device file leaves a program.
///
/// # Errors
/// No profile with counts of neurons, or one of another model; a batch that nothing was decided for; a device
/// without figures of its units.
pub fn phone(
    bundle: &Bundle,
    hot: &[HotShare],
    request: &Request<'_>,
    batch: Option<u32>,
    memory: Option<u64>,
) -> Result<Simulated> {
    let device = request.device;
    let units = Units::of(device).filter(|u| !u.cpu.matmul.is_empty() && !u.npu.matmul.is_empty());
    let units = units.ok_or_else(|| {
        Error::input(format!("the device file of `{}` has no tables of matrix products", device.name))
            .hint("leave `--target` out: the bundle knows its own device")
    })?;
    let batch = batch.unwrap_or(1);
    let decode = request.decode.unwrap_or(DECODED).max(1);
    let hot: Vec<HotShare> = hot.iter().filter(|h| h.batch == batch).cloned().collect();
    if hot.is_empty() {
        return Err(Error::usage(format!("the bundle has no hot neurons for {batch} sequences"))
            .hint("`--batch` is 1 to 4"));
    }
    let all = Experts::of(&bundle.graph()?, Some(&bundle.plan.placement), &units);
    // A dense network is the only expert of its layer, and routing is not recorded.
    let (dense, routed): (Vec<Experts>, Vec<Experts>) = all.into_iter().partition(|l| l.count == 1);
    let shapes: Vec<(u32, u32)> = routed.iter().map(|l| (l.count as u32, l.k as u32)).collect();
    let trace = (!shapes.is_empty()).then(|| routing(&shapes, request)).transpose()?;
    // Those whose gates leave zeros, with their place in the trace.
    let routed = routed.into_iter().enumerate().map(|(place, l)| (Some(place), l));
    let all = routed.chain(dense.into_iter().map(|l| (None, l)));
    let mut all: Vec<(Option<usize>, Experts)> =
        all.filter(|(_, l)| hot.iter().any(|h| h.layer == l.layer)).collect();
    all.sort_by_key(|(_, l)| l.layer);
    let (places, layers): (Vec<Option<usize>>, Vec<Experts>) = all.into_iter().unzip();
    let room = memory.map(|m| m as f64).or_else(|| of_budget(bundle, &layers, &hot)).or(available(&units));
    let room = room.unwrap_or(f64::INFINITY);
    let mut scene = PhoneState::new(&layers, &hot, &units, request, room)?;
    let recorded = trace.as_ref().map_or(0, Trace::tokens);
    let section = (recorded / batch as usize).max(1);
    for step in 0..decode {
        for (layer, &place) in places.iter().enumerate() {
            let tokens =
                (0..batch as usize).map(|s| (s * section + step as usize % section) % recorded.max(1));
            let chosen = |token| match trace.as_ref().zip(place) {
                Some((trace, place)) => trace.step(token, place).chosen.to_vec(),
                None => vec![0],
            };
            let chosen: Vec<Vec<u16>> = tokens.map(chosen).collect();
            scene.layer(step, layer, &chosen)?;
        }
    }
    let all: f64 = layers.iter().map(|l| l.bytes * (l.count * l.inter) as f64).sum();
    Ok(Simulated {
        batch,
        decode,
        recorded,
        held: (room / all).min(1.0),
        active: scene.active,
        disk_bytes: scene.disk_bytes,
        constants: constants(&units, &layers, &scene),
        timeline: Timeline { wall_us: scene.now, ..scene.timeline },
        hot,
    })
}

/// Bytes for experts of a bundle whose neurons stay on disk: gates, frames, and networks.
fn of_budget(bundle: &Bundle, layers: &[Experts], hot: &[HotShare]) -> Option<f64> {
    let paging = bundle.plan.paging.as_ref().filter(|p| p.by_neurons())?;
    let decodes = |kind| hot.first().is_some_and(|h| kind == EntryKind::Decode(h.batch));
    let hot = |layer: u32| hot.iter().find(|h| h.layer == layer).map_or(0, |h| h.hot as usize);
    let gates_and_networks = layers.iter().map(|l| l.bytes_read(hot(l.layer), 0) * l.count as f64);
    let entry = bundle.plan.entries.iter().position(|e| decodes(e.kind)).unwrap_or(usize::MAX);
    let frames = f64::from(paging.regions_of(entry).frames);
    Some(gates_and_networks.sum::<f64>() + frames * paging.frame_bytes as f64)
}

/// A layer's neurons in memory.
struct ResidentNeurons {
    cache: Segmented,
    /// By expert and rank, how often a token activates a neuron.
    frequencies: Vec<Vec<f64>>,
    hot: usize,
    /// Neurons of each expert that memory holds.
    resident: usize,
}

struct PhoneState<'a> {
    layers: &'a [Experts],
    units: &'a Units<'a>,
    residency: Vec<ResidentNeurons>,
    /// Cores that compute; the last of them reads where anything is read.
    cores: usize,
    reads: bool,
    random: Independent,
    /// Microseconds so far.
    now: f64,
    active: [u64; 3],
    disk_bytes: f64,
    timeline: Timeline,
}

impl<'a> PhoneState<'a> {
    fn new(
        layers: &'a [Experts],
        hot: &[HotShare],
        units: &'a Units<'a>,
        request: &Request<'_>,
        room: f64,
    ) -> Result<Self> {
        let mut all = Vec::new();
        for layer in layers {
            let counts = request.profile.and_then(|p| layer.activity(p));
            let (counts, _) = counts.ok_or_else(|| {
                Error::input("hot and cold neurons are simulated with a profile that has counted them")
                    .hint("`--trace` names a profile of `moec calibrate`, of the same model")
            })?;
            let hot = hot.iter().find(|h| h.layer == layer.layer).map_or(0, |h| h.hot as usize);
            all.push(ResidentNeurons::new(
                layer,
                &counts,
                hot.min(layer.inter),
                resident_neurons(layers, layer, room),
            )?);
        }
        let reads = all.iter().zip(layers).any(|(h, l)| h.resident < l.inter);
        let (names, cores) = rows(units);
        if reads && layers.iter().any(|l| l.read_seconds(units).is_none()) {
            return Err(Error::input(format!(
                "the device file of `{}` does not say how fast the disk is read",
                units.device.name
            )));
        }
        if reads && cores < 2 {
            return Err(Error::input(format!("`{}` has one core, and one reads", units.device.name)));
        }
        Ok(Self {
            layers,
            units,
            residency: all,
            cores,
            reads,
            random: Independent::new(SEED),
            now: 0.0,
            active: [0; 3],
            disk_bytes: 0.0,
            timeline: Timeline { queues: names, ..Timeline::default() },
        })
    }

    /// Cores that compute.
    fn workers(&self) -> usize {
        self.cores - usize::from(self.reads)
    }

    fn push_task(
        &mut self,
        queue: usize,
        what: TaskKind,
        (start, end): (f64, f64),
        (call, layer, index): (u32, u32, Option<u32>),
    ) {
        if end > start {
            let us = end - start;
            let task = Task {
                queue,
                kind: what,
                part: what,
                us,
                lag_us: 0.0,
                after: Vec::new(),
                layer,
                call,
                index,
                rows: 1,
            };
            self.timeline.tasks.push(task);
            self.timeline.spans.push(Span { start, end });
        }
    }

    /// A layer of a step, whose sequences chose these experts.
    fn layer(&mut self, call: u32, at: usize, chosen: &[Vec<u16>]) -> Result<()> {
        let experts = self.layers[at];
        let id = (call, experts.layer, None);
        let (disk, batch) = (1 + self.cores, chosen.len());
        let attention = experts.attention_seconds(self.units, batch) * 1e6;
        let attends = if experts.attends { vec![0] } else { (1..=self.workers()).collect() };
        let attended = self.now + attention;
        for queue in attends {
            self.push_task(queue, TaskKind::Attention, (self.now, attended), id);
        }
        let used: BTreeSet<u16> = chosen.iter().flatten().copied().collect();
        let rows = (batch * experts.k) as f64 / used.len().max(1) as f64;
        // Hot neurons that memory lacks come while attention computes, and keep the rest waiting if they come
        // late.
        let (hot, held) = (self.residency[at].hot, self.residency[at].resident);
        let late = hot.saturating_sub(held) as f64 * experts.bytes * used.len() as f64;
        let come = self.now + late / experts.sequential(self.units) * 1e6;
        self.disk_bytes += late;
        self.push_task(disk, TaskKind::ReadAhead, (self.now, come), id);
        let start = attended.max(come);
        let dense = experts.dense_seconds(self.units, hot, used.len() as f64, rows) * 1e6;
        self.push_task(0, TaskKind::Experts, (start, start + dense), id);

        let (jobs, bytes) = self.jobs(at, chosen, rows)?;
        let out = neurons::simulate(&jobs, self.workers(), Order::Cluster).map_err(wrong)?;
        for span in &out.spans {
            let (what, queue) =
                if span.worker == 0 { (TaskKind::Read, disk) } else { (TaskKind::Experts, span.worker) };
            let us = |ns: u64| start + ns as f64 * 1e-3;
            self.push_task(
                queue,
                what,
                (us(span.from), us(span.to)),
                (call, experts.layer, Some(span.task.cluster)),
            );
            if span.worker == 0 {
                self.push_task(
                    self.cores,
                    what,
                    (us(span.from), us(span.to)),
                    (call, experts.layer, Some(span.task.cluster)),
                );
            }
        }
        let shared = bytes / experts.memory_rate(self.units) * 1e6;
        self.now = start + dense.max(out.makespan as f64 * 1e-3).max(shared);
        Ok(())
    }

    /// Clusters of cold neurons, and the bytes of all neurons that are computed.
    fn jobs(&mut self, at: usize, chosen: &[Vec<u16>], rows: f64) -> Result<(Vec<Job>, f64)> {
        let (experts, own) = (self.layers[at], &mut self.residency[at]);
        let ns = |seconds: f64| Some((seconds * 1e9).round() as u64).filter(|&ns| ns > 0);
        // A core has its part of the CPU.
        let gate = experts.gate_seconds(self.units, rows) * self.cores as f64;
        let up_down = experts.up_down_seconds(self.units, rows) * self.cores as f64;
        let read = experts.read_seconds(self.units).unwrap_or(0.0);
        let mut neurons: BTreeMap<u16, BTreeSet<u32>> = BTreeMap::new();
        for &expert in chosen.iter().flatten() {
            let frequencies = own.frequencies.get(usize::from(expert)).map_or(&[][..], Vec::as_slice);
            neurons.entry(expert).or_default().extend(self.random.active(frequencies.iter().copied()));
        }
        own.cache.begin();
        let (mut jobs, mut computed) = (Vec::new(), 0.0);
        for (block, (expert, active)) in neurons.into_iter().enumerate() {
            self.active[0] += active.len() as u64;
            let cold: Vec<u32> = active.iter().copied().filter(|&n| n as usize >= own.hot).collect();
            self.active[1] += (active.len() - cold.len()) as u64;
            computed += experts.bytes_read(own.hot, cold.len());
            let there: Vec<bool> =
                cold.iter().map(|&n| own.cache.holds(expert.into(), n, Part::Whole)).collect();
            // By cluster: cold neurons, those of them that are active, and those that are read.
            let mut clusters: BTreeMap<usize, [f64; 3]> = BTreeMap::new();
            for n in own.hot..experts.inter {
                clusters.entry(n / experts.cluster()).or_default()[0] += 1.0;
            }
            // Neurons in memory are used first, so that none of them is evicted before its use.
            for pass in [true, false] {
                for (&n, _) in cold.iter().zip(&there).filter(|(_, there)| **there == pass) {
                    let found = own.cache.neuron(expert.into(), n, Part::Whole, |_| ()).map_err(wrong)?;
                    let missing = found.read() > 0;
                    self.active[2] += u64::from(missing);
                    self.disk_bytes += if missing { experts.bytes } else { 0.0 };
                    let cluster = clusters.entry(n as usize / experts.cluster()).or_default();
                    cluster[1] += 1.0;
                    cluster[2] += f64::from(u8::from(missing));
                }
            }
            for [cold, active, missing] in clusters.into_values() {
                let mut job = Job { block: block as u32, ..Job::default() };
                job.stages[Stage::Gate as usize] = ns(cold * gate);
                job.stages[Stage::ReadUpDown as usize] = ns(missing * read);
                job.stages[Stage::UpDown as usize] = ns(active * up_down);
                jobs.push(job);
            }
        }
        Ok((jobs, computed))
    }
}

impl ResidentNeurons {
    /// The hottest cold neurons are in memory at the beginning.
    fn new(layer: &Experts, counts: &NeuronCounts, hot: usize, held: usize) -> Result<Self> {
        let shape = Shape {
            matrices: layer.count as u32,
            neurons: layer.inter as u32,
            cluster: layer.cluster() as u32,
            gate: 1,
            up_down: 0,
        };
        let room = held.saturating_sub(hot) * layer.count;
        let regions = Regions::of(room as u64, 0, 0).map_err(wrong)?;
        let mut cache = Segmented::new(shape, regions).map_err(wrong)?;
        for rank in (hot..held).rev() {
            for expert in 0..shape.matrices {
                cache.begin();
                cache.neuron(expert, rank as u32, Part::Whole, |_| ()).map_err(wrong)?;
            }
        }
        let frequencies = |expert: usize| {
            let share = |n: usize| {
                let (active, of) = counts.active(expert, n, 1);
                if of == 0 { 0.0 } else { active as f64 / of as f64 }
            };
            counts.hottest(expert, 1).into_iter().map(share).collect()
        };
        Ok(Self { cache, frequencies: (0..layer.count).map(frequencies).collect(), hot, resident: held })
    }
}

/// Names of the rows of a timeline, and how many cores compute: the slowest of three kinds or more do not
/// (§4.3).
fn rows(units: &Units<'_>) -> (Vec<String>, usize) {
    let clusters = &units.cpu.clusters;
    let names = |of: &[moec_device::Cluster]| -> Vec<String> {
        of.iter().flat_map(|c| (1..=c.cores).map(move |i| format!("{} {i}", c.name))).collect()
    };
    let computing = if clusters.len() > 2 { &clusters[..clusters.len() - 1] } else { &clusters[..] };
    let mut cores = names(computing);
    if cores.is_empty() {
        cores = (1..=units.cpu.cores.unwrap_or(1).max(1)).map(|i| format!("core {i}")).collect();
    }
    let count = cores.len();
    let idle = names(&clusters[computing.len()..]);
    let all = std::iter::once(units.npu.name.clone()).chain(cores).chain(["disk".to_owned()]).chain(idle);
    (all.collect(), count)
}

fn constants(units: &Units<'_>, layers: &[Experts], scene: &PhoneState<'_>) -> Vec<Constant> {
    let table = |what: &'static str, unit: &DeviceUnit| {
        let row = unit.matmul.first()?;
        Some(Constant {
            what,
            value: format!("a table of {} rows", unit.matmul.len()),
            source: row.source.clone(),
        })
    };
    let mut all: Vec<Constant> =
        [table("products of cores", units.cpu), table("products of the unit for dense work", units.npu)]
            .into_iter()
            .flatten()
            .collect();
    let own = |what, value: String, source: &str| Constant { what, value, source: source.to_owned() };
    all.push(own(
        "cores that compute",
        scene.workers().to_string(),
        "PowerInfer-2, §4.3: one reads where anything is read; each has an equal part",
    ));
    if let Some(seconds) = layers.first().and_then(|l| l.read_seconds(units)).filter(|_| scene.reads) {
        all.push(own(
            "a neuron from disk",
            format!("{:.1} µs", seconds * 1e6),
            "the device file's random reads, in blocks of 4096 bytes",
        ));
    }
    all.push(own(
        "neurons of a token",
        "independent of the last one's".to_owned(),
        "a profile counts how often, not when",
    ));
    let launch = format!("{:.0} µs for each expert", units.npu.launch_us());
    all.push(own("a launch of the unit for dense work", launch, "the device file's cost of a launch"));
    all
}

fn wrong(e: impl std::fmt::Display) -> Error {
    Error::bug("neurons that were checked").because(e.to_string())
}
