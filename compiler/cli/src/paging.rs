//! Output of `moec explain` and `moec inspect` about experts on disk.

use moec_base::human;
use moec_ir::plan::{Paging, Plan};
use serde_json::{Value, json};

/// First rows of the table: budget and cache; none without experts on disk.
pub(super) fn rows(plan: &Plan) -> Vec<Vec<String>> {
    let Some(p) = &plan.paging else { return Vec::new() };
    let mut rows = budget(p);
    let of = |(entry, r): (&moec_ir::plan::Entry, &moec_ir::plan::Regions)| {
        let frames = u64::from(r.frames).saturating_mul(p.frame_bytes);
        format!("{}: {} of graphs, {} of experts", entry.kind, human::bytes(r.graphs), human::bytes(frames))
    };
    if !p.regions.is_empty() {
        let all: Vec<String> = plan.entries.iter().zip(&p.regions).map(of).collect();
        rows.push(vec!["regions".to_owned(), all.join("; ")]);
    }
    rows
}

fn budget(p: &Paging) -> Vec<Vec<String>> {
    let experts: u32 = p.layers.iter().map(|l| l.experts).sum();
    let frames = u64::from(p.frames) * p.frame_bytes;
    let row = |name: &str, value: String| vec![name.to_owned(), value];
    let mut rows = vec![
        row(
            "budget",
            format!(
                "{}: {} resident, {} for the process, {} for experts",
                human::bytes(p.budget),
                human::bytes(p.resident),
                human::bytes(p.process),
                human::bytes(p.cache_bytes().unwrap_or(u64::MAX)),
            ),
        ),
        in_memory(p, experts, frames),
        row("reads", format!("up to {} each", human::bytes(p.block_bytes.into()))),
        row("policy", p.policy.clone()),
    ];
    if p.by_neurons() {
        rows.retain(|row| row[0] != "reads");
    }
    if !p.pinned.is_empty() {
        let bytes = p.frame_bytes.saturating_mul(p.pinned.len() as u64);
        let what =
            format!("{} of these experts ({}), read at the start", p.pinned.len(), human::bytes(bytes));
        rows.push(row("pinned", what));
    }
    rows
}

/// Experts in memory.
fn in_memory(p: &Paging, experts: u32, frames: u64) -> Vec<String> {
    let what = if p.by_neurons() {
        let (frames, neurons) = (human::bytes(frames), u64::from(p.frames) * u64::from(p.neurons));
        let together = match p.neurons {
            1 => String::new(),
            n => format!(" {n} at a time,"),
        };
        let what = if p.gates_on_disk() {
            "gates read where predictors name them, gates, up and down"
        } else {
            "all gates in memory, up and down"
        };
        format!("{what} rows of {neurons} neurons ({frames}),{together} {} threads", p.threads)
    } else {
        format!(
            "{} of {experts} in memory ({}), {} staging frames, {} threads",
            p.frames,
            human::bytes(frames),
            p.staging,
            p.threads
        )
    };
    vec!["experts".to_owned(), what]
}

/// The same as JSON.
pub(super) fn value(p: &Paging) -> Value {
    json!({
        "budget_bytes": p.budget,
        "resident_bytes": p.resident,
        "process_bytes": p.process,
        "peak_bytes": p.peak(),
        "threads": p.threads,
        "frame_bytes": p.frame_bytes,
        "neurons_per_frame": p.neurons,
        "gates_on_disk": p.gates_on_disk(),
        "frames": p.frames,
        "staging_frames": p.staging,
        "regions": p.regions.iter().map(|r| {
            json!({ "graph_bytes": r.graphs, "frames": r.frames })
        }).collect::<Vec<_>>(),
        "block_bytes": p.block_bytes,
        "policy": p.policy,
        "pinned": p.pinned.len(),
        "pinned_bytes": p.frame_bytes.saturating_mul(p.pinned.len() as u64),
    })
}
