//! Calling convention of kernels.

/// A kernel of the object code.
///
/// Called as `f(args, n, begin, end, scratch)`:
///
/// | argument | what |
/// |---|---|
/// | `args` | one address per argument of the step, in the step's order: a place in the arena, a packed weight, a KV-cache tensor |
/// | `n` | valid rows: of tokens or of wanted outputs, as the step's `rows` says; at least 1 |
/// | `begin`, `end` | the work items of this call, `begin < end`; concurrent calls of one step get disjoint ranges |
/// | `scratch` | the thread's own scratch, `scratch_bytes` of it, 64-byte aligned, with arbitrary content |
///
/// What is computed does not depend on how the items are split into calls.
///
/// # Safety
/// A kernel trusts its addresses. Code that puts one into a [`crate::bundle::program::Program`] vouches that it
/// keeps to the extents of the buffers, segments and states that its step names, that it writes no
/// segment, and that it does not unwind.
pub type KernelFn =
    unsafe extern "C" fn(args: *const *mut u8, n: i64, begin: i64, end: i64, scratch: *mut u8);
