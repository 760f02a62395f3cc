//! The quantities that `claims/mobile.toml` names.

use super::paper::TABLE_3;
use super::report::{Report, Row};
use super::systems::{ADAPMOE, FULL, MOBILE, MOBILE_GATES, MOEC, PRE_GATED};
use crate::claim::{Claims, Quantities};
use moec_base::Result;

/// Every speedup that the paper prints, and ours.
///
/// # Errors
/// Our bug: claims with an unknown quantity.
pub fn claims(report: &Report) -> Result<Claims> {
    let mut all = Quantities::default();
    let speedups = |row: &Row| [&MOBILE, &MOEC].map(|s| row.speedup(s));
    for row in &report.little {
        all.both(format!("half/{}", row.model), speedups(row));
    }
    for row in &report.tasks {
        all.both(format!("{}/{}", row.model, row.task), speedups(row));
        all.both(format!("mean/{}", row.model), [&MOBILE, &MOEC].map(|s| report.mean(row.model, s)));
    }
    for (row, (threshold, _)) in report.thresholds.iter().zip(TABLE_3) {
        all.both(format!("γ/{threshold}"), speedups(row));
    }
    all.put("over/Pre-gated MoE", report.over(&MOBILE, &PRE_GATED));
    all.put("over/AdapMoE", report.over(&MOBILE, &ADAPMOE));
    all.put("gates", report.over(&MOBILE_GATES, &FULL));
    Claims::new(include_str!("../../claims/mobile.toml"), &all)
}
