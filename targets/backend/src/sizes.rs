//! Sizes of artifacts against their unit's limits.

use serde::Serialize;

/// Bytes of an artifact whose functions share weights.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ArtifactSizes {
    /// Path in the bundle.
    pub package: String,
    /// Functions.
    pub functions: usize,
    /// Bytes of the weights, which its functions share.
    pub weights: u64,
    /// The same if each function had its own.
    pub unshared: u64,
    /// Weights of the largest function, to which the limit on a graph applies.
    pub largest: u64,
    /// Most that a node reads and gives, in bytes, weights aside.
    pub activations: u64,
    /// All functions, compiled; none: that was not built.
    pub context: Option<u64>,
}

/// Sizes of one unit's artifacts, in bytes, and their limits.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct UnitSizes {
    /// Weights that one function may have, if the device file limits them.
    pub graph_limit: Option<u64>,
    /// Limit of all compiled functions of an artifact together, in bytes.
    pub context_limit: u64,
    /// Memory that the unit computes in; larger data is computed in pieces.
    pub tile_memory: Option<u64>,
    /// Every artifact.
    pub artifacts: Vec<ArtifactSizes>,
}
