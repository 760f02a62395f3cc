//! Losses of formats, for profiles (`moec calibrate --losses`): each format of each class alone, beside the model
//! as the checkpoint stores it, on text that calibration has not read.

use super::measure::{Bench, Extent};
use crate::calibrate::as_stored;
use crate::job::Job;
use crate::quality::Measured;
use moec_base::error::{Error, Result};
use moec_base::progress::Progress;
use moec_config::{Activations, Config, KvCache};
use moec_import::{Checkpoint, ModelSpec};
use moec_ir::{Format, Weight, WeightClass};
use moec_passes::format::Formats;
use moec_pipeline::Inputs;
use moec_profile::{FormatLoss, Profile};
use std::path::PathBuf;

/// Formats that are measured for each class of weights. `bf16` is what others are compared with.
pub const OF_WEIGHTS: [(WeightClass, &[Format]); 3] = [
    (
        WeightClass::Experts,
        &[Format::Q8, Format::Q6, Format::Q5, Format::Q4n, Format::Q4, Format::Q3, Format::Q2, Format::Q2s],
    ),
    (WeightClass::Attention, &[Format::Q8, Format::Q4n, Format::Q4]),
    (WeightClass::Embeddings, &[Format::Q8, Format::Q4n, Format::Q4]),
];

/// Key of the KV cache in a profile.
pub const KV_CACHE: &str = "kv_cache";

/// Formats of the KV cache that are measured.
pub const OF_CACHES: [Format; 3] = [Format::Q8, Format::Q5, Format::Q4];

/// Measures the loss of every format of [`OF_WEIGHTS`] and of [`OF_CACHES`], on `texts` or on those of
/// `[quality]`. Weights are rounded with `profile`, as builds with it round them; activations are f32.
///
/// # Errors
/// Fails without text, and as builds and runs of the models do.
pub fn losses(
    (config, texts): (&Config, &[PathBuf]),
    (checkpoint, spec): (&Checkpoint, &ModelSpec),
    profile: &Profile,
    tokens: usize,
    (job, progress): (Job<'_>, &Progress),
) -> Result<Vec<FormatLoss>> {
    let mut own = config.clone();
    own.calibrate.text = texts.to_vec();
    let target = moec_targets::target("native")?.with_activations(Activations::F32);
    let stored = as_stored(checkpoint, &Inputs::new(&own, checkpoint, spec, &target).lowered()?);
    own.weights = moec_config::Weights { rounding: config.weights.rounding, ..stored };
    let inputs = Inputs::new(&own, checkpoint, spec, &target);
    let measured = Measured::new(&own, checkpoint, profile, spec, progress)?.ok_or_else(|| {
        Error::usage("there is no text to measure losses on")
            .hint("name one with `--text FILE`, or `text` under `[quality]`")
    })?;
    let measured = measured.with_tokens(tokens).with_job(job)?;

    let lowered = inputs.lowered()?;
    let of = |class: WeightClass| {
        lowered.weights.iter().filter(move |w: &&Weight| w.class == class && w.shape.len() > 1)
    };
    let mut models: Vec<(&str, Format, Formats)> = Vec::new();
    for (class, formats) in OF_WEIGHTS {
        for &format in formats.iter().filter(|_| of(class).next().is_some()) {
            models.push((class.name(), format, of(class).map(|w| (w.name.clone(), format)).collect()));
        }
    }
    models.extend(OF_CACHES.map(|format| (KV_CACHE, format, Formats::new())));
    let bytes = |formats: &Formats| -> u64 {
        let all = lowered
            .weights
            .iter()
            .filter_map(|w| Some((w.shape.iter().product::<usize>(), formats.get(&w.name)?)));
        all.map(|(numbers, format)| (2.0 * numbers as f64 * format.bits() / 8.0) as u64).sum()
    };
    let all = models.iter().map(|(.., formats)| bytes(formats)).max().unwrap_or(0);
    let extent = Extent { models: 1 + models.len(), own: 0, least: 0, all, most: u64::MAX };
    let mut bench = Bench::new(&inputs, profile, &measured, extent, progress)?;
    let mut found = Vec::new();
    for (key, format, formats) in models {
        let cache = if key == KV_CACHE { KvCache::of(format) } else { KvCache::F32 };
        let result = bench.measure_alone(&formats, cache)?;
        let loss = FormatLoss { key: key.to_owned(), format, tokens: result.predicted, loss: result.nats };
        let percent = 100.0 * loss.mean().exp_m1();
        progress.stage("Measured", &format!("{key} in {format}: perplexity {percent:+.3} %"));
        found.push(loss);
    }
    Ok(found)
}

/// Forms of the KV cache that [`caches`] compares: format, and whether heads are stored rotated.
const FORMS: [(Format, bool); 8] = [
    (Format::F32, false),
    (Format::Bf16, false),
    (Format::Q8, false),
    (Format::Q8, true),
    (Format::Q5, false),
    (Format::Q5, true),
    (Format::Q4, false),
    (Format::Q4, true),
];

/// Passages of random tokens that are repeated.
const PASSAGES: usize = 16;

/// Loss of a form of the KV cache beside f32.
#[derive(Clone, Copy, Debug)]
pub struct CacheLoss {
    /// Format.
    pub format: Format,
    /// Whether heads are stored rotated.
    pub rotates: bool,
    /// Tokens that were predicted.
    pub tokens: u64,
    /// Increase of −ln p(next token), in nats per token.
    pub loss: f64,
    /// Mean Kullback-Leibler divergence, in nats per token.
    pub divergence: f64,
    /// Share of the tokens whose most probable successor is the same.
    pub same: f64,
    /// Share of the tokens of a random passage that are the most probable ones when it is read again.
    pub repeated: f64,
}

/// Measures the loss of forms of the KV cache, those that builds have and others, on `texts` or on those of
/// `[quality]`. Activations are f32, weights as the checkpoint stores them. The first is f32 itself, which
/// loses nothing.
///
/// # Errors
/// Those of [`losses`].
pub fn caches(
    (config, texts): (&Config, &[PathBuf]),
    (checkpoint, spec): (&Checkpoint, &ModelSpec),
    profile: &Profile,
    tokens: usize,
    progress: &Progress,
) -> Result<Vec<CacheLoss>> {
    let mut own = config.clone();
    own.calibrate.text = texts.to_vec();
    let target = moec_targets::target("native")?.with_activations(Activations::F32);
    own.weights = as_stored(checkpoint, &Inputs::new(&own, checkpoint, spec, &target).lowered()?);
    let inputs = Inputs::new(&own, checkpoint, spec, &target);
    let measured = Measured::new(&own, checkpoint, profile, spec, progress)?
        .ok_or_else(|| Error::usage("there is no text to measure losses on"))?
        .with_tokens(tokens);
    let extent = Extent { models: 1 + FORMS.len(), own: 0, least: 0, all: 0, most: u64::MAX };
    let mut bench = Bench::new(&inputs, profile, &measured, extent, progress)?;
    let vocab = inputs.model_info()?.vocab;
    let passages = passages(bench.window(), vocab);
    let again: usize = passages.iter().map(|ids| ids.len() - 1 - ids.len() / 2).sum();
    FORMS
        .into_iter()
        .map(|(format, rotates)| {
            let (found, hits) = bench.measure_cache(KvCache::of(format), rotates, &passages)?;
            let predicted = found.predicted.max(1) as f64;
            let loss = CacheLoss {
                format,
                rotates,
                tokens: found.predicted,
                loss: found.nats / predicted,
                divergence: found.divergence,
                same: found.same as f64 / predicted,
                repeated: hits as f64 / again.max(1) as f64,
            };
            progress.stage("Measured", &format!("{loss:?}"));
            Ok(loss)
        })
        .collect()
}

/// Sequences of so many tokens whose second half is their first half, of pseudo-random tokens.
fn passages(tokens: usize, vocab: u32) -> Vec<Vec<u32>> {
    let mut state = 1_u64;
    let mut next = || {
        // Knuth's linear congruential generator (MMIX).
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % u64::from(vocab.max(1))) as u32
    };
    let half = |next: &mut dyn FnMut() -> u32| (0..tokens / 2).map(|_| next()).collect::<Vec<_>>();
    (0..PASSAGES).map(|_| half(&mut next).repeat(2)).collect()
}
