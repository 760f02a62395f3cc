//! Checks of the order of steps: what runs at the same time touches nothing in common.

use super::{VerifyError, require};
use crate::plan::{Arg, Entry};
use std::collections::BTreeMap;

/// Dependencies point backwards and hold, and buffers that are live at once do not overlap.
pub(super) fn check(entry: &Entry, here: &str) -> Result<(), VerifyError> {
    let mut phases = Vec::with_capacity(entry.steps.len());
    let mut phase = 0_usize;
    for (i, step) in entry.steps.iter().enumerate() {
        let at = || format!("{here}.steps[{i}]");
        require(step.unit == 0 || !step.barrier, at, || "a barrier of a unit beside the processor".into())?;
        phase += usize::from(step.barrier);
        for pair in step.deps.windows(2) {
            require(pair[0] < pair[1], at, || "dependencies are not ascending".into())?;
        }
        for &d in &step.deps {
            let earlier = entry.steps.get(d as usize).zip(phases.get(d as usize).copied());
            let Some((before, earlier)) = earlier else {
                return require(false, at, || format!("depends on step {d}, which is not before it"));
            };
            // For other units it waits, and those do one thing after the other.
            let waits = before.unit != step.unit || step.unit != 0 || earlier < phase;
            require(waits, at, || format!("depends on step {d} with no barrier in between"))?;
        }
        phases.push(phase);
    }
    if entry.steps.iter().all(|s| s.unit == 0) { alone(entry, &phases, here) } else { together(entry, here) }
}

/// Of the steps of each unit, how many, from the front of the entry's list, have ended for certain.
type Clock = Vec<usize>;

/// Raises a clock to another.
fn join(clock: &mut Clock, other: &Clock) {
    for (mine, theirs) in clock.iter_mut().zip(other) {
        *mine = (*mine).max(*theirs);
    }
}

/// What has ended for certain when each step begins.
///
/// A lane of the processor does its steps in order, so whoever has ended a step has ended all of its unit before it, and has
/// seen whatever those waited for.
fn clocks(entry: &Entry) -> Vec<Clock> {
    let units = entry.steps.iter().map(|s| s.unit as usize + 1).max().unwrap_or(0);
    let mut clocks: Vec<Clock> = Vec::with_capacity(entry.steps.len());
    // What each unit has waited for so far, and its last step.
    let mut seen: Vec<Clock> = vec![vec![0; units]; units];
    let mut last: Vec<Option<usize>> = vec![None; units];
    for (i, step) in entry.steps.iter().enumerate() {
        let unit = step.unit as usize;
        let mut clock = seen[unit].clone();
        // All steps of the unit before this one.
        let ordered = step.unit != 0 || step.barrier;
        if let Some(before) = last[unit].filter(|_| ordered) {
            clock[unit] = clock[unit].max(before + 1);
        }
        for &d in &step.deps {
            let (Some(theirs), Some(of)) = (clocks.get(d as usize), entry.steps.get(d as usize)) else {
                continue;
            };
            join(&mut clock, theirs);
            let of = of.unit as usize;
            if of != unit {
                clock[of] = clock[of].max(d as usize + 1);
            }
        }
        seen[unit].clone_from(&clock);
        last[unit] = Some(i);
        clocks.push(clock);
    }
    clocks
}

/// First and last step of each unit that takes a buffer, by unit.
type Uses = BTreeMap<usize, (usize, usize)>;

/// Several units: of two buffers that share bytes, one is done with before the other begins.
fn together(entry: &Entry, here: &str) -> Result<(), VerifyError> {
    let clocks = clocks(entry);
    let mut uses: Vec<Uses> = vec![Uses::new(); entry.buffers.len()];
    for (i, step) in entry.steps.iter().enumerate() {
        for arg in &step.args {
            if let Arg::Buffer(b, _) = *arg
                && let Some(uses) = uses.get_mut(b as usize)
            {
                uses.entry(step.unit as usize).or_insert((i, i)).1 = i;
            }
        }
    }
    let is_input = |b: usize| b < 4;
    let before = |a: usize, b: usize| {
        // The engine writes inputs before the first step and reads logits after the last.
        let ends = a != entry.logits as usize;
        let begins = !is_input(b);
        let ordered = uses[b].values().all(|&(first, _)| {
            uses[a].iter().all(|(&unit, &(_, last))| clocks[first].get(unit).is_some_and(|&n| n > last))
        });
        ends && begins && ordered
    };
    let mut by_offset: Vec<usize> = (0..entry.buffers.len()).collect();
    by_offset.retain(|&b| !uses[b].is_empty() || is_input(b) || b == entry.logits as usize);
    by_offset.sort_by_key(|&b| (entry.buffers[b].memory, entry.buffers[b].offset));
    for (i, &a) in by_offset.iter().enumerate() {
        let x = &entry.buffers[a];
        for &b in &by_offset[i + 1..] {
            let y = &entry.buffers[b];
            // Offsets and sizes are inside an arena by now, so that this sum does not overflow.
            if y.memory != x.memory || y.offset >= x.offset + x.bytes {
                break;
            }
            require(
                before(a, b) || before(b, a),
                || format!("{here}.buffers[{b}] ({})", y.name),
                || format!("overlaps buffer {a} ({}) while both are live", x.name),
            )?;
        }
    }
    Ok(())
}

/// One unit: sweeps over the phases with the set of live buffers, ordered by offset. What is live never overlaps, so
/// a new buffer need only be compared with its two neighbours.
fn alone(entry: &Entry, phases: &[usize], here: &str) -> Result<(), VerifyError> {
    let end = phases.last().map_or(0, |p| p + 1);
    let mut lives: Vec<Option<(usize, usize)>> = vec![None; entry.buffers.len()];
    for life in lives.iter_mut().take(4) {
        *life = Some((0, 0));
    }
    for (step, &phase) in entry.steps.iter().zip(phases) {
        for arg in &step.args {
            if let Arg::Buffer(b, _) = *arg
                && let Some(life) = lives.get_mut(b as usize)
            {
                *life = Some((life.map_or(phase, |l| l.0), phase));
            }
        }
    }
    if let Some(life) = lives.get_mut(entry.logits as usize) {
        *life = Some((life.map_or(end, |l| l.0), end));
    }
    let mut births: Vec<(usize, usize)> = Vec::new();
    let mut deaths: Vec<(usize, usize)> = Vec::new();
    for (i, life) in lives.iter().enumerate() {
        if let Some((first, last)) = life {
            births.push((*first, i));
            deaths.push((*last, i));
        }
    }
    births.sort_unstable();
    deaths.sort_unstable();
    let place = |b: usize| (entry.buffers[b].memory, entry.buffers[b].offset);
    let mut dead = deaths.into_iter().peekable();
    let mut live: BTreeMap<(u32, u64), usize> = BTreeMap::new();
    for (phase, i) in births {
        while let Some((_, d)) = dead.next_if(|&(last, _)| last < phase) {
            live.remove(&place(d));
        }
        let new = &entry.buffers[i];
        // Offsets and sizes are inside the arena by now, so that these sums do not overflow.
        let before = live.range(..=place(i)).next_back();
        let after = live.range(place(i)..).next();
        for &other in [before, after].into_iter().flatten().map(|(_, other)| other) {
            let old = &entry.buffers[other];
            let apart = old.memory != new.memory
                || old.offset + old.bytes <= new.offset
                || new.offset + new.bytes <= old.offset;
            require(
                apart,
                || format!("{here}.buffers[{i}] ({})", new.name),
                || format!("overlaps buffer {other} ({}) while both are live", old.name),
            )?;
        }
        live.insert(place(i), i);
    }
    Ok(())
}
