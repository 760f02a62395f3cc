//! Reads the PTX of a bundle back, and checks that a unit's launches are in its artifact as the plan
//! describes them.

use moec_cuda_unit::text;
use moec_ir::plan::Plan;
use moec_ptx::{Module, Program};
use moec_runtime::bundle::BundleReader;
use moec_runtime::{Error, Result};

/// The kernels of a unit.
pub struct Artifact {
    /// The text, and the machine code for it.
    pub text: text::Artifact,
    /// Its module.
    pub module: Module,
    /// Kernels by index of [`Plan::launches`]; `None` for other units.
    pub kernels: Vec<Option<Program>>,
}

/// Bytes of the number of valid rows, the last parameter.
const ROWS: u32 = 4;
/// Bytes of an address.
const ADDRESS: u32 = 8;

/// Reads the artifact of a unit, by its index in the plan, and decodes every kernel that the plan launches.
///
/// # Errors
/// An artifact that is missing, is not PTX that is understood, or lacks kernels that the plan launches.
pub fn read(bundle: &BundleReader, plan: &Plan, unit: u32) -> Result<Artifact> {
    let name = plan.units.get(unit as usize).map_or("?", |u| &*u.name);
    let text = text::read(bundle, plan, unit)?;
    let wrong = |kernel: &str, why: String| Error::kernel(name, kernel, why);
    let module = moec_ptx::parse(&text.text).map_err(|e| wrong(&text.path, e.to_string()))?;
    moec_ptx::verify(&module).map_err(|e| wrong(&text.path, e.to_string()))?;
    let mut kernels = Vec::with_capacity(plan.launches.len());
    for kernel in &plan.launches {
        if kernel.unit != unit {
            kernels.push(None);
            continue;
        }
        let program =
            Program::new(&module, &kernel.symbol).map_err(|e| wrong(&kernel.symbol, e.to_string()))?;
        let sizes: Vec<u32> = program.parameters().map(|(_, bytes)| bytes).collect();
        let fits = sizes.split_last().is_some_and(|(rows, addresses)| {
            *rows == ROWS
                && addresses.len() == kernel.operands as usize
                && addresses.iter().all(|&b| b == ADDRESS)
        });
        if !fits {
            let why =
                format!("it takes {sizes:?} bytes, not {} addresses and a number of rows", kernel.operands);
            return Err(wrong(&kernel.symbol, why));
        }
        if program.shared_bytes() > kernel.launch.shared.max(1) {
            let why = format!(
                "it has {} bytes of shared memory, the plan {}",
                program.shared_bytes(),
                kernel.launch.shared
            );
            return Err(wrong(&kernel.symbol, why));
        }
        kernels.push(Some(program));
    }
    Ok(Artifact { text, module, kernels })
}
