//! Statistics of the messages between hosts, in words and as JSON.

use super::size;
use crate::exec::traffic::HostTraffic;
use serde_json::{Value, json};

/// Adds the statistics to a report. They are sums since the engine was opened.
pub(super) fn add(to: &mut Value, traffic: &HostTraffic) {
    to["hosts"] = json!({
        "sent_bytes": traffic.sent, "received_bytes": traffic.received, "round_trips": traffic.round_trips,
        "waited_s": traffic.waited.as_secs_f64(),
    });
}

/// The statistics in one line.
pub(super) fn line(traffic: &HostTraffic) -> String {
    format!(
        "hosts: {} sent and {} received in {} round trips; {:.2} s waited for other hosts",
        size(traffic.sent),
        size(traffic.received),
        traffic.round_trips,
        traffic.waited.as_secs_f64()
    )
}
