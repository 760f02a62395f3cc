//! The Plan: what the runtime executes.
//!
//! Everything is decided: buffers have arena offsets, weights have file offsets, steps have kernels,
//! arguments and barriers. The total memory is known before anything is allocated.
//!
//! Stored as bincode ([`Plan::encode`], [`Plan::decode`]); `plan.txt` is the text form.

use crate::bundle::{Bundle, PARTS};
pub use crate::experts::{
    Cached, ExpertCosts, ExpertLayer, ExpertPlacement, ExpertPolicy, Refine, Scheduled, StreamSet,
};
use crate::graph::EntryKind;
pub use crate::launch::{Extent, Launch, ThreadKernel};
pub use crate::memory::{Memory, MemoryLink, Resident, UnitRef};
pub use crate::op::FETCHED;
use crate::op::{Attributes, attributes};
pub use crate::paging::{PagedLayer, Paging};
pub use crate::placement::{Expected, ExpertGroup, ExpertRow, ExpertTable, OpPlace, Overflow, Placement};
pub use crate::results::Results;
use crate::state;
pub use crate::state::{CacheOrder, StateBuf, StateKind};
use crate::text::ops::{Parsed, Reader, Word, Writer};
use crate::types::{DType, Format, GROUP};
use bincode::{Decode, Encode};
use std::collections::BTreeSet;

/// Version of the stored form. A runtime refuses any other.
pub const PLAN_VERSION: u32 = 17;

/// Alignment of arena buffers, weight segments and states, in bytes: one cache line, one AVX-512 vector.
pub const ALIGN: u64 = 64;

/// A model compiled for a target.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct Plan {
    /// [`PLAN_VERSION`] of the writer.
    pub version: u32,
    /// The model.
    pub model: ModelInfo,
    /// The target.
    pub target: TargetInfo,
    /// Units that steps run on. The first is the CPU.
    pub units: Vec<UnitRef>,
    /// Memories of the units. The first is the CPU's.
    pub memories: Vec<Memory>,
    /// Between which of them values are copied.
    pub links: Vec<MemoryLink>,
    /// Bytes of kernel scratch per thread.
    pub scratch_bytes: u64,
    /// Files of the bundle that the plan reads.
    pub files: Vec<FileRef>,
    /// Packed weights.
    pub segments: Vec<Segment>,
    /// States: the KV cache, and what recurrences keep.
    pub states: Vec<StateBuf>,
    /// Units of experts.
    pub experts: ExpertPlacement,
    /// Experts that NDP command streams compute, at most one set per layer and unit.
    pub streams: Vec<StreamSet>,
    /// Kernels of the object code.
    pub kernels: Vec<KernelRef>,
    /// GPU kernels that units beside the CPU launch.
    pub launches: Vec<ThreadKernel>,
    /// Static graphs of artifacts.
    pub graphs: Vec<GraphDecl>,
    /// Experts that static graphs compute, at most one set per layer.
    pub sets: Vec<ExpertSet>,
    /// Other parts that static graphs compute, entry point by entry point.
    pub parts: Vec<GraphPart>,
    /// Entry points, prefill first, then decode, then little, each by ascending rows.
    pub entries: Vec<Entry>,
    /// Decisions about operators and experts, with their reasons.
    pub placement: Placement,
    /// Experts that stay on flash, where memory has a budget.
    pub paging: Option<Paging>,
}

/// Facts about the model that the runtime needs.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct ModelInfo {
    /// Family (`qwen3_moe`).
    pub family: String,
    /// Vocabulary size: ids are `0 .. vocab`.
    pub vocab: u32,
    /// Hidden size.
    pub hidden: u32,
    /// Layers.
    pub layers: u32,
    /// Longest sequence, in tokens.
    pub max_context: u32,
    /// Sequences that the states hold.
    pub slots: u32,
    /// Token put before every text, if the tokenizer's configuration asks for one.
    pub bos: Option<u32>,
    /// Tokens that end a generation.
    pub eos: Vec<u32>,
    /// Parameters in all.
    pub parameters: u64,
    /// Parameters that one token uses.
    pub active_parameters: u64,
    /// Decoding with fewer experts, where little entry points are compiled.
    pub big_little: Option<BigLittle>,
    /// Percent of the neurons of experts that thresholds after SiLU make 0, as calibration saw them: an approximation. `None`
    /// where there are no thresholds.
    pub silenced: Option<f32>,
}

attributes! {
    /// Big-little decoding (MoBiLE, §III-A, Algorithm 1).
    #[derive(Clone, Copy, Debug, PartialEq, Encode, Decode)]
    pub struct BigLittle as "little" {
        /// Experts per token of the little entry points.
        pub experts: u32,
        /// γ: a token of the little entry point is kept if the largest probability of its softmax exceeds it. In `[0, 1]`.
        pub gamma: f32,
    }
}

impl BigLittle {
    /// γ as the shortest decimal number that it is: 0.7, not 0.699999988.
    pub fn gamma(&self) -> f64 {
        self.gamma.to_string().parse().unwrap_or_else(|_| f64::from(self.gamma))
    }
}

/// Target of the object code.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct TargetInfo {
    /// Name given to `--target`.
    pub name: String,
    /// LLVM triple.
    pub triple: String,
    /// LLVM CPU name.
    pub cpu: String,
    /// Features that the CPU must have, in `/proc/cpuinfo`-independent LLVM spelling (`avx512f`).
    pub features: Vec<String>,
}

/// A file of the bundle.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct FileRef {
    /// Path relative to the bundle, with `/`.
    pub path: String,
    /// Size.
    pub bytes: u64,
    /// SHA-256.
    pub sha256: [u8; 32],
}

/// Layout of a packed weight in its file.
///
/// A panel holds `nr` output channels, its columns, in an order that follows the format:
/// * `f32`, `f16`: `[K][nr]`.
/// * `bf16`: pairs, `[⌈K/2⌉][nr][2]`: two consecutive input channels in one 32-bit word.
/// * `q8`: per group of 32 input channels `[8][nr][4]` codes (i8), then `nr` bf16 scales.
/// * `q4`: per group `[4][nr][4]` bytes, then `nr` bf16 scales. Byte `(i, column, j)` holds the codes of the
///   group's channels `4i + j` (low nibble) and `16 + 4i + j` (high nibble), each plus 8.
/// * `q8h`, `q4h`: as `q8` and `q4`, with scales of f16.
/// * `mxfp4`: as `q4`, a code being its place in [`E2M1`](crate::types::E2M1).
/// * `q4c`: as `q4` without the groups' scales; after the last group, `nr` f32 scales.
/// * `q4o`: as `q4c`, where the code of an outlier is 0 throughout. After the last panel of a matrix stand its outliers,
///   in the order of panels and columns: for each panel and once more, how many come before it (u32); for each outlier its
///   column in the panel (u32); for each outlier its codes (i8, whole groups); zeros up to a multiple of [`ALIGN`]. Its
///   scale stands in the panel.
///
/// A row of a row-major grouped weight holds its codes in order (half a byte each: per group 16 bytes, byte `j` the codes
/// of `j` and `16 + j`), then its scales. What pads a panel, a pair or a group is zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Encode, Decode)]
pub enum Layout {
    /// Row-major `[lead, rows, cols]`.
    Rows,
    /// Panels of `nr` output channels: `[lead][⌈N/nr⌉]` panels, zero-padded.
    Panels {
        /// Output channels per panel.
        nr: u32,
    },
    /// As `Panels`, but every panel holds `nr/2` gate channels, then the `nr/2` up channels of the same
    /// outputs: `[lead][⌈I/(nr/2)⌉]` panels.
    GluPanels {
        /// Columns per panel.
        nr: u32,
    },
    /// Bundles of neurons, `[lead, rows, 3H]`, a row after the other: [`Bundle`].
    Neurons {
        /// Whether every bundle begins with a sketch of its gate.
        sketch: bool,
    },
    /// Gates of neurons by themselves, `[lead, rows, H]`: as in a [`Bundle`], a row after the other.
    Gates,
    /// Up and down of neurons by themselves, `[lead, rows, 2H]`: as in a [`Bundle`], [`Bundle::rest_pitch`] bytes from one
    /// neuron to the next. After all neurons of a matrix their scales, where these lie by themselves
    /// ([`Bundle::scales_apart`]): of up and of down of each, [`Bundle::rest_scales_bytes`] bytes.
    Rests,
}

impl Layout {
    /// Rows of a matrix that are stored, those included that pad the last panel; `None` where the layout does
    /// not fit.
    pub const fn stored_rows(self, rows: u64) -> Option<u64> {
        match self {
            Self::Rows | Self::Neurons { .. } | Self::Gates | Self::Rests => Some(rows),
            Self::Panels { nr } if nr > 0 => rows.div_ceil(nr as u64).checked_mul(nr as u64),
            Self::GluPanels { nr } if nr > 0 && nr % 2 == 0 && rows.is_multiple_of(2) => {
                (rows / 2).div_ceil(nr as u64 / 2).checked_mul(nr as u64)
            }
            Self::Panels { .. } | Self::GluPanels { .. } => None,
        }
    }

    /// Panels of a matrix of `rows` rows; 0 in rows, and `None` where the layout does not fit.
    pub const fn panels(self, rows: u64) -> Option<u64> {
        match (self, self.stored_rows(rows)) {
            (Self::Rows | Self::Neurons { .. } | Self::Gates | Self::Rests, Some(_)) => Some(0),
            (Self::Panels { nr } | Self::GluPanels { nr }, Some(stored)) => Some(stored / nr as u64),
            (_, None) => None,
        }
    }

    /// Whether rows lie one after the other, and not in panels.
    pub const fn is_by_rows(self) -> bool {
        matches!(self, Self::Rows | Self::Neurons { .. } | Self::Gates | Self::Rests)
    }

    /// Parts of a row, each of which is stored as a row of its own.
    pub const fn parts(self) -> usize {
        match self {
            Self::Neurons { .. } => PARTS,
            Self::Rests => PARTS - 1,
            Self::Rows | Self::Panels { .. } | Self::GluPanels { .. } | Self::Gates => 1,
        }
    }

    /// Bytes of a matrix, padding of the last panel and outliers included; `None` where that overflows or the layout fits
    /// neither the rows nor the format.
    pub fn matrix_bytes(self, format: Format, rows: u64, cols: usize) -> Option<u64> {
        if format.is_by_channel() && self.is_by_rows() {
            return None;
        }
        let panels = self.stored_rows(rows)?.checked_mul(self.row_bytes(format, cols) as u64)?;
        panels.checked_add(self.outlier_bytes(format, rows, cols)?)
    }

    /// Bytes of the outliers after a matrix's panels: 0 where a matrix of so many rows has none.
    pub fn outlier_bytes(self, format: Format, rows: u64, cols: usize) -> Option<u64> {
        match format.outliers(usize::try_from(rows).ok()?) as u64 {
            0 => Some(0),
            count => {
                let codes = (cols as u64).checked_next_multiple_of(GROUP as u64)?.checked_add(4)?;
                let table = self.panels(rows)?.checked_add(1)?.checked_mul(4)?;
                count.checked_mul(codes)?.checked_add(table)?.checked_next_multiple_of(ALIGN)
            }
        }
    }

    /// Bytes of one stored row, scales that lie elsewhere included.
    pub const fn row_bytes(self, format: Format, cols: usize) -> usize {
        match self {
            Self::Rows => format.row_bytes(cols),
            Self::Panels { .. } | Self::GluPanels { .. } => format.column_bytes(cols),
            Self::Neurons { sketch } => Bundle { format, hidden: cols / PARTS, sketch }.bytes(),
            Self::Gates => Bundle { format, hidden: cols, sketch: false }.part_bytes(),
            Self::Rests => Bundle { format, hidden: cols / (PARTS - 1), sketch: false }.rest_stored_bytes(),
        }
    }
}

/// A packed weight.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Segment {
    /// Name of the weight in the Graph.
    pub name: String,
    /// Index into [`Plan::files`].
    pub file: u32,
    /// Offset in the file, a multiple of [`ALIGN`].
    pub offset: u64,
    /// Size, without what lies between its matrices.
    pub bytes: u64,
    /// Bytes from one matrix (expert, head) to the next.
    pub pitch: u64,
    /// Shape of the weight in the Graph.
    pub shape: Vec<u32>,
    /// Number format.
    pub format: Format,
    /// Order of the numbers.
    pub layout: Layout,
}

impl Segment {
    /// Shape as `(lead, rows, cols)`, 1 where absent.
    pub fn extents(&self) -> (u32, u32, u32) {
        let axis = |i: usize| self.shape.iter().rev().nth(i).copied().unwrap_or(1);
        (axis(2), axis(1), axis(0))
    }

    /// Bytes that shape, format and layout need, padding of the last panel included; `None` where that
    /// overflows or the layout does not fit the shape.
    pub fn packed_bytes(&self) -> Option<u64> {
        u64::from(self.extents().0).checked_mul(self.matrix_bytes()?)
    }

    /// As [`Segment::packed_bytes`], of one matrix.
    pub fn matrix_bytes(&self) -> Option<u64> {
        let (_, rows, cols) = self.extents();
        let whole = (cols as usize).is_multiple_of(self.layout.parts());
        self.layout.matrix_bytes(self.format, u64::from(rows), cols as usize).filter(|_| whole)
    }

    /// The bundle that its up and down are of, where its layout is [`Layout::Rests`].
    pub fn rests(&self) -> Option<Bundle> {
        let hidden = self.extents().2 as usize / (PARTS - 1);
        (self.layout == Layout::Rests).then_some(Bundle { format: self.format, hidden, sketch: false })
    }

    /// Offset of matrix `i` in the file, in bytes; `None` where there is none.
    pub fn matrix_offset(&self, i: u32) -> Option<u64> {
        let at = u64::from(i).checked_mul(self.pitch)?.checked_add(self.offset)?;
        (i < self.extents().0).then_some(at)
    }

    /// The end of its last matrix in the file; `None` where that overflows.
    pub fn end(&self) -> Option<u64> {
        self.matrix_offset(self.extents().0.checked_sub(1)?)?.checked_add(self.matrix_bytes()?)
    }
}

/// A kernel of the object code.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct KernelRef {
    /// Symbol.
    pub symbol: String,
    /// Arguments that it writes.
    pub results: Results,
}

/// A function that the runtime itself brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Encode, Decode)]
pub enum Builtin {
    /// `[pos, inv_freq, (inv_freq_long), out]`: angles of RoPE. See [`crate::Op::RopeAngles`].
    RopeAngles {
        /// Half the rotated channels: length of `inv_freq`.
        half: u32,
        /// Bits of the f32 attention factor.
        scale: u32,
        /// LongRoPE: tokens after which the long frequencies hold, and the bits of their factor.
        long: Option<(u32, u32)>,
    },
    /// `[ids, out, (a table per unit)]`: groups slots by expert. See [`crate::op::DispatchLayout`].
    Dispatch {
        /// Rows that the table is laid out for.
        rows: u32,
        /// Experts per token.
        k: u32,
        /// Experts.
        experts: u32,
        /// Whether an id may be −1, which is served elsewhere.
        partial: bool,
        /// Candidate units, where several units compute its experts.
        candidates: Option<Candidates>,
    },
    /// `[from, to]`, or of slots `[table, from, to]`: elements of four bytes cross a link, from the memory of `from` to that
    /// of `to`. The table lies in memory 0.
    Copy {
        /// Elements of a row, or in all.
        words: u32,
        /// Rows that are copied.
        span: Span,
    },
    /// `[ids, added, stay, rest]`: which choices find room. See [`crate::Op::LimitCapacity`].
    LimitCapacity {
        /// Index into [`Plan::sets`], which holds the capacities.
        set: u32,
        /// Experts per token.
        k: u32,
        /// Channels of `added`.
        channels: u32,
    },
    /// `[x, table, y]`: runs the graphs of a set on the rows that the table gives their experts. See
    /// [`crate::Op::ExpertFfn`] with `fixed`.
    Experts {
        /// Index into [`Plan::sets`].
        set: u32,
        /// Rows that the table is laid out for.
        rows: u32,
        /// Experts per token.
        k: u32,
        /// Channels of a row of `x` and of `y`, and from one row to the next.
        hidden: u32,
    },
    /// `[scores, (scores of layers ahead), table]`: asks the store for the experts that the table names. See
    /// [`crate::Op::Fetch`].
    Fetch {
        /// Index into [`Paging::layers`].
        layer: u32,
        /// Rows that the table is laid out for.
        rows: u32,
        /// Experts per token that the table is laid out for, up to those of the layer.
        k: u32,
        /// Elements from one row of each operand's scores to the next; 0 where there is none.
        strides: [u32; FETCHED],
    },
    /// `[table, (lists of awake neurons)]`: asks the store for up and down of the neurons that a step after `neuron_gate` has
    /// listed ([`crate::bundle::awake_words`]), or without lists for all neurons of the experts that the table names.
    Wake {
        /// Index into [`Paging::layers`].
        layer: u32,
        /// Rows that the table is laid out for.
        rows: u32,
        /// Experts per token that the table is laid out for.
        k: u32,
    },
    /// `[x, table, gate and up, down, (their biases), y]`: runs the streams of a set on the rows that the table gives their
    /// experts. See [`crate::Op::ExpertFfn`].
    Streams {
        /// Index into [`Plan::streams`].
        set: u32,
        /// Rows that the table is laid out for.
        rows: u32,
        /// Experts per token.
        k: u32,
    },
    /// The operands of a GPU kernel, in its order: launches it. Which of them it writes the kernel knows.
    Launch {
        /// Index into [`Plan::launches`].
        kernel: u32,
    },
    /// `[x, y]`, or of attention `[x, (angles), pos, slot, y]`: runs the graphs of a part.
    Part {
        /// Index into [`Plan::parts`].
        part: u32,
    },
}

attributes! {
    /// Units of the experts of a `dispatch`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Encode, Decode)]
    pub struct Candidates as "units" {
        /// Index into [`ExpertPlacement::layers`].
        pub layer: u32,
        /// Number of its units, each of which gets a table.
        pub units: u32,
    }
}

/// Rows that a copy moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Encode, Decode)]
pub enum Span {
    /// The rows of the step, as many as are valid.
    Rows,
    /// Everything, as one row.
    Whole,
    /// The slots of the experts of a dispatch table that is laid out so.
    Slots {
        /// Rows.
        rows: u32,
        /// Experts per token.
        k: u32,
        /// Experts.
        experts: u32,
    },
}

impl Builtin {
    /// Number of its arguments, the last ones, that it writes; 0 of a launch, whose kernel writes some of them. `Fetch` and
    /// `Wake` leave their last argument as it is, but what reads it comes after them, as if they wrote it.
    pub const fn results(self) -> usize {
        match self {
            Self::Launch { .. } => 0,
            Self::Dispatch { candidates: Some(candidates), .. } => 1 + candidates.units as usize,
            Self::RopeAngles { .. }
            | Self::Dispatch { candidates: None, .. }
            | Self::Copy { .. }
            | Self::Experts { .. }
            | Self::Streams { .. }
            | Self::Fetch { .. }
            | Self::Wake { .. }
            | Self::Part { .. } => 1,
            Self::LimitCapacity { .. } => 2,
        }
    }
}

attributes! {
    /// A tensor at the boundary of a static graph: f16, dense, the last axis inner.
    #[derive(Clone, Debug, PartialEq, Eq, Hash, Encode, Decode)]
    pub struct Port as "port" {
        /// Name in the function's signature.
        pub name: String,
        /// Extents.
        pub shape: [u32; 4],
    }
}

impl Port {
    /// Numbers in it, or `None` where that overflows.
    pub fn checked_elements(&self) -> Option<usize> {
        self.shape.iter().try_fold(1_usize, |n, &extent| n.checked_mul(extent as usize))
    }

    /// Numbers in it, of a port that [`crate::verify::plan`] accepts.
    pub fn elements(&self) -> usize {
        self.checked_elements().unwrap_or(usize::MAX)
    }
}

attributes! {
    /// A static graph: a function of an artifact that a unit beside the CPU executes.
    #[derive(Clone, Debug, PartialEq, Eq, Hash, Encode, Decode)]
    pub struct GraphDecl {
        /// Path of the artifact, relative to the bundle.
        pub package: String,
        /// Function in it.
        pub function: String,
        /// Inputs, in order.
        pub inputs: Vec<Port>,
        /// Results, in order.
        pub outputs: Vec<Port>,
        /// Whether the artifact keeps a state for each sequence slot.
        pub stateful: bool,
    }
}

impl GraphDecl {
    /// Position of the first row that an attention's graph takes, if that is fixed: it has no `write`, and its mask ends after
    /// its last row.
    pub fn fixed_start(&self) -> Option<u32> {
        let port = |name: &str| self.inputs.iter().find(|p| p.name == name);
        match (port("mask"), port("write")) {
            (Some(mask), None) => mask.shape[3].checked_sub(mask.shape[2]),
            _ => None,
        }
    }
}

attributes! {
    /// Experts of one layer that static graphs compute.
    #[derive(Clone, Debug, PartialEq, Eq, Hash, Encode, Decode)]
    pub struct ExpertSet {
        /// Layer.
        pub layer: u32,
        /// Treatment of rows past an expert's capacity.
        pub overflow: Overflow,
        /// Rows that each expert of the layer has room for; 0: no graph has it.
        pub capacities: Vec<u32>,
        /// Groups, each one graph of rows `[experts · capacity, hidden, 1, 1]`, the experts one after the other.
        pub groups: Vec<GraphGroup>,
        /// Of which neurons, where not of all: one graph for each expert, for calls that decode.
        pub hot: Option<HotNeurons>,
    }
}

attributes! {
    /// The hot neurons of a layer's experts for a batch (PowerInfer-2, §4.1.3): graphs compute them, kernels the others, and the sums
    /// are added.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Encode, Decode)]
    pub struct HotNeurons as "hot" {
        /// Rows of the entry points that they are for, and so the capacity of each expert: no row is past it.
        pub batch: u32,
        /// Neurons of each expert.
        pub neurons: u32,
    }
}

attributes! {
    /// A part of an entry point that static graphs compute, its experts aside: attention, a dense network, the head. All of
    /// its graphs take the same rows; the channels of their results follow each other in `y`.
    ///
    /// A graph has an input `x[T, inputs, 1, 1]` and results `[T, n, 1, 1]`; one of attention has besides `angles[T, R, 1, 1]`
    /// where it rotates, `mask[1, 1, T, C]` and `write[1, 1, C, T]`, with `C` the positions of its state.
    #[derive(Clone, Debug, PartialEq, Eq, Hash, Encode, Decode)]
    pub struct GraphPart {
        /// Indices into [`Plan::graphs`].
        pub graphs: Vec<u32>,
        /// Channels of `x`.
        pub inputs: u32,
        /// Channels of `y`.
        pub outputs: u32,
        /// Further fields of attention.
        pub attention: Option<PartAttention>,
    }
}

attributes! {
    /// Attention of a [`GraphPart`].
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Encode, Decode)]
    pub struct PartAttention as "attention" {
        /// Channels of `angles`; 0: nothing rotates.
        pub angles: u32,
        /// Positions of the state, `C`.
        pub context: u32,
        /// Tokens that a row sees, its own included, if not all.
        pub window: Option<u32>,
        /// Whether every row is a sequence of its own: each then has a call of its own.
        pub apart: bool,
    }
}

attributes! {
    /// Experts of one graph. Groups of the same experts, one after the other, are sizes of one graph, ascending: a call takes
    /// the first that holds its rows.
    #[derive(Clone, Debug, PartialEq, Eq, Hash, Encode, Decode)]
    pub struct GraphGroup as "group" {
        /// Index into [`Plan::graphs`].
        pub graph: u32,
        /// Rows of each expert.
        pub capacity: u32,
        /// Experts in the order of the rows.
        pub experts: Vec<u32>,
    }
}

/// Code of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Encode, Decode)]
pub enum Code {
    /// Index into [`Plan::kernels`].
    Kernel(u32),
    /// Part of the runtime; runs on one thread.
    Builtin(Builtin),
}

/// One argument: an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Encode, Decode)]
pub enum Arg {
    /// Buffer of the entry, plus bytes into it (a slice of its columns).
    Buffer(u32, u32),
    /// Segment of the plan.
    Segment(u32),
    /// Addresses of the matrices of a segment, one after the other: those of experts may be anywhere. Of a segment whose
    /// layout is [`Layout::Rests`]: of its rows, matrix after matrix, each followed by that of the row's scales where these
    /// lie by themselves ([`Bundle::rest_addresses`]).
    Matrices(u32),
    /// State of the plan.
    State(u32),
}

/// Rows of an entry that a step walks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Encode, Decode)]
pub enum RowSpace {
    /// The valid token rows.
    Tokens,
    /// The rows whose logits are wanted.
    Outputs,
}

/// Number of work items of a step, given `n` valid rows. Threads share the items.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Encode, Decode)]
pub enum Grid {
    /// One item, one thread.
    One,
    /// `⌈n / rows⌉ · tiles`: item `i` is row block `i % blocks`, tile `i / blocks`.
    Tiles {
        /// Rows per block.
        rows: u32,
        /// Tiles (panels, heads).
        tiles: u32,
    },
    /// `A · tiles` with `A` the active experts of the dispatch table in argument `table`: item `i` is
    /// active expert `i / tiles`, tile `i % tiles`.
    Experts {
        /// Index of the argument that holds the dispatch table.
        table: u32,
        /// Tiles per expert.
        tiles: u32,
    },
}

/// One launch.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Step {
    /// Index into [`Plan::units`].
    pub unit: u32,
    /// Code that runs.
    pub code: Code,
    /// Addresses that it gets, in the kernel's order.
    pub args: Vec<Arg>,
    /// Rows that it walks.
    pub rows: RowSpace,
    /// Work items.
    pub grid: Grid,
    /// Whether every earlier step of its unit must have ended on all of the unit's threads before this one starts. Units
    /// beside the CPU execute their steps one after the other, and need none.
    pub barrier: bool,
    /// Steps of this entry whose results it reads or whose buffers it overwrites, ascending. For those of other units it
    /// waits.
    pub deps: Vec<u32>,
    /// Node of the entry's Graph that this step, perhaps with others, computes.
    pub node: u32,
}

/// A place in the arena of a memory. Rows are `stride` elements apart.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Buffer {
    /// Value of the Graph (`%12`) that it holds first.
    pub name: String,
    /// Index into [`Plan::memories`].
    pub memory: u32,
    /// Offset in the memory's arena, a multiple of [`ALIGN`].
    pub offset: u64,
    /// Size.
    pub bytes: u64,
    /// Element type.
    pub dtype: DType,
    /// Rows.
    pub rows: u32,
    /// Elements from one row to the next.
    pub stride: u32,
}

/// Place of a Graph's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Place {
    /// Buffer.
    pub buffer: u32,
    /// First column.
    pub column: u32,
    /// Columns.
    pub cols: u32,
}

/// One entry point.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Entry {
    /// Entry point.
    pub kind: EntryKind,
    /// Rows of logits per call.
    pub out_rows: u32,
    /// Buffers; the first four hold ids, positions, slots and output rows.
    pub buffers: Vec<Buffer>,
    /// Buffer of the logits.
    pub logits: u32,
    /// Place of every value of the Graph that has one in memory, by value id.
    pub places: Vec<Option<Place>>,
    /// Steps in order.
    pub steps: Vec<Step>,
}

impl Plan {
    /// Number format of the KV cache; `None` where nothing is stored by position. All caches of a plan are stored alike.
    pub fn cache_format(&self) -> Option<Format> {
        self.states.iter().find(|s| !s.kind.needs_snapshots()).map(|s| s.format)
    }

    /// Snapshots of its states that each slot has room for: those of the state with the least; 0 where none needs any.
    pub fn snapshots_of_slot(&self) -> u32 {
        self.states.iter().filter(|s| s.kind.needs_snapshots()).map(|s| s.snapshots).min().unwrap_or(0)
    }

    /// Tokens from one snapshot to the next that a sequence has however full all slots are: whole chunks of prompts, the fewest at which
    /// those of full slots leave room for [`state::FREE_SNAPSHOTS`] more. `None` where there is no room for any.
    pub fn snapshot_distance(&self) -> Option<u32> {
        let fixed = self.snapshots_of_slot().checked_sub(state::FREE_SNAPSHOTS).filter(|&n| n > 0)?;
        let prefill = self.entries.iter().filter(|e| e.kind.is_prefill()).map(|e| e.kind.rows());
        let chunk = u32::try_from(prefill.max().unwrap_or(1).max(1)).ok()?;
        self.model.max_context.div_ceil(fixed).checked_next_multiple_of(chunk)
    }

    /// Bytes of all snapshots, and of one.
    pub fn snapshot_bytes(&self) -> (u64, u64) {
        let folded = || self.states.iter().filter(|s| s.kind.needs_snapshots());
        let all = folded().map(|s| s.bytes().saturating_sub(s.live_bytes().unwrap_or(0)));
        let one = folded().map(|s| s.slot_bytes().unwrap_or(0));
        (all.fold(0, u64::saturating_add), one.fold(0, u64::saturating_add))
    }

    /// Bytes of all states, snapshots included.
    pub fn state_bytes(&self) -> u64 {
        self.states.iter().fold(0, |sum, s| sum.saturating_add(s.bytes()))
    }

    /// Bytes that rings save: what their layers would take beside if they kept the whole context.
    pub fn saved_by_rings(&self) -> u64 {
        let saved = |s: &StateBuf| {
            let StateKind::Ring { .. } = s.kind else { return 0 };
            let [slots, heads, rows, dim] = s.shape;
            let whole = [slots, heads, rows.max(self.model.max_context), dim];
            let whole = StateBuf { shape: whole, ..s.clone() };
            whole.bytes().saturating_sub(s.bytes())
        };
        self.states.iter().map(saved).fold(0, u64::saturating_add)
    }

    /// Layers whose `fetch` is observed, in order: experts, and experts per token. They stay on flash, or lie in frames.
    pub fn asked_layers(&self) -> Vec<(u32, u32)> {
        match (&self.paging, &self.experts.policy) {
            (Some(paging), _) => paging.layers.iter().map(|l| (l.experts, l.k)).collect(),
            (None, ExpertPolicy::Cached(cached)) => {
                self.experts.layers.iter().map(|l| (l.starts.len() as u32, cached.k)).collect()
            }
            (None, _) => Vec::new(),
        }
    }

    /// Experts on flash, by index into [`Paging::layers`], that another memory holds for good, ascending: none asks flash for them.
    pub fn elsewhere(&self) -> Vec<(u32, u32)> {
        let mut experts = Vec::new();
        for (i, paged) in self.paging.iter().flat_map(|p| (0..).zip(&p.layers)) {
            let of = self.experts.of_layer(Some(paged.layer)).filter(|_| self.experts.policy.is_fixed());
            let Some((_, of)) = of else { continue };
            let away = |at: &u32| of.units.get(*at as usize).is_some_and(|&unit| self.memory_of(unit) != 0);
            experts.extend((0..).zip(&of.starts).filter(|(_, at)| away(at)).map(|(e, _)| (i, e)));
        }
        experts
    }

    /// Segments that are read to bring their matrices to another memory, and that no step of the CPU reads.
    pub fn segments_to_bring(&self) -> BTreeSet<u32> {
        self.experts.layers.iter().flat_map(|l| &l.brought).copied().collect()
    }

    /// The stored form.
    ///
    /// # Errors
    /// None in practice: the types hold nothing that cannot be encoded.
    pub fn encode(&self) -> Result<Vec<u8>, bincode::error::EncodeError> {
        bincode::encode_to_vec(self, config())
    }

    /// Reads the stored form. The result is well-formed as a value only: [`crate::verify::plan`] checks it.
    ///
    /// # Errors
    /// Truncated, oversized or malformed bytes, bytes left over, or numbers that are not finite.
    #[expect(clippy::disallowed_methods, reason = "`config` sets a limit")]
    pub fn decode(bytes: &[u8]) -> Result<Self, bincode::error::DecodeError> {
        let (plan, read) = bincode::decode_from_slice::<Self, _>(bytes, config())?;
        if read != bytes.len() {
            return Err(bincode::error::DecodeError::Other("bytes after the end of the plan"));
        }
        // What is no number equals nothing, not even itself, and has no text.
        let finite = plan.placement.is_finite() && plan.experts.policy.is_finite();
        if !finite || plan.model.big_little.is_some_and(|b| !b.gamma.is_finite()) {
            return Err(bincode::error::DecodeError::Other("a number that is not finite"));
        }
        Ok(plan)
    }
}

/// Most bytes that decoding may allocate: a hostile length cannot ask for more. The plan of a model of 100
/// layers and five entry points takes about one MiB.
const LIMIT: usize = 64 << 20;

fn config() -> bincode::config::Configuration<
    bincode::config::LittleEndian,
    bincode::config::Varint,
    bincode::config::Limit<LIMIT>,
> {
    bincode::config::standard().with_limit::<LIMIT>()
}
