//! Output of `moec inspect` about experts that two units compute in decoding: hot neurons in static graphs,
//! cold ones in CPU kernels.

use moec_base::human;
use moec_ir::plan::{Arg, Builtin, Code, Entry, Layout, Paging, Plan};
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// Hot and cold neurons of an entry point's experts.
struct ExpertDivision {
    entry: String,
    /// Layers.
    layers: usize,
    /// Mean of the hot neurons of an expert.
    hot: f64,
    /// Bytes of the cold ones.
    cold_bytes: u64,
}

/// Entry points with hot neurons.
fn divided(plan: &Plan) -> Vec<ExpertDivision> {
    let of = |entry: &Entry| {
        let sets = entry.steps.iter().filter_map(|s| match s.code {
            Code::Builtin(Builtin::Experts { set, .. }) => plan.expert_sets.get(set as usize)?.hot,
            _ => None,
        });
        let hot: Vec<u32> = sets.collect();
        let cold: BTreeSet<u32> = entry.steps.iter().flat_map(|s| neurons(plan, &s.args)).collect();
        (!hot.is_empty()).then(|| {
            let (layers, all) = (hot.len(), bytes(plan, &cold));
            let hot: u64 = hot.into_iter().map(u64::from).sum();
            // On disk are all neurons of an expert, in memory the cold ones of a batch.
            let on_disk = plan.paging.as_ref().is_some_and(Paging::by_neurons);
            let width =
                cold.iter().find_map(|&i| Some(u64::from(plan.segments.get(i as usize)?.extents().1)));
            let neurons = width.filter(|_| on_disk).unwrap_or(0) * layers as u64;
            let hot_bytes = all.saturating_mul(hot).checked_div(neurons).unwrap_or(0);
            ExpertDivision {
                entry: entry.kind.to_string(),
                layers,
                hot: hot as f64 / layers as f64,
                cold_bytes: all.saturating_sub(hot_bytes),
            }
        })
    };
    plan.entries.iter().filter_map(of).collect()
}

/// Segments of neurons among arguments.
fn neurons(plan: &Plan, args: &[Arg]) -> impl Iterator<Item = u32> {
    args.iter().filter_map(|arg| match arg {
        Arg::Matrices(i) => {
            let segment = plan.segments.get(*i as usize)?;
            matches!(segment.layout, Layout::Neurons { .. } | Layout::Gates | Layout::UpDown).then_some(*i)
        }
        _ => None,
    })
}

fn bytes(plan: &Plan, segments: &BTreeSet<u32>) -> u64 {
    segments.iter().filter_map(|&i| plan.segments.get(i as usize)).map(|s| s.bytes).sum()
}

/// Bytes of the neurons for decoding, and of the same experts for prompts. Each neuron is stored for both; on
/// disk both share the neurons, and the second number is 0.
fn duplicated_bytes(plan: &Plan) -> [u64; 2] {
    let (mut cold, mut whole) = (BTreeSet::new(), BTreeSet::new());
    for step in plan.entries.iter().flat_map(|e| &e.steps) {
        let own: Vec<u32> = neurons(plan, &step.args).collect();
        let matrices = step.args.iter().filter_map(|arg| match arg {
            Arg::Matrices(i) => Some(*i),
            _ => None,
        });
        whole.extend(matrices.filter(|i| !own.contains(i)));
        cold.extend(own);
    }
    [bytes(plan, &cold), bytes(plan, &whole)]
}

/// Rows of a table; empty if one unit computes the experts of decoding. `codes`: bytes of the graphs'
/// weights, if known.
pub(super) fn rows(plan: &Plan, codes: Option<u64>) -> Vec<Vec<String>> {
    let row = |name: &str, value: String| vec![name.to_owned(), value];
    let all = divided(plan);
    let mut rows: Vec<_> = all
        .iter()
        .map(|d| {
            let (layers, cold) = (d.layers, human::bytes(d.cold_bytes));
            row(
                "hot neurons",
                format!(
                    "{}: {:.1} of each expert of {layers} layers are graphs; the others are {cold}",
                    d.entry, d.hot
                ),
            )
        })
        .collect();
    if !rows.is_empty() {
        let [cold, whole] = duplicated_bytes(plan);
        let shared = whole == 0;
        let [cold, whole] = [cold, whole].map(human::bytes);
        let codes = codes.map(human::bytes);
        let text = if shared {
            let codes = codes.map_or_else(|| "hot neurons".to_owned(), |c| format!("{c} of hot neurons"));
            format!("{codes}, in graphs, beside {cold} of all neurons, which decoding and prompts share")
        } else {
            let codes = codes.map_or_else(String::new, |c| format!(" and {c} of hot ones"));
            format!(
                "{cold} of cold neurons{codes}, for decoding, beside {whole} of the same experts, for prompts"
            )
        };
        rows.push(row("held twice", text));
    }
    rows
}

/// The same as JSON; `None` if one unit computes the experts of decoding.
pub(super) fn value(plan: &Plan, codes: Option<u64>) -> Option<Value> {
    let all = divided(plan);
    let [cold, whole] = duplicated_bytes(plan);
    let entries: Vec<Value> = all
        .iter()
        .map(|d| json!({"entry": d.entry, "layers": d.layers, "hot": d.hot, "cold_bytes": d.cold_bytes}))
        .collect();
    (!entries.is_empty())
        .then(|| json!({"entries": entries, "cold_bytes": cold, "codes": codes, "prompt_bytes": whole}))
}
