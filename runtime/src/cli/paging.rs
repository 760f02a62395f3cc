//! What experts on flash did and need, for people and programs.

use super::size;
use crate::paging::Report;
use serde_json::{Value, json};

/// What was done, as `--json` gives it.
pub(super) fn value(report: &Report, tokens: usize) -> Value {
    json!({
        "budget_bytes": report.budget,
        "peak_bytes": crate::cpu::peak_memory(),
        "reader": report.reader,
        "policy": report.policy,
        "frame_bytes": report.frame_bytes,
        "frames": report.frames,
        "hits": report.hits,
        "misses": report.misses,
        "streamed": report.streamed,
        "read_ahead": report.ahead,
        "foreseen": report.foreseen,
        "stalled_seconds": report.stalled.as_secs_f64(),
        "flash_bytes": report.flash.bytes,
        "flash_busy_seconds": report.flash.busy.as_secs_f64(),
        "flash_bytes_per_second": per_second(report),
        "flash_bytes_per_token": report.flash.bytes.checked_div(tokens as u64),
        "reads": report.flash.reads,
        "repeated_reads": report.flash.repeated,
        "checked_reads": report.flash.checked,
    })
}

/// One line of what was done.
pub(super) fn line(report: &Report) -> String {
    let uses = report.hits + report.misses;
    let share = if uses > 0 { 100.0 * report.hits as f64 / uses as f64 } else { 0.0 };
    let rate = per_second(report).map_or_else(String::new, |r| format!(" at {:.2} GB/s", r / 1e9));
    format!(
        "flash: {} read{rate}, waited {:.1} s; experts: {share:.1} % of {uses} were in memory ({}), {} read ahead, {} of them used; budget {}",
        size(report.flash.bytes),
        report.stalled.as_secs_f64(),
        report.policy,
        report.ahead,
        report.foreseen,
        size(report.budget),
    )
}

fn per_second(report: &Report) -> Option<f64> {
    let seconds = report.flash.busy.as_secs_f64();
    (seconds > 0.0).then(|| report.flash.bytes as f64 / seconds)
}
