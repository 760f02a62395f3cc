//! Frames of the hosts of one device: each has experts on a disk of its own.

use super::{LEAST, PROCESS, PagingOptions, STAGING, block_bytes};
use moec_base::error::{Error, Result};
use moec_base::human;
use moec_ir::plan::{ALIGN, PagedLayer, Plan};
use moec_profile::Profile;
use moec_runtime::offload::disk::BLOCK;
use moec_sim::cache::{self, Trace};

/// Sizes the frames of the other hosts. Each has the budget, or what its memory has if that is less. A host sees the
/// choice of its experts, but neither scores nor predictions: its cache keeps what was used last.
///
/// # Errors
/// Fails if the budget is too small for a host, with the smallest that works.
pub(super) fn size(
    plan: &mut Plan,
    options: PagingOptions<'_>,
    profile: Option<&Profile>,
    trace: Option<&Trace>,
) -> Result<()> {
    let page = |bytes: u64| bytes.next_multiple_of(BLOCK);
    for memory in 1..plan.memories.len() as u32 {
        let (peak, elsewhere) = (plan.peak(memory, 1).unwrap_or(u64::MAX), plan.experts_off_disk(memory));
        let uses = uses(plan, memory, profile, trace);
        let scratch = page((plan.scratch_bytes + 2 * ALIGN) * u64::from(options.threads));
        let (name, capacity) =
            plan.memories.get(memory as usize).map(|m| (m.name.clone(), m.capacity)).unwrap_or_default();
        let budget = capacity.map_or(options.budget, |capacity| capacity.min(options.budget));
        let Some(paging) = plan.paging_of_mut(memory) else { continue };
        let resident = page(peak.saturating_add(scratch));
        let fixed = resident.saturating_add(PROCESS);
        let own = paging.layers.iter().map(|l| u64::from(l.experts)).sum::<u64>() - elsewhere.len() as u64;
        let frames = (budget.saturating_sub(fixed) / paging.frame_bytes).checked_sub(u64::from(STAGING));
        let frames = frames.filter(|&frames| frames >= u64::from(LEAST)).ok_or_else(|| {
            let least = fixed.saturating_add(u64::from(LEAST + STAGING) * paging.frame_bytes);
            let [budget, resident, process] = [budget, resident, PROCESS].map(human::bytes);
            Error::input(format!("a budget of {budget} is too small for `{name}`"))
                .because(format!(
                    "weights outside of experts, states, activations and scratch take {resident}, the process \
                     {process}"
                ))
                .hint(format!("the minimum is {}", human::bytes_up(least)))
        })?;
        (paging.budget, paging.threads) = (budget, options.threads);
        (paging.resident, paging.process) = (resident, PROCESS);
        paging.frames = frames.min(own) as u32;
        paging.block_bytes = block_bytes(options.disk);
        paging.uses = uses;
    }
    Ok(())
}

/// Recorded uses of the experts on the disk of a memory's host, 0 for those that another memory has; none without
/// recorded routing.
pub(super) fn uses(plan: &Plan, memory: u32, profile: Option<&Profile>, trace: Option<&Trace>) -> Vec<u32> {
    let (Some((profile, trace)), Some(paging)) = (profile.zip(trace), plan.paging_of(memory)) else {
        return Vec::new();
    };
    let (uses, elsewhere) = (cache::uses(trace), plan.experts_off_disk(memory));
    let first = |layer: u32| {
        let at = profile.layers.iter().position(|l| l.layer == layer)?;
        Some(profile.layers.iter().take(at).map(|l| l.chosen.len()).sum::<usize>())
    };
    let of = |(i, layer): (u32, &PagedLayer)| {
        let first = first(layer.layer);
        let here = |expert: u32| elsewhere.binary_search(&(i, expert)).is_err();
        let of = |expert: u32| uses.get(first.filter(|_| here(expert))? + expert as usize).copied();
        (0..layer.experts).map(|expert| of(expert).unwrap_or(0)).collect::<Vec<_>>()
    };
    (0..).zip(&paging.layers).flat_map(of).collect()
}
