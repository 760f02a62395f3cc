//! Evaluates networks of hot neurons against the reference, alone and together with the CPU's neurons.

use super::hot::{Failed, cold, declared, neurons};
use super::library::check::Checker;
use super::read::{network, wrong};
use super::rows::cycled;
use super::verify::{executed, refuses, routed, rows as rows_of};
use super::weights::WeightStorage;
use super::{ROWS, path_of};
use crate::exec::{Executor, Saturated, Shared};
use moec_backend::distance;
use moec_backend::error::Result;
use moec_backend::{Distance, FunctionReport, HotArtifact, HotBatch, HotLayer, LayerExperts, Trial};
use moec_ir::eval::{Arg, Tensor, op};
use moec_ir::plan::GraphDecl;
use moec_ir::{Format, Glu, Op};
use std::ops::Range;
use std::rc::Rc;

/// Name of the joint result of hot and cold neurons, before a batch.
const TOGETHER: &str = "hot and cold, batch ";

/// Evaluates every network of hot neurons against the same neurons of the reference, and has the other
/// executors run it. Together with the CPU's neurons it is compared with whole experts.
///
/// # Errors
/// A network that is missing, malformed, or does not run.
pub(super) fn verify(
    trial: &mut Trial<'_, '_>,
    mut checker: Option<&mut Checker>,
) -> Result<Vec<FunctionReport>> {
    let mut reports = Vec::new();
    for layer in trial.hot {
        let name = path_of(&layer.name());
        (trial.next)(&name)?;
        let ((artifacts, together), rows) = Tried::new(trial, layer)
            .and_then(|tried| Ok((tried.reports(trial)?, tried.rows)))
            .map_err(|e| wrong(&name, &e))?;
        for (mut own, rows) in artifacts.into_iter().zip(rows) {
            let of = |function: &str| {
                let at = own_expert(function).unwrap_or(0);
                rows.get(at).cloned().unwrap_or_default()
            };
            if let Some(checker) = &mut checker {
                executed(trial, checker, &mut own, &of)?;
            }
            reports.extend(own);
        }
        reports.extend(together);
    }
    Ok(reports)
}

/// The expert of a network's name.
fn own_expert(function: &str) -> Option<usize> {
    function.strip_prefix("expert")?.split('_').next()?.parse().ok()
}

/// A layer that is being verified.
struct Tried<'a> {
    layer: &'a HotLayer,
    glu: Glu,
    /// `[E, 2 I, H]` and `[E, H, I]`
    weights: [Rc<Tensor>; 2],
    /// By batch, the CPU's neurons, if it has some.
    cold: Vec<Option<TriedCold>>,
    order: Vec<Vec<usize>>,
    artifacts: Vec<HotArtifact>,
    /// By artifact, rows of each expert, `[n, H]`.
    rows: Vec<Vec<Vec<f32>>>,
    hidden: usize,
    bound: f64,
}

/// Cold neurons of a batch.
struct TriedCold {
    op: Op,
    /// Weights of all experts, as [`Cold`](super::hot::Cold) has them.
    weights: Vec<Rc<Tensor>>,
    /// Largest relative error of their format.
    stored: f64,
}

impl<'a> Tried<'a> {
    fn new(trial: &mut Trial<'_, '_>, layer: &'a HotLayer) -> Result<Self, Failed> {
        let module = trial.module;
        let experts =
            LayerExperts::of(module, layer.layer).ok_or("the Graph has no experts in this layer")?;
        let down = module.weight(experts.down);
        let (count, hidden, inner) = (down.matrices(), down.rows(), down.cols());
        let order = neurons(trial.files, layer, count, inner)?;
        let artifacts = layer.artifacts(module);
        let rows = artifacts.iter().map(|artifact| {
            let rows = rows_of(&trial.files.below(&path_of(&artifact.name)), hidden)?;
            let each = rows.len() / count.max(1);
            if each == 0 || !rows.len().is_multiple_of(count * hidden) {
                return Err(format!("`{ROWS}` has too few rows of an expert").into());
            }
            Ok(rows.chunks_exact(each).map(<[f32]>::to_vec).collect())
        });
        let rows = rows.collect::<Result<_, Failed>>()?;
        let weights = [trial.evaluator.weight(experts.gate_up)?, trial.evaluator.weight(experts.down)?];
        // If the reference has the bundle's weights, the rounding of their format is added.
        let stored = |format: Format| if trial.rounded { format.distance() } else { 0.0 };
        let bound = WeightStorage::of(down.format).bound().hypot(stored(down.format));
        let bound = distance::joined(bound, experts.glu);
        let cold = layer.batches.iter().map(|b| {
            let Some(cold) = cold(module, layer.layer, b.batch) else { return Ok(None) };
            let weights: Result<Vec<_>, Failed> =
                cold.weights.iter().map(|&id| Ok(trial.evaluator.weight(id)?)).collect();
            let formats = cold.weights.iter().map(|&id| stored(module.weight(id).format));
            Ok(Some(TriedCold { op: cold.op, weights: weights?, stored: formats.fold(0.0, f64::max) }))
        });
        let cold = cold.collect::<Result<_, Failed>>()?;
        Ok(Self { layer, glu: experts.glu, weights, cold, order, artifacts, rows, hidden, bound })
    }

    /// Reports of the networks by artifact; and of hot and cold neurons together, the worst expert at every
    /// batch.
    fn reports(
        &self,
        trial: &Trial<'_, '_>,
    ) -> Result<(Vec<Vec<FunctionReport>>, Vec<FunctionReport>), Failed> {
        let (name, ends) = (self.layer.name(), self.layer.cluster_ends());
        let mut reports = vec![Vec::new(); self.artifacts.len()];
        let mut sums = vec![Distance::default(); self.layer.batches.len()];
        let mut shared = Shared::default();
        for e in 0..self.order.len() {
            for (at, &HotBatch { batch, .. }) in self.layer.batches.iter().enumerate() {
                let (clusters, rows) = (self.layer.clusters_of(batch), self.rows_of(0, e));
                let mut hot = vec![0.0; rows.len()];
                for (i, artifact) in self.artifacts.iter().enumerate() {
                    let own = artifact.clusters.start..artifact.clusters.end.min(clusters);
                    if own.is_empty() {
                        continue;
                    }
                    let declared = declared(&artifact.name, self.hidden, e, batch);
                    let shown = self.rows_of(i, e);
                    let (got, saturated) = self.evaluate(trial, &declared, shown, &mut shared)?;
                    let end = |i: usize| i.checked_sub(1).and_then(|i| ends.get(i)).map_or(0, |&end| end);
                    let error = distance(&got, &self.reference(e, end(own.start)..end(own.end), shown)?);
                    let of_first =
                        if i == 0 { got } else { self.evaluate(trial, &declared, rows, &mut shared)?.0 };
                    hot.iter_mut().zip(of_first).for_each(|(sum, y)| *sum += y);
                    reports[i].push(FunctionReport {
                        package: declared.package,
                        function: declared.function,
                        experts: 1,
                        error,
                        bound: self.bound,
                        findings: saturated.iter().map(ToString::to_string).collect(),
                        refused: refuses(&saturated),
                        checks: Vec::new(),
                    });
                }
                sums[at] = sums[at].max(distance(&self.sum(e, at, &hot)?, &self.whole(e, rows)?));
            }
        }
        let together = sums.into_iter().zip(&self.layer.batches).zip(&self.cold).map(|((error, b), cold)| {
            FunctionReport {
                package: path_of(&name),
                function: format!("{TOGETHER}{}", b.batch),
                experts: self.order.len(),
                error,
                bound: cold.as_ref().map_or(self.bound, |cold| self.bound.hypot(cold.stored)),
                findings: Vec::new(),
                refused: false,
                checks: Vec::new(),
            }
        });
        Ok((reports, together.collect()))
    }

    /// Rows that activate an expert's neurons of an artifact.
    fn rows_of(&self, artifact: usize, e: usize) -> &[f32] {
        self.rows.get(artifact).and_then(|rows| rows.get(e)).map(Vec::as_slice).unwrap_or_default()
    }

    /// Runs a network on rows of its expert.
    fn evaluate(
        &self,
        trial: &Trial<'_, '_>,
        declared: &GraphDecl,
        rows: &[f32],
        shared: &mut Shared,
    ) -> Result<(Vec<f32>, Vec<Saturated>), Failed> {
        let package = trial.files.below(&declared.package);
        let executor = Executor::sharing(network(trial.files, declared)?.into(), Some(&package), shared)?;
        let each = declared.inputs.first().map_or(0, |p| p.shape[0] as usize) * self.hidden;
        let (mut got, mut saturated) = (Vec::new(), Vec::new());
        for own in rows.chunks(each.max(1)) {
            let outcome = executor.run(&[&cycled(own, each)])?;
            let y = outcome.outputs.into_iter().next().ok_or("it has no result")?;
            got.extend(y.into_iter().take(own.len()));
            saturated.extend(outcome.saturated);
        }
        Ok((got, saturated))
    }

    /// Result of the networks on the first artifact's rows, and the CPU's contribution at the batch with that
    /// index.
    fn sum(&self, e: usize, at: usize, hot: &[f32]) -> Result<Vec<f32>, Failed> {
        let Some(cold) = self.cold.get(at).and_then(Option::as_ref) else { return Ok(hot.to_vec()) };
        let weights = cold.weights.iter().map(|w| {
            let (all, width) = (w.as_f32(), w.ty.cols());
            let own = all.chunks_exact(all.len() / self.order.len()).nth(e).unwrap_or_default();
            Tensor::f32([1, own.len() / width, width], own.to_vec())
        });
        let y = self.run(&cold.op, self.rows_of(0, e), &weights.collect::<Vec<_>>())?;
        Ok(hot.iter().zip(y).map(|(hot, cold)| hot + cold).collect())
    }

    /// Result of the whole expert, in f32.
    fn whole(&self, e: usize, x: &[f32]) -> Result<Vec<f32>, Failed> {
        let hidden = self.hidden;
        let own = self.weights.each_ref().map(|w| {
            let all = w.as_f32();
            all.chunks_exact(all.len() / self.order.len()).nth(e).unwrap_or_default().to_vec()
        });
        let [gate_up, down] = own;
        let weights = [
            Tensor::f32([1, gate_up.len() / hidden, hidden], gate_up),
            Tensor::f32([1, hidden, down.len() / hidden], down),
        ];
        self.run(&Op::ExpertFfn { glu: self.glu, bias: false, fixed: false }, x, &weights)
    }

    /// An operator on rows of one expert.
    fn run(&self, node: &Op, x: &[f32], weights: &[Tensor]) -> Result<Vec<f32>, Failed> {
        let count = x.len() / self.hidden;
        let inputs = [Tensor::f32([count, self.hidden], x.to_vec()), routed(&[0], &[count], 1)];
        let y = op(node, inputs.iter().chain(weights).map(Arg::Tensor).collect())?;
        Ok(y.first().ok_or("the evaluator returned nothing")?.as_f32().to_vec())
    }

    /// Result of some of an expert's neurons, by their place among the hottest, in f32.
    fn reference(&self, e: usize, own: Range<usize>, x: &[f32]) -> Result<Vec<f32>, Failed> {
        let (hidden, neurons) = (self.hidden, own.len());
        let order = self.order.get(e).and_then(|o| o.get(own)).ok_or("it has fewer hot neurons")?;
        let [gate_up, down] = self.weights.each_ref().map(|w| w.as_f32());
        let inner = down.len() / self.order.len() / hidden;
        let (gate_up, down) = (&gate_up[e * 2 * inner * hidden..], &down[e * hidden * inner..]);
        let row = |n: usize| gate_up[n * hidden..(n + 1) * hidden].iter().copied();
        let halves = [0, inner].into_iter().flat_map(|first| order.iter().map(move |n| first + n));
        let own_gate_up: Vec<f32> = halves.flat_map(row).collect();
        let own_down: Vec<f32> =
            (0..hidden).flat_map(|h| order.iter().map(move |n| down[h * inner + n])).collect();
        let weights =
            [Tensor::f32([1, 2 * neurons, hidden], own_gate_up), Tensor::f32([1, hidden, neurons], own_down)];
        self.run(&Op::ExpertFfn { glu: self.glu, bias: false, fixed: false }, x, &weights)
    }
}

/// Distance of results.
fn distance(got: &[f32], want: &[f32]) -> Distance {
    let flat = |x: &[f32]| Tensor::f32([x.len()], x.to_vec());
    Distance::of(&flat(got), &flat(want), got.len())
}
