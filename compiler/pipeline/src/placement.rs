//! Runs the passes that place the model on units.

use super::{Candidate, Inputs, Placed, graph};
use moec_base::error::{Error, Result};
use moec_config::{Capacity, ExpertsConfig, HostPlacement, UnitSetting};
use moec_costs::units::{UnitPreference, expert_sizes_on};
use moec_ir::Module;
use moec_ir::placement::Overflow;
use moec_passes::{assign_residency, assign_units, gpu_expert_cache, group, plan_expert_schedule, tier};
use moec_profile::loads::{Loads, loads};
use moec_runtime::schedule::GpuResidents;

pub(super) fn tier(given: &Inputs<'_>, module: &Module, placed: &mut Placed) -> Result<()> {
    let Some(units) = &given.units else { return Ok(()) };
    assign_residency::check(
        module,
        units,
        given.list.preference("attention", &given.config.placement.attention)?,
    )?;
    let loads = match &placed.loads {
        Some(own) => own.clone(),
        None => recorded(given)?,
    };
    let routers = module.entries.first().into_iter().flat_map(|g| &g.nodes).filter_map(|n| n.op.router());
    let routers = routers.map(|d| (d.experts, d.k as u32));
    if !routers.eq(loads.layers.iter().map(|l| (l.experts(), l.k))) {
        return Err(Error::input("the profile has other experts than the model")
            .hint("record it again with `moec calibrate`"));
    }
    let overflow = given.config.overflow();
    let config = &ExpertsConfig { overflow: Some(overflow), ..given.config.experts.clone() };
    let options = group_options(given)?;
    let sizes = expert_sizes_on(module, units)?;
    let place = |coverage: f64| {
        group::tiered(&loads, units, config, coverage, &|layer| sizes.get(&layer).copied(), options)
    };
    let coverage = match given.config.quality.max_perplexity_increase {
        // Under `spill` no row is lost.
        Some(_) if overflow == Overflow::Prune && config.capacity != Capacity::Coverage => {
            return Err(Error::input("`capacity` and `max_perplexity_increase` both choose the capacities")
                .hint(
                    "set `capacity = \"coverage\"` under `[experts]`, or leave `max_perplexity_increase` out",
                ));
        }
        Some(budget) if overflow == Overflow::Prune => {
            let probe = given.quality.ok_or_else(|| {
                Error::limit(format!("the loss of quality on `{}` cannot be measured here", units.device.name))
                    .hint("name `text` under `[quality]`, or set `coverage` under `[experts]` in place of `max_perplexity_increase`")
            })?;
            let model = &given.model_info()?;
            let mut loss = |coverage: f64| {
                let placement = &place(coverage)?;
                probe.perplexity_increase(&Candidate { module, model, placement })
            };
            tier::smallest_coverage(budget, &mut loss)?
        }
        _ => config.coverage,
    };
    placed.placement = Some(place(coverage)?);
    placed.loads = Some(loads);
    Ok(())
}

/// Loads of the profile in chunks of the build.
fn recorded(given: &Inputs<'_>) -> Result<Loads> {
    let profile = given.profile.ok_or_else(|| {
        Error::input("static capacities require the loads of a calibration, but there is no profile").hint(
            "`moec calibrate` records one; name it as `profile` under `[calibrate]`, or name `text` to read",
        )
    })?;
    let chunk =
        u32::try_from(given.shapes()?.prefill_chunk).map_err(|_| Error::limit("a chunk past 32 bits"))?;
    loads(profile, chunk)
}

fn group_options(given: &Inputs<'_>) -> Result<group::Options> {
    let (experts, preference) =
        (&given.config.experts, given.list.preference("experts", &given.config.placement.experts)?);
    Ok(group::Options { group: experts.group, sizes: experts.sizes, preference })
}

pub(super) fn group(given: &Inputs<'_>, module: &Module, placed: &mut Placed) -> Result<()> {
    let options = group_options(given)?;
    let Some(((units, placement), loads)) =
        given.units.as_ref().zip(placed.placement.as_mut()).zip(placed.loads.as_ref())
    else {
        return Ok(());
    };
    group::group(placement, loads, module, units, options)
}

pub(super) fn assign_residency(given: &Inputs<'_>, module: &Module, placed: &mut Placed) -> Result<()> {
    let Some(((units, placement), loads)) =
        given.units.as_ref().zip(placed.placement.as_mut()).zip(placed.loads.as_ref())
    else {
        return Ok(());
    };
    let config = &given.config.placement;
    let experts = given.list.preference("experts", &config.experts)?;
    let decode = match (given.list.preference("decode", &config.decode)?, experts) {
        (UnitPreference::Graphs, UnitPreference::Cpu) => {
            let error =
                Error::input("`decode` under `[placement]` requests graphs of experts, and `experts` none");
            return Err(error
                .because("decoding launches the graphs of prompts")
                .hint("set `experts = \"auto\"`, or remove `decode`"));
        }
        // Experts that the CPU computes in prompts by request have no graphs.
        (UnitPreference::Auto, UnitPreference::Cpu) => UnitPreference::Cpu,
        (decode, _) => decode,
    };
    let options = assign_residency::ResidencyOptions {
        attention: given.list.preference("attention", &config.attention)?,
        experts,
        decode,
        mix: given.config.mix,
        hot: given.list.preference("hot", &config.hot)? == UnitPreference::Graphs,
        sizes: given.config.experts.sizes,
    };
    placed.attention = assign_residency::assign_residency(placement, loads, module, units, options)?;
    Ok(())
}

pub(super) fn assign_units(given: &Inputs<'_>, module: &Module, placed: &mut Placed) -> Result<()> {
    let known = match (&placed.loads, given.profile) {
        (None, Some(_)) => Some(recorded(given)?),
        _ => None,
    };
    let loads = placed.loads.as_ref().or(known.as_ref());
    let (config, budget) = (&given.config.placement, given.config.memory.device_budget);
    let hosts = given.hosts();
    if [HostPlacement::Stages, HostPlacement::Owners].contains(&hosts) {
        let elsewhere = |setting: &UnitSetting| setting.unit().is_some_and(|unit| unit != "cpu");
        let more = [
            (given.cuts_experts(), "`slices` under `[placement]`"),
            (given.cuts_attention(), "`attention_slices` under `[placement]`"),
            (elsewhere(&config.attention), "`attention` under `[placement]`"),
            (elsewhere(&config.mixer), "`mixer` under `[placement]`"),
            (elsewhere(&config.rest), "`rest` under `[placement]`"),
        ];
        graph::check_alone(given, &format!("`hosts` under `[placement]` is `{}`", hosts.name()), &more)?;
    }
    (placed.assignment, placed.of_experts) =
        assign_units::assign_units(module, &mut placed.placement, &given.list, config, hosts, budget, loads)?;
    Ok(())
}

pub(super) fn plan_expert_schedule(given: &Inputs<'_>, module: &Module, placed: &mut Placed) -> Result<()> {
    let known = match (&placed.loads, given.profile) {
        (None, Some(_)) => Some(recorded(given)?),
        _ => None,
    };
    let loads = placed.loads.as_ref().or(known.as_ref());
    if given.config.placement.policy.is_some_and(|s| s.gpu_residents != GpuResidents::Layers) {
        return gpu_expert_cache::plan_gpu_expert_cache(
            module,
            &mut placed.placement,
            &mut placed.assignment,
            &given.list,
            given.config,
        );
    }
    plan_expert_schedule::plan_expert_schedule(
        module,
        &mut placed.placement,
        &mut placed.assignment,
        &given.list,
        given.config,
        loads,
    )
}
