//! Units, memories and links: printing and parsing.

use super::cursor::{Cursor, Parsed};
use super::items::with_attrs;
use super::lex::quote;
use super::ops::{braces, get, list};
use crate::plan::{Memory, Plan, UnitRef};
use std::fmt;

/// Writes the units, memories and links of a plan, a line each.
pub(super) fn write(f: &mut fmt::Formatter<'_>, plan: &Plan) -> fmt::Result {
    for (i, UnitRef { name, backend, memory, queues }) in plan.units.iter().enumerate() {
        write!(f, "unit {i} {} {{backend = {}, memory = {memory}", quote(name), quote(backend))?;
        if *queues != 1 {
            write!(f, ", queues = {queues}")?;
        }
        writeln!(f, "}}")?;
    }
    for (i, m) in plan.memories.iter().enumerate() {
        write!(f, "memory {i} {} {{arena_bytes = {}", quote(&m.name), m.arena_bytes)?;
        if let Some(capacity) = m.capacity {
            write!(f, ", capacity = {capacity}")?;
        }
        if !m.residents.is_empty() {
            write!(f, ", residents = {}", list(&m.residents))?;
        }
        writeln!(f, "}}")?;
    }
    for (i, link) in plan.links.iter().enumerate() {
        writeln!(f, "link {i}{}", braces(link))?;
    }
    Ok(())
}

/// Reads a unit, after its index.
pub(super) fn unit(c: &mut Cursor<'_>) -> Parsed<UnitRef> {
    let name = c.string("a unit name")?;
    with_attrs(c, |c, a| {
        let (backend, memory) = (a.string(c, "backend")?, a.int(c, "memory")?);
        Ok(UnitRef { name, backend, memory, queues: a.optional_int(c, "queues")?.unwrap_or(1) })
    })
}

/// Reads a memory, after its index.
pub(super) fn memory(c: &mut Cursor<'_>) -> Parsed<Memory> {
    let name = c.string("a memory name")?;
    with_attrs(c, |c, a| {
        let (arena_bytes, capacity) = (a.int(c, "arena_bytes")?, a.optional_int(c, "capacity")?);
        Ok(Memory { name, capacity, arena_bytes, residents: get(c, a, "residents")? })
    })
}
