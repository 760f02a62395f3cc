//! Runs the passes that change what is computed.

use super::Compilation;
use moec_base::error::{Error, Result};
use moec_config::Skip;
use moec_costs::units::Wish;
use moec_ir::{EntryKind, Op};
use moec_passes::hot::{self, Experts};
use moec_passes::offload::Statics;
use moec_passes::rewrite::{Costs, rules};
use moec_passes::{cluster, convolve, divide, fetch, format, lower, offload, reads, rewrite, threshold};
use moec_sim::cache::Pin;

pub(super) fn lower(c: &mut Compilation<'_>) -> Result<()> {
    c.module = lower::lower(c.spec()?, &c.shapes()?)?;
    Ok(())
}

#[expect(clippy::unnecessary_wraps, reason = "a pass may fail; this one does not")]
pub(super) fn threshold(c: &mut Compilation<'_>) -> Result<()> {
    threshold::threshold(&mut c.module, &c.thresholds);
    Ok(())
}

pub(super) fn format(c: &mut Compilation<'_>) -> Result<()> {
    format::format(&mut c.module, &c.config.weights, &c.formats);
    c.units.as_ref().map_or(Ok(()), |units| format::suits_graphs(&c.module, &units.npu.name))
}

pub(super) fn rewrite(c: &mut Compilation<'_>) -> Result<()> {
    let target = c.target;
    let none: &dyn Fn(&str) -> bool = &|_| false;
    let keep = c.as_lowered.then_some(none);
    let costs = Costs { legal: &|op| target.is_legal(op), launch: target.launch_cost() };
    let options = rewrite::Options { rules: rules::equations, keep, costs, islands: &[] };
    c.applied = rewrite::rewrite(&mut c.module, &options)?;
    Ok(())
}

pub(super) fn convolve(c: &mut Compilation<'_>) -> Result<()> {
    let Some((units, placement)) = c.units.as_ref().zip(c.placement.as_mut()) else { return Ok(()) };
    let target = c.target;
    let costs = Costs { legal: &|op| target.is_legal(op), launch: target.launch_cost() };
    for (rule, count) in convolve::convolve(&mut c.module, placement, units, costs)? {
        *c.applied.entry(rule).or_default() += count;
    }
    Ok(())
}

pub(super) fn offload(c: &mut Compilation<'_>) -> Result<()> {
    let Some(placement) = &c.placement else { return Ok(()) };
    let Some(units) = &c.units else {
        c.statics = Statics::bounds(placement);
        return offload::offload(&mut c.module, &c.statics, false);
    };
    let statics = Statics::of(&c.module, placement, units)?;
    offload::offload(&mut c.module, &statics, true)?;
    // Nodes have other numbers now.
    c.statics = Statics::of(&c.module, placement, units)?;
    Ok(())
}

pub(super) fn cluster(c: &mut Compilation<'_>) -> Result<()> {
    let skip = c.config.experts.skip;
    let networks = c.list.wish("hot", &c.config.placement.hot)? == Wish::Graphs;
    if let Some((units, profile)) = c.units.as_ref().zip(c.profile) {
        let layers = Experts::of(&c.module, c.placement.as_ref(), units);
        let room = c.config.memory.budget.map(|bytes| bytes as f64).or(hot::available(units));
        c.hot = hot::hot(&layers, units, profile, room.unwrap_or(f64::INFINITY), networks)?;
        if networks {
            let decoded = c.module.entries.iter().filter_map(|g| match g.kind {
                EntryKind::Decode(batch) => Some(batch),
                EntryKind::Prefill(_) | EntryKind::Little(_) => None,
            });
            let decoded: Vec<u32> = decoded.collect();
            c.hot_neurons = hot::networks(&mut c.hot, &c.module, units, profile, &decoded)?;
        }
    }
    if !c.hot_neurons.is_empty() {
        return divide(c);
    }
    // Other units have kernels of their own.
    let paged = c.config.memory.budget.is_some();
    let elsewhere = if c.units.is_some() || !c.list.free.is_empty() || c.placement.is_some() {
        "other units compute experts on this target"
    } else {
        let memory = &c.config.memory;
        let own = memory.policy.is_none() && memory.pin == Pin::Auto && skip == Skip::Auto;
        if let Some((budget, profile)) = memory.budget.zip(c.profile).filter(|_| own) {
            c.on_flash = reads::decide(&c.module, profile, budget, c.target.flash());
        }
        let by_neurons = c.on_flash.as_ref().is_some_and(|d| d.by_neurons);
        let skip = if by_neurons { Skip::On } else { skip };
        let seen: &dyn cluster::Activity = match c.profile {
            Some(profile) => profile,
            None => &cluster::Unseen,
        };
        return cluster::cluster(&mut c.module, skip, seen, paged);
    };
    if skip != Skip::On {
        return Ok(());
    }
    Err(Error::limit("`skip = \"on\"`, but experts cannot be skipped neuron by neuron here")
        .because(elsewhere)
        .hint("leave `skip` under `[experts]` at `\"auto\"`"))
}

/// Divides experts between the networks of their hot neurons and the processor.
fn divide(c: &mut Compilation<'_>) -> Result<()> {
    let Some((units, placement)) = c.units.as_ref().zip(c.placement.as_mut()) else { return Ok(()) };
    let refused = |what: &str| {
        Error::limit(format!("`hot` under `[placement]` asks for networks of hot neurons, with {what}"))
            .hint("leave `hot` out: then the processor computes the experts of decoding")
    };
    if c.config.memory.budget.is_some() {
        return Err(refused("a memory budget")
            .because("the processor's neurons are resident where others are a unit's, and a budget would read them from flash"));
    }
    if c.config.experts.skip == Skip::Off {
        return Err(refused("`skip = \"off\"`")
            .because("the processor computes what is not hot neuron by neuron, and skips those at 0"));
    }
    divide::divide(&mut c.module, &c.hot_neurons)?;
    divide::placed(placement, &c.module, units);
    // Nodes have other numbers now.
    c.statics = Statics::of(&c.module, placement, units)?;
    Ok(())
}

pub(super) fn fetch(c: &mut Compilation<'_>) -> Result<()> {
    // Neurons are asked for when it is known who is awake.
    let by_neurons = |n: &moec_ir::Node| matches!(n.op, Op::NeuronFfn { paged: Some(_), .. });
    let neurons = c.module.entries.iter().flat_map(|g| &g.nodes).any(by_neurons);
    if neurons {
        return Ok(());
    }
    let paged = c.config.memory.budget.map_or(0, |_| c.config.memory.prefetch);
    let frames = c.homes.schedule.iter().filter_map(|s| s.hybrid.as_ref()).map(|h| h.ahead as usize).max();
    fetch::fetch(&mut c.module, paged.max(frames.unwrap_or(0)))
}
