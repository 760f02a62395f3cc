//! Statistics of experts that are assigned at run time, in words and as JSON.

use crate::offload::cache::EvictedExpertCounts;
use crate::schedule::dispatch::Assigned;
use crate::schedule::warm_up::{CostCheck, MeasuredUnit};
use serde_json::{Value, json};

/// Adds the statistics to a report. They are sums since the engine was opened.
pub(super) fn add(to: &mut Value, did: &Assigned) {
    let of = |n: [u64; 3]| json!({"hot": n[0], "cpu": n[1], "cold": n[2]});
    let ([brought, relaid, moved], [late, awaited]) = (did.moves, did.late_moves);
    to["assigned"] = json!({
        "experts": of(did.experts), "rows": of(did.rows), "fetched": did.fetched,
        "moves": {"brought": brought, "relaid": relaid, "moved": moved, "late": late, "awaited": awaited},
        "streamed_steps": did.streamed,
        "predicted": share(did), "expected_s": did.makespan_us * 1e-6,
    });
    if let Some(f) = &did.frames {
        to["assigned"]["frames"] = json!({
            "hits": f.hits, "misses": f.misses, "fetched": f.fetched, "ahead": f.ahead, "predicted": f.predicted,
            "by_layers_ahead": f.by_depth.map(|[ahead, used]| json!({"transferred": ahead, "used": used})),
            "kept": f.kept, "without_frame": f.without_frame, "link_s": f.link_us * 1e-6,
            "second_pass": {"used": f.second_pass.used, "named": f.second_pass.named},
        });
        let costs = did.costs.iter().flatten().map(|of| {
            json!({
                "unit": of.unit.name(), "tokens": of.tokens, "planned_us": of.planned_us,
                "measured_us": of.measured_us, "factor": of.factor,
            })
        });
        to["assigned"]["costs"] = costs.collect();
    }
}

/// Costs that were measured, beside the plan's; empty if none was.
fn costs_text(did: &Assigned) -> String {
    let each = |CostCheck { unit, tokens, planned_us, measured_us, factor }: &CostCheck| {
        let what = match unit {
            MeasuredUnit::Link => "a transfer".to_owned(),
            MeasuredUnit::Gpu => format!("{tokens}+ tokens on the GPU"),
            MeasuredUnit::Cpu => format!("{tokens}+ tokens on the CPU"),
        };
        format!("{what} {measured_us:.1} (planned {planned_us:.1}, × {factor:.2})")
    };
    let all: Vec<String> = did.costs.iter().flatten().map(each).collect();
    if all.is_empty() { String::new() } else { format!("; measured µs of an expert: {}", all.join(", ")) }
}

/// The statistics in one line.
pub(super) fn line(did: &Assigned) -> String {
    let all = did.experts.iter().sum::<u64>().max(1) as f64;
    let [hot, cpu, cold] = did.experts.map(|n| 100.0 * n as f64 / all);
    if let Some(f) = &did.frames {
        let held = 100.0 * f.hits as f64 / (f.hits + f.misses).max(1) as f64;
        return format!(
            "experts: {hot:.0} % on the unit with cache frames, {cpu:.0} % on the CPU; {held:.0} % of all were in a frame; {} \
             fetched on demand, {} ahead ({} of these used), {} afterwards; {} not cached{}{}",
            f.fetched,
            f.ahead,
            f.predicted,
            f.kept,
            f.without_frame,
            second_pass_text(f.second_pass),
            costs_text(did)
        );
    }
    let (moves, [late, awaited]) = (did.moves.iter().sum::<u64>(), did.late_moves);
    format!(
        "experts: {hot:.0} % hot, {cpu:.0} % on the CPU, {cold:.0} % in NDP DIMMs; {moves} moved ahead of a step, {late} \
         of these past its window, {awaited} waited for; {} fetched in a step; {:.0} % of the class that was predicted",
        did.fetched,
        100.0 * share(did)
    )
}

/// Part of the line for tokens that were decoded again; empty if none was.
pub(super) fn second_pass_text(EvictedExpertCounts { used, named }: EvictedExpertCounts) -> String {
    match used {
        0 => String::new(),
        _ => format!(
            "; {:.0} % of {used} experts of tokens that were decoded again were named by the first pass",
            100.0 * named as f64 / used as f64
        ),
    }
}

/// Share of the examined experts whose class was predicted.
fn share(did: &Assigned) -> f64 {
    let [right, all] = did.predicted;
    right as f64 / all.max(1) as f64
}
