//! Accesses of steps: the bytes of each argument, and whether the step writes them.
//!
//! A kernel names the arguments that it writes ([`KernelRef`](crate::plan::KernelRef),
//! [`GpuKernel`](crate::launch::GpuKernel)), and a built-in function has them last. Nothing else states it:
//! passes that order steps and the verifier that proves their order read it here.

use crate::plan::{Arg, Builtin, Code, Entry, Plan, Results, Step};
use std::collections::HashMap;
use std::ops::Range;

/// Base that the bytes of an [`Access`] are counted from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Space {
    /// The arena of a memory.
    Arena(u32),
    /// A state of the plan, as a whole.
    State(u32),
    /// Experts of a layer that are read from disk ([`Plan::paging`]): a request writes them, a multiplication
    /// reads them.
    Paged(u32),
}

/// Access of a step by one argument.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Access {
    /// Base that bytes are counted from.
    pub space: Space,
    /// The bytes: of a buffer all, whatever part of it the step takes. Rows of one buffer may interleave.
    pub bytes: Range<u64>,
    /// The buffer, in an arena.
    pub buffer: Option<u32>,
    /// Whether it is written.
    pub write: bool,
}

impl Access {
    /// Whether both touch some byte.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.space == other.space && self.bytes.start < other.bytes.end && other.bytes.start < self.bytes.end
    }

    /// Whether the two may not be exchanged: both touch some byte, and one of them writes it.
    pub fn conflicts(&self, other: &Self) -> bool {
        (self.write || other.write) && self.overlaps(other)
    }
}

/// Finds the accesses of a plan's steps. None of its functions panics, whatever the plan.
#[derive(Clone, Debug)]
pub struct Accesses<'p> {
    plan: &'p Plan,
    /// Layers of [`Plan::paging`] by the segments that are read from disk.
    paged: HashMap<u32, u32>,
}

impl<'p> Accesses<'p> {
    /// Accesses of a plan whose entry points may have been moved out meanwhile.
    pub fn new(plan: &'p Plan) -> Self {
        let mut paged = HashMap::new();
        if let Some(paging) = &plan.paging {
            for (i, layer) in (0..).zip(&paging.layers) {
                // Gates of neurons stay in memory, or are in the segment of the rest.
                let gates = (!paging.by_neurons()).then_some(layer.gate_up);
                paged.extend(gates.into_iter().chain([layer.down]).map(|segment| (segment, i)));
            }
        }
        Self { plan, paged }
    }

    /// The plan.
    pub const fn plan(&self) -> &'p Plan {
        self.plan
    }

    /// Accesses of a step, argument by argument. Weights that are there before the first step are left out.
    pub fn of(&self, entry: &Entry, step: &Step) -> Vec<Access> {
        let results = self.plan.results(step);
        let whole = |space, write| Access { space, bytes: 0..1, buffer: None, write };
        let argument = |(i, arg): (usize, &Arg)| match *arg {
            Arg::Buffer(b, _) => entry.buffers.get(b as usize).map(|buffer| Access {
                space: Space::Arena(buffer.memory),
                bytes: buffer.offset..buffer.offset.saturating_add(buffer.bytes),
                buffer: Some(b),
                write: results.contains(i),
            }),
            Arg::State(s) => Some(whole(Space::State(s), results.contains(i))),
            // The pager serves the CPU's steps alone.
            Arg::Matrices(s) if step.unit == 0 => {
                self.paged.get(&s).map(|&layer| whole(Space::Paged(layer), false))
            }
            Arg::Segment(_) | Arg::Matrices(_) => None,
        };
        let mut found: Vec<Access> = step.args.iter().enumerate().filter_map(argument).collect();
        found.extend(self.requested(step).map(|layer| whole(Space::Paged(layer), true)));
        found
    }

    /// The layer whose experts a step requests from disk.
    fn requested(&self, step: &Step) -> Option<u32> {
        let paging = self.plan.paging.as_ref()?;
        match step.code {
            Code::Builtin(Builtin::RequestExperts { layer, .. }) if !paging.by_neurons() => Some(layer),
            Code::Builtin(Builtin::RequestNeurons { layer, .. }) => Some(layer),
            _ => None,
        }
    }
}

impl Plan {
    /// The arguments that a step writes; none where its kernel does not exist.
    pub fn results(&self, step: &Step) -> Results {
        let found = match step.code {
            Code::Kernel(k) => self.kernels.get(k as usize).map(|k| k.results),
            Code::Builtin(Builtin::Launch { kernel }) => {
                self.launches.get(kernel as usize).map(|k| k.results)
            }
            Code::Builtin(builtin) => Some(Results::last(builtin.results(), step.args.len())),
        };
        found.unwrap_or_default()
    }
}
