//! A whole request, prompt and answer, on a placement: by its cost pass `reside` finds a home for attention.

use super::bundle::{placed, prompt};
use super::constants::Constants;
use super::model::Model;
use super::run::{Outcome, Scene};
use crate::config::{ExpertsConfig, Mix};
use crate::error::Result;
use crate::passes::units::Units;
use crate::profile::loads::Loads;
use moec_ir::Module;
use moec_ir::placement::Placement;

/// A model, a device, and the request that is asked of them.
#[derive(Debug)]
pub struct Request<'a> {
    model: Model,
    units: &'a Units<'a>,
    loads: &'a Loads,
    constants: Constants,
    /// Tokens of the prompt and of the answer, as far as the context holds them.
    pub mix: Mix,
}

impl<'a> Request<'a> {
    /// The request of a mix, for a model whose sequences have at most `context` tokens.
    ///
    /// # Errors
    /// Our bugs: experts without sizes, constants that cannot be found.
    pub fn new(
        module: &Module,
        units: &'a Units<'a>,
        loads: &'a Loads,
        mix: Mix,
        context: u32,
    ) -> Result<Self> {
        let nodes = module.entries.iter().flat_map(|g| &g.nodes);
        let layers = nodes.filter_map(|n| n.scope.layer).max().map_or(0, |last| last.saturating_add(1));
        let generate = mix.generate.min(context.saturating_sub(1));
        let mix = Mix { prompt: mix.prompt.min(context - generate).max(1), generate };
        let model = Model::of(module, "the model", layers)?;
        Ok(Self { model, units, loads, constants: Constants::NPUMOE, mix })
    }

    /// What it costs on a placement. A prompt is rounded up to whole chunks, as static shapes are.
    pub fn run(&self, placement: &Placement) -> Outcome {
        let chunk = self.loads.chunk.max(1);
        let prompt = prompt(self.loads, chunk, self.mix.prompt.div_ceil(chunk), self.mix.generate);
        let scene = Scene {
            model: &self.model,
            units: self.units,
            constants: self.constants,
            calibration: self.loads,
            coverage: ExpertsConfig::DEFAULT.coverage,
            overflow: placement.overflow,
        };
        scene.run(&placed(placement, self.units), &prompt)
    }
}
