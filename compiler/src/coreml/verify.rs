//! Reads the packages of a bundle back and executes every function in f16 against the reference evaluator.

use super::{Experts, groups, path};
use crate::bundle::read::Bundle;
use crate::error::{Error, Result};
use crate::progress::Progress;
use crate::verify::{Distance, stored};
use moec_coreml::check::{self, Limits, Severity};
use moec_coreml::exec::{Executor, States, Tensor as Half};
use moec_coreml::package::Package;
use moec_device::{Device, UnitKind};
use moec_ir::eval::{Arg, Evaluator, Tensor, op};
use moec_ir::op::DispatchLayout;
use moec_ir::plan::ExpertTable;
use moec_ir::{Module, Op};
use serde::Serialize;
use std::collections::BTreeMap;
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
    /// Experts.
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
    let device = Device::find(&bundle.manifest.target).ok();
    let npu = device.as_ref().and_then(|d| Some(&d.units[d.unit_of(UnitKind::Npu)?]));
    let Some(npu) = npu.filter(|_| !placement.is_dynamic()) else { return Ok(Vec::new()) };
    let limits = Limits { graph_bytes: npu.graph_limit().unwrap_or(u64::MAX), ..Limits::default() };
    let wanted: Vec<_> = groups(placement, &npu.name).collect();
    let bar = progress.items("Executing", wanted.len() as u64);
    let mut reports = Vec::new();
    for (table, group) in wanted {
        let name = path(table, group);
        bar.label(&name);
        let wrong = |e: &dyn std::fmt::Display| Error::input(format!("`{name}` in the bundle: {e}"));
        let package = Arc::new(Package::open(&bundle.folder.join(&name)).map_err(|e| wrong(&e))?);
        let findings = check::check(&package, &limits);
        let refused = findings.iter().any(|f| f.severity == Severity::Error);
        let format = |name: &str| bundle.plan.segments.iter().find(|s| s.name == name).map(|s| s.format);
        let format = Experts::of(module, table.layer).and_then(|e| format(&module.weight(e.down).name));
        let allowed = format.filter(|_| rounded).map_or(0.0, stored);
        let bound = BOUND.max(allowed);
        let findings: Vec<String> = findings.iter().map(ToString::to_string).collect();
        for function in package.program.functions.keys() {
            let error =
                execute(&package, function, module, evaluator, table, group).map_err(|e| wrong(&e))?;
            let experts = table.groups[group].experts.len();
            let (package, function) = (name.clone(), function.clone());
            let findings = findings.clone();
            reports.push(FunctionReport { package, function, experts, error, bound, findings, refused });
        }
        bar.add(1);
    }
    bar.finish();
    Ok(reports)
}

/// Runs a function on rows that fill its slices to different heights, and the evaluator on the same.
fn execute(
    package: &Arc<Package>,
    function: &str,
    module: &Module,
    evaluator: &mut Evaluator<'_>,
    table: &ExpertTable,
    group: usize,
) -> std::result::Result<Distance, Box<dyn std::error::Error>> {
    let members = &table.groups[group].experts;
    let capacity = table.tiers[table.groups[group].tier as usize] as usize;
    let experts = Experts::of(module, table.layer).ok_or("the Graph has no experts in this layer")?;
    let hidden = module.weight(experts.gate_up).cols();
    // Slice g holds a row less than the one before it, so that padding is there, and nothing depends on it.
    let filled: Vec<usize> = (0..members.len()).map(|g| capacity - g % capacity).collect();
    let mut rows = vec![0.0_f32; members.len() * capacity * hidden];
    let mut dense = Vec::new();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for (g, &n) in filled.iter().enumerate() {
        for x in &mut rows[g * capacity * hidden..(g * capacity + n) * hidden] {
            // Weyl sequence: spread evenly over −1 … 1, and the same in every run.
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            *x = half::f16::from_f32((state >> 40) as f32 / (1 << 23) as f32 - 1.0).to_f32();
            dense.push(*x);
        }
    }
    let shape = [members.len() * capacity, hidden, 1, 1];
    let x = Half::f16(&shape, &rows).ok_or("rows of another size")?;
    let executor = Executor::new(package, Some(function))?;
    let out = executor.run(&BTreeMap::from([("x".to_owned(), x)]), &mut States::default())?;
    let y = out.get("y").ok_or("the function gives no `y`")?.to_f32();
    let got: Vec<f32> = filled
        .iter()
        .enumerate()
        .flat_map(|(g, &n)| y.get(g * capacity * hidden..(g * capacity + n) * hidden).unwrap_or_default())
        .copied()
        .collect();

    // The same rows, each of one expert.
    let total: usize = filled.iter().sum();
    let layout = DispatchLayout { rows: total, k: 1, experts: table.experts.len() };
    let mut words = vec![0; layout.words()];
    (words[0], words[1]) = (members.len() as i32, total as i32);
    let mut slot = 0;
    for (i, (&e, &n)) in members.iter().zip(&filled).enumerate() {
        words[layout.expert() + i] = e as i32;
        words[layout.start() + i] = slot as i32;
        for _ in 0..n {
            words[layout.token() + slot] = slot as i32;
            words[layout.slot() + slot] = slot as i32;
            slot += 1;
        }
    }
    words[layout.start() + members.len()] = slot as i32;
    let inputs = [Tensor::f32([total, hidden], dense), Tensor::i32([layout.words()], words)];
    let ids = [experts.gate_up, experts.down].into_iter().chain(experts.biases.into_iter().flatten());
    let weights = ids.map(|id| evaluator.weight(id)).collect::<std::result::Result<Vec<_>, _>>()?;
    let args = inputs.iter().map(Arg::Tensor).chain(weights.iter().map(|w| Arg::Tensor(w))).collect();
    let node = Op::ExpertFfn { glu: experts.glu, bias: experts.biases.is_some(), fixed: false };
    let want = op(&node, args)?;
    let want = want.first().ok_or("the evaluator gave nothing")?;
    Ok(Distance::of(&Tensor::f32([total, hidden], got), want, total * hidden))
}
