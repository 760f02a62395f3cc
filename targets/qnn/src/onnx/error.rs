//! Reasons that a network is not an ONNX model, or a model not a network.

use crate::net::NetworkError;
use thiserror::Error;

/// A model that cannot be written or read.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum OnnxError {
    /// A type that is not written.
    #[error("tensor `{tensor}` is {ty}, which is not written as ONNX")]
    Type {
        /// The tensor.
        tensor: String,
        /// Its type.
        ty: &'static str,
    },
    /// The bytes are not an ONNX model.
    #[error("no ONNX model: {0}")]
    Message(String),
    /// The model uses something that moec's networks do not support.
    #[error("ONNX model: {place}: {what}")]
    Form {
        /// The node or tensor.
        place: String,
        /// The fault.
        what: String,
    },
    /// A network that is not right.
    #[error(transparent)]
    Network(#[from] NetworkError),
}

impl OnnxError {
    pub(super) fn form(place: impl Into<String>, what: impl Into<String>) -> Self {
        Self::Form { place: place.into(), what: what.into() }
    }
}
