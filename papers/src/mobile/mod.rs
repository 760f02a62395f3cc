//! *MoBiLE*: its evaluation, simulated.
//!
//! [`paper`] holds what it printed. [`machine`] and [`models`] are its machine and its models, with a source
//! of every constant. [`systems`] is the table of compared systems; [`simulate`] runs one of them; [`report`]
//! collects the results. [`claims`] compares them with the paper's figures, [`page`] writes the page of the
//! documentation and [`plots`] its plots.

pub mod claims;
pub mod machine;
pub mod models;
pub mod page;
pub mod paper;
pub mod plots;
pub mod report;
pub mod simulate;
pub mod systems;
#[cfg(test)]
mod tests;

use moec_base::Result;
use report::{Report, Size};

/// The page and its plots: their paths in `docs/`, and their text.
///
/// # Errors
/// Fails for an invalid setup, which would be a bug of ours.
pub fn pages(size: Size) -> Result<Vec<(String, String)>> {
    let report = Report::new(size)?;
    let claims = claims::claims(&report)?;
    let page = ("mobile.md".to_owned(), page::page(&claims, &report));
    let plots =
        plots::plots(&claims, &report).into_iter().map(|(name, text)| (format!("mobile/{name}"), text));
    Ok(std::iter::once(page).chain(plots).collect())
}
