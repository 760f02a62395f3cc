//! The kernels that can be requested.
//!
//! Every kernel is `void symbol(ptr args, i64 n, i64 begin, i64 end, ptr scratch)`: `args[i]` is the
//! address of operand `i` in the order that its type documents, `n` the number of valid rows,
//! `begin .. end` the work items of [`KernelSpec::grid`] to do. Activations are f32; `ld` is the distance
//! from row to row, in elements. Results do not depend on how work items are split, nor on their order beyond
//! what [`Grid::Clusters`] requires.

pub mod schedule;
mod symbol;

use crate::kernels::Kernel;
use crate::machine::Isa;
use moec_ir::op::DispatchLayout;
use moec_ir::plan::{Grid, Layout, Results};
use moec_ir::types::{Format, GROUP};
use schedule::Schedule;
use std::fmt;

pub use crate::kernels::attention::Attention;
pub use crate::kernels::attention::merge::AttentionMerge;
pub use crate::kernels::cache::CacheWrite;
pub use crate::kernels::combine::Combine;
pub use crate::kernels::copy_columns::CopyColumns;
pub use crate::kernels::embed::Embed;
pub use crate::kernels::expert::{ExpertDown, ExpertGateUp, WeightOrder};
pub use crate::kernels::gather_rows::GatherRows;
pub use crate::kernels::linear::Linear;
pub use crate::kernels::map::{Map, MapOp};
pub use crate::kernels::neuron::{NeuronClusters, NeuronDown, NeuronPredict, NeuronUp};
pub use crate::kernels::norm::{Norm, NormKind};
pub use crate::kernels::position::{Rotation, RowNorm};
pub use crate::kernels::quantise::Quantise;
pub use crate::kernels::recurrence::{CausalConv, DeltaRule, SelectiveScan};
pub use crate::kernels::rope::Rope;
pub use crate::kernels::router::Router;
pub use crate::kernels::softmax::Softmax;
pub use crate::kernels::zero_experts::ZeroExperts;
pub(crate) use symbol::Symbol;

/// Compute type of a matrix kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ComputeType {
    /// Rows and weights as f32: exact up to the order of summation.
    #[default]
    F32,
    /// Rows rounded to bf16, products of pairs summed in f32.
    Bf16,
    /// Rows as bytes in groups of 32 with an f32 scale each, products summed as integers within a group.
    I8,
}

impl ComputeType {
    /// Every one.
    pub const ALL: [Self; 3] = [Self::F32, Self::Bf16, Self::I8];

    /// Name in symbols and in `model.toml`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::I8 => "i8",
        }
    }

    /// The one of that name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|c| c.name() == name)
    }

    /// The one of the kernel with this symbol.
    pub fn of_symbol(symbol: &str) -> Self {
        let named = symbol.split_once("_as_").map(|(_, rest)| rest.split('_').next().unwrap_or(rest));
        named.and_then(Self::parse).unwrap_or_default()
    }
}

/// Words of 32 bits that a row of `cols` numbers takes in the format of `compute`.
///
/// bf16: one word per pair. Bytes: for every group of 32 its codes, the scale (f32) and `−128 · Σ codes`
/// (i32), ten words; absent codes are zero.
pub const fn packed_words(cols: usize, compute: ComputeType) -> usize {
    match compute {
        ComputeType::F32 => cols,
        ComputeType::Bf16 => cols.div_ceil(2),
        ComputeType::I8 => cols.div_ceil(GROUP) * 10,
    }
}

/// Words from one row to the next where rows of `words` words are to be multiplied by a matrix: an odd number
/// of whole cache lines. Rows that are multiplied by the same weights are then in different sets of a cache,
/// even if the model's extents are powers of two. Short rows are left unchanged.
pub const fn pad_row_stride(words: usize) -> usize {
    const LINE: usize = 16;
    const SHORT: usize = 128;
    if words < SHORT { words } else { (words.div_ceil(LINE) | 1) * LINE }
}

/// Format of rows that a kernel multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RowFormat {
    /// The compute type.
    pub compute: ComputeType,
    /// Words from row to row.
    pub ld: usize,
}

impl RowFormat {
    /// Plain numbers, `ld` words from row to row.
    pub const fn f32(ld: usize) -> Self {
        Self { compute: ComputeType::F32, ld }
    }
}

/// A product of rows with matrices.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Product {
    /// Input channels of a matrix.
    pub k: usize,
    /// Output channels of a matrix.
    pub n: usize,
    /// Matrices that every row is multiplied by, each with its own range of columns.
    pub groups: usize,
    /// The dispatch table, where every expert has a matrix of its own.
    pub experts: Option<DispatchLayout>,
    /// Format of the matrices.
    pub format: Format,
    /// Compute type.
    pub compute: ComputeType,
    /// Order of the matrices.
    pub order: WeightOrder,
    /// Division of work.
    pub schedule: Schedule,
}

/// The table of kernels: a row each.
macro_rules! kernels {
    ($($name:ident,)*) => {
        /// A kernel with every parameter baked in. `?` marks operands that are absent when the flag is off.
        #[derive(Clone, PartialEq)]
        pub enum KernelSpec {
            $(#[doc = concat!("See [`", stringify!($name), "`].")] $name($name),)*
        }

        impl KernelSpec {
            /// Each of them as a kernel.
            pub(crate) fn kernel(&self) -> &dyn Kernel {
                match self {
                    $(Self::$name(kernel) => kernel,)*
                }
            }

            fn kernel_mut(&mut self) -> &mut dyn Kernel {
                match self {
                    $(Self::$name(kernel) => kernel,)*
                }
            }
        }

        $(
            impl From<$name> for KernelSpec {
                fn from(kernel: $name) -> Self {
                    Self::$name(kernel)
                }
            }
        )*
    };
}

kernels! {
    Embed,
    Norm,
    Quantise,
    Linear,
    Rope,
    CacheWrite,
    Attention,
    AttentionMerge,
    Router,
    ExpertGateUp,
    ExpertDown,
    NeuronUp,
    NeuronPredict,
    NeuronDown,
    NeuronClusters,
    Combine,
    Map,
    CopyColumns,
    Softmax,
    GatherRows,
    ZeroExperts,
    CausalConv,
    DeltaRule,
    SelectiveScan,
}

impl KernelSpec {
    /// Kind of the kernel, in a word.
    pub fn kind(&self) -> &'static str {
        self.kernel().kind()
    }

    /// Whether it converts rows to another format, and does nothing else.
    pub fn is_conversion(&self) -> bool {
        matches!(self, Self::Quantise(_))
    }

    /// Symbol: readable, and equal exactly for equal parameters (on the same [`Isa`]).
    pub fn symbol(&self, isa: &Isa) -> String {
        let mut symbol = Symbol::default();
        self.kernel().name(&mut symbol, isa);
        symbol.0
    }

    /// Work items.
    pub fn grid(&self, isa: &Isa) -> Grid {
        self.kernel().grid(isa)
    }

    /// Number of arguments.
    pub fn args(&self) -> usize {
        self.kernel().args()
    }

    /// Arguments that it writes.
    pub fn results(&self) -> Results {
        self.kernel().results()
    }

    /// Bytes of scratch that one thread needs; the scratch must be aligned to 64 bytes.
    pub fn scratch_bytes(&self, isa: &Isa) -> usize {
        self.kernel().scratch_bytes(isa)
    }

    /// Layout of its weight matrix, if it reads one.
    pub fn layout(&self, isa: &Isa) -> Option<Layout> {
        self.kernel().layout(isa)
    }

    /// Product, if it multiplies by a matrix and its work can be cut otherwise.
    pub fn product(&self) -> Option<Product> {
        self.kernel().product()
    }

    /// Format of its matrix, if it multiplies by one.
    pub fn weight_format(&self) -> Option<Format> {
        self.product().map(|p| p.format)
    }

    /// Compute type, if it multiplies by a matrix.
    pub fn compute(&self) -> Option<ComputeType> {
        self.product().map(|p| p.compute)
    }

    /// Schedule, if it multiplies by a matrix.
    pub fn schedule(&self) -> Option<Schedule> {
        self.product().map(|p| p.schedule)
    }

    /// The same kernel with its work split otherwise; unchanged if it has no matrix.
    #[must_use]
    pub fn with_schedule(&self, to: Schedule) -> Self {
        let mut spec = self.clone();
        if let Some(schedule) = spec.kernel_mut().schedule_mut() {
            *schedule = to;
        }
        spec
    }

    /// Contradictions that would make the kernel read or write out of bounds.
    pub(crate) fn check(&self, isa: &Isa) -> Result<(), String> {
        let schedule = self.schedule().map(|s| s.check(isa));
        match self.kernel().rules(isa).iter().chain(schedule.iter().flatten()).find(|(holds, _)| !holds) {
            Some((_, what)) => Err(format!("{what} ({self:?} on {isa:?})")),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for KernelSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kernel().fmt(f)
    }
}

pub use moec_ir::bundle::active_list_words;
