//! Reads the networks of a bundle back and evaluates every one against the reference.

use super::weights::Form;
use super::{ROWS, function, path, sizes};
use crate::exec::{Executor, Saturated, Shared};
use crate::net::Network;
use crate::onnx;
use moec_device::Unit;
use moec_family::error::{Error, Result};
use moec_family::{Distance, FunctionReport, LayerExperts, Trial};
use moec_ir::Op;
use moec_ir::eval::{Arg, Tensor, op};
use moec_ir::op::DispatchLayout;
use moec_ir::plan::{ExpertTable, GraphDecl, Plan, Port};
use moec_runtime::regular;
use std::path::Path;

type Failed = Box<dyn std::error::Error>;

/// A tensor of which a larger share of numbers saturates forbids its network.
const SATURATED: f64 = 1e-3;

/// The network of a graph, read from a bundle; with the ports that the plan says.
///
/// # Errors
/// Why not, for people.
pub(super) fn network(bundle: &Path, graph: &GraphDecl) -> Result<Network, String> {
    let plain = |name: &str| !name.is_empty() && !name.contains(['/', '\\']) && !name.starts_with('.');
    let inside = graph.package.strip_prefix("artifacts/").is_some_and(plain) && plain(&graph.function);
    if !inside {
        return Err(format!("`{}` and `{}` are no places below `artifacts/`", graph.package, graph.function));
    }
    let file = bundle.join(&graph.package).join(format!("{}.onnx", graph.function));
    let bytes = regular::read(&file, regular::NETWORK).map_err(|e| format!("`{}`: {e}", file.display()))?;
    let network = onnx::read(&bytes).map_err(|e| e.to_string())?;
    let fits = |ports: &[Port], ids: &[crate::net::TensorId]| {
        let rows = |p: &Port| p.shape[..2].iter().map(|&n| n as usize).collect::<Vec<_>>();
        let one = |(p, id): (&Port, &crate::net::TensorId)| {
            network.tensor(*id).shape == rows(p) && p.shape[2..] == [1, 1]
        };
        ports.len() == ids.len() && ports.iter().zip(ids).all(one)
    };
    if fits(&graph.inputs, &network.inputs) && fits(&graph.outputs, &network.outputs) {
        Ok(network)
    } else {
        Err(format!("`{}` has other inputs or results than the plan says", graph.function))
    }
}

pub(super) fn wrong(name: &str, e: &dyn std::fmt::Display) -> Error {
    Error::input(format!("`{name}` in the bundle: {e}"))
}

/// Reads every network that the plan calls and checks that the unit holds it; executes nothing. Gives their number.
///
/// # Errors
/// A network that is missing, malformed or too large.
pub(super) fn read(folder: &Path, plan: &Plan, unit: &Unit) -> Result<usize> {
    for graph in &plan.graphs {
        let network = network(folder, graph).map_err(|e| wrong(&graph.package, &e))?;
        if let Some(limit) = unit.graph_limit().filter(|limit| network.static_bytes() > *limit) {
            let bytes = network.static_bytes();
            return Err(wrong(
                &graph.package,
                &format!("{bytes} bytes of weights; `{}` holds {limit}", unit.name),
            ));
        }
    }
    Ok(plan.graphs.len())
}

/// Evaluates every network.
///
/// # Errors
/// A network that is missing, malformed, or does not run.
pub(super) fn verify(trial: &mut Trial<'_, '_>) -> Result<Vec<FunctionReport>> {
    let mut reports = super::parts::verify(trial)?;
    for &(table, group) in trial.groups {
        let name = path(table, group);
        (trial.next)(&name)?;
        let mut shared = Shared::default();
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
            });
        }
    }
    Ok(reports)
}

/// Whether so much saturates that the network is refused.
pub(super) fn refuses(saturated: &[Saturated]) -> bool {
    saturated.iter().any(|s| s.count as f64 > SATURATED * s.of as f64)
}

type Evaluated = (Distance, Vec<Saturated>, f64);

/// Runs a network on rows that fill the places of its experts to different heights, and the reference on the same.
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
    let package = trial.folder.join(&declared.package);
    let network = network(trial.folder, &declared)?;
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
    let y = outcome.outputs.first().ok_or("it gives nothing")?;
    let of = |(g, n): (usize, &usize)| y.get(g * capacity * hidden..(g * capacity + n) * hidden);
    let got: Vec<f32> = filled.iter().enumerate().filter_map(of).flatten().copied().collect();

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
    let weights = ids.map(|id| trial.evaluator.weight(id)).collect::<Result<Vec<_>, _>>()?;
    let args = inputs.iter().map(Arg::Tensor).chain(weights.iter().map(|w| Arg::Tensor(w))).collect();
    let node = Op::ExpertFfn { glu: experts.glu, bias: experts.biases.is_some(), fixed: false };
    let want = op(&node, args)?;
    let want = want.first().ok_or("the evaluator gave nothing")?;
    let error = Distance::of(&Tensor::f32([total, hidden], got), want, total * hidden);
    // Where the reference has the bundle's weights, what their format rounds comes on top.
    let format = module.weight(experts.down).format;
    let other = if trial.rounded { moec_family::stored(format) } else { 0.0 };
    let bound = Form::of(format).bound().hypot(other);
    Ok((error, outcome.saturated, bound))
}

/// The rows of an artifact that ranges were measured by.
pub(super) fn rows(package: &Path, hidden: usize) -> Result<Vec<f32>, Failed> {
    let bytes = regular::read(&package.join(ROWS), regular::NETWORK)?;
    let numbers: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    let fits =
        hidden > 0 && !numbers.is_empty() && numbers.len().is_multiple_of(hidden) && bytes.len() % 4 == 0;
    if fits && numbers.iter().all(|x| x.is_finite()) {
        Ok(numbers)
    } else {
        Err(format!("`{ROWS}` has no rows").into())
    }
}
