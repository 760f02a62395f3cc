//! Pass `barriers`: which steps wait, and for what.
//!
//! All threads of the processor walk its steps together. A step must wait for the others only where it
//! conflicts with a step since the last barrier: one of the two writes bytes that the other touches.

use super::schedule::Writes;
use moec_ir::plan::{Arg, Entry, Plan, Step};

/// Sets `barrier` and `deps` of every step. Barriers are among the processor's steps alone: other units run theirs in order,
/// and steps of different units wait for each other by their dependencies.
pub fn barriers(plan: &mut Plan, writes: &Writes) {
    for (entry, writes) in plan.entries.iter_mut().zip(writes) {
        let touched: Vec<Vec<Access>> =
            entry.steps.iter().zip(writes).map(|(step, w)| accesses(entry, step, w)).collect();
        let mut since = 0;
        for at in 0..entry.steps.len() {
            let own = |step: usize| entry.steps[step].unit == 0;
            let barrier =
                own(at) && (since..at).any(|before| own(before) && conflict(&touched[before], &touched[at]));
            if barrier {
                since = at;
            }
            entry.steps[at].barrier = barrier;
            entry.steps[at].deps = dependencies(&touched, at);
        }
    }
}

/// Steps of each entry that the others must wait before, for reports.
pub fn count(entry: &Entry) -> usize {
    entry.steps.iter().filter(|s| s.barrier).count()
}

/// One argument's memory: space (an arena or a state), bytes, and whether it is written.
#[derive(Clone, Copy, Debug)]
pub(super) struct Access {
    space: Space,
    from: u64,
    to: u64,
    pub(super) write: bool,
}

/// Where bytes are counted from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Space {
    /// The arena of a memory.
    Arena(u32),
    /// A state.
    State(u32),
}

impl Access {
    pub(super) fn overlaps(&self, other: &Self) -> bool {
        self.space == other.space && self.from < other.to && other.from < self.to
    }
}

pub(super) fn accesses(entry: &Entry, step: &Step, writes: &[usize]) -> Vec<Access> {
    let of = |(i, arg): (usize, &Arg)| {
        let write = writes.contains(&i);
        match *arg {
            Arg::Buffer(b, _) => {
                let b = &entry.buffers[b as usize];
                Some(Access { space: Space::Arena(b.memory), from: b.offset, to: b.offset + b.bytes, write })
            }
            Arg::State(s) => Some(Access { space: Space::State(s), from: 0, to: 1, write }),
            Arg::Segment(_) | Arg::Matrices(_) => None,
        }
    };
    step.args.iter().enumerate().filter_map(of).collect()
}

fn conflict(a: &[Access], b: &[Access]) -> bool {
    a.iter().any(|x| b.iter().any(|y| (x.write || y.write) && x.overlaps(y)))
}

/// The last writers of what step `at` reads, and the last writers and later readers of what it writes.
fn dependencies(touched: &[Vec<Access>], at: usize) -> Vec<u32> {
    let mut deps = Vec::new();
    for mine in &touched[at] {
        for before in (0..at).rev() {
            let theirs = touched[before].iter().filter(|t| t.overlaps(mine));
            let (mut touches, mut wrote, mut covers) = (false, false, false);
            for t in theirs {
                touches = true;
                wrote |= t.write;
                // Whoever wrote all of it has waited for everybody before. Buffers that share a part of their bytes have not.
                covers |= t.write && t.from <= mine.from && mine.to <= t.to;
            }
            if wrote || (touches && mine.write) {
                deps.push(before as u32);
            }
            if covers {
                break;
            }
        }
    }
    deps.sort_unstable();
    deps.dedup();
    deps
}
