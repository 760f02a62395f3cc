//! A Plan that can run: verified, and with the addresses of its kernels.

use crate::bundle::abi::KernelFn;
use crate::error::{Error, Result};
use moec_ir::plan::{self, Builtin, Plan, UnitRef};
use moec_ir::verify;
use std::collections::HashMap;
use std::ops::Deref;

/// Backend of units of other hosts.
pub const HOST_BACKEND: &str = "host";

/// A model compiled for a target, ready to run: a Plan that [`verify::plan`] accepts, and its kernels.
///
/// The Plan is only lent, so it cannot be changed. The verifier cannot check that kernels keep to the extents
/// of their arguments: see [`KernelFn`].
#[derive(Clone, Debug)]
pub struct Program {
    plan: Plan,
    /// By index of [`Plan::kernels`].
    kernels: Vec<KernelFn>,
}

/// Code of a step, with its address.
#[derive(Clone, Copy, Debug)]
pub enum Code {
    /// A kernel of the object code. See [`KernelFn`] for its contract.
    Kernel(KernelFn),
    /// A function of the runtime; runs on one thread.
    Builtin(Builtin),
}

impl Program {
    /// Accelerators that have steps, each with its index.
    pub fn accelerators(&self) -> impl Iterator<Item = (usize, &UnitRef)> {
        let used = |u: usize| self.entries.iter().flat_map(|e| &e.steps).any(|s| s.unit as usize == u);
        self.units.iter().enumerate().skip(1).filter(move |(u, _)| used(*u))
    }

    /// Names of the files that hold weights.
    pub(crate) fn weight_files(&self) -> impl Iterator<Item = &str> {
        let of = |s: &plan::Segment| Some(&*self.files.get(s.file as usize)?.path);
        self.segments.iter().filter_map(of)
    }

    /// Whether a file may be missing: it has weights, and there are several memories, some of which may be other
    /// hosts'. What a unit here reads must be there.
    pub(crate) fn may_lack(&self, file: u32) -> bool {
        self.memories.len() > 1 && self.segments.iter().any(|s| s.file == file)
    }

    /// Verifies a plan and finds its kernels.
    ///
    /// Code that `resolve` returns must stay in memory while the result, or an engine opened on it, is used.
    ///
    /// # Errors
    /// [`Error::Bundle`] for an invalid plan, one of another version, or a symbol that `resolve` does not
    /// know.
    pub fn new(plan: Plan, resolve: &dyn Fn(&str) -> Option<KernelFn>) -> Result<Self> {
        verify::plan(&plan).map_err(Error::plan)?;
        let missing =
            |k: &plan::KernelRef| Error::Bundle(format!("the object code has no kernel `{}`", k.symbol));
        let find = |k: &plan::KernelRef| resolve(&k.symbol).ok_or_else(|| missing(k));
        let kernels = plan.kernels.iter().map(find).collect::<Result<_>>()?;
        Ok(Self { plan, kernels })
    }

    /// Program that is linked into a `run`: an encoded plan, and its kernels in the plan's order.
    ///
    /// # Errors
    /// As [`Program::new`]; bytes that are not a plan.
    pub fn linked(plan: &[u8], kernels: &[KernelFn]) -> Result<Self> {
        let plan = Plan::decode(plan).map_err(Error::plan)?;
        let symbols = plan.kernels.iter().map(|k| k.symbol.clone());
        let kernels: HashMap<String, KernelFn> = symbols.zip(kernels.iter().copied()).collect();
        Self::new(plan, &|symbol| kernels.get(symbol).copied())
    }

    /// Removes these features from the CPU features that the program requires, because an emulator in this
    /// process executes their instructions.
    #[must_use]
    pub fn emulating(mut self, features: &[String]) -> Self {
        self.plan.target.features.retain(|f| !features.contains(f));
        self
    }

    /// The code of a step of the plan.
    pub(crate) fn code(&self, code: plan::Code) -> Code {
        match code {
            // The verifier has checked the index.
            plan::Code::Kernel(k) => Code::Kernel(self.kernels[k as usize]),
            plan::Code::Builtin(b) => Code::Builtin(b),
        }
    }
}

impl Deref for Program {
    type Target = Plan;

    fn deref(&self) -> &Plan {
        &self.plan
    }
}
