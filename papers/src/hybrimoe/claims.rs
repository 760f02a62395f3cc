//! The quantities that `claims/hybrimoe.toml` names.

use super::models::MODELS;
use super::report::Report;
use super::systems::{ABLATION, BASELINE};
use crate::claim::{Claims, Quantities};
use moec_base::Result;

/// Every figure that the paper prints, and ours.
///
/// # Errors
/// Our bug: claims with an unknown quantity.
pub fn claims(report: &Report) -> Result<Claims> {
    let mut all = Quantities::default();
    let [hybrimoe, moec] = [BASELINE + 1, BASELINE + 2].map(|s| report.speedups(s));
    for (of, stage) in ["prefill", "decoding"].into_iter().enumerate() {
        all.both(stage, [hybrimoe[of], moec[of]]);
        all.put(format!("{stage}/seconds"), report.ablation[of][0]);
        for (system, speedup) in ABLATION.iter().zip(report.ablation(of)) {
            all.put(format!("{stage}/{}", system.name), speedup);
        }
        for (system, seconds) in ABLATION.iter().zip(report.ablation[of]) {
            all.put(format!("{stage}/seconds/{}", system.name), seconds);
        }
    }
    for h in &report.hits {
        let [lru, mrs, bypass, _] = h.rates;
        let of = |policy: &str| format!("hits/{policy}/{}/{}", MODELS[h.model].name, h.cached);
        all.put(of("LRU"), lru);
        all.both(of("MRS"), [mrs, bypass]);
        all.both(of("more"), [mrs - lru, bypass - lru]);
    }
    Claims::new(include_str!("../../claims/hybrimoe.toml"), &all)
}
