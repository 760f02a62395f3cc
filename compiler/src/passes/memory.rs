//! Pass `memory`: arena offsets by liveness.
//!
//! Before it every buffer has a place of its own. A buffer lives from the first step that touches it to
//! the last; buffers that never live together may share bytes. Largest first, lowest offset that fits
//! (best-fit by decreasing size, the greedy of Pisarchyk and Lee, arXiv 2001.03288, §4).

use moec_ir::graph::INPUTS;
use moec_ir::plan::{ALIGN, Arg, Buffer, Entry, Plan};
use std::ops::RangeInclusive;

/// Assigns arena offsets in every entry point, which share one arena. An entry whose buffers all fit side
/// by side into the arena that another one needs is left without sharing, and so with fewer barriers.
pub fn memory(plan: &mut Plan) {
    let apart: Vec<Vec<u64>> =
        plan.entries.iter().map(|e| e.buffers.iter().map(|b| b.offset).collect()).collect();
    plan.arena_bytes = plan.entries.iter_mut().map(assign).max().unwrap_or(0);
    for (entry, offsets) in plan.entries.iter_mut().zip(apart) {
        let end = entry.buffers.iter().zip(&offsets).map(|(b, offset)| offset + aligned(b.bytes)).max();
        if end.is_some_and(|end| end <= plan.arena_bytes) {
            entry.buffers.iter_mut().zip(offsets).for_each(|(b, offset)| b.offset = offset);
        }
    }
}

/// Steps during which each buffer of `entry` holds something.
pub fn lifetimes(entry: &Entry) -> Vec<RangeInclusive<usize>> {
    let end = entry.steps.len();
    let mut lives: Vec<Option<(usize, usize)>> = vec![None; entry.buffers.len()];
    for (at, step) in entry.steps.iter().enumerate() {
        for arg in &step.args {
            if let Arg::Buffer(b, _) = *arg {
                let life = lives[b as usize].get_or_insert((at, at));
                life.1 = at;
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

fn assign(entry: &mut Entry) -> u64 {
    let lives = lifetimes(entry);
    let mut order: Vec<usize> = (0..entry.buffers.len()).collect();
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
    entry.buffers.iter().map(|b| extent(b).1).max().unwrap_or(0)
}

fn extent(b: &Buffer) -> (u64, u64) {
    (b.offset, b.offset + aligned(b.bytes))
}

/// `bytes` rounded up to [`ALIGN`].
pub fn aligned(bytes: u64) -> u64 {
    bytes.next_multiple_of(ALIGN)
}
