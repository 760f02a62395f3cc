//! Unit of another NUMA node of this machine: its threads are on the node's CPUs, its memory is the node's.
//!
//! It executes the CPU's kernels on weights, states and values of its own. The thread that walks its steps is the
//! first of its threads, so the node computes while the first node does.

#![expect(clippy::cast_possible_truncation, reason = "sizes of memory that was allocated")]

use crate::bundle::program::{Code, Program};
use crate::error::{Error, Result};
use crate::exec::unit::{self, ComputeUnit, Launch, PoolThread, StepFault, UnknownStep};
use crate::platform::cpu::{self, CoreSet};
use crate::platform::memory::{Addr, Region, size};
use crate::platform::numa::Node;
use crate::sync::pool::{Binding, Pool};
use moec_ir::plan::{ALIGN, Builtin, Grid, UnitRef};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Name of the unit.
const NAME: &str = "node";
/// Bytes from which all threads copy together.
const PARALLEL: usize = 1 << 20;

/// The CPUs of a node, with their memory.
pub(crate) struct NodeUnit {
    node: Node,
    memory: Option<Region>,
    scratch: Region,
    stride: usize,
    /// Used by one thread at a time: the unit's own, or the engine's between calls.
    pool: Mutex<Pool>,
}

impl NodeUnit {
    /// The unit of a plan, with so many threads; `None`: `MOEC_THREADS`, else one per CPU of the node.
    ///
    /// # Errors
    /// CPUs that this process may not use; less memory than its weights take; memory or threads refused.
    pub(crate) fn open(program: &Program, of: &UnitRef, threads: Option<usize>) -> Result<Self> {
        let node = Node::new(&of.name, &of.cpus)?;
        let residents = program.memories.get(of.memory as usize).into_iter().flat_map(|m| &m.residents);
        let bytes = |segment: u32| program.segments.get(segment as usize).map_or(0, |s| s.bytes);
        let weights = residents.fold(0_u64, |sum, r| sum.saturating_add(bytes(r.segment)));
        if let Some(free) = node.free().filter(|&free| weights > free) {
            let what = format!(
                "node `{}` has {} of memory free, and its weights take {}",
                of.name,
                size(free),
                size(weights)
            );
            return Err(
                Error::machine(what).with_hint("end other programs on its CPUs, or build for more nodes")
            );
        }
        let threads = cpu::threads_on(threads, node.count())?;
        let stride = program.scratch_bytes.next_multiple_of(ALIGN) + ALIGN;
        let scratch = Region::new("scratch", stride * threads as u64)?;
        node.hold(&scratch);
        let pool = Mutex::new(Pool::new(threads, 0, Binding::Within(node.cores()))?);
        Ok(Self { node, memory: None, scratch, stride: stride as usize, pool })
    }

    fn pool(&self) -> MutexGuard<'_, Pool> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Executes a step that computes, on all threads if it has several items.
    ///
    /// # Safety
    /// As [`ComputeUnit::submit`].
    unsafe fn compute(&self, launch: &Launch<'_>) {
        let (scratch, stride) = (self.scratch.base(), self.stride);
        let share = |index: usize, of: usize| {
            let thread = PoolThread { index, of, scratch: scratch.plus(index * stride) };
            // SAFETY: the caller's promise; threads have their own parts of the scratch.
            unsafe {
                match launch.code {
                    Code::Kernel(kernel) => unit::kernel(kernel, launch, thread),
                    Code::Builtin(_) => drop(unit::computed(launch, thread)),
                }
            }
        };
        if matches!((launch.code, launch.grid), (Code::Builtin(_), _) | (_, Grid::One)) {
            return share(0, 1);
        }
        let mut pool = self.pool();
        let threads = pool.threads();
        pool.run(&|index, _| share(index, threads));
    }
}

/// Part of so many bytes that a thread copies, of `of` threads: whole cache lines, but for the last.
fn part(bytes: usize, index: usize, of: usize) -> Range<usize> {
    let line = ALIGN as usize;
    let each = bytes.div_ceil(of.max(1)).next_multiple_of(line);
    let at = |index: usize| each.saturating_mul(index).min(bytes);
    at(index)..at(index + 1)
}

impl ComputeUnit for NodeUnit {
    fn name(&self) -> &'static str {
        NAME
    }

    fn executes(&self, builtin: Builtin) -> bool {
        matches!(builtin, Builtin::Copy { .. }) || unit::computes(builtin)
    }

    fn take(&mut self, bytes: u64) -> Result<Option<Addr>> {
        let region = Region::in_huge_pages("the memory of a NUMA node", bytes)?;
        // If the operating system refuses, the node's threads touch the pages of weights first.
        self.node.hold(&region);
        let base = region.base();
        self.memory = Some(region);
        Ok(Some(base))
    }

    fn is_mapped(&self) -> bool {
        true
    }

    fn cores(&self) -> Option<CoreSet> {
        Some(self.node.cores())
    }

    unsafe fn copy(&self, from: Addr, to: Addr, bytes: usize) {
        let copy = |part: Range<usize>| {
            let (from, to) = (from.plus(part.start), to.plus(part.start));
            // SAFETY: the caller's promise, for a part of the ranges.
            unsafe { std::ptr::copy_nonoverlapping(from.ptr(), to.ptr(), part.len()) };
        };
        if bytes < PARALLEL {
            return copy(0..bytes);
        }
        let mut pool = self.pool();
        let threads = pool.threads();
        pool.run(&|index, _| copy(part(bytes, index, threads)));
    }

    unsafe fn submit(&self, launch: &Launch<'_>, _thread: PoolThread) {
        match launch.code {
            // SAFETY: the caller's promise.
            Code::Kernel(_) => unsafe { self.compute(launch) },
            // SAFETY: as above.
            Code::Builtin(builtin) if unit::computes(builtin) => unsafe { self.compute(launch) },
            Code::Builtin(builtin) => {
                // SAFETY: as above; one thread submits.
                if !unsafe { unit::copied(self, launch) } {
                    launch.fail(StepFault::Unknown(UnknownStep { unit: NAME, step: launch.step, builtin }));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_copy_each_byte_once() {
        for bytes in [0, 1, 63, 64, 1 << 20, (1 << 20) + 77] {
            for of in [1, 2, 3, 7, 64] {
                let parts: Vec<_> = (0..of).map(|index| part(bytes, index, of)).collect();
                let mut end = 0;
                for part in &parts {
                    assert_eq!(part.start, end, "{bytes} bytes on {of} threads");
                    end = part.end;
                }
                assert_eq!(end, bytes);
                assert!(parts.iter().all(|part| part.start == bytes || part.start % 64 == 0));
            }
        }
    }
}
