//! Errors of executing a function.

use crate::package::{Dtype, TensorType};

/// Reason that a function does not run.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ExecError {
    /// The package has no such function.
    #[error("no function is named `{name}`; the package has {}", known.join(", "))]
    NoFunction {
        /// Requested name.
        name: String,
        /// Known names.
        known: Vec<String>,
    },
    /// An input or a state is missing, unknown, or of another type.
    #[error("function `{function}`: {what} `{name}`: {message}")]
    Given {
        /// The function.
        function: String,
        /// `input` or `state`.
        what: &'static str,
        /// Its name.
        name: String,
        /// The fault.
        message: String,
    },
    /// An operation cannot be computed.
    #[error("function `{function}`, {op}: {fault}")]
    Op {
        /// The function.
        function: String,
        /// The operation, as `type 'name'`.
        op: String,
        /// The fault.
        fault: Fault,
    },
}

impl ExecError {
    /// Remedy.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::NoFunction { .. } => "name one of these, or none for the default function",
            Self::Given { .. } => "give every input of the function, with its element type and shape",
            Self::Op { fault, .. } => fault.hint(),
        }
    }
}

/// Fault of an operation.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Fault {
    /// The operator is not in the table.
    #[error("the operator is not supported; supported are {}", super::table::names().join(", "))]
    UnknownOp,
    /// A parameter that the operator needs has no argument.
    #[error("no argument for `{0}`")]
    Missing(&'static str),
    /// The operator has no such parameter.
    #[error("the operator has no parameter `{0}`")]
    UnknownParameter(String),
    /// An argument does not fit.
    #[error("`{parameter}`: {message}")]
    Argument {
        /// The parameter.
        parameter: &'static str,
        /// The fault.
        message: String,
    },
    /// The result differs from the package's declaration.
    #[error("the result is {computed}, the package declares {declared}")]
    Declared {
        /// Computed type.
        computed: TensorType,
        /// Declared type.
        declared: TensorType,
    },
    /// The operation has another number of results.
    #[error("{computed} results, the package declares {declared}")]
    Results {
        /// Computed number.
        computed: usize,
        /// Declared number.
        declared: usize,
    },
    /// A result is outside of the range of its type.
    #[error("element {index} of the result is {value}, which is not finite in {dtype}")]
    Overflow {
        /// Index of the element, in row-major order.
        index: usize,
        /// Its value before rounding.
        value: f32,
        /// Type of the result.
        dtype: Dtype,
    },
}

impl Fault {
    /// Remedy.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::UnknownOp | Self::UnknownParameter(_) => "moec executes only programs that it emits",
            Self::Missing(_) | Self::Argument { .. } | Self::Declared { .. } | Self::Results { .. } => {
                "build the package again: it was written by a faulty tool"
            }
            Self::Overflow { .. } => {
                "scale the values down before this operation: the largest number of fp16 is 65504"
            }
        }
    }

    /// An argument that does not fit.
    pub(super) fn argument(parameter: &'static str, message: impl Into<String>) -> Self {
        Self::Argument { parameter, message: message.into() }
    }
}
