//! *TriMoE*: its evaluation, simulated.
//!
//! [`paper`] holds what it printed. [`machine`], [`models`] and [`loads`] are the machine of its Table 1, the
//! models of its Table 2 and the loads of their experts, with a source of every constant; [`mod@bench`]
//! simulates one configuration on [`moec_ndp::steps`], [`experiments`] compares systems, [`report`] collects
//! the results. [`claims`] compares them with the paper's figures, [`page`] writes the page of the
//! documentation and [`plots`] its plots.

pub mod bench;
pub mod claims;
mod details;
pub mod experiments;
pub mod loads;
pub mod machine;
pub mod models;
pub mod page;
pub mod paper;
pub mod plots;
pub mod report;
#[cfg(test)]
mod tests;

use crate::recorded::Recorded;
use bench::Size;
use experiments::Bench;
use loads::Source;
use moec_base::{Error, Result};
use report::Report;

/// Common parts of all experiments, with the recorded counts.
///
/// # Errors
/// Fails for counts that cannot be parsed, or a model without a command stream, which would be bugs of ours.
pub fn bench(size: Size) -> Result<Bench> {
    Bench::new(Source::Recorded(Recorded::every()?.parts()), size).map_err(Error::input)
}

/// The page and its plots: their paths in `docs/`, and their text.
///
/// # Errors
/// Fails for an invalid setup, which would be a bug of ours.
pub fn pages(size: Size) -> Result<Vec<(String, String)>> {
    let bench = bench(size)?;
    let report = Report::new(&bench).map_err(|e| Error::input(e.to_string()))?;
    let claims = claims::claims(&bench, &report)?;
    let page = ("trimoe.md".to_owned(), page::page(&claims, &bench, &report));
    let plots =
        plots::plots(&claims, &report).into_iter().map(|(name, text)| (format!("trimoe/{name}"), text));
    Ok(std::iter::once(page).chain(plots).collect())
}
