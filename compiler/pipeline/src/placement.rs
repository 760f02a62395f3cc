//! Runs the passes that say where things live.

use super::{Candidate, Compilation};
use moec_base::error::{Error, Result};
use moec_config::ExpertsConfig;
use moec_costs::units::expert_sizes_on;
use moec_ir::Op;
use moec_ir::placement::Overflow;
use moec_passes::{frames, group, home, place, reside, tier};
use moec_profile::loads::{Loads, loads};
use moec_runtime::schedule::hybrid::Keeps;

pub(super) fn tier(c: &mut Compilation<'_>) -> Result<()> {
    let Some(units) = &c.units else { return Ok(()) };
    reside::check(&c.module, units, c.list.wish("attention", &c.config.placement.attention)?)?;
    let loads = match &c.loads {
        Some(given) => given.clone(),
        None => recorded(c)?,
    };
    let routers = c.module.entries.first().into_iter().flat_map(|g| &g.nodes).filter_map(|n| match &n.op {
        Op::Router(d) => Some((d.experts, d.k as u32)),
        _ => None,
    });
    if !routers.eq(loads.layers.iter().map(|l| (l.experts(), l.k))) {
        return Err(Error::input("the profile has other experts than the model")
            .hint("take it anew with `moec calibrate`"));
    }
    let overflow = c.config.overflow();
    let wanted = &ExpertsConfig { overflow: Some(overflow), ..c.config.experts.clone() };
    let options = group_options(c)?;
    let sizes = expert_sizes_on(&c.module, units)?;
    let place = |coverage: f64| {
        group::tiered(&loads, units, wanted, coverage, &|layer| sizes.get(&layer).copied(), options)
    };
    let coverage = match c.config.quality.max_perplexity_increase {
        // What spills is computed all the same.
        Some(budget) if overflow == Overflow::Prune => {
            let probe = c.quality.ok_or_else(|| {
                Error::limit(format!("nothing here measures the loss of quality on `{}`", units.device.name))
                    .hint("name `text` under `[quality]`, or set `coverage` under `[experts]` in place of `max_perplexity_increase`")
            })?;
            let (module, model) = (&c.module, &c.model_info()?);
            let mut loss = |coverage: f64| {
                let placement = &place(coverage)?;
                probe.perplexity_increase(&Candidate { module, model, placement })
            };
            tier::spend(budget, &mut loss)?
        }
        _ => wanted.coverage,
    };
    c.placement = Some(place(coverage)?);
    c.loads = Some(loads);
    Ok(())
}

/// Loads of the profile in chunks of the build.
fn recorded(c: &Compilation<'_>) -> Result<Loads> {
    let profile = c.profile.ok_or_else(|| {
        Error::input("static capacities come from the loads that calibration saw, and there is no profile").hint(
            "`moec calibrate` records one; name it as `profile` under `[calibrate]`, or name `text` to read",
        )
    })?;
    let chunk = u32::try_from(c.shapes()?.prefill_chunk).map_err(|_| Error::limit("a chunk past 32 bits"))?;
    loads(profile, chunk)
}

fn group_options(c: &Compilation<'_>) -> Result<group::Options> {
    let (experts, home) = (&c.config.experts, c.list.wish("experts", &c.config.placement.experts)?);
    Ok(group::Options { group: experts.group, sizes: experts.sizes, home })
}

pub(super) fn group(c: &mut Compilation<'_>) -> Result<()> {
    let options = group_options(c)?;
    let Some(((units, placement), loads)) = c.units.as_ref().zip(c.placement.as_mut()).zip(c.loads.as_ref())
    else {
        return Ok(());
    };
    group::group(placement, loads, &c.module, units, options)
}

pub(super) fn reside(c: &mut Compilation<'_>) -> Result<()> {
    let Some(((units, placement), loads)) = c.units.as_ref().zip(c.placement.as_mut()).zip(c.loads.as_ref())
    else {
        return Ok(());
    };
    let homes = &c.config.placement;
    let wanted = reside::Wanted {
        attention: c.list.wish("attention", &homes.attention)?,
        experts: c.list.wish("experts", &homes.experts)?,
        mix: c.config.mix,
    };
    c.attention = reside::reside(placement, loads, &c.module, units, wanted)?;
    Ok(())
}

pub(super) fn home(c: &mut Compilation<'_>) -> Result<()> {
    let known = match (&c.loads, c.profile) {
        (None, Some(_)) => Some(recorded(c)?),
        _ => None,
    };
    let loads = c.loads.as_ref().or(known.as_ref());
    let (wanted, budget) = (&c.config.placement, c.config.memory.device_budget);
    c.homes = home::home(&c.module, &mut c.placement, &c.list, wanted, budget, loads)?;
    Ok(())
}

pub(super) fn place(c: &mut Compilation<'_>) -> Result<()> {
    let known = match (&c.loads, c.profile) {
        (None, Some(_)) => Some(recorded(c)?),
        _ => None,
    };
    let loads = c.loads.as_ref().or(known.as_ref());
    if c.config.placement.policy.is_some_and(|s| s.keeps != Keeps::Layers) {
        return frames::frames(&c.module, &mut c.placement, &mut c.homes, &c.list, c.config);
    }
    place::place(&c.module, &mut c.placement, &mut c.homes, &c.list, c.config, loads)
}
