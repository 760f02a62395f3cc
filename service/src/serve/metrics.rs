//! Metrics of the server, in the text form that Prometheus reads.

use moec_runtime::exec::overflow::Overflowed;
use moec_runtime::exec::traffic::HostTraffic;
use moec_runtime::serving::scheduler::{Counters, End, Load};
use moec_runtime::{Engine, Memory};
use std::fmt::Write as _;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::Duration;

/// Upper bounds of the buckets of times, in seconds.
const BOUNDS: [f64; 14] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0];

/// Times, counted by buckets.
#[derive(Clone, Copy, Debug, Default)]
struct Histogram {
    /// Values above all bounds are in the last one.
    counts: [u64; BOUNDS.len() + 1],
    sum: f64,
}

impl Histogram {
    fn add(&mut self, time: Duration) {
        let seconds = time.as_secs_f64();
        let bucket = BOUNDS.iter().position(|&bound| seconds <= bound).unwrap_or(BOUNDS.len());
        self.counts[bucket] += 1;
        self.sum += seconds;
    }

    fn write(&self, name: &str, help: &str, out: &mut String) {
        // Writing to a string does not fail.
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} histogram");
        let mut below = 0;
        for (count, bound) in self.counts.iter().zip(BOUNDS) {
            below += count;
            let _ = writeln!(out, "{name}_bucket{{le=\"{bound}\"}} {below}");
        }
        let all: u64 = self.counts.iter().sum();
        let _ =
            writeln!(out, "{name}_bucket{{le=\"+Inf\"}} {all}\n{name}_sum {}\n{name}_count {all}", self.sum);
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    counters: Counters,
    load: Option<Load>,
    experts: u64,
    overflowed: Option<Overflowed>,
    traffic: Option<HostTraffic>,
    refused: u64,
    waited: Histogram,
    first_token: Histogram,
    next_token: Histogram,
    answered: Histogram,
}

/// Statistics that the engine's thread writes and requests read.
#[derive(Debug)]
pub(super) struct Metrics {
    memory: Memory,
    state: Mutex<State>,
}

impl Metrics {
    pub(super) fn new(memory: Memory) -> Self {
        Self { memory, state: Mutex::default() }
    }

    fn with<T>(&self, body: impl FnOnce(&mut State) -> T) -> T {
        // Numbers are integers, whatever their source.
        body(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Publishes the counters of the scheduler and its engine.
    pub(super) fn publish(&self, counters: Counters, load: Load, engine: &Engine<'_>) {
        let (experts, overflowed) = (engine.decoded_experts(), engine.overflowed());
        let traffic = engine.traffic();
        self.with(|s| {
            (s.counters, s.load, s.experts, s.overflowed) = (counters, Some(load), experts, overflowed);
            s.traffic = traffic;
        });
    }

    pub(super) fn refused(&self) {
        self.with(|s| s.refused += 1);
    }

    pub(super) fn waited(&self, time: Duration) {
        self.with(|s| s.waited.add(time));
    }

    pub(super) fn first_token(&self, time: Duration) {
        self.with(|s| s.first_token.add(time));
    }

    pub(super) fn next_token(&self, time: Duration) {
        self.with(|s| s.next_token.add(time));
    }

    pub(super) fn answered(&self, time: Duration) {
        self.with(|s| s.answered.add(time));
    }

    /// The text in Prometheus' format.
    pub(super) fn text(&self) -> String {
        let s = self.with(|s| *s);
        let c = s.counters;
        let load = s.load.unwrap_or(Load { waiting: 0, running: 0, slots: 0, kept: 0 });
        let m = self.memory;
        let rows: [(&str, &str, &str, u64); 21] = [
            ("moec_sequences_waiting", "gauge", "Sequences without a slot.", load.waiting as u64),
            ("moec_sequences_running", "gauge", "Sequences with a slot.", load.running as u64),
            ("moec_slots", "gauge", "Slots of the KV cache.", load.slots as u64),
            ("moec_slots_kept", "gauge", "Free slots that hold text for later.", load.kept as u64),
            ("moec_refused_total", "counter", "Requests that the scheduler refused.", s.refused),
            ("moec_prompt_tokens_total", "counter", "Tokens of prompts that were computed.", c.prompt_tokens),
            (
                "moec_shared_tokens_total",
                "counter",
                "Prompt tokens served from the KV cache.",
                c.shared_tokens,
            ),
            (
                "moec_shared_sequences_total",
                "counter",
                "Sequences whose prompt was in the KV cache in part.",
                c.shared_sequences,
            ),
            (
                "moec_reread_tokens_total",
                "counter",
                "Prompt tokens in the KV cache that were computed again, since no snapshot is at their end.",
                c.reread_tokens,
            ),
            ("moec_tokens_total", "counter", "Tokens that were chosen.", c.tokens),
            ("moec_decode_steps_total", "counter", "Steps of decoding.", c.decodes),
            ("moec_decode_rows_total", "counter", "Rows of these steps, one per sequence.", c.rows),
            (
                "moec_decode_experts_total",
                "counter",
                "Experts that these steps computed with, each once for all rows of a step, summed over layers.",
                s.experts,
            ),
            ("moec_memory_arena_bytes", "gauge", "Intermediate results.", m.arena),
            ("moec_memory_scratch_bytes", "gauge", "Scratch of all threads.", m.scratch),
            ("moec_memory_weight_bytes", "gauge", "Packed weights.", m.weights),
            ("moec_memory_kv_bytes", "gauge", "KV cache when every slot is full.", m.kv),
            (
                "moec_memory_snapshot_bytes",
                "gauge",
                "Of these, snapshots of recurrent states, when all exist.",
                m.snapshots,
            ),
            ("moec_memory_frame_bytes", "gauge", "Cache frames of experts on disk.", m.frames),
            (
                "moec_memory_resident_bytes",
                "gauge",
                "Current memory of the process; 0 if the operating system does not report it.",
                resident().unwrap_or(0),
            ),
            (
                "moec_memory_peak_bytes",
                "gauge",
                "Peak memory of the process; 0 if the operating system does not report it.",
                moec_runtime::platform::cpu::peak_memory().unwrap_or(0),
            ),
        ];
        let mut out = String::new();
        for (name, kind, help, value) in rows {
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}");
        }
        if let Some(o) = s.overflowed {
            let rows: [(&str, &str, u64); 3] = [
                (
                    "moec_expert_rows_total",
                    "Rows that routers gave to experts with capacities.",
                    o.counters.routed,
                ),
                (
                    "moec_expert_rows_dropped_total",
                    "Of these, rows past a capacity that were dropped.",
                    o.counters.pruned,
                ),
                (
                    "moec_expert_rows_spilled_total",
                    "Of these, rows past a capacity that ran on the CPU.",
                    o.counters.spilled,
                ),
            ];
            for (name, help, value) in rows {
                let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} counter\n{name} {value}");
            }
            let name = "moec_expert_rows_past_capacity_expected";
            let help = "Rows past a capacity that the plan predicts for so many rows.";
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} gauge\n{name} {}", o.expected);
        }
        if let Some(t) = s.traffic {
            let rows: [(&str, &str, u64); 3] = [
                ("moec_host_sent_bytes_total", "Bytes that were sent to other hosts.", t.sent),
                ("moec_host_received_bytes_total", "Bytes that came from other hosts.", t.received),
                ("moec_host_round_trips_total", "Messages to other hosts that were answered.", t.round_trips),
            ];
            for (name, help, value) in rows {
                let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} counter\n{name} {value}");
            }
            let (name, time) = ("moec_host_wait_seconds_total", t.waited.as_secs_f64());
            let help = "Time in which the CPU waited for other hosts.";
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} counter\n{name} {time}");
        }
        for (name, help, time) in [
            ("moec_prompt_seconds_total", "Time of calls with prompts.", c.prompt_time),
            ("moec_decode_seconds_total", "Time of steps of decoding.", c.decode_time),
        ] {
            let time = time.as_secs_f64();
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} counter\n{name} {time}");
        }
        let name = "moec_sequences_ended_total";
        let _ = writeln!(out, "# HELP {name} Finished sequences by reason.\n# TYPE {name} counter");
        for (why, count) in End::NAMES.iter().zip(c.ended) {
            let _ = writeln!(out, "{name}{{why=\"{why}\"}} {count}");
        }
        for (times, name, help) in [
            (s.waited, "moec_queue_seconds", "From a request to its slot."),
            (s.first_token, "moec_first_token_seconds", "From a request to its first token."),
            (s.next_token, "moec_next_token_seconds", "From a token to the next one."),
            (s.answered, "moec_answer_seconds", "From a request to its end."),
        ] {
            times.write(name, help, &mut out);
        }
        out
    }
}

/// Current memory of the process, in bytes.
fn resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histogram_buckets_are_cumulative() {
        let mut h = Histogram::default();
        for ms in [1, 3, 300, 90_000] {
            h.add(Duration::from_millis(ms));
        }
        let mut out = String::new();
        h.write("x", "Times.", &mut out);
        for line in [
            "x_bucket{le=\"0.001\"} 1",
            "x_bucket{le=\"0.005\"} 2",
            "x_bucket{le=\"60\"} 3",
            "x_bucket{le=\"+Inf\"} 4",
            "x_sum 90.304",
            "x_count 4",
        ] {
            assert!(out.lines().any(|l| l == line), "{line}\n{out}");
        }
    }
}
