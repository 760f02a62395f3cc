//! The Graph: entry points over shared weights and state.

use crate::op::Op;
use crate::scope::Scope;
use crate::state::StateKind;
use crate::types::Type;
use crate::weights::Weight;
use bincode::{Decode, Encode};
use std::fmt;

/// A value of one graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId(pub u32);
/// A weight of the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WeightId(pub u32);
/// A state of the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StateId(pub u32);
/// Index of a node in its graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub u32);

/// One operand of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Operand {
    /// A value of this graph.
    Value(ValueId),
    /// A weight of the module.
    Weight(WeightId),
    /// A state of the module, before this graph writes it.
    State(StateId),
}

/// An operator applied.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Operator.
    pub op: Op,
    /// From what, as [`Op::signature`] orders it.
    pub inputs: Vec<Operand>,
    /// Results, one or two.
    pub outputs: Vec<ValueId>,
    /// Place in the model: `embed`, `layers.0.attn`, `layers.0.ffn`, `head`. Rewriting never
    /// looks across scopes.
    pub scope: Scope,
}

/// Most rows of a call that is bound by reading weights. Their inputs are treated as a single row's are: bf16
/// weights are multiplied by f32 rows, which costs no time and rounds nothing. Kernels of more rows may round
/// them to the types of their arithmetic.
pub const FEW_ROWS: usize = 8;

/// Entry point that a graph is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Encode, Decode)]
pub enum EntryKind {
    /// Up to this many tokens of one sequence.
    Prefill(u32),
    /// One token of each of up to this many sequences.
    Decode(u32),
    /// As `Decode`, with fewer experts per token: the little model of big-little decoding (MoBiLE, §III-A).
    /// It shares weights and KV cache with the others.
    Little(u32),
}

impl EntryKind {
    /// Token rows `T`.
    pub const fn rows(self) -> usize {
        match self {
            Self::Prefill(n) | Self::Decode(n) | Self::Little(n) => n as usize,
        }
    }

    /// Whether the rows are one sequence; else every row is a sequence of its own.
    pub const fn is_prefill(self) -> bool {
        matches!(self, Self::Prefill(_))
    }

    /// Name without the rows.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prefill(_) => "prefill",
            Self::Decode(_) => "decode",
            Self::Little(_) => "little",
        }
    }
}

impl fmt::Display for EntryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{}]", self.name(), self.rows())
    }
}

/// One entry point. Its inputs are always the first four values:
///
/// | value | type | what |
/// |---|---|---|
/// | `%0` ids | `i32[T]` | token ids, 0 on padding rows |
/// | `%1` pos | `i32[T]` | position in the sequence, −1 on padding rows |
/// | `%2` slot | `i32[T]` | KV-cache slot of the sequence |
/// | `%3` rows | `i32[R]` | the rows whose logits are computed, −1 past the last |
#[derive(Clone, Debug, PartialEq)]
pub struct Graph {
    /// Entry point that it is.
    pub kind: EntryKind,
    /// Type of every value, by id.
    pub values: Vec<Type>,
    /// Nodes in an order of execution.
    pub nodes: Vec<Node>,
    /// Logits `f32[R, vocab]`.
    pub output: ValueId,
}

/// Number of graph inputs.
pub const INPUTS: usize = 4;

impl Graph {
    /// Token ids.
    pub const IDS: ValueId = ValueId(0);
    /// Positions.
    pub const POS: ValueId = ValueId(1);
    /// Slots.
    pub const SLOT: ValueId = ValueId(2);
    /// Rows whose logits are computed.
    pub const ROWS: ValueId = ValueId(3);

    /// Type of a value.
    pub fn ty(&self, v: ValueId) -> &Type {
        &self.values[v.0 as usize]
    }

    /// The node that defines a value; `None` for inputs.
    pub fn def(&self, v: ValueId) -> Option<NodeId> {
        self.nodes.iter().position(|n| n.outputs.contains(&v)).map(|i| NodeId(i as u32))
    }
}

/// A tensor that outlives a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateDecl {
    /// Name, unique in the module.
    pub name: String,
    /// `f32[slots, heads, rows, dim]`; the rows of a cache or ring are positions.
    pub ty: Type,
    /// Kind: what is kept of a sequence.
    pub kind: StateKind,
}

/// A model: entry points that share weights and states.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Module {
    /// Weights.
    pub weights: Vec<Weight>,
    /// States.
    pub states: Vec<StateDecl>,
    /// Entry points.
    pub entries: Vec<Graph>,
}

impl Module {
    /// A weight.
    pub fn weight(&self, id: WeightId) -> &Weight {
        &self.weights[id.0 as usize]
    }
    /// A state.
    pub fn state(&self, id: StateId) -> &StateDecl {
        &self.states[id.0 as usize]
    }
}
