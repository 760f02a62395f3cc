//! *NPUMoE*: its evaluation, simulated.
//!
//! [`paper`] holds what it printed, [`fit`] fits the constants that no device file has to some of these
//! figures. [`reproduce`] compares the ratios and [`figures`] everything else with the simulation. [`overlap`]
//! compares the busy experts of recorded data sets, and [`drops`] has the quality that dropped tokens cost.
//! [`tables`] prints all of it, and [`page`] writes the page of the documentation. No other module contains the
//! paper's results.

pub mod drops;
pub mod figures;
pub mod fit;
pub mod overlap;
pub mod page;
pub mod paper;
pub mod reproduce;
pub mod tables;
#[cfg(test)]
mod tests;

use moec_base::Result;
use reproduce::{Bench, Report};

/// The evaluation on one device, or on all; first the constants are fitted.
///
/// # Errors
/// Fails if constants cannot be fitted.
pub fn report(device: Option<&str>) -> Result<Report> {
    let bench = Bench::new()?;
    bench.report(device, fit::fit(&bench)?)
}
