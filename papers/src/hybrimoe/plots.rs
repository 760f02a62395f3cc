//! The plots of the page: file names and contents.

use super::models::MODELS;
use super::report::{Report, Row};
use super::systems::{ABLATION, BASELINE, SYSTEMS};
use crate::chart::{COLOURS, Labels, Series, bars, curves};
use crate::claim::{Claim, Claims};

/// Every plot: its file, and its text.
pub fn plots(claims: &Claims, report: &Report) -> Vec<(&'static str, String)> {
    vec![
        ("prefill.svg", speedups(&report.prefill, "prefill, mean over lengths of prompts")),
        ("decode.svg", speedups(&report.decode, "decoding")),
        ("ablation.svg", ablation(claims)),
        ("hits.svg", hits(report)),
        ("gate-accuracy.svg", gate_accuracy(report)),
    ]
}

/// Speedups over KTransformers by model and share cached.
fn speedups(rows: &[Row], what: &str) -> String {
    let mut groups: Vec<(&str, f64)> = rows.iter().map(|r| (r.model, r.cached)).collect();
    groups.dedup();
    let systems = SYSTEMS.iter().enumerate().filter(|s| s.0 != BASELINE);
    let series = systems.enumerate().map(|(colour, (s, system))| {
        let of = |(model, cached): &(&str, f64)| {
            let own = rows.iter().filter(|r| r.model == *model && r.cached == *cached);
            let each: Vec<f64> = own.map(|r| r.outcomes[BASELINE].seconds / r.outcomes[s].seconds).collect();
            each.iter().sum::<f64>() / each.len().max(1) as f64
        };
        let (name, values) = (system.name.to_owned(), groups.iter().map(of).collect());
        Series { name, colour: COLOURS[colour % COLOURS.len()], values }
    });
    let labels = Labels {
        title: format!("Speedup over KTransformers in {what}"),
        up: "speedup",
        across: "model and share of the experts on the GPU",
        groups: groups.iter().map(|(m, c)| format!("{m}\n{:.0} %", c * 100.0)).collect(),
        range: None,
    };
    bars(&labels, &series.collect::<Vec<_>>())
}

fn ablation(claims: &Claims) -> String {
    let rows: Vec<(&str, &str, &Claim)> = ["prefill", "decoding"]
        .into_iter()
        .flat_map(|stage| ABLATION.iter().map(move |system| (stage, system.name)))
        .filter_map(|(stage, name)| Some((stage, name, claims.find(&format!("{stage}/{name}"))?)))
        .collect();
    let labels = Labels {
        title: "Table III: speedup over the baseline, Qwen2, a quarter cached".to_owned(),
        up: "speedup",
        across: "what is added",
        groups: rows
            .iter()
            .map(|(stage, name, _)| format!("{stage}\n{}", name.trim_start_matches("Baseline+")))
            .collect(),
        range: None,
    };
    let printed = rows.iter().map(|r| r.2.paper.value()).collect();
    let ours = rows.iter().map(|r| r.2.ours).collect();
    let series = [
        Series { name: "the paper".to_owned(), colour: COLOURS[0], values: printed },
        Series { name: "simulated".to_owned(), colour: COLOURS[4], values: ours },
    ];
    bars(&labels, &series)
}

fn hits(report: &Report) -> String {
    let labels = Labels {
        title: "Hits of a cache, as a share of all uses".to_owned(),
        up: "hits",
        across: "model and share of the experts cached",
        groups: report
            .hits
            .iter()
            .map(|h| format!("{}\n{:.0} %", MODELS[h.model].name, h.cached * 100.0))
            .collect(),
        range: None,
    };
    let names = ["LRU", "MRS", "MRS with bypass", "bound"];
    let series: Vec<Series> = names
        .iter()
        .enumerate()
        .map(|(i, name)| Series {
            name: (*name).to_owned(),
            colour: COLOURS[i % COLOURS.len()],
            values: report.hits.iter().map(|h| h.rates[i]).collect(),
        })
        .collect();
    bars(&labels, &series)
}

fn gate_accuracy(report: &Report) -> String {
    let labels = Labels {
        title: "Speedup over KTransformers in decoding, Qwen2, a quarter cached".to_owned(),
        up: "speedup",
        across: "how often gates are right, as a multiple of what is assumed",
        groups: report.gate_accuracy.iter().map(|f| f.0.to_string()).collect(),
        range: None,
    };
    let of = |i: usize, name: &str| Series {
        name: name.to_owned(),
        colour: COLOURS[2 + i],
        values: report.gate_accuracy.iter().map(|f| f.1[i]).collect(),
    };
    curves(&labels, &[of(0, "Baseline+Prefetching"), of(1, "All")])
}
