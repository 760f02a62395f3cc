//! Evaluates every network of a bundle against the reference.
#![expect(clippy::cast_possible_truncation, reason = "sizes of one layer, which the import bounds")]

use super::library::check::Checker;
use super::read::{network, wrong};
use super::weights::WeightStorage;
use super::{ROWS, function, path, sizes};
use crate::exec::{Executor, Saturated, Shared};
use moec_backend::distance;
use moec_backend::error::Result;
use moec_backend::{Distance, FunctionReport, LayerExperts, Trial};
use moec_ir::Op;
use moec_ir::eval::{Arg, Tensor, op};
use moec_ir::op::DispatchLayout;
use moec_ir::plan::ExpertTable;
use moec_runtime::bundle::BundleReader;
use moec_runtime::platform::regular;
use std::collections::HashMap;

type Failed = Box<dyn std::error::Error>;

/// Inputs that networks were run on that take more than rows, by artifact and name: one after the other.
pub(super) type VerifyInputs = HashMap<(String, String), Vec<f32>>;

/// If a larger share of a tensor's numbers saturates, its network is refused.
const SATURATED: f64 = 1e-3;

/// Executor of artifacts other than moec, if there is one.
pub(super) fn checker(trial: &mut Trial<'_, '_>) -> Option<Checker> {
    let any = !trial.parts.is_empty() || !trial.groups.is_empty() || !trial.hot.is_empty();
    any.then(|| Checker::open(trial))
}

/// Evaluates networks of experts, and has the other executors run them, and those of `reports`, which were
/// evaluated. Networks that take more than rows get the inputs of `given`.
///
/// # Errors
/// A network that is missing, malformed, or does not run.
pub(super) fn verify(
    trial: &mut Trial<'_, '_>,
    mut reports: Vec<FunctionReport>,
    given: &VerifyInputs,
    mut checker: Option<&mut Checker>,
) -> Result<Vec<FunctionReport>> {
    // Artifacts of a split head alternate.
    reports.sort_by(|a, b| a.package.cmp(&b.package));
    if let Some(checker) = &mut checker {
        for reports in reports.chunk_by_mut(|a, b| a.package == b.package) {
            let package = reports.first().map(|r| r.package.clone()).unwrap_or_default();
            let all = shown(trial, reports)?;
            let rows = |name: &str| given.get(&(package.clone(), name.to_owned())).unwrap_or(&all).clone();
            executed(trial, checker, reports, &rows)?;
        }
    }
    for &(table, group) in trial.groups {
        let name = path(table, group);
        (trial.next)(&name)?;
        let mut shared = Shared::default();
        let first = reports.len();
        for capacity in sizes(table, group) {
            let found = evaluate(trial, table, group, capacity, &mut shared).map_err(|e| wrong(&name, &e))?;
            let (error, saturated, bound) = found;
            reports.push(FunctionReport {
                package: name.clone(),
                function: function(capacity),
                experts: table.groups[group].experts.len(),
                error,
                bound,
                findings: saturated.iter().map(ToString::to_string).collect(),
                refused: refuses(&saturated),
                checks: Vec::new(),
            });
        }
        if let Some(checker) = &mut checker {
            let all = shown(trial, &reports[first..])?;
            executed(trial, checker, &mut reports[first..], &|_| all.clone())?;
        }
    }
    Ok(reports)
}

/// The rows of one artifact, whose networks were evaluated: how wide they are was seen then.
fn shown(trial: &Trial<'_, '_>, reports: &[FunctionReport]) -> Result<Vec<f32>> {
    let Some(name) = reports.first().map(|r| &r.package) else { return Ok(Vec::new()) };
    rows(&trial.files.below(name), 1).map_err(|e| wrong(name, &e))
}

/// Has others execute the networks of one artifact, which were evaluated, each on its rows; adds to their
/// reports.
pub(super) fn executed(
    trial: &mut Trial<'_, '_>,
    checker: &mut Checker,
    reports: &mut [FunctionReport],
    rows: &dyn Fn(&str) -> Vec<f32>,
) -> Result<()> {
    let Some(name) = reports.first().map(|r| r.package.clone()) else { return Ok(()) };
    let lacks = checker.check(&trial.files.below(&name), rows, reports).map_err(|e| wrong(&name, &e))?;
    trial.unverified.extend(lacks.map(|what| format!("`{name}`: {what}")));
    Ok(())
}

/// Whether so much saturates that the network is refused.
pub(super) fn refuses(saturated: &[Saturated]) -> bool {
    saturated.iter().any(|s| s.count as f64 > SATURATED * s.of as f64)
}

type Evaluated = (Distance, Vec<Saturated>, f64);

/// Runs a network on rows that fill the places of its experts to different heights, and the reference on the
/// same.
fn evaluate(
    trial: &mut Trial<'_, '_>,
    table: &ExpertTable,
    group: usize,
    capacity: u32,
    shared: &mut Shared,
) -> Result<Evaluated, Failed> {
    let module = trial.module;
    let declared =
        super::Qnn::declared(module, table, group, capacity).ok_or("the placement has no such network")?;
    let package = trial.files.below(&declared.package);
    let network = network(trial.files, &declared)?;
    let experts = LayerExperts::of(module, table.layer).ok_or("the Graph has no experts in this layer")?;
    let members = &table.groups[group].experts;
    let (hidden, capacity) = (module.weight(experts.gate_up).cols(), capacity as usize);
    let sample = rows(&package, hidden)?;
    // Each expert has a row less than the one before it, so that padding is there, and nothing depends on it.
    let filled: Vec<usize> = (0..members.len()).map(|g| capacity - g % capacity).collect();
    let mut x = vec![0.0_f32; members.len() * capacity * hidden];
    let mut dense = Vec::new();
    let mut from = sample.chunks_exact(hidden).cycle();
    for (g, &n) in filled.iter().enumerate() {
        for row in x[g * capacity * hidden..(g * capacity + n) * hidden].chunks_exact_mut(hidden) {
            row.copy_from_slice(from.next().ok_or("there are no rows")?);
            dense.extend_from_slice(row);
        }
    }
    let outcome = Executor::sharing(network.into(), Some(&package), shared)?.run(&[&x])?;
    let y = outcome.outputs.first().ok_or("it has no result")?;
    let of = |(g, n): (usize, &usize)| y.get(g * capacity * hidden..(g * capacity + n) * hidden);
    let got: Vec<f32> = filled.iter().enumerate().filter_map(of).flatten().copied().collect();

    let total: usize = filled.iter().sum();
    let inputs = [Tensor::f32([total, hidden], dense), routed(members, &filled, table.experts.len())];
    let ids = [experts.gate_up, experts.down].into_iter().chain(experts.biases.into_iter().flatten());
    let weights = ids.map(|id| trial.evaluator.weight(id)).collect::<Result<Vec<_>, _>>()?;
    let args = inputs.iter().map(Arg::Tensor).chain(weights.iter().map(|w| Arg::Tensor(w))).collect();
    let node = Op::ExpertFfn { glu: experts.glu, bias: experts.biases.is_some(), fixed: false };
    let want = op(&node, args)?;
    let want = want.first().ok_or("the evaluator returned nothing")?;
    let error = Distance::of(&Tensor::f32([total, hidden], got), want, total * hidden);
    // If the reference has the bundle's weights, the rounding of their format is added.
    let format = module.weight(experts.down).format;
    let other = if trial.rounded { format.distance() } else { 0.0 };
    let bound = distance::joined(WeightStorage::of(format).bound().hypot(other), experts.glu);
    Ok((error, outcome.saturated, bound))
}

/// The dispatch table of rows grouped by expert: `filled` rows for each of `members`, of `experts` in all.
pub(super) fn routed(members: &[u32], filled: &[usize], experts: usize) -> Tensor {
    let total: usize = filled.iter().sum();
    let layout = DispatchLayout { rows: total, k: 1, experts };
    let mut words = vec![0; layout.words()];
    (words[0], words[1]) = (members.len() as i32, total as i32);
    let mut slot = 0;
    for (i, (&e, &n)) in members.iter().zip(filled).enumerate() {
        words[layout.expert() + i] = e as i32;
        words[layout.start() + i] = slot as i32;
        for _ in 0..n {
            words[layout.token() + slot] = slot as i32;
            words[layout.slot() + slot] = slot as i32;
            slot += 1;
        }
    }
    words[layout.start() + members.len()] = slot as i32;
    Tensor::i32([layout.words()], words)
}

/// The rows of an artifact that ranges were measured by.
pub(super) fn rows(package: &BundleReader, hidden: usize) -> Result<Vec<f32>, Failed> {
    let bytes = package.read(ROWS, regular::NETWORK)?;
    let numbers: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    let fits =
        hidden > 0 && !numbers.is_empty() && numbers.len().is_multiple_of(hidden) && bytes.len() % 4 == 0;
    if fits && numbers.iter().all(|x| x.is_finite()) {
        Ok(numbers)
    } else {
        Err(format!("`{ROWS}` has no rows").into())
    }
}
