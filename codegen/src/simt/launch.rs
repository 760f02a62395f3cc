//! How kernels of threads are launched: what a plan says of it.

pub use moec_ir::plan::{Extent, Launch};
