//! Runs the passes that change what is computed.

use super::inputs::Start;
use super::{Inputs, Neurons, Placed};
use moec_backend::HotLayer;
use moec_base::error::{Error, Result};
use moec_config::{Skip, UnitSetting};
use moec_costs::units::UnitPreference;
use moec_import::lower;
use moec_ir::{EntryKind, Module};
use moec_passes::assign_units::UnitAssignment;
use moec_passes::format::Formats;
use moec_passes::hot::{self, Experts};
use moec_passes::outline_graphs::Statics;
use moec_passes::rewrite::Costs;
use moec_passes::{
    cluster, divide, format, outline_graphs, own_experts, prefetch_experts, reads, rewrite, slice_attention,
    slice_experts,
};
use moec_sim::cache::Pin;

pub(super) fn lower(given: &Inputs<'_>) -> Result<Module> {
    lower::lower(given.spec()?, &given.shapes()?)
}

pub(super) fn format(given: &Inputs<'_>, module: &mut Module) -> Result<()> {
    let weights = &given.config.weights;
    let mut chosen = match given.start {
        Start::Checkpoint(checkpoint, _) => format::stored(module, weights, &|leaf| checkpoint.format(leaf)),
        Start::Graph(_) => Formats::new(),
    };
    chosen.extend(given.formats.iter().map(|(name, format)| (name.clone(), *format)));
    format::format(module, weights, &chosen);
    given.units.as_ref().map_or(Ok(()), |units| format::suits_graphs(module, &units.npu.name))
}

pub(super) fn rewrite(given: &Inputs<'_>, module: &mut Module) -> Result<()> {
    let target = given.target;
    let none: &dyn Fn(&str) -> bool = &|_| false;
    let keep = given.as_lowered.then_some(none);
    let costs = Costs { legal: &|op| target.is_legal(op), launch: target.launch_cost() };
    let options = rewrite::Options { keep, costs };
    rewrite::rewrite(module, &options).map(|_| ())
}

/// Cuts experts into slices. Other ways to place experts take whole ones, and are refused.
pub(super) fn slice_experts(given: &Inputs<'_>, module: &mut Module) -> Result<()> {
    // Each host has a slice of every expert on its disk, and no host several.
    let budget = given.config.memory.budget.is_some() && !given.slices_are_of_hosts();
    check_alone(given, "experts are cut into slices", &[(budget, "`budget` under `[memory]`")])?;
    slice_experts::slice_experts(module, &|layer| given.slices(layer))
}

/// Cuts attention into slices of its heads.
pub(super) fn slice_attention(given: &Inputs<'_>, module: &mut Module) -> Result<()> {
    let config = &given.config.placement;
    let elsewhere = |setting: &UnitSetting| setting.unit().is_some_and(|unit| unit != "cpu");
    let more = [
        (elsewhere(&config.attention), "`attention` under `[placement]`"),
        (elsewhere(&config.rest), "`rest` under `[placement]`"),
    ];
    check_alone(given, "attention is cut into slices", &more)?;
    slice_attention::slice_attention(module, &|layer| given.attention_slices(layer))
}

/// Refuses requests that cannot be combined with a division of the model between hosts: those that concern
/// experts, and `more`.
///
/// # Errors
/// Fails with the name of one that there is.
pub(super) fn check_alone(given: &Inputs<'_>, division: &str, more: &[(bool, &str)]) -> Result<()> {
    let (config, experts) = (given.config, &given.config.placement.experts);
    let nodes = given.target.device().units.iter().any(|unit| unit.cpus.is_some());
    let requested = [
        (nodes && config.memory.budget.is_some(), "`budget` under `[memory]` on NUMA nodes"),
        (config.placement.policy.is_some(), "`policy` under `[placement]`"),
        (experts.unit().is_some_and(|unit| unit != "cpu"), "`experts` under `[placement]`"),
        (config.experts.skip == Skip::On, "`skip` under `[experts]`"),
        (given.units.is_some(), "a target with static graphs"),
    ];
    if let Some((_, what)) = requested.iter().chain(more).find(|(requested, _)| *requested) {
        return Err(Error::limit(format!("{division}, which cannot be combined with {what}")).hint(
            "use a target of one host, without `slices` and `attention_slices` under `[placement]`, or remove the other",
        ));
    }
    Ok(())
}

/// Gives each host the experts that are assigned to it as weights of their own.
pub(super) fn own_experts(module: &mut Module, assignment: &UnitAssignment) -> Result<()> {
    own_experts::own_experts(module, &assignment.experts)
}

pub(super) fn outline_graphs(given: &Inputs<'_>, module: &mut Module, placed: &mut Placed) -> Result<()> {
    let Some(placement) = &placed.placement else { return Ok(()) };
    let Some(units) = &given.units else {
        placed.statics = Statics::bounds(placement);
        return outline_graphs::outline_graphs(module, &placed.statics, false);
    };
    let statics = Statics::of(module, placement, units)?;
    outline_graphs::outline_graphs(module, &statics, true)?;
    placed.legalised = outline_graphs::legalised(module, placement, units);
    // The numbers of nodes have changed.
    placed.statics = Statics::of(module, placement, units)?;
    Ok(())
}

/// Makes experts compute neuron by neuron, if that pays.
pub(super) fn cluster(
    given: &Inputs<'_>,
    module: &mut Module,
    placed: &mut Placed,
    neurons: &mut Neurons,
) -> Result<()> {
    let skip = given.config.experts.skip;
    let networks = given.list.preference("hot", &given.config.placement.hot)? == UnitPreference::Graphs;
    if let Some((units, profile)) = given.units.as_ref().zip(given.profile) {
        let layers = Experts::of(module, placed.placement.as_ref(), units);
        let room = given.config.memory.budget.map(|bytes| bytes as f64).or(hot::available(units));
        let room = room.unwrap_or(f64::INFINITY);
        let decoded = module.entries.iter().filter_map(|g| match g.kind {
            EntryKind::Decode(batch) if networks => Some(batch),
            EntryKind::Decode(_) | EntryKind::Prefill(_) | EntryKind::Little(_) => None,
        });
        let decoded: Vec<u32> = decoded.collect();
        neurons.shares = hot::hot(&layers, units, profile, room, &decoded)?;
        if networks {
            neurons.networks = hot::networks(&mut neurons.shares, &layers, module, units, profile, &decoded)?;
        }
    }
    if !neurons.networks.is_empty() {
        return divide(given, module, placed, &neurons.networks);
    }
    // Other units have kernels of their own.
    let paged = given.config.memory.budget.is_some();
    let elsewhere = if given.cuts_experts() {
        "experts are cut into slices"
    } else if given.units.is_some() || !given.list.accelerators.is_empty() || placed.placement.is_some() {
        "other units compute experts on this target"
    } else {
        let memory = &given.config.memory;
        // Predictors need neurons.
        let predicts =
            memory.budget.is_some() && given.config.experts.predict.is_requested() && skip == Skip::Auto;
        let own = memory.policy.is_none() && memory.pin == Pin::Auto && skip == Skip::Auto && !predicts;
        let budgeted = memory.budget.zip(given.profile).filter(|_| own);
        let decided = budgeted.and_then(|(budget, p)| reads::decide(module, p, budget, given.target.disk()));
        let by_neurons = decided.as_ref().is_some_and(|(by_neurons, _)| *by_neurons);
        neurons.decisions.extend(decided.map(|(_, decision)| decision));
        let skip = if by_neurons || predicts { Skip::On } else { skip };
        let activity: &dyn cluster::Activity = match given.profile {
            Some(profile) => profile,
            None => &cluster::Unseen,
        };
        return cluster::cluster(module, skip, activity, paged);
    };
    if skip != Skip::On {
        return Ok(());
    }
    Err(Error::limit("`skip = \"on\"`, but experts cannot be skipped neuron by neuron here")
        .because(elsewhere)
        .hint("set `skip = \"auto\"` under `[experts]`"))
}

/// Divides experts between the networks of their hot neurons and the CPU.
fn divide(
    given: &Inputs<'_>,
    module: &mut Module,
    placed: &mut Placed,
    networks: &[(HotLayer, Vec<Vec<u32>>)],
) -> Result<()> {
    let Some((units, placement)) = given.units.as_ref().zip(placed.placement.as_mut()) else { return Ok(()) };
    let refused = |what: &str| {
        Error::limit(format!(
            "`hot` under `[placement]` requests networks of hot neurons, which cannot be combined with {what}"
        ))
        .hint("remove `hot`: then the CPU computes the experts in decoding")
    };
    if given.config.experts.skip == Skip::Off {
        return Err(refused("`skip = \"off\"`")
            .because("the CPU computes the cold neurons one by one, and skips those at 0"));
    }
    match given.profile.filter(|_| given.config.memory.budget.is_some()) {
        Some(profile) => {
            let calls = &placed.statics.calls;
            divide::divide_on_disk(module, networks, profile, |entry, node| {
                calls.iter().any(|c| c.boundary.entry == entry && c.boundary.nodes.contains(&node))
            })?;
        }
        None => divide::divide(module, networks)?,
    }
    divide::placed(placement, module, units);
    // The numbers of nodes have changed.
    placed.statics = Statics::of(module, placement, units)?;
    Ok(())
}

pub(super) fn prefetch_experts(
    given: &Inputs<'_>,
    module: &mut Module,
    assignment: &UnitAssignment,
) -> Result<()> {
    // Neurons are requested once the active ones are known.
    let neurons = module.entries.iter().flat_map(|g| &g.nodes).any(|n| n.op.pages_neurons());
    if neurons {
        return Ok(());
    }
    let paged = given.config.memory.budget.map_or(0, |_| given.config.memory.prefetch);
    let frames = assignment.experts.policy.cached().map_or(0, |c| c.ahead as usize);
    let ahead = prefetch_experts::Ahead { token: paged.max(frames), rows: frames };
    prefetch_experts::prefetch_experts(module, ahead, assignment)
}
