//! The widest vectors that packing uses on this machine.
//!
//! moec itself is compiled for any machine of its architecture. Expensive work is compiled once more for
//! AVX2, which changes no result: the same operations in the same order, on more numbers at a time. None of
//! them is fused, since `rustc` joins no multiplication with an addition.
//!
//! The `unsafe` of this file calls what only such a machine can execute.

/// Work that is compiled for every width. Its `run`, and what that calls in its loops, must be
/// `#[inline(always)]`: only so does it become part of what is compiled for a width.
pub(super) trait Work {
    /// Result.
    type Output;
    /// Does it.
    fn run(self) -> Self::Output;
}

/// Does work with the widest vectors that there are.
pub(super) fn widest<W: Work>(work: W) -> W::Output {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2")]
        fn avx2<W: Work>(work: W) -> W::Output {
            work.run()
        }
        if std::arch::is_x86_feature_detected!("avx2") {
            // SAFETY: the machine has AVX2.
            return unsafe { avx2(work) };
        }
    }
    work.run()
}
