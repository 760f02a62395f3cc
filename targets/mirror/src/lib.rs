//! A modelled unit with a memory of its own: what a GPU is to a plan, on a machine that has none.
//!
//! It executes the CPU's kernels on its own copies of weights, states and values. So its results are the
//! CPU's to the bit, and mistakes of a plan about memories are found. An address outside of the unit's memory
//! is refused before a kernel runs, and all data in it has come by a copy.
//!
//! Invariant: nothing of the compiler or the runtime names this crate, but its row in the table of backends.

use moec_backend::{Backend, Flaw};
use moec_device::{Device, DeviceUnit};
use moec_ir::Op;
use moec_ir::op::Effect;
use moec_ir::plan::Builtin;
use moec_runtime::Error;
use moec_runtime::bundle::program::Code;
use moec_runtime::exec::accelerators::Executor;
use moec_runtime::exec::unit::{self, ComputeUnit, Launch, PoolThread, StepFault, UnknownStep};
use moec_runtime::platform::memory::{Addr, Region};
use std::sync::atomic::{AtomicU64, Ordering};

/// Name of the backend.
const NAME: &str = "mirror";

/// The backend of modelled units.
#[derive(Clone, Copy, Debug)]
pub struct Mirror;

impl Backend for Mirror {
    fn name(&self) -> &'static str {
        NAME
    }

    fn is_modelled(&self) -> bool {
        true
    }

    fn check(&self, device: &Device, unit: &DeviceUnit) -> Result<(), Flaw> {
        if device.memory_of(unit).is_none() {
            return Err(Flaw::new("unit.memory", "a unit of the backend `mirror` has a memory of its own"));
        }
        Ok(())
    }

    /// Everything that is a kernel, but for operators that update a state: tests of units that run no recurrent
    /// layers need one. The CPU computes the router's choice and the angles of positions.
    fn takes(&self, op: &Op) -> bool {
        !matches!(
            op,
            Op::Dispatch { .. } | Op::RequestExperts { .. } | Op::LimitCapacity(_) | Op::RopeAngles { .. }
        ) && op.effect() != Effect::Updates
    }

    fn host(&self, _unit: &str) -> Option<Executor> {
        Some(Executor::Unit(Box::new(Modelled::default())))
    }
}

/// A unit that is modelled.
#[derive(Debug, Default)]
pub struct Modelled {
    memory: Option<Region>,
    moved: AtomicU64,
}

impl Modelled {
    /// Bytes that have crossed the link, in both directions.
    pub fn moved(&self) -> u64 {
        self.moved.load(Ordering::Relaxed)
    }

    /// Whether an address is in the unit's own memory.
    fn holds(&self, at: Addr) -> bool {
        self.memory.as_ref().is_some_and(|memory| {
            let (first, at) = (memory.base().ptr().addr(), at.ptr().addr());
            (first..first + memory.bytes()).contains(&at)
        })
    }
}

impl ComputeUnit for Modelled {
    fn name(&self) -> &'static str {
        NAME
    }

    fn executes(&self, builtin: Builtin) -> bool {
        matches!(builtin, Builtin::Copy { .. }) || unit::computes(builtin)
    }

    fn take(&mut self, bytes: u64) -> Result<Option<Addr>, Error> {
        let region = Region::new("the memory of `mirror`", bytes)?;
        let base = region.base();
        self.memory = Some(region);
        Ok(Some(base))
    }

    fn is_mapped(&self) -> bool {
        true
    }

    unsafe fn copy(&self, from: Addr, to: Addr, bytes: usize) {
        self.moved.fetch_add(bytes as u64, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(from.ptr(), to.ptr(), bytes) };
    }

    unsafe fn submit(&self, launch: &Launch<'_>, thread: PoolThread) {
        match launch.code {
            Code::Kernel(f) => {
                if launch.args.iter().all(|&at| self.holds(at)) && self.holds(thread.scratch) {
                    // SAFETY: the caller's promise.
                    unsafe { unit::kernel(f, launch, thread) };
                } else {
                    let why = format!("step {} reads past the memory of `{NAME}`", launch.step);
                    launch.fail(StepFault::Unit(Error::plan(why)));
                }
            }
            Code::Builtin(builtin) => {
                // SAFETY: the caller's promise; the unit has one thread.
                let executed = unsafe { unit::copied(self, launch) || unit::computed(launch, thread) };
                if !executed {
                    launch.fail(StepFault::Unknown(UnknownStep { unit: NAME, step: launch.step, builtin }));
                }
            }
        }
    }
}
