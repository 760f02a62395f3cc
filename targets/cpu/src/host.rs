//! The host executor: a bundle's object code, loaded into this process.

use crate::emulate::{self, EmulateError};
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
    /// It cannot be emulated either.
    #[error(transparent)]
    Emulate(#[from] EmulateError),
    /// It does not load.
    #[error(transparent)]
    Load(#[from] CodegenError),
}

impl HostError {
    /// What to do about it, if something can be done.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Features { missing, .. }
                if missing.iter().all(|f| emulate::FEATURES.contains(&f.as_str())) =>
            {
                Some("`moec run BUNDLE --emulate …` emulates AMX, slowly; or build for `native`")
            }
            Self::Features { .. } => Some("build the bundle for `native`, or run it on its own machine"),
            Self::Emulate(_) | Self::Load(_) => None,
        }
    }
}

/// Kernels in this process; they stay callable as long as this lives.
#[derive(Debug)]
pub struct HostUnit {
    loaded: Loaded,
    emulated: Vec<String>,
}

impl HostUnit {
    /// Loads an object that was compiled for `target`.
    ///
    /// # Errors
    /// A feature that this processor lacks, or bytes that are no object for it.
    pub fn load(object: &[u8], target: &TargetInfo) -> Result<Self, HostError> {
        Self::load_with(object, target, &[])
    }

    /// As [`HostUnit::load`]; instructions of the features in [`emulate::FEATURES`] that this processor
    /// lacks are emulated from now on, in the whole process.
    ///
    /// # Errors
    /// As [`HostUnit::load`], and what [`emulate::install`] finds.
    pub fn load_emulated(object: &[u8], target: &TargetInfo) -> Result<Self, HostError> {
        Self::load_with(object, target, emulate::FEATURES)
    }

    fn load_with(object: &[u8], target: &TargetInfo, emulable: &[&str]) -> Result<Self, HostError> {
        let features: Vec<&str> = target.features.iter().map(String::as_str).collect();
        let lacking = moec_runtime::cpu::missing(&features);
        let (emulated, missing): (Vec<_>, Vec<_>) =
            lacking.into_iter().map(str::to_owned).partition(|f| emulable.contains(&f.as_str()));
        if !missing.is_empty() {
            return Err(HostError::Features { target: target.name.clone(), missing });
        }
        if !emulated.is_empty() {
            emulate::install()?;
        }
        Ok(Self { loaded: Loaded::new(object)?, emulated })
    }

    /// Features of the target that are emulated here.
    pub fn emulated(&self) -> &[String] {
        &self.emulated
    }

    /// The kernel of that symbol.
    pub fn resolve(&self, symbol: &str) -> Option<KernelFn> {
        self.loaded.kernel(symbol).ok()
    }
}
