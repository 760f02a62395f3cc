//! Runs the passes that say where things live.

use super::{Candidate, Inputs, Placed};
use moec_base::error::{Error, Result};
use moec_config::ExpertsConfig;
use moec_costs::units::expert_sizes_on;
use moec_ir::Module;
use moec_ir::placement::Overflow;
use moec_passes::{frames, group, home, place, reside, tier};
use moec_profile::loads::{Loads, loads};
use moec_runtime::schedule::Keeps;

pub(super) fn tier(given: &Inputs<'_>, module: &Module, placed: &mut Placed) -> Result<()> {
    let Some(units) = &given.units else { return Ok(()) };
    reside::check(module, units, given.list.wish("attention", &given.config.placement.attention)?)?;
    let loads = match &placed.loads {
        Some(own) => own.clone(),
        None => recorded(given)?,
    };
    let routers = module.entries.first().into_iter().flat_map(|g| &g.nodes).filter_map(|n| n.op.router());
    let routers = routers.map(|d| (d.experts, d.k as u32));
    if !routers.eq(loads.layers.iter().map(|l| (l.experts(), l.k))) {
        return Err(Error::input("the profile has other experts than the model")
            .hint("take it anew with `moec calibrate`"));
    }
    let overflow = given.config.overflow();
    let wanted = &ExpertsConfig { overflow: Some(overflow), ..given.config.experts.clone() };
    let options = group_options(given)?;
    let sizes = expert_sizes_on(module, units)?;
    let place = |coverage: f64| {
        group::tiered(&loads, units, wanted, coverage, &|layer| sizes.get(&layer).copied(), options)
    };
    let coverage = match given.config.quality.max_perplexity_increase {
        // What spills is computed all the same.
        Some(budget) if overflow == Overflow::Prune => {
            let probe = given.quality.ok_or_else(|| {
                Error::limit(format!("nothing here measures the loss of quality on `{}`", units.device.name))
                    .hint("name `text` under `[quality]`, or set `coverage` under `[experts]` in place of `max_perplexity_increase`")
            })?;
            let model = &given.model_info()?;
            let mut loss = |coverage: f64| {
                let placement = &place(coverage)?;
                probe.perplexity_increase(&Candidate { module, model, placement })
            };
            tier::spend(budget, &mut loss)?
        }
        _ => wanted.coverage,
    };
    placed.placement = Some(place(coverage)?);
    placed.loads = Some(loads);
    Ok(())
}

/// Loads of the profile in chunks of the build.
fn recorded(given: &Inputs<'_>) -> Result<Loads> {
    let profile = given.profile.ok_or_else(|| {
        Error::input("static capacities come from the loads that calibration saw, and there is no profile").hint(
            "`moec calibrate` records one; name it as `profile` under `[calibrate]`, or name `text` to read",
        )
    })?;
    let chunk =
        u32::try_from(given.shapes()?.prefill_chunk).map_err(|_| Error::limit("a chunk past 32 bits"))?;
    loads(profile, chunk)
}

fn group_options(given: &Inputs<'_>) -> Result<group::Options> {
    let (experts, home) =
        (&given.config.experts, given.list.wish("experts", &given.config.placement.experts)?);
    Ok(group::Options { group: experts.group, sizes: experts.sizes, home })
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

pub(super) fn reside(given: &Inputs<'_>, module: &Module, placed: &mut Placed) -> Result<()> {
    let Some(((units, placement), loads)) =
        given.units.as_ref().zip(placed.placement.as_mut()).zip(placed.loads.as_ref())
    else {
        return Ok(());
    };
    let homes = &given.config.placement;
    let wanted = reside::Wanted {
        attention: given.list.wish("attention", &homes.attention)?,
        experts: given.list.wish("experts", &homes.experts)?,
        mix: given.config.mix,
    };
    placed.attention = reside::reside(placement, loads, module, units, wanted)?;
    Ok(())
}

pub(super) fn home(given: &Inputs<'_>, module: &Module, placed: &mut Placed) -> Result<()> {
    let known = match (&placed.loads, given.profile) {
        (None, Some(_)) => Some(recorded(given)?),
        _ => None,
    };
    let loads = placed.loads.as_ref().or(known.as_ref());
    let (wanted, budget) = (&given.config.placement, given.config.memory.device_budget);
    (placed.homes, placed.of_experts) =
        home::home(module, &mut placed.placement, &given.list, wanted, budget, loads)?;
    Ok(())
}

pub(super) fn place(given: &Inputs<'_>, module: &Module, placed: &mut Placed) -> Result<()> {
    let known = match (&placed.loads, given.profile) {
        (None, Some(_)) => Some(recorded(given)?),
        _ => None,
    };
    let loads = placed.loads.as_ref().or(known.as_ref());
    if given.config.placement.policy.is_some_and(|s| s.keeps != Keeps::Layers) {
        return frames::frames(module, &mut placed.placement, &mut placed.homes, &given.list, given.config);
    }
    place::place(module, &mut placed.placement, &mut placed.homes, &given.list, given.config, loads)
}
