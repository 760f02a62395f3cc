//! Loss of quality that capacities cause, measured on text (NPUMoE, §4.1: the quantile of the load is chosen
//! by the accuracy that remains).
//!
//! The model runs twice over windows of text on this machine, as its host build: once with room for every
//! row, and once with the capacities in question, where rows past them are dropped. Windows are compared in
//! pairs, so that properties of the text cancel out. The result is a promise about unseen text, so it is
//! conservative. The windows are ones that calibration has not read, and two standard errors are added to the
//! mean.

use crate::calibrate::texts::{Window, held_out, windows};
use crate::calibrate::{Corpus, WINDOW, read_texts};
use crate::evaluate::{greedy, kl, log_probabilities};
use crate::host_build::{HostBuild, HostBuildExperts, Original};
use crate::job::Job;
use moec_base::error::{Error, Result};
use moec_base::progress::Progress;
use moec_config::Config;
use moec_import::{Checkpoint, ModelSpec};
use moec_ir::plan::ModelInfo;
use moec_ir::{Format, Module};
use moec_pipeline::{Candidate, Change, QualityProbe};
use moec_profile::Profile;
use moec_runtime::exec::overflow::OverflowCounters;
use moec_runtime::serving::text::Text;
use std::cell::RefCell;
use std::fmt;

/// Tokens that are read for each measurement, if a caller sets no number.
const TOKENS: usize = 32 << 10;
/// Least number of windows for a useful result.
const FEW: usize = 10;

/// The model with room for every row: its host build, its windows, and its loss on each window.
type Reference = (HostBuild, Vec<Window>, Vec<f64>);

/// Quality of a model whose experts have capacities, beside the same model with room for every row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CapacityQuality {
    /// Share of the (token, expert) pairs that lost the expert.
    pub dropped: f64,
    /// Share of the pairs past a capacity that were computed.
    pub spilled: f64,
    /// Perplexity with room for every row.
    pub exact_perplexity: f64,
    /// Perplexity with the capacities.
    pub perplexity: f64,
    /// Mean Kullback-Leibler divergence from the probabilities with room for every row, in nats.
    pub divergence: f64,
    /// Share of tokens after which the most probable next token is the same.
    pub same_choice: f64,
}

/// Probe of quality, which runs the model of a checkpoint over text.
pub struct Measured<'a> {
    checkpoint: &'a Checkpoint,
    spec: &'a ModelSpec,
    corpora: Vec<Corpus>,
    profile: &'a Profile,
    cache: Format,
    window: usize,
    tokens: usize,
    job: Job<'a>,
    progress: &'a Progress,
    /// The model without capacities, and its loss on each window.
    reference: RefCell<Option<Reference>>,
}

impl fmt::Debug for Measured<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Measured").field("corpora", &self.corpora).finish_non_exhaustive()
    }
}

impl<'a> Measured<'a> {
    /// Creates a probe that reads the texts of `[quality]`, else those of `[calibrate]`; `None` without any.
    ///
    /// # Errors
    /// Fails if a text cannot be read.
    pub fn new(
        config: &Config,
        checkpoint: &'a Checkpoint,
        profile: &'a Profile,
        spec: &'a ModelSpec,
        progress: &'a Progress,
    ) -> Result<Option<Self>> {
        let texts = [&config.quality.text, &config.calibrate.text].into_iter().find(|t| !t.is_empty());
        let Some(texts) = texts else { return Ok(None) };
        Ok(Some(Self {
            checkpoint,
            spec,
            corpora: read_texts(texts)?,
            profile,
            cache: config.kv_format(),
            window: WINDOW.min(config.shapes_for(spec.max_positions)?.max_context),
            tokens: TOKENS,
            job: Job::ALONE,
            progress,
            reference: RefCell::new(None),
        }))
    }

    /// Sets the most tokens that a measurement reads.
    #[must_use]
    pub fn with_tokens(self, tokens: usize) -> Self {
        Self { tokens, ..self }
    }

    /// Divides the texts between the hosts of a job.
    ///
    /// # Errors
    /// Hosts that have another model, text or profile.
    pub fn with_job(self, job: Job<'a>) -> Result<Self> {
        let texts: Vec<_> = self.corpora.iter().map(|c| c.hash).collect();
        let profile = (self.profile.origin.checkpoint, &self.profile.reading);
        job.check_same(&(texts, profile, self.window))?;
        Ok(Self { job, ..self })
    }

    /// The hosts that divide the texts.
    pub(crate) fn job(&self) -> Job<'a> {
        self.job
    }

    /// Measures the capacities of a placement, window by window beside `full`, the model without any.
    ///
    /// # Errors
    /// Fails if the model cannot run with them, or if there is no text.
    pub fn quality(&self, full: &HostBuild, candidate: &Candidate<'_>) -> Result<CapacityQuality> {
        let experts = HostBuildExperts::Bounded(candidate.placement);
        let bounded = self.host_build(Some(full), candidate, experts)?;
        let windows = self.windows(&self.text(candidate.model.bos)?)?;
        let bar = self.progress.items("Reading", windows.len() as u64, "windows of text");
        let measured = full.with_engine(None, |exact| {
            bounded.with_engine(None, |bounded| {
                let (mut losses, mut divergence, mut same, mut count) = ([0.0; 2], 0.0, 0_u32, 0_u32);
                for window in &windows {
                    moec_base::interrupt::check()?;
                    let p = log_probabilities(exact, &window.ids).map_err(Error::from)?;
                    let q = log_probabilities(bounded, &window.ids).map_err(Error::from)?;
                    for ((p, q), &next) in p.iter().zip(&q).zip(window.ids.iter().skip(1)) {
                        losses[0] -= f64::from(p[next as usize]);
                        losses[1] -= f64::from(q[next as usize]);
                        divergence += kl(p, q);
                        same += u32::from(greedy(p) == greedy(q));
                        count += 1;
                    }
                    bar.add(1);
                }
                let [exact_perplexity, perplexity] = losses.map(|loss| (loss / f64::from(count)).exp());
                let counters = bounded.overflow_counters();
                let sum = |of: fn(&OverflowCounters) -> u64| counters.iter().map(|(_, c)| of(c)).sum::<u64>();
                let routed = sum(|c| c.routed).max(1) as f64;
                Ok(CapacityQuality {
                    dropped: sum(|c| c.pruned) as f64 / routed,
                    spilled: sum(|c| c.spilled) as f64 / routed,
                    exact_perplexity,
                    perplexity,
                    divergence: divergence / f64::from(count),
                    same_choice: f64::from(same) / f64::from(count),
                })
            })
        });
        bar.finish();
        measured
    }

    /// The checkpoint's tokenizer.
    pub(crate) fn text(&self, bos: Option<u32>) -> Result<Text> {
        let none = || format!("`{}` has no usable tokenizer", self.checkpoint.path().display());
        let json = self
            .checkpoint
            .tokenizer(self.spec)?
            .ok_or_else(|| Error::input(none()).hint("put the model's `tokenizer.json` into the folder"))?;
        Text::parse(json, bos).map_err(|why| Error::input(none()).because(why))
    }

    /// Most tokens of a window.
    pub(crate) fn window(&self) -> usize {
        self.window
    }

    /// Windows to read: text that calibration has not read, if there is any.
    pub(crate) fn windows(&self, text: &Text) -> Result<Vec<Window>> {
        let read = |hash: &[u8; 32]| self.profile.reading.texts.get(hash).copied().unwrap_or(0);
        let found = held_out(&self.corpora, &read, text, self.tokens, self.window)?;
        if found.len() >= FEW {
            return Ok(found);
        }
        self.progress.warn(
            "calibration has read nearly all of the text that the loss is measured on, so the promise is weaker; name \
             other text under `[quality]`",
        );
        windows(&self.corpora, Some(text), self.tokens, self.window)
    }

    /// Mean negative log-likelihood of each window.
    fn losses(&self, host_build: &HostBuild, windows: &[Window]) -> Result<Vec<f64>> {
        let bar = self.progress.items("Reading", windows.len() as u64, "windows of text");
        let found = host_build.with_engine(None, |engine| {
            let loss = |at: usize| {
                moec_base::interrupt::check()?;
                let window = &windows[at];
                let rows = log_probabilities(engine, &window.ids).map_err(Error::from)?;
                let next = window.ids.iter().skip(1);
                let sum: f64 = rows.iter().zip(next).map(|(row, &id)| -f64::from(row[id as usize])).sum();
                Ok(sum / (window.ids.len() - 1) as f64)
            };
            self.job.all(windows.len(), loss, || bar.add(1))
        });
        bar.finish();
        found
    }

    /// The host build of a model with room for every row. It reuses the weights of another one if they are
    /// packed alike.
    ///
    /// # Errors
    /// Those of [`HostBuild::new`].
    pub fn unbounded(
        &self,
        other: Option<&HostBuild>,
        module: &Module,
        model: &ModelInfo,
    ) -> Result<HostBuild> {
        let experts = HostBuildExperts::Unbounded;
        let original = Original { module, source: self.checkpoint, model, cache: self.cache, experts };
        HostBuild::sharing_weights(other, &original, self.progress)
    }

    fn host_build(
        &self,
        other: Option<&HostBuild>,
        candidate: &Candidate<'_>,
        experts: HostBuildExperts<'_>,
    ) -> Result<HostBuild> {
        let Candidate { module, model, .. } = *candidate;
        let original = Original { module, source: self.checkpoint, model, cache: self.cache, experts };
        HostBuild::sharing_weights(other, &original, self.progress)
    }
}

impl QualityProbe for Measured<'_> {
    fn perplexity_increase(&self, candidate: &Candidate<'_>) -> Result<f64> {
        let mut reference = self.reference.borrow_mut();
        let (full, windows, exact) = match &mut *reference {
            Some(known) => known,
            empty => {
                let full = self.host_build(None, candidate, HostBuildExperts::Unbounded)?;
                let text = self.text(candidate.model.bos)?;
                let windows = self.windows(&text)?;
                let exact = self.losses(&full, &windows)?;
                empty.insert((full, windows, exact))
            }
        };
        let bounded =
            self.host_build(Some(full), candidate, HostBuildExperts::Bounded(candidate.placement))?;
        let lossy = self.losses(&bounded, windows)?;
        let differences: Vec<f64> = lossy.iter().zip(exact.iter()).map(|(a, b)| a - b).collect();
        let increase = cautious(&differences).exp_m1();
        let capacities =
            candidate.placement.experts.iter().flat_map(|t| &t.experts).map(|e| u64::from(e.capacity));
        let (rows, percent) = (capacities.sum::<u64>(), 100.0 * increase);
        self.progress.stage("Measured", &format!("{rows} rows for all experts: perplexity {percent:+.3} %"));
        Ok(increase)
    }

    fn increase_by(&self, change: &Change<'_>) -> Result<f64> {
        let Change { exact, changed, model, source } = *change;
        let text = self.text(model.bos)?;
        let windows = self.windows(&text)?;
        let losses = |module| {
            let original =
                Original { module, source, model, cache: self.cache, experts: HostBuildExperts::Unbounded };
            self.losses(&HostBuild::new(&original, self.progress)?, &windows)
        };
        let (exact, changed) = (losses(exact)?, losses(changed)?);
        let differences: Vec<f64> = changed.iter().zip(&exact).map(|(a, b)| a - b).collect();
        let increase = cautious(&differences).exp_m1();
        self.progress
            .stage("Measured", &format!("predictors of neurons: perplexity {:+.3} %", 100.0 * increase));
        Ok(increase)
    }
}

/// Mean of independent numbers, plus two of its standard errors.
pub(crate) fn cautious(x: &[f64]) -> f64 {
    let n = x.len().max(1) as f64;
    let mean = x.iter().sum::<f64>() / n;
    let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (n - 1.0).max(1.0);
    mean + 2.0 * (variance / n).sqrt()
}

#[cfg(test)]
mod tests {
    use super::cautious;

    #[test]
    fn standard_error_is_added_to_the_mean() {
        assert_eq!(cautious(&[0.5, 0.5, 0.5]), 0.5);
        // Two numbers of variance 2: the standard error of the mean is 1.
        assert!((cautious(&[1.0, 3.0]) - 4.0).abs() < 1e-12);
        assert_eq!(cautious(&[]), 0.0);
    }
}
