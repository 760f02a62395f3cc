//! Placement: the unit of every operator, and tier, capacity, group and unit of every expert.
//!
//! On a target with dynamic shapes every expert takes any number of tokens, and a placement says no more than
//! that. On a target with static graphs it holds the decisions of the passes `tier`, `group` and
//! `assign_residency` (NPUMoE, §4.1 to §4.3), each group and operator with the reason.

use crate::graph::EntryKind;
use crate::op::{Attributes, attributes, words};
use crate::scope::{AnyLayer, Scope};
use crate::text::ops::{Parsed, Reader, Word, Writer};
use bincode::{Decode, Encode};
use std::fmt;

/// Capacities are multiples of this many tokens: the alignment of the ANE and the rows of an AMX tile.
pub const CAPACITY_ALIGN: u32 = 16;
/// Most capacity tiers of a layer.
pub const MOST_TIERS: usize = 6;

/// Placement of all operators and experts.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
pub struct Placement {
    /// Tokens per call that capacities are for; 0: shapes are dynamic, and nothing has a capacity.
    pub chunk: u32,
    /// Treatment of tokens past an expert's capacity.
    pub overflow: Overflow,
    /// Names of the units that indices refer to; empty for dynamic shapes.
    pub units: Vec<String>,
    /// Operators, in the order of the Graph.
    pub ops: Vec<OpAssignment>,
    /// One table per MoE layer, ascending.
    pub experts: Vec<ExpertTable>,
}

words! {
    /// Treatment of the tokens that an expert has no room for (NPUMoE, §3.2).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Encode, Decode)]
    pub enum Overflow, "`prune` or `spill`" {
        /// Rows of the lowest saliency, the L2 norm of the attention output, lose this expert's part.
        #[default]
        Prune = "prune",
        /// They run on the fallback unit with the same weights: nothing is lost.
        Spill = "spill",
    }
}

impl Overflow {
    /// The one of that name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|o| o.name() == name)
    }
}

impl fmt::Display for Overflow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Unit of the nodes of one operator at one place of the model, in all layers.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct OpAssignment {
    /// Entry point.
    pub entry: EntryKind,
    /// Scope in all layers: `layers.*.attn`.
    pub scope: Scope<AnyLayer>,
    /// Operator, by its name in the Graph.
    pub op: String,
    /// Index of the unit.
    pub unit: u32,
    /// Number of nodes.
    pub nodes: u32,
    /// Reason for the unit.
    pub why: String,
}

/// Decisions about the experts of one layer.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct ExpertTable {
    /// Layer.
    pub layer: u32,
    /// Experts per token.
    pub k: u32,
    /// Capacities of the tiers in tokens, descending; empty: shapes are dynamic.
    pub tiers: Vec<u32>,
    /// Prediction of the profile.
    pub expected: Option<Expected>,
    /// Groups that share a static graph, the most popular first; empty if there is no such graph.
    pub groups: Vec<ExpertGroup>,
    /// One row per expert.
    pub experts: Vec<ExpertRow>,
}

attributes! {
    /// Prediction of the profile for a layer.
    #[derive(Clone, Copy, Debug, PartialEq, Encode, Decode)]
    pub struct Expected as "rates" {
        /// Load of the busiest expert over the mean load, r (NPUMoE, §4.1).
        pub imbalance: f32,
        /// Share of the routed (token, expert) pairs that find no room: dropped or spilled, as the policy
        /// says.
        pub overflow: f32,
        /// Share of the rows of executed graphs that are padding.
        pub padding: f32,
    }
}

attributes! {
    /// Experts of one tier that one static graph holds.
    #[derive(Clone, Debug, PartialEq, Encode, Decode)]
    pub struct ExpertGroup {
        /// Index into [`ExpertTable::tiers`].
        pub tier: u32,
        /// Index of the unit that runs it.
        pub unit: u32,
        /// Its experts, in the order of the graph's slices.
        pub experts: Vec<u32>,
        /// Rows per expert that the graph has a function for, ascending; the last is the capacity of its
        /// tier. They share the weights, and a call takes the smallest that holds its tokens. Empty: the
        /// capacity alone.
        pub sizes: Vec<u32>,
        /// Bytes of the graph's weights.
        pub bytes: u64,
        /// Expected microseconds per call on each unit, launch and waiting included; empty: not known yet.
        pub cost_us: Vec<f32>,
        /// Reason for the unit.
        pub why: String,
        /// Its unit in entry points that decode, by ascending batch; the CPU in those that are not here.
        pub decode: Vec<DecodeUnit>,
    }
}

attributes! {
    /// Unit of a group's experts in entry points that decode a batch.
    #[derive(Clone, Debug, PartialEq, Encode, Decode)]
    pub struct DecodeUnit as "decode" {
        /// Rows of the entry points.
        pub batch: u32,
        /// Index of the unit.
        pub unit: u32,
        /// Expected microseconds per call on each unit, as [`ExpertGroup::cost_us`].
        pub cost_us: Vec<f32>,
        /// Reason for the unit.
        pub why: String,
    }
}

impl ExpertGroup {
    /// Index of the unit that runs it: in prompts, or in entry points that decode `batch` rows.
    pub fn unit_in(&self, batch: Option<u32>) -> u32 {
        let of = |batch: u32| self.decode.iter().find(|d| d.batch == batch).map_or(0, |d| d.unit);
        batch.map_or(self.unit, of)
    }

    /// Whether a unit runs it in any entry point.
    pub fn is_on(&self, unit: u32) -> bool {
        self.unit == unit || self.decode.iter().any(|d| d.unit == unit)
    }

    /// Rows of each expert in a call whose busiest expert has `most` tokens, where the tier's capacity is
    /// `capacity`.
    pub fn rows(&self, most: u32, capacity: u32) -> u32 {
        self.sizes.iter().copied().find(|&size| size >= most).unwrap_or(capacity)
    }
}

attributes! {
    /// Decisions about one expert.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Encode, Decode)]
    pub struct ExpertRow {
        /// Most tokens per call that it takes; 0: no limit (dynamic shapes).
        pub capacity: u32,
        /// Group that it is fused into.
        pub group: u32,
        /// Unit that runs it.
        pub unit: u32,
        /// Index into [`ExpertTable::tiers`].
        pub tier: Option<u32>,
        /// Unit that runs the tokens that are past its capacity; none: they are pruned.
        pub fallback: Option<u32>,
        /// Mean tokens per call that the profile saw.
        pub load: Option<f32>,
        /// Whether the profile saw too few tokens to judge it.
        pub few: bool,
    }
}

impl Placement {
    /// The placement of a target with dynamic shapes.
    pub fn dynamic(experts: Vec<ExpertTable>) -> Self {
        Self { experts, ..Self::default() }
    }

    /// Whether shapes are dynamic.
    pub fn is_dynamic(&self) -> bool {
        self.chunk == 0
    }

    /// Whether every number in it is finite.
    pub fn is_finite(&self) -> bool {
        self.experts.iter().all(|table| {
            let rates = table.expected.iter().flat_map(|e| [e.imbalance, e.overflow, e.padding]);
            let groups = || table.groups.iter();
            let decode = groups().flat_map(|g| &g.decode).flat_map(|d| &d.cost_us);
            let costs = groups().flat_map(|g| &g.cost_us).chain(decode).copied();
            let loads = table.experts.iter().filter_map(|row| row.load);
            rates.chain(costs).chain(loads).all(f32::is_finite)
        })
    }

    /// Name of a unit.
    pub fn unit(&self, index: u32) -> &str {
        self.units.get(index as usize).map_or("?", String::as_str)
    }
}

impl ExpertTable {
    /// Name of a group's graph: `layers.3.group.0`.
    pub fn group_name(&self, group: usize) -> String {
        format!("layers.{}.group.{group}", self.layer)
    }
}
