//! Experts that tokens choose.
//!
//! Routing of these models, token by token, is not published. Popularity is OLMoE's (`golden/traces`): 64
//! experts unchanged; each of Mixtral's eight is the sum of eight neighbours. Layers follow the recorded
//! layer of their depth. Pinned experts are chosen by web text; runs use chat ([`CALIBRATION_DOMAIN`],
//! [`RUN_DOMAIN`]). Traces are sampled with that popularity; [`Model::persistence`] sets how far tokens
//! repeat choices.

use super::models::Model;
use crate::random::Random;
use crate::recorded::{ALL, Recorded};
use moec_base::{Error, Result};
use moec_runtime::offload::cache::{CachedLayer, ExpertIndex};
use moec_sim::cache::{Trace, synthetic};

/// The domain, of [`ALL`], that placement is chosen by.
pub const CALIBRATION_DOMAIN: &str = "c4";
/// The domain that is run: instructions and chat, as the paper's prompts.
pub const RUN_DOMAIN: &str = "tulu";

/// Frequency with which a gate that is given the hidden state of one, two or three layers before names an
/// expert that its layer then uses. Assumed: the paper prints none.
pub const GATE_ACCURACY: [f64; 3] = [0.8, 0.7, 0.6];

/// All experts of a model, each of one byte: shares of them are what counts.
///
/// # Errors
/// Our bug: a model that cannot be.
pub fn experts(model: &Model) -> Result<ExpertIndex> {
    let layer = CachedLayer { experts: model.experts, k: model.k, bytes: 1 };
    ExpertIndex::uniform(model.layers, layer).map_err(|e| Error::input(e.to_string()))
}

/// Routing of so many tokens, with scores.
///
/// # Errors
/// Our bug: counts that do not parse.
pub fn trace(recorded: &Recorded, domain: &str, model: &Model, tokens: usize, seed: u64) -> Result<Trace> {
    let of =
        ALL.iter().position(|d| *d == domain).ok_or_else(|| Error::input(format!("no domain `{domain}`")))?;
    let parts = recorded.parts();
    let last = parts.len().saturating_sub(1).max(1);
    let layer = |(at, domains): (usize, &Vec<Vec<f64>>)| {
        let share = |e: usize| domains.get(of).and_then(|d| d.get(e)).copied().unwrap_or(0.0);
        let recorded = domains.first().map_or(0, Vec::len);
        let each = recorded / model.experts;
        let counts = (0..model.experts).map(|e| (e * each..(e + 1) * each).map(share).sum());
        ((at * (model.layers - 1) / last) as u32, counts.collect())
    };
    let popularity = parts.iter().enumerate().map(layer).collect();
    synthetic::trace(&experts(model)?, &popularity, model.persistence, tokens, seed)
        .map_err(|e| Error::input(e.to_string()))
}

/// Tokens of each expert of a layer: some tokens of a trace at once.
pub fn loads(trace: &Trace, tokens: std::ops::Range<usize>, layer: usize) -> Vec<u32> {
    let mut loads = vec![0; trace.experts().layers()[layer].experts];
    for token in tokens {
        for &e in trace.step(token, layer).chosen {
            loads[usize::from(e)] += 1;
        }
    }
    loads
}

/// The loads that gates expect `ahead` layers before (from 1): each choice is right as often as
/// [`GATE_ACCURACY`] says, else it is any other expert with a score.
pub fn expected(
    trace: &Trace,
    tokens: std::ops::Range<usize>,
    layer: usize,
    gate_accuracy: f64,
    random: &mut Random,
) -> Vec<u32> {
    let mut loads = vec![0; trace.experts().layers()[layer].experts];
    for token in tokens {
        let step = trace.step(token, layer);
        let others: Vec<u16> = step.ranked.iter().map(|r| r.0).filter(|e| !step.chosen.contains(e)).collect();
        let mut wrong = others;
        for &e in step.chosen {
            let right = random.unit() < gate_accuracy || wrong.is_empty();
            let e = if right { e } else { wrong.swap_remove(random.below(wrong.len())) };
            loads[usize::from(e)] += 1;
        }
    }
    loads
}
