//! The head, described for the emitter: the vocabulary in parts.
//!
//! A result of a graph has as many entries of the vocabulary as the unit's largest extent. Where all of the
//! vocabulary is more than a graph may hold, it becomes several packages. Rows are picked and the final norm
//! is computed on the CPU, as is the sampling after it.

use super::Source;
use crate::emit::{self, EmitError, Limits};
use crate::program::Program;
use moec_backend::error::Result;
use moec_backend::find::Linear;
use moec_ir::Module;

/// Describes the head for numbers of rows.
pub(super) fn describe(
    module: &Module,
    linear: Linear,
    name: &str,
    rows: &[usize],
    raw: &mut Source<'_>,
) -> Result<emit::Head> {
    let weight = module.weight(linear.weight);
    Ok(emit::Head {
        name: name.to_owned(),
        hidden: weight.cols(),
        weight: raw(&[linear.weight])?,
        bias: linear.bias.map(|id| raw(&[id])).transpose()?,
        entries: 0..weight.rows(),
        split: usize::MAX,
        norm: None,
        rows: rows.to_vec(),
    })
}

/// The head as one graph, or as few as hold it, evenly.
///
/// # Errors
/// Not even one entry fits, or what [`emit::Head::emit`] refuses.
pub(super) fn programs(head: &emit::Head, limits: &Limits) -> std::result::Result<Vec<Program>, EmitError> {
    let fits = match head.emit(limits) {
        Err(EmitError::TooLarge { fits, .. }) if fits > 0 => fits,
        whole => return whole.map(|program| vec![program]),
    };
    let all = head.entries.len();
    let each = all.div_ceil(all.div_ceil(fits));
    let parts = head.entries.clone().step_by(each).enumerate().map(|(i, start)| {
        let entries = start..head.entries.end.min(start + each);
        emit::Head { name: format!("{}.{i}", head.name), entries, ..head.clone() }.emit(limits)
    });
    parts.collect()
}
