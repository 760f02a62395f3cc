//! Subgraphs of a model that a unit computes as static graphs.

use moec_ir::plan::GraphDecl;
use moec_ir::{EntryKind, Module, NodeId, Scope, ValueId, WeightId};
use std::collections::BTreeSet;
use std::ops::Range;

/// A subgraph of a model as static graphs: attention, a dense network, the head. Experts come in groups
/// instead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StaticSubgraph {
    /// `layers.3.attn`, `layers.0.ffn`, `layers.2.shared`, `head`.
    pub name: String,
    /// Its scope in the Graph.
    pub scope: Scope,
    /// Boundary in each entry point, in the order of the module's.
    pub boundaries: Vec<SubgraphBoundary>,
    /// Further fields of attention.
    pub attention: Option<StaticAttention>,
    /// Its functions, entry point by entry point.
    pub graphs: Vec<SubgraphFunction>,
    /// Its matrices.
    pub matrices: Vec<WeightId>,
    /// Result of its legalisation: names and numbers of operators; empty if the unit runs those of the Graph.
    pub legalised: Vec<(&'static str, usize)>,
}

/// Boundary of a subgraph in an entry point: the nodes that it replaces, and the values that it reads and
/// writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubgraphBoundary {
    /// Entry point.
    pub entry: EntryKind,
    /// The nodes that it replaces, ascending.
    pub nodes: Vec<NodeId>,
    /// Rows that it reads, `[T, H]`.
    pub x: ValueId,
    /// Angles of the rows, `[T, R]`, where an attention rotates.
    pub angles: Option<ValueId>,
    /// Result, `[T, H]` or `[T, V]`.
    pub y: ValueId,
    /// Rows of its function. Attention in a decode entry point takes one sequence at a time, whose row is the
    /// first.
    pub rows: usize,
}

/// Facts about a part that is attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StaticAttention {
    /// Positions of its state: those of the Graph's cache, up to the unit's multiple.
    pub context: usize,
    /// Tokens that a row sees, its own included, if not all.
    pub window: Option<usize>,
}

/// A function of an artifact, as one entry point calls it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubgraphFunction {
    /// Entry point.
    pub entry: EntryKind,
    /// Declaration in a plan.
    pub graph: GraphDecl,
}

/// Hot neurons of the experts of a layer, which a unit computes densely while others compute the rest
/// (PowerInfer-2, §4.1.3): an expert has functions for each batch that is decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HotLayer {
    /// Layer.
    pub layer: u32,
    /// Its functions, by ascending batch; none without neurons.
    pub batches: Vec<HotBatch>,
}

/// Number of an expert's hot neurons for a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HotBatch {
    /// Sequences that are decoded together: the most rows that an expert can have.
    pub batch: u32,
    /// Neurons of each expert: the hottest.
    pub neurons: u32,
}

/// An artifact of a layer's hot neurons.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HotArtifact {
    /// `layers.3.hot`, `layers.3.hot1`, …
    pub name: String,
    /// Its clusters of neurons, by index into [`HotLayer::cluster_ends`].
    pub clusters: Range<usize>,
}

impl HotLayer {
    /// Name of its first artifact: `layers.3.hot`
    pub fn name(&self) -> String {
        format!("layers.{}.hot", self.layer)
    }

    /// Whether it is the name of such an artifact.
    pub fn has_name(name: &str) -> bool {
        let parts = name.strip_prefix("layers.").and_then(|rest| rest.split_once(".hot"));
        let number = |text: &str| text.parse::<u32>().is_ok();
        parts.is_some_and(|(layer, at)| number(layer) && (at.is_empty() || number(at)))
    }

    /// Artifacts of its functions. Where experts stay on disk, each cluster has one of its own, which a run
    /// loads and frees by itself; else one has all, and a function sums its clusters.
    pub fn artifacts(&self, module: &Module) -> Vec<HotArtifact> {
        let count = self.cluster_ends().len();
        let mut nodes = module.entries.iter().flat_map(|graph| &graph.nodes);
        if !nodes.any(|n| n.scope.layer == Some(self.layer) && n.op.pages_neurons()) {
            return vec![HotArtifact { name: self.name(), clusters: 0..count }];
        }
        let name = |i: usize| if i == 0 { self.name() } else { format!("{}{i}", self.name()) };
        (0..count).map(|i| HotArtifact { name: name(i), clusters: i..i + 1 }).collect()
    }

    /// Clusters that a batch has: the first ones.
    pub fn clusters_of(&self, batch: u32) -> usize {
        let of = self.batches.iter().find(|b| b.batch == batch).map_or(0, |b| b.neurons as usize);
        self.cluster_ends().partition_point(|&end| end <= of)
    }

    /// Numbers of neurons that some batch has, ascending: where a cluster ends that batches share.
    pub fn cluster_ends(&self) -> Vec<usize> {
        let all: BTreeSet<usize> = self.batches.iter().map(|b| b.neurons as usize).collect();
        all.into_iter().filter(|&n| n > 0).collect()
    }
}

/// A function of a group of experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupGraph {
    /// Rows of each expert.
    pub capacity: u32,
    /// Declaration in a plan.
    pub graph: GraphDecl,
}
