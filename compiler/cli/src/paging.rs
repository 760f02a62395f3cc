//! Output of `moec explain` and `moec inspect` about experts on disk.

use moec_base::human;
use moec_ir::plan::Paging;
use serde_json::{Value, json};

/// First rows of the table: budget and cache.
pub(super) fn rows(p: &Paging) -> Vec<Vec<String>> {
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
        format!(
            "all gates in memory, up and down rows of {neurons} neurons ({frames}),{together} {} threads",
            p.threads
        )
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
        "frames": p.frames,
        "staging_frames": p.staging,
        "block_bytes": p.block_bytes,
        "policy": p.policy,
        "pinned": p.pinned.len(),
        "pinned_bytes": p.frame_bytes.saturating_mul(p.pinned.len() as u64),
    })
}
