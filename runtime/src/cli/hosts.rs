//! Statistics of other hosts, in words and as JSON: messages to them, and their reads from disk.

use super::size;
use crate::exec::engine::Engine;
use crate::exec::traffic::HostReads;
use serde_json::{Value, json};

/// Adds the statistics to a report. They are sums since the engine was opened. Nothing without other hosts.
pub(super) fn add(to: &mut Value, engine: &Engine<'_>) {
    let Some(traffic) = engine.traffic() else { return };
    to["hosts"] = json!({
        "sent_bytes": traffic.sent, "received_bytes": traffic.received, "round_trips": traffic.round_trips,
        "waited_s": traffic.waited.as_secs_f64(),
    });
    let disk = |(unit, reads): (&str, HostReads)| {
        let HostReads { bytes, reads, hits, misses } = reads;
        json!({"unit": unit, "bytes": bytes, "reads": reads, "hits": hits, "misses": misses})
    };
    let disks: Vec<Value> = engine.reads_of_hosts().into_iter().map(disk).collect();
    if !disks.is_empty() {
        to["hosts"]["disks"] = json!(disks);
    }
}

/// The statistics in one line; `None` without other hosts.
pub(super) fn line(engine: &Engine<'_>) -> Option<String> {
    let traffic = engine.traffic()?;
    let disk =
        |(unit, reads): (&str, HostReads)| format!("; {unit} read {} from its disk", size(reads.bytes));
    let disks: String = engine.reads_of_hosts().into_iter().map(disk).collect();
    Some(format!(
        "hosts: {} sent and {} received in {} round trips; {:.2} s waited for other hosts{disks}",
        size(traffic.sent),
        size(traffic.received),
        traffic.round_trips,
        traffic.waited.as_secs_f64()
    ))
}
