//! Thresholds of the gates of experts and dense networks with SiLU, and their cost (CATS, arXiv 2404.08763).
//!
//! A layer's threshold is a quantile of the gates that calibration saw, so that all layers lose the same
//! share of their neurons. The cost is measured on text: the model with thresholds is compared with the model
//! without, both on this machine with activations in f32. With `auto` the share is the largest one that
//! `max_perplexity_increase` allows. It is found by bisection, since more zeros cost more.
#![expect(clippy::cast_possible_truncation, reason = "a percentage")]

use crate::evaluate::{greedy, kl, log_probabilities};
use crate::host_build::HostBuild;
use crate::job::Job;
use crate::quality::{Measured, cautious};
use moec_base::error::{Error, Result};
use moec_base::progress::Progress;
use moec_config::Threshold;
use moec_ir::Module;
use moec_ir::plan::ModelInfo;
use moec_passes::decisions::Decision;
use moec_passes::threshold::{Thresholds, threshold};
use moec_pipeline::{Compilation, Inputs, Stops};
use moec_profile::{Gates, Profile};

/// Step of a share: one percent.
const STEPS: f64 = 100.0;

/// The thresholds that set a share of the neurons to 0.
fn at(gates: &[Gates], share: f64) -> Thresholds {
    let by_layer = gates.iter().map(|g| (g.layer, g.quantile(share))).collect();
    let below = gates.iter().filter_map(|g| g.below(g.quantile(share))).sum::<f64>();
    Thresholds { by_layer, percent: (100.0 * below / gates.len().max(1) as f64) as f32 }
}

/// Chooses the thresholds that `threshold` under `[experts]` requests, and measures their cost. `spent` is
/// the increase of perplexity that formats cause, as a share. Thresholds may use what is left of the limit.
///
/// # Errors
/// Fails without a profile that has gates, without experts with SiLU, or with static graphs that apply no
/// thresholds. `auto` also fails without a limit or a text. Errors of building and running the model here are
/// returned, too.
pub fn choose(
    c: &Inputs<'_>,
    spent: f64,
    job: Job<'_>,
    progress: &Progress,
) -> Result<Option<(Thresholds, Vec<Decision>)>> {
    let setting = c.config.experts.threshold;
    if setting == Threshold::Off {
        return Ok(None);
    }
    let needs = |what: &str| Error::input(format!("`threshold` under `[experts]` needs {what}"));
    if let Some(Err(why)) = c.units.as_ref().map(|units| units.graphs.thresholds()) {
        let error =
            Error::limit("`threshold` under `[experts]` cannot be combined with the target's static graphs");
        return Err(error.because(why).hint("remove it, or build for a target with only a CPU"));
    }
    let profile = c.profile.ok_or_else(|| {
        needs("a profile, which has the sizes of gates").hint("name `text` or `profile` under `[calibrate]`")
    })?;
    let gates = recorded_gates(c, profile)?;
    let limit = c.config.quality.max_perplexity_increase;
    let measured = Measured::new(c.config, c.checkpoint()?, profile, c.spec()?, progress)?;
    let measured = measured.map(|m| m.with_job(job)).transpose()?;
    let bench = measured.as_ref().map(|m| Bench::new(c, m, progress)).transpose()?;
    let mut tried: Vec<Cost> = Vec::new();
    let mut cost = |share: f64, bench: &Bench<'_>| -> Result<Cost> {
        let cost = bench.cost(share, &at(gates, share))?;
        let (percent, rise) = (100.0 * share, 100.0 * cost.increase);
        progress.stage("Measured", &format!("{percent:.0} % of neurons at 0: perplexity {rise:+.3} %"));
        tried.push(cost);
        Ok(cost)
    };
    let (share, chosen) = match setting {
        Threshold::Off => return Ok(None),
        Threshold::Share(share) => (share, bench.as_ref().map(|b| cost(share, b)).transpose()?),
        Threshold::Auto => {
            let limit = limit.ok_or_else(|| {
                needs("a limit if it is \"auto\"")
                    .hint("set `max_perplexity_increase` under `[quality]`, or a share such as \"50%\"")
            })?;
            let bench = bench.as_ref().ok_or_else(|| {
                needs("text to measure on").hint("name `text` under `[quality]` or `[calibrate]`")
            })?;
            let left = (1.0 + limit) / (1.0 + spent.max(0.0)) - 1.0;
            // The largest share known to be allowed, and the smallest known not to be.
            let (mut low, mut high) = ((0.0, None), (Threshold::MOST * STEPS).round() + 1.0);
            while high - low.0 > 1.0 {
                let middle = f64::midpoint(low.0, high).floor();
                let found = cost(middle / STEPS, bench)?;
                if found.increase <= left {
                    low = (middle, Some(found));
                } else {
                    high = middle;
                }
            }
            (low.0 / STEPS, low.1)
        }
    };
    if setting == Threshold::Auto && chosen.is_none() {
        progress.warn("`max_perplexity_increase` allows no threshold: the model is built without");
        return Ok(None);
    }
    let thresholds = at(gates, share);
    let decisions = decisions(&thresholds, share, limit, chosen, &tried);
    Ok(Some((thresholds, decisions)))
}

/// The entry for `decisions.json`: the share with all that were tried, and every layer's threshold.
fn decisions(
    thresholds: &Thresholds,
    share: f64,
    limit: Option<f64>,
    chosen: Option<Cost>,
    tried: &[Cost],
) -> Vec<Decision> {
    const PASS: &str = "threshold";
    let name = |share: f64| format!("{:.0} % of the neurons of experts count as 0", 100.0 * share);
    let why = match chosen {
        None => "an approximation; its cost was not measured, since no text is named".to_owned(),
        Some(c) => format!(
            "an approximation: perplexity {:+.3} %, divergence {:.4} nats, {:.1} % of next tokens the same, as measured",
            100.0 * c.increase,
            c.divergence,
            100.0 * c.same_choice
        ),
    };
    let mut all = Decision::new(PASS, "neurons of experts", name(share), why).with(&[("zeros_share", share)]);
    all.figures.extend(limit.map(|limit| ("allowed_perplexity_increase_share".to_owned(), limit)));
    let all = tried.iter().fold(all, |all, c| {
        all.or(
            name(c.share),
            &[
                ("zeros_share", c.share),
                ("perplexity_increase_share", c.increase),
                ("divergence_nats", c.divergence),
                ("same_choice_share", c.same_choice),
            ],
        )
    });
    let layer = |(&layer, &t): (&u32, &f32)| {
        Decision::new(PASS, "threshold of |silu(gate)|", "below it is 0", "all layers lose the same share")
            .in_layer(layer)
            .with(&[("threshold", t.into())])
    };
    std::iter::once(all).chain(thresholds.by_layer.iter().map(layer)).collect()
}

/// Cost of thresholds on text, relative to the model without.
#[derive(Clone, Copy, Debug)]
struct Cost {
    /// Share of the neurons that the thresholds are to set to 0.
    share: f64,
    /// Increase of perplexity, as a share, two standard errors included.
    increase: f64,
    /// Mean Kullback-Leibler divergence, in nats per token.
    divergence: f64,
    /// Share of tokens with the same most probable next token.
    same_choice: f64,
}

/// The gates of the profile.
fn recorded_gates<'p>(c: &Inputs<'_>, profile: &'p Profile) -> Result<&'p [Gates]> {
    let mut lowered = c.lowered()?;
    let all = lowered.entries.iter().flat_map(|g| &g.nodes).filter_map(|n| n.scope.layer);
    let every = Thresholds { by_layer: all.map(|layer| (layer, 0.0)).collect(), percent: 0.0 };
    if threshold(&mut lowered, &every) == 0 {
        return Err(Error::input(
            "`threshold` under `[experts]`, but no expert of this model has SiLU in its gate",
        )
        .because("thresholds are for gated experts and dense networks with SiLU and without biases")
        .hint("remove it; ReLU gates already have zeros, which `skip` skips"));
    }
    if profile.gates.iter().all(|g| g.counted() == 0) {
        return Err(Error::input("the profile has no sizes of gates")
            .because("it is of an earlier version of moec")
            .hint("record it again with `moec calibrate`"));
    }
    Ok(&profile.gates)
}

/// The model without thresholds, which models with thresholds are compared with.
struct Bench<'a> {
    measured: &'a Measured<'a>,
    module: Module,
    model: ModelInfo,
    exact: HostBuild,
    progress: &'a Progress,
}

impl<'a> Bench<'a> {
    fn new(c: &Inputs<'_>, measured: &'a Measured<'a>, progress: &'a Progress) -> Result<Self> {
        let inputs = Inputs::new(c.config, c.checkpoint()?, c.spec()?, c.target);
        let mut own = Compilation::new(Inputs { formats: c.formats.clone(), ..inputs });
        let stops = Stops { stop_after: Some("rewrite"), ..Stops::default() };
        own.run(stops, &Progress::silent(), &mut |_| {})?;
        let model = own.inputs.model_info()?;
        let exact = measured.unbounded(None, &own.module, &model)?;
        Ok(Self { measured, module: own.module, model, exact, progress })
    }

    /// Measures the cost of thresholds. A share of 0 costs nothing.
    fn cost(&self, share: f64, thresholds: &Thresholds) -> Result<Cost> {
        let mut module = self.module.clone();
        threshold(&mut module, thresholds);
        let changed = self.measured.unbounded(Some(&self.exact), &module, &self.model)?;
        let windows = self.measured.windows(&self.measured.text(self.model.bos)?)?;
        let bar = self.progress.items("Reading", windows.len() as u64, "windows of text");
        let found = self.exact.with_engine(None, |exact| {
            changed.with_engine(None, |changed| {
                let of_window = |at: usize| {
                    moec_base::interrupt::check()?;
                    let window = &windows[at];
                    let p = log_probabilities(exact, &window.ids).map_err(Error::from)?;
                    let q = log_probabilities(changed, &window.ids).map_err(Error::from)?;
                    let divergence = p.iter().zip(&q).map(|(p, q)| kl(p, q)).sum::<f64>();
                    let same = p.iter().zip(&q).filter(|(p, q)| greedy(p) == greedy(q)).count();
                    let next = window.ids.iter().skip(1);
                    let rise = p.iter().zip(&q).zip(next);
                    let rise = rise.map(|((p, q), &id)| f64::from(p[id as usize] - q[id as usize]));
                    Ok((rise.sum::<f64>() / (window.ids.len() - 1).max(1) as f64, divergence, same, p.len()))
                };
                self.measured.job().all(windows.len(), of_window, || bar.add(1))
            })
        })?;
        bar.finish();
        let (mut rises, mut divergence, mut same, mut tokens) = (Vec::new(), 0.0, 0, 0);
        for window in found {
            rises.push(window.0);
            (divergence, same, tokens) = (divergence + window.1, same + window.2, tokens + window.3);
        }
        let of = tokens.max(1) as f64;
        Ok(Cost {
            share,
            increase: cautious(&rises).exp_m1(),
            divergence: divergence / of,
            same_choice: same as f64 / of,
        })
    }
}
