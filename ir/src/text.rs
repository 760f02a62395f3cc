//! The text forms of [`Module`], [`Plan`] and [`Placement`]: printed for people, parsed back equal.
//!
//! Printing is [`std::fmt::Display`]; parsing is [`parse_module`], [`parse_plan`] and [`parse_placement`].
//! Line breaks mean nothing, `;` starts a comment, and names that are not plain words are quoted. Floats are
//! printed as the shortest decimal that reads back the same. The parser checks syntax and names only;
//! [`crate::verify`] checks the rest.

mod attrs;
mod cursor;
mod experts;
mod expr;
mod items;
mod launches;
mod lex;
pub(crate) mod ops;
mod parse_graph;
mod parse_placement;
mod parse_plan;
mod print_graph;
mod print_placement;
mod print_plan;
mod units;

use crate::graph::Module;
use crate::placement::Placement;
use crate::plan::Plan;
use crate::weights::WeightExpr;
use thiserror::Error;

/// Reason that a text cannot be parsed, and its place.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{line}:{column}: {message}")]
pub struct ParseError {
    /// Line, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
    /// Expected and found text.
    pub message: String,
}

/// Parses the text form of a module.
///
/// # Errors
/// Malformed text or an unknown name, with its place.
pub fn parse_module(text: &str) -> Result<Module, ParseError> {
    parse_graph::parse(text)
}

/// Parses the text form of a plan.
///
/// # Errors
/// Malformed text, with its place.
pub fn parse_plan(text: &str) -> Result<Plan, ParseError> {
    parse_plan::parse(text)
}

/// Parses the text form of a placement.
///
/// # Errors
/// Malformed text, with its place.
pub fn parse_placement(text: &str) -> Result<Placement, ParseError> {
    parse_placement::parse(text)
}

/// Parses the text form of a weight expression, such as `transpose(t"w"[4, 8])`.
///
/// # Errors
/// Malformed text, with its place.
pub fn parse_expr(text: &str) -> Result<WeightExpr, ParseError> {
    expr::parse(text)
}
