//! Errors of requests for neurons.

/// An invalid request for neurons.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum NeuronError {
    /// Neurons that cannot be numbered, or sizes past 64 bits.
    #[error("the cache cannot hold these neurons: {0}")]
    Shape(String),
    /// Regions that exceed the memory.
    #[error(
        "regions of {requested} bytes do not fit into {capacity}: give more memory, or make the fixed or hot region smaller"
    )]
    Regions {
        /// Requested bytes.
        requested: u64,
        /// Available bytes.
        capacity: u64,
    },
    /// A neuron or a cluster that does not exist.
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
