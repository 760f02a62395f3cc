//! Tables of a profile's loads: quantiles per chunk, capacities, attention outputs, experts that are chosen
//! together, and experts with too few tokens.
#![expect(clippy::cast_possible_truncation, reason = "figures for readers, and indices of a plan")]

use super::output;
use moec_base::{Error, Result};
use moec_ir::placement::CAPACITY_ALIGN;
use moec_profile::importance::ENOUGH;
use moec_profile::loads::{Account, LayerLoads, Loads, loads};
use moec_profile::{Profile, Routing};
use serde_json::{Value, json};

/// Shares of the chunks whose loads are shown.
const QUANTILES: [f64; 4] = [0.5, 0.9, 0.99, 1.0];
/// Capacities that are shown in a terminal, at most.
const CAPACITIES: usize = 12;
/// Numbers of experts that are compared by default (NPUMoE, §5.8).
const USUAL: [u32; 2] = [4, 8];
/// Pairs of experts that are shown per layer.
const PAIRS: usize = 3;

/// Loads at the profile's own chunk size; none where it has no chunks.
pub(super) fn profile_loads(profile: &Profile) -> Option<Loads> {
    loads(profile, profile.trace.chunk).ok()
}

/// The load that a share `q` of all (chunk, expert) pairs does not exceed.
fn quantile(layer: &LayerLoads, q: f64) -> u32 {
    let mut all: Vec<u32> = layer.samples.iter().flatten().copied().collect();
    all.sort_unstable();
    let rank = (q * all.len() as f64).ceil() as usize;
    all.get(rank.saturating_sub(1)).copied().unwrap_or(0)
}

/// Mean over the chunks of the busiest expert's load over the mean load.
pub(super) fn chunk_imbalance(layer: &LayerLoads) -> f64 {
    let ratio = |s: &Vec<u32>| {
        let (max, sum) = (s.iter().copied().max().unwrap_or(0), s.iter().sum::<u32>());
        f64::from(max) * s.len() as f64 / f64::from(sum.max(1))
    };
    layer.samples.iter().map(ratio).sum::<f64>() / layer.samples.len().max(1) as f64
}

/// Capacities of interest: multiples of the alignment up to the largest load, `most` of them at most.
pub(super) fn capacities(loads: &Loads, most: usize) -> Vec<u32> {
    let largest = loads.layers.iter().flat_map(|l| l.samples.iter().flatten()).copied().max().unwrap_or(0);
    let steps = largest.div_ceil(CAPACITY_ALIGN).max(1);
    let stride = steps.div_ceil(most as u32).max(1);
    (1..=steps.div_ceil(stride)).map(|i| i * stride * CAPACITY_ALIGN).collect()
}

/// Account of a layer where every expert has the same capacity.
pub(super) fn uniform(layer: &LayerLoads, capacity: u32) -> Account {
    layer.account(&|_| Some(capacity), &|e| e)
}

/// The tables.
pub(super) fn tables(profile: &Profile) -> String {
    let mut text = String::new();
    let mut add = |head: &[&str], rows: Vec<Vec<String>>| {
        if !rows.is_empty() {
            let head: Vec<String> = head.iter().map(|h| (*h).to_owned()).collect();
            let all: Vec<_> = std::iter::once(head).chain(rows).collect();
            text.push('\n');
            text += &output::table(&all);
        }
    };
    if let Some(loads) = profile_loads(profile).filter(|loads| !loads.layers.is_empty()) {
        let head = format!("tokens per expert and chunk of {}", loads.chunk);
        let head = ["layer", head.as_str(), "median", "90 %", "99 %", "largest", "busiest / mean in a chunk"];
        let row = |l: &LayerLoads| {
            let mean = f64::from(loads.chunk) * f64::from(l.k) / l.experts().max(1) as f64;
            let mut row = vec![l.layer.to_string(), format!("{mean:.1}")];
            row.extend(QUANTILES.iter().map(|&q| quantile(l, q).to_string()));
            row.push(format!("{:.2}", chunk_imbalance(l)));
            row
        };
        add(&head, loads.layers.iter().map(row).collect());
        let row = |&c: &u32| {
            let sum = loads.layers.iter().map(|l| uniform(l, c)).fold(Account::default(), Account::and);
            let percent = |x: f64| format!("{:.2} %", x * 100.0);
            vec![c.to_string(), percent(sum.overflow_rate()), percent(sum.padding_rate())]
        };
        let head = ["capacity of all experts", "overflow", "padding"];
        add(&head, capacities(&loads, CAPACITIES).iter().map(row).collect());
    }
    let row = |s: &moec_profile::Saliency| {
        let norm = |x: f64| format!("{x:.4}");
        let quantiles = [0.1, 0.5, 0.9].map(|q| norm(s.quantile(q)));
        [vec![s.layer.to_string(), norm(s.mean())], quantiles.to_vec()].concat()
    };
    let head = ["layer", "norm of attention output, mean", "10 %", "median", "90 %"];
    add(&head, profile.saliency.iter().filter(|s| s.tokens() > 0).map(row).collect());
    let row = |l: &Routing| {
        let pairs = l.closest(PAIRS);
        let share = |n: u64| 100.0 * n as f64 / l.tokens.max(1) as f64;
        let pairs: Vec<String> =
            pairs.iter().map(|&(a, b, n)| format!("{a}+{b} ({:.1} %)", share(n))).collect();
        vec![l.layer.to_string(), pairs.join(", ")]
    };
    let with_pairs = profile.layers.iter().filter(|l| l.k > 1 && l.tokens > 0);
    add(&["layer", "chosen together most often (share of tokens)"], with_pairs.map(row).collect());
    let head = format!("experts with fewer than {ENOUGH} tokens");
    add(&["layer", &head], few(profile).into_iter().map(|(l, e)| vec![l.to_string(), list(&e)]).collect());
    text
}

/// Experts with too few tokens to judge, by layer.
pub(super) fn few(profile: &Profile) -> Vec<(u32, Vec<usize>)> {
    profile.layers.iter().map(|l| (l.layer, l.below(ENOUGH))).filter(|(_, e)| !e.is_empty()).collect()
}

pub(super) fn list(experts: &[usize]) -> String {
    experts.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// The same as JSON, by layer.
pub(super) fn json(profile: &Profile) -> Value {
    let of = profile_loads(profile);
    let layer = |l: &LayerLoads| {
        let quantiles: serde_json::Map<_, _> =
            QUANTILES.iter().map(|&q| (q.to_string(), json!(quantile(l, q)))).collect();
        json!({"layer": l.layer, "quantiles": quantiles, "chunk_imbalance": chunk_imbalance(l)})
    };
    json!({
        "chunk": profile.trace.chunk,
        "chunks": profile.trace.chunks(),
        "layers": of.iter().flat_map(|l| &l.layers).map(layer).collect::<Vec<_>>(),
        "capacities": of.iter().flat_map(|loads| capacities(loads, CAPACITIES).into_iter().map(|c| {
            let sum = loads.layers.iter().map(|l| uniform(l, c)).fold(Account::default(), Account::and);
            json!({"capacity": c, "overflow": sum.overflow_rate(), "padding": sum.padding_rate()})
        })).collect::<Vec<_>>(),
        "attention_output_norms": profile.saliency.iter().map(|s| json!({
            "layer": s.layer, "tokens": s.tokens(), "mean": s.mean(),
            "quantiles": {"0.1": s.quantile(0.1), "0.5": s.quantile(0.5), "0.9": s.quantile(0.9)},
        })).collect::<Vec<_>>(),
        "chosen_together": profile.layers.iter().map(|l| json!({
            "layer": l.layer,
            "pairs": l.closest(PAIRS).iter().map(|&(a, b, n)| json!({"experts": [a, b], "tokens": n}))
                .collect::<Vec<_>>(),
        })).collect::<Vec<_>>(),
        "too_few": few(profile).iter().map(|(l, e)| json!({"layer": l, "experts": e})).collect::<Vec<_>>(),
    })
}

/// Overlap@K of two profiles, as `moec inspect A --against B` shows it.
///
/// # Errors
/// Fails if the profiles cannot be compared, or K is out of range.
pub(super) fn overlap(a: &Profile, b: &Profile, tops: &[u32], as_json: bool) -> Result<()> {
    let experts = a.layers.iter().map(|l| l.chosen.len()).min().unwrap_or(0);
    if experts == 0 {
        return Err(Error::input("the model has no routed experts, so there is nothing to compare"));
    }
    if let Some(k) = tops.iter().find(|&&k| k as usize > experts) {
        return Err(Error::usage(format!("`--top` is {k}, but a layer has {experts} experts"))
            .hint(format!("give a number from 1 to {experts}")));
    }
    let usual = USUAL.map(|k| k.min(experts as u32));
    let mut tops = if tops.is_empty() { usual.to_vec() } else { tops.to_vec() };
    tops.dedup();
    let all: Vec<_> =
        tops.iter().map(|&k| moec_profile::overlap::overlap(a, b, k as usize)).collect::<Result<_>>()?;
    if as_json {
        return output::json(&json!({"kind": "overlap", "overlap": all.iter().map(|o| json!({
            "k": o.k, "median": o.median, "mean": o.mean,
            "layers": o.layers.iter().map(|(l, s)| json!({"layer": l, "share": s})).collect::<Vec<_>>(),
        })).collect::<Vec<_>>()}));
    }
    let percent = |x: f64| format!("{:.1} %", x * 100.0);
    let row = |name: String, of: &dyn Fn(&moec_profile::overlap::Overlap) -> f64| {
        std::iter::once(name).chain(all.iter().map(|o| percent(of(o)))).collect::<Vec<_>>()
    };
    let head = std::iter::once("layer".to_owned()).chain(all.iter().map(|o| format!("Overlap@{}", o.k)));
    let mut rows = vec![head.collect::<Vec<_>>()];
    for (i, layer) in a.layers.iter().enumerate() {
        rows.push(row(layer.layer.to_string(), &|o| o.layers.get(i).map_or(0.0, |l| l.1)));
    }
    rows.push(row("median".to_owned(), &|o| o.median));
    rows.push(row("mean".to_owned(), &|o| o.mean));
    output::data(&output::table(&rows))
}
