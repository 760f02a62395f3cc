//! Every figure that the paper prints, beside ours.

use super::models::MODELS;
use super::paper;
use super::report::Report;
use super::systems::{ABLATION, BASELINE};
use crate::claim::Claim;
use crate::printed::Printed;

const AHEAD: &str = "an expert that is there early saves the processor a millisecond, and the link is idle; the paper does not say how \
often its gates are right, see *What the speedups hang on*";
const FOLLOWS: &str = "prefetching gains more here than in the paper, see *What the speedups hang on*";
const SCORES: &str = "two slots and two experts of a token in a layer: LRU keeps the last token's choice, and drawn scores foretell little \
else; the paper's routing was not published";

/// All of them.
pub fn claims(report: &Report) -> Vec<Claim> {
    let mut all = Vec::new();
    let [hybrimoe, moec] = [BASELINE + 1, BASELINE + 2].map(|s| report.speedups(s));
    let means = [
        ("§VI-B, Figure 7", "prefill over KTransformers, mean", paper::PREFILL),
        ("§VI-B, Figure 8", "decoding over KTransformers, mean", paper::DECODE),
    ];
    for (i, (place, what, printed)) in means.into_iter().enumerate() {
        let claim = Claim::new(place, what, printed, hybrimoe[i]);
        all.push(Claim { moec: Some(moec[i]), why: FOLLOWS, ..claim });
    }
    for (of, stage) in ["prefill", "decoding"].into_iter().enumerate() {
        let what = format!("{stage}, Baseline");
        let seconds =
            Claim::new("Table III", what, Printed::Is(paper::BASELINE_S[of]), report.ablation[of][0]);
        all.push(Claim { unit: "s", used: true, ..seconds });
        let rows = ABLATION.iter().zip(paper::ABLATION[of]).zip(report.ablation(of)).enumerate();
        for (row, ((system, printed), ours)) in rows {
            let Some(printed) = printed else { continue };
            let what = format!("{stage}, {}", system.name);
            let claim = Claim::new("Table III", what, Printed::Is(printed), ours);
            let why = if system.name == "Baseline+Prefetching" { AHEAD } else { FOLLOWS };
            all.push(Claim { used: row == 1, why, ..claim });
        }
    }
    for (model, cached, rates) in paper::HITS {
        let found = report.hit_rates(model, cached);
        for (i, policy) in ["LRU", "MRS"].into_iter().enumerate() {
            let what = format!("hits of {policy}, {}, {:.0} % cached", MODELS[model].name, cached * 100.0);
            let claim = Claim::new("§VI-D, Figure 9", what, Printed::Is(rates[i]), found[i]);
            let moec = (policy == "MRS").then_some(found[2]);
            let used = policy == "LRU" && cached == paper::CACHED[0];
            all.push(Claim { unit: "of 1", moec, used, why: SCORES, ..claim });
        }
    }
    all
}
