//! The Plan: what the runtime executes.
//!
//! Everything is decided: buffers have arena offsets, weights have file offsets, steps have kernels,
//! arguments and barriers. The total memory is known before anything is allocated.
//!
//! Stored as bincode ([`Plan::encode`], [`Plan::decode`]); `plan.txt` is the text form.

pub use crate::experts::{
    Cached, ExpertCosts, ExpertLayer, ExpertPlacement, ExpertPolicy, PromptUnits, Refine, Scheduled,
    StreamSet,
};
use crate::graph::EntryKind;
pub use crate::launch::{Extent, GpuKernel, Launch};
pub use crate::memory::{Memory, MemoryLink, Resident, UnitRef};
pub use crate::op::MAX_REQUEST_SCORES;
use crate::op::{Attributes, attributes};
pub use crate::paging::{CoreClass, PagedLayer, Paging};
pub use crate::placement::{
    DecodeUnit, Expected, ExpertGroup, ExpertRow, ExpertTable, OpAssignment, Overflow, Placement,
};
pub use crate::regions::{ArtifactBytes, Regions};
pub use crate::results::Results;
pub use crate::segment::{Layout, Segment};
use crate::state;
pub use crate::state::{CacheOrder, StateBuf, StateKind};
pub use crate::static_graph::{ExpertSet, GraphDecl, GraphGroup, GraphTensor, Subgraph, SubgraphAttention};
pub use crate::step::{Arg, Builtin, Candidates, Code, Grid, KernelRef, RowSpace, Span, Step};
use crate::text::ops::{Parsed, Reader, Word, Writer};
use crate::types::{DType, Format};
use bincode::{Decode, Encode};
use std::collections::{BTreeMap, BTreeSet};

/// Version of the stored form. A runtime refuses any other.
pub const PLAN_VERSION: u32 = 24;

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
    /// GPU kernels that accelerators launch.
    pub launches: Vec<GpuKernel>,
    /// Static graphs of artifacts.
    pub graphs: Vec<GraphDecl>,
    /// Experts that static graphs compute: at most one set per layer for prompts, and one for each batch that
    /// is decoded.
    pub expert_sets: Vec<ExpertSet>,
    /// Other parts that static graphs compute, entry point by entry point.
    pub subgraphs: Vec<Subgraph>,
    /// Entry points, prefill first, then decode, then little, each by ascending rows.
    pub entries: Vec<Entry>,
    /// Decisions about operators and experts, with their reasons.
    pub placement: Placement,
    /// Experts of the CPU that stay on disk, where memory has a budget. [`Plan::paging_of`] has those of other hosts.
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
    /// Token put before every text, if the tokenizer's configuration requires one.
    pub bos: Option<u32>,
    /// Tokens that end a generation.
    pub eos: Vec<u32>,
    /// Parameters in all.
    pub parameters: u64,
    /// Parameters that one token uses.
    pub active_parameters: u64,
    /// Decoding with fewer experts, where little entry points are compiled.
    pub big_little: Option<BigLittle>,
    /// Percent of the neurons of experts that thresholds after SiLU make 0, as calibration saw them: an
    /// approximation. `None` where there are no thresholds.
    pub thresholded: Option<f32>,
}

attributes! {
    /// Big-little decoding (MoBiLE, §III-A, Algorithm 1).
    #[derive(Clone, Copy, Debug, PartialEq, Encode, Decode)]
    pub struct BigLittle as "little" {
        /// Experts per token of the little entry points.
        pub experts: u32,
        /// γ: a token of the little entry point is kept if the largest probability of its softmax exceeds it.
        /// In `[0, 1]`.
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
pub struct BufferColumns {
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
    pub locations: Vec<Option<BufferColumns>>,
    /// Steps in order.
    pub steps: Vec<Step>,
}

impl Plan {
    /// Number format of the KV cache; `None` where nothing is stored by position. All caches of a plan are
    /// stored alike.
    pub fn cache_format(&self) -> Option<Format> {
        self.states.iter().find(|s| !s.kind.needs_snapshots()).map(|s| s.format)
    }

    /// Snapshots of its states that each slot has room for: those of the state with the least; 0 where none
    /// needs any.
    pub fn snapshots_of_slot(&self) -> u32 {
        self.states.iter().filter(|s| s.kind.needs_snapshots()).map(|s| s.snapshots).min().unwrap_or(0)
    }

    /// Tokens between two snapshots of a sequence, however full all slots are: whole chunks of prompts. The
    /// smallest number at which the snapshots of full slots leave room for [`state::FREE_SNAPSHOTS`] more.
    /// `None` if there is no room for any.
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

    /// Bytes that rings save: those that their layers would need in addition to keep the whole context.
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

    /// Layers whose `request_experts` is observed, in order: experts, and experts per token. They stay on
    /// disk, or are in frames.
    pub fn requested_layers(&self) -> Vec<(u32, u32)> {
        match (&self.paging, &self.experts.policy) {
            (Some(paging), _) => paging.layers.iter().map(|l| (l.experts, l.k)).collect(),
            (None, ExpertPolicy::Cached(cached)) => {
                self.experts.layers.iter().map(|l| (l.starts.len() as u32, cached.k)).collect()
            }
            (None, _) => Vec::new(),
        }
    }

    /// Experts on the disk of a memory's host; `None` where the memory holds all of its weights.
    pub fn paging_of(&self, memory: u32) -> Option<&Paging> {
        match memory {
            0 => self.paging.as_ref(),
            _ => self.memories.get(memory as usize)?.paging.as_ref(),
        }
    }

    /// The same, to change it.
    pub fn paging_of_mut(&mut self, memory: u32) -> Option<&mut Paging> {
        match memory {
            0 => self.paging.as_mut(),
            _ => self.memories.get_mut(memory as usize)?.paging.as_mut(),
        }
    }

    /// Memories whose hosts have experts on disk.
    pub fn paged_memories(&self) -> impl Iterator<Item = (u32, &Paging)> {
        (0..self.memories.len() as u32).filter_map(|memory| Some((memory, self.paging_of(memory)?)))
    }

    /// Experts whose matrices are in a segment on the disk of a memory's host, each with its index there.
    pub fn experts_on_disk(&self, memory: u32, segment: u32) -> BTreeMap<u32, u32> {
        let Some(of) = self.segments.get(segment as usize) else { return BTreeMap::new() };
        let residents = self.memories.get(memory as usize).map_or(&[][..], |m| &m.residents);
        match residents.iter().find(|r| r.segment == segment) {
            Some(own) => own.indices(of).collect(),
            // Memory 0 has no residents. Of experts of several hosts it has the first.
            None => (0..of.extents().0).map(|expert| (expert, expert)).collect(),
        }
    }

    /// Experts on the disk of a memory's host, by index into [`Paging::layers`], that another memory has for good,
    /// ascending: no step requests them from this disk.
    pub fn experts_off_disk(&self, memory: u32) -> Vec<(u32, u32)> {
        let mut experts = Vec::new();
        for (i, paged) in self.paging_of(memory).into_iter().flat_map(|p| (0..).zip(&p.layers)) {
            let of = self.experts.of_layer(Some(paged.layer)).filter(|_| self.experts.policy.is_fixed());
            let Some((_, of)) = of else { continue };
            let away =
                |at: &u32| of.units.get(*at as usize).is_some_and(|&unit| self.memory_of(unit) != memory);
            experts.extend((0..).zip(&of.starts).filter(|(_, at)| away(at)).map(|(e, _)| (i, e)));
        }
        experts
    }

    /// Layer whose transferred experts a step reads, counted over those whose experts are assigned at run
    /// time. Steps of a layer that follow each other on their unit are executed together, once for each wave
    /// of experts that have arrived.
    pub fn transferred_layer(&self, step: &Step) -> Option<usize> {
        self.experts.policy.hot().filter(|&hot| hot == step.unit)?;
        let reads = |layer: &ExpertLayer| {
            let of =
                |arg: &Arg| matches!(*arg, Arg::Matrices(segment) if layer.to_bring().contains(&segment));
            step.args.iter().any(of)
        };
        self.experts.layers.iter().position(reads)
    }

    /// Segments that are read to bring their matrices to another memory, and that no step of the CPU reads.
    pub fn segments_to_bring(&self) -> BTreeSet<u32> {
        self.experts.layers.iter().flat_map(|l| &l.brought).copied().collect()
    }

    /// The stored form.
    ///
    /// # Errors
    /// Never fails in practice: the types hold nothing that cannot be encoded.
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
        // NaN equals nothing, not even itself, and has no text form.
        let finite = plan.placement.is_finite() && plan.experts.policy.is_finite();
        if !finite || plan.model.big_little.is_some_and(|b| !b.gamma.is_finite()) {
            return Err(bincode::error::DecodeError::Other("a number that is not finite"));
        }
        Ok(plan)
    }
}

/// Most bytes that decoding may allocate: a hostile length cannot request more. The plan of a model of 100
/// layers and five entry points takes about one MiB.
const LIMIT: usize = 64 << 20;

fn config() -> bincode::config::Configuration<
    bincode::config::LittleEndian,
    bincode::config::Varint,
    bincode::config::Limit<LIMIT>,
> {
    bincode::config::standard().with_limit::<LIMIT>()
}
