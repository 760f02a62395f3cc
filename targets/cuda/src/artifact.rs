//! The PTX of a bundle, read back: what a unit launches is in its artifact, and is what the plan says of it.

use moec_ir::plan::Plan;
use moec_ptx::{Module, Program};
use moec_runtime::{Error, Result};
use std::path::Path;

/// The kernels of a unit.
pub struct Artifact {
    /// Path, relative to the bundle.
    pub path: String,
    /// The text.
    pub text: String,
    /// What it says.
    pub module: Module,
    /// By index of [`Plan::launches`]; none of other units'.
    pub kernels: Vec<Option<Program>>,
}

impl Artifact {
    /// The generation that it is for: `sm_90`.
    pub fn generation(&self) -> Option<&str> {
        let target = self.text.lines().find_map(|l| l.trim().strip_prefix(".target "))?;
        target.split([',', ' ']).next()
    }
}

/// Bytes of the number of valid rows, the last parameter.
const ROWS: u32 = 4;
/// Bytes of an address.
const ADDRESS: u32 = 8;

/// Reads the artifact of a unit, by its index in the plan, and decodes every kernel that the plan launches.
///
/// # Errors
/// An artifact that is missing, is no PTX that is understood, or holds not the kernels that the plan launches.
pub fn read(folder: &Path, plan: &Plan, unit: u32) -> Result<Artifact> {
    let name = plan.units.get(unit as usize).map_or("?", |u| &*u.name);
    let own = || plan.launches.iter().filter(|k| k.unit == unit);
    let Some(first) = own().next() else {
        return Err(Error::Plan(format!("`{name}` launches no kernel")));
    };
    if let Some(other) = own().find(|k| k.artifact != first.artifact) {
        return Err(Error::Plan(format!(
            "`{name}` launches kernels of `{}` and of `{}`",
            first.artifact, other.artifact
        )));
    }
    let path = folder.join(&first.artifact);
    let text =
        moec_runtime::regular::read_text(&path, moec_runtime::regular::PTX).map_err(|source| match source
            .kind()
        {
            std::io::ErrorKind::NotFound => Error::MissingFile(path.clone()),
            _ => Error::Io { doing: "read", path: path.clone(), source },
        })?;
    let wrong = |kernel: &str, why: String| Error::Launch { unit: name.into(), kernel: kernel.into(), why };
    let module = moec_ptx::parse(&text).map_err(|e| wrong(&first.artifact, e.to_string()))?;
    moec_ptx::verify(&module).map_err(|e| wrong(&first.artifact, e.to_string()))?;
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
    Ok(Artifact { path: first.artifact.clone(), text, module, kernels })
}
