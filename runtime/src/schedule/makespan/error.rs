//! What can be wrong with what a scheduler is given.

/// Why there is no schedule.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum MakespanError {
    /// A table of costs without points.
    #[error("a table of costs needs at least one point (tokens, microseconds)")]
    NoPoints,
    /// Points of a table do not ascend.
    #[error("the tokens of a table of costs must ascend: {next} comes after {tokens}")]
    Order {
        /// Tokens of a point.
        tokens: u32,
        /// Tokens of the point after it.
        next: u32,
    },
    /// A time that is none.
    #[error("{what} must be a number of microseconds from 0 on, not {value}")]
    Time {
        /// Which.
        what: &'static str,
        /// What was given.
        value: f64,
    },
    /// More than can be numbered.
    #[error("{what}: {found} are more than the {limit} that a scheduler takes")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many were given.
        found: usize,
        /// The most.
        limit: usize,
    },
    /// A policy wants a unit that has no costs.
    #[error(
        "policy {policy} computes on the {unit}, and there are no costs of it: give them, or take another policy"
    )]
    NoUnit {
        /// The policy.
        policy: String,
        /// The unit.
        unit: &'static str,
    },
    /// A layer that is not there.
    #[error("there is no layer {layer}: the scheduler has {layers}, from 0 on")]
    Layer {
        /// Which was asked for.
        layer: usize,
        /// How many there are.
        layers: usize,
    },
    /// Numbers of other than the layer's experts.
    #[error("{found} loads for {experts} experts: give one of each expert, 0 where it has no tokens")]
    Loads {
        /// How many were given.
        found: usize,
        /// How many experts a layer has.
        experts: usize,
    },
    /// A DIMM that is not there.
    #[error("expert {expert} lies on DIMM {dimm}, and there are {dimms}, from 0 on")]
    Dimm {
        /// Which expert.
        expert: usize,
        /// Its DIMM.
        dimm: u16,
        /// How many there are.
        dimms: usize,
    },
    /// More experts in the memory of the GPU than it has frames.
    #[error("{cached} experts of a layer are in the memory of the GPU, which has {frames} frames for it")]
    Frames {
        /// How many are cached.
        cached: usize,
        /// How many can be.
        frames: usize,
    },
}
