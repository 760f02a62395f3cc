//! Pass `layout`: Graph to Plan.
//!
//! The target chooses kernels and weight layouts node by node. Slices become views, and additions of a
//! residual become part of the epilogue of the other operand's producer. Every buffer gets its own bytes and
//! every step a barrier, so the plan already runs; later passes only optimize it.

mod builtins;
mod entry;
mod entry_layout;
mod gpu;
mod on_disk;
mod read;
mod streamed;

use super::assign_units::{UnitAssignment, expert_tables};
use super::memory::aligned;
use super::outline_graphs::Statics;
use entry::Builder;
use moec_base::error::{Error, Result};
use moec_cpu::gpu::Kernel;
use moec_cpu::{CpuTarget, GpuTarget, KernelSpec};
use moec_ir::plan::{Entry, FileRef, ModelInfo, PLAN_VERSION, Placement, Plan, Resident, StateBuf, UnitRef};
use moec_ir::{Format, Module, StateId, WeightId};
use moec_targets::backends;
use std::collections::{BTreeMap, BTreeSet};

/// The plan, with the data that later passes and the writer need besides it.
#[derive(Debug)]
pub struct UnsynchronizedPlan {
    /// Plan.
    pub plan: Plan,
    /// Kernels, in the order of [`Plan::kernels`].
    pub kernels: Vec<KernelSpec>,
    /// GPU kernels, in the order of [`Plan::launches`].
    pub gpu_kernels: Vec<Kernel>,
    /// Weight that each segment packs.
    pub segment_weights: Vec<WeightId>,
}

/// Locations and order of states. Recurrent states have room for snapshots.
fn states(module: &Module, builder: &Builder<'_>, model: &ModelInfo, cache: Format) -> Result<Vec<StateBuf>> {
    let mut states = Vec::with_capacity(module.states.len());
    for (i, s) in module.states.iter().enumerate() {
        let shape = match s.ty.shape.as_slice() {
            &[a, b, c, d] => [int(a)?, int(b)?, int(c)?, int(d)?],
            _ => return Err(Error::bug(format!("state `{}` has no four axes", s.name))),
        };
        let values = builder.values.contains(&StateId(i as u32));
        let memory = builder.states.get(&(i as u32)).copied().unwrap_or(0);
        let (format, order) = if s.kind.needs_snapshots() {
            (Format::F32, builder.folded_order(memory, s.kind, shape[2] as usize))
        } else {
            (cache, builder.cache_order(memory, values))
        };
        states.push(StateBuf {
            name: s.name.clone(),
            memory,
            shape,
            format,
            order,
            rotated: int(builder.rotated.get(i).copied().unwrap_or(1))?,
            kind: s.kind,
            snapshots: 0,
        });
    }
    let bytes = |folded: bool| {
        let of = states.iter().filter(|s| !folded || s.kind.needs_snapshots());
        of.map(|s| s.slot_bytes().unwrap_or(u64::MAX)).fold(0, u64::saturating_add)
    };
    let prefill = module.entries.iter().map(|e| e.kind).filter(|k| k.is_prefill());
    let chunk = int(prefill.map(moec_ir::EntryKind::rows).max().unwrap_or(1))?;
    let snapshots = moec_ir::state::snapshots(bytes(true), bytes(false), model.max_context, chunk);
    states.iter_mut().filter(|s| s.kind.needs_snapshots()).for_each(|s| s.snapshots = snapshots);
    Ok(states)
}

/// Form of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheForm {
    /// Format.
    pub format: Format,
    /// Whether it holds [rotated](moec_ir::state::rotate) heads.
    pub rotates: bool,
}

/// Lays out `module` for `target`, with the KV cache in the form `cache`. `artifacts` are further files
/// that the runtime reads; `statics` lists the experts of static graphs.
///
/// # Errors
/// Fails if the target has no kernel for an operator, or if sizes exceed the plan's 32-bit fields.
pub fn layout(
    module: &Module,
    model: ModelInfo,
    target: &CpuTarget,
    cache: CacheForm,
    artifacts: &[&str],
    statics: &Statics,
    assignment: &UnitAssignment,
    paged: bool,
) -> Result<UnsynchronizedPlan> {
    let mut builder = Builder::new(module, target, cache, statics, assignment, paged);
    let mut entries = Vec::new();
    for graph in &module.entries {
        entries.push(builder.entry(graph)?);
    }
    builder.check_threads()?;
    let mut paging = if paged { builder.page()? } else { BTreeMap::new() };
    let states = states(module, &builder, &model, cache.format)?;
    let mut experts = assignment.experts.clone();
    let moves = !experts.policy.is_fixed();
    for layer in experts.layers.iter_mut().filter(|_| moves) {
        let of = builder.experts.get(&(0, layer.layer));
        let own = *of.ok_or_else(|| Error::bug("units of a layer without experts"))?;
        let threads = builder.brought.get(&(0, layer.layer));
        let mut parts: Vec<(u32, Option<u32>)> =
            (0..).zip(own).map(|(i, s)| (s, threads.map(|t| t[i]))).collect();
        parts.sort_unstable();
        (layer.segments, layer.brought) =
            (parts.iter().map(|p| p.0).collect(), parts.iter().filter_map(|p| p.1).collect());
    }
    let mut memories = assignment.memories.clone();
    for (m, memory) in memories.iter_mut().enumerate() {
        let of = builder.residents.iter().filter(|((at, _), _)| *at as usize == m);
        memory.residents =
            of.map(|(&(_, segment), matrices)| Resident { segment, matrices: matrices.clone() }).collect();
        let buffers = entries.iter().flat_map(|e: &Entry| &e.buffers).filter(|b| b.memory as usize == m);
        memory.arena_bytes = buffers.map(|b| b.offset + aligned(b.bytes)).max().unwrap_or(0);
        memory.paging = if m > 0 { paging.remove(&(m as u32)) } else { None };
    }
    let of_threads: BTreeSet<String> = builder.launches.iter().map(|k| k.artifact.clone()).collect();
    let weights = builder.files.iter().map(|(path, _)| path.clone());
    let named = weights.chain(artifacts.iter().map(|path| (*path).to_owned()));
    let files = named.chain(of_threads);
    let plan = Plan {
        version: PLAN_VERSION,
        model,
        target: target.info(),
        units: assignment.units.clone(),
        memories,
        links: assignment.links.clone(),
        scratch_bytes: builder.scratch,
        // Sizes and hashes are known when the files are written; weight files have their sizes now.
        files: files
            .enumerate()
            .map(|(i, path)| FileRef {
                path,
                bytes: builder.ends.get(i).copied().unwrap_or(0),
                sha256: [0; 32],
            })
            .collect(),
        segments: builder.segments,
        states,
        experts,
        streams: builder.streams,
        launches: builder.launches,
        kernels: builder.kernels.iter().map(|k| target.reference(k)).collect(),
        graphs: statics.graphs.clone(),
        expert_sets: statics.sets.clone(),
        subgraphs: statics.parts.clone(),
        entries,
        placement: Placement::dynamic(expert_tables(module)?),
        paging: paging.remove(&0),
    };
    let (kernels, gpu_kernels) = (builder.kernels, builder.gpu_kernels);
    Ok(UnsynchronizedPlan { plan, kernels, gpu_kernels, segment_weights: builder.segment_weights })
}

/// GPU target of each unit that launches its own kernels.
fn gpu_targets(target: &CpuTarget, assignment: &UnitAssignment) -> BTreeMap<u32, GpuTarget> {
    let of = |(index, unit): (usize, &UnitRef)| {
        let backend = backends::gpu_kernels(&unit.backend)?;
        let unit = target.device().units.get(index)?;
        Some((index as u32, GpuTarget::new(backend.generation(unit)?, target)?))
    };
    assignment.units.iter().enumerate().filter_map(of).collect()
}

fn int(x: usize) -> Result<u32> {
    u32::try_from(x).map_err(|_| Error::limit(format!("{x} is past what a plan can hold")))
}
