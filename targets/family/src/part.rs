//! Parts of a model that a unit computes as static graphs.

use moec_ir::plan::GraphDecl;
use moec_ir::{EntryKind, NodeId, Scope, ValueId, WeightId};

/// A part of a model as static graphs: attention, a dense network, the head. Experts come in groups instead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StaticPart {
    /// `layers.3.attn`, `layers.0.ffn`, `layers.2.shared`, `head`.
    pub name: String,
    /// Its scope in the Graph.
    pub scope: Scope,
    /// Where it stands in each entry point, in the order of the module's.
    pub cuts: Vec<Cut>,
    /// What attention has besides.
    pub attention: Option<StaticAttention>,
    /// Its functions, entry point by entry point.
    pub graphs: Vec<PartGraph>,
    /// Its matrices.
    pub matrices: Vec<WeightId>,
}

/// Where a part stands in an entry point.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Entry point.
    pub entry: EntryKind,
    /// The nodes that it replaces, ascending.
    pub nodes: Vec<NodeId>,
    /// Rows that it reads, `[T, H]`.
    pub x: ValueId,
    /// Angles of the rows, `[T, R]`, where an attention rotates.
    pub angles: Option<ValueId>,
    /// What it gives, `[T, H]` or `[T, V]`.
    pub y: ValueId,
    /// Rows of its function. Attention in a decode entry point takes one sequence at a time, whose row is the first.
    pub rows: usize,
}

/// What is to be known of a part that is attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StaticAttention {
    /// Positions of its state: those of the Graph's cache, up to the unit's multiple.
    pub context: usize,
    /// Tokens that a row sees, its own included, where not all.
    pub window: Option<usize>,
}

/// A function of an artifact, as one entry point calls it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartGraph {
    /// Entry point.
    pub entry: EntryKind,
    /// What the plan says of it.
    pub graph: GraphDecl,
}

/// A function of a group of experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupGraph {
    /// Rows of each expert.
    pub capacity: u32,
    /// What the plan says of it.
    pub graph: GraphDecl,
}
