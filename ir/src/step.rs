//! Steps of a plan: what runs, on which rows, with which addresses.

use crate::op::{Attributes, MAX_REQUEST_SCORES, attributes};
use crate::results::Results;
use crate::text::ops::{Parsed, Reader, Word, Writer};
use bincode::{Decode, Encode};

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
        /// Layer whose experts several units compute.
        candidates: Option<Candidates>,
    },
    /// `[from, to]`, or of slots `[table, from, to]`: copies elements of four bytes over a link, from the
    /// memory of `from` to that of `to`. The table is in memory 0.
    Copy {
        /// Elements of a row, or in all.
        words: u32,
        /// Rows that it copies.
        span: Span,
    },
    /// `[ids, added, stay, rest]`: which choices find room. See [`crate::Op::LimitCapacity`].
    LimitCapacity {
        /// Index into [`crate::plan::Plan::expert_sets`], which holds the capacities.
        set: u32,
        /// Experts per token.
        k: u32,
        /// Channels of `added`.
        channels: u32,
    },
    /// `[x, table, y]`: runs the graphs of a set on the rows that the table gives their experts. See
    /// [`crate::Op::ExpertFfn`] with `fixed`.
    Experts {
        /// Index into [`crate::plan::Plan::expert_sets`].
        set: u32,
        /// Rows that the table is laid out for.
        rows: u32,
        /// Experts per token.
        k: u32,
        /// Channels of a row of `x` and of `y`, and from one row to the next.
        hidden: u32,
    },
    /// `[scores, (scores of layers ahead), table]`: requests from the store the experts that the table names.
    /// See [`crate::Op::RequestExperts`].
    RequestExperts {
        /// Index into [`Paging::layers`](crate::plan::Paging::layers).
        layer: u32,
        /// Rows that the table is laid out for.
        rows: u32,
        /// Experts per token that the table is laid out for, up to those of the layer.
        k: u32,
        /// Elements from one row of each operand's scores to the next; 0 for absent operands.
        strides: [u32; MAX_REQUEST_SCORES],
    },
    /// `[table, (lists of neurons)]`: requests from the store neurons of the experts that the table names. With
    /// lists ([`crate::bundle::active_list_words`]) a step over [`Grid::Clusters`] follows, which shortens them
    /// to the active neurons, whose up and down are then read. Where gates stay on disk, a predictor has filled
    /// the lists, and the gates of these neurons are requested; elsewhere they are still empty. Without lists
    /// all that stays on disk of these experts is requested.
    RequestNeurons {
        /// Index into [`Paging::layers`](crate::plan::Paging::layers).
        layer: u32,
        /// Rows that the table is laid out for.
        rows: u32,
        /// Experts per token that the table is laid out for.
        k: u32,
    },
    /// `[x, table, gate and up, down, (their biases), y]`: runs the NDP command streams of a set on the rows
    /// that the table gives their experts. See [`crate::Op::ExpertFfn`].
    Streams {
        /// Index into [`crate::plan::Plan::streams`].
        set: u32,
        /// Rows that the table is laid out for.
        rows: u32,
        /// Experts per token.
        k: u32,
    },
    /// The operands of a GPU kernel, in its order: launches it. Which of them it writes the kernel knows.
    Launch {
        /// Index into [`crate::plan::Plan::launches`].
        kernel: u32,
    },
    /// `[x, y]`, or of attention `[x, (angles), pos, slot, y]`: runs the graphs of a part.
    Subgraph {
        /// Index into [`crate::plan::Plan::subgraphs`].
        subgraph: u32,
    },
}

attributes! {
    /// Units of the experts of a `dispatch`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Encode, Decode)]
    pub struct Candidates as "units" {
        /// Index into [`ExpertPlacement::layers`](crate::plan::ExpertPlacement::layers).
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
    /// Number of its last arguments that it writes; 0 for a launch, whose kernel writes some of them.
    /// `RequestExperts` and `RequestNeurons` leave their last argument unchanged, but its readers come after
    /// them, as if they wrote it.
    pub const fn results(self) -> usize {
        match self {
            Self::Launch { .. } => 0,
            Self::Dispatch { candidates: Some(candidates), .. } => 1 + candidates.units as usize,
            Self::RopeAngles { .. }
            | Self::Dispatch { candidates: None, .. }
            | Self::Copy { .. }
            | Self::Experts { .. }
            | Self::Streams { .. }
            | Self::RequestExperts { .. }
            | Self::RequestNeurons { .. }
            | Self::Subgraph { .. } => 1,
            Self::LimitCapacity { .. } => 2,
        }
    }
}

/// Code of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Encode, Decode)]
pub enum Code {
    /// Index into [`crate::plan::Plan::kernels`].
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
    /// Addresses of the matrices of a segment, one after the other, since experts may be anywhere. For a
    /// segment of neurons on disk the addresses of its rows, matrix after matrix: those of
    /// [`DiskNeurons::addresses`](crate::bundle::DiskNeurons::addresses).
    Matrices(u32),
    /// State of the plan.
    State(u32),
}

/// Rows of an entry that a step walks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Encode, Decode)]
pub enum RowSpace {
    /// The valid token rows.
    Tokens,
    /// The rows whose logits are computed.
    Outputs,
}

/// Number of work items of a step, for `n` valid rows. Threads share the items.
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
    /// Clusters of the neurons of `A` active experts, `A · blocks · (2 + columns)` items (PowerInfer-2, §4.3,
    /// Figure 6). Items of an expert are neighbours: gates of its blocks, then up of its blocks, then for each
    /// tile of columns down of its blocks.
    ///
    /// Up of a block comes after its gates. Down of a block comes after its up, and in the same columns after
    /// down of the block before, so that sums are added in one order. There is no other order: in particular
    /// no item waits for all gates, or for all of up.
    Clusters {
        /// Index of the argument that holds the dispatch table.
        table: u32,
        /// Blocks of an expert's neurons: the clusters.
        blocks: u32,
        /// Tiles of the columns of down.
        columns: u32,
    },
}

impl Grid {
    /// Number of work items for `rows` valid rows and so many active experts.
    pub const fn items(self, rows: usize, experts: usize) -> usize {
        match self {
            Self::One => 1,
            Self::Tiles { rows: 0, .. } => 0,
            Self::Tiles { rows: block, tiles } => rows.div_ceil(block as usize) * tiles as usize,
            Self::Experts { .. } | Self::Clusters { .. } => experts * self.items_of_expert(),
        }
    }

    /// Number of work items of an expert; 0 without experts.
    pub const fn items_of_expert(self) -> usize {
        match self {
            Self::One | Self::Tiles { .. } => 0,
            Self::Experts { tiles, .. } => tiles as usize,
            Self::Clusters { blocks, columns, .. } => blocks as usize * (2 + columns as usize),
        }
    }

    /// Whether items are those of clusters, which depend on each other.
    pub const fn has_clusters(self) -> bool {
        matches!(self, Self::Clusters { .. })
    }

    /// Index of the argument that holds the dispatch table, if items are those of experts.
    pub const fn table(self) -> Option<u32> {
        match self {
            Self::One | Self::Tiles { .. } => None,
            Self::Experts { table, .. } | Self::Clusters { table, .. } => Some(table),
        }
    }
}

/// One launch.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Step {
    /// Index into [`crate::plan::Plan::units`].
    pub unit: u32,
    /// Code that runs.
    pub code: Code,
    /// Addresses that it gets, in the kernel's order.
    pub args: Vec<Arg>,
    /// Rows that it walks.
    pub rows: RowSpace,
    /// Work items.
    pub grid: Grid,
    /// Whether every earlier step of its unit must have ended on all of the unit's threads before this one
    /// starts. Accelerators execute their steps one after the other, and need no barriers.
    pub barrier: bool,
    /// Steps of this entry whose results it reads or whose buffers it overwrites, ascending. For those of
    /// other units it waits.
    pub deps: Vec<u32>,
    /// Node of the entry's Graph that this step, perhaps with others, computes.
    pub node: u32,
}
