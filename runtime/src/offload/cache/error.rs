//! Errors of requests to the cache.

/// A request that the cache cannot answer.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CacheError {
    /// A model without experts, or with more than can be numbered.
    #[error("{0}")]
    Experts(String),
    /// A layer or an expert that is not there.
    #[error("layer {layer} has no expert {expert}")]
    NoExpert {
        /// Layer, counted over those with routed experts.
        layer: usize,
        /// Expert.
        expert: usize,
    },
    /// A policy that is not in the table.
    #[error("there is no cache policy `{found}`; there are {known}")]
    NoPolicy {
        /// Requested name.
        found: String,
        /// Names of the table.
        known: String,
    },
    /// A setting that the policy does not have, or a value out of its range.
    #[error("cache policy `{policy}`: {what}")]
    Setting {
        /// The policy.
        policy: String,
        /// Invalid part, and the valid ones.
        what: String,
    },
    /// An expert that cannot be pinned.
    #[error("expert {expert} of layer {layer} {what}")]
    Pinned {
        /// Layer, counted over those with routed experts.
        layer: u16,
        /// Expert.
        expert: u16,
        /// Reason.
        what: String,
    },
}
