//! The host executor: a bundle's object code, loaded into this process.

use moec_codegen::Error as CodegenError;
use moec_codegen::jit::Loaded;
use moec_ir::plan::TargetInfo;
use moec_runtime::abi::KernelFn;

/// Why object code cannot run here.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// This processor cannot run it.
    #[error("the bundle is for `{target}`; this processor lacks {}", missing.join(", "))]
    Features {
        /// Target of the bundle.
        target: String,
        /// What is missing.
        missing: Vec<String>,
    },
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
        let missing: Vec<String> =
            moec_runtime::cpu::missing(&features).iter().map(|&f| f.to_owned()).collect();
        if !missing.is_empty() {
            return Err(HostError::Features { target: target.name.clone(), missing });
        }
        Ok(Self { loaded: Loaded::new(object)? })
    }

    /// The kernel of that symbol.
    pub fn resolve(&self, symbol: &str) -> Option<KernelFn> {
        self.loaded.kernel(symbol).ok()
    }
}
