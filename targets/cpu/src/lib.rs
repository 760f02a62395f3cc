//! The CPU backend: kernels for each node, object code, weight packing, the runner's source, and the executor
//! that loads a bundle's object code into this process.
#![cfg_attr(test, allow(clippy::cast_possible_truncation, reason = "numbers of tests are small"))]

mod arithmetic;
mod attend;
mod cost;
pub mod emulate;
mod feedback;
mod fuse;
pub mod gpu;
mod host;
mod neurons;
mod packing;
pub mod roofline;
mod select;
mod tune;

pub use arithmetic::Activations;
pub use attend::CacheView;
pub use cost::{Bound, Estimate, Figures, Load, Rate};
pub use fuse::{FusePosition, Fused, Operand};
pub use gpu::GpuTarget;
pub use host::{HostError, HostUnit};
pub use moec_codegen::has_gate_bounds;
pub use moec_codegen::pack::feedback::uses_feedback;
pub use moec_codegen::pack::quantise::LARGEST;
pub use moec_codegen::pack::{Feedback, Q4o, Weighting, quantise_q4o, round_rows};
pub use moec_codegen::source::SourceFile;
pub use moec_codegen::{
    CACHE_BLOCK, ComputeType, Error as CodegenError, KernelSpec, Knob, Objects, RowFormat, Schedule,
};
pub use packing::{
    Block, PackError, Packer, Scratch, Stored, WeightImportance, groups, packed_bytes, round_as_packed,
    unpack, unpack_stored,
};
pub use select::{InputView, Launch, NodeView, Role, Selection, Unsupported, Work};
pub use tune::{Stopwatch, TuneError};

use moec_backend::{Backend, Flaw};
use moec_codegen::{Isa, Machine};
use moec_device::{CPU_BACKEND, Device, DeviceUnit, LegalOps, Memory, UnitKind};
use moec_ir::plan::{Grid, KernelRef, Layout, Plan, TargetInfo};

/// The CPU backend.
#[derive(Clone, Copy, Debug)]
pub struct Cpu;

impl Backend for Cpu {
    fn name(&self) -> &'static str {
        CPU_BACKEND
    }

    fn check(&self, _device: &Device, unit: &DeviceUnit) -> Result<(), Flaw> {
        if unit.kind == UnitKind::Cpu {
            return Ok(());
        }
        Err(Flaw::new("unit.backend", "a unit of the backend `cpu` is of kind `cpu`"))
    }
}

/// A CPU to compile for.
#[derive(Clone, Debug)]
pub struct CpuTarget {
    name: String,
    machine: Machine,
    isa: Isa,
    legal: LegalOps,
    activations: Activations,
    figures: Figures,
    device: Device,
}

/// Name of the memory that weights are read from, in device files.
pub const DISK: &str = "disk";

impl CpuTarget {
    /// The target that a device file describes; `cpu = "native"` is this machine.
    ///
    /// # Errors
    /// A CPU that LLVM does not know, or a host that cannot be described.
    pub fn new(device: &Device) -> Result<Self, CodegenError> {
        let machine = if device.is_native() {
            let mut machine = Machine::host()?;
            // LLVM reads the features of the CPU; the operating system may withhold some of them (tiles, in a
            // sandbox).
            machine.features.retain(|f| moec_runtime::platform::cpu::missing(&[f]).is_empty());
            machine
        } else {
            let (triple, cpu) = (device.triple.clone(), device.cpu.clone());
            Machine { triple, cpu, features: device.features.clone() }
        };
        let isa = machine.isa();
        let legal = device.legal_ops.clone();
        let features = machine.all_features();
        let figures = Figures::of(device, &isa, &|f| features.iter().any(|g| g == f));
        let activations = Activations::default();
        let (name, device) = (device.name.clone(), device.clone());
        Ok(Self { name, machine, isa, legal, activations, figures, device })
    }

    /// The device that it was made of.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Memory that weights are read from, if the device file says how fast.
    pub fn disk(&self) -> Option<&Memory> {
        self.device.memories.iter().find(|m| m.name == DISK)
    }

    /// The same target with another arithmetic between the weights.
    #[must_use]
    pub fn with_activations(self, activations: Activations) -> Self {
        Self { activations, ..self }
    }

    /// The arithmetic that was requested.
    pub fn activations(&self) -> Activations {
        self.activations
    }

    /// Name of the target.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Target in a plan.
    pub fn info(&self) -> TargetInfo {
        TargetInfo {
            name: self.name.clone(),
            triple: self.machine.triple.clone(),
            cpu: self.machine.cpu.clone(),
            features: self.machine.all_features(),
        }
    }

    /// LLVM triple.
    pub fn triple(&self) -> &str {
        &self.machine.triple
    }

    /// Whether the device may run an operator, by its name in the Graph.
    pub fn is_legal(&self, op: &str) -> bool {
        self.legal.allows(op)
    }

    /// Cost of one launch in element moves, for the rewriting pass. A launch is a barrier of about a
    /// microsecond, in which a core moves some thousand elements from its second-level cache.
    pub fn launch_cost(&self) -> f64 {
        4096.0
    }

    /// Symbol of a kernel.
    pub fn symbol(&self, spec: &KernelSpec) -> String {
        spec.symbol(&self.isa)
    }

    /// Reference to a kernel in a plan.
    pub fn reference(&self, spec: &KernelSpec) -> KernelRef {
        KernelRef { symbol: self.symbol(spec), results: spec.results() }
    }

    /// Work items of a kernel.
    pub fn grid(&self, spec: &KernelSpec) -> Grid {
        spec.grid(&self.isa)
    }

    /// Scratch that a kernel needs per thread, in bytes.
    pub fn scratch_bytes(&self, spec: &KernelSpec) -> usize {
        spec.scratch_bytes(&self.isa)
    }

    fn weight_layout(&self, kernel: impl Into<KernelSpec>) -> Option<Layout> {
        kernel.into().layout(&self.isa)
    }

    /// The fields of a kernel's schedule that it looks at, with their values.
    pub fn pieces(&self, spec: &KernelSpec, schedule: Schedule) -> Vec<(Knob, usize)> {
        let turned = Knob::ALL.into_iter().filter(|k| k.applies_to(spec, &self.isa));
        turned.map(|k| (k, schedule.get(k))).collect()
    }

    /// The schedule of these fields; the others are the usual ones. `None`: the target has no kernels of it.
    pub fn schedule(&self, pieces: &[(Knob, usize)]) -> Option<Schedule> {
        let with = |s: Schedule, &(knob, value): &(Knob, usize)| s.with(knob, value);
        Some(pieces.iter().fold(Schedule::default(), with)).filter(|s| s.fits(&self.isa))
    }

    /// Object code of kernels; `objects` may have it already, and keeps it.
    ///
    /// # Errors
    /// Our bugs, as LLVM reports them.
    pub fn compile(&self, kernels: &[KernelSpec], objects: &dyn Objects) -> Result<Vec<u8>, CodegenError> {
        moec_codegen::compile(&self.machine, kernels, objects)
    }

    /// Object code that names the kernels of a plan to a precompiled `run`, and holds the plan's bytes.
    ///
    /// # Errors
    /// Our bugs, as LLVM reports them.
    pub fn table(&self, plan: &Plan, encoded: &[u8]) -> Result<Vec<u8>, CodegenError> {
        let symbols: Vec<&str> = plan.kernels.iter().map(|k| k.symbol.as_str()).collect();
        moec_codegen::table(&self.machine, &symbols, encoded)
    }
}

/// Sources of the runner crate, for a plan that verifies. `native`: the path of the constant that brings
/// units that the runtime does not.
///
/// # Errors
/// Names that Rust does not take.
pub fn runner_source(plan: &Plan, native: Option<&str>) -> Result<Vec<SourceFile>, CodegenError> {
    moec_codegen::source::runner(plan, native)
}

/// Version of LLVM that this build is linked to.
pub fn llvm_version() -> String {
    moec_codegen::llvm_version()
}
