//! Costs of a whole request, prompt and answer, on a placement. Pass `assign_residency` chooses the unit of
//! attention by them.

use super::constants::Constants;
use super::model::Model;
use super::run::{Outcome, Placed, Prompt, Scenario};
use super::timeline::Queue;
use super::units::Units;
use moec_base::error::Result;
use moec_config::{ExpertsConfig, Mix};
use moec_ir::placement::{OpAssignment, Placement};
use moec_ir::{EntryKind, Module, Role};
use moec_profile::decoding::CALLS;
use moec_profile::loads::{LayerLoads, Loads};

/// A model, a device, and a request.
#[derive(Debug)]
pub struct Request<'a> {
    model: Model,
    units: &'a Units<'a>,
    loads: &'a Loads,
    constants: Constants,
    /// Tokens of the prompt and of the answer, limited by the context.
    pub mix: Mix,
}

impl<'a> Request<'a> {
    /// The request of a mix, for a model whose sequences have at most `context` tokens.
    ///
    /// # Errors
    /// Bugs of the compiler: experts without sizes, or constants that cannot be found.
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

    /// Costs on a placement. The prompt is rounded up to whole chunks, as static shapes are.
    pub fn run(&self, placement: &Placement) -> Outcome {
        let chunk = self.loads.chunk.max(1);
        let prompt = prompt(self.loads, chunk, self.mix.prompt.div_ceil(chunk), self.mix.generate);
        let scene = Scenario {
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

/// Units of a placement.
pub fn placed(placement: &Placement, units: &Units<'_>) -> Placed {
    let npu = units.npu_index();
    let on = |prefill: bool, is: &dyn Fn(&OpAssignment) -> bool| {
        let entry = |kind: EntryKind| match kind {
            EntryKind::Prefill(_) => prefill,
            EntryKind::Decode(_) => !prefill,
            EntryKind::Little(_) => false,
        };
        let found = placement.ops.iter().any(|o| entry(o.entry) && o.unit == npu && is(o));
        if found { Queue::Npu } else { Queue::Cpu }
    };
    let attention = |o: &OpAssignment| o.op == "attention";
    let dense = |o: &OpAssignment| {
        o.scope.role() == Role::Network && matches!(o.op.as_str(), "linear" | "linear_glu")
    };
    let batches = placement.ops.iter().filter_map(|o| match o.entry {
        EntryKind::Decode(rows) => Some(rows),
        EntryKind::Prefill(_) | EntryKind::Little(_) => None,
    });
    Placed {
        attention: on(true, &attention),
        decode_attention: on(false, &attention),
        dense: on(true, &dense),
        decode_dense: on(false, &dense),
        tables: Some(placement.experts.clone()),
        decode_batch: batches.min().unwrap_or(1),
        resident: true,
    }
}

/// Chunks of the trace in order, repeated from its start if needed. Tokens are decoded alone; their choices
/// are those that costs of decoding are the mean of ([`LayerLoads::decoding`]).
pub fn prompt(loads: &Loads, chunk: u32, chunks: u32, decode: u32) -> Prompt {
    let sample = |c: u32| -> Vec<Vec<u32>> {
        let of =
            |l: &LayerLoads| l.samples.get(c as usize % l.samples.len().max(1)).cloned().unwrap_or_default();
        loads.layers.iter().map(of).collect()
    };
    let rows: Vec<LayerLoads> = loads.layers.iter().filter(|_| decode > 0).map(|l| l.decoding(1)).collect();
    let token = |t: u32| -> Vec<Vec<u32>> {
        let of = |l: &LayerLoads| l.samples[(t % CALLS) as usize].clone();
        rows.iter().map(of).collect()
    };
    Prompt { chunk, chunks: (0..chunks).map(sample).collect(), decode: (0..decode).map(token).collect() }
}
