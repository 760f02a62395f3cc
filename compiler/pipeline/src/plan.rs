//! Runs the passes that say how, where and when.

use super::{Inputs, Neurons, Placed, Planned};
use moec_base::error::{Error, Result};
use moec_ir::Module;
use moec_passes::decisions::Decision;
use moec_passes::home::Homes;
use moec_passes::hot::HotShare;
use moec_passes::tune::{self, KernelTimer};
use moec_passes::{frames, fuse, layout, page};

/// 10⁹ bytes per second of a disk that was not measured.
const FLASH_GB_PER_S: f64 = 2.0;

pub(super) fn layout(given: &Inputs<'_>, module: &Module, placed: &Placed) -> Result<Planned> {
    let artifacts = given.artifacts()?;
    let cache = given.config.kv_format();
    let (statics, homes) = (&placed.statics, &placed.homes);
    // A host build has no budget of its own: its Graph says what asks flash. Frames hear of scores without any.
    let asks = || module.entries.iter().flat_map(|e| &e.nodes).any(|n| n.op.reads_disk());
    let framed = homes.experts.policy.cached().is_some();
    let paged = given.config.memory.budget.is_some() || (!framed && asks());
    let draft =
        layout::layout(module, given.model_info()?, given.target, cache, &artifacts, statics, homes, paged)?;
    let mut plan = draft.plan;
    // The bounds of the experts of a host build are not a placement of its own.
    let divided = given.units.is_some() || !given.list.free.is_empty();
    if let Some(placement) = placed.placement.as_ref().filter(|_| divided) {
        plan.placement = placement.clone();
    }
    Ok(Planned {
        plan,
        ordered: false,
        kernels: draft.kernels,
        thread_kernels: draft.thread_kernels,
        segment_weights: draft.segment_weights,
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

pub(super) fn page(given: &Inputs<'_>, planned: &mut Planned) -> Result<()> {
    let Some(budget) = given.config.memory.budget else { return Ok(()) };
    let tokenizer = given.tokenizer()?.map_or(0, |text| text.len() as u64);
    let threads = match given.config.memory.threads {
        Some(threads) => threads,
        None => moec_runtime::platform::cpu::threads(None).map_err(Error::from)?,
    };
    let wanted = page::Wanted {
        budget,
        threads: u32::try_from(threads).unwrap_or(u32::MAX),
        tokenizer,
        policy: given.config.memory.policy.as_deref(),
        flash: given.target.flash(),
        pin: given.config.memory.pin,
        prefetch: u32::try_from(given.config.memory.prefetch).unwrap_or(u32::MAX),
    };
    let paged = page::page(&mut planned.plan, wanted, given.profile)?;
    if let Some(decisions) = &mut planned.decisions {
        decisions.decisions.extend(paged.choice.as_ref().map(Decision::of_cache));
    }
    Ok(())
}

pub(super) fn fill(given: &Inputs<'_>, homes: &Homes, planned: &mut Planned) -> Result<()> {
    let Some(system) = given.config.placement.policy else { return Ok(()) };
    let bytes = homes.experts.policy.costs().map_or(0, |c| c.expert_bytes);
    let rate = given.target.flash().and_then(|m| Some(m.bandwidth.last()?.rate()));
    let wanted = frames::Wanted {
        system,
        experts: &given.config.placement.experts,
        cached: given.config.placement.cached,
        flash_us: bytes as f64 / (rate.unwrap_or(FLASH_GB_PER_S) * 1e3),
    };
    let filled = frames::fill(&mut planned.plan, wanted, given.profile)?;
    if let Some(decisions) = &mut planned.decisions {
        decisions.decisions.extend(filled);
    }
    Ok(())
}
