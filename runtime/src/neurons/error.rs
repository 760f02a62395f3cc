//! What can be wrong with a question about neurons.

/// A request that the policies of neurons cannot answer.
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
    /// Neurons that cannot be numbered, or sizes past 64 bits.
    #[error("the cache cannot hold these neurons: {0}")]
    Shape(String),
    /// Regions that need more than there is.
    #[error(
        "regions of {wanted} bytes do not fit into {capacity}: give more memory, or make the fixed or hot region smaller"
    )]
    Regions {
        /// Bytes that are asked for.
        wanted: u64,
        /// Bytes that there are.
        capacity: u64,
    },
    /// A neuron or a cluster that is not there.
    #[error("matrix {matrix} has no {what} {index}")]
    Missing {
        /// The matrix.
        matrix: u32,
        /// `neuron` or `cluster`.
        what: &'static str,
        /// Its number.
        index: u32,
    },
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
}
