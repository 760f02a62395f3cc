//! Pass `memory`: arena offsets by liveness.
//!
//! Before this pass every buffer has its own bytes. A buffer is live from the first step that touches it to
//! the last; buffers that are never live together may share bytes. What steps on transferred experts read is
//! live until the last of them, as they are executed for one wave of experts after the other. What a unit touches in
//! another's memory is live from the first step at which that may happen until the CPU waits for the unit: otherwise one
//! of them would wait for bytes that the other uses meanwhile. The largest buffer comes first and takes the lowest offset that fits. This is best-fit by decreasing size, the greedy algorithm of Pisarchyk and
//! Lee (arXiv 2001.03288, §4).

use moec_base::error::{Error, Result};
use moec_base::human;
use moec_ir::access::{Access, Accesses};
use moec_ir::graph::INPUTS;
use moec_ir::plan::{ALIGN, Arg, Buffer, Entry, Plan};
use std::ops::RangeInclusive;

/// Assigns arena offsets in every entry point; all entry points share the arena of each memory. If all
/// buffers of an entry fit side by side into the arena that another one needs, they share no bytes, which
/// saves barriers.
///
/// # Errors
/// Fails if a memory is too small for the plan.
pub fn memory(plan: &mut Plan) -> Result<()> {
    let transferred = |e: &Entry| e.steps.iter().map(|step| plan.transferred_layer(step)).collect();
    let layers: Vec<Vec<Option<usize>>> = plan.entries.iter().map(transferred).collect();
    let lives: Vec<_> =
        plan.entries.iter().zip(&layers).map(|(e, layers)| lifetimes(plan, e, layers)).collect();
    for m in 0..plan.memories.len() as u32 {
        let without_reuse: Vec<Vec<u64>> = plan.entries.iter().map(|e| side_by_side(e, m)).collect();
        let bytes = plan.entries.iter_mut().zip(&lives).map(|(e, lives)| assign(e, lives, m)).max();
        let bytes = bytes.unwrap_or(0);
        for (entry, offsets) in plan.entries.iter_mut().zip(without_reuse) {
            let mut own: Vec<&mut Buffer> = entry.buffers.iter_mut().filter(|b| b.memory == m).collect();
            let end = own.iter().zip(&offsets).map(|(b, offset)| offset + aligned(b.bytes)).max();
            if end.is_some_and(|end| end <= bytes) {
                own.iter_mut().zip(offsets).for_each(|(b, offset)| b.offset = offset);
            }
        }
        plan.memories[m as usize].arena_bytes = bytes;
        fits(plan, m)?;
    }
    Ok(())
}

/// Offsets of an entry's buffers in a memory, one after the other.
fn side_by_side(entry: &Entry, memory: u32) -> Vec<u64> {
    let own = entry.buffers.iter().filter(|b| b.memory == memory);
    own.scan(0, |end, b| Some(std::mem::replace(end, *end + aligned(b.bytes)))).collect()
}

/// Checks that a memory has room for the plan.
fn fits(plan: &Plan, index: u32) -> Result<()> {
    let (memory, peak) = (&plan.memories[index as usize], plan.peak(index, 1).unwrap_or(u64::MAX));
    let Some(capacity) = memory.capacity.filter(|c| peak > *c) else { return Ok(()) };
    let states: u64 = plan.states.iter().filter(|s| s.memory == index).map(|s| aligned(s.bytes())).sum();
    let weights = peak.saturating_sub(states + memory.arena_bytes);
    Err(Error::limit(format!(
        "the plan needs {} in `{}`, which has {}",
        human::bytes_up(peak),
        memory.name,
        human::bytes(capacity)
    ))
    .because(format!(
        "weights and scratch take {}, the KV cache {}, activations {}",
        human::bytes(weights),
        human::bytes(states),
        human::bytes(memory.arena_bytes)
    ))
    .hint(match plan.experts.policy.cached().filter(|c| plan.memory_of(c.hot) == index) {
        Some(_) => "this is with one expert of each layer, the minimum: raise `device_budget` under `[memory]`, or build with a shorter `max_context`",
        None => "place fewer experts there (`experts = \"NAME:50%\"` under `[placement]`), or build with a shorter `max_context`",
    }))
}

/// Steps during which each buffer of `entry` is live. `layers` has, by step, the layer whose transferred
/// experts it reads.
fn lifetimes(plan: &Plan, entry: &Entry, layers: &[Option<usize>]) -> Vec<RangeInclusive<usize>> {
    let end = entry.steps.len();
    let beside = beside(plan, entry);
    let mut lives: Vec<Option<(usize, usize)>> = vec![None; entry.buffers.len()];
    for (step, (at, layer)) in entry.steps.iter().zip(layers.iter().enumerate()) {
        let last = layer.and_then(|_| layers.iter().rposition(|of| of == layer)).unwrap_or(at);
        for arg in &step.args {
            if let Arg::Buffer(b, _) = *arg {
                let elsewhere = entry.buffers[b as usize].memory != plan.memory_of(step.unit);
                let (first, last) =
                    if elsewhere { (*beside[at].start(), last.max(*beside[at].end())) } else { (at, last) };
                let life = lives[b as usize].get_or_insert((first, last));
                life.1 = life.1.max(last);
            }
        }
    }
    lives
        .into_iter()
        .enumerate()
        .map(|(b, life)| match life {
            // The engine writes inputs before the first step and reads logits after the last.
            _ if b < INPUTS => 0..=end,
            Some((first, _)) if b == entry.logits as usize => first..=end,
            Some((first, last)) => first..=last,
            None => 0..=0,
        })
        .collect()
}

/// By step, the steps of unit 0 that it may be executed beside. Those of unit 0 follow each other. A step of another unit
/// waits for what it depends on, and for the unit's own step before; it has ended where a step of unit 0 depends on it, or
/// on a later one of its unit.
fn beside(plan: &Plan, entry: &Entry) -> Vec<RangeInclusive<usize>> {
    let accesses = Accesses::new(plan);
    let touched: Vec<Vec<Access>> = entry.steps.iter().map(|step| accesses.of(entry, step)).collect();
    let conflict =
        |before: usize, at: usize| touched[before].iter().any(|x| touched[at].iter().any(|y| x.conflicts(y)));
    let unit = |at: usize| entry.steps[at].unit;
    let depends = |before: usize, at: usize| unit(before) == unit(at) || conflict(before, at);
    let steps = entry.steps.len();
    let latest = |at: usize| {
        let ended = |later: &usize| (at..*later).any(|own| unit(own) == unit(at) && conflict(own, *later));
        (at..steps).filter(|&later| unit(later) == 0).find(ended).unwrap_or(steps)
    };
    let mut earliest: Vec<usize> = Vec::with_capacity(steps);
    for at in 0..steps {
        let after = |before: usize| if unit(before) == 0 { before + 1 } else { earliest[before] };
        earliest.push(match unit(at) {
            0 => at,
            _ => (0..at).filter(|&before| depends(before, at)).map(after).max().unwrap_or(0),
        });
    }
    let range = |(at, first)| first..=if unit(at) == 0 { at } else { latest(at) };
    earliest.into_iter().enumerate().map(range).collect()
}

fn assign(entry: &mut Entry, lives: &[RangeInclusive<usize>], memory: u32) -> u64 {
    let mut order: Vec<usize> =
        (0..entry.buffers.len()).filter(|&b| entry.buffers[b].memory == memory).collect();
    order.sort_by_key(|&b| (std::cmp::Reverse(entry.buffers[b].bytes), b));
    let mut placed: Vec<usize> = Vec::new();
    for b in order {
        let together = |&o: &usize| lives[o].start() <= lives[b].end() && lives[b].start() <= lives[o].end();
        let mut busy: Vec<(u64, u64)> =
            placed.iter().copied().filter(together).map(|o| extent(&entry.buffers[o])).collect();
        busy.sort_unstable();
        let need = aligned(entry.buffers[b].bytes);
        let mut offset = 0;
        for (from, to) in busy {
            if offset + need <= from {
                break;
            }
            offset = offset.max(to);
        }
        entry.buffers[b].offset = offset;
        placed.push(b);
    }
    let own = entry.buffers.iter().filter(|b| b.memory == memory);
    own.map(|b| extent(b).1).max().unwrap_or(0)
}

fn extent(b: &Buffer) -> (u64, u64) {
    (b.offset, b.offset + aligned(b.bytes))
}

/// `bytes` rounded up to [`ALIGN`].
pub fn aligned(bytes: u64) -> u64 {
    bytes.next_multiple_of(ALIGN)
}
