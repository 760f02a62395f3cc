//! The units that moec's precompiled runtime drives, and with it every `run` that it is linked into: one row
//! each.
//!
//! A row is worth its size where the machines that moec runs on may have the unit, and its driver is looked
//! for by a running program.

use moec_runtime::cli::Native;

/// Every such unit.
pub const PRECOMPILED: &[Native<'static>] = &[moec_cuda_unit::NATIVE];
