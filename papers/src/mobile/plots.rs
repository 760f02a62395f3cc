//! The plots of the page: file names and contents.

use super::report::Report;
use super::systems::{ADAPMOE, MOBILE, MOBILE_GATES, MOEC, MOEC_FULL, System};
use crate::chart::{COLOURS, Labels, Series, bars, curves};
use crate::claim::Claims;

/// Every plot: its file, and its text.
pub fn plots(claims: &Claims, report: &Report) -> Vec<(&'static str, String)> {
    vec![("tasks.svg", tasks(claims, report)), ("fallback.svg", fallback(report))]
}

fn tasks(claims: &Claims, report: &Report) -> String {
    let labels = Labels {
        title: "Table II: speedup over offloading".to_owned(),
        up: "speedup",
        across: "model, task and share of tokens that fall back",
        groups: report
            .tasks
            .iter()
            .map(|r| format!("{}\n{}, {:.0} %", r.model, r.task, r.fallback * 100.0))
            .collect(),
        range: None,
    };
    let printed = report.tasks.iter().map(|r| claims.printed(&format!("{}/{}", r.model, r.task))).collect();
    let of = |name: &str, colour: usize, system: &System| Series {
        name: name.to_owned(),
        colour: COLOURS[colour],
        values: report.tasks.iter().map(|r| r.speedup(system)).collect(),
    };
    let series = [
        Series { name: "the paper".to_owned(), colour: COLOURS[0], values: printed },
        of("MoBiLE, simulated", 4, &MOBILE),
        of("moec, all experts", 1, &MOEC_FULL),
        of("moec, big-little", 2, &MOEC),
    ];
    bars(&labels, &series)
}

fn fallback(report: &Report) -> String {
    let labels = Labels {
        title: "Speedup over offloading, OLMoE".to_owned(),
        up: "speedup",
        across: "share of tokens that fall back",
        groups: report.curve.iter().map(|r| format!("{:.0} %", r.fallback * 100.0)).collect(),
        range: None,
    };
    let series: Vec<Series> = [ADAPMOE, MOBILE, MOBILE_GATES, MOEC_FULL, MOEC]
        .iter()
        .zip([0, 4, 3, 1, 2])
        .map(|(system, colour)| Series {
            name: system.name.to_owned(),
            colour: COLOURS[colour],
            values: report.curve.iter().map(|r| r.speedup(system)).collect(),
        })
        .collect();
    curves(&labels, &series)
}
