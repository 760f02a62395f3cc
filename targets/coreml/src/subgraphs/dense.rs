//! Networks that every token passes, described for the emitter: dense layers, and shared experts.

use super::Source;
use crate::emit;
use moec_backend::error::Result;
use moec_backend::find::{Dense, MatchResult, Walk, dense};
use moec_ir::{Glu, Module, ValueId};

/// Finds the network of a scope; gives it, its rows and its result.
///
/// # Errors
/// The reason against it, for people.
pub(super) fn find(module: &Module, walk: &mut Walk<'_>) -> MatchResult<(Dense, ValueId, ValueId)> {
    let found = dense(module, walk)?;
    match found.0.glu {
        Glu::FatRelu { .. } => Err(emit::EmitError::Join("FATReLU").to_string()),
        Glu::Cats { .. } => Err(emit::EmitError::Join("SiLU with a threshold").to_string()),
        _ => Ok(found),
    }
}

/// Describes it for numbers of rows.
pub(super) fn describe(
    found: &Dense,
    module: &Module,
    name: &str,
    rows: &[usize],
    raw: &mut Source<'_>,
) -> Result<emit::Dense> {
    let down = module.weight(found.down);
    let inner = down.cols();
    // Gate, then up.
    let halves = |both: emit::Raw| [both.rows(0, inner), both.rows(inner, inner)];
    let [gate, up] = halves(raw(&found.gate_up)?);
    let bias = |raw: &mut Source<'_>| raw(&found.gate_up_bias).map(halves);
    let gate_up_bias = (!found.gate_up_bias.is_empty()).then(|| bias(raw)).transpose()?;
    Ok(emit::Dense {
        name: name.to_owned(),
        hidden: down.rows(),
        intermediate: inner,
        glu: found.glu,
        weights: emit::Networks {
            gate,
            up,
            down: raw(&[found.down])?,
            gate_up_bias,
            down_bias: found.down_bias.map(|id| raw(&[id])).transpose()?,
        },
        gate: None,
        rows: rows.to_vec(),
    })
}
