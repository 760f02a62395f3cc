//! Errors of requests for neurons.

/// A request that the policies of neurons cannot answer.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum NeuronError {
    /// Neurons that cannot be numbered, or sizes past 64 bits.
    #[error("the cache cannot hold these neurons: {0}")]
    Shape(String),
    /// Regions that need more than there is.
    #[error(
        "regions of {wanted} bytes do not fit into {capacity}: give more memory, or make the fixed or hot region smaller"
    )]
    Regions {
        /// Bytes that are requested.
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
}
