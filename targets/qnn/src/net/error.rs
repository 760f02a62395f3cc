//! Reasons that a network is refused.

use thiserror::Error;

/// An invalid network.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("network `{network}`: {place}{what}")]
pub struct NetworkError {
    /// The network.
    pub network: String,
    /// `node 3 (MatMul): `, or ``tensor `x`: ``; empty for an error of the whole network.
    pub place: String,
    /// The fault.
    pub what: String,
}

impl NetworkError {
    /// An error of the network as a whole.
    pub(crate) fn whole(network: &str, what: impl Into<String>) -> Self {
        Self { network: network.to_owned(), place: String::new(), what: what.into() }
    }

    /// An error of a node.
    pub(crate) fn node(network: &str, index: usize, op: &str, what: impl Into<String>) -> Self {
        Self { place: format!("node {index} ({op}): "), ..Self::whole(network, what) }
    }

    /// An error of a tensor.
    pub(crate) fn tensor(network: &str, name: &str, what: impl Into<String>) -> Self {
        Self { place: format!("tensor `{name}`: "), ..Self::whole(network, what) }
    }
}
