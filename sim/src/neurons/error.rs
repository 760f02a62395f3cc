//! What can be wrong with a question about neurons.

use moec_runtime::offload::neurons::NeuronError as CacheError;

/// A request that cannot be answered.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum NeuronError {
    /// A row that cannot be laid out.
    #[error("a row of {hidden} weights cannot be laid out: {what}")]
    Bundle {
        /// Weights of a row.
        hidden: u64,
        /// What is wrong, and what is asked for.
        what: String,
    },
    /// Rates that say nothing about the time of a read.
    #[error("the table of read rates is no table: {0}")]
    Rates(String),
    /// A pipeline that is told what cannot be.
    #[error("cluster {cluster}: {what}")]
    Pipeline {
        /// The cluster.
        cluster: u32,
        /// What was told.
        what: String,
    },
    /// Tables that a planner cannot use.
    #[error("no hot share can be planned: {0}")]
    Plan(String),
    /// A trace that cannot be made or replayed.
    #[error("activations: {0}")]
    Trace(String),
    /// What the cache refuses.
    #[error(transparent)]
    Cache(#[from] CacheError),
}
