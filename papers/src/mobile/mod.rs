//! *MoBiLE*: its evaluation, simulated.
//!
//! [`paper`] holds what it printed. [`machine`] and [`models`] are its machine and its models, with a source
//! of every constant; [`systems`] is the table of the systems that are compared, [`simulate`] runs one of
//! them, [`report`] has everything once. [`claims`] puts it beside the paper's figures, [`page`] writes it as
//! a page of the documentation and [`plots`] draws it.

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

/// The page and its plots: where in `docs/` they are, and their text.
///
/// # Errors
/// Our bug: a setup that cannot be.
pub fn pages(size: Size) -> Result<Vec<(String, String)>> {
    let report = Report::new(size)?;
    let claims = claims::claims(&report)?;
    let page = ("mobile.md".to_owned(), page::page(&claims, &report));
    let plots =
        plots::plots(&claims, &report).into_iter().map(|(name, text)| (format!("mobile/{name}"), text));
    Ok(std::iter::once(page).chain(plots).collect())
}
