//! One call of an entry point: its steps with their addresses, and the walk of the threads over them.

use crate::bundle::program::{Code, Program};
use crate::error::{Error, Result};
use crate::exec::accelerators::Residents;
use crate::exec::timeline::{Timeline, What};
use crate::exec::unit::{ComputeUnit, ExpertPart, Launch, LayerPart, PoolThread, StepFault, Units};
use crate::platform::memory::Addr;
use crate::schedule::dispatch::{Assigner, TransferQueue};
use crate::sync::barrier::Barrier;
use crate::sync::events::Events;
use crate::weights::owned::LoadProgress;
use crate::weights::store::Store;
use moec_ir::plan::{Arg, Entry, Grid, RowSpace};
use std::collections::HashSet;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::AtomicUsize;
use std::time::Instant;

/// A step with its addresses.
struct BoundStep {
    unit: usize,
    code: Code,
    args: Range<usize>,
    rows: RowSpace,
    grid: Grid,
    barrier: bool,
    layer_part: Option<LayerPart>,
    /// Amount of the weights that must have arrived ([`LoadProgress::wait`]).
    needs: usize,
    /// Layer whose experts are copied to its unit at run time, if the step reads them.
    transferred_layer: Option<usize>,
    /// Events of steps of other units that it waits for.
    waits: Range<usize>,
    /// Event of the step, if another unit waits for it.
    event: Option<usize>,
}

/// Steps of an entry point, with the addresses of all of them in one vector.
pub(crate) struct Bound {
    steps: Vec<BoundStep>,
    args: Vec<Addr>,
    /// Events that steps wait for, all in one vector.
    waits: Vec<usize>,
    /// Unit of each event.
    events: Vec<usize>,
}

/// Extent of a call of an entry point.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    pub(crate) n: usize,
    pub(crate) m: usize,
    pub(crate) seq_len: usize,
}

impl Bound {
    /// Matrices of experts on disk that a step reads.
    pub(crate) fn layer_part(&self, step: usize) -> Option<LayerPart> {
        self.steps.get(step)?.layer_part
    }

    /// Number of steps.
    pub(crate) fn len(&self) -> usize {
        self.steps.len()
    }

    /// Unit whose step each event belongs to.
    pub(crate) fn events(&self) -> &[usize] {
        &self.events
    }
}

impl Extent {
    fn rows(self, space: RowSpace) -> usize {
        match space {
            RowSpace::Tokens => self.n,
            RowSpace::Outputs => self.m,
        }
    }
}

/// Addresses of the buffers, weights and states of a memory.
pub(crate) struct Places<'a> {
    /// Arenas, by memory; `None` if no unit has allocated one.
    pub(crate) arenas: &'a [Option<Addr>],
    /// States of the plan.
    pub(crate) states: &'a [Addr],
    /// Weights of the CPU's memory.
    pub(crate) store: &'a dyn Store,
    /// Weights of other memories.
    pub(crate) residents: &'a [Residents],
}

impl Places<'_> {
    /// The table of a segment's matrices in the memory of a unit.
    pub(crate) fn matrices(&self, program: &Program, unit: u32, segment: u32) -> Option<Addr> {
        match program.memory_of(unit).checked_sub(1) {
            Some(memory) => self.residents.get(memory as usize)?.of(segment),
            None => self.store.matrices(segment),
        }
    }

    fn of(&self, program: &Program, entry: &Entry, unit: u32, arg: Arg) -> Option<Addr> {
        let memory = program.memory_of(unit) as usize;
        let residents = memory.checked_sub(1).map(|m| self.residents.get(m));
        match arg {
            Arg::Buffer(i, skip) => {
                let buffer = entry.buffers.get(i as usize)?;
                let arena = self.arenas.get(buffer.memory as usize).copied().flatten()?;
                Some(arena.plus(buffer.offset as usize + skip as usize))
            }
            Arg::Segment(i) | Arg::Matrices(i) if residents.is_some() => residents?.and_then(|r| r.of(i)),
            Arg::Segment(i) => self.store.segment(i),
            Arg::Matrices(i) => self.store.matrices(i),
            Arg::State(i) => self.states.get(i as usize).copied(),
        }
    }
}

/// Turns the arguments of an entry point's steps into addresses.
pub(crate) fn bind(
    program: &Program,
    entry: &Entry,
    places: &Places<'_>,
    assigner: Option<&Assigner>,
) -> Result<Bound> {
    let count = entry.steps.len();
    let mut bound =
        Bound { steps: Vec::with_capacity(count), args: Vec::new(), waits: Vec::new(), events: Vec::new() };
    let unit_of = |i: u32| entry.steps.get(i as usize).map(|s| s.unit);
    let mut event_of: Vec<Option<usize>> = vec![None; count];
    let mut ups = HashSet::new();
    for step in &entry.steps {
        let elsewhere = |d: &&u32| unit_of(**d).is_some_and(|unit| unit != step.unit);
        for &d in step.deps.iter().filter(elsewhere) {
            if let (Some(event @ None), Some(unit)) = (event_of.get_mut(d as usize), unit_of(d)) {
                *event = Some(bound.events.len());
                bound.events.push(unit as usize);
            }
        }
    }
    for (i, step) in entry.steps.iter().enumerate() {
        let first = bound.args.len();
        for &arg in &step.args {
            let addr = places.of(program, entry, step.unit, arg);
            bound.args.push(addr.ok_or_else(|| Error::plan(format!("{arg:?} names nothing")))?);
        }
        let from = bound.waits.len();
        let elsewhere = step.deps.iter().filter(|&&d| unit_of(d).is_some_and(|unit| unit != step.unit));
        bound.waits.extend(elsewhere.filter_map(|&d| event_of.get(d as usize).copied().flatten()));
        let here = program.memory_of(step.unit) == 0;
        bound.steps.push(BoundStep {
            unit: step.unit as usize,
            code: program.code(step.code),
            args: first..bound.args.len(),
            rows: step.rows,
            grid: step.grid,
            barrier: step.barrier,
            layer_part: step.args.iter().find_map(|&arg| layer_part(program, arg, &mut ups)).filter(|_| here),
            // Weights of another memory have been copied there.
            needs: step.args.iter().filter(|_| here).map(|&arg| needs(places.store, arg)).max().unwrap_or(0),
            transferred_layer: assigner.and_then(|a| {
                step.args.iter().find_map(|arg| match *arg {
                    Arg::Matrices(segment) => a.transferred_layer(step.unit as usize, segment),
                    _ => None,
                })
            }),
            waits: from..bound.waits.len(),
            event: event_of[i],
        });
    }
    Ok(bound)
}

/// Part of the experts of a layer on SSD that an argument belongs to.
///
/// Neurons are one segment: the first step that reads it multiplies by up, the next one by down. `ups` holds
/// the layers whose first step was found.
fn layer_part(program: &Program, arg: Arg, ups: &mut HashSet<usize>) -> Option<LayerPart> {
    let Arg::Matrices(segment) = arg else { return None };
    let paging = program.paging.as_ref()?;
    if paging.by_neurons() {
        let layer = paging.layers.iter().position(|l| l.down == segment)?;
        let part = if ups.insert(layer) { ExpertPart::GateUp } else { ExpertPart::Down };
        return Some(LayerPart { layer, part });
    }
    paging.layers.iter().enumerate().find_map(|(layer, l)| {
        let mut parts = ExpertPart::ALL.into_iter().zip([l.gate_up, l.down]);
        let part = parts.find_map(|(part, s)| (s == segment).then_some(part))?;
        Some(LayerPart { layer, part })
    })
}

/// Amount of weights that must have arrived before an argument is read.
fn needs(store: &dyn Store, arg: Arg) -> usize {
    match (arg, store.load_progress()) {
        (Arg::Segment(i) | Arg::Matrices(i), Some(progress)) => progress.needs(i),
        _ => 0,
    }
}

/// One call of an entry point, as its threads see it.
pub(crate) struct Walk<'a> {
    pub(crate) bound: &'a Bound,
    /// By index in the plan; `None` if no step names the unit.
    pub(crate) units: &'a [Option<Box<dyn ComputeUnit + 'a>>],
    pub(crate) taken: &'a [AtomicUsize],
    pub(crate) events: &'a Events,
    pub(crate) fault: &'a OnceLock<StepFault>,
    pub(crate) extent: Extent,
    /// Load progress of the weights that steps wait for; `None` if all weights are loaded.
    pub(crate) progress: Option<&'a LoadProgress>,
    /// Assigner of experts, which knows those that the transfer queue copies.
    pub(crate) assigner: Option<&'a Assigner>,
    /// Timeline for the spans of steps, and the index of the entry point.
    pub(crate) timeline: Option<(&'a Timeline, u32)>,
}

impl Walk<'_> {
    /// Walks some steps of the CPU.
    ///
    /// # Safety
    /// The inputs are written, and the steps before these have ended. All threads of `barrier` walk the
    /// steps, with distinct indexes as [`ComputeUnit::submit`] requires. Every other unit that has steps
    /// walks [`Walk::accelerator`] at the same time.
    pub(crate) unsafe fn span(&self, steps: Range<usize>, thread: PoolThread, barrier: &Barrier) {
        let mut ready = true;
        for i in steps {
            let step = &self.bound.steps[i];
            if step.unit != 0 {
                continue;
            }
            if step.barrier {
                barrier.wait();
            }
            self.bound.waits[step.waits.clone()].iter().for_each(|&event| self.events.wait(event));
            // No weights become ready after a failure, so all threads stop at the same step. They still meet
            // at every barrier.
            ready = ready && self.has_weights(i);
            if ready {
                // SAFETY: the plan has a barrier before every step that depends on an earlier one. Steps of
                // other units that it depends on have ended.
                unsafe { self.step(i, thread, thread.index) };
            }
            if let Some(event) = step.event {
                self.events.arrive(event);
            }
        }
    }

    /// Walks some steps of an accelerator, on its one thread; `track` is its place in the timeline.
    ///
    /// # Safety
    /// As [`Walk::span`].
    pub(crate) unsafe fn accelerator(&self, steps: Range<usize>, unit: usize, scratch: Addr, track: usize) {
        let Some(accelerator) = self.units.get(unit).and_then(Option::as_ref) else { return };
        let thread = PoolThread { index: 0, of: 1, scratch };
        for i in steps {
            let step = &self.bound.steps[i];
            if step.unit != unit {
                continue;
            }
            self.bound.waits[step.waits.clone()].iter().for_each(|&event| self.events.wait(event));
            if let Some((assigner, layer)) = self.assigner.zip(step.transferred_layer) {
                assigner.wait(layer);
            }
            // The result of a failed step is never an operand.
            if self.fault.get().is_none() && self.has_weights(i) {
                // SAFETY: steps of this unit have been submitted in their order, and others have ended.
                unsafe { self.step(i, thread, track) };
            }
            if let Some(event) = step.event {
                accelerator.wait(self.fault);
                self.events.arrive(event);
            }
        }
        accelerator.wait(self.fault);
    }

    /// Waits for the weights of a step, if it has rows. False if they cannot be loaded.
    fn has_weights(&self, i: usize) -> bool {
        let step = &self.bound.steps[i];
        let Some(progress) = self.progress.filter(|_| self.extent.rows(step.rows) > 0) else { return true };
        progress.wait(step.needs).map_err(|e| self.fault.set(StepFault::Weights(e))).is_ok()
    }

    /// Executes a thread's share of step `i`. A step without rows is skipped.
    ///
    /// # Safety
    /// As [`ComputeUnit::submit`].
    pub(crate) unsafe fn step(&self, i: usize, thread: PoolThread, track: usize) {
        let step = &self.bound.steps[i];
        let n = self.extent.rows(step.rows);
        let Some(unit) = self.units.get(step.unit).and_then(Option::as_ref).filter(|_| n > 0) else { return };
        let launch = Launch {
            code: step.code,
            args: &self.bound.args[step.args.clone()],
            grid: step.grid,
            n,
            seq_len: self.extent.seq_len,
            taken: &self.taken[i],
            step: i,
            layer_part: step.layer_part,
            fault: self.fault,
            units: Units(self.units),
        };
        let begin = self.timeline.map(|_| Instant::now());
        // SAFETY: the caller's promise.
        unsafe { unit.submit(&launch, thread) };
        if let (Some((timeline, entry)), Some(begin)) = (self.timeline, begin) {
            timeline.record(track, What::Step { entry, step: i as u32 }, begin);
        }
    }
}

/// The threads of a call: those of the CPU, and one of every other unit that has steps.
#[derive(Clone, Copy)]
pub(crate) struct Threads<'a> {
    /// Number of CPU threads.
    pub(crate) on_cpu: usize,
    /// Scratch of the first thread, and bytes from one thread's scratch to the next.
    pub(crate) scratch: (Addr, usize),
    /// Accelerators, with their scratch.
    pub(crate) accelerators: &'a [(usize, Addr)],
    /// Transfer queue that one more thread serves, and the unit that it copies to.
    pub(crate) transfers: Option<(&'a TransferQueue, usize)>,
}

impl Threads<'_> {
    /// Runs the part of a walk that belongs to thread `index` of the pool.
    ///
    /// # Safety
    /// As [`Walk::span`], of all threads.
    pub(crate) unsafe fn walk(&self, walk: &Walk<'_>, steps: Range<usize>, index: usize, barrier: &Barrier) {
        if index < self.on_cpu {
            let (scratch, stride) = self.scratch;
            let thread = PoolThread { index, of: self.on_cpu, scratch: scratch.plus(index * stride) };
            // SAFETY: the caller's promise; each thread has its own part of the scratch.
            unsafe { walk.span(steps, thread, barrier) };
            // Only the first thread sends it jobs.
            if let Some((transfers, _)) = self.transfers.filter(|_| index == 0) {
                transfers.close();
            }
        } else if let Some(&(unit, scratch)) = self.accelerators.get(index - self.on_cpu) {
            // SAFETY: the caller's promise; the scratch is the unit's own.
            unsafe { walk.accelerator(steps, unit, scratch, index) };
        } else if let Some((transfers, unit)) = self.transfers
            && let Some(unit) = walk.units.get(unit).and_then(Option::as_deref)
        {
            // SAFETY: the code that submits a job upholds its contract.
            unsafe { transfers.serve(unit) };
        }
    }
}
