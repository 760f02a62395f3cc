//! Output of `moec inspect` about experts that two units compute in decoding: hot neurons in static graphs,
//! cold ones in CPU kernels.

use moec_base::human;
use moec_ir::plan::{Arg, Builtin, Code, Entry, Layout, Plan};
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
        let hot: Vec<f64> = sets.map(|hot| f64::from(hot.neurons)).collect();
        let cold: BTreeSet<u32> = entry.steps.iter().flat_map(|s| neurons(plan, &s.args)).collect();
        (!hot.is_empty()).then(|| ExpertDivision {
            entry: entry.kind.to_string(),
            layers: hot.len(),
            hot: hot.iter().sum::<f64>() / hot.len() as f64,
            cold_bytes: bytes(plan, &cold),
        })
    };
    plan.entries.iter().filter_map(of).collect()
}

/// Segments of neurons among arguments.
fn neurons(plan: &Plan, args: &[Arg]) -> impl Iterator<Item = u32> {
    args.iter().filter_map(|arg| match arg {
        Arg::Matrices(i) => {
            let segment = plan.segments.get(*i as usize)?;
            matches!(segment.layout, Layout::Neurons { .. }).then_some(*i)
        }
        _ => None,
    })
}

fn bytes(plan: &Plan, segments: &BTreeSet<u32>) -> u64 {
    segments.iter().filter_map(|&i| plan.segments.get(i as usize)).map(|s| s.bytes).sum()
}

/// Bytes of the neurons for decoding, and of the same experts for prompts. Each neuron is stored for both.
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

/// Rows for people; empty if one unit computes the experts of decoding. `codes`: bytes of the graphs'
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
        let [cold, whole] = duplicated_bytes(plan).map(human::bytes);
        let codes =
            codes.map_or_else(String::new, |bytes| format!(" and {} of hot ones", human::bytes(bytes)));
        rows.push(row(
            "held twice",
            format!(
                "{cold} of cold neurons{codes}, for decoding, beside {whole} of the same experts, for prompts"
            ),
        ));
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
