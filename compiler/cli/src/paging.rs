//! What `moec explain` and `moec inspect` say of experts on flash.

use super::output;
use moec_base::human;
use moec_ir::plan::Paging;
use moec_passes::decisions::CacheDecision;
use serde_json::{Value, json};

/// Policies that a table shows, the best first.
const SHOWN: usize = 8;

/// Rows of the table in front: budget and cache.
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
        held(p, experts, frames),
        row("reads", format!("of up to {}", human::bytes(p.block_bytes.into()))),
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

/// What memory holds of experts.
fn held(p: &Paging, experts: u32, frames: u64) -> Vec<String> {
    let what = if p.by_neurons() {
        let (frames, neurons) = (human::bytes(frames), u64::from(p.frames) * u64::from(p.neurons));
        let together = match p.neurons {
            1 => String::new(),
            n => format!(" {n} at a time,"),
        };
        format!(
            "all gates in memory, up and down of {neurons} neurons ({frames}),{together} {} threads",
            p.threads
        )
    } else {
        format!(
            "{} of {experts} in memory ({}), {} frames for others, {} threads",
            p.frames,
            human::bytes(frames),
            p.spare,
            p.threads
        )
    };
    vec!["experts".to_owned(), what]
}

/// What the replays said: the best rows, and the one that was taken.
pub(super) fn replays(c: &CacheDecision) -> String {
    let percent = |x: f64| format!("{:.1} %", 100.0 * x);
    let name = |policy: &str, share: u8| match share {
        0 => policy.to_owned(),
        share => format!("{policy}, {share} % pinned"),
    };
    let pins = c.pins.iter().map(|(policy, share, rate)| (name(policy, *share), *rate));
    let mut sorted: Vec<_> = c.policies.iter().cloned().chain(pins).collect();
    sorted.sort_by(|a, b| b.1.total_cmp(&a.1));
    let chosen = name(&c.chosen, c.pinned);
    let shown = sorted.iter().enumerate().filter(|(i, row)| *i < SHOWN || row.0 == chosen);
    let mut rows = vec![vec!["policy".to_owned(), "hit rate".to_owned()]];
    rows.extend(shown.map(|(_, (name, rate))| vec![name.clone(), percent(*rate)]));
    rows.push(vec!["Belady (bound)".to_owned(), percent(c.bound)]);
    let why = if c.beats_lru {
        "gains on LRU on text that it was not chosen on"
    } else {
        "nothing gains enough on LRU on text that it was not chosen on"
    };
    let without = c.held_out_unpinned.map(percent).unwrap_or_default();
    let pinned = match (c.pinned, c.pins.is_empty()) {
        (0, true) => "nothing was asked to be pinned".to_owned(),
        (0, false) => format!("nothing is pinned, which gains too little on {without} there"),
        (share, _) => {
            format!("{share} % of the cache is pinned to the hottest experts ({without} there without)")
        }
    };
    format!(
        "\ncache of experts: `{}`, which {why} ({} against {}); {pinned}; {} settings were replayed, the best are\n{}",
        c.chosen,
        percent(c.held_out[0]),
        percent(c.held_out[1]),
        sorted.len(),
        output::table(&rows)
    )
}

/// The same for programs.
pub(super) fn value(p: &Paging, replays: Option<&CacheDecision>) -> Value {
    json!({
        "budget_bytes": p.budget,
        "resident_bytes": p.resident,
        "process_bytes": p.process,
        "peak_bytes": p.peak(),
        "threads": p.threads,
        "frame_bytes": p.frame_bytes,
        "neurons_per_frame": p.neurons,
        "frames": p.frames,
        "spare_frames": p.spare,
        "block_bytes": p.block_bytes,
        "policy": p.policy,
        "pinned": p.pinned.len(),
        "pinned_bytes": p.frame_bytes.saturating_mul(p.pinned.len() as u64),
        "replays": replays,
    })
}
