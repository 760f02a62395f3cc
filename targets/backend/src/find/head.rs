//! The projection to the vocabulary.

use super::{Linear, MatchResult, Walk, result, rounds, value};
use moec_ir::{Module, Operand, ValueId};

/// Finds the projection to the vocabulary; gives it, its rows and the logits.
///
/// # Errors
/// The reason against it, for people.
pub fn head(module: &Module, walk: &mut Walk<'_>) -> MatchResult<(Linear, ValueId, ValueId)> {
    let found: Vec<_> = walk.nodes().filter(|n| rounds(module, n)).collect();
    let [node] = *found.as_slice() else { return Err(format!("{} projections in the head", found.len())) };
    let y = result(node)?;
    let (linear, x) = walk.linear(Operand::Value(y))?;
    Ok((linear, value(x)?, y))
}
