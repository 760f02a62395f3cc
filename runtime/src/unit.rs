//! What executes steps: the CPU today, other units of a target behind the same trait.

use crate::abi::KernelFn;
use crate::builtin;
use crate::error::{Error, Result};
use crate::memory::Addr;
use crate::program::{Code, Program};
use moec_ir::op::DispatchLayout;
use moec_ir::plan::{self, Builtin, Grid};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// One thread of those that walk the steps.
#[derive(Clone, Copy, Debug)]
pub struct Lane {
    /// Which, from 0.
    pub index: usize,
    /// Of how many.
    pub of: usize,
    /// Scratch of this thread.
    pub scratch: Addr,
}

/// A step with its addresses, in one call of its entry point.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    /// What runs.
    pub code: Code,
    /// One address per argument.
    pub args: &'a [Addr],
    /// Work items.
    pub grid: Grid,
    /// Valid rows, at least 1.
    pub n: usize,
    /// Tokens of the longest sequence in this call, those of earlier calls included.
    pub seq_len: usize,
    /// Items that lanes have taken so far; 0 when the call begins.
    pub taken: &'a AtomicUsize,
    /// Index in the entry point.
    pub step: usize,
    /// Which matrices it reads, if they are of experts on flash.
    pub half: Option<Half>,
    /// Receives what went wrong first.
    pub fault: &'a OnceLock<StepFault>,
}

impl Launch<'_> {
    /// Says what went wrong. Only the first one counts.
    pub fn fail(&self, fault: StepFault) {
        let _ = self.fault.set(fault);
    }
}

/// Matrices of the experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Half {
    /// Layer, counted over those with routed experts.
    pub layer: usize,
    /// 0: gate and up; 1: down.
    pub part: usize,
}

/// What went wrong in a step.
#[derive(Debug)]
pub enum StepFault {
    /// A router chose an expert that does not exist.
    Expert(BadExpert),
    /// A static graph was refused.
    Graph(Error),
    /// Experts could not be read.
    Flash(Error),
    /// Weights did not come.
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
    /// What it runs.
    pub builtin: Builtin,
}

impl From<UnknownStep> for Error {
    fn from(UnknownStep { unit, step, builtin }: UnknownStep) -> Self {
        Self::UnknownStep { unit, step, builtin }
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

/// Executes steps.
pub trait Unit: Send + Sync {
    /// Name in the plan's table of units.
    fn name(&self) -> &'static str;

    /// Whether it executes a builtin. Kernels it always does.
    fn executes(&self, builtin: Builtin) -> bool;

    /// Does a lane's share of a step. Every lane of a call comes here once per step; the shares are
    /// disjoint and together the whole.
    ///
    /// # Safety
    /// The addresses are those of a program of a [`Program`], alive and with no reference into them; every step that this one depends on has ended on all lanes; lanes of
    /// one call have distinct indexes below the common `of`, each with its own scratch.
    unsafe fn execute(&self, launch: &Launch<'_>, lane: Lane);
}

/// Refuses a program with a step that the unit does not execute.
///
/// # Errors
/// [`Error::UnknownStep`].
pub(crate) fn check(unit: &dyn Unit, program: &Program) -> Result<()> {
    for entry in &program.entries {
        for (step, s) in entry.steps.iter().enumerate() {
            if let plan::Code::Builtin(builtin) = s.code
                && !unit.executes(builtin)
            {
                return Err(UnknownStep { unit: unit.name(), step, builtin }.into());
            }
        }
    }
    Ok(())
}

/// The processor that runs the program.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cpu;

impl Unit for Cpu {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn executes(&self, builtin: Builtin) -> bool {
        match builtin {
            Builtin::RopeAngles { .. } | Builtin::Dispatch { .. } | Builtin::Fetch { .. } => true,
            Builtin::Admit { .. } | Builtin::Experts { .. } | Builtin::Part { .. } => false,
        }
    }

    unsafe fn execute(&self, launch: &Launch<'_>, lane: Lane) {
        match launch.code {
            // SAFETY: the caller's promise is the one that these ask for.
            Code::Kernel(f) => unsafe { kernel(f, launch, lane) },
            Code::Builtin(b) => {
                if lane.index == 0 {
                    // SAFETY: as above; this is the one lane that runs it.
                    unsafe { run_builtin(b, launch) };
                }
            }
        }
    }
}

/// Runs a lane's share of a kernel.
///
/// # Safety
/// As [`Unit::execute`].
unsafe fn kernel(f: KernelFn, launch: &Launch<'_>, lane: Lane) {
    // SAFETY: the caller's promise; the ranges are nobody else's.
    let call = |begin: usize, end: usize| unsafe { kernel_items(f, launch, lane, begin, end) };
    match launch.grid {
        Grid::One => {
            if lane.index == 0 {
                call(0, 1);
            }
        }
        Grid::Tiles { rows, tiles } => {
            let items = launch.n.div_ceil(rows.max(1) as usize) * tiles as usize;
            share(launch.taken, items, ALIKE, lane, call);
        }
        Grid::Experts { table, tiles } => {
            let Some(table) = launch.args.get(table as usize) else { return };
            // SAFETY: the argument is a buffer of at least a word (verified), aligned to four bytes, and
            // the step that writes it has ended.
            let active = unsafe { table.of::<i32>().read() };
            let items = usize::try_from(active).unwrap_or(0) * tiles as usize;
            share(launch.taken, items, UNEVEN, lane, call);
        }
    }
}

/// Items per lane up to which all lanes get equal shares: taking turns would cost more than it evens out.
const FEW: usize = 8;

/// The fewest items that a lane takes at once: one in so many of an even share.
const LEAST: usize = 32;

/// Of what is left, a lane takes one in so many of an even share: of items that are alike, and of those of experts, which
/// come with the largest first.
const ALIKE: usize = 2;
const UNEVEN: usize = 8;

/// Calls `call` with this lane's ranges of `items`.
///
/// Neither are items equal (experts have their own numbers of rows) nor are cores (little ones, ones that something else
/// runs on). So lanes come back for more, and take a part of what is left (guided self-scheduling, Polychronopoulos and
/// Kuck 1987): large ranges first, which keeps neighbours together, and small ones at the end, where nobody then waits long.
fn share(taken: &AtomicUsize, items: usize, part: usize, lane: Lane, call: impl Fn(usize, usize)) {
    if items <= lane.of * FEW || lane.of == 1 {
        return call(items * lane.index / lane.of, items * (lane.index + 1) / lane.of);
    }
    let least = (items / (lane.of * LEAST)).max(1);
    let end = |begin: usize| begin + ((items - begin) / (lane.of * part)).max(least).min(items - begin);
    let next = |begin: usize| (begin < items).then(|| end(begin));
    while let Ok(begin) = taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next) {
        call(begin, end(begin));
    }
}

/// Runs some items of a kernel.
///
/// # Safety
/// As [`Unit::execute`]; nobody else runs these items.
pub(crate) unsafe fn kernel_items(f: KernelFn, launch: &Launch<'_>, lane: Lane, begin: usize, end: usize) {
    if begin < end {
        // SAFETY: the kernel is the step's own, its addresses are the step's arguments (`Addr` is transparent over a
        // pointer), and the scratch is this lane's.
        unsafe {
            f(launch.args.as_ptr().cast(), launch.n as i64, begin as i64, end as i64, lane.scratch.ptr());
        }
    }
}

/// Runs a builtin on the calling thread.
///
/// # Safety
/// As [`Unit::execute`], and no other lane runs it.
unsafe fn run_builtin(b: Builtin, launch: &Launch<'_>) {
    let (args, n) = (launch.args, launch.n);
    match (b, args) {
        (Builtin::RopeAngles { half, scale, long }, [pos, freqs @ .., out]) => {
            let half = half as usize;
            // SAFETY: the verifier has found `n` positions, `half` frequencies in each table and
            // `n · 2 · half` results there, aligned, and the results apart from the others.
            let (pos, out) = unsafe {
                (
                    std::slice::from_raw_parts(pos.of::<i32>(), n),
                    std::slice::from_raw_parts_mut(out.of::<f32>(), n * 2 * half),
                )
            };
            // SAFETY: as above.
            let table = |at: &Addr| unsafe { std::slice::from_raw_parts(at.of::<f32>(), half) };
            for (&pos, row) in pos.iter().zip(out.chunks_exact_mut((2 * half).max(1))) {
                let length = launch.seq_len.max(usize::try_from(pos).map_or(0, |p| p + 1));
                let (freq, scale) = match (long, freqs) {
                    (Some((after, long_scale)), [_, long]) if length > after as usize => (long, long_scale),
                    (_, [short, ..]) => (short, scale),
                    (_, []) => return,
                };
                builtin::rope_angles(pos, table(freq), f32::from_bits(scale), row);
            }
        }
        (Builtin::Dispatch { rows, k, experts, partial }, [ids, out]) => {
            let layout = DispatchLayout { rows: rows as usize, k: k as usize, experts: experts as usize };
            // SAFETY: the verifier has found the ids of all rows and the whole table there, aligned and apart.
            let (ids, out) = unsafe {
                (
                    std::slice::from_raw_parts(ids.of::<i32>(), layout.rows * layout.k),
                    std::slice::from_raw_parts_mut(out.of::<i32>(), layout.words()),
                )
            };
            if let Err(expert) = builtin::dispatch(layout, n, partial, ids, out) {
                launch.fail(StepFault::Expert(BadExpert { step: launch.step, expert, experts }));
            }
        }
        // All weights are in memory: there is nothing to fetch.
        (Builtin::Fetch { .. }, _) => {}
        (builtin, _) => {
            launch.fail(StepFault::Unknown(UnknownStep { unit: Cpu.name(), step: launch.step, builtin }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Region;

    fn launch<'a>(
        b: Builtin,
        args: &'a [Addr],
        n: usize,
        seq_len: usize,
        taken: &'a AtomicUsize,
    ) -> Launch<'a> {
        static FAULT: OnceLock<StepFault> = OnceLock::new();
        Launch {
            code: Code::Builtin(b),
            args,
            grid: Grid::One,
            n,
            seq_len,
            taken,
            step: 0,
            half: None,
            fault: &FAULT,
        }
    }

    /// What a unit says that it executes is what it does execute; of the rest it says so.
    #[test]
    fn what_the_processor_does_not_know_is_a_fault() {
        let region = Region::new("test", 512).unwrap();
        let strides = [0; plan::FETCHED];
        for (builtin, known) in [
            (Builtin::RopeAngles { half: 1, scale: 0, long: None }, true),
            (Builtin::Dispatch { rows: 1, k: 1, experts: 1, partial: false }, true),
            (Builtin::Fetch { layer: 0, rows: 1, k: 1, strides }, true),
            (Builtin::Admit { set: 0, k: 1, channels: 1 }, false),
            (Builtin::Experts { set: 0, rows: 1, k: 1, hidden: 1 }, false),
            (Builtin::Part { part: 0 }, false),
        ] {
            let (taken, fault) = (AtomicUsize::new(0), OnceLock::new());
            let args = [0, 1, 2, 3].map(|i| region.base().plus(128 * i));
            let args = match builtin {
                Builtin::RopeAngles { .. } => &args[..3],
                Builtin::Dispatch { .. } => &args[..2],
                _ => &args[..],
            };
            let launch = Launch { step: 7, fault: &fault, ..launch(builtin, args, 1, 1, &taken) };
            // SAFETY: each argument has more room than one row needs; this is the only lane.
            unsafe { Cpu.execute(&launch, Lane { index: 0, of: 1, scratch: region.base() }) };
            let unknown =
                matches!(fault.get(), Some(StepFault::Unknown(f)) if f.step == 7 && f.builtin == builtin);
            assert_eq!((Cpu.executes(builtin), unknown), (known, !known), "{builtin}");
        }
    }

    #[test]
    fn long_sequences_use_the_long_frequencies() {
        let region = Region::new("test", 512).unwrap();
        let at = |i: usize| region.base().plus(64 * i);
        // SAFETY: the region has room for all of them, and nothing else uses it.
        unsafe {
            at(0).of::<i32>().write(2);
            at(1).of::<f32>().write(1.0);
            at(2).of::<f32>().write(0.25);
        }
        let angles = |scale: f32, long: Option<(u32, u32)>, args: &[Addr], seq_len| {
            let b = Builtin::RopeAngles { half: 1, scale: scale.to_bits(), long };
            let taken = AtomicUsize::new(0);
            // SAFETY: one position, one frequency each and two results are there; this is the only lane.
            unsafe {
                let lane = Lane { index: 0, of: 1, scratch: at(7) };
                Cpu.execute(&launch(b, args, 1, seq_len, &taken), lane);
                [at(3).of::<f32>().read(), at(3).of::<f32>().add(1).read()]
            }
        };
        let switch = Some((10, 3f32.to_bits()));
        let all = [at(0), at(1), at(2), at(3)];
        assert_eq!(angles(2.0, None, &[at(0), at(1), at(3)], 99), [2f32.cos() * 2.0, 2f32.sin() * 2.0]);
        assert_eq!(angles(2.0, switch, &all, 10), [2f32.cos() * 2.0, 2f32.sin() * 2.0]);
        assert_eq!(angles(2.0, switch, &all, 11), [0.5f32.cos() * 3.0, 0.5f32.sin() * 3.0]);
    }

    /// Writes its items into the buffer: how often each was called.
    unsafe extern "C" fn count(args: *const *mut u8, n: i64, begin: i64, end: i64, _scratch: *mut u8) {
        assert!(n == 5 && begin < end);
        for i in begin..end {
            // SAFETY: the test's table has a word per item behind its first.
            unsafe { *Addr::read_only(*args).of::<i32>().add(1 + i as usize) += 1 };
        }
    }

    #[test]
    fn lanes_share_all_items_and_none_twice() {
        let grids = [
            (Grid::One, 1),
            (Grid::Tiles { rows: 2, tiles: 7 }, 21),
            (Grid::Tiles { rows: 16, tiles: 1 }, 1),
            (Grid::Tiles { rows: 1, tiles: 0 }, 0),
            (Grid::Experts { table: 0, tiles: 9 }, 27),
        ];
        for (grid, items) in grids {
            for of in [1, 2, 3, 40] {
                let region = Region::new("test", 400).unwrap();
                let (taken, fault) = (AtomicUsize::new(0), OnceLock::new());
                let args = [region.base()];
                // SAFETY: the region is the test's alone.
                unsafe { args[0].of::<i32>().write(3) };
                let code = Code::Kernel(count);
                let launch = Launch {
                    code,
                    args: &args,
                    grid,
                    n: 5,
                    seq_len: 5,
                    taken: &taken,
                    step: 0,
                    half: None,
                    fault: &fault,
                };
                for index in 0..of {
                    // SAFETY: the lanes come one after the other.
                    unsafe { Cpu.execute(&launch, Lane { index, of, scratch: region.base() }) };
                }
                // SAFETY: as above.
                let seen = unsafe { std::slice::from_raw_parts(args[0].of::<i32>().add(1), 99) };
                let expected: Vec<i32> = (0..99).map(|i| i32::from(i < items)).collect();
                assert_eq!(seen, expected, "{grid:?} on {of}");
            }
        }
    }
}
