//! Kernels of threads: what units launch that have kernels of their own.

use crate::error::Result;
use crate::tools::Tools;
use moec_device::Unit;
use moec_ir::plan::Plan;
use std::path::Path;

/// Kernels that threads of a graphics processor run, in the place of the processor's. The compiler writes them, by the operators that
/// a unit is given; the family says for which processor, and reads them back.
pub trait Threads: Sync + std::fmt::Debug {
    /// The generation that the kernels of a unit are written for, in NVIDIA's spelling (`sm_90`).
    fn generation<'u>(&self, unit: &'u Unit) -> Option<&'u str>;

    /// Reads the artifacts of a unit, `unit` by its index in the plan, and checks that they hold every kernel that the plan launches,
    /// as it says; executes nothing. Where the assembler of the unit's maker is installed, it is asked, too. Gives the number of kernels.
    ///
    /// # Errors
    /// An artifact that is missing or malformed, a kernel that is not there or takes other arguments.
    fn read(&self, folder: &Path, plan: &Plan, unit: u32, tools: Tools<'_>) -> Result<usize>;
}
