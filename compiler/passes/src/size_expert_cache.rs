//! Pass `size_expert_cache`: the number of experts that memory holds, and the policy that keeps them.
//!
//! `[memory] budget` is a limit. The needs of every run come first: weights outside of experts, activations,
//! scratch of every thread, KV caches of all slots, and the process itself. The rest is cache frames of one
//! expert each. A few are for experts that pass through and are not kept, all others for the cache. Replays
//! of recorded routing choose the policy (HybriMoE, §IV-D; the bound is Belady's). The same replays choose
//! the pinned share of the cache: its experts, the hottest, are read at the start and never evicted.
//! PowerInfer-2 (§4.2) does that with regions of hot and cold neurons; here it is done with whole experts.

mod hosts;

use crate::regions::ArtifactRegions;
use moec_base::error::{Error, Result};
use moec_base::human;
use moec_device::{Bandwidth, Device, Memory};
use moec_ir::op::Score;
use moec_ir::plan::{ALIGN, ArtifactBytes, CoreClass, PagedLayer, Paging, Plan, Segment};
use moec_ir::{Graph, Node, Op, Operand};
use moec_profile::Profile;
use moec_runtime::offload::cache::{Key, Setting};
use moec_runtime::offload::disk::{BLOCK, LARGEST_BLOCK};
use moec_sim::cache::{self, Choice, Pin, Trace, TraceError};
use std::collections::BTreeSet;

/// Staging frames, for experts that the cache does not keep. With fewer than two no read could overlap with
/// computing.
const STAGING: u32 = 2;
/// Staging frames if the policy lets misses bypass the cache.
const STAGING_FOR_BYPASS: u32 = 4;
/// Further staging frames, for prefetched entries.
const PREFETCHED: u32 = 3;
/// Cache frames for each staging frame that are required before some are reserved for prefetched entries.
const WORTHWHILE: u32 = 8;
/// Numbers of reads of neurons that may be in flight. The largest is taken that leaves enough of the memory
/// for the cache.
const READS: [u64; 4] = [64, 32, 16, 8];
/// Number of experts whose neurons must have room besides those reads.
const WORTHWHILE_READS: u64 = 8;
/// Bytes of an address, and of the cache's record of neurons that are read together.
pub(super) const ADDRESS: u64 = 8;
pub(super) const NOTES: u64 = 48;
/// Fewest frames that hold experts.
const LEAST: u32 = 1;
/// Bytes of the process that the plan does not list: code, stacks, buffers of messages, the plan itself.
/// Measured: 4 MiB of `run generate` for the demo model, whose code and plan are small.
pub(super) const PROCESS: u64 = 16 << 20;
/// Bytes in memory for a byte of `tokenizer.json` while it is read. Measured: 26, with 100 000 tokens.
const TOKENIZER: u64 = 28;

/// Lays the experts of `layers` out for reading. Each is one piece of the file, gate and up before down, at
/// multiples of [`BLOCK`] (PowerInfer-2, §4.4: weights that are read together are stored together). Gated
/// experts of today's models use all of their neurons, so that the piece is the expert. Sets offset and pitch
/// of their segments, after the first `end` bytes of the file; returns the size of the file.
///
/// # Errors
/// Fails if the experts exceed what a file can hold.
pub fn lay_out(segments: &mut [Segment], layers: &[PagedLayer], end: u64) -> Result<u64> {
    let too_large = || Error::limit("the experts are past what one file can hold");
    let mut end = end.checked_next_multiple_of(BLOCK).ok_or_else(too_large)?;
    for l in layers {
        let bytes = |segments: &[Segment], s: u32| {
            let segment = segments.get(s as usize).filter(|s| s.shape.len() == 3);
            segment.and_then(Segment::matrix_bytes).ok_or_else(|| Error::bug("an expert without a size"))
        };
        let (first, second) = (bytes(segments, l.gate_up)?, bytes(segments, l.down)?);
        let gap = first.checked_next_multiple_of(BLOCK).ok_or_else(too_large)?;
        let pitch = second.checked_next_multiple_of(BLOCK).and_then(|b| b.checked_add(gap));
        let pitch = pitch.ok_or_else(too_large)?;
        for (s, offset) in [(l.gate_up, end), (l.down, end.checked_add(gap).ok_or_else(too_large)?)] {
            let segment = &mut segments[s as usize];
            (segment.offset, segment.pitch) = (offset, pitch);
        }
        let experts = segments.get(l.down as usize).map_or(0, |s| s.extents().0);
        let all = pitch.checked_mul(u64::from(experts)).ok_or_else(too_large)?;
        end = end.checked_add(all).ok_or_else(too_large)?;
    }
    let last = layers.last().and_then(|l| segments.get(l.down as usize)).and_then(Segment::end);
    Ok(last.unwrap_or(0))
}

/// A layer with a router.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routed {
    /// Layer.
    pub layer: Option<u32>,
    /// Experts.
    pub experts: u32,
    /// Experts per token.
    pub k: u32,
    /// Function that turns the router's logits into scores.
    pub score: Score,
}

/// Routers of a graph in order.
pub fn routers(graph: &Graph) -> Vec<Routed> {
    let routed = |n: &Node| {
        let of = n.op.router()?;
        Some(Routed { layer: n.scope.layer, experts: of.experts as u32, k: of.k as u32, score: of.score })
    };
    graph.nodes.iter().filter_map(routed).collect()
}

/// True if an operand of a node is matrices of experts, which kernels find by a table of addresses.
pub fn is_expert(op: &Op, operand: usize, input: Operand) -> bool {
    let matrices = matches!(
        (op, operand),
        (Op::ExpertFfn { .. } | Op::NeuronFfn { paged: Some(_), .. }, 2 | 3)
            | (Op::NeuronFfn { .. }, 2)
            | (Op::NeuronFfn { predict: Some(_), .. }, 3..=5)
    );
    matrices && matches!(input, Operand::Weight(_))
}

/// The paging of a plan before `size_expert_cache`: its layers, no budget, and the fewest frames that work.
pub fn unlimited(layers: Vec<PagedLayer>, frame_bytes: u64) -> Paging {
    let checksums = vec![0; layers.iter().map(|l| 2 * l.experts as usize).sum()];
    Paging {
        budget: u64::MAX,
        threads: 1,
        resident: 0,
        process: 0,
        frame_bytes,
        frames: LEAST,
        staging: STAGING,
        block_bytes: LARGEST_BLOCK,
        policy: Setting::lru().to_string(),
        pinned: Vec::new(),
        neurons: 0,
        layers,
        checksums,
        uses: Vec::new(),
        cores: Vec::new(),
        artifacts: Vec::new(),
        regions: Vec::new(),
    }
}

/// Lays out neurons, as [`lay_out`] does experts. What stays in memory comes first: gates, or predictors. Up and
/// down of each neuron are one read, or share one with their neighbours, and so are gates that stay on disk
/// (PowerInfer-2, §4.4). Also returns the contents of a frame.
///
/// # Errors
/// Fails if the neurons exceed what a file can hold, or if layers differ in their layout.
pub fn lay_out_neurons(segments: &mut [Segment], layers: &[PagedLayer]) -> Result<(u64, NeuronFrame)> {
    let too_large = || Error::limit("the experts are past what one file can hold");
    let mut end = 0;
    let mut frame: Option<NeuronFrame> = None;
    let file = layers.first().and_then(|l| segments.get(l.down as usize)).map(|s| s.file);
    let on_disk: BTreeSet<u32> = layers.iter().map(|l| l.down).collect();
    for (i, segment) in (0..).zip(&mut *segments) {
        if Some(segment.file) == file && !on_disk.contains(&i) {
            segment.offset = end;
            end = segment.end().ok_or_else(too_large)?.next_multiple_of(ALIGN);
        }
    }
    for l in layers {
        let segment = segments.get_mut(l.down as usize).ok_or_else(|| Error::bug("neurons of no segment"))?;
        let stored =
            segment.on_disk().ok_or_else(|| Error::bug("neurons that do not lie as they are read"))?;
        let neurons = stored.together() as u32;
        let least = segment.extents().1.div_ceil(neurons);
        let own = NeuronFrame { neurons, bytes: stored.unit_bytes() as u64, least };
        let all = frame.get_or_insert(own);
        all.least = all.least.max(least);
        if (all.neurons, all.bytes) != (own.neurons, own.bytes) {
            return Err(Error::limit(
                "the layers' experts have different formats, which neurons on disk do not support",
            )
            .hint("set `skip = \"auto\"` under `[experts]`: then whole experts are read"));
        }
        let bytes = segment.matrix_bytes().ok_or_else(too_large)?;
        segment.offset = end.checked_next_multiple_of(BLOCK).ok_or_else(too_large)?;
        segment.pitch =
            bytes.checked_next_multiple_of((stored.unit_pitch() as u64).max(BLOCK)).ok_or_else(too_large)?;
        end = segment.end().ok_or_else(too_large)?;
    }
    let frame = frame.ok_or_else(|| Error::bug("neurons of no layer"))?;
    Ok((end, frame))
}

/// Contents of a frame of neurons.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NeuronFrame {
    /// Neurons.
    pub neurons: u32,
    /// Bytes of up and down of all of them, and of their gates if these stay on disk, too.
    pub bytes: u64,
    /// Fewest frames that hold any expert.
    pub least: u32,
}

/// Bytes of a frame that holds any expert.
pub fn frame_bytes(segments: &[Segment], layers: &[PagedLayer]) -> u64 {
    let pitch = |l: &PagedLayer| segments.get(l.gate_up as usize).map_or(0, |s| s.pitch);
    layers.iter().map(pitch).max().unwrap_or(0).max(BLOCK)
}

/// Options of the user.
#[derive(Clone, Copy, Debug)]
pub struct PagingOptions<'a> {
    /// Bytes that a run may take.
    pub budget: u64,
    /// Artifacts of graphs of other units, whose weights take memory as those of the CPU do.
    pub artifacts: &'a [ArtifactBytes],
    /// Whether a run loads and frees them.
    pub on_demand: bool,
    /// Threads of a run.
    pub threads: u32,
    /// Bytes of `tokenizer.json`.
    pub tokenizer: u64,
    /// Policy by name with parameters; `None` takes the one that reads least.
    pub policy: Option<&'a str>,
    /// Share of the cache for experts that are never evicted.
    pub pin: Pin,
    /// Layers ahead whose experts are read before they are requested.
    pub prefetch: u32,
    /// Memory that stores the weights.
    pub disk: Option<&'a Memory>,
    /// Kinds of cores, by [`core_classes`].
    pub cores: &'a [CoreClass],
}

/// Share of the best rate that is sufficient for a block: smaller blocks leave room between reads for urgent
/// ones.
const GOOD_ENOUGH: f64 = 0.97;

/// Bytes of a read: the smallest block of the device's bandwidth table that is read nearly as fast as the
/// best (PowerInfer-2, §2.3.2). The largest block if there is no table.
pub fn block_bytes(disk: Option<&Memory>) -> u32 {
    let rows = disk.map_or(&[][..], |m| &m.bandwidth);
    let fits = |b: u64| (BLOCK..=u64::from(LARGEST_BLOCK)).contains(&b) && b.is_multiple_of(BLOCK);
    let rows = rows.iter().filter(|b| fits(b.block_bytes));
    let best = rows.clone().map(Bandwidth::rate).fold(0.0, f64::max);
    let good = rows.filter(|b| best > 0.0 && b.rate() >= GOOD_ENOUGH * best).map(|b| b.block_bytes).min();
    good.and_then(|b| u32::try_from(b).ok()).unwrap_or(LARGEST_BLOCK)
}

/// Kinds of cores of a device's CPU, the fastest first. One core of the kind that reads fastest reads
/// (PowerInfer-2, §2.3.2 and §4.1.1). The slowest of three kinds or more does not compute (§4.3). Empty where
/// the device file names fewer than two kinds.
pub fn core_classes(device: &Device) -> Vec<CoreClass> {
    let mut clusters: Vec<_> = device.clusters().iter().collect();
    clusters.sort_by(|a, b| b.ghz.value.total_cmp(&a.ghz.value));
    let computing = if clusters.len() > 2 { clusters.len() - 1 } else { clusters.len() };
    let reads = device.reading_cluster();
    let class = |(i, c): (usize, &moec_device::Cluster)| CoreClass {
        name: c.name.clone(),
        count: c.cores,
        computes: i < computing,
        reads: reads.is_some_and(|r| r.name == c.name),
    };
    if clusters.len() < 2 { Vec::new() } else { clusters.into_iter().enumerate().map(class).collect() }
}

/// Choices, for `moec explain`.
#[derive(Clone, Debug)]
pub struct Paged {
    /// The replays, if routing was recorded and no policy is named.
    pub choice: Option<Choice>,
}

/// Sizes the frames of a plan that is otherwise final.
///
/// # Errors
/// Fails if the budget is too small, with the smallest that works; if the policy does not exist; or if pins
/// are requested without recorded routing.
pub fn size_expert_cache(
    plan: &mut Plan,
    options: PagingOptions<'_>,
    profile: Option<&Profile>,
) -> Result<Paged> {
    let trace = profile.filter(|p| !p.routes.is_empty()).map(|p| p.routes.trace(&p.layers)).transpose();
    let trace = trace.map_err(|e| Error::bug("a profile that was checked").because(e))?;
    hosts::size(plan, options, profile, trace.as_ref())?;
    let mut sums = sums(plan, options);
    if plan.paging.as_ref().is_some_and(Paging::by_neurons) {
        return size_neuron_cache(plan, options, &sums);
    }
    let elsewhere = plan.experts_off_disk(0);
    let Some(frame_bytes) = plan.paging.as_ref().map(|p| p.frame_bytes) else {
        return Ok(Paged { choice: None });
    };
    let room = options.budget.saturating_sub(sums.resident().saturating_add(sums.process));
    let all = plan.paging.iter().flat_map(|p| &p.layers).map(|l| u64::from(l.experts)).sum::<u64>();
    let regions =
        options.regions(plan, room, (all + u64::from(STAGING)).saturating_mul(frame_bytes), false)?;
    sums.loaded = regions.most();
    let uses = hosts::uses(plan, 0, profile, trace.as_ref());
    let Some(paging) = &mut plan.paging else { return Ok(Paged { choice: None }) };
    let layers = paging.layers.len();
    let experts: u32 = paging.layers.iter().map(|l| l.experts).sum::<u32>() - elsewhere.len() as u32;
    let lives_elsewhere = |layer: u32, expert: u32| elsewhere.binary_search(&(layer, expert)).is_ok();
    let fixed = sums.resident().saturating_add(sums.process).saturating_add(sums.loaded);
    let frames = |staging: u32| {
        let rest = options.budget.checked_sub(fixed)? / paging.frame_bytes;
        let frames = u32::try_from(rest.checked_sub(u64::from(staging))?).unwrap_or(u32::MAX);
        (frames >= LEAST).then_some(frames.min(experts.max(LEAST)))
    };
    let too_small = || {
        let least = fixed + u64::from(LEAST + STAGING) * paging.frame_bytes;
        too_small(options.budget, &sums, least)
    };
    let capacity = frames(STAGING).ok_or_else(too_small)?;
    let PinnedExperts { policy, percent, pinned, choice } =
        choose_policy(options, trace.as_ref(), u64::from(capacity))?;
    let bypasses = policy.to_string().contains("bypass=1");
    let passing = if bypasses { STAGING_FOR_BYPASS } else { STAGING };
    let prefetched = if options.prefetch > 0 { PREFETCHED } else { 0 };
    // Prefetched entries must not take much of the cache.
    let usual = passing + prefetched;
    let staging = [if capacity >= WORTHWHILE * usual { usual } else { passing }, passing, STAGING];
    let (staging, frames) =
        staging.into_iter().find_map(|staging| Some((staging, frames(staging)?))).ok_or_else(too_small)?;
    paging.budget = options.budget;
    paging.threads = options.threads;
    (paging.resident, paging.process) = (sums.resident(), sums.process);
    paging.staging = staging;
    regions.set(paging, |_| frames);
    paging.block_bytes = block_bytes(options.disk);
    paging.cores = options.cores.to_vec();
    paging.policy = policy.to_string();
    // Staging frames for bypassing misses make it smaller than it was for the replays.
    let most = u64::from(frames) * u64::from(percent) / 100;
    // The replays know one memory. Experts in another memory are neither read at the start nor kept.
    let keys = pinned.iter().map(|k| (u32::from(k.layer), u32::from(k.expert)));
    let here = |&(layer, expert): &(u32, u32)| (layer as usize) < layers && !lives_elsewhere(layer, expert);
    paging.pinned = keys.filter(here).take(most as usize).collect();
    paging.uses = uses;
    Ok(Paged { choice })
}

/// The error for a budget that is too small.
fn too_small(budget: u64, sums: &Sums, least: u64) -> Error {
    Error::input(format!("a budget of {} is too small for this model", human::bytes(budget)))
        .because(sums.to_string())
        .hint(format!(
            "the minimum is {}; a shorter `max_context`, a smaller `prefill_chunk` or smaller formats take less",
            human::bytes_up(least)
        ))
}

/// Sizes the frames of neurons: one expert must have room, and the reads in flight.
///
/// # Errors
/// Fails as [`size_expert_cache`] does, and if a policy or pins are requested, which neurons do not have.
fn size_neuron_cache(plan: &mut Plan, options: PagingOptions<'_>, sums: &Sums) -> Result<Paged> {
    let of = |l: &PagedLayer| plan.segments.get(l.down as usize).map_or((0, 0, 0), Segment::extents);
    let Some(paging) = &plan.paging else { return Ok(Paged { choice: None }) };
    if options.policy.is_some_and(|p| p != "lru") || matches!(options.pin, Pin::Percent(1..)) {
        return Err(Error::input("neurons on disk are cached by `lru`, without pinning")
            .hint("remove `policy` and `pin` under `[memory]`, or set `skip = \"auto\"` under `[experts]`"));
    }
    let of_one = |l: &PagedLayer| u64::from(of(l).1.div_ceil(paging.neurons));
    let least = paging.layers.iter().map(of_one).max().unwrap_or(1).max(LEAST.into());
    let all: u64 = paging.layers.iter().map(|l| u64::from(l.experts) * of_one(l)).sum();
    // Tables of addresses, and the cache's records of the largest number of frames.
    let neurons: u64 = paging.layers.iter().map(|l| u64::from(l.experts) * u64::from(of(l).1)).sum();
    let stored = paging.layers.first().and_then(|l| plan.segments.get(l.down as usize)?.on_disk());
    let stored = stored.ok_or_else(|| Error::bug("neurons of no segment"))?;
    // Gates on disk are recorded by themselves.
    let notes = all * NOTES * (1 + u64::from(stored.gates));
    let process = sums.process + neurons * ADDRESS * stored.addresses() as u64 + notes;
    // Separate scales are read when a run begins.
    let scales = neurons * stored.resident_scales() as u64;
    let resident = sums.resident().saturating_add(scales);
    let fixed = resident.saturating_add(process);
    // On disk a frame may take more bytes than in memory.
    let staging_for =
        |reads: u64| (reads * stored.largest_read() as u64).div_ceil(paging.frame_bytes).max(STAGING.into());
    let frame_bytes = paging.frame_bytes;
    let room = options.budget.saturating_sub(fixed);
    let worthwhile = staging_for(READS[READS.len() - 1]) + WORTHWHILE_READS * least;
    let regions = options.regions(plan, room, worthwhile * frame_bytes, true)?;
    let there = room.saturating_sub(regions.most()) / frame_bytes;
    let fits = |reads: &u64| there >= staging_for(*reads) + WORTHWHILE_READS * least;
    let reads = READS.into_iter().find(fits).unwrap_or(1);
    let staging = staging_for(reads);
    if there < staging + least {
        let sums = Sums { process, loaded: regions.most(), ..*sums };
        let needed = fixed.saturating_add(sums.loaded);
        return Err(too_small(options.budget, &sums, needed + (least + staging) * frame_bytes));
    }
    let Some(paging) = &mut plan.paging else { return Ok(Paged { choice: None }) };
    (paging.budget, paging.threads) = (options.budget, options.threads);
    (paging.resident, paging.process) = (resident, process);
    paging.staging = staging as u32;
    let frames = |graphs: u64| room.saturating_sub(graphs) / frame_bytes - staging;
    regions.set(paging, |graphs| frames(graphs).min(all) as u32);
    paging.block_bytes = LARGEST_BLOCK;
    paging.cores = options.cores.to_vec();
    Ok(Paged { choice: None })
}

/// Policy and pinned experts.
struct PinnedExperts {
    policy: Setting,
    /// Share of the cache that is pinned.
    percent: u8,
    /// Experts of that share, the hottest first.
    pinned: Vec<Key>,
    choice: Option<Choice>,
}

/// The policy as requested, else the choice of the replays, else LRU.
fn choose_policy(options: PagingOptions<'_>, trace: Option<&Trace>, capacity: u64) -> Result<PinnedExperts> {
    let requested = match options.pin {
        Pin::Percent(percent) => percent,
        Pin::Auto => 0,
    };
    let named = options.policy.map(str::parse::<Setting>).transpose();
    let named = named.map_err(|e| Error::input(e.to_string()))?;
    let Some(trace) = trace else {
        if requested > 0 {
            return Err(Error::input("`pin` requires recorded routing, to choose the most used experts")
                .because("no routing of single tokens was recorded")
                .hint("name texts under `[calibrate]`, or remove `pin` under `[memory]`"));
        }
        let policy = named.unwrap_or_else(Setting::lru);
        return Ok(PinnedExperts { policy, percent: 0, pinned: Vec::new(), choice: None });
    };
    if named.is_none() {
        match cache::choose(trace, capacity, options.pin) {
            Ok(choice) => {
                let (row, pinned) = (choice.chosen.clone(), choice.pinned.clone());
                return Ok(PinnedExperts {
                    policy: row.setting,
                    percent: row.pinned,
                    pinned,
                    choice: Some(choice),
                });
            }
            // A short text is no evidence for a policy.
            Err(TraceError::TooShort { .. }) => {}
            Err(e) => return Err(Error::bug(e.to_string())),
        }
    }
    let pinned = cache::hottest_share(trace, capacity, requested);
    Ok(PinnedExperts { policy: named.unwrap_or_else(Setting::lru), percent: requested, pinned, choice: None })
}

impl PagingOptions<'_> {
    /// Regions of `rest` bytes, of which frames should have `frames` bytes; none where artifacts stay in memory.
    fn regions(&self, plan: &Plan, rest: u64, frames: u64, moves: bool) -> Result<ArtifactRegions> {
        let artifacts = if self.on_demand { self.artifacts } else { &[] };
        ArtifactRegions::of(plan, artifacts, rest, frames, moves)
    }
}

/// Bytes that every run needs.
struct Sums {
    weights: u64,
    /// Artifacts of graphs that stay in memory.
    graphs: u64,
    /// Most bytes of artifacts that are loaded at once.
    loaded: u64,
    arena: u64,
    scratch: u64,
    kv: u64,
    process: u64,
}

impl Sums {
    fn resident(&self) -> u64 {
        [self.weights, self.graphs, self.arena, self.scratch, self.kv]
            .iter()
            .fold(0, |a, b| a.saturating_add(*b))
    }
}

impl std::fmt::Display for Sums {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { weights, graphs, loaded, arena, scratch, kv, process } = self;
        let [weights, arena, scratch, kv, process] =
            [weights, arena, scratch, kv, process].map(|b| human::bytes(*b));
        let graphs = match graphs + loaded {
            0 => String::new(),
            bytes => format!("graphs {}, ", human::bytes(bytes)),
        };
        write!(
            f,
            "weights outside of experts take {weights}, {graphs}activations {arena}, scratch {scratch}, the KV cache {kv}, the process {process}"
        )
    }
}

fn sums(plan: &Plan, options: PagingOptions<'_>) -> Sums {
    let on_disk = |i: usize| plan.paging.iter().flat_map(Paging::segments).any(|s| s as usize == i);
    let page = |bytes: u64| bytes.next_multiple_of(BLOCK);
    let here = plan.segments_of(0);
    let dense = plan.segments.iter().enumerate().filter(|(i, _)| !on_disk(*i) && here.contains(&(*i as u32)));
    Sums {
        weights: page(dense.map(|(_, s)| s.bytes.next_multiple_of(ALIGN)).sum()),
        graphs: if options.on_demand { 0 } else { page(options.artifacts.iter().map(|a| a.bytes).sum()) },
        loaded: 0,
        arena: page(plan.arena_bytes()),
        scratch: page((plan.scratch_bytes + 2 * ALIGN) * u64::from(options.threads)),
        kv: plan.states.iter().filter(|s| s.memory == 0).map(|s| page(s.bytes())).sum(),
        process: PROCESS + TOKENIZER * options.tokenizer,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moec_device::Bandwidth;

    #[test]
    fn the_core_that_reads_and_the_slowest_cores_do_not_compute() {
        let classes = |name: &str| core_classes(&Device::find(name).unwrap());
        let rows = |classes: &[CoreClass]| -> Vec<_> {
            classes.iter().map(|c| (c.name.clone(), c.count, c.computes, c.reads)).collect()
        };
        let (best, middle) = (classes("snapdragon-8-gen-3"), classes("snapdragon-8-plus-gen-1"));
        let expected = |middle, little| {
            [("big", 1, true, true), ("middle", middle, true, false), ("little", little, false, false)]
                .map(|(name, count, computes, reads)| (name.to_owned(), count, computes, reads))
        };
        assert_eq!(rows(&best), expected(5, 2));
        assert_eq!(rows(&middle), expected(3, 4));
        assert_eq!([&best, &middle].map(|c| CoreClass::computing(c)), [Some(5), Some(3)]);
        assert!(classes("native").is_empty() && classes("x86-64-v3").is_empty());
        assert_eq!(CoreClass::computing(&[]), None);
        // Of two kinds both compute, the one that the file lists first or not.
        let mut device = Device::find("snapdragon-8-gen-3").unwrap();
        device.units[0].clusters.remove(1);
        device.units[0].clusters.reverse();
        let two = core_classes(&device);
        assert_eq!(rows(&two)[0], ("big".to_owned(), 1, true, true));
        assert_eq!(rows(&two)[1], ("little".to_owned(), 2, true, false));
        device.units[0].clusters.remove(0);
        assert!(core_classes(&device).is_empty());
    }

    #[test]
    fn read_size_is_the_smallest_near_peak_bandwidth() {
        let table = |rates: &[(u64, f64)]| Memory {
            bandwidth: rates
                .iter()
                .map(|&(block_bytes, gb_per_s)| Bandwidth {
                    block_bytes,
                    gb_per_s,
                    source: String::new(),
                    achieved: None,
                })
                .collect(),
            ..Memory::default()
        };
        let of = |rates: &[(u64, f64)]| block_bytes(Some(&table(rates)));
        assert_eq!(block_bytes(None), LARGEST_BLOCK);
        assert_eq!(of(&[]), LARGEST_BLOCK);
        assert_eq!(of(&[(4096, 0.4), (65_536, 1.97), (131_072, 2.0), (524_288, 1.99)]), 65_536);
        assert_eq!(of(&[(4096, 0.4), (65_536, 1.9), (131_072, 2.0), (524_288, 1.99)]), 131_072);
        // Block sizes that no read has are ignored.
        assert_eq!(of(&[(4096, 1.0), (5000, 9.0), (1 << 30, 9.0)]), 4096);
        assert_eq!(of(&[(4096, 0.0)]), LARGEST_BLOCK);
    }
}
