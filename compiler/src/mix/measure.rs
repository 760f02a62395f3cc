//! Models in formats that are in question, read text beside the model as it is.

use super::Formats;
use crate::bundle::read::Bundle;
use crate::bundle::write;
use crate::config::{Activations, Config, KvCache};
use crate::error::{Error, Result};
use crate::evaluate::{kl, log_probabilities, with_engine};
use crate::pipeline::{Compilation, Stops};
use crate::profile::{Importance, Profile};
use crate::progress::Progress;
use crate::quality::{Measured, cautious};
use crate::scratch::Scratch;
use moec_cpu::{CpuTarget, WeightImportance};
use moec_runtime::text::Text;

/// What was measured of a model beside another.
#[derive(Clone, Debug, Default)]
pub(super) struct Found {
    /// Mean Kullback-Leibler divergence from the other's probabilities, in nats per token.
    pub(super) divergence: f64,
    /// By how much the loss of each window rises, in nats per token.
    losses: Vec<f64>,
}

impl Found {
    /// By how much perplexity rises, as a share: the mean and two standard errors.
    pub(super) fn increase(&self) -> f64 {
        cautious(&self.losses).exp_m1()
    }
}

/// A model on disk.
struct Built {
    bundle: Bundle,
    bytes: u64,
    _scratch: Scratch,
}

/// What builds and compares models. Activations are exact, so that only weights tell.
pub(super) struct Bench<'a> {
    original: &'a Compilation<'a>,
    config: Config,
    target: CpuTarget,
    profile: &'a Profile,
    measured: &'a Measured<'a>,
    progress: &'a Progress,
    reference: Built,
}

impl<'a> Bench<'a> {
    /// Builds the model in the formats of its classes.
    ///
    /// # Errors
    /// A model that cannot be built here.
    pub(super) fn new(
        c: &'a Compilation<'a>,
        profile: &'a Profile,
        measured: &'a Measured<'a>,
        progress: &'a Progress,
    ) -> Result<Self> {
        let mut config = Config::defaults(&c.config.path);
        config.model = c.config.model.clone();
        config.weights = c.config.weights.clone();
        config.shapes.max_context = Some(measured.window());
        config.shapes.prefill_chunk = c.config.shapes.prefill_chunk.min(measured.window());
        config.memory.kv_cache = KvCache::F32;
        let target = crate::targets::target("native")?.with_activations(Activations::F32);
        let reference = built(c, &config, &target, profile, &Formats::new(), progress)?;
        Ok(Self { original: c, config, target, profile, measured, progress, reference })
    }

    /// Bytes of the weights in the formats of their classes.
    pub(super) fn bytes(&self) -> u64 {
        self.reference.bytes
    }

    /// Bytes of the model in other formats, and how it reads text.
    ///
    /// # Errors
    /// A model that cannot be built or run here, an interrupt.
    pub(super) fn measure(&self, formats: &Formats) -> Result<(u64, Found)> {
        let built = built(self.original, &self.config, &self.target, self.profile, formats, self.progress)?;
        let bos = built.bundle.plan.model.bos;
        let text = Text::open(&built.bundle.folder, bos).map_err(Error::from)?;
        let windows = self.measured.windows(&text)?;
        let bar = self.progress.items("Reading", windows.len() as u64, "windows of text");
        let found = with_engine(&self.reference.bundle, self.progress, |exact| {
            with_engine(&built.bundle, self.progress, |rounded| {
                let (mut found, mut tokens) = (Found::default(), 0);
                for window in &windows {
                    crate::interrupt::check()?;
                    let p = log_probabilities(exact, &window.ids).map_err(Error::from)?;
                    let q = log_probabilities(rounded, &window.ids).map_err(Error::from)?;
                    found.divergence += p.iter().zip(&q).map(|(p, q)| kl(p, q)).sum::<f64>();
                    tokens += p.len();
                    let next = window.ids.iter().skip(1);
                    let rise = p
                        .iter()
                        .zip(&q)
                        .zip(next)
                        .map(|((p, q), &id)| f64::from(p[id as usize] - q[id as usize]));
                    found.losses.push(rise.sum::<f64>() / (window.ids.len() - 1).max(1) as f64);
                    bar.add(1);
                }
                found.divergence /= tokens.max(1) as f64;
                Ok(found)
            })
        });
        bar.finish();
        Ok((built.bytes, found?))
    }
}

fn built(
    original: &Compilation<'_>,
    config: &Config,
    target: &CpuTarget,
    profile: &Profile,
    formats: &Formats,
    progress: &Progress,
) -> Result<Built> {
    let mut c = Compilation::new(config, original.checkpoint()?, original.spec()?, target);
    c.formats = formats.clone();
    c.run(Stops::default(), &Progress::silent(), &mut |_| {})?;
    crate::interrupt::check()?;
    let importance =
        Importance::new(profile, &c.lowered()?, &c.module, c.checkpoint()?, |w| w.format.is_quantised())?;
    let importance = importance.rounded(config.weights.rounding, profile.correlations.clone());
    c.importance = Some(&importance as &dyn WeightImportance);
    let scratch = Scratch::create("choose formats", c.plan()?)?;
    let folder = scratch.path().join("model.moec");
    write::write(&mut c, &folder, None, false, progress)?;
    let bytes = c.plan()?.segments.iter().map(|s| s.bytes).sum();
    Ok(Built { bundle: Bundle::open(&folder)?, bytes, _scratch: scratch })
}
