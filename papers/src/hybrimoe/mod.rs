//! *HybriMoE*: its evaluation, simulated.
//!
//! [`paper`] holds what it printed. [`machine`], [`models`] and [`routing`] are its machine, its models and
//! what their tokens choose, with a source of every constant; [`systems`] is the table of the systems that
//! are compared, [`simulate`] runs one of them, [`report`] has everything once. [`claims`] puts it beside the
//! paper's figures, [`page`] writes it as a page of the documentation and [`plots`] draws it.

pub mod claims;
pub mod machine;
pub mod models;
pub mod page;
pub mod paper;
pub mod plots;
pub mod report;
pub mod routing;
pub mod simulate;
pub mod systems;
#[cfg(test)]
mod tests;

use moec_base::Result;
use report::{Bench, Report, Size};

/// The page and its plots: where in `docs/` they are, and their text.
///
/// # Errors
/// Our bug: a setup that cannot be.
pub fn pages(size: Size) -> Result<Vec<(String, String)>> {
    let report = Report::new(&Bench::new(size)?)?;
    let claims = claims::claims(&report)?;
    let page = ("hybrimoe.md".to_owned(), page::page(&claims, &report));
    let plots =
        plots::plots(&claims, &report).into_iter().map(|(name, text)| (format!("hybrimoe/{name}"), text));
    Ok(std::iter::once(page).chain(plots).collect())
}
