//! Parsing placements.

use super::cursor::{Cursor, Parsed};
use super::items::{index, with_attrs};
use super::ops::{get, read_braces};
use super::parse_graph::{kind, scope};
use crate::placement::{ExpertTable, OpAssignment, Placement};

pub(super) fn parse(text: &str) -> Parsed<Placement> {
    let mut cursor = Cursor::new(text)?;
    let c = &mut cursor;
    let mut placement = Placement::default();
    while !c.at_end() {
        if !part(c, &mut placement)? {
            return c.expected("`placement`, `placed` or `experts`");
        }
    }
    Ok(placement)
}

/// Reads the next part of a placement, if one follows.
pub(super) fn part(c: &mut Cursor<'_>, into: &mut Placement) -> Parsed<bool> {
    if c.eat_word("placement")? {
        (into.chunk, into.overflow, into.units) =
            with_attrs(c, |c, a| Ok((get(c, a, "chunk")?, get(c, a, "overflow")?, get(c, a, "units")?)))?;
    } else if c.eat_word("placed")? {
        into.ops.push(op(c)?);
    } else if c.eat_word("experts")? {
        into.experts.push(table(c)?);
    } else {
        return Ok(false);
    }
    Ok(true)
}

fn op(c: &mut Cursor<'_>) -> Parsed<OpAssignment> {
    let (entry, scope, op) = (kind(c)?, scope(c, Cursor::string)?, c.string("an operator")?);
    with_attrs(c, |c, a| {
        let (unit, nodes, why) = (get(c, a, "unit")?, get(c, a, "nodes")?, get(c, a, "why")?);
        Ok(OpAssignment { entry, scope, op, unit, nodes, why })
    })
}

fn table(c: &mut Cursor<'_>) -> Parsed<ExpertTable> {
    let mut table = with_attrs(c, |c, a| {
        Ok(ExpertTable {
            layer: get(c, a, "layer")?,
            k: get(c, a, "k")?,
            tiers: get(c, a, "tiers")?,
            expected: get(c, a, "expected")?,
            groups: Vec::new(),
            experts: Vec::new(),
        })
    })?;
    c.punct('{')?;
    while !c.eat('}')? {
        if c.eat_word("group")? {
            index(c, table.groups.len())?;
            table.groups.push(read_braces(c)?);
        } else {
            c.keyword("expert")?;
            index(c, table.experts.len())?;
            table.experts.push(read_braces(c)?);
        }
    }
    Ok(table)
}
