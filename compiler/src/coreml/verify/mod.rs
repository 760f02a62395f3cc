//! Reads the packages of a bundle back and executes every function in f16 against the reference evaluator.

mod experts;
mod parts;

use super::parts::{self as found, Part};
use super::{Experts, groups, path};
use crate::bundle::read::Bundle;
use crate::error::{Error, Result};
use crate::progress::Progress;
use crate::verify::{Distance, stored};
use moec_coreml::check::{self, Limits, Severity};
use moec_coreml::package::Package;
use moec_device::UnitKind;
use moec_ir::eval::Evaluator;
use moec_ir::plan::ExpertTable;
use moec_ir::{Format, Module, WeightId};
use serde::Serialize;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

/// Largest relative error that passes: f16 on networks of this depth stays below a thousandth, and overflow or a wrong
/// weight is far above.
pub const BOUND: f64 = 5e-3;

/// A function of a package.
#[derive(Clone, Debug, Serialize)]
pub struct FunctionReport {
    /// `artifacts/layers.0.group.1.mlpackage`
    pub package: String,
    /// `cap32`
    pub function: String,
    /// Experts; 0 where it is none of experts.
    pub experts: usize,
    /// Against the evaluator on the same rows.
    pub error: Distance,
    /// Largest error allowed.
    pub bound: f64,
    /// What the Neural Engine would not run as it stands, and what is odd.
    pub findings: Vec<String>,
    /// Whether one of them forbids it.
    pub refused: bool,
}

type Failed = Box<dyn std::error::Error>;

/// Numbers that f16 holds, spread evenly over −1 … 1, the same in every run (a Weyl sequence).
struct Rows(u64);

impl Default for Rows {
    fn default() -> Self {
        Self(0x9e37_79b9_7f4a_7c15)
    }
}

impl Rows {
    fn number(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        half::f16::from_f32((self.0 >> 40) as f32 / (1 << 23) as f32 - 1.0).to_f32()
    }
}

/// What is verified.
enum Item<'a> {
    Group(&'a ExpertTable, usize),
    Part(&'a Part),
}

/// Executes every function of every package. Where `rounded`, the evaluator has the bundle's own weights: then what their
/// format rounds is allowed for, since packages hold the checkpoint's.
///
/// # Errors
/// A package that is missing, malformed, or does not run.
pub fn verify(
    bundle: &Bundle,
    module: &Module,
    evaluator: &mut Evaluator<'_>,
    rounded: bool,
    progress: &Progress,
) -> Result<Vec<FunctionReport>> {
    let placement = &bundle.plan.placement;
    let device = bundle.device()?;
    let npu = device.unit_of(UnitKind::Npu).and_then(|npu| device.units.get(npu));
    let Some(npu) = npu.filter(|_| !placement.is_dynamic()) else { return Ok(Vec::new()) };
    let emitted = found::limits(npu);
    let limits = Limits {
        graph_bytes: emitted.graph_bytes,
        counted: emitted.counted,
        last_axis_bytes: emitted.rules.last_axis_bytes,
        ..Limits::default()
    };
    let parts = found::placed(module, placement, npu);
    let of_experts = groups(placement, &npu.name).map(|(table, group)| Item::Group(table, group));
    let items: Vec<Item<'_>> = of_experts.chain(parts.iter().map(Item::Part)).collect();
    let format = |id: WeightId| {
        let name = &module.weight(id).name;
        bundle.plan.segments.iter().find(|s| s.name == *name).map(|s| s.format)
    };
    let bound = |matrices: &[WeightId]| {
        // Packages hold codes where the unit takes them, and then the checkpoint is what differs.
        let coded = |id: &WeightId| found::code_bits(npu, module.weight(*id)).is_some();
        let formats = matrices.iter().filter(|id| coded(id) != rounded);
        let formats =
            formats.filter_map(|id| if rounded { format(*id) } else { Some(module.weight(*id).format) });
        // What several matrices round adds up as independent errors do.
        BOUND.max(formats.map(|f: Format| stored(f).powi(2)).sum::<f64>().sqrt())
    };
    let bar = progress.items("Executing", items.len() as u64, "graphs");
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
        });
    };
    for item in items {
        match item {
            Item::Group(table, group) => {
                let name = path(table, group);
                bar.label(&name);
                let opened = Opened::new(bundle, &name, &limits)?;
                let down = Experts::of(module, table.layer).map(|e| e.down);
                let bound = bound(down.as_slice());
                for function in opened.package.program.functions.keys() {
                    let error = experts::execute(&opened.package, function, module, evaluator, table, group);
                    let error = error.map_err(|e| wrong(&name, &e))?;
                    let experts = table.groups[group].experts.len();
                    report(&name, &opened, function, experts, error, bound);
                }
            }
            Item::Part(part) => {
                bar.label(&part.name);
                if rounded && part.matrices().iter().any(|id| format(*id).is_none()) {
                    let what = format!("the weights of `{}` lie in its package alone", part.name);
                    return Err(Error::input(format!(
                        "{what}: there is nothing in the bundle to hold it against"
                    ))
                    .hint("name the checkpoint with `--source`"));
                }
                let graphs = part.graphs(module, npu).map_err(|e| wrong(&part.name, &e))?;
                let trial = parts::Trial::new(module, part, evaluator, &emitted)
                    .map_err(|e| wrong(&part.name, &e))?;
                let mut names: Vec<&str> = graphs.iter().map(|g| &*g.package).collect();
                names.sort_unstable();
                names.dedup();
                let packages = names.iter().map(|name| Ok((*name, Opened::new(bundle, name, &limits)?)));
                let packages: Vec<(&str, Opened)> = packages.collect::<Result<_>>()?;
                let bound = bound(&part.matrices());
                for (function, error) in trial.run(&graphs, &packages).map_err(|e| wrong(&part.name, &e))? {
                    for (name, opened) in &packages {
                        report(name, opened, &function, 0, error, bound);
                    }
                }
            }
        }
        bar.add(1);
    }
    bar.finish();
    Ok(reports)
}

/// Reads every package that the plan calls and checks that the unit can run it; executes nothing. Gives the number of
/// functions.
///
/// # Errors
/// A package that is missing, malformed or refused, or without a function that the plan calls.
pub fn read(bundle: &Bundle) -> Result<usize> {
    let device = bundle.device()?;
    let npu = device.unit_of(UnitKind::Npu).and_then(|i| device.units.get(i));
    let graph_bytes = npu.map_or(Limits::default().graph_bytes, |npu| found::limits(npu).graph_bytes);
    let limits = Limits { graph_bytes, ..Limits::default() };
    let mut packages: BTreeMap<&str, Opened> = BTreeMap::new();
    for graph in &bundle.plan.graphs {
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
    Ok(bundle.plan.graphs.len())
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
    fn new(bundle: &Bundle, name: &str, limits: &Limits) -> Result<Self> {
        let package = Arc::new(Package::open(&bundle.folder.join(name)).map_err(|e| wrong(name, &e))?);
        let findings = check::check(&package, limits);
        let refused = findings.iter().any(|f| f.severity == Severity::Error);
        let findings = findings.iter().map(ToString::to_string).collect();
        Ok(Self { package, findings, refused })
    }
}
