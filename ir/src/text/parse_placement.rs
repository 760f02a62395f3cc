//! Parsing placements.

use super::attrs::{Attrs, Value};
use super::cursor::{Cursor, Parsed};
use super::items::{index, string, with_attrs};
use super::parse_graph::{kind, scope};
use crate::placement::{Expected, ExpertGroup, ExpertRow, ExpertTable, OpPlace, Overflow, Placement};

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

/// Reads the next part of a placement, if one stands here.
pub(super) fn part(c: &mut Cursor<'_>, into: &mut Placement) -> Parsed<bool> {
    if c.eat_word("placement")? {
        (into.chunk, into.overflow, into.units) = with_attrs(c, |c, a| {
            let overflow =
                a.variant(c, "overflow", "`prune` or `spill`", |word, _| Ok(Overflow::parse(word)))?;
            Ok((a.int(c, "chunk")?, overflow, a.list(c, "units", "a list of strings", string)?))
        })?;
    } else if c.eat_word("placed")? {
        into.ops.push(op(c)?);
    } else if c.eat_word("experts")? {
        into.experts.push(table(c)?);
    } else {
        return Ok(false);
    }
    Ok(true)
}

fn op(c: &mut Cursor<'_>) -> Parsed<OpPlace> {
    let (entry, scope, op) = (kind(c)?, scope(c, Cursor::string)?, c.string("an operator")?);
    with_attrs(c, |c, a| {
        let (unit, nodes) = (a.int(c, "unit")?, a.int(c, "nodes")?);
        Ok(OpPlace { entry, scope, op, unit, nodes, why: a.string(c, "why")? })
    })
}

fn table(c: &mut Cursor<'_>) -> Parsed<ExpertTable> {
    let mut table = with_attrs(c, |c, a| {
        let tiers = a.optional_list(c, "tiers", "a list of capacities", Value::number)?;
        let expected = a.optional_variant(c, "expected", "`rates(…)`", |word, args| {
            if word != "rates" {
                return Ok(None);
            }
            let (imbalance, overflow) = (args.float(c, "imbalance")?, args.float(c, "overflow")?);
            Ok(Some(Expected { imbalance, overflow, padding: args.float(c, "padding")? }))
        })?;
        Ok(ExpertTable {
            layer: a.int(c, "layer")?,
            k: a.int(c, "k")?,
            tiers,
            expected,
            groups: Vec::new(),
            experts: Vec::new(),
        })
    })?;
    c.punct('{')?;
    while !c.eat('}')? {
        if c.eat_word("group")? {
            index(c, table.groups.len())?;
            table.groups.push(with_attrs(c, group)?);
        } else {
            c.keyword("expert")?;
            index(c, table.experts.len())?;
            table.experts.push(with_attrs(c, row)?);
        }
    }
    Ok(table)
}

fn group<'t>(c: &Cursor<'t>, a: &mut Attrs<'t>) -> Parsed<ExpertGroup> {
    Ok(ExpertGroup {
        tier: a.int(c, "tier")?,
        unit: a.int(c, "unit")?,
        experts: a.list(c, "experts", "a list of experts", Value::number)?,
        sizes: a.optional_list(c, "sizes", "a list of numbers of rows", Value::number)?,
        bytes: a.int(c, "bytes")?,
        cost_us: a.optional_list(c, "cost_us", "a list of numbers", Value::float)?,
        why: a.string(c, "why")?,
    })
}

fn row<'t>(c: &Cursor<'t>, a: &mut Attrs<'t>) -> Parsed<ExpertRow> {
    Ok(ExpertRow {
        capacity: a.int(c, "capacity")?,
        group: a.int(c, "group")?,
        unit: a.int(c, "unit")?,
        tier: a.optional_int(c, "tier")?,
        fallback: a.optional_int(c, "fallback")?,
        load: a.optional(c, "load", "a number", |v, _| Ok(v.float()))?,
        few: a.flag(c, "few")?,
    })
}
