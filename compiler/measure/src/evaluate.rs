//! `moec eval`: quality of a compiled model on real text.
#![expect(clippy::cast_possible_truncation, reason = "logits are f32")]

pub mod big_little;

use crate::host_build::HostBuild;
use crate::job::Job;
use bincode::{Decode, Encode};
use moec_base::error::{Error, Result};
use moec_base::progress::Progress;
use moec_bundle::read::Bundle;
use moec_ir::plan::UnitRef;
use moec_runtime::CheckLevel;
use moec_runtime::exec::overflow::OverflowCounters;
use moec_runtime::serving::text::Text;
use moec_runtime::{Engine, LogitRows, Options, Program};
use moec_targets::backends;
use serde::{Deserialize, Serialize};

/// Measurements to make.
#[derive(Clone, Debug, Default)]
pub struct Tasks {
    /// A text, for perplexity.
    pub text: Option<String>,
    /// Questions.
    pub questions: Option<Vec<Question>>,
    /// Tokens per window of the text.
    pub window: usize,
    /// Most windows.
    pub windows: Option<usize>,
}

impl Tasks {
    /// Checks that all hosts measure the same bundles by the same tasks.
    fn check_same(&self, bundles: [Option<&Bundle>; 2], job: Job<'_>) -> Result<()> {
        let plans = bundles.map(|bundle| bundle.map(|bundle| &bundle.plan));
        job.check_same(&(plans, &self.text, &self.questions, self.window, self.windows))
    }
}

/// A question with its expected answer.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Encode)]
pub struct Question {
    /// Text that the model reads.
    pub prompt: String,
    /// Expected continuation.
    pub answer: String,
}

/// Results.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Quality {
    /// Perplexity of the text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub perplexity: Option<f64>,
    /// Tokens predicted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<usize>,
    /// Windows measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub windows: Option<usize>,
    /// Share of tokens after which the most probable next token is that of the other bundle.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub same_choice: Option<f64>,
    /// Mean Kullback-Leibler divergence from the other bundle's probabilities, in nats.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub divergence: Option<f64>,
    /// Increase of the perplexity over that of the other bundle, as a share.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub increase: Option<f64>,
    /// Share of questions for which every token of the answer is the greedy choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exact_match: Option<f64>,
    /// Number of questions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub questions: Option<usize>,
    /// Overflow of experts with fixed capacities, by layer; empty with dynamic shapes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub overflow: Vec<LayerOverflow>,
}

/// Overflow of one layer's experts, over the whole measurement.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LayerOverflow {
    /// Layer.
    pub layer: u32,
    /// Number of (token, expert) pairs that the router chose.
    pub routed: u64,
    /// Share of the pairs that exceeded a capacity and were dropped.
    pub drop_rate: f64,
    /// Share of the pairs that exceeded a capacity and were computed by the CPU.
    pub spill_rate: f64,
    /// Rows that static graphs computed.
    pub rows: u64,
    /// Share of these rows that was padding.
    pub padding: f64,
}

impl LayerOverflow {
    fn of((layer, t): (u32, OverflowCounters)) -> Self {
        let (drop_rate, spill_rate, padding) = (t.drop_rate(), t.spill_rate(), t.padding_rate());
        Self { layer, routed: t.routed, drop_rate, spill_rate, rows: t.rows, padding }
    }
}

impl Quality {
    /// Drop, spill and padding rates over all layers; `None` with dynamic shapes.
    pub fn rates(&self) -> Option<[f64; 3]> {
        let sum = |of: &dyn Fn(&LayerOverflow) -> f64| self.overflow.iter().map(of).sum::<f64>();
        let (routed, rows) = (sum(&|l| l.routed as f64), sum(&|l| l.rows as f64));
        let share = |of: &dyn Fn(&LayerOverflow) -> f64, all: f64| sum(of) / all.max(1.0);
        (!self.overflow.is_empty()).then(|| {
            [
                share(&|l| l.drop_rate * l.routed as f64, routed),
                share(&|l| l.spill_rate * l.routed as f64, routed),
                share(&|l| l.padding * l.rows as f64, rows),
            ]
        })
    }
}

/// Reads questions, one per line.
///
/// # Errors
/// Fails for the first line that is not a question, and gives its number.
pub fn questions(text: &str, file: &str) -> Result<Vec<Question>> {
    let parse = |(i, line): (usize, &str)| {
        serde_json::from_str(line).map_err(|e| {
            Error::input(format!("`{file}` line {} is not a question", i + 1))
                .because(e)
                .hint("every line is an object `{\"prompt\": …, \"answer\": …}`")
        })
    };
    let all: Vec<_> =
        text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty()).map(parse).collect::<Result<_>>()?;
    if all.is_empty() {
        return Err(Error::input(format!("`{file}` holds no question")));
    }
    Ok(all)
}

/// Measures of one window of a text.
#[derive(Clone, Copy, Debug, Default, Encode, Decode)]
struct WindowQuality {
    /// Sums of −ln p over its predictions, of the bundle and of the other one.
    loss: f64,
    other_loss: f64,
    /// Number of equal choices, and sum of divergences.
    same: u64,
    divergence: f64,
}

/// Measures a bundle on the hosts of a job; `against` is the bundle to compare with.
///
/// # Errors
/// Fails if a bundle does not run here, if two bundles have different vocabularies, or if a window or a
/// question is longer than the context.
pub fn evaluate(
    bundle: &Bundle,
    against: Option<&Bundle>,
    tasks: &Tasks,
    job: Job<'_>,
    progress: &Progress,
) -> Result<Quality> {
    tasks.check_same([Some(bundle), against], job)?;
    let text = Text::open(&bundle.files(CheckLevel::Small)?, bundle.plan.model.bos).map_err(Error::from)?;
    with_engine(bundle, progress, |engine| match against {
        None => measure(engine, None, bundle, &text, tasks, (job, progress)),
        Some(other) if other.plan.model.vocab != bundle.plan.model.vocab => {
            Err(Error::usage("the two bundles have different vocabularies")
                .hint("compare bundles that were built from one checkpoint"))
        }
        Some(other) => with_engine(other, progress, |other| {
            measure(engine, Some(other), bundle, &text, tasks, (job, progress))
        }),
    })
}

/// Runs `body` with a bundle's engine. Whatever this machine lacks is emulated, and a line says so. The host
/// build replaces units and other architectures; missing instructions are emulated one by one.
pub(crate) fn with_engine<T>(
    bundle: &Bundle,
    progress: &Progress,
    body: impl FnOnce(&mut Engine<'_>) -> Result<T>,
) -> Result<T> {
    let files = bundle.files(CheckLevel::Small)?;
    if bundle.needs_host_build() {
        if bundle.is_foreign() {
            progress.warn(&bundle.host_build_note());
        }
        return HostBuild::of(bundle, progress)?.with_engine(Some(&files), body);
    }
    let unit = bundle.emulated_unit(progress)?;
    let program = Program::new(bundle.plan.clone(), &|s| unit.resolve(s))
        .map_err(Error::from)?
        .emulating(unit.emulated());
    let options = Options::default();
    let (folder, host) = (&bundle.folder, &mut |unit: &UnitRef| backends::host(&unit.backend, &unit.name));
    let mut engine = Engine::with_units(&program, folder, host, &files, options).map_err(Error::from)?;
    body(&mut engine)
}

fn measure(
    engine: &mut Engine<'_>,
    mut against: Option<&mut Engine<'_>>,
    bundle: &Bundle,
    text: &Text,
    tasks: &Tasks,
    (job, progress): (Job<'_>, &Progress),
) -> Result<Quality> {
    let mut quality = Quality::default();
    if let Some(corpus) = &tasks.text {
        let ids = text.encode(corpus).map_err(Error::from)?;
        let windows = windows(&ids, bundle, tasks)?;
        let bar = progress.items("Reading", windows.len() as u64, "windows of text");
        let of_window = |at: usize| {
            moec_base::interrupt::check()?;
            let window = windows[at];
            let (ids, next) = (&window[..window.len() - 1], &window[1..]);
            let reference = match &mut against {
                Some(other) => Some(log_probabilities(other, ids).map_err(Error::from)?),
                None => None,
            };
            let found = log_probabilities(engine, ids).map_err(Error::from)?;
            let mut of = WindowQuality::default();
            for (at, (row, &next)) in found.iter().zip(next).enumerate() {
                of.loss -= f64::from(row[next as usize]);
                if let Some(other) = reference.as_ref().and_then(|r| r.get(at)) {
                    of.same += u64::from(greedy(row) == greedy(other));
                    of.divergence += kl(other, row);
                    of.other_loss -= f64::from(other[next as usize]);
                }
            }
            Ok(of)
        };
        let found = job.all(windows.len(), of_window, || bar.add(1))?;
        bar.finish();
        let count: usize = windows.iter().map(|window| window.len() - 1).sum();
        let sum = |of: fn(&WindowQuality) -> f64| found.iter().map(of).sum::<f64>();
        let loss = sum(|w| w.loss);
        quality.perplexity = Some((loss / count as f64).exp());
        quality.tokens = Some(count);
        quality.windows = Some(windows.len());
        if against.is_some() {
            quality.same_choice = Some(sum(|w| w.same as f64) / count as f64);
            quality.divergence = Some(sum(|w| w.divergence) / count as f64);
            quality.increase = Some(((loss - sum(|w| w.other_loss)) / count as f64).exp_m1());
        }
    }
    if let Some(questions) = &tasks.questions {
        let answers = |prompt: &[u32], answer: &[u32]| answers(engine, prompt, answer);
        let exact_match = exact_match_rate(questions, text, (job, progress), answers)?;
        quality.exact_match = Some(exact_match);
        quality.questions = Some(questions.len());
    }
    quality.overflow = overflow(engine, job)?.into_iter().map(LayerOverflow::of).collect();
    Ok(quality)
}

/// Overflow on all hosts together, by layer.
fn overflow(engine: &Engine<'_>, job: Job<'_>) -> Result<Vec<(u32, OverflowCounters)>> {
    let mut all = engine.overflow_counters();
    let own: Vec<_> = all.iter().map(|(_, c)| [c.routed, c.pruned, c.spilled, c.rows, c.padding]).collect();
    let hosts = job.each(&own)?;
    for (i, (_, sum)) in all.iter_mut().enumerate() {
        let of = |at: usize| hosts.iter().filter_map(|host| host.get(i)).map(|counts| counts[at]).sum();
        *sum = OverflowCounters { routed: of(0), pruned: of(1), spilled: of(2), rows: of(3), padding: of(4) };
    }
    Ok(all)
}

/// Evaluates all questions. `answers` gets a prompt and its expected continuation, and returns whether the
/// model generates it. Returns the share of correct answers.
fn exact_match_rate(
    questions: &[Question],
    text: &Text,
    (job, progress): (Job<'_>, &Progress),
    mut answers: impl FnMut(&[u32], &[u32]) -> moec_runtime::Result<bool>,
) -> Result<f64> {
    let bar = progress.items("Asking", questions.len() as u64, "questions");
    let of_question = |at: usize| {
        moec_base::interrupt::check()?;
        let q = &questions[at];
        let prompt = text.encode(&q.prompt).map_err(Error::from)?;
        let answer = text.encode_plain(&q.answer).map_err(Error::from)?;
        answers(&prompt, &answer).map_err(Error::from)
    };
    let found = job.all(questions.len(), of_question, || bar.add(1))?;
    bar.finish();
    Ok(found.into_iter().filter(|right| *right).count() as f64 / questions.len() as f64)
}

/// The windows of a text, each with the token after it, which is the first token of the next window. They
/// cover `n` tokens and one more, which the last of them predicts.
///
/// # Errors
/// Fails if a text is too short to predict anything.
fn windows<'a>(ids: &'a [u32], bundle: &Bundle, tasks: &Tasks) -> Result<Vec<&'a [u32]>> {
    let window = tasks.window.min(bundle.plan.model.max_context as usize);
    let last = ids.len().saturating_sub(1);
    let of = (0..last).step_by(window).map(|start| &ids[start..=(start + window).min(last)]);
    let windows: Vec<_> = of.take(tasks.windows.unwrap_or(usize::MAX)).collect();
    if windows.is_empty() {
        return Err(Error::input("the text is shorter than two tokens")
            .hint("a perplexity needs some thousand tokens of text like that in use"));
    }
    Ok(windows)
}

/// Logarithms of the probabilities of the next token: one row per token.
pub(crate) fn log_probabilities(engine: &mut Engine<'_>, ids: &[u32]) -> moec_runtime::Result<Vec<Vec<f32>>> {
    engine.reset(0)?;
    let mut rows = Vec::with_capacity(ids.len());
    engine.prefill(0, 0, ids, LogitRows::All, &mut |_, logits| {
        let shift = log_sum(logits);
        rows.push(logits.iter().map(|&z| (f64::from(z) - shift) as f32).collect());
        Ok(())
    })?;
    Ok(rows)
}

/// `ln Σ exp z`: a log probability is its logit minus this number.
fn log_sum(logits: &[f32]) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&z| f64::from(z - max).exp()).sum();
    f64::from(max) + sum.ln()
}

/// Kullback-Leibler divergence of two rows of log probabilities, `Σ p (ln p − ln q)`, in nats.
pub(crate) fn kl(p: &[f32], q: &[f32]) -> f64 {
    p.iter().zip(q).map(|(&p, &q)| f64::from(p).exp() * (f64::from(p) - f64::from(q))).sum()
}

/// Whether every token of the answer is the greedy choice after the tokens before it.
fn answers(engine: &mut Engine<'_>, prompt: &[u32], answer: &[u32]) -> moec_runtime::Result<bool> {
    engine.reset(0)?;
    let ids: Vec<u32> = prompt.iter().chain(answer).copied().collect();
    let mut right = true;
    engine.prefill(0, 0, &ids[..ids.len() - 1], LogitRows::All, &mut |pos, logits| {
        if pos + 1 >= prompt.len() {
            right &= greedy(logits) == ids[pos + 1] as usize;
        }
        Ok(())
    })?;
    Ok(right)
}

/// Index of the largest logit; of equal logits, the first.
pub(crate) fn greedy(logits: &[f32]) -> usize {
    let best = |best: usize, i: usize| if logits[i] > logits[best] { i } else { best };
    (0..logits.len()).fold(0, best)
}
