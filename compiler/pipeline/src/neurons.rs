//! Runs the pass `cluster`: experts become neurons, and predictors find the active ones.

use super::{Change, Inputs, Neurons, Placed, graph};
use moec_base::error::Result;
use moec_config::Predict;
use moec_ir::Module;
use moec_passes::predict::{self, Layer};
use moec_passes::reads::{self, Predicted};
use moec_passes::trained::TrainedTensors;

pub(super) fn cluster(
    given: &Inputs<'_>,
    module: &mut Module,
    placed: &mut Placed,
    neurons: &mut Neurons,
) -> Result<()> {
    graph::cluster(given, module, placed, neurons)?;
    predict(given, module, neurons)
}

/// Trains predictors of neurons for calls of few rows, if the build requests that. With them, gates of neurons on
/// disk stay there, too.
fn predict(given: &Inputs<'_>, module: &mut Module, neurons: &mut Neurons) -> Result<()> {
    let requested = given.config.experts.predict;
    // Without a profile there are no rows to train on; `build` requires one.
    let Some(profile) = given.profile.filter(|_| requested != Predict::Off) else { return Ok(()) };
    let (lowered, checkpoint) = (given.lowered()?, given.checkpoint()?);
    let mut whole = module.clone();
    predict::gates_to_disk(&mut whole);
    let mut layers = predict::choose(
        &whole,
        &given.config.experts,
        profile,
        &lowered,
        checkpoint,
        moec_cpu::has_gate_bounds,
    )?;
    let on_disk = module.entries.iter().flat_map(|g| &g.nodes).any(|n| n.op.pages_neurons());
    let lacks = |layers: &[Layer]| layers.is_empty() || on_disk && !predict::covers(&whole, layers);
    if requested.is_requested() && lacks(&layers) {
        return Err(predict::nothing_to_predict(requested));
    }
    let increase = match requested {
        Predict::Auto if layers.iter().any(Layer::is_on) => allow_predictors(given, &whole, &mut layers)?,
        _ => None,
    };
    let predicted: Vec<Predicted> = layers.iter().filter_map(Layer::predicted).collect();
    let budget = given.config.memory.budget.filter(|_| on_disk && !lacks(&layers));
    if let Some(budget) = budget {
        let disk = given.target.disk();
        let decided = reads::gates(module, profile, (budget, disk), &predicted, requested.is_requested());
        if !decided.as_ref().map_or(requested.is_requested(), |(on_disk, _)| *on_disk) {
            let why = "gates in memory read less";
            layers.iter_mut().filter(|l| l.is_on()).for_each(|l| l.discard(why));
        }
        neurons.decisions.extend(decided.map(|(_, decision)| decision));
    }
    neurons.decisions.extend(layers.iter().map(|layer| match increase {
        Some(increase) => layer.decision().with(&[("perplexity_increase_share", increase)]),
        None => layer.decision(),
    }));
    if !on_disk || !lacks(&layers) {
        *module = whole;
        predict::apply(module, &layers, &mut neurons.trained, |rows| rows <= moec_ir::FEW_ROWS);
    }
    Ok(())
}

/// Discards the predictors if they lose more quality than is allowed. Returns the loss, if it was measured.
fn allow_predictors(given: &Inputs<'_>, module: &Module, layers: &mut [Layer]) -> Result<Option<f64>> {
    let limit = given.config.quality.max_perplexity_increase;
    let Some((limit, probe)) = limit.zip(given.quality) else {
        let why = "no loss is allowed: `max_perplexity_increase` under `[quality]` is not set";
        layers.iter_mut().filter(|l| l.is_on()).for_each(|l| l.discard(why));
        return Ok(None);
    };
    // Text is read in chunks; here these query the predictors, too.
    let (mut changed, mut trained) = (module.clone(), TrainedTensors::default());
    predict::apply(&mut changed, layers, &mut trained, |_| true);
    let model = given.model_info()?;
    let source = trained.over(given.checkpoint()?);
    let change = Change { exact: module, changed: &changed, model: &model, source: &source };
    let increase = probe.increase_by(&change)?;
    if increase > limit {
        let (more, most) = (100.0 * increase, 100.0 * limit);
        let why = format!("perplexity would rise by {more:.2} %, and {most:.2} % is allowed");
        layers.iter_mut().filter(|l| l.is_on()).for_each(|l| l.discard(&why));
    }
    Ok(Some(increase))
}
