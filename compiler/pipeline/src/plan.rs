//! Runs the passes that make the Plan.

use super::{Inputs, Neurons, Placed, Planned};
use moec_base::error::{Error, Result};
use moec_costs::hosts::DISK_GB_PER_S;
use moec_ir::Module;
use moec_ir::plan::{ArtifactBytes, CoreClass};
use moec_ir::state::stores_rotated;
use moec_passes::assign_units::UnitAssignment;
use moec_passes::decisions::Decision;
use moec_passes::hot::HotShare;
use moec_passes::layout::CacheForm;
use moec_passes::tune::{self, KernelTimer};
use moec_passes::{fuse, gpu_expert_cache, layout, size_expert_cache};
use moec_runtime::platform::cpu;

pub(super) fn layout(given: &Inputs<'_>, module: &Module, placed: &Placed) -> Result<Planned> {
    let artifacts = given.artifacts()?;
    let format = given.config.kv_format();
    let rotates = given.config.memory.rotate_cache.unwrap_or(stores_rotated(format));
    let cache = CacheForm { format, rotates };
    let (statics, assignment) = (&placed.statics, &placed.assignment);
    // A host build has no budget of its own: nodes of its Graph read experts from SSD. The GPU's expert cache
    // uses scores even without a budget.
    let reads_disk = || module.entries.iter().flat_map(|e| &e.nodes).any(|n| n.op.reads_disk());
    let framed = assignment.experts.policy.cached().is_some();
    let paged = given.config.memory.budget.is_some() || (!framed && reads_disk());
    let unsynchronized = layout::layout(
        module,
        given.model_info()?,
        given.target,
        cache,
        &artifacts,
        statics,
        assignment,
        paged,
    )?;
    let mut plan = unsynchronized.plan;
    // The capacities of a host build's experts are not a placement.
    let divided = given.units.is_some() || !given.list.accelerators.is_empty();
    if let Some(placement) = placed.placement.as_ref().filter(|_| divided) {
        plan.placement = placement.clone();
    }
    Ok(Planned {
        plan,
        ordered: false,
        kernels: unsynchronized.kernels,
        gpu_kernels: unsynchronized.gpu_kernels,
        segment_weights: unsynchronized.segment_weights,
        decisions: None,
    })
}

pub(super) fn fuse(given: &Inputs<'_>, planned: &mut Planned) -> Result<()> {
    fuse::fuse(&mut planned.plan, &mut planned.kernels, given.target)
}

pub(super) fn tune(
    given: &Inputs<'_>,
    timer: Option<&mut (dyn KernelTimer + '_)>,
    placed: &Placed,
    neurons: &Neurons,
    planned: &mut Planned,
) -> Result<()> {
    let mut decisions = tune::tune(&mut planned.plan, &mut planned.kernels, given.target, timer)?;
    let hot = neurons.shares.iter().map(HotShare::decision);
    let placed = placed.attention.iter().chain(&placed.of_experts).chain(&placed.legalised).cloned();
    decisions.decisions.extend(placed.chain(hot).chain(neurons.decisions.iter().cloned()));
    planned.decisions = Some(decisions);
    Ok(())
}

pub(super) fn size_expert_cache(
    given: &Inputs<'_>,
    artifacts: Vec<ArtifactBytes>,
    planned: &mut Planned,
) -> Result<()> {
    let Some(budget) = given.config.memory.budget else { return Ok(()) };
    // A device of several hosts says what memory each has.
    let device = given.target.device();
    let own = device.memories.iter().find(|m| device.cpu_memory() == Some(m.name.as_str()));
    let own = own.and_then(|m| m.capacity.as_ref()).filter(|_| given.list.hosts().len() > 1);
    let budget = own.map_or(budget, |most| budget.min(most.value as u64));
    let tokenizer = given.tokenizer()?.map_or(0, |text| text.len() as u64);
    let cores = size_expert_cache::core_classes(given.target.device());
    // The device's computing cores where its file names them, else this machine's cores.
    let threads = match (given.config.memory.threads, CoreClass::computing(&cores)) {
        (Some(threads), _) => threads,
        (None, Some(computing)) => (computing as usize).min(cpu::MAX_THREADS),
        (None, None) => cpu::threads(None).map_err(Error::from)?,
    };
    let options = size_expert_cache::PagingOptions {
        budget,
        artifacts: &artifacts,
        on_demand: given.units.as_ref().is_some_and(|units| units.graphs.loads_on_demand()),
        threads: u32::try_from(threads).unwrap_or(u32::MAX),
        tokenizer,
        policy: given.config.memory.policy.as_deref(),
        disk: given.target.disk(),
        cores: &cores,
        pin: given.config.memory.pin,
        prefetch: u32::try_from(given.config.memory.prefetch).unwrap_or(u32::MAX),
    };
    let paged = size_expert_cache::size_expert_cache(&mut planned.plan, options, given.profile)?;
    if let Some(decisions) = &mut planned.decisions {
        decisions.decisions.extend(paged.choice.as_ref().map(Decision::of_cache));
    }
    Ok(())
}

pub(super) fn size_gpu_expert_cache(
    given: &Inputs<'_>,
    assignment: &UnitAssignment,
    planned: &mut Planned,
) -> Result<()> {
    let Some(system) = given.config.placement.policy else { return Ok(()) };
    let bytes = assignment.experts.policy.costs().map_or(0, |c| c.expert_bytes);
    let rate = given.target.disk().and_then(|m| Some(m.bandwidth.last()?.rate()));
    let options = gpu_expert_cache::FrameOptions {
        system,
        experts: &given.config.placement.experts,
        cached: given.config.placement.cached,
        disk_us: bytes as f64 / (rate.unwrap_or(DISK_GB_PER_S) * 1e3),
    };
    let filled = gpu_expert_cache::size_gpu_expert_cache(&mut planned.plan, options, given.profile)?;
    if let Some(decisions) = &mut planned.decisions {
        decisions.decisions.extend(filled);
    }
    Ok(())
}
