//! Runs the passes that say how, where and when.

use super::Compilation;
use moec_base::error::{Error, Result};
use moec_ir::Op;
use moec_passes::{barriers, cross, frames, fuse, layout, memory, page, schedule, tune};

/// 10⁹ bytes per second of a disk that nobody has measured.
const FLASH_GB_PER_S: f64 = 2.0;

pub(super) fn layout(c: &mut Compilation<'_>) -> Result<()> {
    let artifacts = c.artifacts()?;
    let cache = c.config.kv_format();
    let (statics, homes) = (&c.statics, &c.homes);
    // A twin has no budget of its own: its Graph says what asks flash. Frames hear of scores without any.
    let asks_flash = |op: &Op| matches!(op, Op::Fetch { .. } | Op::NeuronFfn { paged: Some(_), .. });
    let asks = || c.module.entries.iter().flat_map(|e| &e.nodes).any(|n| asks_flash(&n.op));
    let framed = homes.schedule.as_ref().is_some_and(|s| s.hybrid.is_some());
    let paged = c.config.memory.budget.is_some() || (!framed && asks());
    let draft =
        layout::layout(&c.module, c.model_info()?, c.target, cache, &artifacts, statics, homes, paged)?;
    let mut plan = draft.plan;
    // What bounds the experts of a twin is no placement of its own.
    let placed = c.units.is_some() || !c.list.free.is_empty();
    if let Some(placement) = c.placement.as_ref().filter(|_| placed) {
        plan.placement = placement.clone();
    }
    c.plan = Some(plan);
    c.kernels = draft.kernels;
    c.thread_kernels = draft.thread_kernels;
    c.segment_weights = draft.segment_weights;
    Ok(())
}

pub(super) fn fuse(c: &mut Compilation<'_>) -> Result<()> {
    let plan = c.plan.as_mut().ok_or_else(|| Error::bug("there is no plan yet"))?;
    fuse::fuse(plan, &mut c.kernels, c.target)
}

pub(super) fn cross(c: &mut Compilation<'_>) -> Result<()> {
    cross::cross(c.plan_mut()?)
}

pub(super) fn tune(c: &mut Compilation<'_>) -> Result<()> {
    let plan = c.plan.as_mut().ok_or_else(|| Error::bug("there is no plan yet"))?;
    let mut decisions = tune::tune(plan, &mut c.kernels, c.target, c.timer.as_deref_mut())?;
    decisions.attention.clone_from(&c.attention);
    decisions.hot.clone_from(&c.hot);
    decisions.on_flash.clone_from(&c.on_flash);
    decisions.predictors.clone_from(&c.predictors);
    decisions.predictors_increase = c.predictors_increase;
    c.decisions = Some(decisions);
    Ok(())
}

pub(super) fn schedule(c: &mut Compilation<'_>) -> Result<()> {
    schedule::schedule(c.plan_mut()?);
    Ok(())
}

pub(super) fn memory(c: &mut Compilation<'_>) -> Result<()> {
    memory::memory(c.plan_mut()?)
}

pub(super) fn barriers(c: &mut Compilation<'_>) -> Result<()> {
    barriers::barriers(c.plan_mut()?);
    c.ordered = true;
    Ok(())
}

pub(super) fn page(c: &mut Compilation<'_>) -> Result<()> {
    let Some(budget) = c.config.memory.budget else { return Ok(()) };
    let tokenizer = c.tokenizer()?.map_or(0, |text| text.len() as u64);
    let threads = match c.config.memory.threads {
        Some(threads) => threads,
        None => moec_runtime::platform::cpu::threads(None).map_err(Error::from)?,
    };
    let wanted = page::Wanted {
        budget,
        threads: u32::try_from(threads).unwrap_or(u32::MAX),
        tokenizer,
        policy: c.config.memory.policy.as_deref(),
        flash: c.target.flash(),
        pin: c.config.memory.pin,
        prefetch: u32::try_from(c.config.memory.prefetch).unwrap_or(u32::MAX),
    };
    let profile = c.profile;
    let paged = page::page(c.plan_mut()?, wanted, profile)?;
    if let Some(decisions) = &mut c.decisions {
        decisions.cache = paged.choice.as_ref().map(moec_passes::decisions::CacheDecision::of);
    }
    Ok(())
}

pub(super) fn fill(c: &mut Compilation<'_>) -> Result<()> {
    let Some(system) = c.config.placement.policy else { return Ok(()) };
    let bytes = c.homes.schedule.as_ref().map_or(0, |s| s.expert_bytes);
    let rate = c.target.flash().and_then(|m| m.bandwidth.last()).map(|b| b.gb_per_s);
    let wanted = frames::Wanted {
        system,
        experts: &c.config.placement.experts,
        cached: c.config.placement.cached,
        flash_us: bytes as f64 / (rate.unwrap_or(FLASH_GB_PER_S) * 1e3),
    };
    let profile = c.profile;
    let filled = frames::fill(c.plan_mut()?, wanted, profile)?;
    if let Some(decisions) = &mut c.decisions {
        decisions.frames = filled;
    }
    Ok(())
}
