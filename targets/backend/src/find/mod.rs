//! Finds parts of a model in the Graph that several backends make graphs of.

mod attention;
mod dense;
mod head;
mod walk;

pub use attention::{AttentionBoundary, Chain, Grouped, Rope, attention, cache, grouped, operand, rope};
pub use dense::{Dense, dense};
pub use head::head;
pub use walk::{
    Linear, MatchResult, Rms, Walk, input, projects, projects_heads, result, rounds, value, weight,
};
