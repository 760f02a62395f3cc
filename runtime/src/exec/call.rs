//! One call of an entry point: its steps with their addresses, and the walk of the threads over them.

use crate::bundle::program::{Code, Program};
use crate::error::{Error, Result};
use crate::exec::accelerators::Residents;
use crate::exec::builtin;
use crate::exec::timeline::{Timeline, What};
use crate::exec::unit::{ComputeUnit, ExpertPart, Launch, LayerPart, PoolThread, StepFault, Units};
use crate::platform::memory::Addr;
use crate::schedule::dispatch::{Assigner, TransferQueue};
use crate::schedule::warm_up::PlannedWork;
use crate::sync::barrier::Barrier;
use crate::sync::events::Events;
use crate::weights::owned::LoadProgress;
use crate::weights::store::Store;
use moec_ir::op::DispatchLayout;
use moec_ir::plan::{self, Arg, Builtin, Entry, Grid, RowSpace, Span, Step};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

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
    /// Experts that are copied to its unit at run time, if the step reads them.
    transferred: Option<TransferredExperts>,
    /// Experts of a layer that it shares with another unit, if it is a step of the CPU.
    divided: Option<DividedExperts>,
    /// Layer whose experts have been computed before the step, if experts move between steps and no earlier
    /// step of the CPU is that late.
    computed: Option<usize>,
    /// Events of steps of other units that it waits for.
    waits: Range<usize>,
    /// Event of the step, if another unit waits for it.
    event: Option<usize>,
}

/// Experts of a step that are copied to its unit at run time. The step is executed once for each wave of
/// them, with a dispatch table of the wave.
#[derive(Clone, Copy)]
struct TransferredExperts {
    /// Layer, counted over those whose experts are assigned at run time.
    layer: usize,
    /// Step that copies the unit's dispatch table to its memory.
    table: usize,
    layout: DispatchLayout,
}

/// Experts that a step of the CPU shares with another unit.
#[derive(Clone, Copy)]
struct DividedExperts {
    /// Layer, counted over those whose experts are assigned at run time.
    layer: usize,
    /// Whether the step is the first, and the last, of the CPU's steps on these experts.
    ends: [bool; 2],
}

/// Time of the CPU's experts of a layer so far, on its first thread.
type CpuTime = Option<(PlannedWork, Duration)>;

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
    // By layer of neurons on disk, the last step that reads them.
    let mut downs = HashMap::new();
    for (i, step) in entry.steps.iter().enumerate() {
        downs.extend(step.args.iter().filter_map(|&arg| Some((neurons_of(program, arg)?, i))));
    }
    let computed = assigner.map(|assigner| computed(entry, assigner));
    let awaited = awaited(entry);
    for &d in awaited.iter().flatten() {
        if let (Some(event @ None), Some(unit)) = (event_of.get_mut(d as usize), unit_of(d)) {
            *event = Some(bound.events.len());
            bound.events.push(unit as usize);
        }
    }
    for ((i, step), awaited) in entry.steps.iter().enumerate().zip(&awaited) {
        let first = bound.args.len();
        for &arg in &step.args {
            let addr = places.of(program, entry, step.unit, arg);
            bound.args.push(addr.ok_or_else(|| Error::plan(format!("{arg:?} names nothing")))?);
        }
        let from = bound.waits.len();
        bound.waits.extend(awaited.iter().filter_map(|&d| event_of.get(d as usize).copied().flatten()));
        let here = program.memory_of(step.unit) == 0;
        bound.steps.push(BoundStep {
            unit: step.unit as usize,
            code: program.code(step.code),
            args: first..bound.args.len(),
            rows: step.rows,
            grid: step.grid,
            barrier: step.barrier,
            layer_part: step
                .args
                .iter()
                .find_map(|&arg| layer_part(program, arg, &|layer| downs.get(&layer) == Some(&i)))
                .filter(|_| here),
            // Weights of another memory have been copied there.
            needs: step.args.iter().filter(|_| here).map(|&arg| needs(places.store, arg)).max().unwrap_or(0),
            transferred: assigner.map_or(Ok(None), |_| transferred(program, entry, i))?,
            divided: divided(entry, i, assigner),
            computed: computed.as_ref().and_then(|steps| steps.get(i).copied().flatten()),
            waits: from..bound.waits.len(),
            event: event_of[i],
        });
    }
    Ok(bound)
}

/// By step, the steps of other units that it waits for. Units end their steps in order, so the last of each unit
/// serves, and none if an earlier step of the same unit has waited as long.
fn awaited(entry: &Entry) -> Vec<Vec<u32>> {
    let mut ended: HashMap<(u32, u32), u32> = HashMap::new();
    let of = |step: &Step| {
        let mut own = Vec::new();
        for &d in step.deps.iter().rev() {
            let Some(unit) = entry.steps.get(d as usize).map(|s| s.unit) else { continue };
            let last = ended.entry((step.unit, unit)).or_default();
            if unit != step.unit && *last <= d {
                *last = d + 1;
                own.push(d);
            }
        }
        own
    };
    entry.steps.iter().map(of).collect()
}

/// Layer, counted over those on disk, whose neurons an argument names, if these are read one by one.
fn neurons_of(program: &Program, arg: Arg) -> Option<usize> {
    let Arg::Matrices(segment) = arg else { return None };
    let paging = program.paging.as_ref().filter(|p| p.by_neurons())?;
    paging.layers.iter().position(|l| l.down == segment)
}

/// By step of the CPU: the layer whose experts have been computed when its threads begin it, at the first such
/// step, if experts move between steps.
fn computed(entry: &Entry, assigner: &Assigner) -> Vec<Option<usize>> {
    let steps = &entry.steps;
    let units = steps.iter().map(|s| s.unit as usize + 1).max().unwrap_or(0);
    let layer = |step: &Step| {
        step.args.iter().find_map(|arg| match *arg {
            Arg::Matrices(segment) => assigner.moving_layer(segment),
            _ => None,
        })
    };
    // By layer: the steps on its experts.
    let mut readers: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (i, step) in steps.iter().enumerate() {
        if let Some(layer) = layer(step) {
            readers.entry(layer).or_default().push(i);
        }
    }
    let mut found = vec![None; steps.len()];
    // By unit: its steps before this one have ended.
    let mut ended = vec![0; units];
    for (i, step) in steps.iter().enumerate().filter(|(_, step)| step.unit == 0) {
        // A step ends after the earlier ones of its unit, and after those that it waits for.
        let mut open: Vec<(usize, usize)> = step
            .deps
            .iter()
            .map(|&d| d as usize)
            .filter_map(|d| {
                let unit = steps.get(d)?.unit as usize;
                (unit != 0).then_some((unit, d + 1))
            })
            .collect();
        open.extend(step.barrier.then_some((0, i)));
        while let Some((unit, end)) = open.pop() {
            let begin = ended[unit];
            ended[unit] = end.max(begin);
            for earlier in steps.get(begin..end).into_iter().flatten().filter(|s| s.unit as usize == unit) {
                for &d in &earlier.deps {
                    let of = steps.get(d as usize).map_or(unit, |s| s.unit as usize);
                    open.extend((of != unit).then_some((of, d as usize + 1)));
                }
            }
        }
        let is_done = |readers: &Vec<usize>| readers.iter().all(|&r| r < ended[steps[r].unit as usize]);
        if let Some(layer) = readers.iter().find(|(_, readers)| is_done(readers)).map(|(layer, _)| *layer) {
            readers.remove(&layer);
            found[i] = Some(layer);
        }
    }
    found
}

/// The experts that step `i` shares with another unit, if it is a step of the CPU.
fn divided(entry: &Entry, i: usize, assigner: Option<&Assigner>) -> Option<DividedExperts> {
    let assigner = assigner?;
    let layer_of = |step: &Step| {
        let mut segments = step.args.iter().filter_map(|arg| match *arg {
            Arg::Matrices(segment) if step.unit == 0 => Some(segment),
            _ => None,
        });
        segments.find_map(|segment| assigner.divided_layer(segment))
    };
    let layer = layer_of(entry.steps.get(i)?)?;
    let same = |step: &Step| layer_of(step) == Some(layer);
    let ends = [entry.steps.iter().position(same), entry.steps.iter().rposition(same)];
    Some(DividedExperts { layer, ends: ends.map(|end| end == Some(i)) })
}

/// The experts of step `i` that are copied to its unit at run time, if it reads such experts.
///
/// # Errors
/// A step whose dispatch table no earlier step copies.
fn transferred(program: &Program, entry: &Entry, i: usize) -> Result<Option<TransferredExperts>> {
    let Some(step) = entry.steps.get(i) else { return Ok(None) };
    let Some(layer) = program.transferred_layer(step) else { return Ok(None) };
    let Grid::Experts { table, .. } = step.grid else { return Ok(None) };
    let table = step.args.get(table as usize);
    let before = || entry.steps.iter().enumerate().take(i).rev();
    let copy = before().find_map(|(at, copy)| match (copy.code, copy.args.as_slice()) {
        (plan::Code::Builtin(Builtin::Copy { span: Span::Whole, .. }), [from, to]) => {
            (Some(to) == table && copy.unit == step.unit).then_some((at, *from))
        }
        _ => None,
    });
    let found = copy.and_then(|(table, from)| {
        let layout = before().find_map(|(_, of)| match of.code {
            plan::Code::Builtin(Builtin::Dispatch { rows, k, experts, .. }) if of.args.contains(&from) => {
                Some(DispatchLayout { rows: rows as usize, k: k as usize, experts: experts as usize })
            }
            _ => None,
        })?;
        Some(TransferredExperts { layer, table, layout })
    });
    found.map(Some).ok_or_else(|| Error::plan(format!("no step copies the dispatch table of step {i}")))
}

/// Part of the experts of a layer on SSD that an argument belongs to.
///
/// Neurons are one segment: the last step that reads it multiplies by down, the ones before by gates or up.
fn layer_part(program: &Program, arg: Arg, is_down: &dyn Fn(usize) -> bool) -> Option<LayerPart> {
    let Arg::Matrices(segment) = arg else { return None };
    let paging = program.paging.as_ref()?;
    if paging.by_neurons() {
        let layer = neurons_of(program, arg)?;
        let part = if is_down(layer) { ExpertPart::Down } else { ExpertPart::GateUp };
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
        let mut timed: CpuTime = None;
        for i in steps {
            let step = &self.bound.steps[i];
            if step.unit != 0 {
                continue;
            }
            if step.barrier {
                barrier.wait();
            }
            let waits = &self.bound.waits[step.waits.clone()];
            if thread.index == 0 {
                self.events.wait_timed(waits);
            } else {
                self.events.wait_all(waits);
            }
            if let (0, Some(_), Some(assigner)) = (thread.index, step.computed, self.assigner) {
                let fail = |fault| drop(self.fault.set(fault));
                // SAFETY: all steps on the experts of the last dispatched layer have ended, and those of the
                // next one are not dispatched yet.
                unsafe { assigner.computed(Units(self.units), &fail) };
            }
            // No weights become ready after a failure, so all threads stop at the same step. They still meet
            // at every barrier.
            ready = ready && self.has_weights(i);
            if ready {
                // SAFETY: the plan has a barrier before every step that depends on an earlier one. Steps of
                // other units that it depends on have ended.
                unsafe {
                    let step = || self.step(i, thread, thread.index);
                    if thread.index == 0 { self.time(i, &mut timed, step) } else { step() }
                };
            }
            if let Some(event) = step.event {
                self.events.arrive(event);
            }
        }
    }

    /// Executes step `i` of the CPU. Its time is added to `timed` if costs are measured, unless it waits for
    /// experts on disk.
    fn time(&self, i: usize, timed: &mut CpuTime, execute: impl FnOnce()) {
        let step = &self.bound.steps[i];
        let Some((assigner, of)) = self.assigner.zip(step.divided.filter(|_| step.layer_part.is_none()))
        else {
            return execute();
        };
        let [first, last] = of.ends;
        if first {
            *timed = assigner.timed_cpu(of.layer).map(|work| (work, Duration::ZERO));
        }
        let begin = timed.map(|_| Instant::now());
        execute();
        if let (Some((_, time)), Some(begin)) = (timed.as_mut(), begin) {
            *time += begin.elapsed();
        }
        if let Some((work, time)) = timed.take_if(|_| last) {
            assigner.took(work, time);
        }
    }

    /// Walks some steps of an accelerator, on its one thread; `track` is its place in the timeline.
    ///
    /// # Safety
    /// As [`Walk::span`].
    pub(crate) unsafe fn accelerator(&self, steps: Range<usize>, unit: usize, scratch: Addr, track: usize) {
        let Some(accelerator) = self.units.get(unit).and_then(Option::as_ref) else { return };
        let thread = PoolThread { index: 0, of: 1, scratch };
        let own = |&i: &usize| self.bound.steps[i].unit == unit;
        let mut steps = steps.filter(own).peekable();
        while let Some(i) = steps.next() {
            let step = &self.bound.steps[i];
            let waits = &self.bound.waits[step.waits.clone()];
            if !self.events.occurred(waits) {
                accelerator.begin();
                self.events.wait_all(waits);
            }
            let mut last = i;
            if let Some((assigner, experts)) = self.assigner.zip(step.transferred) {
                // All steps on a wave come before the next wave.
                while let Some(next) = steps.next_if(|&next| self.continues(experts, next)) {
                    last = next;
                }
                // SAFETY: as below.
                unsafe { self.waves(assigner, experts, &|| (i..=last).filter(own), thread, track) };
            } else if self.fault.get().is_none() && self.has_weights(i) {
                // The result of a failed step is never an operand.
                // SAFETY: steps of this unit have been submitted in their order, and others have ended.
                unsafe { self.step(i, thread, track) };
            }
            for event in (i..=last).filter(own).filter_map(|i| self.bound.steps[i].event) {
                accelerator.wait(self.fault);
                self.events.arrive(event);
            }
        }
        accelerator.wait(self.fault);
    }

    /// Whether step `i` reads the same transferred experts, and waits for no other unit.
    fn continues(&self, experts: TransferredExperts, i: usize) -> bool {
        let step = &self.bound.steps[i];
        step.transferred.is_some_and(|of| of.layer == experts.layer) && step.waits.is_empty()
    }

    /// Executes the steps on a layer's transferred experts, once for each wave: those that the unit holds,
    /// then the others as their transfers end.
    ///
    /// # Safety
    /// As [`Walk::step`], for these steps and the one that copies their dispatch table.
    unsafe fn waves<I: Iterator<Item = usize>>(
        &self,
        assigner: &Assigner,
        experts: TransferredExperts,
        steps: &dyn Fn() -> I,
        thread: PoolThread,
        track: usize,
    ) {
        let TransferredExperts { layer, table, layout } = experts;
        let copy = &self.bound.steps[table];
        let (Some(unit), &[from, to]) =
            (self.units.get(copy.unit).and_then(Option::as_ref), &self.bound.args[copy.args.clone()])
        else {
            return;
        };
        let mut begin = 0;
        while let Some(wave) = assigner.next_wave(layer, begin) {
            if self.fault.get().is_some() {
                return;
            }
            begin = wave.end;
            let timed = assigner.timed_wave(layer, wave.clone()).map(|work| {
                unit.wait(self.fault);
                (work, Instant::now())
            });
            // SAFETY: the verifier has found the whole table there, which a step that has ended wrote.
            let all = unsafe { std::slice::from_raw_parts(from.of::<i32>(), layout.words()) };
            // The step before has copied the whole table.
            if usize::try_from(all[0]) != Ok(wave.len()) {
                let mut own = vec![0; layout.words()];
                builtin::of_range(layout, wave, all, &mut own);
                let args = [Addr::read_only(own.as_ptr().cast()), to];
                // SAFETY: the caller's promise; a copy reads its source before it returns.
                unsafe { self.launch(table, &args, thread, track) };
            }
            for i in steps() {
                // SAFETY: the caller's promise.
                unsafe { self.step(i, thread, track) };
            }
            if let Some((work, begin)) = timed {
                unit.wait(self.fault);
                assigner.took(work, begin.elapsed());
            }
        }
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
        let args = &self.bound.args[self.bound.steps[i].args.clone()];
        // SAFETY: the caller's promise.
        unsafe { self.launch(i, args, thread, track) };
    }

    /// As [`Walk::step`], with these arguments in place of the step's own.
    ///
    /// # Safety
    /// As [`ComputeUnit::submit`].
    unsafe fn launch(&self, i: usize, args: &[Addr], thread: PoolThread, track: usize) {
        let step = &self.bound.steps[i];
        let n = self.extent.rows(step.rows);
        let Some(unit) = self.units.get(step.unit).and_then(Option::as_ref).filter(|_| n > 0) else { return };
        let launch = Launch {
            code: step.code,
            args,
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
    /// Transfer queues, each with a thread that serves it, and the unit whose memory it is for.
    pub(crate) queues: [Option<(&'a TransferQueue, usize)>; 2],
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
            // Only the first thread sends them jobs.
            if index == 0 {
                self.queues.iter().flatten().for_each(|(queue, _)| queue.close());
            }
        } else if let Some(&(unit, scratch)) = self.accelerators.get(index - self.on_cpu) {
            // SAFETY: the caller's promise; the scratch is the unit's own.
            unsafe { walk.accelerator(steps, unit, scratch, index) };
        } else if let Some(&(queue, unit)) =
            self.queues.iter().flatten().nth(index - self.on_cpu - self.accelerators.len())
            && let Some(unit) = walk.units.get(unit).and_then(Option::as_deref)
        {
            // SAFETY: the code that submits a job upholds its contract.
            unsafe { queue.serve(unit) };
        }
    }
}
