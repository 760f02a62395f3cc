//! Printing placements.

use super::lex::{quote, quoted};
use super::ops::{Item, braces};
use crate::placement::{ExpertTable, OpAssignment, Overflow, Placement};
use std::fmt;

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_placement(f, self)
    }
}

/// A placement, as printed at the end of a plan. The default prints nothing.
pub(super) fn write_placement(f: &mut fmt::Formatter<'_>, p: &Placement) -> fmt::Result {
    if p.chunk != 0 || p.overflow != Overflow::default() || !p.units.is_empty() {
        let (chunk, overflow, units) = (p.chunk, p.overflow, quoted(&p.units));
        writeln!(f, "\nplacement {{chunk = {chunk}, overflow = {overflow}, units = {units}}}")?;
    }
    for OpAssignment { entry, scope, op, unit, nodes, why } in &p.ops {
        write!(f, "placed {entry} {} {} ", quote(&scope.to_string()), quote(op))?;
        writeln!(f, "{{unit = {unit}, nodes = {nodes}, why = {}}}", quote(why))?;
    }
    p.experts.iter().try_for_each(|table| write_table(f, table))
}

fn write_table(f: &mut fmt::Formatter<'_>, table: &ExpertTable) -> fmt::Result {
    let ExpertTable { layer, k, tiers, expected, groups, experts } = table;
    write!(f, "\nexperts {{layer = {layer}, k = {k}")?;
    if !tiers.is_empty() {
        write!(f, ", tiers = {tiers:?}")?;
    }
    if let Some(rates) = expected {
        write!(f, ", expected = {}", rates.text())?;
    }
    writeln!(f, "}} {{")?;
    for (i, group) in groups.iter().enumerate() {
        writeln!(f, "  group {i}{}", braces(group))?;
    }
    for (i, row) in experts.iter().enumerate() {
        writeln!(f, "  expert {i}{}", braces(row))?;
    }
    writeln!(f, "}}")
}
