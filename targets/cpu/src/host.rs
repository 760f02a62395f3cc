//! The host executor: a bundle's object code, loaded into this process.

use moec_codegen::Error as CodegenError;
use moec_codegen::jit::Loaded;
use moec_ir::plan::TargetInfo;
use moec_runtime::abi::KernelFn;
use moec_runtime::program::TargetRef;

/// Why object code cannot run here.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// This machine cannot run it: another architecture, or features that the processor lacks.
    #[error(transparent)]
    Machine(#[from] moec_runtime::Error),
    /// It does not load.
    #[error(transparent)]
    Load(#[from] CodegenError),
}

/// Kernels in this process; they stay callable as long as this lives.
#[derive(Debug)]
pub struct HostUnit {
    loaded: Loaded,
}

impl HostUnit {
    /// Loads an object that was compiled for `target`.
    ///
    /// # Errors
    /// A feature that this processor lacks, or bytes that are no object for it.
    pub fn load(object: &[u8], target: &TargetInfo) -> Result<Self, HostError> {
        let features: Vec<&str> = target.features.iter().map(String::as_str).collect();
        moec_runtime::cpu::check(&TargetRef {
            name: &target.name,
            triple: &target.triple,
            cpu: &target.cpu,
            features: &features,
        })?;
        Ok(Self { loaded: Loaded::new(object)? })
    }

    /// The kernel of that symbol.
    pub fn resolve(&self, symbol: &str) -> Option<KernelFn> {
        self.loaded.kernel(symbol).ok()
    }
}
