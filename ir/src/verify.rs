//! The verifiers of the two languages: what every pass, file and executor may take for granted.
//!
//! # Module
//!
//! 1. Weight and state names are nonempty and unique.
//! 2. The shape of a weight is that of its expression, and no constant in it is NaN.
//! 3. A state is `f32[slots, heads, rows, dim]` of nonzero extents; the window of a ring is not zero.
//! 4. There is at most one entry per kind and size; its rows and output rows are not zero, and its inputs
//!    have the types that [`Graph`](crate::Graph) lists.
//! 5. Every value is defined exactly once, before it is used.
//! 6. Operands are of the kinds, and in the number, that [`Op::signature`](crate::Op::signature) says. An
//!    operand that takes a state takes one of the kinds `cache` and `ring` or the result of a cache write,
//!    and nothing else takes these. Attention over a ring has a window, which the ring holds.
//! 7. Declared types equal inferred ones, and their sizes in bytes do not overflow. No attribute is NaN.
//! 8. An entry writes a state at most once. If it does, every reader reads the result of that write.
//! 9. Token rows and output rows do not mix: only `gather_rows` goes from the first to the second, by
//!    the entry's row list.
//! 10. The output of an entry is `f32[R, vocab]` in output rows, with one `vocab` for all entries.
//!
//! # Plan
//!
//! A plan is untrusted: nothing below panics or overflows on any plan, however made.
//!
//! 1. The version is this crate's; vocabulary, hidden size, layers, context and slots are not zero; the
//!    token that is prepended is in the vocabulary.
//! 2. There is at least one unit and one memory; the first unit, the CPU, has the first memory. Names of
//!    units and of memories are unique, and every index of a unit or a memory is in range. Links join two
//!    memories. There are at most 64 of each, and a memory but the first has one unit.
//! 3. File paths are relative, name no parent, current or empty folder, and are unique.
//! 4. A segment has one to three nonzero axes, is aligned to [`ALIGN`](crate::plan::ALIGN), lies inside its
//!    file and has exactly the size that shape, format and layout need; its matrices do not overlap.
//! 5. State names are unique, and every state has room for the model's slots. A cache has room for the
//!    context; a ring has a window, and room for it after all rows of a call. Neither has snapshots. Another
//!    state is in rows of f32, and has as many snapshots as a context has positions at most.
//! 6. Kernel symbols are C identifiers and unique.
//! 7. Entries are ordered: prefill first, then decode, each by strictly ascending rows.
//! 8. Buffers are aligned, inside the arena of their memory, and as large as rows, stride and element type
//!    need. The first four hold the inputs; the logits buffer is `f32` with room for `[R, vocab]`. All these
//!    lie in memory 0.
//! 9. Places lie inside the columns of their buffer.
//! 10. Steps refer to units, kernels, buffers, segments and states that exist; offsets into buffers are whole
//!     elements inside of them; the dispatch table of a grid is an `i32` buffer argument; built-in functions
//!     have the arguments, of the sizes, that they need, and write to buffers that hold no operand of theirs;
//!     a part's graphs take the rows of its step.
//! 11. Dependencies are ascending and point backwards, and a barrier is between a step of the CPU and each of
//!     its dependencies there. Accelerators have no barriers.
//! 12. Steps have no data hazard. What a step touches follows from its arguments and the results of its
//!     kernel ([`Accesses`](crate::access::Accesses)). Before it begins, every earlier step that writes some
//!     of it has ended, and for what it writes, every earlier step that reads some of it: by barriers, by the
//!     order of a unit's own steps, and by dependencies, over any number of units. This holds for states, for
//!     experts on disk after their request, and byte by byte for arenas, where buffers share bytes one after
//!     the other. A step reads a buffer only where an earlier step has written it, or the engine, which
//!     writes the inputs before the first step. What it writes holds no other argument of it. The engine
//!     reads the logits after the last step.
//! 13. Its placement holds; one with static shapes names the units of the plan.
//! 14. Every argument of a step lies in the memory of its unit: buffers and states by their own index,
//!     weights because memory 0 serves all of its units', and others hold them as residents. A copy alone
//!     reads or writes elsewhere, over a link. Residents are in ascending order, and their matrices exist.
//! 15. The peak of a memory, [`Plan::peak`](crate::plan::Plan::peak), is at most its capacity, if it has one.
//! 16. Layers with experts on several units are in ascending order, every expert starts on one of these, and
//!     each unit of a `dispatch` gets a table of its own.
//! 17. Data on the disk of each host fit its budget with their frames; the matrices of an expert are neighbours in
//!     one file, at multiples of a block, and every matrix has a checksum. Every expert of a layer is there or on
//!     another unit. At most one kind of cores reads.
//!
//! # NDP command streams and policies for experts
//!
//! 1. NDP command streams are of accelerators, one set of a layer for each, and steps run those of their own
//!    unit.
//! 2. A unit that may be given an expert holds its matrices: the hot unit those that start there, the cold
//!    one all.
//! 3. NDP DIMMs and frames are in range; curves ascend; every time is finite and not negative. Nothing moves
//!    where units are fixed.
//! 4. Layers that share a cache have experts of the same sizes, and each begins with one in a frame.
//!
//! # GPU kernels
//!
//! 1. They are of accelerators that have a memory of their own, each once in its artifact, whose path stays
//!    inside.
//! 2. A block has whole warps, 1024 threads at most, and 48 KiB of shared memory; a grid has blocks.
//! 3. Steps launch those of their own unit, with as many addresses as they take, in grids that are possible
//!    for all their rows.
//!
//! # Placement
//!
//! 1. Unit indices are in range, and names of units unique.
//! 2. Expert tables are in ascending order of layer; `k` is at most the number of experts; groups are
//!    numbered below it.
//! 3. Where shapes are dynamic, nothing has a tier, a capacity or a group graph.
//! 4. Where they are static, there are one to six tiers of strictly descending multiples of 16, and every
//!    expert has one; its capacity is its tier's, or 0 where it has no limit.
//! 5. Where there are groups, each expert is in exactly one, the one that its row names, with the group's
//!    tier and unit.
//! 6. What spills has somewhere to go: a fallback other than its own unit. What is pruned has none.
//! 7. Rates lie in 0 ..= 1; loads, costs and imbalances are finite and not negative.

mod experts;
mod graphs;
mod launches;
mod memories;
mod order;
mod paging;
mod placements;
mod plans;
mod statics;

use crate::graph::Module;
use crate::infer::TypeError;
use crate::placement::Placement;
use crate::plan::Plan;
use thiserror::Error;

/// A broken invariant.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{at}: {message}")]
pub struct VerifyError {
    /// Place, as a path: `prefill[8] node 3 (add)`, `entries[0].steps[7]`.
    pub at: String,
    /// The fault.
    pub message: String,
}

impl VerifyError {
    pub(crate) fn new(at: impl Into<String>, message: impl Into<String>) -> Self {
        Self { at: at.into(), message: message.into() }
    }
}

impl From<TypeError> for VerifyError {
    fn from(e: TypeError) -> Self {
        Self::new(e.at, e.message)
    }
}

/// Whether a path leads to a file of the bundle, on every system.
fn stays_inside(path: &str) -> bool {
    // A backslash or a colon means a folder, a drive or a stream on some systems.
    let odd = |c: char| c.is_control() || c == '\\' || c == ':';
    !path.contains(odd) && path.split('/').all(|part| !matches!(part, "" | "." | ".."))
}

/// Whether a name is an identifier of C: `[A-Za-z_][A-Za-z0-9_]*`.
fn is_identifier(name: &str) -> bool {
    name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
        && name.bytes().next().is_some_and(|b| !b.is_ascii_digit())
}

/// Checks the invariants of a module.
///
/// # Errors
/// The first broken invariant found.
pub fn module(module: &Module) -> Result<(), VerifyError> {
    graphs::check(module)
}

/// Checks the invariants of a plan. Never panics, whatever the plan.
///
/// # Errors
/// The first broken invariant found.
pub fn plan(plan: &Plan) -> Result<(), VerifyError> {
    plans::check(plan, false)?;
    memories::check_steps(plan)?;
    order::check(plan, false)
}

/// Checks a plan between two passes of the compiler. If several units run its steps, these may still name
/// values of other memories, and no order between units is stated yet: the steps are taken as if each ended
/// before the next begins. All other invariants hold.
///
/// # Errors
/// The first broken invariant found.
pub fn unsynchronized_plan(plan: &Plan) -> Result<(), VerifyError> {
    plans::check(plan, true)?;
    order::check(plan, true)
}

/// Checks the invariants of a placement. Never panics, whatever the placement.
///
/// # Errors
/// The first broken invariant found.
pub fn placement(placement: &Placement) -> Result<(), VerifyError> {
    // With dynamic shapes, units have no names here; the plan that holds the placement knows them.
    let units = if placement.is_dynamic() { usize::MAX } else { placement.units.len() };
    placements::check(placement, units)
}

/// `Ok` if the condition holds, else an error at this place.
fn require(
    holds: bool,
    at: impl FnOnce() -> String,
    message: impl FnOnce() -> String,
) -> Result<(), VerifyError> {
    if holds { Ok(()) } else { Err(VerifyError::new(at(), message())) }
}
