//! Reads the packages of a bundle back and executes every function in f16 against the reference evaluator.
#![expect(clippy::cast_possible_truncation, reason = "sizes of one layer, which the import bounds")]

mod experts;
mod subgraphs;

use super::path;
use crate::check::{self, Limits, Severity};
use crate::package::Package;
use crate::subgraphs::{self as found, CoreMlSubgraph};
use moec_backend::LayerExperts;
use moec_backend::error::{Error, Result};
use moec_backend::{FunctionReport, Trial};
use moec_device::DeviceUnit;
use moec_ir::plan::Plan;
use moec_ir::{Format, WeightId};
use moec_runtime::bundle::BundleReader;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

/// Largest relative error that passes: f16 on networks of this depth stays below a thousandth, and overflow
/// or a wrong weight is far above.
const BOUND: f64 = 5e-3;

type Failed = Box<dyn std::error::Error>;

/// Numbers that f16 holds, spread evenly over −1 … 1, the same in every run (a Weyl sequence).
struct WeylNumbers(u64);

impl Default for WeylNumbers {
    fn default() -> Self {
        Self(0x9e37_79b9_7f4a_7c15)
    }
}

impl WeylNumbers {
    fn number(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        half::f16::from_f32((self.0 >> 40) as f32 / (1 << 23) as f32 - 1.0).to_f32()
    }
}

/// The limits that packages for a unit are checked by.
fn limits(unit: &DeviceUnit) -> Limits {
    let emitted = found::limits(unit);
    Limits {
        graph_bytes: emitted.graph_bytes,
        counted: emitted.counted,
        last_axis_bytes: emitted.rules.last_axis_bytes,
        row_bytes: unit.graph.row_bytes(),
        ..Limits::default()
    }
}

/// Executes every function of every package.
///
/// # Errors
/// A package that is missing, malformed, or does not run.
pub(super) fn verify(trial: &mut Trial<'_, '_>) -> Result<Vec<FunctionReport>> {
    let Trial { files, plan, module, unit, groups, parts, rounded, next, .. } = *trial;
    let limits = &limits(unit);
    let format = |id: WeightId| {
        let name = &module.weight(id).name;
        plan.segments.iter().find(|s| s.name == *name).map(|s| s.format)
    };
    let bound = |matrices: &[WeightId]| {
        // If the unit takes codes, packages hold them, and they differ from the checkpoint.
        let coded = |id: &WeightId| found::code_bits(unit, module.weight(*id)).is_some();
        let formats = matrices.iter().filter(|id| coded(id) != rounded);
        let formats =
            formats.filter_map(|id| if rounded { format(*id) } else { Some(module.weight(*id).format) });
        // Rounding errors of several matrices add up as independent errors.
        BOUND.max(formats.map(|f: Format| f.distance().powi(2)).sum::<f64>().sqrt())
    };
    let mut reports = Vec::new();
    let mut report = |package: &str, opened: &Opened, function: &str, experts, error, bound| {
        reports.push(FunctionReport {
            package: package.to_owned(),
            function: function.to_owned(),
            experts,
            error,
            bound,
            findings: opened.findings.clone(),
            refused: opened.refused,
            checks: Vec::new(),
        });
    };
    for &(table, group) in groups {
        let name = path(table, group);
        next(&name)?;
        let opened = Opened::new(files, &name, limits)?;
        let down = LayerExperts::of(module, table.layer).map(|e| e.down);
        let bound = bound(down.as_slice());
        for function in opened.package.program.functions.keys() {
            let error = experts::execute(&opened.package, function, module, trial.evaluator, table, group);
            let error = error.map_err(|e| wrong(&name, &e))?;
            report(&name, &opened, function, table.groups[group].experts.len(), error, bound);
        }
    }
    for part in parts {
        next(&part.name)?;
        if rounded && part.matrices.iter().any(|id| format(*id).is_none()) {
            let what = format!("the weights of `{}` are stored only in its package", part.name);
            let what = format!("{what}: the bundle has nothing to compare it with");
            return Err(Error::input(what).hint("name the checkpoint with `--source`"));
        }
        let bound = bound(&part.matrices);
        let part = CoreMlSubgraph::find(module, &part.scope).map_err(|e| wrong(&part.name, &e))?;
        let graphs = part.graphs(module, unit).map_err(|e| wrong(&part.name, &e))?;
        let trial = subgraphs::Trial::new(module, &part, trial.evaluator, &found::limits(unit))
            .map_err(|e| wrong(&part.name, &e))?;
        let mut names: Vec<&str> = graphs.iter().map(|g| &*g.package).collect();
        names.sort_unstable();
        names.dedup();
        let packages = names.iter().map(|name| Ok((*name, Opened::new(files, name, limits)?)));
        let packages: Vec<(&str, Opened)> = packages.collect::<Result<_>>()?;
        for (function, error) in trial.run(&graphs, &packages).map_err(|e| wrong(&part.name, &e))? {
            for (name, opened) in &packages {
                report(name, opened, &function, 0, error, bound);
            }
        }
    }
    Ok(reports)
}

/// Reads every package that the plan calls and checks that the unit can run it; executes nothing. Gives the
/// number of functions.
///
/// # Errors
/// A package that is missing, malformed or refused, or without a function that the plan calls.
pub(super) fn read(bundle: &BundleReader, plan: &Plan, unit: &DeviceUnit) -> Result<usize> {
    let limits = Limits { graph_bytes: found::limits(unit).graph_bytes, ..Limits::default() };
    let mut packages: BTreeMap<&str, Opened> = BTreeMap::new();
    for graph in &plan.graphs {
        let opened = match packages.entry(&graph.package) {
            Entry::Occupied(there) => there.into_mut(),
            Entry::Vacant(free) => free.insert(Opened::new(bundle, &graph.package, &limits)?),
        };
        if opened.refused {
            return Err(wrong(&graph.package, &opened.findings.join("; ")));
        }
        if opened.package.function(Some(&graph.function)).is_none() {
            return Err(wrong(&graph.package, &format!("it has no function `{}`", graph.function)));
        }
    }
    Ok(plan.graphs.len())
}

fn wrong(name: &str, e: &dyn std::fmt::Display) -> Error {
    Error::input(format!("`{name}` in the bundle: {e}"))
}

/// A package that was read and checked.
struct Opened {
    package: Arc<Package>,
    findings: Vec<String>,
    refused: bool,
}

impl Opened {
    fn new(bundle: &BundleReader, name: &str, limits: &Limits) -> Result<Self> {
        let package = Arc::new(Package::open(&bundle.below(name)).map_err(|e| wrong(name, &e))?);
        let findings = check::check(&package, limits);
        let refused = findings.iter().any(|f| f.severity == Severity::Error);
        let findings = findings.iter().map(ToString::to_string).collect();
        Ok(Self { package, findings, refused })
    }
}
