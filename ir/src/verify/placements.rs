//! Checks of placements; [`super`] lists the invariants.

use super::{VerifyError, require};
use crate::placement::{CAPACITY_ALIGN, DecodeUnit, ExpertTable, MOST_TIERS, Overflow, Placement};
use crate::plan::Plan;
use std::collections::HashSet;

/// The placement of a plan, whose units it shares.
pub(super) fn check_in_plan(plan: &Plan) -> Result<(), VerifyError> {
    let p = &plan.placement;
    let at = || "placement".to_owned();
    let units = plan.unit_names();
    require((p.is_dynamic() && p.units.is_empty()) || p.units == units, at, || {
        format!("units {:?} are not the plan's {units:?}", p.units)
    })?;
    let past = p.experts.last().is_some_and(|t| t.layer >= plan.model.layers);
    require(!past, at, || "a layer is out of range".into())?;
    check(p, plan.units.len())
}

/// A placement whose unit indices refer to `units` units.
pub(super) fn check(p: &Placement, units: usize) -> Result<(), VerifyError> {
    let at = || "placement".to_owned();
    let names: HashSet<&String> = p.units.iter().collect();
    let named = names.len() == p.units.len() && p.units.iter().all(|u| !u.is_empty());
    require(named, at, || "a unit without a name, or two of one name".into())?;
    let fixed = p.overflow == Overflow::default();
    require(!p.is_dynamic() || fixed, at, || "overflow on a unit with dynamic shapes".into())?;
    for (i, op) in p.ops.iter().enumerate() {
        let at = || format!("placement.ops[{i}]");
        require((op.unit as usize) < units, at, || format!("unit {} is out of range", op.unit))?;
        require(op.nodes > 0 && !op.op.is_empty(), at, || "no operator".into())?;
    }
    let mut previous = None;
    for (i, table) in p.experts.iter().enumerate() {
        let here = format!("experts[{i}]");
        let at = || here.clone();
        require(previous < Some(table.layer), at, || format!("layer {} is out of order", table.layer))?;
        previous = Some(table.layer);
        let n = table.experts.len();
        require(table.k > 0 && table.k as usize <= n, at, || {
            format!("{} of {n} experts per token", table.k)
        })?;
        check_tiers(p, table, &here)?;
        check_rows(p, table, units, &here)?;
        check_groups(table, units, &here)?;
    }
    Ok(())
}

fn check_tiers(p: &Placement, table: &ExpertTable, here: &str) -> Result<(), VerifyError> {
    let at = || here.to_owned();
    let tiers = &table.tiers;
    if p.is_dynamic() {
        return require(tiers.is_empty() && table.groups.is_empty(), at, || {
            "tiers or groups on a unit with dynamic shapes".into()
        });
    }
    let fit = (1..=MOST_TIERS).contains(&tiers.len())
        && tiers.is_sorted_by(|a, b| a > b)
        && tiers.iter().all(|&c| c > 0 && c % CAPACITY_ALIGN == 0);
    require(fit, at, || format!("tiers {tiers:?}"))?;
    let rates = table.expected.is_none_or(|e| {
        let rate = |x: f32| (0.0..=1.0).contains(&x);
        rate(e.overflow) && rate(e.padding) && e.imbalance.is_finite() && e.imbalance >= 0.0
    });
    require(rates, at, || "an invalid rate".into())
}

fn check_rows(p: &Placement, table: &ExpertTable, units: usize, here: &str) -> Result<(), VerifyError> {
    let n = table.experts.len();
    for (e, row) in table.experts.iter().enumerate() {
        let at = || format!("{here}.experts[{e}]");
        let known = (row.group as usize) < n && (row.unit as usize) < units;
        require(known, at, || format!("group {} or unit {} is out of range", row.group, row.unit))?;
        require(row.load.is_none_or(|x| x.is_finite() && x >= 0.0), at, || "an invalid load".into())?;
        let tier = row.tier.map(|t| table.tiers.get(t as usize).copied());
        let fits = match tier {
            None => p.is_dynamic() && row.capacity == 0,
            Some(capacity) => capacity.is_some_and(|c| row.capacity == 0 || row.capacity == c),
        };
        require(fits, at, || {
            format!("capacity {} in tier {:?} of {:?}", row.capacity, row.tier, table.tiers)
        })?;
        let spills = row.capacity > 0 && p.overflow == Overflow::Spill;
        let falls = row.fallback.is_none_or(|u| (u as usize) < units && u != row.unit);
        require(falls && row.fallback.is_some() == spills, at, || {
            format!("fallback {:?} with the overflow policy {}", row.fallback, p.overflow)
        })?;
    }
    Ok(())
}

fn check_groups(table: &ExpertTable, units: usize, here: &str) -> Result<(), VerifyError> {
    if table.groups.is_empty() {
        return Ok(());
    }
    let mut seen = vec![false; table.experts.len()];
    for (g, group) in table.groups.iter().enumerate() {
        let at = || format!("{here}.groups[{g}]");
        require((group.unit as usize) < units, at, || format!("unit {} is out of range", group.unit))?;
        let costs = group.cost_us.is_empty() || group.cost_us.len() == units;
        let positive = group.cost_us.iter().all(|c| c.is_finite() && *c >= 0.0);
        require(costs && positive, at, || format!("costs {:?} of {units} units", group.cost_us))?;
        require(group.decode.is_sorted_by(|a, b| a.batch < b.batch), at, || {
            "batches that it decodes do not ascend".into()
        })?;
        for DecodeUnit { batch, unit, cost_us, .. } in &group.decode {
            let costs = cost_us.len() == units && cost_us.iter().all(|c| c.is_finite() && *c >= 0.0);
            require(*batch > 0 && (*unit as usize) < units && costs, at, || {
                format!("unit {unit} with costs {cost_us:?} of {units} units for {batch} rows")
            })?;
        }
        require(!group.experts.is_empty() && group.bytes > 0, at, || "it holds nothing".into())?;
        let sizes = &group.sizes;
        let aligned = sizes.iter().all(|n| *n > 0 && n.is_multiple_of(CAPACITY_ALIGN));
        let largest = sizes.last().is_none_or(|n| table.tiers.get(group.tier as usize) == Some(n));
        require(aligned && largest && sizes.is_sorted_by(|a, b| a < b), at, || {
            format!("sizes {sizes:?} do not ascend to the capacity of tier {}", group.tier)
        })?;
        for &e in &group.experts {
            let row = table.experts.get(e as usize);
            let agrees = row
                .is_some_and(|r| r.group as usize == g && r.tier == Some(group.tier) && r.unit == group.unit);
            let first = seen.get_mut(e as usize).is_some_and(|s| !std::mem::replace(s, true));
            require(agrees && first, at, || format!("expert {e} is missing, a duplicate or inconsistent"))?;
        }
    }
    let missing = seen.iter().position(|s| !s);
    require(missing.is_none(), || here.to_owned(), || format!("expert {missing:?} is in no group"))
}
