//! *PowerInfer-2*: its evaluation, simulated.
//!
//! [`phone`] is a phone in virtual time, [`machine`] has the two of its Table 3, [`models`] the models by
//! their shapes, [`activity`] the neurons that tokens request, with a source of every constant. [`systems`]
//! are the compared systems. [`mod@block`] runs the feed-forward part of a layer, [`decode`], [`in_memory`]
//! and [`prefill`] whole models. Their decisions are made by [`moec_runtime::offload::neurons`]: the weights
//! that stay in memory, the next work of each unit, and, in [`planned`], how many neurons are hot. [`report`]
//! has everything once, [`claims`] puts it beside the paper's figures, [`page`] writes it as a page of the
//! documentation and [`plots`] draws it.

pub mod activity;
pub mod block;
pub mod claims;
pub mod decode;
pub mod dense;
mod details;
pub mod in_memory;
pub mod machine;
pub mod models;
pub mod page;
pub mod phone;
pub mod planned;
pub mod plots;
pub mod prefill;
pub mod report;
pub mod systems;
#[cfg(test)]
mod tests;

use decode::Size;
use moec_base::{Error, Result};
use report::Report;

/// The page and its plots: their paths in `docs/`, and their text.
///
/// # Errors
/// Fails for an invalid shape or table, which would be a bug of ours.
pub fn pages(size: Size) -> Result<Vec<(String, String)>> {
    let bug = |e: moec_sim::neurons::NeuronError| Error::input(e.to_string());
    let phone = machine::oneplus_12().map_err(bug)?;
    let report = Report::new(size).map_err(bug)?;
    let claims = claims::claims(&phone, &report)?;
    let page = ("powerinfer2.md".to_owned(), page::page(&claims, &phone, &report));
    let plots =
        plots::plots(&claims, &report).into_iter().map(|(name, text)| (format!("powerinfer2/{name}"), text));
    Ok(std::iter::once(page).chain(plots).collect())
}
