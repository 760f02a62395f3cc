//! A timeline as Chrome's trace events, which <https://ui.perfetto.dev> and `chrome://tracing` show.

use moec_backend::StreamRun;
use moec_costs::timeline::Timeline;
use serde_json::{Value, json};

/// The trace: one process per timeline, one thread per queue, one complete event per task, times in
/// microseconds.
pub fn trace(timelines: &[(&str, &Timeline)]) -> Value {
    let mut events = Vec::new();
    for (process, (name, timeline)) in timelines.iter().enumerate() {
        let pid = process + 1;
        events.push(json!({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}));
        for (queue, name) in timeline.queues.iter().enumerate() {
            let tid = queue + 1;
            let args = json!({"name": name});
            events.push(json!({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": args}));
        }
        for (task, span) in timeline.tasks.iter().zip(&timeline.spans) {
            let mut args = json!({"call": task.call, "layer": task.layer, "rows": task.rows});
            if let (Some(index), Value::Object(args)) = (task.index, &mut args) {
                args.insert("index".into(), json!(index));
            }
            events.push(json!({
                "ph": "X", "name": task.kind.name(), "cat": task.part.name(), "pid": pid,
                "tid": task.queue + 1, "ts": nanos(span.start), "dur": nanos(span.end - span.start),
                "args": args,
            }));
        }
    }
    json!({"displayTimeUnit": "ms", "traceEvents": events})
}

/// The trace of a bundle whose experts are assigned while it runs: a thread for each unit, DIMM and link.
pub fn assigned(name: &str, run: &StreamRun) -> Value {
    let mut events = vec![json!({"ph": "M", "name": "process_name", "pid": 1, "args": {"name": name}})];
    for (queue, name) in run.queues.iter().enumerate() {
        let args = json!({"name": name});
        events.push(json!({"ph": "M", "name": "thread_name", "pid": 1, "tid": queue + 1, "args": args}));
        let args = json!({"sort_index": queue});
        events
            .push(json!({"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": queue + 1, "args": args}));
    }
    events.extend(run.events.iter().map(|e| {
        json!({
            "ph": "X", "name": e.name, "pid": 1, "tid": e.queue + 1, "ts": nanos(e.begin_us),
            "dur": nanos(e.end_us - e.begin_us),
        })
    }));
    json!({"displayTimeUnit": "ms", "traceEvents": events})
}

/// Microseconds to the nanosecond.
fn nanos(us: f64) -> f64 {
    (us * 1e3).round() / 1e3
}
