//! One call of an entry point: its steps with their addresses, and how the lanes walk them.

use crate::barrier::Barrier;
use crate::error::{Error, Result};
use crate::memory::Addr;
use crate::owned::Arrival;
use crate::program::{Code, Program};
use crate::store::Store;
use crate::timeline::{Timeline, What};
use crate::unit::{Half, Lane, Launch, StepFault, Unit};
use moec_ir::plan::{Arg, Entry, Grid, RowSpace};
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::AtomicUsize;
use std::time::Instant;

/// A step with its addresses.
struct BoundStep {
    code: Code,
    args: Range<usize>,
    rows: RowSpace,
    grid: Grid,
    barrier: bool,
    half: Option<Half>,
    /// What must have arrived of the weights ([`Arrival::wait`]).
    needs: usize,
}

/// The steps of an entry point, with the addresses of all of them in one row.
pub(crate) struct Bound {
    steps: Vec<BoundStep>,
    args: Vec<Addr>,
}

/// What a call of an entry point is about.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    pub(crate) n: usize,
    pub(crate) m: usize,
    pub(crate) seq_len: usize,
}

impl Bound {
    /// Which matrices of experts on flash a step reads.
    pub(crate) fn half(&self, step: usize) -> Option<Half> {
        self.steps.get(step)?.half
    }

    /// Number of steps.
    pub(crate) fn len(&self) -> usize {
        self.steps.len()
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

/// Turns the arguments of an entry point's steps into addresses.
pub(crate) fn bind(
    program: &Program,
    entry: &Entry,
    arena: Addr,
    states: &[Addr],
    store: &dyn Store,
) -> Result<Bound> {
    let mut bound = Bound { steps: Vec::with_capacity(entry.steps.len()), args: Vec::new() };
    for step in &entry.steps {
        let first = bound.args.len();
        for &arg in &step.args {
            let addr = match arg {
                Arg::Buffer(i, skip) => {
                    entry.buffers.get(i as usize).map(|b| arena.plus(b.offset as usize + skip as usize))
                }
                Arg::Segment(i) => store.segment(i),
                Arg::Matrices(i) => store.matrices(i),
                Arg::State(i) => states.get(i as usize).copied(),
            };
            bound.args.push(addr.ok_or_else(|| Error::Plan(format!("{arg:?} names nothing")))?);
        }
        bound.steps.push(BoundStep {
            code: program.code(step.code),
            args: first..bound.args.len(),
            rows: step.rows,
            grid: step.grid,
            barrier: step.barrier,
            half: step.args.iter().find_map(|&arg| half(program, arg)),
            needs: step.args.iter().map(|&arg| needs(store, arg)).max().unwrap_or(0),
        });
    }
    Ok(bound)
}

/// Which matrices of experts on flash an argument is about.
fn half(program: &Program, arg: Arg) -> Option<Half> {
    let Arg::Matrices(segment) = arg else { return None };
    program.paging.as_ref()?.layers.iter().enumerate().find_map(|(layer, l)| {
        let part = [l.gate_up, l.down].iter().position(|&s| s == segment)?;
        Some(Half { layer, part })
    })
}

/// What an argument needs of weights that are on their way.
fn needs(store: &dyn Store, arg: Arg) -> usize {
    match (arg, store.arrival()) {
        (Arg::Segment(i) | Arg::Matrices(i), Some(arrival)) => arrival.needs(i),
        _ => 0,
    }
}

/// One call of an entry point, as its lanes see it.
pub(crate) struct Walk<'a> {
    pub(crate) bound: &'a Bound,
    pub(crate) unit: &'a dyn Unit,
    pub(crate) taken: &'a [AtomicUsize],
    pub(crate) fault: &'a OnceLock<StepFault>,
    pub(crate) extent: Extent,
    /// What steps wait for; none if all weights are there.
    pub(crate) arrival: Option<&'a Arrival>,
    /// Where times go, and the index of the entry point.
    pub(crate) timeline: Option<(&'a Timeline, u32)>,
}

impl Walk<'_> {
    /// Walks all steps.
    ///
    /// # Safety
    /// The inputs are written, and all lanes of `barrier` walk, each as one of the lanes that
    /// [`Unit::execute`] asks for.
    pub(crate) unsafe fn all(&self, lane: Lane, barrier: &Barrier) {
        // SAFETY: the caller's promise; nothing comes before the first step.
        unsafe { self.span(0..self.bound.len(), lane, barrier) };
    }

    /// Walks some steps.
    ///
    /// # Safety
    /// As [`Walk::all`]; the steps before them have ended.
    pub(crate) unsafe fn span(&self, steps: Range<usize>, lane: Lane, barrier: &Barrier) {
        let mut ready = true;
        for i in steps {
            if self.bound.steps[i].barrier {
                barrier.wait();
            }
            // Nothing is let through after a failure, so all lanes stop at the same step. They still meet at every barrier.
            ready = ready && self.has_weights(i);
            if ready {
                // SAFETY: the barriers of the plan stand before every step that depends on an earlier one.
                unsafe { self.step(i, lane) };
            }
        }
    }

    /// Waits for the weights of a step, if it has rows. False if they do not come.
    fn has_weights(&self, i: usize) -> bool {
        let step = &self.bound.steps[i];
        let Some(arrival) = self.arrival.filter(|_| self.extent.rows(step.rows) > 0) else { return true };
        arrival.wait(step.needs).map_err(|e| self.fault.set(StepFault::Weights(e))).is_ok()
    }

    /// Executes a lane's share of step `i`. A step without rows is skipped.
    ///
    /// # Safety
    /// As [`Unit::execute`].
    pub(crate) unsafe fn step(&self, i: usize, lane: Lane) {
        let step = &self.bound.steps[i];
        let n = self.extent.rows(step.rows);
        if n == 0 {
            return;
        }
        let launch = Launch {
            code: step.code,
            args: &self.bound.args[step.args.clone()],
            grid: step.grid,
            n,
            seq_len: self.extent.seq_len,
            taken: &self.taken[i],
            step: i,
            half: step.half,
            fault: self.fault,
        };
        let begin = self.timeline.map(|_| Instant::now());
        // SAFETY: the caller's promise.
        unsafe { self.unit.execute(&launch, lane) };
        if let (Some((timeline, entry)), Some(begin)) = (self.timeline, begin) {
            timeline.lane(lane.index, What::Step { entry, step: i as u32 }, begin);
        }
    }
}
