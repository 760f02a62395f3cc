//! Units of experts, and NDP command streams: printing and parsing.

use super::cursor::{Cursor, Parsed};
use super::items::index;
use super::ops::{braces, read_braces};
use crate::experts::{ExpertPlacement, ExpertPolicy};
use crate::plan::Plan;
use std::fmt;

/// Writes NDP command streams, a line per layer, and units of experts, a line per layer; nothing where all
/// experts are the CPU's.
pub(super) fn write(f: &mut fmt::Formatter<'_>, plan: &Plan) -> fmt::Result {
    for (i, set) in plan.streams.iter().enumerate() {
        writeln!(f, "streams {i}{}", braces(set))?;
    }
    let ExpertPlacement { layers, policy } = &plan.experts;
    let policy = match policy {
        ExpertPolicy::Fixed if layers.is_empty() => return Ok(()),
        ExpertPolicy::Fixed => "fixed".to_owned(),
        ExpertPolicy::Scheduled(s) => format!("scheduled{}", braces(s)),
        ExpertPolicy::Cached(c) => format!("cached{}", braces(c)),
    };
    writeln!(f, "expert_placement {policy} {{")?;
    for (i, layer) in layers.iter().enumerate() {
        writeln!(f, "  layer {i}{}", braces(layer))?;
    }
    writeln!(f, "}}")
}

/// Reads units of experts, after the first word.
pub(super) fn read(c: &mut Cursor<'_>) -> Parsed<ExpertPlacement> {
    let policy = if c.eat_word("fixed")? {
        ExpertPolicy::Fixed
    } else if c.eat_word("scheduled")? {
        ExpertPolicy::Scheduled(read_braces(c)?)
    } else if c.eat_word("cached")? {
        ExpertPolicy::Cached(read_braces(c)?)
    } else {
        return c.expected("`fixed`, `scheduled` or `cached`");
    };
    let mut layers = Vec::new();
    c.punct('{')?;
    while !c.eat('}')? {
        c.keyword("layer")?;
        index(c, layers.len())?;
        layers.push(read_braces(c)?);
    }
    Ok(ExpertPlacement { layers, policy })
}
