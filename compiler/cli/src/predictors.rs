//! What `moec explain` says of predictors of neurons.

use super::output;
use moec_base::human;
use moec_passes::decisions::{Decisions, PredictorDecision, TriedPredictor};

/// A row for every predictor that was tried, by layer; empty where none was asked for. `layer`: that one alone.
pub(super) fn shown(decisions: &Decisions, layer: Option<u32>) -> String {
    let own: Vec<_> = decisions.predictors.iter().filter(|d| layer.is_none_or(|l| d.layer == l)).collect();
    if own.is_empty() {
        return String::new();
    }
    let head = ["layer", "predictor", "found", "taken", "awake", "a token reads", "it holds", ""];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(own.iter().flat_map(|d| of_layer(d)));
    let counts = own.first().map_or([0, 0], |d| d.rows);
    let measured = decisions.predictors_increase.map_or_else(String::new, |increase| {
        format!("; perplexity {:+.2} % with those of `auto`", 100.0 * increase)
    });
    format!(
        "\npredictors of neurons, fitted to {} rows of each layer and counted on {} others: of who is awake, found; of all, taken to be \
         awake{measured}\n{}",
        counts[0],
        counts[1],
        output::table(&rows)
    )
}

fn of_layer(d: &PredictorDecision) -> Vec<Vec<String>> {
    let percent = |x: f64| format!("{:.1} %", 100.0 * x);
    let row = |kind: &str, found: String, taken: String, bytes: u64, held: String| {
        let chosen = if d.chosen == kind { d.why.clone() } else { String::new() };
        let (layer, awake, bytes) = (d.layer.to_string(), percent(d.awake), human::bytes(bytes));
        vec![layer, kind.to_owned(), found, taken, awake, bytes, held, chosen]
    };
    let tried = |t: &TriedPredictor| {
        row(&t.kind, percent(t.recall), percent(t.predicted), t.bytes, human::bytes(t.held))
    };
    let off = row("off", percent(1.0), percent(d.awake), d.exact_bytes, String::new());
    std::iter::once(off).chain(d.tried.iter().map(tried)).collect()
}
