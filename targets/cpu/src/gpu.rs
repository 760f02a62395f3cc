//! GPU kernels, for units that have kernels of their own: the same operators, selected as for the CPU.
//!
//! Few rows are multiplied by weights in f32: results then differ from the CPU's in the order of sums alone.
//! Many rows become bf16 for tensor cores, unless activations are exact (`arithmetic`).

use crate::select::{NodeView, Selection, Unsupported, Work};
use crate::{CodegenError, CpuTarget, KernelSpec, Schedule};
use moec_codegen::Isa;
use moec_codegen::gpu;
use moec_ir::op::DispatchLayout;
use moec_ir::plan::{Builtin, CacheOrder, Grid, Launch, Layout};

pub use moec_codegen::gpu::{Kernel, Sm};

/// GPU kernels for a generation of GPUs.
#[derive(Clone, Debug)]
pub struct GpuTarget {
    sm: Sm,
    /// Selects with the vectors of a thread.
    select: CpuTarget,
}

impl GpuTarget {
    /// Kernels of a generation, in NVIDIA's spelling (`sm_90`), together with a CPU; `None` if the generation
    /// is not supported.
    pub fn new(generation: &str, cpu: &CpuTarget) -> Option<Self> {
        let sm = Sm::ALL.into_iter().find(|sm| sm.name() == generation)?;
        let select = CpuTarget { isa: Isa::GPU, ..cpu.clone() };
        Some(Self { sm, select })
    }

    /// The generation.
    pub fn sm(&self) -> Sm {
        self.sm
    }

    /// Order in which a tensor of a KV cache is stored.
    pub fn cache_order(&self) -> CacheOrder {
        gpu::CACHE_ORDER
    }

    /// Order in which states are stored that every token changes.
    pub fn folded_order(&self) -> CacheOrder {
        gpu::FOLDED_ORDER
    }

    /// Selects the kernels of a node.
    ///
    /// # Errors
    /// As [`CpuTarget::select`].
    pub fn select(&self, node: &NodeView<'_>) -> Result<Selection, Unsupported> {
        let mut selection = self.select.select(node)?;
        // Everything that the CPU stores in panels is stored in rows here.
        selection.layouts.iter_mut().for_each(|(_, layout)| *layout = Layout::Rows);
        Ok(selection)
    }

    /// A kernel for calls with this many rows.
    pub fn kernel(&self, spec: &KernelSpec, rows: usize) -> Kernel {
        Kernel::from(spec.with_schedule(Schedule { rows, ..Schedule::default() }))
    }

    /// The GPU kernel for some work; functions of the CPU's runtime also have kernels. `None` if the work
    /// depends on more than the step's operands: on the units of experts, or on the length of a prompt.
    pub fn kernel_of(&self, work: &Work, rows: usize) -> Option<Kernel> {
        match *work {
            Work::Kernel(ref spec) => Some(self.kernel(spec, rows)),
            Work::Builtin(Builtin::Dispatch { rows, k, experts, candidates: None, .. }) => {
                let [rows, k, experts] = [rows, k, experts].map(|n| n as usize);
                Some(Kernel::Dispatch(DispatchLayout { rows, k, experts }))
            }
            Work::Builtin(Builtin::RopeAngles { half, scale, long: None }) => {
                Some(Kernel::Angles { half: half as usize, scale: f32::from_bits(scale) })
            }
            Work::Builtin(_) => None,
        }
    }

    /// Launch of a kernel.
    ///
    /// # Errors
    /// The GPU kernel does not exist.
    pub fn launch(&self, kernel: &Kernel) -> Result<Launch, CodegenError> {
        kernel.launch()
    }

    /// Grid of its work in a plan: the place of the dispatch table of experts. Its launch gives the number of
    /// blocks.
    pub fn grid(&self, kernel: &Kernel) -> Grid {
        match kernel {
            Kernel::Spec(spec) if spec.product().is_some_and(|p| p.experts.is_some()) => {
                Grid::Experts { table: 1, tiles: 1 }
            }
            _ => Grid::One,
        }
    }

    /// PTX of all kernels, the same text for the same kernels.
    ///
    /// # Errors
    /// Our bugs, as LLVM reports them; an LLVM without these GPUs.
    pub fn compile(&self, kernels: &[Kernel]) -> Result<String, CodegenError> {
        gpu::compile(self.sm, kernels)
    }
}
