//! Calling convention of kernels.

/// A kernel of the object code.
///
/// Called as `f(args, n, begin, end, scratch)`:
///
/// | argument | meaning |
/// |---|---|
/// | `args` | an address per argument of the step, in order: in the arena, a packed weight, a state |
/// | `n` | valid rows, of tokens or requested outputs by the step's `rows`; at least 1 |
/// | `begin`, `end` | work items of this call, `begin < end`; calls of one step get disjoint ranges |
/// | `scratch` | the thread's `scratch_bytes` bytes of scratch, 64-byte aligned, of arbitrary content |
///
/// The result does not depend on the split of the items into calls.
///
/// # Safety
/// A kernel trusts its addresses. Code that puts a kernel into a [`crate::bundle::program::Program`]
/// guarantees three things. The kernel keeps to the extents of the buffers, segments and states that its step
/// names. It writes no segment. It does not unwind.
pub type KernelFn =
    unsafe extern "C" fn(args: *const *mut u8, n: i64, begin: i64, end: i64, scratch: *mut u8);
