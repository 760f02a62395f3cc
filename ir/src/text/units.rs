//! Units, memories and links: printing and parsing.

use super::cursor::{Cursor, Parsed};
use super::items::{string, with_attrs};
use super::lex::quote;
use super::ops::{Item as _, braces, get, list};
use crate::plan::{Memory, Plan, UnitRef};
use std::fmt;

/// Writes the units, memories and links of a plan, a line each.
pub(super) fn write(f: &mut fmt::Formatter<'_>, plan: &Plan) -> fmt::Result {
    for (i, UnitRef { name, backend, memory, queues, cpus }) in plan.units.iter().enumerate() {
        write!(f, "unit {i} {} {{backend = {}, memory = {memory}", quote(name), quote(backend))?;
        if *queues != 1 {
            write!(f, ", queues = {queues}")?;
        }
        if !cpus.is_empty() {
            write!(f, ", cpus = {}", quote(&cpus.to_string()))?;
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
        if let Some(paging) = &m.paging {
            write!(f, ", paging = {}", paging.text())?;
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
        let queues = a.optional_int(c, "queues")?.unwrap_or(1);
        let cpus = a.optional(c, "cpus", "CPUs such as \"0-15,32\"", |v, _| {
            Ok(string(v).and_then(|text| text.parse().ok()))
        });
        Ok(UnitRef { name, backend, memory, queues, cpus: cpus?.unwrap_or_default() })
    })
}

/// Reads a memory, after its index.
pub(super) fn memory(c: &mut Cursor<'_>) -> Parsed<Memory> {
    let name = c.string("a memory name")?;
    with_attrs(c, |c, a| {
        let (arena_bytes, capacity) = (a.int(c, "arena_bytes")?, a.optional_int(c, "capacity")?);
        let (residents, paging) = (get(c, a, "residents")?, get(c, a, "paging")?);
        Ok(Memory { name, capacity, arena_bytes, residents, paging })
    })
}
