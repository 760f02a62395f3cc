//! The steps of one unit, in a process that has no other: the part of a program that another host executes.
//!
//! The first host orders every step and brings what it reads ([`UnitSteps::write`]); it takes what the unit
//! computes from the same places ([`UnitSteps::read`]). Weights are read here, from this host's files: under a budget
//! experts when a step needs them, by a pager of this host's own. Places are offsets into the unit's memory, whose
//! order follows from the plan alone.

#![expect(clippy::cast_possible_truncation, reason = "sizes of memory that was allocated")]

use crate::bundle::BundleFiles;
use crate::bundle::program::{Code, Program};
use crate::error::{Error, Result};
use crate::exec::accelerators::{self, AcceleratorMemories};
use crate::exec::cpu::CpuUnit;
use crate::exec::traffic::HostReads;
use crate::exec::unit::{self, ComputeUnit, Launch, LayerPart, PoolThread, StepFault, Units};
use crate::offload::paging::{self, Experts, Paging};
use crate::platform::cpu;
use crate::platform::memory::{Addr, Region};
use crate::sync::pool::{Binding, Pool};
use crate::weights::store::CheckLevel;
use moec_ir::op::DispatchLayout;
use moec_ir::plan::{ALIGN, Arg, Builtin, Step};
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::AtomicUsize;

/// The memory of the unit, which executes nothing by itself.
#[derive(Debug, Default)]
struct HostMemory(Option<Region>);

impl ComputeUnit for HostMemory {
    fn name(&self) -> &'static str {
        "host"
    }

    fn executes(&self, _builtin: Builtin) -> bool {
        false
    }

    fn take(&mut self, bytes: u64) -> Result<Option<Addr>> {
        let region = Region::in_huge_pages("the memory of a host", bytes)?;
        let base = region.base();
        self.0 = Some(region);
        Ok(Some(base))
    }

    unsafe fn submit(&self, _launch: &Launch<'_>, _thread: PoolThread) {}
}

/// The steps of a unit with their addresses, and the threads that execute them.
pub struct UnitSteps<'p> {
    program: &'p Program,
    unit: u32,
    units: Vec<Option<Box<dyn ComputeUnit + 'p>>>,
    memories: AcceleratorMemories,
    /// Executor of the steps.
    cpu: CpuUnit<'p>,
    /// Experts on this host's disk.
    experts: Option<Experts>,
    base: Addr,
    bytes: usize,
    scratch: Region,
    stride: usize,
    pool: Pool,
}

impl<'p> UnitSteps<'p> {
    /// Checks this machine and the files of the unit's weights, allocates its memory and reads them.
    ///
    /// # Errors
    /// A unit that the plan lacks, or that works in the CPU's memory; a machine without the target's features;
    /// memory or threads refused; weights that cannot be read.
    pub fn open(
        program: &'p Program,
        unit: u32,
        bundle: &Path,
        threads: Option<usize>,
        check: CheckLevel,
    ) -> Result<Self> {
        cpu::check(&program.target)?;
        let memory = program.units.get(unit as usize).map(|u| u.memory).filter(|&m| m > 0);
        let memory = memory.ok_or_else(|| Error::plan(format!("unit {unit} has no memory of its own")))?;
        let files = BundleFiles::open(program, bundle)?;
        let mut units: Vec<Option<Box<dyn ComputeUnit + 'p>>> = program.units.iter().map(|_| None).collect();
        units[unit as usize] = Some(Box::new(HostMemory::default()));
        let paging = program.paging_of(memory);
        let threads = paging::threads(paging, threads, None)?;
        let experts =
            paging.map(|_| Experts::open(program, memory, &files, &Paging::from_env()?)).transpose()?;
        let stays = |segment: u32| experts.as_ref().is_some_and(|e| e.layer_part(segment).is_some());
        let memories = accelerators::open(program, &mut units, Some(&files), check, &stays)?;
        let base = memories.arenas.get(memory as usize - 1).copied().flatten();
        let base = base.ok_or_else(|| Error::plan("a memory without an arena"))?;
        let bytes = memories.bytes.get(memory as usize - 1).copied().unwrap_or(0) as usize;
        let stride = program.scratch_bytes.next_multiple_of(ALIGN) + ALIGN;
        let scratch = Region::new("scratch", stride * threads as u64)?;
        let (stride, pool) = (stride as usize, Pool::new(threads, 0, Binding::None)?);
        let cpu = CpuUnit::paged(experts.as_ref().map(|e| e.pager().clone()));
        Ok(Self { program, unit, units, memories, cpu, experts, base, bytes, scratch, stride, pool })
    }

    /// Experts that were read from this host's disk so far; `None` if none stay there.
    pub fn reads(&self) -> Option<HostReads> {
        let report = self.experts.as_ref()?.pager().report();
        let (bytes, reads) = (report.disk.bytes, report.disk.reads);
        Some(HostReads { bytes, reads, hits: report.hits, misses: report.misses })
    }

    /// The bytes at a place of the unit's memory.
    ///
    /// # Errors
    /// A place outside of it.
    pub fn read(&mut self, offset: u64, bytes: u64) -> Result<&[u8]> {
        let at = self.place(offset, bytes)?;
        // SAFETY: inside of the unit's memory, which was zeroed; `&mut self` excludes its threads.
        Ok(unsafe { std::slice::from_raw_parts(at.ptr(), bytes as usize) })
    }

    /// Writes bytes to a place of the unit's memory.
    ///
    /// # Errors
    /// A place outside of it.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        let at = self.place(offset, data.len() as u64)?;
        // SAFETY: inside of the unit's memory; `&mut self` excludes its threads, and the data are elsewhere.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), at.ptr(), data.len()) };
        Ok(())
    }

    /// Zeroes a place of the unit's memory.
    ///
    /// # Errors
    /// A place outside of it.
    pub fn zero(&mut self, offset: u64, bytes: u64) -> Result<()> {
        let at = self.place(offset, bytes)?;
        // SAFETY: as in `write`.
        unsafe { std::ptr::write_bytes(at.ptr(), 0, bytes as usize) };
        Ok(())
    }

    /// Copies bytes of the unit's memory to another place of it.
    ///
    /// # Errors
    /// A place outside of it.
    pub fn copy(&mut self, from: u64, to: u64, bytes: u64) -> Result<()> {
        let (from, to) = (self.place(from, bytes)?, self.place(to, bytes)?);
        // SAFETY: both are inside of the unit's memory; `&mut self` excludes its threads.
        unsafe { std::ptr::copy(from.ptr(), to.ptr(), bytes as usize) };
        Ok(())
    }

    fn place(&self, offset: u64, bytes: u64) -> Result<Addr> {
        let end = offset.checked_add(bytes).filter(|&end| end <= self.bytes as u64);
        end.ok_or_else(|| Error::plan(format!("{bytes} bytes at {offset} of a memory of {}", self.bytes)))?;
        Ok(self.base.plus(offset as usize))
    }

    /// The address of an argument of a step of the unit.
    fn address(&self, entry: u32, arg: Arg) -> Option<Addr> {
        let memory = self.program.memory_of(self.unit) as usize - 1;
        match arg {
            Arg::Buffer(i, skip) => {
                let buffer = self.program.entries.get(entry as usize)?.buffers.get(i as usize)?;
                let arena = self.memories.arenas.get((buffer.memory as usize).checked_sub(1)?)?;
                Some((*arena)?.plus(buffer.offset as usize + skip as usize))
            }
            Arg::Segment(i) | Arg::Matrices(i) => {
                let on_disk = self.experts.as_ref().and_then(|e| e.matrices(i));
                on_disk.or_else(|| self.memories.residents.get(memory)?.of(i))
            }
            Arg::State(i) => self.memories.states.get(i as usize).copied().flatten(),
        }
    }

    /// The experts on disk that a step reads, if it reads some.
    ///
    /// # Errors
    /// Experts without a dispatch table of theirs.
    fn layer_part(&self, entry: u32, step: &Step) -> Result<Option<LayerPart>> {
        let read = |arg: &Arg| match *arg {
            Arg::Matrices(i) => self.experts.as_ref()?.layer_part(i),
            _ => None,
        };
        let Some(found) = step.args.iter().find_map(read) else { return Ok(None) };
        let table = || {
            let Arg::Buffer(table, 0) = *step.args.get(step.grid.table()? as usize)? else { return None };
            let buffer = self.program.entries.get(entry as usize)?.buffers.get(table as usize)?;
            let layer = self.program.paging_of(self.program.memory_of(self.unit))?.layers.get(found.layer)?;
            let layout = DispatchLayout { rows: 0, k: 0, experts: layer.experts as usize };
            (buffer.bytes >= layout.words() as u64 * 4).then_some(found)
        };
        table().map(Some).ok_or_else(|| Error::plan("experts on disk without a dispatch table of theirs"))
    }

    /// Executes a step of the unit with `n` rows, on all threads.
    ///
    /// # Errors
    /// A step that is not the unit's, or does not compute; more rows than the entry point takes; a router's
    /// choice that is not an expert; experts that cannot be read.
    pub fn execute(&mut self, entry: u32, step: u32, n: usize, seq_len: usize) -> Result<()> {
        let wrong =
            || Error::plan(format!("entry point {entry} has no step {step} of {n} rows for this host"));
        let of = self.program.entries.get(entry as usize).ok_or_else(wrong)?;
        let found = of.steps.get(step as usize).filter(|s| s.unit == self.unit).ok_or_else(wrong)?;
        let code = self.program.code(found.code);
        let computes = match code {
            Code::Kernel(_) => true,
            Code::Builtin(builtin) => unit::computes(builtin),
        };
        if !computes || n == 0 || n > of.kind.rows() {
            return Err(wrong());
        }
        let args = found.args.iter().map(|&arg| self.address(entry, arg)).collect::<Option<Vec<_>>>();
        let args = args.ok_or_else(wrong)?;
        let layer_part = self.layer_part(entry, found)?;
        let (taken, fault) = (AtomicUsize::new(0), OnceLock::<StepFault>::new());
        let launch = Launch {
            code,
            args: &args,
            grid: found.grid,
            n,
            seq_len,
            taken: &taken,
            step: step as usize,
            layer_part,
            fault: &fault,
            units: Units(&self.units),
        };
        let (threads, scratch, stride) = (self.pool.threads(), self.scratch.base(), self.stride);
        if let Some(experts) = &self.experts {
            // SAFETY: `layer_part` has found the table in the unit's memory, which no thread uses now.
            unsafe { experts.request_for(&launch, threads)? };
        }
        let cpu = &self.cpu;
        self.pool.run(&|index, _| {
            let thread = PoolThread { index, of: threads, scratch: scratch.plus(index * stride) };
            // SAFETY: the program is verified, and all addresses are in the unit's memory, or in the pager's. Steps
            // are executed one after the other; threads have their own parts of the scratch.
            unsafe { cpu.submit(&launch, thread) };
        });
        fault.into_inner().map_or(Ok(()), |fault| Err(fault.error(self.program, entry as usize)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Kernels read weights in small pages more slowly.
    #[test]
    fn memory_of_a_host_is_requested_in_huge_pages() {
        let mut memory = HostMemory::default();
        let base = memory.take(5 << 20).unwrap().unwrap();
        assert!(base.ptr().addr().is_multiple_of(2 << 20));
        assert!(memory.0.is_some_and(|region| region.bytes() == 5 << 20));
    }
}
