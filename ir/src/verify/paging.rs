//! Checks of data on disk; [`super`] lists the invariants.

use super::{VerifyError, require};
use crate::paging::{PagedLayer, Paging};
use crate::plan::{ALIGN, Layout, Plan, Segment};
use std::collections::BTreeSet;

/// Alignment of offsets and sizes in memory and on disk, in bytes: direct reads require it.
const BLOCK: u64 = 4096;
/// Most bytes of one read.
const LARGEST: u64 = 512 << 10;
/// Most kinds of cores, and most cores of a kind.
const MOST_KINDS: usize = 16;
const MOST_CORES: u32 = 1024;

pub(super) fn check(plan: &Plan) -> Result<(), VerifyError> {
    plan.paged_memories().try_for_each(|(memory, paging)| check_one(plan, memory, paging))
}

/// Checks the experts on the disk of a memory's host.
fn check_one(plan: &Plan, memory: u32, p: &Paging) -> Result<(), VerifyError> {
    let name = if memory == 0 { "paging".to_owned() } else { format!("memories[{memory}].paging") };
    let at = || name.clone();
    let plain = memory == 0 || !p.by_neurons() && p.regions.is_empty() && p.artifacts.is_empty();
    require(plain, at, || "another host has neurons or artifacts on disk".into())?;
    let rising = p.layers.is_sorted_by(|a, b| a.layer < b.layer);
    require(!p.layers.is_empty() && rising, at, || "no layers, or out of order".into())?;
    require(p.threads > 0 && p.staging >= 2, at, || "too few threads or frames".into())?;
    let whole = if p.by_neurons() { ALIGN } else { BLOCK };
    require(p.frame_bytes > 0 && p.frame_bytes.is_multiple_of(whole), at, || {
        format!("frames of {} bytes", p.frame_bytes)
    })?;
    let blocks = (BLOCK..=LARGEST).contains(&u64::from(p.block_bytes));
    require(blocks && u64::from(p.block_bytes) % BLOCK == 0, at, || {
        format!("reads of {} bytes", p.block_bytes)
    })?;
    let peak = p.peak();
    require(peak.is_some_and(|peak| peak <= p.budget), at, || {
        format!("a peak of {peak:?} bytes in a budget of {}", p.budget)
    })?;
    let matrices = p.layers.iter().map(|l| 2 * u64::from(l.experts)).sum::<u64>();
    let matrices = if p.by_neurons() { 0 } else { matrices };
    require(p.checksums.len() as u64 == matrices, at, || {
        format!("{} checksums of {matrices} matrices", p.checksums.len())
    })?;
    require(p.uses.is_empty() || p.uses.len() as u64 == matrices / 2, at, || {
        format!("uses of {} of {} experts", p.uses.len(), matrices / 2)
    })?;
    let elsewhere = plan.experts_off_disk(memory);
    for (i, layer) in p.layers.iter().enumerate() {
        let at = || format!("{name}.layers[{i}]");
        require((1..=layer.experts).contains(&layer.k), at, || {
            format!("{} of {} experts", layer.k, layer.experts)
        })?;
        if p.by_neurons() {
            let fits = neurons_fit(plan, p, layer);
            require(fits, at, || {
                "its neurons are not stored as they are read, or do not fit into frames".into()
            })?;
            continue;
        }
        let fits = expert_bytes(plan, layer).is_some_and(|bytes| bytes <= p.frame_bytes);
        require(fits, at, || "its experts are not neighbours on disk, or larger than a frame".into())?;
        let resident = |segment: u32| {
            let residents = plan.memories.get(memory as usize).map_or(&[][..], |m| &m.residents);
            memory == 0 || residents.iter().any(|r| r.segment == segment && !r.matrices.is_empty())
        };
        require([layer.gate_up, layer.down].into_iter().all(resident), at, || {
            "its experts are not in its memory".into()
        })?;
        let there = [layer.gate_up, layer.down].map(|segment| plan.experts_on_disk(memory, segment));
        let missing = |expert: &u32| {
            elsewhere.binary_search(&(i as u32, *expert)).is_err()
                && !there.iter().all(|t| t.contains_key(expert))
        };
        if let Some(expert) = (0..layer.experts).find(missing) {
            require(false, at, || format!("expert {expert} is neither there nor elsewhere"))?;
        }
    }
    check_cores(p)?;
    check_regions(plan, p)?;
    check_pinned(&elsewhere, p)
}

/// Every entry point has regions that hold what it runs: two artifacts in a row, and any expert. Frames of
/// whole experts do not move.
fn check_regions(plan: &Plan, p: &Paging) -> Result<(), VerifyError> {
    let at = || "paging.regions".to_owned();
    if p.regions.is_empty() {
        return require(p.artifacts.is_empty(), at, || "artifacts without regions".into());
    }
    let names: BTreeSet<&str> = p.artifacts.iter().map(|a| &*a.package).collect();
    require(names.len() == p.artifacts.len(), at, || "an artifact occurs twice".into())?;
    require(p.regions.len() == plan.entries.len(), at, || {
        format!("{} regions for {} entry points", p.regions.len(), plan.entries.len())
    })?;
    for (entry, regions) in plan.entries.iter().zip(&p.regions) {
        let at = || format!("paging.regions of {}", entry.kind);
        let needed = p.artifact_bytes(&plan.artifacts_of(entry)).map(|(_, least)| least);
        require(needed.is_some_and(|least| least <= regions.graphs), at, || {
            format!("{} bytes for artifacts of {needed:?}", regions.graphs)
        })?;
        let fits = |l: &PagedLayer| {
            let inter = plan.segments.get(l.down as usize).map_or(0, |s| s.extents().1);
            inter.div_ceil(p.neurons.max(1)) <= regions.frames
        };
        let room = regions.frames > 0 && (!p.by_neurons() || p.layers.iter().all(fits));
        require(room, at, || format!("{} frames do not hold an expert", regions.frames))?;
    }
    let most = p.regions.iter().map(|r| r.frames).max();
    let fixed = p.by_neurons() || p.regions.iter().all(|r| r.frames == p.frames);
    require(most == Some(p.frames) && fixed, at, || format!("other frames than the plan's {}", p.frames))
}

/// There are few kinds of cores, each has cores, some compute, and one kind at most reads.
fn check_cores(p: &Paging) -> Result<(), VerifyError> {
    let at = || "paging.cores".to_owned();
    let cores = &p.cores;
    require(cores.len() <= MOST_KINDS, at, || format!("{} kinds of cores", cores.len()))?;
    let counts = cores.iter().all(|c| (1..=MOST_CORES).contains(&c.count));
    require(counts, at, || format!("a kind has no cores, or more than {MOST_CORES}"))?;
    require(cores.is_empty() || cores.iter().any(|c| c.computes), at, || "no core computes".into())?;
    require(cores.iter().filter(|c| c.reads).count() <= 1, at, || "two kinds of cores read".into())
}

/// Pinned experts exist, each once, and leave the policy a frame.
fn check_pinned(elsewhere: &[(u32, u32)], p: &Paging) -> Result<(), VerifyError> {
    let at = || "paging.pinned".to_owned();
    let (pinned, frames) = (p.pinned.len(), p.frames);
    require(pinned == 0 || !p.by_neurons(), at, || "experts are pinned although neurons are read".into())?;
    require(pinned == 0 || (pinned as u64) < u64::from(frames), at, || {
        format!("{pinned} experts in {frames} frames")
    })?;
    let mut seen = BTreeSet::new();
    for &(layer, expert) in &p.pinned {
        let there = p.layers.get(layer as usize).is_some_and(|l| expert < l.experts);
        require(there, at, || format!("layer {layer} has no expert {expert}"))?;
        require(elsewhere.binary_search(&(layer, expert)).is_err(), at, || {
            format!("expert {expert} of layer {layer} is on another unit")
        })?;
        require(seen.insert((layer, expert)), at, || {
            format!("expert {expert} of layer {layer} occurs twice")
        })?;
    }
    Ok(())
}

/// Whether neurons of a layer are laid out as they are read: a frame's together, in blocks of the file, with
/// gates in a segment of their own or with the rest, in all layers alike. All neurons of an expert fit into the
/// frames.
fn neurons_fit(plan: &Plan, p: &Paging, layer: &PagedLayer) -> bool {
    let segment = |i: u32| plan.segments.get(i as usize);
    let Some((gates, stored)) = segment(layer.gate_up).zip(segment(layer.down)) else { return false };
    let [(experts, inter, hidden), (e, i, all)] = [gates, stored].map(Segment::extents);
    let Some(neurons) = stored.on_disk() else { return false };
    let units = u64::from(inter).div_ceil(u64::from(p.neurons));
    // A unit is read as a whole, also where the last one of an expert has fewer neurons.
    let pitch = (neurons.unit_pitch() as u64).checked_mul(units);
    let of_gates = if neurons.gates {
        layer.gate_up == layer.down
    } else {
        gates.layout == Layout::Gates && hidden.checked_mul(2) == Some(all)
    };
    of_gates
        && neurons.gates == p.gates_on_disk()
        && (all as usize).is_multiple_of(stored.layout.parts())
        && [gates, stored].iter().all(|s| s.shape.len() == 3)
        && (experts, inter) == (e, i)
        && experts == layer.experts
        && p.neurons as usize == neurons.together()
        && p.frame_bytes == neurons.unit_bytes() as u64
        && units <= u64::from(p.frames)
        && stored.offset % BLOCK == 0
        && stored.pitch % BLOCK == 0
        && pitch.is_some_and(|bytes| bytes <= stored.pitch)
}

/// Bytes of an expert with its matrices at multiples of [`BLOCK`], as in its file; `None` if they have
/// another layout.
fn expert_bytes(plan: &Plan, layer: &PagedLayer) -> Option<u64> {
    let segment = |i: u32| plan.segments.get(i as usize);
    let (gate_up, down): (&Segment, &Segment) = (segment(layer.gate_up)?, segment(layer.down)?);
    let first = gate_up.matrix_bytes()?.checked_next_multiple_of(BLOCK)?;
    let bytes = down.matrix_bytes()?.checked_next_multiple_of(BLOCK)?.checked_add(first)?;
    let fits = gate_up.file == down.file
        && gate_up.pitch == down.pitch
        && gate_up.offset % BLOCK == 0
        && gate_up.pitch % BLOCK == 0
        && gate_up.pitch >= bytes
        && gate_up.offset.checked_add(first) == Some(down.offset)
        && gate_up.extents().0 == down.extents().0
        && [gate_up, down].iter().all(|s| s.shape.len() == 3 && s.extents().0 <= layer.experts);
    fits.then_some(bytes)
}
