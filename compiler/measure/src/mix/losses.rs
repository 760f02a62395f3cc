//! Losses of formats, for profiles (`moec calibrate --losses`): each format of each class alone, beside the model
//! as the checkpoint stores it, on text that calibration has not read.

use super::measure::{Bench, Extent};
use crate::calibrate::as_stored;
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
    (WeightClass::Experts, &[Format::Q8, Format::Q6, Format::Q5, Format::Q4, Format::Q3, Format::Q2]),
    (WeightClass::Attention, &[Format::Q8, Format::Q4]),
    (WeightClass::Embeddings, &[Format::Q8, Format::Q4]),
];

/// Key of the KV cache in a profile.
pub const KV_CACHE: &str = "kv_cache";

/// Measures the loss of every format of [`OF_WEIGHTS`], and of a KV cache in q8, on `texts` or on those of
/// `[quality]`. Weights are rounded with `profile`, as builds with it round them; activations are f32.
///
/// # Errors
/// Fails without text, and as builds and runs of the models do.
pub fn losses(
    (config, texts): (&Config, &[PathBuf]),
    (checkpoint, spec): (&Checkpoint, &ModelSpec),
    profile: &Profile,
    tokens: usize,
    progress: &Progress,
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
    let measured = measured.with_tokens(tokens);

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
    models.push((KV_CACHE, Format::Q8, Formats::new()));
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
        let cache = if key == KV_CACHE { KvCache::Q8 } else { KvCache::F32 };
        let result = bench.measure_alone(&formats, cache)?;
        let loss = FormatLoss { key: key.to_owned(), format, tokens: result.predicted, loss: result.nats };
        let percent = 100.0 * loss.mean().exp_m1();
        progress.stage("Measured", &format!("{key} in {format}: perplexity {percent:+.3} %"));
        found.push(loss);
    }
    Ok(found)
}
