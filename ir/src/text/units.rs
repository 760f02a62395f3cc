//! Units, memories and links: printing and parsing.

use super::attrs::Value;
use super::cursor::{Cursor, Parsed};
use super::items::with_attrs;
use super::lex::quote;
use super::statics::items;
use crate::plan::{Memory, MemoryLink, Plan, Resident, UnitRef};
use std::fmt;

/// Writes the units, memories and links of a plan, a line each.
pub(super) fn write(f: &mut fmt::Formatter<'_>, plan: &Plan) -> fmt::Result {
    for (i, UnitRef { name, family, memory }) in plan.units.iter().enumerate() {
        writeln!(f, "unit {i} {} {{family = {}, memory = {memory}}}", quote(name), quote(family))?;
    }
    for (i, m) in plan.memories.iter().enumerate() {
        write!(f, "memory {i} {} {{arena_bytes = {}", quote(&m.name), m.arena_bytes)?;
        if let Some(capacity) = m.capacity {
            write!(f, ", capacity = {capacity}")?;
        }
        if !m.residents.is_empty() {
            let one = |r: &Resident| format!("segment(of = {}, matrices = {:?})", r.segment, r.matrices);
            write!(f, ", residents = [{}]", m.residents.iter().map(one).collect::<Vec<_>>().join(", "))?;
        }
        writeln!(f, "}}")?;
    }
    for (i, MemoryLink { from, to }) in plan.links.iter().enumerate() {
        writeln!(f, "link {i} {{from = {from}, to = {to}}}")?;
    }
    Ok(())
}

/// Reads a unit, behind its index.
pub(super) fn unit(c: &mut Cursor<'_>) -> Parsed<UnitRef> {
    let name = c.string("a unit name")?;
    with_attrs(c, |c, a| Ok(UnitRef { name, family: a.string(c, "family")?, memory: a.int(c, "memory")? }))
}

/// Reads a memory, behind its index.
pub(super) fn memory(c: &mut Cursor<'_>) -> Parsed<Memory> {
    let name = c.string("a memory name")?;
    with_attrs(c, |c, a| {
        let (arena_bytes, capacity) = (a.int(c, "arena_bytes")?, a.optional_int(c, "capacity")?);
        let residents = if a.has("residents") {
            items(c, a, "residents", "segment", |c, a| {
                let matrices = a.list(c, "matrices", "a list of matrices", Value::number)?;
                Ok(Resident { segment: a.int(c, "of")?, matrices })
            })?
        } else {
            Vec::new()
        };
        Ok(Memory { name, capacity, arena_bytes, residents })
    })
}

/// Reads a link, behind its index.
pub(super) fn link(c: &mut Cursor<'_>) -> Parsed<MemoryLink> {
    with_attrs(c, |c, a| Ok(MemoryLink { from: a.int(c, "from")?, to: a.int(c, "to")? }))
}
