//! Experts on flash: printing and parsing.

use super::attrs::{Attrs, Value};
use super::cursor::{Cursor, Parsed};
use super::items::{index, with_attrs};
use super::lex::quote;
use crate::op::Score;
use crate::paging::{PagedLayer, Paging};
use std::fmt;

/// Writes what stays on flash, a line per layer.
pub(super) fn write(f: &mut fmt::Formatter<'_>, p: &Paging) -> fmt::Result {
    write!(f, "\npaging {{budget = {}, threads = {}, resident = {}", p.budget, p.threads, p.resident)?;
    write!(f, ", process = {}, frame_bytes = {}, frames = {}", p.process, p.frame_bytes, p.frames)?;
    write!(f, ", spare = {}, block_bytes = {}, policy = {}", p.spare, p.block_bytes, quote(&p.policy))?;
    if p.neurons > 0 {
        write!(f, ", neurons = {}", p.neurons)?;
    }
    if !p.pinned.is_empty() {
        let pinned: Vec<_> = p.pinned.iter().map(|(layer, expert)| format!("[{layer}, {expert}]")).collect();
        write!(f, ", pinned = [{}]", pinned.join(", "))?;
    }
    if !p.elsewhere.is_empty() {
        let pairs: Vec<_> =
            p.elsewhere.iter().map(|(layer, expert)| format!("[{layer}, {expert}]")).collect();
        write!(f, ", elsewhere = [{}]", pairs.join(", "))?;
    }
    writeln!(f, "}} {{")?;
    let mut checksums = p.checksums.as_slice();
    let mut uses = p.uses.as_slice();
    for (i, l) in p.layers.iter().enumerate() {
        let PagedLayer { experts, k, gate_up, down, score } = l;
        let (own, rest) = checksums.split_at((2 * *experts as usize).min(checksums.len()));
        checksums = rest;
        write!(
            f,
            "  layer {i} {{experts = {experts}, k = {k}, gate_up = {gate_up}, down = {down}, score = {}",
            score.name()
        )?;
        if !own.is_empty() {
            write!(f, ", crc32c = {own:?}")?;
        }
        if !p.uses.is_empty() {
            let (own, rest) = uses.split_at((*experts as usize).min(uses.len()));
            uses = rest;
            write!(f, ", uses = {own:?}")?;
        }
        writeln!(f, "}}")?;
    }
    writeln!(f, "}}")
}

/// `[[layer, expert], …]`
fn pairs(value: Value<'_>) -> Option<Vec<(u32, u32)>> {
    let Value::List(items) = value else { return None };
    let pair = |item: Value<'_>| match item {
        Value::List(two) => {
            let two: Vec<u32> = two.into_iter().map(Value::number).collect::<Option<_>>()?;
            <[u32; 2]>::try_from(two).ok().map(|[layer, expert]| (layer, expert))
        }
        _ => None,
    };
    items.into_iter().map(pair).collect()
}

/// `[number, …]`
fn numbers(value: Value<'_>) -> Option<Vec<u32>> {
    let Value::List(items) = value else { return None };
    items.into_iter().map(Value::number).collect()
}

/// Reads what [`write`] writes, from behind its first word.
pub(super) fn read(c: &mut Cursor<'_>) -> Parsed<Paging> {
    let mut paging = with_attrs(c, |c, a: &mut Attrs<'_>| {
        Ok(Paging {
            budget: a.int(c, "budget")?,
            threads: a.int(c, "threads")?,
            resident: a.int(c, "resident")?,
            process: a.int(c, "process")?,
            frame_bytes: a.int(c, "frame_bytes")?,
            frames: a.int(c, "frames")?,
            spare: a.int(c, "spare")?,
            block_bytes: a.int(c, "block_bytes")?,
            policy: a.string(c, "policy")?,
            pinned: a
                .optional(c, "pinned", "a list of `[layer, expert]`", |v, _| Ok(pairs(v)))?
                .unwrap_or_default(),
            elsewhere: a
                .optional(c, "elsewhere", "a list of `[layer, expert]`", |v, _| Ok(pairs(v)))?
                .unwrap_or_default(),
            neurons: a.optional_int(c, "neurons")?.unwrap_or(0),
            layers: Vec::new(),
            checksums: Vec::new(),
            uses: Vec::new(),
        })
    })?;
    c.punct('{')?;
    while !c.eat('}')? {
        c.keyword("layer")?;
        index(c, paging.layers.len())?;
        let Paging { checksums, uses, .. } = &mut paging;
        let layer = with_attrs(c, |c, a| {
            let layer = PagedLayer {
                experts: a.int(c, "experts")?,
                k: a.int(c, "k")?,
                gate_up: a.int(c, "gate_up")?,
                down: a.int(c, "down")?,
                score: a.variant(c, "score", "`softmax`, `sigmoid` or `identity`", |word, _| {
                    Ok(Score::ALL.into_iter().find(|s| s.name() == word))
                })?,
            };
            let sums = a.optional(c, "crc32c", "a list of checksums", |v, _| Ok(numbers(v)))?;
            checksums.extend(sums.unwrap_or_default());
            let own = a.optional(c, "uses", "a list of numbers", |v, _| Ok(numbers(v)))?;
            uses.extend(own.unwrap_or_default());
            Ok(layer)
        })?;
        paging.layers.push(layer);
    }
    Ok(paging)
}
