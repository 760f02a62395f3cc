//! Output of `moec explain` and `moec inspect` about experts on disk.

use moec_base::human;
use moec_ir::plan::{Paging, Plan};
use serde_json::{Value, json};

/// First rows of the table: budget and cache, and those of each other host; none without experts on disk.
pub(super) fn rows(plan: &Plan) -> Vec<Vec<String>> {
    let own = plan.paging.iter().flat_map(|paging| own(plan, paging));
    own.chain(others(plan).map(|(memory, name, p)| {
        let what = format!(
            "{} of {} experts in memory, budget {}: {} resident, {} for the process, {} for experts",
            p.frames,
            on_disk(plan, memory, p),
            human::bytes(p.budget),
            human::bytes(p.resident),
            human::bytes(p.process),
            human::bytes(p.cache_bytes().unwrap_or(u64::MAX)),
        );
        vec![format!("in {name}"), what]
    }))
    .collect()
}

/// Memories of other hosts with experts on disk: index, name, and these.
fn others(plan: &Plan) -> impl Iterator<Item = (u32, &str, &Paging)> {
    let named = |(memory, p)| Some((memory, plan.memories.get(memory as usize)?.name.as_str(), p));
    plan.paged_memories().filter(|&(memory, _)| memory > 0).filter_map(named)
}

/// Experts on the disk of a memory's host.
fn on_disk(plan: &Plan, memory: u32, p: &Paging) -> usize {
    let all: usize = p.layers.iter().map(|l| l.experts as usize).sum();
    all - plan.experts_off_disk(memory).len()
}

/// Rows of the first host.
fn own(plan: &Plan, p: &Paging) -> Vec<Vec<String>> {
    let mut rows = budget(p, on_disk(plan, 0, p));
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

fn budget(p: &Paging, experts: usize) -> Vec<Vec<String>> {
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
fn in_memory(p: &Paging, experts: usize, frames: u64) -> Vec<String> {
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

/// The same as JSON: of the first host, and under `hosts` by memory of the others. Null without experts on disk.
pub(super) fn value(plan: &Plan) -> Value {
    let mut value = plan.paging.as_ref().map_or(Value::Null, of_one);
    for (_, name, paging) in others(plan) {
        value["hosts"][name] = of_one(paging);
    }
    value
}

fn of_one(p: &Paging) -> Value {
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
