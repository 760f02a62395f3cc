//! Static graphs of a plan: functions of artifacts, and what they compute of it.

use crate::graph::EntryKind;
use crate::op::{Attributes, attributes};
use crate::placement::Overflow;
use crate::text::ops::{Parsed, Reader, Word, Writer};
use bincode::{Decode, Encode};

attributes! {
    /// A tensor at the boundary of a static graph: f16, dense, the last axis inner.
    #[derive(Clone, Debug, PartialEq, Eq, Hash, Encode, Decode)]
    pub struct GraphTensor as "tensor" {
        /// Name in the function's signature.
        pub name: String,
        /// Extents.
        pub shape: [u32; 4],
    }
}

impl GraphTensor {
    /// Numbers in it, or `None` where that overflows.
    pub fn checked_elements(&self) -> Option<usize> {
        self.shape.iter().try_fold(1_usize, |n, &extent| n.checked_mul(extent as usize))
    }

    /// Numbers in it, of a tensor that [`crate::verify::plan`] accepts.
    pub fn elements(&self) -> usize {
        self.checked_elements().unwrap_or(usize::MAX)
    }
}

attributes! {
    /// A static graph: a function of an artifact that an accelerator executes.
    #[derive(Clone, Debug, PartialEq, Eq, Hash, Encode, Decode)]
    pub struct GraphDecl {
        /// Path of the artifact, relative to the bundle.
        pub package: String,
        /// Function in it.
        pub function: String,
        /// Inputs, in order.
        pub inputs: Vec<GraphTensor>,
        /// Outputs, in order.
        pub outputs: Vec<GraphTensor>,
        /// Whether the artifact keeps a state for each sequence slot.
        pub stateful: bool,
    }
}

impl GraphDecl {
    /// Place of the rows that an attention's graph takes, if it is fixed. The graph then has no `write`, and
    /// its mask ends after its last row.
    pub fn fixed_start(&self) -> Option<u32> {
        let tensor = |name: &str| self.inputs.iter().find(|p| p.name == name);
        match (tensor("mask"), tensor("write")) {
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
        /// Groups, each one graph of rows `[experts · capacity, hidden, 1, 1]`, the experts one after the
        /// other.
        pub groups: Vec<GraphGroup>,
        /// Rows of the entry points that decode and that it is for; none: it is for prompts. Each expert has
        /// room for all of these rows.
        pub batch: Option<u32>,
        /// Hot neurons of each expert that the graphs compute, if not all: for each cluster of neurons one
        /// graph of each expert, for a batch that is decoded. Kernels compute the others, and the sums are
        /// added (PowerInfer-2, §4.1.3).
        pub hot: Option<u32>,
    }
}

impl ExpertSet {
    /// Groups whose results are added: all of them, or of hot neurons those of each cluster.
    pub fn addends(&self) -> std::slice::Chunks<'_, GraphGroup> {
        let each = if self.hot.is_some() { self.capacities.len() } else { self.groups.len() };
        self.groups.chunks(each.max(1))
    }

    /// Whether steps of `rows` rows in such an entry point may call it.
    pub fn is_called(&self, entry: EntryKind, rows: u32) -> bool {
        self.batch.is_none_or(|batch| !entry.is_prefill() && batch == rows)
    }
}

attributes! {
    /// A subgraph of an entry point that static graphs compute, its experts aside: attention, a dense
    /// network, the head. All of its graphs take the same rows; the channels of their results follow each
    /// other in `y`.
    ///
    /// A graph has an input `x[T, inputs, 1, 1]` and results `[T, n, 1, 1]`. Attention also has `angles[T, R,
    /// 1, 1]` if it rotates, `mask[1, 1, T, C]` and `write[1, 1, C, T]`, with `C` the positions of its state.
    #[derive(Clone, Debug, PartialEq, Eq, Hash, Encode, Decode)]
    pub struct Subgraph {
        /// Indices into [`crate::plan::Plan::graphs`].
        pub graphs: Vec<u32>,
        /// Channels of `x`.
        pub inputs: u32,
        /// Channels of `y`.
        pub outputs: u32,
        /// Further inputs of attention.
        pub attention: Option<SubgraphAttention>,
    }
}

attributes! {
    /// Attention of a [`Subgraph`].
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Encode, Decode)]
    pub struct SubgraphAttention as "attention" {
        /// Channels of `angles`; 0: nothing rotates.
        pub angles: u32,
        /// Positions of the state, `C`.
        pub context: u32,
        /// Tokens that a row sees, its own included, if not all.
        pub window: Option<u32>,
        /// Whether every row is a sequence of its own: each then has a call of its own.
        pub one_call_per_row: bool,
    }
}

attributes! {
    /// Experts of one graph. Groups of the same experts, one after the other, are sizes of one graph,
    /// ascending: a call takes the first that holds its rows.
    #[derive(Clone, Debug, PartialEq, Eq, Hash, Encode, Decode)]
    pub struct GraphGroup as "group" {
        /// Index into [`crate::plan::Plan::graphs`].
        pub graph: u32,
        /// Rows of each expert.
        pub capacity: u32,
        /// Experts in the order of the rows.
        pub experts: Vec<u32>,
    }
}
