//! Checks of the order of steps: no data hazard is left to chance.

use super::{VerifyError, require};
use crate::access::{Access, Accesses, Space};
use crate::graph::INPUTS;
use crate::plan::{Entry, Plan};
use std::collections::{BTreeMap, HashMap};

/// Dependencies point backwards and hold, and steps that touch the same bytes are ordered, in every entry
/// point. In an unsynchronized plan of several units, steps are taken to be executed one after the other.
pub(super) fn check(plan: &Plan, unsynchronized: bool) -> Result<(), VerifyError> {
    let accesses = Accesses::new(plan);
    let mut entries = plan.entries.iter().enumerate();
    entries.try_for_each(|(i, entry)| check_entry(&accesses, entry, &format!("entries[{i}]"), unsynchronized))
}

fn check_entry(
    accesses: &Accesses<'_>,
    entry: &Entry,
    here: &str,
    unsynchronized: bool,
) -> Result<(), VerifyError> {
    let units = entry.steps.iter().map(|s| s.unit as usize + 1).max().unwrap_or(0);
    let clocks = if unsynchronized && units > 1 {
        (0..entry.steps.len() as u32).map(|i| vec![i; units]).collect()
    } else {
        check_dependencies(entry, here)?;
        clocks(entry, units)
    };
    let mut hazards = Hazards::new(entry, units);
    check_inputs(entry, here)?;
    for (i, (step, clock)) in entry.steps.iter().zip(&clocks).enumerate() {
        let mut touched = accesses.of(entry, step);
        // A step that wrote what it reads would hand it over between its own threads.
        touched.sort_by_key(|a| a.write);
        let now = Now { step: i, unit: step.unit as usize, clock };
        for access in &touched {
            hazards
                .access(access, now)
                .map_err(|message| VerifyError::new(format!("{here}.steps[{i}]"), message))?;
        }
    }
    check_waves(accesses, entry, here)?;
    let logits = entry.logits;
    require(
        hazards.holds(logits),
        || format!("{here}.logits"),
        || format!("buffer {logits} is not written, or was overwritten"),
    )
}

/// Operands of a step on transferred experts stay for the next wave: no later step on the same experts
/// writes it.
fn check_waves(accesses: &Accesses<'_>, entry: &Entry, here: &str) -> Result<(), VerifyError> {
    let mut reads: Vec<(usize, Access)> = Vec::new();
    for (i, step) in entry.steps.iter().enumerate() {
        let Some(layer) = accesses.plan().transferred_layer(step) else { continue };
        let (writes, read): (Vec<_>, Vec<_>) = accesses.of(entry, step).into_iter().partition(|a| a.write);
        let lost = reads.iter().any(|(of, read)| *of == layer && writes.iter().any(|w| w.overlaps(read)));
        require(
            !lost,
            || format!("{here}.steps[{i}]"),
            || "writes what the next wave of its experts reads".into(),
        )?;
        reads.extend(read.into_iter().map(|read| (layer, read)));
    }
    Ok(())
}

/// Inputs do not overlap.
fn check_inputs(entry: &Entry, here: &str) -> Result<(), VerifyError> {
    for (i, a) in entry.buffers.iter().take(INPUTS).enumerate() {
        for (j, b) in entry.buffers.iter().enumerate().take(i) {
            let disjoint = a.offset + a.bytes <= b.offset || b.offset + b.bytes <= a.offset;
            require(
                disjoint,
                || format!("{here}.buffers[{i}]"),
                || format!("overlaps buffer {j}, another input"),
            )?;
        }
    }
    Ok(())
}

/// Dependencies are ascending and point backwards, and steps of the CPU that depend on each other have a
/// barrier between them.
fn check_dependencies(entry: &Entry, here: &str) -> Result<(), VerifyError> {
    let mut phases = Vec::with_capacity(entry.steps.len());
    let mut phase = 0_usize;
    for (i, step) in entry.steps.iter().enumerate() {
        let at = || format!("{here}.steps[{i}]");
        require(step.unit == 0 || !step.barrier, at, || "a barrier of an accelerator".into())?;
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
    Ok(())
}

/// For each unit: steps before this index of the entry have ended on it for certain.
type Clock = Vec<u32>;

/// Raises a clock to another.
fn join(clock: &mut Clock, other: &Clock) {
    for (mine, theirs) in clock.iter_mut().zip(other) {
        *mine = (*mine).max(*theirs);
    }
}

/// Steps that have ended for certain when each step begins.
///
/// A CPU thread takes its steps in order. So when a step has ended on all threads, all earlier steps of its
/// unit have ended, and all steps that those waited for.
fn clocks(entry: &Entry, units: usize) -> Vec<Clock> {
    let mut clocks: Vec<Clock> = Vec::with_capacity(entry.steps.len());
    // Steps that each unit has waited for so far, and its last step.
    let mut seen: Vec<Clock> = vec![vec![0; units]; units];
    let mut last: Vec<Option<u32>> = vec![None; units];
    for (i, step) in (0..).zip(&entry.steps) {
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
                clock[of] = clock[of].max(d + 1);
            }
        }
        seen[unit].clone_from(&clock);
        last[unit] = Some(i);
        clocks.push(clock);
    }
    clocks
}

/// A step that begins.
#[derive(Clone, Copy)]
struct Now<'c> {
    step: usize,
    unit: usize,
    clock: &'c Clock,
}

/// The last steps that have read and written something, unit by unit: their indices plus one, 0 for none.
#[derive(Clone)]
struct Last {
    reads: Vec<u32>,
    writes: Vec<u32>,
}

impl Last {
    fn none(units: usize) -> Self {
        Self { reads: vec![0; units], writes: vec![0; units] }
    }

    /// Finds a conflicting step that may not have ended.
    fn unfinished(&self, write: bool, clock: &Clock) -> Option<(&'static str, u32)> {
        let first = |of: &[u32], what| {
            of.iter()
                .zip(clock)
                .find(|(touched, ended)| touched > ended)
                .map(|(touched, _)| (what, touched - 1))
        };
        let read = || if write { first(&self.reads, "reads") } else { None };
        first(&self.writes, "writes").or_else(read)
    }

    /// Fails if a conflicting step may not have ended; records the access.
    fn touch(&mut self, write: bool, now: Now<'_>, what: impl Fn() -> String) -> Result<(), String> {
        if let Some((theirs, step)) = self.unfinished(write, now.clock) {
            let mine = if write { "writes" } else { "reads" };
            let what = what();
            return Err(if step as usize == now.step {
                format!("{mine} {what}, which it also {theirs} by another argument")
            } else {
                format!("{mine} {what}, and step {step}, which {theirs} it, may not have ended")
            });
        }
        let of = if write { &mut self.writes } else { &mut self.reads };
        of[now.unit] = now.step as u32 + 1;
        Ok(())
    }
}

/// Bytes of an arena that steps have touched.
struct Piece {
    end: u64,
    /// The buffer whose value they hold. None where a part of it has been written over.
    buffer: Option<u32>,
    last: Last,
}

/// Accesses of the steps so far.
struct Hazards<'e> {
    entry: &'e Entry,
    units: usize,
    /// By memory and first byte. No two overlap.
    pieces: BTreeMap<(u32, u64), Piece>,
    /// States, and experts on disk.
    others: HashMap<Space, Last>,
}

impl<'e> Hazards<'e> {
    /// The engine has written the inputs, each into bytes of its own.
    fn new(entry: &'e Entry, units: usize) -> Self {
        let mut pieces = BTreeMap::new();
        for (b, buffer) in (0..).zip(&entry.buffers).take(INPUTS) {
            let piece = Piece { end: buffer.offset + buffer.bytes, buffer: Some(b), last: Last::none(units) };
            pieces.insert((buffer.memory, buffer.offset), piece);
        }
        Self { entry, units, pieces, others: HashMap::new() }
    }

    /// Whether a buffer's bytes hold its value.
    fn holds(&self, b: u32) -> bool {
        let Some(buffer) = self.entry.buffers.get(b as usize) else { return false };
        self.pieces.get(&(buffer.memory, buffer.offset)).is_some_and(|piece| piece.buffer == Some(b))
    }

    /// Fails if an access conflicts with one of a step that may not have ended.
    fn access(&mut self, access: &Access, now: Now<'_>) -> Result<(), String> {
        if let (Space::Arena(memory), Some(b)) = (access.space, access.buffer) {
            return self.buffer(memory, b, access, now);
        }
        let known = self.others.contains_key(&access.space);
        if let (Space::Paged(layer), false, false) = (access.space, access.write, known) {
            return Err(format!("reads experts of layer {layer} on disk before they are requested"));
        }
        let last = self.others.entry(access.space).or_insert_with(|| Last::none(self.units));
        last.touch(access.write, now, || match access.space {
            Space::State(s) => format!("state {s}"),
            Space::Paged(layer) => format!("experts of layer {layer} on disk"),
            Space::Arena(memory) => format!("memory {memory}"),
        })
    }

    fn buffer(&mut self, memory: u32, b: u32, access: &Access, now: Now<'_>) -> Result<(), String> {
        let entry = self.entry;
        let name = |b: u32| {
            let name = entry.buffers.get(b as usize).map_or("", |b| &b.name);
            format!("buffer {b} ({name})")
        };
        let key = (memory, access.bytes.start);
        if let Some(piece) = self.pieces.get_mut(&key).filter(|piece| piece.buffer == Some(b)) {
            return piece.last.touch(access.write, now, || name(b));
        }
        if !access.write {
            return Err(format!("reads {}, which is not written, or was overwritten", name(b)));
        }
        // The buffer that was there has been used for the last time.
        for ((memory, start), piece) in self.overlapping(memory, access) {
            if let Some((what, step)) = piece.last.unfinished(true, now.clock) {
                let of = piece.buffer.map_or_else(|| "an earlier buffer".to_owned(), name);
                return Err(format!(
                    "writes {}, which shares bytes with {of}, and step {step}, which {what} them, may not have ended",
                    name(b),
                ));
            }
            // Of what sticks out the last steps are still those; its value is gone.
            let Piece { end, last, .. } = piece;
            if start < access.bytes.start {
                let rest = Piece { end: access.bytes.start, buffer: None, last: last.clone() };
                self.pieces.insert((memory, start), rest);
            }
            if end > access.bytes.end {
                self.pieces.insert((memory, access.bytes.end), Piece { end, buffer: None, last });
            }
        }
        let mut last = Last::none(self.units);
        last.touch(true, now, || name(b))?;
        self.pieces.insert(key, Piece { end: access.bytes.end, buffer: Some(b), last });
        Ok(())
    }

    /// Takes out the pieces that share bytes with an access.
    fn overlapping(&mut self, memory: u32, access: &Access) -> Vec<((u32, u64), Piece)> {
        let before = self.pieces.range(..(memory, access.bytes.start)).next_back();
        let first =
            before.filter(|((m, _), piece)| *m == memory && piece.end > access.bytes.start).map(|(k, _)| *k);
        let from = first.unwrap_or((memory, access.bytes.start));
        let keys: Vec<(u32, u64)> =
            self.pieces.range(from..(memory, access.bytes.end)).map(|(k, _)| *k).collect();
        keys.into_iter().filter_map(|k| Some((k, self.pieces.remove(&k)?))).collect()
    }
}
