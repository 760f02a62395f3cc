//! Memory of the server: watched all the while, and compared with its limits.

use crate::Args;
use moec_testing::server::memory;
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Between two looks.
const PAUSE: Duration = Duration::from_millis(100);
/// Memory of the server in addition to that in `run info`, as docs/serve.md says: the program, the tokenizer,
/// and the messages of 64 clients.
const OWN: u64 = 48 << 20;
/// Allowed growth from the first quarter to the last: memory that allocators keep for threads that come and
/// go.
const GROWTH: u64 = 4 << 20;

/// Looks at a process until it is stopped.
pub(crate) struct Watch {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<u64>>,
}

impl Watch {
    pub(crate) fn start(process: u32) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let mut seen = Vec::new();
            while !stopped.load(Ordering::Relaxed) {
                seen.extend(memory(process, "VmRSS:"));
                thread::sleep(PAUSE);
            }
            seen
        });
        Self { stop, thread }
    }

    /// Observed sizes, in bytes.
    pub(crate) fn stop(self) -> Vec<u64> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap_or_default()
    }
}

/// Bytes of a run, from `run info`.
pub(crate) fn promised(args: &Args) -> Result<u64, String> {
    let out = std::process::Command::new(&args.run).args(["info", "--json"]).output();
    let out = out.map_err(|e| e.to_string())?;
    let info: Value = serde_json::from_slice(&out.stdout).map_err(|e| format!("`run info`: {e}"))?;
    let of = |name: &str| info["memory"][name].as_u64().ok_or_else(|| format!("`run info` has no {name}"));
    // Two threads, as in `Args::subcommand`.
    Ok(of("arena_bytes")? + 2 * of("scratch_bytes_per_thread")? + of("weight_bytes")? + of("kv_bytes")?)
}

/// Compares the observed memory with the limit, and reports both.
pub(crate) fn hold(seen: &[u64], promised: u64) -> Result<String, String> {
    let quarter = seen.len() / 4;
    let (Some(&peak), true) = (seen.iter().max(), quarter > 0) else {
        return Err("memory was not seen".to_owned());
    };
    let (first, last) = (median(&seen[..quarter]), median(&seen[seen.len() - quarter..]));
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let summary = format!(
        "at most {:.1} MiB, where `run info` names {:.1} and the server {:.0} more; first quarter {:.1}, last quarter {:.1}",
        mib(peak),
        mib(promised),
        mib(OWN),
        mib(first),
        mib(last),
    );
    if peak > promised + OWN {
        return Err(format!("more memory than is promised: {summary}"));
    }
    if last > first + GROWTH {
        return Err(format!("memory grows: {summary}"));
    }
    Ok(summary)
}

fn median(values: &[u64]) -> u64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    sorted.get(sorted.len() / 2).copied().unwrap_or_default()
}
