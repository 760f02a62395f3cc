//! Errors of requests for neurons.

use moec_runtime::offload::neurons::NeuronError as CacheError;

/// A request that cannot be answered.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum NeuronError {
    /// A row that cannot be laid out.
    #[error("a row of {hidden} weights cannot be laid out: {what}")]
    Bundle {
        /// Weights of a row.
        hidden: u64,
        /// The fault, and the requirement.
        what: String,
    },
    /// Invalid rates of reads.
    #[error("the table of read rates is not a table: {0}")]
    Rates(String),
    /// An invalid request to a pipeline.
    #[error("cluster {cluster}: {what}")]
    Pipeline {
        /// The cluster.
        cluster: u32,
        /// The request.
        what: String,
    },
    /// Invalid tables of a planner.
    #[error("no hot share can be planned: {0}")]
    Plan(String),
    /// A trace that cannot be made or replayed.
    #[error("activations: {0}")]
    Trace(String),
    /// Error of the cache.
    #[error(transparent)]
    Cache(#[from] CacheError),
}
