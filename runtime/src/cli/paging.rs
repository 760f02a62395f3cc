//! Statistics of experts on disk, for people and programs.

use super::size;
use crate::exec::graphs::LoadCounts;
use crate::offload::paging::Report;
use serde_json::{Value, json};

/// Adds the statistics to the object that `--json` prints.
pub(super) fn add(to: &mut Value, report: &Report) {
    to["memory"] = json!({
        "budget": report.budget,
        "peak": crate::platform::cpu::peak_memory(),
        "frames": report.frame_bytes,
        "pinned": report.pinned_bytes,
        "locked": report.locked,
    });
    to["disk"] = json!({
        "reader": report.reader,
        "bytes": report.disk.bytes,
        "gate_bytes": report.gate_bytes,
        "busy_seconds": report.disk.busy.as_secs_f64(),
        "bytes_per_second": per_second(report),
        "block_bytes": report.block_bytes,
        "reads": report.disk.reads,
        "repeated": report.disk.repeated,
        "checked": report.disk.checked,
        "waited_seconds": report.stalled.as_secs_f64(),
    });
    to["cache"] = json!({
        "policy": report.policy,
        "experts": if report.neurons > 0 { 0 } else { report.frames },
        "neurons": report.frames * report.neurons,
        "pinned": report.pinned,
        "preloaded": report.preloaded,
        "hits": report.hits,
        "misses": report.misses,
        "streamed": report.streamed,
        "read_ahead": report.ahead,
        "predicted": report.predicted,
        "second_pass": {"used": report.second_pass.used, "named": report.second_pass.named},
    });
    let LoadCounts { ahead, waited, freed, bytes, held, peak } = report.loads;
    if bytes > 0 {
        to["cache"]["current_frames"] = json!(report.current_frames);
        to["graphs"] = json!({
            "read_ahead": ahead,
            "waited": waited,
            "freed": freed,
            "bytes": bytes,
            "held": held,
            "peak": peak,
        });
    }
}

/// The statistics in one line.
pub(super) fn line(report: &Report) -> String {
    let uses = report.hits + report.misses;
    let share = if uses > 0 { 100.0 * report.hits as f64 / uses as f64 } else { 0.0 };
    let rate = per_second(report).map_or_else(String::new, |r| format!(" at {:.2} GB/s", r / 1e9));
    let what = match report.neurons {
        0 => "experts".to_owned(),
        1 => "neurons".to_owned(),
        n => format!("groups of {n} neurons"),
    };
    let pinned = match report.pinned {
        0 => String::new(),
        n => format!("; {n} pinned ({})", size(report.pinned_bytes)),
    };
    let start = match report.preloaded {
        0 => String::new(),
        n => format!("; {n} read before they were requested"),
    };
    let gates = if report.gates_on_disk {
        format!(" ({} of them gates)", size(report.gate_bytes))
    } else {
        String::new()
    };
    let graphs = match report.loads {
        LoadCounts { bytes: 0, .. } => String::new(),
        loads => format!(
            "; graphs: {} read, {} artifacts ahead and {} when needed, {} freed",
            size(loads.bytes),
            loads.ahead,
            loads.waited,
            loads.freed
        ),
    };
    format!(
        "disk: {} read{gates}{rate}, waited {:.1} s; {what}: {share:.1} % of {uses} were in memory ({}), {} read ahead, {} of them \
         used{pinned}{start}{}{graphs}; budget {}",
        size(report.disk.bytes),
        report.stalled.as_secs_f64(),
        report.policy,
        report.ahead,
        report.predicted,
        super::assigned::second_pass_text(report.second_pass),
        size(report.budget),
    )
}

fn per_second(report: &Report) -> Option<f64> {
    let seconds = report.disk.busy.as_secs_f64();
    (seconds > 0.0).then(|| report.disk.bytes as f64 / seconds)
}
