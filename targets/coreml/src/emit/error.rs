//! Reasons that a graph is not written.

use crate::program::ProgramError;
use thiserror::Error;

/// A part of a model that cannot be a graph as requested.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum EmitError {
    /// More weights than a graph may have.
    #[error(
        "graph `{graph}` has {bytes} bytes of weights ({parts} {unit}); a graph may have {limit}\nhint: {}",
        fitting(*fits, unit)
    )]
    TooLarge {
        /// Name of the graph.
        graph: String,
        /// Its weights.
        bytes: u64,
        /// The limit.
        limit: u64,
        /// Number of its units.
        parts: usize,
        /// Unit that it could be cut into: `experts`, `vocabulary entries`, `layers`.
        unit: &'static str,
        /// Most parts that fit.
        fits: usize,
    },
    /// A tensor of another shape than its part of the model has.
    #[error("graph `{graph}`: `{tensor}` is {found:?}, expected {expected:?}")]
    Shape {
        /// Name of the graph.
        graph: String,
        /// Tensor.
        tensor: String,
        /// Its shape.
        found: Vec<usize>,
        /// The shape it should have.
        expected: Vec<usize>,
    },
    /// Capacities or chunks that the unit does not take.
    #[error(
        "graph `{graph}`: {}\nhint: {what} are different multiples of {multiple}",
        value.map_or_else(|| format!("there are no {what}"), |v| format!("{v} is not one of the possible {what}"))
    )]
    Rows {
        /// Name of the graph.
        graph: String,
        /// `capacities`, `chunks`, …
        what: &'static str,
        /// The one at fault; `None` if the error is that there are none.
        value: Option<usize>,
        /// Required factor.
        multiple: usize,
    },
    /// No operator of the unit joins gate and up so.
    #[error("gate and up are combined by {0}, which no operator of the unit computes")]
    Join(&'static str),
    /// A network that joins nothing.
    #[error("a network without a gate is not written as a graph")]
    NoGate,
    /// A legalised operator at a position where programs have none, which is a bug of ours.
    #[error("`{0}` is not supported in this place")]
    Form(String),
    /// Numbers that do not go together.
    #[error("graph `{graph}`: {what}")]
    Description {
        /// Name of the graph.
        graph: String,
        /// The fault.
        what: String,
    },
    /// A program that the unit does not run.
    #[error(transparent)]
    Program(#[from] ProgramError),
}

fn fitting(fits: usize, unit: &str) -> String {
    match fits {
        0 => "not even one part of it fits: keep it on another unit".to_owned(),
        n => format!("{n} {unit} fit in one graph"),
    }
}
