//! Errors in the settings of a schedule: costs, experts, placements, policies.

/// Reason for which there is no schedule.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ScheduleError {
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
    /// A time that is negative or NaN.
    #[error("{what} must be a number of microseconds from 0 on, not {value}")]
    Time {
        /// Name of the quantity.
        what: &'static str,
        /// Its value.
        value: f64,
    },
    /// More than can be numbered.
    #[error("{what}: {found} are more than the {limit} that a scheduler takes")]
    TooMany {
        /// Kind of the items.
        what: &'static str,
        /// Given number.
        found: usize,
        /// Maximum.
        limit: usize,
    },
    /// A policy that requires a unit without costs.
    #[error(
        "policy {policy} computes on the {unit}, and there are no costs of it: give them, or take another policy"
    )]
    NoUnit {
        /// The policy.
        policy: String,
        /// The unit.
        unit: &'static str,
    },
    /// A layer that does not exist.
    #[error("there is no layer {layer}: the scheduler has {layers}, from 0 on")]
    Layer {
        /// Requested layer.
        layer: usize,
        /// Number of layers.
        layers: usize,
    },
    /// Loads for a number of experts other than the layer's.
    #[error("{found} loads for {experts} experts: give one of each expert, 0 where it has no tokens")]
    Loads {
        /// Given number.
        found: usize,
        /// Number of experts of a layer.
        experts: usize,
    },
    /// A memory that does not exist.
    #[error("expert {expert} is in memory {memory}, but there are {memories}, from 0 on")]
    Memory {
        /// Expert.
        expert: usize,
        /// Its memory.
        memory: u16,
        /// Number of memories.
        memories: usize,
    },
    /// More experts in the memory of the GPU than it has frames.
    #[error("{cached} experts of a layer are in the memory of the GPU, which has {frames} frames for it")]
    Frames {
        /// Number of cached experts.
        cached: usize,
        /// Number of frames.
        frames: usize,
    },
    /// An expert without tokens.
    #[error("expert {expert} has no tokens\nhint: leave out experts that no token chose")]
    NoTokens {
        /// Expert.
        expert: u16,
    },
    /// An expert that is listed twice.
    #[error("expert {expert} is there twice\nhint: one task for each expert, with all of its tokens")]
    Twice {
        /// Expert.
        expert: u16,
    },
    /// A name of the plan that the tables of policies lack.
    #[error("no {what} is called `{name}`")]
    Name {
        /// Kind of the name.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// A solver that the policy of a plan does not have.
    #[error("`{0}` does not divide experts there")]
    Solver(&'static str),
    /// Initial experts that do not fit the frames.
    #[error("{0}")]
    Begin(&'static str),
    /// Invalid experts or cache policies of frames.
    #[error(transparent)]
    Cache(#[from] crate::offload::cache::CacheError),
}
