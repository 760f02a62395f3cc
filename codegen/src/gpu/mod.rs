//! Kernels for NVIDIA GPUs: the same [`KernelSpec`]s with the same operands and meaning, written for
//! threads, as PTX text.
//!
//! | | on CPUs | here |
//! |---|---|---|
//! | parameters | table of addresses, range of work items, scratch | one address each, then the number of valid rows |
//! | work | items of a grid, by threads of a pool | [`Launch`]: blocks of threads |
//! | weights | panels | [`Layout::Rows`]: a lane of a warp reads 16 bytes of a row, its neighbour the next |
//! | KV cache | panels of tokens and of channels | [`CACHE_ORDER`] for keys and values: `[ctx][dim]` |
//! | recurrent states | panels of columns | [`FOLDED_ORDER`]: `[rows][dim]` |
//! | [`Schedule::rows`](crate::Schedule::rows) | rows of a work item | up to [`FEW_ROWS`]: rows that a warp multiplies by a row of the weight; more: tiles |
//!
//! Each file is a kernel family, as in `kernels`, and is written as the code of one thread.
#![expect(clippy::cast_possible_truncation, reason = "kernels: lanes, tiles and strides of one matrix")]

mod angles;
mod argmax;
mod attention;
mod combine;
mod conv;
mod dispatch;
mod dot;
mod expert;
mod launch;
mod linear;
mod map;
mod norm;
mod plain_tile;
mod position;
mod quantise;
mod recurrence;
mod router;
mod rows;
mod sequences;
mod tile;
mod weight;

pub use launch::{Extent, Launch};

use crate::dsl::{GpuFunction, Kb};
use crate::emit::{new_module, optimise};
use crate::error::{Error, Result};
use crate::machine::Isa;
use crate::spec::schedule::Schedule;
use crate::spec::{ComputeType, KernelSpec, packed_words};
use inkwell::OptimizationLevel;
use inkwell::context::Context;
use inkwell::targets::{
    CodeModel, FileType, InitializationConfig, RelocMode, Target, TargetMachine, TargetTriple,
};
use moec_ir::op::DispatchLayout;
use moec_ir::plan::{Layout, Results};
use moec_ir::state::CacheOrder;
use moec_ir::types::Format;
use std::collections::BTreeMap;

/// Most rows that are multiplied without tiles, as in [`Schedule::rows`](crate::Schedule::rows).
pub const FEW_ROWS: usize = 8;

/// Whether many rows of bf16, `depth` numbers each, are multiplied by rows of a weight on tensor cores.
pub fn on_tensor_cores(format: Format, depth: usize) -> bool {
    tile::multiplies(format, depth, packed_words(depth, ComputeType::Bf16))
}

/// Order of keys and of values in a cache: `[ctx][dim]`.
pub const CACHE_ORDER: CacheOrder = CacheOrder::Keys { nr: 1 };

/// Order of states that every token changes, recurrent ones and the rows before a convolution's: `[rows][dim]`.
pub const FOLDED_ORDER: CacheOrder = CacheOrder::Rows;

/// A generation of GPUs, by its compute capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Sm {
    /// 8.0: Ampere (A100).
    Sm80,
    /// 8.9: Ada (RTX 40, L4, L40).
    Sm89,
    /// 9.0: Hopper (H100, H200).
    Sm90,
}

impl Sm {
    /// Every one.
    pub const ALL: [Self; 3] = [Self::Sm80, Self::Sm89, Self::Sm90];

    /// LLVM's and NVIDIA's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sm80 => "sm_80",
            Self::Sm89 => "sm_89",
            Self::Sm90 => "sm_90",
        }
    }
}

/// The version of PTX that is written: that of CUDA 11.8, the first to know all of [`Sm`].
const PTX: &str = "+ptx78";

/// A kernel that is not a [`KernelSpec`], because CPUs have it as a function of the runtime, or one that is.
#[derive(Clone, Debug, PartialEq)]
pub enum Kernel {
    /// As on CPUs.
    Spec(KernelSpec),
    /// `[ids i32 [T, k], table out]`: the dispatch table. Choices that are no expert have no slot.
    Dispatch(DispatchLayout),
    /// `[pos i32 [T], freqs [half], out [T, 2·half]]`: cosines, then sines, of `pos · freqs`, times `scale`.
    Angles {
        /// Frequencies.
        half: usize,
        /// Factor of the results.
        scale: f32,
    },
    /// `[x, id out i32 [T]]`: the lowest number of the largest column of each row; −1 where that is not
    /// finite.
    Argmax {
        /// Columns.
        cols: usize,
        /// Row distance of `x`.
        x_ld: usize,
    },
}

impl From<KernelSpec> for Kernel {
    fn from(spec: KernelSpec) -> Self {
        Self::Spec(spec)
    }
}

/// A [`KernelSpec`] for GPUs.
pub(crate) trait GpuKernel {
    /// Its launch; `None` where a compute type has no kernel.
    fn launch(&self) -> Option<Launch>;
    /// Writes its body.
    fn write<'k>(&self, k: &'k Kb<'k>);
}

impl Kernel {
    /// Symbol: equal exactly for equal parameters.
    pub fn symbol(&self) -> String {
        match self {
            Self::Spec(spec) => {
                let symbol = spec.symbol(&Isa::GPU);
                spec.schedule().map_or(symbol.clone(), |s| format!("{symbol}_rows{}", s.rows))
            }
            Self::Dispatch(DispatchLayout { rows, k, experts }) => {
                format!("moec_dispatch_t{rows}_k{k}_e{experts}")
            }
            Self::Angles { half, scale } => format!("moec_angles_h{half}_s{:08x}", scale.to_bits()),
            Self::Argmax { cols, x_ld } => format!("moec_argmax_c{cols}_x{x_ld}"),
        }
    }

    /// Its launch.
    ///
    /// # Errors
    /// [`Error::Spec`] if its parameters contradict each other, [`Error::Target`] if no GPU kernel exists for
    /// them.
    pub fn launch(&self) -> Result<Launch> {
        let launch = match self {
            Self::Spec(spec) => {
                // Any number of rows is a schedule here.
                let usual = spec.with_schedule(Schedule::default());
                usual.check(&Isa::GPU).map_err(|what| Error::Spec { symbol: self.symbol(), what })?;
                spec.kernel().on_gpu().and_then(GpuKernel::launch)
            }
            Self::Dispatch(layout) => dispatch::launch(*layout),
            Self::Angles { half, .. } => Some(angles::launch(*half)),
            Self::Argmax { .. } => Some(argmax::launch()),
        };
        launch.ok_or_else(|| Error::Target {
            what: format!("there is no GPU kernel for `{}`", self.symbol()),
            hint: "leave this step to the CPU, or choose another compute type for it".to_owned(),
        })
    }

    /// Operands.
    pub fn operands(&self) -> usize {
        match self {
            Self::Spec(spec) => spec.args(),
            Self::Dispatch(_) | Self::Argmax { .. } => 2,
            Self::Angles { .. } => 3,
        }
    }

    /// Operands that it writes to.
    pub fn results(&self) -> Results {
        match self {
            Self::Spec(spec) => spec.results(),
            Self::Dispatch(_) | Self::Argmax { .. } | Self::Angles { .. } => {
                Results::last(1, self.operands())
            }
        }
    }

    /// Layout of its weight matrix, if it reads one.
    pub fn layout(&self) -> Option<Layout> {
        match self {
            Self::Spec(spec) => spec.layout(&Isa::GPU).map(|_| Layout::Rows),
            Self::Dispatch(_) | Self::Angles { .. } | Self::Argmax { .. } => None,
        }
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        match self {
            Self::Spec(spec) => match spec.kernel().on_gpu() {
                Some(kernel) => kernel.write(k),
                None => k.fail("no such kernel"),
            },
            Self::Dispatch(layout) => dispatch::write(k, *layout),
            Self::Angles { half, scale } => angles::write(k, *half, *scale),
            Self::Argmax { cols, x_ld } => argmax::write(k, *cols, *x_ld),
        }
    }
}

/// PTX of all kernels, symbols sorted, duplicates merged. The same input gives the same text.
///
/// # Errors
/// [`Error::Target`] if LLVM does not support these GPUs or a kernel does not exist here, [`Error::Spec`] or
/// [`Error::Bug`] for our own mistakes.
pub fn compile(sm: Sm, kernels: &[Kernel]) -> Result<String> {
    let target = target_machine(sm)?;
    let sorted: BTreeMap<String, &Kernel> = kernels.iter().map(|k| (k.symbol(), k)).collect();
    let ctx = Context::create();
    let module = new_module(&ctx, &target, "kernels");
    for (symbol, kernel) in &sorted {
        let Launch { block, shared, .. } = kernel.launch()?;
        let operands = kernel.operands();
        let k = Kb::of_gpu(&ctx, &module, &GpuFunction { symbol, operands, block, shared })?;
        kernel.write(&k);
        k.finish()?;
        module.verify().map_err(|e| Error::Bug(format!("{symbol}: {e}")))?;
    }
    optimise(&module, &target, "default<O3>")?;
    let text = target.write_to_memory_buffer(&module, FileType::Assembly).map_err(Error::bug)?;
    Ok(String::from_utf8_lossy(text.as_slice()).trim_end_matches('\0').to_owned())
}

fn target_machine(sm: Sm) -> Result<TargetMachine> {
    const TRIPLE: &str = "nvptx64-nvidia-cuda";
    Target::initialize_nvptx(&InitializationConfig::default());
    let missing = |e: String| Error::Target {
        what: format!("this LLVM does not write for `{TRIPLE}` ({}): {e}", sm.name()),
        hint: "install an LLVM with the NVPTX target".to_owned(),
    };
    let triple = TargetTriple::create(TRIPLE);
    let target = Target::from_triple(&triple).map_err(|e| missing(e.to_string()))?;
    target
        .create_target_machine(
            &triple,
            sm.name(),
            PTX,
            OptimizationLevel::Aggressive,
            RelocMode::Default,
            CodeModel::Default,
        )
        .ok_or_else(|| missing("it has no such GPU".to_owned()))
}
