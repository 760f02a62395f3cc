//! Statistics of experts that are assigned at run time, in words and as JSON.

use crate::offload::cache::EvictedExpertCounts;
use crate::schedule::dispatch::Assigned;
use serde_json::{Value, json};

/// Adds the statistics to a report. They are sums since the engine was opened.
pub(super) fn add(to: &mut Value, did: &Assigned) {
    let of = |n: [u64; 3]| json!({"hot": n[0], "cpu": n[1], "cold": n[2]});
    let [brought, relaid, moved] = did.moves;
    to["assigned"] = json!({
        "experts": of(did.experts), "rows": of(did.rows), "fetched": did.fetched,
        "moves": {"brought": brought, "relaid": relaid, "moved": moved},
        "predicted": share(did), "expected_s": did.makespan_us * 1e-6,
    });
    if let Some(f) = &did.frames {
        to["assigned"]["frames"] = json!({
            "hits": f.hits, "misses": f.misses, "fetched": f.fetched, "ahead": f.ahead, "predicted": f.predicted,
            "kept": f.kept, "without_frame": f.without_frame, "link_s": f.link_us * 1e-6,
            "second_pass": {"used": f.second_pass.used, "named": f.second_pass.named},
        });
    }
}

/// The statistics in one line.
pub(super) fn line(did: &Assigned) -> String {
    let all = did.experts.iter().sum::<u64>().max(1) as f64;
    let [hot, cpu, cold] = did.experts.map(|n| 100.0 * n as f64 / all);
    if let Some(f) = &did.frames {
        let held = 100.0 * f.hits as f64 / (f.hits + f.misses).max(1) as f64;
        return format!(
            "experts: {hot:.0} % on the unit with cache frames, {cpu:.0} % on the CPU; {held:.0} % of all were in a frame; {} \
             fetched on demand, {} ahead ({} of these used), {} afterwards; {} not cached{}",
            f.fetched,
            f.ahead,
            f.predicted,
            f.kept,
            f.without_frame,
            second_pass_text(f.second_pass)
        );
    }
    let moves: u64 = did.moves.iter().sum();
    format!(
        "experts: {hot:.0} % hot, {cpu:.0} % on the CPU, {cold:.0} % in NDP DIMMs; {moves} moved ahead of a step, {} \
         fetched in one; {:.0} % of the class that was predicted",
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
