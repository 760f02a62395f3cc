//! Reports of `generate`: objects for programs, lines for people.

use crate::error::Result;
use crate::serving::best_of::BestOf;
use crate::serving::big_little::Fallbacks;
use crate::serving::generate::Generation;
use crate::serving::sampler::LogProbabilities;
use crate::serving::speculate::DraftCounters;
use serde_json::{Value, json};

/// The object that `--json` prints.
pub(super) fn report(done: &Generation, text: Option<String>, log_probabilities: bool) -> Value {
    let mut report = json!({
        "ids": done.ids,
        "text": text,
        "prefill_tokens_per_s": done.prefill_rate(),
        "decode_tokens_per_s": done.decode_rate(),
    });
    add_fallbacks(&mut report, done.fallbacks);
    if log_probabilities {
        report["log_probabilities"] = done.log_probabilities.iter().map(log_probabilities_of).collect();
    }
    report
}

/// The log-probabilities of one token.
fn log_probabilities_of(of: &LogProbabilities) -> Value {
    let most_probable: Vec<Value> =
        of.most_probable.iter().map(|(id, p)| json!({ "id": id, "log_probability": p })).collect();
    json!({ "id": of.id, "log_probability": of.chosen, "most_probable": most_probable })
}

/// Object that `--best-of` with `--json` prints: the best sequence's, and all of them.
pub(super) fn report_of_several(
    done: &BestOf,
    ranking: &[usize],
    text: &dyn Fn(&[u32]) -> Result<Option<String>>,
) -> Result<Value> {
    let mut sequences = Vec::with_capacity(done.candidates.len());
    for &i in ranking {
        let c = &done.candidates[i];
        sequences.push(json!({
            "seed": c.seed,
            "ids": c.ids,
            "text": text(&c.ids)?,
            "mean_log_probability": c.score(),
        }));
    }
    let best = sequences.first().cloned().unwrap_or_default();
    let mut report = json!({
        "ids": best["ids"],
        "text": best["text"],
        "prefill_tokens_per_s": done.prefill_rate(),
        "decode_tokens_per_s": done.decode_rate(),
        "sequences": sequences,
    });
    add_fallbacks(&mut report, done.fallbacks);
    Ok(report)
}

/// Counts of draft tokens.
pub(super) fn add_draft_tokens(report: &mut Value, did: DraftCounters) {
    let DraftCounters { draft_tokens, accepted, calls, single_token_calls: alone, close_choices: close } =
        did;
    report["speculation"] = json!({
        "draft_tokens": draft_tokens,
        "accepted": accepted,
        "acceptance": did.acceptance(),
        "calls_with_draft_tokens": calls,
        "calls_of_one_token": alone,
        "too_close": close,
    });
}

pub(super) fn line_of_draft_tokens(did: DraftCounters) -> String {
    let share = did.acceptance().map_or(String::new(), |a| format!(" ({:.0} %)", 100.0 * a));
    format!(
        "draft tokens: {} of {} accepted{share}, in {} calls; {} calls of one token, {} choices too close to count",
        did.accepted, did.draft_tokens, did.calls, did.single_token_calls, did.close_choices
    )
}

/// Adds the statistics of big-little decoding.
fn add_fallbacks(report: &mut Value, fallbacks: Option<Fallbacks>) {
    if let Some(f) = fallbacks {
        report["fallback_ratio"] = json!(f.ratio());
    }
}

pub(super) fn rates(done: &Generation) -> String {
    format!(
        "prefill: {} tokens{}, {}; decode: {} tokens, {}{}",
        done.prompt - done.held,
        if done.held > 0 { format!(" after {} that were saved", done.held) } else { String::new() },
        show(done.prefill_rate()),
        done.ids.len(),
        show(done.decode_rate()),
        with_all_experts(done.fallbacks),
    )
}

pub(super) fn rates_of_several(done: &BestOf) -> String {
    let tokens: usize = done.candidates.iter().map(|c| c.ids.len()).sum();
    format!(
        "prefill: {} tokens, {}; decode: {tokens} tokens in {} sequences, {}{}",
        done.prompt,
        show(done.prefill_rate()),
        done.candidates.len(),
        show(done.decode_rate()),
        with_all_experts(done.fallbacks),
    )
}

fn show(rate: Option<f64>) -> String {
    rate.map_or("–".to_owned(), |r| format!("{r:.1} tokens/s"))
}

/// The fallback ratio, if there is one.
fn with_all_experts(fallbacks: Option<Fallbacks>) -> String {
    let ratio = fallbacks.and_then(Fallbacks::ratio);
    ratio.map_or_else(String::new, |r| format!(", {:.1} % of them with all experts", 100.0 * r))
}
