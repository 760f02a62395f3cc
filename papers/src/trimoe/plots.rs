//! The plots of the page: file names and contents.

use super::claims::steps;
use super::experiments::{ABLATION, SYSTEMS};
use super::paper::BATCHES;
use super::report::Report;
use crate::chart::{COLOURS, Labels, Series, bars, curves};
use crate::claim::Claims;

/// Every plot: its file, and its text.
pub fn plots(claims: &Claims, report: &Report) -> Vec<(&'static str, String)> {
    vec![
        ("speedup.svg", speedup(report, true)),
        ("speedup-olmoe.svg", speedup(report, false)),
        ("ablation.svg", ablation(claims, report)),
        ("dimms.svg", sensitivity("MoE layer of Qwen3, batch 512", "DIMMs with NDP units", &report.dimms)),
        ("cpu.svg", sensitivity("MoE layer of Qwen3, batch 512", "the CPU's rate, times", &report.cpu)),
        ("drift.svg", drift(report)),
    ]
}

fn speedup(report: &Report, drawn: bool) -> String {
    let rows: Vec<_> =
        report.speeds.iter().filter(|s| s.drawn == drawn && BATCHES.contains(&s.batch)).collect();
    let short = |name: &str| name.split('-').next().unwrap_or(name).to_owned();
    let labels = Labels {
        title: format!("Decode speedup over Klotski, loads {}", if drawn { "drawn" } else { "of OLMoE" }),
        up: "speedup",
        across: "model and batch",
        groups: rows.iter().map(|r| format!("{}\n{}", short(r.model), r.batch)).collect(),
        range: None,
    };
    let series: Vec<Series> = SYSTEMS
        .iter()
        .enumerate()
        .map(|(s, system)| Series {
            name: system.name.to_owned(),
            colour: COLOURS[s % COLOURS.len()],
            values: rows.iter().map(|r| r.over_klotski()[s]).collect(),
        })
        .collect();
    bars(&labels, &series)
}

fn ablation(claims: &Claims, report: &Report) -> String {
    let labels = Labels {
        title: "What each component adds, mean of the models, batch 512".to_owned(),
        up: "times faster",
        across: "component; the last three on top of +Relayout",
        groups: ABLATION[1..].iter().map(|s| s.name.replace(", ", ",\n")).collect(),
        range: None,
    };
    let printed = ABLATION[1..]
        .iter()
        .map(|s| claims.find(&format!("adds/{}", s.name)).map_or(0.0, |c| c.paper.value()))
        .collect();
    let series = [
        Series { name: "the paper".to_owned(), colour: COLOURS[0], values: printed },
        Series { name: "simulated".to_owned(), colour: COLOURS[4], values: steps(report) },
    ];
    bars(&labels, &series)
}

fn sensitivity(title: &str, across: &'static str, curve: &[(f64, [f64; 2])]) -> String {
    let labels = Labels {
        title: title.to_owned(),
        up: "milliseconds",
        across,
        groups: curve.iter().map(|p| p.0.to_string()).collect(),
        range: None,
    };
    let of = |s: usize, name: &str| Series {
        name: name.to_owned(),
        colour: COLOURS[3 + s],
        values: curve.iter().map(|p| p.1[s]).collect(),
    };
    curves(&labels, &[of(0, SYSTEMS[3].name), of(1, SYSTEMS[4].name)])
}

fn drift(report: &Report) -> String {
    let labels = Labels {
        title: "Speedup over the best baseline, mean of the models, batch 512".to_owned(),
        up: "speedup",
        across: "drift of the loads",
        groups: report.drifts.iter().map(|d| d.drift.to_string()).collect(),
        range: Some((2.12, 2.83, "the paper's, by model".to_owned())),
    };
    let of = |s: usize, name: &str| Series {
        name: name.to_owned(),
        colour: COLOURS[3 + s],
        values: report.drifts.iter().map(|d| d.speedup[s]).collect(),
    };
    curves(&labels, &[of(0, SYSTEMS[3].name), of(1, SYSTEMS[4].name)])
}
