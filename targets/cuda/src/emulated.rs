//! A unit that is emulated: its kernels are executed on the host, in a memory that the CPU sees by copies
//! alone.
//!
//! Addresses of its memory are in a range that is reserved and never touched, so they are never also
//! addresses of the host. A kernel that leaves that memory is stopped, with the line of its text.

use crate::NAME;
use crate::artifact::{self, Artifact};
use moec_ir::plan::{self, Builtin, GpuKernel};
use moec_ptx::{Argument, Buffer, Memory};
use moec_runtime::bundle::BundleReader;
use moec_runtime::bundle::program::{Code, Program};
use moec_runtime::exec::unit::{self, ComputeUnit, Launch, PoolThread, StepFault, UnknownStep};
use moec_runtime::platform::memory::{Addr, Region};
use moec_runtime::{Error, Result};
use std::sync::atomic::{AtomicU64, Ordering};

/// A GPU, emulated.
#[derive(Default)]
pub struct Emulated {
    name: String,
    artifact: Option<Artifact>,
    /// Kernels of the artifact in the plan.
    launches: Vec<GpuKernel>,
    memory: Option<Own>,
    /// Instructions that threads have executed.
    executed: AtomicU64,
}

/// The unit's own memory.
struct Own {
    /// Holds its addresses.
    reserved: Region,
    memory: Memory,
    buffer: Buffer,
}

impl Own {
    /// Offset of an address in the memory; `None` if it is outside.
    fn offset(&self, at: Addr, bytes: usize) -> Option<u64> {
        let offset = at.ptr().addr().checked_sub(self.reserved.base().ptr().addr())?;
        (offset.checked_add(bytes)? <= self.reserved.bytes()).then_some(offset as u64)
    }
}

impl Emulated {
    /// Instructions that threads have executed so far.
    pub fn executed(&self) -> u64 {
        self.executed.load(Ordering::Relaxed)
    }

    /// Launches a kernel on a step's addresses.
    fn launch(&self, index: u32, launch: &Launch<'_>) -> Result<()> {
        let missing = || Error::plan(format!("launch {index} is not of `{NAME}`"));
        let artifact = self.artifact.as_ref().ok_or_else(missing)?;
        let of = self.launches.get(index as usize).ok_or_else(missing)?;
        let program = artifact.kernels.get(index as usize).and_then(Option::as_ref).ok_or_else(missing)?;
        let own = self.memory.as_ref().ok_or_else(missing)?;
        let failed = |why: String| Error::kernel(self.name.clone(), of.symbol.clone(), why);
        let rows = u32::try_from(launch.n).unwrap_or(u32::MAX);
        let blocks = of.launch.blocks(rows).ok_or_else(|| failed(format!("no grid for {rows} rows")))?;
        if let Some(at) = launch.args.iter().position(|&at| own.offset(at, 1).is_none()) {
            return Err(failed(format!("operand {at} of step {} is outside of its memory", launch.step)));
        }
        let addresses = launch.args.iter().map(|at| Argument::U64(at.ptr().addr() as u64));
        let arguments: Vec<Argument> = addresses.chain([Argument::U32(rows)]).collect();
        let settings =
            moec_ptx::Launch { unwritten: true, ..moec_ptx::Launch::new(blocks, [of.launch.block, 1, 1]) };
        let report = program.launch(&own.memory, &arguments, &settings).map_err(|e| failed(e.to_string()))?;
        self.executed.fetch_add(report.all().threads, Ordering::Relaxed);
        Ok(())
    }
}

impl ComputeUnit for Emulated {
    fn name(&self) -> &'static str {
        NAME
    }

    fn executes(&self, builtin: Builtin) -> bool {
        matches!(builtin, Builtin::Copy { .. } | Builtin::Launch { .. })
    }

    fn load(&mut self, program: &Program, index: u32, bundle: &BundleReader) -> Result<()> {
        let plan: &plan::Plan = program;
        self.name = plan.units.get(index as usize).map_or_else(String::new, |u| u.name.clone());
        self.artifact = Some(artifact::read(bundle, plan, index)?);
        self.launches.clone_from(&plan.launches);
        Ok(())
    }

    fn take(&mut self, bytes: u64) -> Result<Option<Addr>> {
        let reserved = Region::new("the memory of an emulated GPU", bytes)?;
        let base = reserved.base();
        let artifact =
            self.artifact.as_ref().ok_or_else(|| Error::plan(format!("`{NAME}` has no kernels")))?;
        let wrong = |why: String| Error::kernel(self.name.clone(), String::new(), why);
        let mut memory = Memory::new(&artifact.module).map_err(|e| wrong(e.to_string()))?;
        let buffer = memory
            .add_at(&format!("the memory of `{}`", self.name), base.ptr().addr() as u64, reserved.bytes())
            .ok_or_else(|| wrong("its addresses are another buffer's".into()))?;
        self.memory = Some(Own { reserved, memory, buffer });
        Ok(Some(base))
    }

    unsafe fn copy(&self, from: Addr, to: Addr, bytes: usize) {
        let own = self.memory.as_ref();
        let ends = [from, to].map(|at| own.and_then(|own| Some((own, own.offset(at, bytes)?))));
        match ends {
            [None, None] => {
                // SAFETY: the caller's promise: neither end is the unit's.
                unsafe { std::ptr::copy_nonoverlapping(from.ptr(), to.ptr(), bytes) };
            }
            [None, Some((own, at))] => {
                // SAFETY: the caller guarantees that this many bytes are there, and that nothing else writes
                // them now.
                let bytes = unsafe { std::slice::from_raw_parts(from.ptr(), bytes) };
                own.memory.write(own.buffer, at, bytes);
            }
            [Some((own, at)), None] => {
                // SAFETY: the caller guarantees that this many bytes are there, and that nothing else uses
                // them now.
                let bytes = unsafe { std::slice::from_raw_parts_mut(to.ptr(), bytes) };
                own.memory.read(own.buffer, at, bytes);
            }
            [Some((own, first)), Some((_, second))] => {
                let mut between = vec![0; bytes];
                own.memory.read(own.buffer, first, &mut between);
                own.memory.write(own.buffer, second, &between);
            }
        }
    }

    unsafe fn submit(&self, launch: &Launch<'_>, _thread: PoolThread) {
        let done = match launch.code {
            Code::Builtin(Builtin::Launch { kernel }) => self.launch(kernel, launch),
            Code::Builtin(builtin) => {
                // SAFETY: the caller's promise; the unit has one thread.
                if unsafe { unit::copied(self, launch) } {
                    Ok(())
                } else {
                    return launch.fail(StepFault::Unknown(UnknownStep {
                        unit: NAME,
                        step: launch.step,
                        builtin,
                    }));
                }
            }
            Code::Kernel(_) => Err(Error::plan(format!("step {} gives `{NAME}` a CPU kernel", launch.step))),
        };
        if let Err(e) = done {
            launch.fail(StepFault::Unit(e));
        }
    }
}
