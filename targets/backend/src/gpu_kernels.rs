//! GPU kernels, for units that launch their own kernels.

use crate::error::Result;
use crate::tools::Tools;
use moec_device::DeviceUnit;
use moec_ir::plan::Plan;
use moec_runtime::bundle::BundleReader;
use std::path::Path;

/// Kernels that a GPU runs instead of the CPU's. The compiler writes them, by the operators that a unit is
/// given; the backend gives the GPU generation, and reads them back.
pub trait GpuKernels: Sync + std::fmt::Debug {
    /// The generation that the kernels of a unit are written for, in NVIDIA's spelling (`sm_90`).
    fn generation<'u>(&self, unit: &'u DeviceUnit) -> Option<&'u str>;

    /// Machine code of a text, for the generation of a unit, if the assembler of the unit's maker is
    /// installed. With `None` the driver assembles the text when the bundle is opened.
    ///
    /// # Errors
    /// An assembler that does not start, or refuses the text.
    fn assemble(&self, text: &Path, unit: &DeviceUnit, tools: Tools<'_>) -> Result<Option<Assembled>>;

    /// The command that installs that assembler.
    fn installs_assembler(&self) -> &'static str;

    /// Path of the machine code of an artifact, both relative to the bundle.
    fn code_path(&self, artifact: &str) -> String;

    /// Reads the artifacts of a unit; `unit` is its index in the plan. Checks that they have every kernel
    /// that the plan launches, with the same parameters; executes nothing. If the assembler of the unit's
    /// vendor is installed, also checks that it gives the same machine code for the text. `by`: the assembler
    /// that made it, as [`Assembled::by`].
    ///
    /// # Errors
    /// An artifact that is missing or malformed, a kernel that does not exist or takes other arguments, code
    /// that is another's.
    fn read(
        &self,
        bundle: &BundleReader,
        plan: &Plan,
        unit: u32,
        by: Option<&str>,
        tools: Tools<'_>,
    ) -> Result<KernelsRead>;
}

/// Result of an assembler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assembled {
    /// Machine code.
    pub code: Vec<u8>,
    /// The assembler and its release: another one may write other bytes.
    pub by: String,
}

/// Kernels that were read of a unit's artifacts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelsRead {
    /// Kernels that the plan launches.
    pub kernels: usize,
    /// Parts that could not be verified, and the remedy.
    pub unverified: Option<String>,
}
