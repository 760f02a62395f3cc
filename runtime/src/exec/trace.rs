//! Runs of one entry point step by step, with an observer that reads memory around every step, or with a
//! clock.

use crate::bundle::program::Program;
use crate::error::Result;
use crate::exec::accelerators::AcceleratorMemories;
use crate::exec::call::{Threads, Walk};
use crate::exec::engine::{Engine, Row};
use crate::exec::unit::ComputeUnit;
use crate::platform::memory::Addr;
use crate::weights::store::Store;
use moec_ir::EntryKind;
use moec_ir::plan::{Entry, Step};
use std::borrow::Cow;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Moment of an observer's call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// The step is next.
    Before,
    /// The step has ended.
    After,
}

/// View of a step, for the observer.
pub struct StepView<'a> {
    program: &'a Program,
    arena: Addr,
    accelerators: &'a AcceleratorMemories,
    units: &'a [Option<Box<dyn ComputeUnit + 'a>>],
    state_at: &'a [Addr],
    store: &'a dyn Store,
    entry: &'a Entry,
    index: usize,
    n: usize,
    m: usize,
}

impl StepView<'_> {
    /// The entry point that runs.
    pub fn kind(&self) -> EntryKind {
        self.entry.kind
    }

    /// The step before or after which the observer is called.
    pub fn step(&self) -> &Step {
        &self.entry.steps[self.index]
    }

    /// Its index in the entry point.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Valid token rows.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Requested output rows.
    pub fn m(&self) -> usize {
        self.m
    }

    /// Bytes of a buffer of the entry point; a copy if the CPU cannot read them in place.
    pub fn buffer(&self, index: u32) -> Option<Cow<'_, [u8]>> {
        let b = self.entry.buffers.get(index as usize)?;
        let arena = match b.memory.checked_sub(1).map(|m| m as usize) {
            None => self.arena,
            Some(m) => self.accelerators.arenas.get(m).copied().flatten()?,
        };
        self.seen(b.memory, arena.plus(b.offset as usize), b.bytes)
    }

    /// Whether the CPU can read a memory in place.
    fn is_mapped(&self, memory: u32) -> bool {
        memory.checked_sub(1).is_none_or(|m| self.accelerators.mapped.get(m as usize) == Some(&true))
    }

    /// Bytes of a state, snapshots included; a copy if the CPU cannot read them in place.
    pub fn state(&self, index: u32) -> Option<Cow<'_, [u8]>> {
        let at = self.state_at.get(index as usize)?;
        let state = self.program.states.get(index as usize)?;
        self.seen(state.memory, *at, state.bytes())
    }

    /// Bytes of a memory, copied if the CPU cannot read it in place.
    fn seen(&self, memory: u32, at: Addr, bytes: u64) -> Option<Cow<'_, [u8]>> {
        if self.is_mapped(memory) {
            return Some(Cow::Borrowed(self.look(at, bytes)));
        }
        let owner = self.program.units.iter().position(|u| u.memory == memory)?;
        let unit = self.units.get(owner)?.as_deref()?;
        let mut copy = vec![0_u8; bytes as usize];
        // SAFETY: the verifier has found the extent inside of the unit's memory, which lives as long as the
        // engine. No step runs while the view is alive.
        unsafe { unit.copy(at, Addr::read_only(copy.as_mut_ptr()), copy.len()) };
        Some(Cow::Owned(copy))
    }

    /// Bytes of a packed weight.
    pub fn segment(&self, index: u32) -> Option<&[u8]> {
        let s = self.program.segments.get(index as usize)?;
        Some(self.look(self.store.segment(index)?, s.bytes))
    }

    #[allow(clippy::unused_self, reason = "its lifetime is the slice's")]
    fn look(&self, at: Addr, bytes: u64) -> &[u8] {
        // SAFETY: the verifier has found the extent inside of its region, which lives as long as the engine
        // and is initialised. No step runs while the view, and with it the slice, is alive.
        unsafe { std::slice::from_raw_parts(at.ptr(), bytes as usize) }
    }
}

impl Engine<'_> {
    /// Runs entry point `entry` for `rows`, with logits of the rows `logit_rows`, as part of a sequence of
    /// `seq_len` tokens. All threads share each step and wait for each other after it. `observe` is called on
    /// the calling thread before and after every step, even one without rows. Its error ends the run.
    ///
    /// States are written as in any call. Unlike with [`Engine::prefill`], a hole before the rows is allowed
    /// if all states are caches; the caller is responsible for their values there.
    ///
    /// # Errors
    /// An entry point that does not exist or does not take the rows; ids, positions and slots out of range;
    /// weights that cannot be loaded; errors of `observe`.
    pub fn trace_entry(
        &mut self,
        entry: usize,
        rows: &[Row],
        logit_rows: &[usize],
        seq_len: usize,
        observe: &mut dyn FnMut(Moment, &StepView<'_>) -> Result<()>,
    ) -> Result<()> {
        self.trace_steps(entry, rows, logit_rows, seq_len, &|_| true, observe)
    }

    /// As [`Engine::trace_entry`], with `observe` called only around the steps whose index is in `stops`.
    ///
    /// # Errors
    /// As [`Engine::trace_entry`].
    pub fn trace_steps(
        &mut self,
        entry: usize,
        rows: &[Row],
        logit_rows: &[usize],
        seq_len: usize,
        stops: &dyn Fn(usize) -> bool,
        observe: &mut dyn FnMut(Moment, &StepView<'_>) -> Result<()>,
    ) -> Result<()> {
        self.wait_for_weights()?;
        let extent = self.begin(entry, rows, logit_rows.iter().copied(), seq_len)?;
        let fault = OnceLock::new();
        let walk = Walk {
            bound: &self.bound[entry],
            units: &self.units,
            taken: &self.taken,
            events: &self.events,
            fault: &fault,
            extent,
            progress: None,
            assigner: None,
            timeline: None,
        };
        let of = &self.program.entries[entry];
        let threads = Threads {
            on_cpu: self.pool.threads(),
            scratch: (self.scratch.base(), self.scratch_stride),
            accelerators: &self.unit_threads,
            queues: [None; 2],
        };
        let mut start = 0;
        while start < of.steps.len() {
            let stop = stops(start);
            let free = (start..of.steps.len()).take_while(|&i| !stops(i)).count();
            let end = start + free.max(1);
            let view = || StepView {
                program: self.program,
                arena: self.arena.base(),
                accelerators: &self.accelerators,
                units: &self.units,
                state_at: self.states.addresses(),
                store: self.store.as_ref(),
                entry: of,
                index: start,
                n: extent.n,
                m: extent.m,
            };
            if stop {
                observe(Moment::Before, &view())?;
            }
            self.pool.run(&|index, barrier| {
                // SAFETY: the program is valid and the inputs are written. All threads of the pool take part,
                // each with its own part of the scratch. Earlier steps have ended, and no view is alive.
                unsafe { threads.walk(&walk, start..end, index, barrier) }
            });
            if stop {
                observe(Moment::After, &view())?;
            }
            start = end;
        }
        self.end(entry, rows, fault.into_inner())
    }

    /// Runs entry point `entry` as [`Engine::trace_entry`] does, without an observer, and returns the time of
    /// every step. All threads meet around each step: times include a barrier, and steps do not overlap.
    ///
    /// # Errors
    /// As [`Engine::trace_entry`].
    pub fn time_steps(
        &mut self,
        entry: usize,
        rows: &[Row],
        logit_rows: &[usize],
        seq_len: usize,
    ) -> Result<Vec<Duration>> {
        self.wait_for_weights()?;
        let extent = self.begin(entry, rows, logit_rows.iter().copied(), seq_len)?;
        let fault = OnceLock::new();
        let walk = Walk {
            bound: &self.bound[entry],
            units: &self.units,
            taken: &self.taken,
            events: &self.events,
            fault: &fault,
            extent,
            progress: None,
            assigner: None,
            timeline: None,
        };
        let threads = Threads {
            on_cpu: self.pool.threads(),
            scratch: (self.scratch.base(), self.scratch_stride),
            accelerators: &self.unit_threads,
            queues: [None; 2],
        };
        let mut times = Vec::with_capacity(walk.bound.len());
        for index in 0..walk.bound.len() {
            let start = Instant::now();
            self.pool.run(&|thread, barrier| {
                // SAFETY: the program is valid and the inputs are written. `Pool::run` returns when all
                // threads are done, so every earlier step has ended. Each thread has its own part of the
                // scratch.
                unsafe { threads.walk(&walk, index..index + 1, thread, barrier) };
            });
            times.push(start.elapsed());
        }
        self.end(entry, rows, fault.into_inner())?;
        Ok(times)
    }

    /// Index of the entry point of a kind.
    pub fn entry(&self, kind: EntryKind) -> Option<usize> {
        self.program.entries.iter().position(|e| e.kind == kind)
    }
}
