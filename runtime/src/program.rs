//! The executable form of a Plan, borrowed and constant: what a generated runner holds in a `static`.
//!
//! Every field is public and every type can be built in a constant, so that the generated source is one
//! expression. [`crate::LoadedProgram`] builds the same from a decoded Plan.

use crate::abi::KernelFn;
pub use crate::graphs::{GraphRef, PortRef};
pub use moec_ir::op::Score;
pub use moec_ir::paging::PagedLayer;
pub use moec_ir::placement::Overflow;
pub use moec_ir::plan::{Arg, BigLittle, Builtin, CacheOrder, Grid, PartAttention, RowSpace};
pub use moec_ir::{EntryKind, Format};

/// Code of a step.
#[derive(Clone, Copy, Debug)]
pub enum Code {
    /// A kernel of the object code. See [`KernelFn`] for what it must keep to.
    Kernel(KernelFn),
    /// A function of the runtime; runs on one thread.
    Builtin(Builtin),
}

/// One launch. See [`moec_ir::plan::Step`].
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// What runs.
    pub code: Code,
    /// Addresses that it gets, in the kernel's order.
    pub args: &'a [Arg],
    /// Rows that it walks.
    pub rows: RowSpace,
    /// Work items.
    pub grid: Grid,
    /// Whether every earlier step must have ended on all threads before this one starts.
    pub barrier: bool,
    /// Node of the entry's Graph that this step, perhaps with others, computes.
    pub node: u32,
}

/// A place in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferRef {
    /// Offset in the arena in bytes, a multiple of 64.
    pub offset: u64,
    /// Size in bytes.
    pub bytes: u64,
}

/// One entry point.
#[derive(Clone, Copy, Debug)]
pub struct EntryRef<'a> {
    /// Which.
    pub kind: EntryKind,
    /// Rows of logits per call, at least 1.
    pub out_rows: u32,
    /// Buffers; the first four hold ids, positions, slots (`i32[T]`) and output rows (`i32[out_rows]`).
    pub buffers: &'a [BufferRef],
    /// Buffer of the logits, `f32[out_rows, vocab]`.
    pub logits: u32,
    /// Elements from one row of the logits to the next, at least the vocabulary size.
    pub logits_stride: u32,
    /// Steps in order.
    pub steps: &'a [Step<'a>],
}

/// A file of the bundle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileInfo<'a> {
    /// Path relative to the bundle, with `/`.
    pub path: &'a str,
    /// Size in bytes.
    pub bytes: u64,
    /// SHA-256.
    pub sha256: [u8; 32],
}

/// A packed weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentRef {
    /// Index into [`Program::files`].
    pub file: u32,
    /// Offset in the file in bytes, a multiple of 64.
    pub offset: u64,
    /// Size in bytes, without what lies between its matrices.
    pub bytes: u64,
    /// Matrices of equal size, at least 1.
    pub matrices: u32,
    /// Bytes from one matrix to the next.
    pub pitch: u64,
}

impl SegmentRef {
    /// Bytes of a matrix; `None` where the size is no multiple.
    pub fn matrix_bytes(&self) -> Option<u64> {
        let n = u64::from(self.matrices);
        (n > 0 && self.bytes.is_multiple_of(n)).then(|| self.bytes / n)
    }

    /// Bytes from the first one to the last; `None` where that overflows.
    pub fn span(&self) -> Option<u64> {
        let last = u64::from(self.matrices.checked_sub(1)?).checked_mul(self.pitch)?;
        last.checked_add(self.matrix_bytes()?)
    }
}

/// A KV-cache tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateRef {
    /// Size in bytes.
    pub bytes: u64,
    /// Storage of its numbers.
    pub format: Format,
    /// Extents `[slots, heads, ctx, dim]`.
    pub shape: [u32; 4],
    /// Order of the numbers.
    pub order: CacheOrder,
}

/// What the runtime must know of the model. See [`moec_ir::plan::ModelInfo`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ModelRef<'a> {
    /// Family (`qwen3_moe`).
    pub family: &'a str,
    /// Vocabulary size: ids are `0 .. vocab`.
    pub vocab: u32,
    /// Hidden size.
    pub hidden: u32,
    /// Layers.
    pub layers: u32,
    /// Longest sequence, in tokens.
    pub max_context: u32,
    /// Sequences that the KV cache holds.
    pub slots: u32,
    /// Token put in front of every text.
    pub bos: Option<u32>,
    /// Tokens that end a generation.
    pub eos: &'a [u32],
    /// Parameters in all.
    pub parameters: u64,
    /// Parameters that one token uses.
    pub active_parameters: u64,
    /// How tokens are decoded with fewer experts, where little entry points are compiled.
    pub big_little: Option<BigLittle>,
}

/// What the object code was compiled for. See [`moec_ir::plan::TargetInfo`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TargetRef<'a> {
    /// Name given to `--target`.
    pub name: &'a str,
    /// LLVM triple.
    pub triple: &'a str,
    /// LLVM CPU name.
    pub cpu: &'a str,
    /// Features that the processor must have, in LLVM spelling (`avx512f`).
    pub features: &'a [&'a str],
}

/// A model compiled for a target, ready to run.
#[derive(Clone, Copy, Debug)]
pub struct Program<'a> {
    /// The model.
    pub model: ModelRef<'a>,
    /// The target.
    pub target: TargetRef<'a>,
    /// Bytes of the arena that all entry points share.
    pub arena_bytes: u64,
    /// Bytes of kernel scratch per thread.
    pub scratch_bytes: u64,
    /// Files of the bundle that the program reads.
    pub files: &'a [FileInfo<'a>],
    /// Packed weights.
    pub segments: &'a [SegmentRef],
    /// KV-cache tensors.
    pub states: &'a [StateRef],
    /// Static graphs of artifacts.
    pub graphs: &'a [GraphRef<'a>],
    /// Experts that static graphs compute.
    pub sets: &'a [SetRef<'a>],
    /// Other parts that static graphs compute.
    pub parts: &'a [PartRef<'a>],
    /// Entry points, prefill first, then decode, then little, each by ascending rows.
    pub entries: &'a [EntryRef<'a>],
    /// Experts that stay on flash.
    pub paging: Option<PagingRef<'a>>,
}

/// Experts that stay on flash. See [`moec_ir::paging::Paging`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagingRef<'a> {
    /// Bytes that a run may take.
    pub budget: u64,
    /// Threads that the sum is for.
    pub threads: u32,
    /// Bytes of other weights, activations, scratch and KV cache.
    pub resident: u64,
    /// Bytes left for the process itself.
    pub process: u64,
    /// Bytes of a frame, a multiple of 4096.
    pub frame_bytes: u64,
    /// Frames that hold experts from one token to the next.
    pub frames: u32,
    /// Frames through which experts pass that the cache does not keep.
    pub spare: u32,
    /// Most bytes of one read.
    pub block_bytes: u32,
    /// Policy of the cache.
    pub policy: &'a str,
    /// Experts `(layer, expert)` that are read at the start and never go, the hottest first.
    pub pinned: &'a [(u32, u32)],
    /// Layers with routed experts.
    pub layers: &'a [PagedLayer],
    /// CRC-32C of every matrix, `[layer][expert][gate and up, down]`.
    pub checksums: &'a [u32],
    /// How often recorded routing used each expert, `[layer][expert]`; empty where nothing was recorded.
    pub uses: &'a [u32],
}

/// Experts of one layer that static graphs compute. See [`moec_ir::plan::ExpertSet`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SetRef<'a> {
    /// Layer.
    pub layer: u32,
    /// What happens to rows past an expert's capacity.
    pub overflow: Overflow,
    /// Rows that each expert of the layer has room for; 0: no graph has it.
    pub capacities: &'a [u32],
    /// Groups, each one graph.
    pub groups: &'a [GroupRef<'a>],
}

/// A part of an entry point that static graphs compute. See [`moec_ir::plan::GraphPart`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartRef<'a> {
    /// Indices into [`Program::graphs`].
    pub graphs: &'a [u32],
    /// Channels of `x`.
    pub inputs: u32,
    /// Channels of `y`.
    pub outputs: u32,
    /// What attention has besides.
    pub attention: Option<PartAttention>,
}

/// Experts of one graph. See [`moec_ir::plan::GraphGroup`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupRef<'a> {
    /// Index into [`Program::graphs`].
    pub graph: u32,
    /// Rows of each expert.
    pub capacity: u32,
    /// Experts in the order of the rows.
    pub experts: &'a [u32],
}
