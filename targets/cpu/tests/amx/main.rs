//! Matrix kernels and attention on tile registers, in this process: on the CPU's own, or emulated.
//!
//! The cases are those of `moec-codegen`; they are in this crate because the emulator is.
#![cfg(all(target_arch = "x86_64", target_os = "linux"))]
#![allow(clippy::cast_possible_truncation, clippy::panic, clippy::print_stdout)] // this is a test, though not all of it a test function

#[path = "../../../../codegen/tests/kernels/attention.rs"]
mod attention;
#[path = "../../../../codegen/tests/kernels/cache.rs"]
mod cache;
mod emulated;
#[path = "../../../../codegen/tests/kernels/experts.rs"]
mod experts;
#[path = "../../../../codegen/tests/kernels/gates.rs"]
mod gates;
#[allow(dead_code)]
#[path = "../../../../codegen/tests/kernels/harness.rs"]
mod harness;
mod inner_loop;
mod machines;
#[path = "../../../../codegen/tests/kernels/matrix.rs"]
mod matrix;

#[path = "../../../../codegen/tests/kernels/schedules.rs"]
mod schedules;

/// GPU kernels are tested in `moec-codegen`.
mod gpu_kernels {
    /// No test here uses a GPU.
    pub(crate) const fn on_gpu() -> bool {
        false
    }
    pub(crate) const fn check(_: &[crate::harness::Case]) {}
}

/// The module name that the cases use.
mod simple {
    pub(crate) use crate::gates::glu;
}
