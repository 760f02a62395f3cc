//! A bundle whose experts are on disk: the runtime's own decider, cache, policy and scheduler, with recorded
//! routing, on modelled units ([`mod@moec_sim::paging`]). What is decided is what a run decides that has the
//! same routing and whose units take the same time; how long they take is a model ([`Costs`]).

use super::bundle::Request;
use super::costs::{Constant, Costs};
use moec_base::error::{Error, Result};
use moec_bundle::read::Bundle;
use moec_costs::timeline::{Span, Task, TaskKind, Timeline, queues};
use moec_cpu::DISK;
use moec_ir::op::Score;
use moec_ir::plan::{PagedLayer, Paging, Plan, Segment};
use moec_runtime::offload::cache::prefetch::DEPTH;
use moec_sim::cache::Trace;
use moec_sim::paging::{RecordedRequest, Scene, SimulatedRun, UnitWork, simulate};
use std::time::Duration;

/// Tokens that are decoded by default.
pub const DECODED: u32 = 64;

/// Result.
#[derive(Clone, Debug)]
pub struct Simulated {
    /// Tokens of a chunk.
    pub chunk: u32,
    /// Tokens of the prompt, and decoded after it.
    pub prompt: u32,
    /// Tokens decoded.
    pub decode: u32,
    /// Tokens of recorded routing that there are; more are taken from their start again.
    pub recorded: usize,
    /// The run.
    pub run: SimulatedRun,
    /// Time until the prompt is computed, and how much of it and of the rest no thread computed since an
    /// expert was missing.
    pub prefill: Duration,
    /// Waiting in the prompt and after it.
    pub stalled: [Duration; 2],
    /// Tasks and their times.
    pub timeline: Timeline,
    /// Index of the queue of the link from disk.
    pub link: usize,
    /// Index of the queue that computes.
    pub unit: usize,
    /// Numbers of the model, and their sources.
    pub constants: Vec<Constant>,
}

/// Simulates a bundle whose experts are on disk.
///
/// # Errors
/// A device file without the figures that are needed; no recorded routing, or that of another model; a prompt
/// past the context.
pub fn paged(bundle: &Bundle, paging: &Paging, request: &Request<'_>) -> Result<Simulated> {
    let device = request.device;
    let plan = &bundle.plan;
    let costs = Costs::of(device, plan, &bundle.graph()?, &paging.layers)?;
    let layers: Vec<_> = paging.layers.iter().map(|l| (l.experts, l.k)).collect();
    let trace = routing(&layers, request)?;
    let chunk = plan.entries.iter().find(|e| e.kind.is_prefill()).map_or(1, |e| e.kind.rows() as u32);
    let prompt = request.prompt.unwrap_or(chunk).max(1);
    let decode = request.decode.unwrap_or(DECODED);
    let context = plan.model.max_context;
    if prompt.saturating_add(decode) > context {
        return Err(Error::usage(format!(
            "a prompt of {prompt} tokens and {decode} decoded ones do not fit into a context of {context}"
        ))
        .hint("`--prompt` and `--decode` say how many"));
    }
    let matrices = matrices(plan, paging)?;
    let requests = requests(&trace, &paging.layers, [prompt, chunk, decode]);
    let elsewhere = plan.experts_off_disk(0);
    let scene = Scene {
        paging,
        elsewhere: &elsewhere,
        matrices: &matrices,
        ahead: DEPTH,
        preload: true,
        journal: None,
    };
    let mut names = queues(device);
    let link = names.len();
    names.push(format!("{DISK} → {}", device.units[costs.unit].name));
    let mut record = CalibrationRecord::new(costs.unit, link, prompt.div_ceil(chunk));
    let run = simulate(scene, &costs, &requests, &mut |did, from, to| record.add(did, from, to))
        .map_err(|e| Error::limit("the plan cannot be simulated").because(e.to_string()))?;
    let prefill = record.prefill.unwrap_or(run.wall);
    let wall_us = run.wall.as_secs_f64() * 1e6;
    Ok(Simulated {
        chunk,
        prompt,
        decode,
        recorded: trace.tokens(),
        prefill,
        stalled: record.stalled,
        timeline: Timeline { queues: names, tasks: record.tasks, spans: record.spans, wall_us },
        link,
        unit: costs.unit,
        constants: costs.constants,
        run,
    })
}

/// Recorded routing of layers with so many experts, and so many of them per token.
pub(super) fn routing(layers: &[(u32, u32)], request: &Request<'_>) -> Result<Trace> {
    let profile = request.profile.filter(|p| !p.routes.is_empty()).ok_or_else(|| {
        Error::input("such a bundle is simulated with recorded routing")
            .hint("`--trace` names a profile of `moec calibrate`")
    })?;
    let trace = profile
        .routes
        .trace(&profile.layers)
        .map_err(|e| Error::bug("a profile that was checked").because(e))?;
    let own = trace.experts().layers().iter().map(|l| (l.experts as u32, l.k as u32));
    if own.ne(layers.iter().copied()) {
        return Err(Error::input("the profile is of another model than the bundle")
            .hint("`moec calibrate` with the `model.toml` of the bundle records one"));
    }
    Ok(trace)
}

/// Bytes of both matrices of an expert, by layer.
fn matrices(plan: &Plan, paging: &Paging) -> Result<Vec<[u64; 2]>> {
    let bytes = |s: u32| {
        let segment = plan.segments.get(s as usize).and_then(Segment::matrix_bytes);
        segment.ok_or_else(|| Error::bug("an expert without a size"))
    };
    paging.layers.iter().map(|l| Ok([bytes(l.gate_up)?, bytes(l.down)?])).collect()
}

/// Requests of layers: chunks of a prompt, then tokens one by one, in the order in which they were recorded,
/// from their start again where they end. A profile has no predictions: no expert is read ahead of a token's
/// layers.
fn requests(trace: &Trace, layers: &[PagedLayer], [prompt, chunk, decode]: [u32; 3]) -> Vec<RecordedRequest> {
    let (mut requests, mut at) = (Vec::new(), 0);
    let mut left = prompt;
    let mut calls = Vec::new();
    while left > 0 {
        calls.push(left.min(chunk) as usize);
        left -= left.min(chunk);
    }
    calls.extend((0..decode).map(|_| 1));
    for rows in calls {
        for (layer, shape) in layers.iter().enumerate() {
            let mut chosen = vec![false; shape.experts as usize];
            for token in at..at + rows {
                let step = trace.step(token % trace.tokens().max(1), layer);
                step.chosen.iter().for_each(|&e| chosen[usize::from(e)] = true);
            }
            let active = (0..shape.experts as i32).filter(|&e| chosen[e as usize]).collect();
            let ranked = trace.step(at % trace.tokens().max(1), layer).ranked;
            let scores = if rows == 1 { vec![logits(ranked, shape)] } else { Vec::new() };
            requests.push(RecordedRequest {
                layer,
                rows,
                k: shape.k as usize,
                active,
                accelerator_experts: Vec::new(),
                scores,
            });
        }
        at += rows;
    }
    requests
}

/// Logits whose scores, as shares of 1, are the recorded ones. What was not recorded shares what is left.
fn logits(ranked: &[(u16, f32)], shape: &PagedLayer) -> Vec<f32> {
    let experts = shape.experts as usize;
    let left = (1.0 - ranked.iter().map(|r| r.1).sum::<f32>()).max(0.0);
    let least = ranked.last().map_or(1.0, |r| r.1);
    let other = (left / experts.saturating_sub(ranked.len()).max(1) as f32).min(least);
    let mut shares = vec![other; experts];
    for &(e, s) in ranked {
        shares[usize::from(e)] = s;
    }
    let logit = |share: f32| match shape.score {
        Score::Softmax | Score::Identity => share.max(f32::MIN_POSITIVE).ln(),
        // Any factor will do: shares are of the sum.
        Score::Sigmoid => {
            let half = (0.5 * share).max(f32::MIN_POSITIVE);
            (half / (1.0 - half)).ln()
        }
    };
    shares.into_iter().map(logit).collect()
}

/// Observations of a run.
struct CalibrationRecord {
    unit: usize,
    link: usize,
    /// Calls of the prompt, and the call that runs.
    prompt: u32,
    call: Option<u32>,
    prefill: Option<Duration>,
    stalled: [Duration; 2],
    /// Time of the last read's end.
    read: Duration,
    tasks: Vec<Task>,
    spans: Vec<Span>,
}

impl CalibrationRecord {
    fn new(unit: usize, link: usize, prompt: u32) -> Self {
        let (stalled, read) = ([Duration::ZERO; 2], Duration::ZERO);
        Self {
            unit,
            link,
            prompt,
            call: None,
            prefill: None,
            stalled,
            read,
            tasks: Vec::new(),
            spans: Vec::new(),
        }
    }

    fn add(&mut self, did: UnitWork, from: Duration, to: Duration) {
        if let UnitWork::Between { layer: 0 } = did {
            let call = self.call.map_or(0, |c| c + 1);
            self.call = Some(call);
            if call == self.prompt {
                self.prefill = Some(from);
            }
        }
        let call = self.call.unwrap_or(0);
        let (queue, what, layer, index, from) = match did {
            UnitWork::Between { layer } => (self.unit, TaskKind::Between, layer, None, from),
            UnitWork::Expert(key) => {
                (self.unit, TaskKind::Experts, usize::from(key.layer), Some(key.expert), from)
            }
            UnitWork::Wait(key) => {
                self.stalled[usize::from(call >= self.prompt)] += to.saturating_sub(from);
                (self.unit, TaskKind::Wait, usize::from(key.layer), Some(key.expert), from)
            }
            // A link reads one after the other: from the moment when the one before was done.
            UnitWork::Read { key, ahead } => {
                let from = from.max(std::mem::replace(&mut self.read, to));
                let what = if ahead { TaskKind::ReadAhead } else { TaskKind::Read };
                (self.link, what, usize::from(key.layer), Some(key.expert), from)
            }
        };
        let us = |d: Duration| d.as_secs_f64() * 1e6;
        let span = Span { start: us(from), end: us(to) };
        self.spans.push(span);
        self.tasks.push(Task {
            queue,
            kind: what,
            part: what,
            us: span.end - span.start,
            lag_us: 0.0,
            after: Vec::new(),
            layer: layer as u32,
            call,
            index: index.map(u32::from),
            rows: 1,
        });
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use moec_runtime::offload::cache::{CachedLayer, ExpertIndex, Ranking};

    #[test]
    fn logits_have_the_recorded_scores() {
        for score in [Score::Softmax, Score::Sigmoid, Score::Identity] {
            let shape = PagedLayer { layer: 0, experts: 6, k: 2, gate_up: 0, down: 1, score };
            let ranked = [(3, 0.5), (0, 0.25), (5, 0.125), (1, 0.0625)];
            let found = logits(&ranked, &shape);
            let mut ranking = Ranking::new(6, 4);
            for (found, expected) in ranking.of_logits(&found, score).iter().zip(ranked) {
                assert!(found.0 == expected.0 && (found.1 - expected.1).abs() < 1e-3, "{score:?}: {found:?}");
            }
        }
    }

    #[test]
    fn prompt_requests_the_experts_of_its_tokens() {
        let shape = PagedLayer { layer: 0, experts: 4, k: 1, gate_up: 0, down: 1, score: Score::Softmax };
        let experts = ExpertIndex::uniform(2, CachedLayer { experts: 4, k: 1, bytes: 1 }).unwrap();
        let mut trace = Trace::new(experts, true);
        for token in 0..3_u16 {
            let ranked = [(token, 0.7), (3, 0.2), (3 - token, 0.7), (3, 0.2)];
            trace.push(&[token, 3 - token], &ranked).unwrap();
        }
        let found = requests(&trace, &[shape; 2], [5, 2, 1]);
        let requests: Vec<_> = found.iter().map(|a| (a.layer, a.rows, a.active.clone())).collect();
        let expected = [
            (0, 2, vec![0, 1]),
            (1, 2, vec![2, 3]),
            (0, 2, vec![0, 2]),
            (1, 2, vec![1, 3]),
            (0, 1, vec![1]),
            (1, 1, vec![2]),
            (0, 1, vec![2]),
            (1, 1, vec![1]),
        ];
        assert_eq!(requests, expected);
        assert!(found.iter().all(|a| a.scores.len() == usize::from(a.rows == 1)));
    }
}
