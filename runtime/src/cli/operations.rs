//! Units that execute the operations of static graphs, for `info`.

use super::Context;
use crate::bundle::BundleReader;
use crate::exec::accelerators::Executor;
use crate::exec::operations::{OperationReport, OperationSummary, OperationUnit, UnitShare};
use crate::weights::store::CheckLevel;
use serde_json::{Map, Value, json};

/// Most warnings that `info` writes without `--json`.
const WARNINGS: usize = 8;

/// Report of the executor of the program's static graphs. `None`: there are no such graphs, or this machine
/// has no executor for them.
pub(super) fn report(context: &Context<'_>) -> Option<OperationReport> {
    let program = context.program;
    if program.graphs.is_empty() {
        return None;
    }
    if context.emulation.is_some() {
        return Some(OperationReport::Unknown("static graphs are emulated".to_owned()));
    }
    let of_plan = || BundleReader::of_plan(context.bundle, program, CheckLevel::Small);
    let executors = program.accelerators().filter_map(|(_, unit)| context.native_executor(unit));
    let mut reports = executors.filter_map(|executor| match executor {
        Ok(Executor::Graphs(graphs)) => {
            let files = context.files.cloned().unwrap_or_else(of_plan);
            let report = graphs.operations(&files, &program.graphs);
            Some(report.unwrap_or_else(|e| OperationReport::Unknown(e.to_string())))
        }
        Ok(Executor::Unit(_)) => None,
        Err(e) => Some(OperationReport::Unknown(e.to_string())),
    });
    reports.next()
}

/// The report as JSON: units with their shares, operations by function, and warnings.
pub(super) fn value(report: &OperationReport) -> Value {
    let graphs = match report {
        OperationReport::Unknown(why) => return json!({ "known": false, "why": why }),
        OperationReport::Known(graphs) => graphs,
    };
    let summary = OperationSummary::of(graphs);
    let units: Map<String, Value> = summary
        .units
        .iter()
        .map(|share| {
            let name = share.unit.map_or("not_reported", OperationUnit::name);
            (name.to_owned(), json!({ "operations": share.operations, "cost": share.cost }))
        })
        .collect();
    let functions: Vec<Value> = graphs
        .iter()
        .map(|graph| {
            let counts = graph.counts();
            let operations = counts.iter().map(|count| {
                json!({
                    "operator": count.operator,
                    "unit": count.unit.map(OperationUnit::name),
                    "count": count.count,
                    "cost": count.cost,
                })
            });
            json!({
                "package": graph.package,
                "function": graph.function,
                "operations": operations.collect::<Vec<_>>(),
            })
        })
        .collect();
    let warnings: Vec<String> = summary.off_npu.iter().map(ToString::to_string).collect();
    json!({ "known": true, "units": units, "functions": functions, "warnings": warnings })
}

/// The units in one line, and warnings.
pub(super) fn text(report: &OperationReport) -> (String, Vec<String>) {
    let graphs = match report {
        OperationReport::Unknown(why) => return (format!("units not known: {why}"), Vec::new()),
        OperationReport::Known(graphs) => graphs,
    };
    let summary = OperationSummary::of(graphs);
    let shares: Vec<String> = summary.units.iter().map(share).collect();
    let line = if shares.is_empty() { "none".to_owned() } else { shares.join(", ") };
    let mut warnings: Vec<String> =
        summary.off_npu.iter().take(WARNINGS).map(|off| format!("warning: {off}")).collect();
    if let Some(more) = summary.off_npu.len().checked_sub(WARNINGS).filter(|&more| more > 0) {
        warnings
            .push(format!("warning: {more} more functions do not run on the NPU alone: see `info --json`"));
    }
    (line, warnings)
}

/// The share of a unit, for people.
fn share(share: &UnitShare) -> String {
    let unit = share.unit.map_or("unit not reported".to_owned(), |unit| unit.to_string());
    let cost = share.cost.map_or(String::new(), |c| format!(" ({:.1} % of the estimated cost)", c * 100.0));
    format!("{} on {unit}{cost}", share.operations)
}
