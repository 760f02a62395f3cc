//! The quantities that `claims/mobile.toml` names.

use super::models::{MODELS, VOCABULARY};
use super::paper::TABLE_3;
use super::report::{Report, Row};
use super::systems::{ADAPMOE, FULL, MOBILE, MOBILE_GATES, MOEC, PRE_GATED, at};
use crate::claim::{Claims, Quantities};
use moec_base::Result;

/// Every figure that the paper prints, and ours.
///
/// # Errors
/// Our bug: claims with an unknown quantity.
pub fn claims(report: &Report) -> Result<Claims> {
    let mut all = Quantities::default();
    let speedups = |row: &Row| [&MOBILE, &MOEC].map(|s| row.speedup(s));
    for (model, vocabulary) in MODELS.iter().zip(VOCABULARY) {
        let weights = |experts: usize| {
            let layer = experts as u64 * model.expert() + model.dense();
            (model.layers as u64 * layer + 2 * vocabulary * model.width) as f64 * 1e-9
        };
        all.put(format!("parameters/{}", model.name), weights(model.experts));
        all.put(format!("active/{}", model.name), weights(model.k));
        let brings = (model.layers * model.k) as f64 * report.machine.costs(model)?.bring_us;
        let row = report.little.iter().find(|r| r.model == model.name);
        let token = row.map_or(f64::NAN, |r| r.outcomes[at(&FULL)].token);
        all.put(format!("loading/{}", model.name), brings / token);
    }
    all.put("link", report.machine.link * 1e-3);
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
