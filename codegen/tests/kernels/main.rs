//! Every kernel, compared with plain loops: in this process, for AArch64 in an emulator, and for GPUs in an
//! interpreter.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::panic, clippy::print_stdout)] // this is a test, though not all of it a test function

mod attention;
mod cache;
mod chosen;
#[cfg(not(target_arch = "aarch64"))]
mod emulated;
mod experts;
mod fused;
mod gates;
mod gpu_kernels;
mod harness;
mod machines;
mod matrix;
mod neurons;
mod recurrence;
mod routing;
mod schedules;
mod simple;
mod split;
