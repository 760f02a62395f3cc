//! Runs the pass `cluster`: experts become neurons, and predictors say which of them are awake.

use super::{Change, Compilation, graph};
use moec_base::error::Result;
use moec_config::Predict;
use moec_passes::predict::{self, Layer};
use moec_passes::trained::Trained;

pub(super) fn cluster(c: &mut Compilation<'_>) -> Result<()> {
    graph::cluster(c)?;
    predict(c)
}

/// Trains predictors of neurons and has few rows ask them, where the build asks for that.
fn predict(c: &mut Compilation<'_>) -> Result<()> {
    let wanted = c.config.experts.predict;
    // Without a profile there is nothing to train on; `build` asks for one.
    let Some(profile) = c.profile.filter(|_| wanted != Predict::Off) else { return Ok(()) };
    let (lowered, checkpoint) = (c.lowered()?, c.checkpoint()?);
    let mut layers = predict::choose(
        &c.module,
        &c.config.experts,
        profile,
        &lowered,
        checkpoint,
        moec_cpu::neurons_sketched,
    )?;
    if layers.is_empty() && wanted.is_asked_for() {
        return Err(predict::nothing_to_predict(wanted));
    }
    if wanted == Predict::Auto && layers.iter().any(Layer::is_on) {
        allow_predictors(c, &mut layers)?;
    }
    c.predictors = layers.iter().map(Layer::decision).collect();
    predict::apply(&mut c.module, &layers, &mut c.trained, |rows| rows <= moec_ir::FEW_ROWS);
    Ok(())
}

/// Takes no predictors where they cost more quality than is allowed.
fn allow_predictors(c: &mut Compilation<'_>, layers: &mut [Layer]) -> Result<()> {
    let limit = c.config.quality.max_perplexity_increase;
    let Some((limit, probe)) = limit.zip(c.quality) else {
        let why = "no loss is allowed: `max_perplexity_increase` under `[quality]` is not set";
        layers.iter_mut().filter(|l| l.is_on()).for_each(|l| l.give_up(why));
        return Ok(());
    };
    // Text is read in chunks, which ask predictors for once.
    let (mut changed, mut trained) = (c.module.clone(), Trained::default());
    predict::apply(&mut changed, layers, &mut trained, |_| true);
    let model = c.model_info()?;
    let source = trained.over(c.checkpoint()?);
    let change = Change { exact: &c.module, changed: &changed, model: &model, source: &source };
    let increase = probe.increase_by(&change)?;
    c.predictors_increase = Some(increase);
    if increase > limit {
        let (more, most) = (100.0 * increase, 100.0 * limit);
        let why = format!("perplexity would rise by {more:.2} %, and {most:.2} % is allowed");
        layers.iter_mut().filter(|l| l.is_on()).for_each(|l| l.give_up(&why));
    }
    Ok(())
}
