//! Trait of the executors of steps: the CPU and the other units of a target.

use crate::bundle::BundleReader;
use crate::bundle::abi::KernelFn;
use crate::bundle::program::{Code, Program};
use crate::error::{Error, Result};
use crate::exec::cpu::CpuUnit;
use crate::exec::graphs::LoadCounts;
use crate::exec::traffic::{HostReads, HostTraffic};
use crate::platform::cpu::CoreSet;
use crate::platform::memory::Addr;
use moec_ir::op::DispatchLayout;
use moec_ir::plan::{self, Builtin, Grid, Span};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A thread of the pool in one call, with its scratch.
#[derive(Clone, Copy, Debug)]
pub struct PoolThread {
    /// Index, from 0.
    pub index: usize,
    /// Number of threads.
    pub of: usize,
    /// Scratch of this thread.
    pub scratch: Addr,
}

/// Units of a program, by index, for steps of one unit that need another one.
#[derive(Clone, Copy, Default)]
pub struct Units<'a>(pub(crate) &'a [Option<Box<dyn ComputeUnit + 'a>>]);

impl<'a> Units<'a> {
    /// Unit with an index; `None` if no step names it.
    pub fn get(self, unit: usize) -> Option<&'a (dyn ComputeUnit + 'a)> {
        self.0.get(unit)?.as_deref()
    }
}

impl std::fmt::Debug for Units<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.0.iter().map(|u| u.as_ref().map(|u| u.name()))).finish()
    }
}

/// A step with its addresses, in one call of its entry point.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    /// Code that runs.
    pub code: Code,
    /// One address per argument.
    pub args: &'a [Addr],
    /// Work items.
    pub grid: Grid,
    /// Valid rows, at least 1.
    pub n: usize,
    /// Tokens of the longest sequence in this call, including those of earlier calls.
    pub seq_len: usize,
    /// Number of items that threads have taken so far; 0 when the call begins.
    pub taken: &'a AtomicUsize,
    /// Index in the entry point.
    pub step: usize,
    /// Matrices that it reads, if they are of experts on SSD.
    pub layer_part: Option<LayerPart>,
    /// Cell of the first fault.
    pub fault: &'a OnceLock<StepFault>,
    /// All units.
    pub units: Units<'a>,
}

impl Launch<'_> {
    /// Reports a fault. Only the first one counts.
    pub fn fail(&self, fault: StepFault) {
        let _ = self.fault.set(fault);
    }
}

/// Matrices of an expert that one step reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ExpertPart {
    /// Gate and up.
    GateUp,
    /// Down.
    Down,
}

impl ExpertPart {
    /// Both parts, in the order in which they are computed.
    pub const ALL: [Self; 2] = [Self::GateUp, Self::Down];

    /// Index in [`ExpertPart::ALL`].
    pub const fn index(self) -> usize {
        self as usize
    }
}

/// A part of the experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerPart {
    /// Layer, counted over those with routed experts.
    pub layer: usize,
    /// Part of each expert.
    pub part: ExpertPart,
}

/// Fault in a step.
#[derive(Debug)]
pub enum StepFault {
    /// A router chose an expert that does not exist.
    Expert(BadExpert),
    /// An accelerator failed, or a static graph was refused.
    Unit(Error),
    /// Experts could not be read.
    Disk(Error),
    /// Weights could not be loaded.
    Weights(Error),
    /// A step runs a builtin that the unit does not know.
    Unknown(UnknownStep),
}

/// A step runs a builtin that the unit does not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownStep {
    /// Name of the unit.
    pub unit: &'static str,
    /// Index in the entry point.
    pub step: usize,
    /// Builtin that it runs.
    pub builtin: Builtin,
}

impl From<UnknownStep> for Error {
    fn from(UnknownStep { unit, step, builtin }: UnknownStep) -> Self {
        Self::unknown_step(unit, step, builtin)
    }
}

/// A router kernel chose an expert that does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadExpert {
    /// Dispatch step.
    pub step: usize,
    /// The choice.
    pub expert: i32,
    /// Experts.
    pub experts: u32,
}

/// Executes the steps of a plan that name it.
///
/// Several threads walk the CPU's steps together. Every other unit has one thread of its own, which submits
/// its steps one after the other, and waits before another unit uses their results.
pub trait ComputeUnit: Send + Sync {
    /// Name, for people.
    fn name(&self) -> &'static str;

    /// Whether it executes a builtin.
    fn executes(&self, builtin: Builtin) -> bool;

    /// Loads the artifacts of the bundle that its steps name, other than kernels. Called once, before
    /// anything else. `index` is the unit's index in the plan.
    ///
    /// # Errors
    /// An artifact that is missing, changed, or that the unit cannot run.
    fn load(&mut self, _program: &Program, _index: u32, _bundle: &BundleReader) -> Result<()> {
        Ok(())
    }

    /// Allocates a memory of its own: zeroed, aligned to 64 bytes, and valid as long as the unit. Called
    /// once, before any step. `None`: the unit works in the CPU's memory.
    ///
    /// # Errors
    /// Memory refused.
    fn take(&mut self, _bytes: u64) -> Result<Option<Addr>> {
        Ok(None)
    }

    /// Whether it brings the weights to its memory by itself: another host has files of its own.
    fn has_weights(&self) -> bool {
        false
    }

    /// Whether the CPU can read its memory in place. Other memories are read by copies only.
    fn is_mapped(&self) -> bool {
        false
    }

    /// Whether its steps and copies take the time of the device that the plan is for: not if they are
    /// emulated or modelled.
    fn is_timed(&self) -> bool {
        false
    }

    /// Copies between its own memory and the CPU's, in either direction, or inside of its own, then in the
    /// order of its steps.
    ///
    /// # Safety
    /// Both ranges have `bytes` bytes, which nothing else uses now, and do not overlap.
    unsafe fn copy(&self, from: Addr, to: Addr, bytes: usize) {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(from.ptr(), to.ptr(), bytes) };
    }

    /// Zeroes a part of its own memory, after everything that was submitted.
    ///
    /// # Safety
    /// The range has `bytes` bytes, which no step uses now.
    unsafe fn zero(&self, at: Addr, bytes: usize) {
        let zeros = vec![0_u8; bytes];
        // SAFETY: the caller's promise; the zeros are as many, and the copy has read them when it returns.
        unsafe { self.copy(Addr::read_only(zeros.as_ptr()), at, bytes) };
    }

    /// Copies an expert of one of its sets of NDP command streams inside of its memory: to DIMM `to`, or
    /// striped over all of them. Steps may run meanwhile; they find the expert at its old place until
    /// [`Self::settle`].
    ///
    /// # Errors
    /// A place that does not exist, or has no room.
    fn relocate(&self, _set: u32, _expert: u32, _to: Option<u32>) -> Result<()> {
        Ok(())
    }

    /// Ends the move of an expert that [`Self::relocate`] has copied: from now on it is at its new place
    /// alone. No step of that set runs meanwhile.
    ///
    /// # Errors
    /// An expert that does not move.
    fn settle(&self, _set: u32, _expert: u32) -> Result<()> {
        Ok(())
    }

    /// Announces that a call of another entry point than the last call's begins, or one with another division
    /// of memory: [`Graphs::prepare`](crate::exec::graphs::Graphs::prepare).
    fn prepare(&self, _entry: usize, _memory: Option<u64>) {}

    /// Counts of artifacts that were loaded and freed.
    fn loads(&self) -> LoadCounts {
        LoadCounts::default()
    }

    /// Cores that the thread which submits its steps is bound to; `None`: any.
    fn cores(&self) -> Option<CoreSet> {
        None
    }

    /// Messages to the other host that the unit belongs to; `None`: it is of this host.
    fn traffic(&self) -> Option<HostTraffic> {
        None
    }

    /// Experts that the other host which the unit belongs to has read from its disk; `None`: it has none there, or is
    /// this host. Asks the host: not for every token.
    fn reads(&self) -> Option<HostReads> {
        None
    }

    /// Does a thread's share of a step, or begins it. Every thread of the unit calls this once per step; the
    /// shares are disjoint and cover the step.
    ///
    /// # Safety
    /// The addresses are those of a [`Program`]; they are valid, and no reference points into them. Every
    /// step that this one depends on has ended on all threads. Threads of one call have distinct indexes
    /// below the common `of`, each with its own scratch.
    unsafe fn submit(&self, launch: &Launch<'_>, thread: PoolThread);

    /// Begins what was submitted so far: the thread that submits will wait for another unit.
    fn begin(&self) {}

    /// Waits until all submitted work has ended.
    fn wait(&self, _fault: &OnceLock<StepFault>) {}
}

/// Refuses a program with a step that its unit does not execute.
///
/// # Errors
/// [`Error::Machine`], also for a unit without an implementation.
pub(crate) fn check(units: &[Option<Box<dyn ComputeUnit + '_>>], program: &Program) -> Result<()> {
    for entry in &program.entries {
        for (step, s) in entry.steps.iter().enumerate() {
            let unit = units.get(s.unit as usize).and_then(Option::as_ref).ok_or_else(|| {
                let name = program.units.get(s.unit as usize).map_or("?", |u| &u.name);
                Error::no_unit(name)
            })?;
            if let plan::Code::Builtin(builtin) = s.code
                && !unit.executes(builtin)
            {
                return Err(UnknownStep { unit: unit.name(), step, builtin }.into());
            }
        }
    }
    Ok(())
}

/// Runs a thread's share of a kernel.
///
/// # Safety
/// As [`ComputeUnit::submit`].
pub unsafe fn kernel(f: KernelFn, launch: &Launch<'_>, thread: PoolThread) {
    // SAFETY: the caller's promise; nothing else uses the ranges.
    let call = |begin: usize, end: usize| unsafe { kernel_items(f, launch, thread, begin, end) };
    match launch.grid {
        Grid::One => {
            if thread.index == 0 {
                call(0, 1);
            }
        }
        Grid::Tiles { rows, tiles } => {
            let items = launch.n.div_ceil(rows.max(1) as usize) * tiles as usize;
            share(launch.taken, items, EQUAL_COST_DIVISOR, thread, call);
        }
        Grid::Experts { table, tiles } => {
            let Some(table) = launch.args.get(table as usize) else { return };
            // SAFETY: the argument is a buffer of at least a word (verified), aligned to four bytes, and
            // the step that writes it has ended.
            let active = unsafe { table.of::<i32>().read() };
            let items = usize::try_from(active).unwrap_or(0) * tiles as usize;
            share(launch.taken, items, UNEVEN, thread, call);
        }
        // The items of clusters depend on each other: threads share them by a `ClusterQueue` or a pager.
        Grid::Clusters { .. } => {}
    }
}

/// Items per thread up to which all threads get equal shares: dynamic shares would cost more than they
/// balance.
const FEW: usize = 8;

/// Divisor of an even share that gives the fewest items that a thread takes at once.
const LEAST: usize = 32;

/// Divisors of an even share of the remaining items, which give the number that a thread takes: for items of
/// equal cost, and for experts, which come with the largest first.
const EQUAL_COST_DIVISOR: usize = 2;
const UNEVEN: usize = 8;

/// Calls `call` with this thread's ranges of `items`.
///
/// Items have different costs (experts have different numbers of rows), and so have cores (little or busy
/// ones). So each thread repeatedly takes a part of the remaining items (guided self-scheduling,
/// Polychronopoulos and Kuck 1987). Large ranges come first, which keeps neighbours together; small ones come
/// last, so no thread waits long.
fn share(taken: &AtomicUsize, items: usize, part: usize, thread: PoolThread, call: impl Fn(usize, usize)) {
    if items <= thread.of * FEW || thread.of == 1 {
        return call(items * thread.index / thread.of, items * (thread.index + 1) / thread.of);
    }
    let least = (items / (thread.of * LEAST)).max(1);
    let end = |begin: usize| begin + ((items - begin) / (thread.of * part)).max(least).min(items - begin);
    let next = |begin: usize| (begin < items).then(|| end(begin));
    while let Ok(begin) = taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next) {
        call(begin, end(begin));
    }
}

/// Runs some items of a kernel.
///
/// # Safety
/// As [`ComputeUnit::submit`]; no other thread runs these items.
pub(crate) unsafe fn kernel_items(
    f: KernelFn,
    launch: &Launch<'_>,
    thread: PoolThread,
    begin: usize,
    end: usize,
) {
    if begin < end {
        // SAFETY: the kernel is the step's own, and its addresses are the step's arguments (`Addr` is
        // transparent over a pointer). The scratch is this thread's.
        unsafe {
            f(launch.args.as_ptr().cast(), launch.n as i64, begin as i64, end as i64, thread.scratch.ptr());
        }
    }
}

/// Whether a builtin computes on the values of one memory alone, as a kernel does: groups of chosen experts, and
/// angles.
pub const fn computes(builtin: Builtin) -> bool {
    matches!(builtin, Builtin::RopeAngles { .. } | Builtin::Dispatch { candidates: None, .. })
}

/// Executes such a builtin ([`computes`]) as the CPU does. True if the step is one.
///
/// # Safety
/// As [`ComputeUnit::submit`].
pub unsafe fn computed(launch: &Launch<'_>, thread: PoolThread) -> bool {
    let Code::Builtin(builtin) = launch.code else { return false };
    if computes(builtin) {
        // SAFETY: the caller's promise.
        unsafe { CpuUnit::default().submit(launch, thread) };
    }
    computes(builtin)
}

/// Executes a `copy` step by [`ComputeUnit::copy`]. True if the step was one.
///
/// # Safety
/// As [`ComputeUnit::submit`], on one thread.
pub unsafe fn copied(unit: &dyn ComputeUnit, launch: &Launch<'_>) -> bool {
    let Code::Builtin(Builtin::Copy { words, span }) = launch.code else { return false };
    let row = words as usize * 4;
    let (from, to, skip, bytes) = match (span, launch.args) {
        (Span::Rows, &[from, to]) => (from, to, 0, launch.n * row),
        (Span::Whole, &[from, to]) => (from, to, 0, row),
        (Span::Slots { rows, k, experts }, &[table, from, to]) => {
            let layout = DispatchLayout { rows: rows as usize, k: k as usize, experts: experts as usize };
            // SAFETY: the verifier has found the whole table there, in the CPU's memory; the step that writes
            // it has ended.
            let table = unsafe { std::slice::from_raw_parts(table.of::<i32>(), layout.words()) };
            // Slots are inside of the buffer even if the table is wrong.
            let word = |i: usize, most: usize| usize::try_from(table[i]).unwrap_or(0).min(most);
            let active = word(0, layout.experts);
            let most = layout.rows * layout.k;
            let (first, end) = (word(layout.start(), most), word(layout.start() + active, most));
            let slots = if active > 0 { end.saturating_sub(first) } else { 0 };
            (from, to, first * row, slots * row)
        }
        _ => return false,
    };
    if bytes > 0 {
        // SAFETY: the verifier has found `bytes` bytes at both ends, which are in different memories.
        unsafe { unit.copy(from.plus(skip), to.plus(skip), bytes) };
    }
    true
}
