//! Launches of GPU kernels in a plan.

pub use moec_ir::plan::{Extent, Launch};
