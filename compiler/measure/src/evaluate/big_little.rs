//! Quality of big-little decoding (MoBiLE, §IV and §V), for several γ.
//!
//! Text is read token by token, as in decoding. Every token goes through the little entry point first, and
//! through the full one if the little one is unsure. Later tokens see what a kept token wrote into the KV
//! cache. For questions, the prompt is prefilled with all experts and the answer is decoded.

use super::{Tasks, exact_match_rate, greedy, log_sum, windows, with_engine};
use crate::job::Job;
use moec_base::error::{Error, Result};
use moec_base::progress::Progress;
use moec_bundle::read::Bundle;
use moec_runtime::CheckLevel;
use moec_runtime::serving::text::Text;
use moec_runtime::{Decoder, Engine, Fallbacks, LogitRows};
use serde::Serialize;
use std::sync::{Mutex, PoisonError};

/// Results.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BigLittle {
    /// Experts per token of the little entry points.
    pub experts: u32,
    /// One row for each γ, in the order of the request.
    pub gammas: Vec<OfGamma>,
}

/// Result of one γ.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct OfGamma {
    /// γ.
    pub gamma: f64,
    /// Perplexity of the text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub perplexity: Option<f64>,
    /// Tokens predicted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<usize>,
    /// Share of the text's tokens that were computed with all experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fallback_ratio: Option<f64>,
    /// Share of questions for which every token of the answer is the greedy choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exact_match: Option<f64>,
    /// Number of questions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub questions: Option<usize>,
    /// Share of the answers' tokens that were computed with all experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub answer_fallback_ratio: Option<f64>,
}

/// Measures a bundle on this machine, for each γ of `gammas`. If `gammas` is empty, the bundle's own γ is
/// used.
///
/// # Errors
/// Fails if a bundle does not run here or has no little entry points, or if a window or a question is longer
/// than the context.
pub fn evaluate(
    bundle: &Bundle,
    gammas: &[f64],
    tasks: &Tasks,
    job: Job<'_>,
    progress: &Progress,
) -> Result<BigLittle> {
    tasks.check_same([Some(bundle), None], job)?;
    let built = bundle.plan.model.big_little.ok_or_else(|| Error::from(moec_runtime::Error::no_little()))?;
    let own = [built.gamma()];
    let gammas = if gammas.is_empty() { &own[..] } else { gammas };
    let text = Text::open(&bundle.files(CheckLevel::Small)?, bundle.plan.model.bos).map_err(Error::from)?;
    let corpus = tasks.text.as_ref().map(|corpus| text.encode(corpus)).transpose().map_err(Error::from)?;
    let windows = corpus.as_ref().map(|ids| windows(ids, bundle, tasks)).transpose()?;
    with_engine(bundle, progress, |engine| {
        let mut rows = Vec::with_capacity(gammas.len());
        for &gamma in gammas {
            let decoder = || Decoder::big_little(engine.program(), gamma as f32).map_err(Error::from);
            let (mut of_text, mut of_answers) = (decoder()?, decoder()?);
            let mut row = OfGamma { gamma, ..OfGamma::default() };
            if let Some(windows) = &windows {
                read(engine, &mut of_text, windows, (job, progress), &mut row)?;
            }
            if let Some(questions) = &tasks.questions {
                let exact = exact_match_rate(questions, &text, (job, progress), |prompt, answer| {
                    answers(engine, &mut of_answers, prompt, answer)
                })?;
                (row.exact_match, row.questions) = (Some(exact), Some(questions.len()));
                row.answer_fallback_ratio = ratio(&of_answers, job)?;
            }
            rows.push(row);
        }
        Ok(BigLittle { experts: built.experts, gammas: rows })
    })
}

/// Perplexity of windows of text.
fn read(
    engine: &mut Engine<'_>,
    decoder: &mut Decoder,
    windows: &[&[u32]],
    (job, progress): (Job<'_>, &Progress),
    row: &mut OfGamma,
) -> Result<()> {
    let bar = progress.items("Reading", windows.len() as u64, "windows of text");
    let of_window = |at: usize| {
        let (ids, mut loss) = (windows[at], 0.0);
        moec_base::interrupt::check()?;
        engine.reset(0).map_err(Error::from)?;
        for (pos, pair) in ids.windows(2).enumerate() {
            let of_token = Mutex::new(0.0);
            let sink = |_: usize, logits: &[f32]| {
                let of_next = logits.get(pair[1] as usize).map_or(f64::NEG_INFINITY, |&z| f64::from(z));
                *of_token.lock().unwrap_or_else(PoisonError::into_inner) = log_sum(logits) - of_next;
            };
            decoder.decode(engine, &[(0, pos, pair[0])], &sink).map_err(Error::from)?;
            loss += of_token.into_inner().unwrap_or_else(PoisonError::into_inner);
        }
        Ok(loss)
    };
    let loss: f64 = job.all(windows.len(), of_window, || bar.add(1))?.into_iter().sum();
    bar.finish();
    let count: usize = windows.iter().map(|ids| ids.len() - 1).sum();
    row.perplexity = Some((loss / count as f64).exp());
    row.tokens = Some(count);
    row.fallback_ratio = ratio(decoder, job)?;
    Ok(())
}

/// Share of the tokens of all hosts that were computed with all experts.
fn ratio(decoder: &Decoder, job: Job<'_>) -> Result<Option<f64>> {
    let own = decoder.fallbacks().unwrap_or_default();
    let hosts = job.each(&(own.tokens, own.full))?;
    let (tokens, full) = hosts.into_iter().fold((0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1));
    Ok(Fallbacks { tokens, full }.ratio())
}

/// Whether every token of the answer is the greedy choice after the tokens before it.
fn answers(
    engine: &mut Engine<'_>,
    decoder: &mut Decoder,
    prompt: &[u32],
    answer: &[u32],
) -> moec_runtime::Result<bool> {
    engine.reset(0)?;
    let mut best = None;
    engine.prefill(0, 0, prompt, LogitRows::Last, &mut |_, logits| {
        best = Some(greedy(logits));
        Ok(())
    })?;
    for (i, &id) in answer.iter().enumerate() {
        if best != Some(id as usize) {
            return Ok(false);
        }
        if i + 1 < answer.len() {
            let found = Mutex::new(None);
            decoder.decode(engine, &[(0, prompt.len() + i, id)], &|_, logits| {
                *found.lock().unwrap_or_else(PoisonError::into_inner) = Some(greedy(logits));
            })?;
            best = found.into_inner().unwrap_or_else(PoisonError::into_inner);
        }
    }
    Ok(true)
}
