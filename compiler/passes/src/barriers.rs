//! Pass `barriers`: barriers between steps of the CPU, and dependencies between steps of different units.
//!
//! All threads of the CPU walk its steps together. A step waits for the other threads only if it conflicts
//! with a step since the last barrier. Two steps conflict if one of them writes bytes that the other touches.

use moec_ir::access::{Access, Accesses};
use moec_ir::plan::{Entry, Plan};

/// Sets `barrier` and `deps` of every step. Only steps of the CPU have barriers: other units run their steps
/// in order. Steps of different units wait for each other by their dependencies.
pub fn barriers(plan: &mut Plan) {
    let mut entries = std::mem::take(&mut plan.entries);
    let accesses = Accesses::new(plan);
    for entry in &mut entries {
        let touched: Vec<Vec<Access>> = entry.steps.iter().map(|step| accesses.of(entry, step)).collect();
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
    plan.entries = entries;
}

/// Number of steps of an entry with a barrier, for reports.
pub fn count(entry: &Entry) -> usize {
    entry.steps.iter().filter(|s| s.barrier).count()
}

fn conflict(a: &[Access], b: &[Access]) -> bool {
    a.iter().any(|x| b.iter().any(|y| x.conflicts(y)))
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
                // A step that wrote all of these bytes has waited for all earlier users. Steps that share
                // only part of the bytes have not.
                covers |= t.write && t.bytes.start <= mine.bytes.start && mine.bytes.end <= t.bytes.end;
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
