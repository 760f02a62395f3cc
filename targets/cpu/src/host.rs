//! The host executor: a bundle's object code, loaded into this process.

use crate::emulate::{self, EmulateError};
use moec_codegen::Error as CodegenError;
use moec_codegen::jit::Loaded;
use moec_ir::plan::TargetInfo;
use moec_runtime::bundle::abi::KernelFn;
use moec_runtime::platform::cpu;

/// Reason that object code cannot run here.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// This machine cannot run it: another architecture, or features that the CPU lacks.
    #[error(transparent)]
    Machine(moec_runtime::Error),
    /// This CPU lacks features, and all of them can be emulated ([`emulate::FEATURES`]).
    #[error(transparent)]
    Features(moec_runtime::Error),
    /// The emulator cannot be installed.
    #[error(transparent)]
    Emulate(#[from] EmulateError),
    /// The object code cannot be loaded.
    #[error(transparent)]
    Load(#[from] CodegenError),
}

impl HostError {
    /// Remedy, where this is better than the cause's own.
    pub fn hint(&self) -> Option<&'static str> {
        let hint = "`moec run BUNDLE --emulate …` emulates AMX, slowly; or build for `native`";
        matches!(self, Self::Features(_)).then_some(hint)
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
    /// A feature that this CPU lacks, or bytes that are not an object for it.
    pub fn load(object: &[u8], target: &TargetInfo) -> Result<Self, HostError> {
        Self::load_with(object, target, &[])
    }

    /// Like [`HostUnit::load`]; instructions of the features in [`emulate::FEATURES`] that this CPU
    /// lacks are emulated from now on, in the whole process.
    ///
    /// # Errors
    /// As [`HostUnit::load`], and what [`emulate::install`] finds.
    pub fn load_emulated(object: &[u8], target: &TargetInfo) -> Result<Self, HostError> {
        Self::load_with(object, target, emulate::FEATURES)
    }

    fn load_with(object: &[u8], target: &TargetInfo, emulable: &[&str]) -> Result<Self, HostError> {
        let features: Vec<&str> = target.features.iter().map(String::as_str).collect();
        let emulated: Vec<&str> =
            cpu::missing(&features).into_iter().filter(|f| emulable.contains(f)).collect();
        let mut native = target.clone();
        native.features.retain(|f| !emulated.contains(&f.as_str()));
        let lacking = cpu::missing(&features);
        let emulable =
            cpu::is_of_this_machine(&target.triple) && lacking.iter().all(|f| emulate::FEATURES.contains(f));
        let kind = if emulable { HostError::Features } else { HostError::Machine };
        cpu::check(&native).map_err(kind)?;
        if !emulated.is_empty() {
            emulate::install()?;
        }
        let emulated = emulated.into_iter().map(str::to_owned).collect();
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
