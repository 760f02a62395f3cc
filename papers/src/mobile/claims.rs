//! Every speedup that the paper prints, beside ours.

use super::models::{MODELS, OLMOE, QWEN};
use super::paper;
use super::report::Report;
use super::systems::{MOBILE, MOEC};
use crate::claim::Claim;
use crate::printed::Printed;

const CACHE: &str = "both use the same memory there, and the paper does not say how much";

/// All of them.
pub fn claims(report: &Report) -> Vec<Claim> {
    let mut all = Vec::new();
    for ((row, printed), model) in report.little.iter().zip(paper::LITTLE).zip(MODELS) {
        let what = format!("{}, half of the experts", model.name);
        let claim = Claim::new("Table II", what, Printed::Is(printed), row.speedup(&MOBILE));
        all.push(Claim { used: model.name == OLMOE.name, moec: Some(row.speedup(&MOEC)), ..claim });
    }
    for (row, (_, _, ratio, printed)) in report.tasks.iter().zip(paper::TABLE_2) {
        let what = format!("{} on {}, {:.0} % fall back", row.model, row.task, ratio * 100.0);
        let claim = Claim::new("Table II", what, Printed::Is(printed), row.speedup(&MOBILE));
        all.push(Claim { moec: Some(row.speedup(&MOEC)), ..claim });
    }
    for (model, printed) in [(QWEN.name, 1.72), (OLMOE.name, 1.60)] {
        let ours = report.mean(model, &MOBILE);
        let claim = Claim::new("§IV-B", format!("{model}, average"), Printed::Is(printed), ours);
        all.push(Claim { moec: Some(report.mean(model, &MOEC)), ..claim });
    }
    for (row, (gamma, ratio, printed)) in report.thresholds.iter().zip(paper::TABLE_3).skip(1) {
        let what = format!("OLMoE, γ = {gamma}, {:.0} % fall back", ratio * 100.0);
        let claim = Claim::new("Table III", what, Printed::Is(printed), row.speedup(&MOBILE));
        all.push(Claim { moec: Some(row.speedup(&MOEC)), ..claim });
    }
    let [pre_gated, adapmoe, gates] = report.figure_5();
    let figures = [
        ("over Pre-gated MoE, average", paper::OVER_OTHERS[0], pre_gated, CACHE),
        ("over AdapMoE, average", paper::OVER_OTHERS[1], adapmoe, CACHE),
        ("with gates, over the baseline, average", paper::WITH_GATES, gates, ""),
    ];
    for (what, printed, ours, why) in figures {
        let claim = Claim::new("§IV-B, Figure 5", what, Printed::Is(printed), ours);
        all.push(Claim { why, ..claim });
    }
    all
}
