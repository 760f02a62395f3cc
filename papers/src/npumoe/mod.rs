//! *NPUMoE*: its evaluation, simulated.
//!
//! [`paper`] holds what it printed, [`fit`] finds the constants that no device file has from some of these
//! figures, [`reproduce`] puts the ratios and [`figures`] everything else beside what is simulated.
//! [`tables`] prints all of it, and [`page`] writes it as a page of the documentation. Nothing else knows the
//! paper's results.

pub mod figures;
pub mod fit;
pub mod page;
pub mod paper;
pub mod reproduce;
pub mod tables;
#[cfg(test)]
mod tests;

use moec_base::Result;
use reproduce::{Bench, Report};

/// The evaluation on one device, or on all: constants are found first.
///
/// # Errors
/// Constants that cannot be found.
pub fn report(device: Option<&str>) -> Result<Report> {
    let bench = Bench::new()?;
    bench.report(device, fit::fit(&bench)?)
}
