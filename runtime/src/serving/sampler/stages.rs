//! The stages of a choice, in their order: two tables.
//!
//! Stages on logits come first. Of the finite logits, the largest that top-k leaves become candidates with
//! weights. Then cuts remove candidates. Each cut sees the candidates that the one before has left, with
//! their renormalized probabilities, as transformers' logits processors do.

use super::Sampling;
use std::collections::HashMap;

/// A token that may be chosen: its weight, in proportion to its probability, and its id.
pub(super) type Candidate = (f64, u32);

/// Occurrences of a token in a sequence.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Occurrences {
    /// Occurrences in the answer; 0 if it occurs only in the prompt.
    pub(super) answer: u32,
}

/// Tokens of a sequence with their occurrences.
pub(super) type History = HashMap<u32, Occurrences>;

/// A stage that changes logits.
pub(super) struct LogitsProcessor {
    /// Whether it changes any logits.
    pub(super) is_active: fn(&Sampling) -> bool,
    /// Changes the logits.
    pub(super) apply: fn(&Sampling, &History, &mut [f32]),
}

/// A stage that reduces the candidates, but always leaves one.
pub(super) struct CandidateFilter {
    /// Whether it removes any candidates.
    pub(super) is_active: fn(&Sampling) -> bool,
    /// Removes candidates, given the sum of the weights that the stage before has left.
    pub(super) apply: fn(&Sampling, &mut Vec<Candidate>, f64),
}

/// Stages on logits, in this order. A constraint's mask follows them.
pub(super) const LOGITS_PROCESSORS: [LogitsProcessor; 3] = [
    LogitsProcessor { is_active: |sampling| !sampling.bias.is_empty(), apply: bias },
    LogitsProcessor { is_active: |sampling| sampling.repetition_penalty != 1.0, apply: repetition },
    LogitsProcessor {
        is_active: |sampling| sampling.presence_penalty != 0.0 || sampling.frequency_penalty != 0.0,
        apply: presence_and_frequency,
    },
];

/// Cuts, in this order, after the temperature and top-k.
pub(super) const CANDIDATE_FILTERS: [CandidateFilter; 3] = [
    CandidateFilter { is_active: |sampling| sampling.top_p < 1.0, apply: top_p },
    CandidateFilter { is_active: |sampling| sampling.min_p > 0.0, apply: min_p },
    CandidateFilter { is_active: |sampling| sampling.typical_p < 1.0, apply: typical_p },
];

fn bias(sampling: &Sampling, _: &History, logits: &mut [f32]) {
    for &(id, bias) in &sampling.bias {
        if let Some(l) = logits.get_mut(id as usize) {
            *l += bias;
        }
    }
}

fn repetition(sampling: &Sampling, seen: &History, logits: &mut [f32]) {
    for &id in seen.keys() {
        if let Some(l) = logits.get_mut(id as usize) {
            *l = if *l < 0.0 { *l * sampling.repetition_penalty } else { *l / sampling.repetition_penalty };
        }
    }
}

fn presence_and_frequency(sampling: &Sampling, seen: &History, logits: &mut [f32]) {
    for (&id, &Occurrences { answer }) in seen.iter().filter(|(_, seen)| seen.answer > 0) {
        if let Some(l) = logits.get_mut(id as usize) {
            *l -= sampling.presence_penalty + answer as f32 * sampling.frequency_penalty;
        }
    }
}

/// Order of candidates: the more probable first; equal ones by id.
pub(super) fn likelier(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

pub(super) fn total(c: &[Candidate]) -> f64 {
    c.iter().map(|(w, _)| w).sum()
}

/// The least weight that a token of a whole vocabulary needs to remain after the first cut.
pub(super) fn floor(sampling: &Sampling, total: f64, tokens: usize) -> f64 {
    if sampling.top_p < 1.0 {
        // All tokens below this share together stay under 1 − p, so none of them is ever needed.
        (1.0 - f64::from(sampling.top_p)) * total / tokens as f64
    } else {
        // The largest weight is 1.
        f64::from(sampling.min_p)
    }
}

fn top_p(sampling: &Sampling, c: &mut Vec<Candidate>, total: f64) {
    c.sort_unstable_by(likelier);
    let enough = f64::from(sampling.top_p) * total;
    let mut sum = 0.0;
    let mut keep = 0;
    while keep < c.len() && sum < enough {
        sum += c[keep].0;
        keep += 1;
    }
    c.truncate(keep.max(1));
}

fn min_p(sampling: &Sampling, c: &mut Vec<Candidate>, _: f64) {
    let max = c.iter().map(|(w, _)| *w).fold(0.0, f64::max);
    let floor = f64::from(sampling.min_p) * max;
    c.retain(|(w, _)| *w >= floor);
}

fn typical_p(sampling: &Sampling, c: &mut Vec<Candidate>, total: f64) {
    // Information of a token: −ln p, in nats.
    let information = |w: f64| (total / w).ln();
    let entropy: f64 = c.iter().map(|&(w, _)| w / total * information(w)).sum();
    let mut order: Vec<(f64, f64)> = c.iter().map(|&(w, _)| ((information(w) - entropy).abs(), w)).collect();
    order.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
    let enough = f64::from(sampling.typical_p) * total;
    let mut sum = 0.0;
    // Tokens as typical as the last one that is needed stay, too.
    let last = order.iter().find(|(_, w)| {
        sum += w;
        sum >= enough
    });
    if let Some(&(last, _)) = last {
        c.retain(|&(w, _)| (information(w) - entropy).abs() <= last);
    }
}
