//! Printing placements.

use super::lex::{quote, quoted};
use crate::placement::{ExpertGroup, ExpertRow, ExpertTable, OpPlace, Overflow, Placement};
use std::fmt;

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_placement(f, self)
    }
}

/// A placement, as it stands at the end of a plan. One that is as if it were not there prints nothing.
pub(super) fn write_placement(f: &mut fmt::Formatter<'_>, p: &Placement) -> fmt::Result {
    if p.chunk != 0 || p.overflow != Overflow::default() || !p.units.is_empty() {
        let (chunk, overflow, units) = (p.chunk, p.overflow, quoted(&p.units));
        writeln!(f, "\nplacement {{chunk = {chunk}, overflow = {overflow}, units = {units}}}")?;
    }
    for OpPlace { entry, scope, op, unit, nodes, why } in &p.ops {
        write!(f, "placed {entry} {} {} ", quote(&scope.to_string()), quote(op))?;
        writeln!(f, "{{unit = {unit}, nodes = {nodes}, why = {}}}", quote(why))?;
    }
    p.experts.iter().try_for_each(|table| write_table(f, table))
}

fn write_table(f: &mut fmt::Formatter<'_>, table: &ExpertTable) -> fmt::Result {
    write!(f, "\nexperts {{layer = {}, k = {}", table.layer, table.k)?;
    if !table.tiers.is_empty() {
        write!(f, ", tiers = {:?}", table.tiers)?;
    }
    if let Some(e) = table.expected {
        let (r, overflow, padding) = (e.imbalance, e.overflow, e.padding);
        write!(f, ", expected = rates(imbalance = {r:?}, overflow = {overflow:?}, padding = {padding:?})")?;
    }
    writeln!(f, "}} {{")?;
    for (i, group) in table.groups.iter().enumerate() {
        let ExpertGroup { tier, unit, experts, sizes, bytes, cost_us, why } = group;
        write!(f, "  group {i} {{tier = {tier}, unit = {unit}, experts = {experts:?}")?;
        if !sizes.is_empty() {
            write!(f, ", sizes = {sizes:?}")?;
        }
        write!(f, ", bytes = {bytes}")?;
        if !cost_us.is_empty() {
            write!(f, ", cost_us = {cost_us:?}")?;
        }
        writeln!(f, ", why = {}}}", quote(why))?;
    }
    for (i, row) in table.experts.iter().enumerate() {
        let ExpertRow { capacity, group, unit, tier, fallback, load, few } = row;
        write!(f, "  expert {i} {{capacity = {capacity}, group = {group}, unit = {unit}")?;
        for (key, value) in [("tier", tier), ("fallback", fallback)] {
            if let Some(value) = value {
                write!(f, ", {key} = {value}")?;
            }
        }
        if let Some(load) = load {
            write!(f, ", load = {load:?}")?;
        }
        writeln!(f, "{}}}", if *few { ", few = true" } else { "" })?;
    }
    writeln!(f, "}}")
}
