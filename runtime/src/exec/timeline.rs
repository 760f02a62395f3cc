//! Timeline of every thread and the disk, for Perfetto (<https://ui.perfetto.dev>).
//!
//! Each thread has a track with its steps, and inside of them the time that it waited for experts. Another
//! track has reads, from the request of an expert to its last byte. Spans past [`MOST`] of a track are
//! dropped.

use serde_json::json;
use std::io::{self, Write};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Most spans of a track.
pub const MOST: usize = 1 << 18;

/// Kind of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// A step of an entry point, by their indices.
    Step {
        /// Entry point.
        entry: u32,
        /// Step.
        step: u32,
    },
    /// Waiting for a part of an expert of a layer.
    Wait {
        /// Layer, counted over those with routed experts.
        layer: u32,
        /// Expert.
        expert: u32,
    },
    /// Reading an expert, or a part of it.
    Read {
        /// Layer.
        layer: u32,
        /// Expert.
        expert: u32,
        /// Whether it was requested before it was needed.
        ahead: bool,
    },
}

/// A span: kind, begin and end since the start.
type Span = (What, Duration, Duration);

/// Tracks of one run.
#[derive(Debug)]
pub struct Timeline {
    start: Instant,
    /// One track for each thread, then the track of reads.
    tracks: Vec<Mutex<Vec<Span>>>,
}

impl Timeline {
    /// A timeline with tracks for `threads` threads.
    pub fn new(threads: usize) -> Self {
        let tracks = (0..=threads).map(|_| Mutex::new(Vec::new())).collect();
        Self { start: Instant::now(), tracks }
    }

    /// Adds a span of a thread from `begin` until now.
    pub fn record(&self, thread: usize, what: What, begin: Instant) {
        self.add(thread, what, begin);
    }

    /// Adds a read that ends now.
    pub fn read(&self, what: What, begin: Instant) {
        self.add(self.tracks.len() - 1, what, begin);
    }

    fn add(&self, track: usize, what: What, begin: Instant) {
        let Some(track) = self.tracks.get(track) else { return };
        let mut spans = track.lock().unwrap_or_else(PoisonError::into_inner);
        if spans.len() < MOST {
            spans.push((what, begin.saturating_duration_since(self.start), self.start.elapsed()));
        }
    }

    /// Writes the spans as Chrome trace events, one per line; `name` returns the name of a step.
    ///
    /// # Errors
    /// Those of the writer.
    pub fn write(&self, out: &mut impl Write, name: &dyn Fn(u32, u32) -> String) -> io::Result<()> {
        let reads = self.tracks.len() - 1;
        let micros = |d: Duration| d.as_nanos() as f64 / 1e3;
        writeln!(out, "{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")?;
        for track in 0..self.tracks.len() {
            let label = if track == reads { "disk".to_owned() } else { format!("thread {track}") };
            let args = json!({ "name": label });
            let comma = if track == 0 { "" } else { ",\n" };
            let event = json!({"ph": "M", "name": "thread_name", "pid": 0, "tid": track, "args": args});
            write!(out, "{comma}{event}")?;
        }
        for (tid, track) in self.tracks.iter().enumerate() {
            for &(what, from, to) in track.lock().unwrap_or_else(PoisonError::into_inner).iter() {
                let title = match what {
                    What::Step { entry, step } => name(entry, step),
                    What::Wait { layer, expert } => format!("wait: layer {layer} expert {expert}"),
                    What::Read { layer, expert, ahead } => {
                        format!("{}layer {layer} expert {expert}", if ahead { "ahead: " } else { "" })
                    }
                };
                let (ts, dur) = (micros(from), micros(to.saturating_sub(from)));
                // Reads overlap each other, so each is an asynchronous pair of events, by expert.
                let event = if tid == reads {
                    let id = from.as_nanos() as u64;
                    let begin = json!({"ph": "b", "cat": "disk", "name": title, "id": id, "pid": 0, "tid": tid, "ts": ts});
                    let end = json!({"ph": "e", "cat": "disk", "name": title, "id": id, "pid": 0, "tid": tid, "ts": ts + dur});
                    format!("{begin},\n{end}")
                } else {
                    json!({"ph": "X", "name": title, "pid": 0, "tid": tid, "ts": ts, "dur": dur}).to_string()
                };
                write!(out, ",\n{event}")?;
            }
        }
        writeln!(out, "\n]}}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tracks_are_trace_events() {
        let t = Timeline::new(2);
        let begin = Instant::now();
        t.record(1, What::Step { entry: 0, step: 7 }, begin);
        t.record(1, What::Wait { layer: 3, expert: 9 }, begin);
        t.read(What::Read { layer: 3, expert: 9, ahead: true }, begin);
        t.record(9, What::Step { entry: 0, step: 0 }, begin);
        let mut bytes = Vec::new();
        t.write(&mut bytes, &|e, s| format!("entry {e} step {s}")).unwrap();
        let value: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
        let events = value["traceEvents"].as_array().unwrap();
        let names: Vec<_> = events.iter().map(|e| e["name"].as_str().unwrap()).collect();
        let read = "ahead: layer 3 expert 9";
        let thread = "thread_name";
        let wait = "wait: layer 3 expert 9";
        assert_eq!(names, [thread, thread, thread, "entry 0 step 7", wait, read, read]);
        assert_eq!(events[3]["tid"], 1);
        assert_eq!((&events[5]["ph"], &events[6]["ph"]), (&json!("b"), &json!("e")));
    }
}
