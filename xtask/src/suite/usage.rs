//! CPU time of everything that the runner has started, by what ran: read from `/proc` while it runs.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Time between two reads of `/proc`. What lives for less is counted as [`SHORT`].
const INTERVAL: Duration = Duration::from_millis(200);
/// Ticks per second of the times in `/proc`: fixed in the kernel's interface.
const TICKS: f64 = 100.0;
/// Name of the row for what ended between two samples.
const SHORT: &str = "ended between two samples";

/// Names of threads or processes (as prefixes; the kernel cuts them to 15 bytes), and the row that counts
/// them. A thread's own name is looked up first, then that of its process.
const KINDS: &[(&str, &str)] = &[
    ("llvm", "LLVM, compiling kernels"),
    ("rustc", "Rust compiler"),
    ("clippy-driver", "Rust compiler"),
    ("rustdoc", "Rust compiler"),
    ("cargo", "Rust compiler"),
    ("build-script-bu", "Rust compiler"),
    ("ld", "linker"),
    ("rust-lld", "linker"),
    ("lld", "linker"),
    ("cc", "linker"),
    ("collect2", "linker"),
    ("aarch64-linux-g", "linker"),
    ("qemu-", "emulator of AArch64"),
    ("moec-qnn", "emulator of Hexagon"),
    ("python", "Python"),
    ("chromium", "browser"),
    ("chrome", "browser"),
    ("ptxas", "PTX assembler"),
    ("moec", "moec"),
    ("run", "programs of bundles"),
    ("xtask", "this runner"),
];
/// Row of everything not in [`KINDS`]: the test programs, including evaluators and emulators in their
/// process.
const OTHER: &str = "test programs";

/// One thread: process and thread number, and when it began.
type Key = (u32, u32, u64);

/// Samples the threads below this process until the sum is requested.
#[derive(Debug)]
pub(super) struct Usage {
    stop: Arc<AtomicBool>,
    sampler: Option<JoinHandle<BTreeMap<&'static str, f64>>>,
    before: f64,
}

impl Usage {
    /// Begins to sample.
    pub(super) fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let sampler =
            std::thread::Builder::new().name("xtask-usage".into()).spawn(move || sample(&seen)).ok();
        Self { stop, sampler, before: children() }
    }

    /// Core-seconds by row, the largest first.
    pub(super) fn stop(mut self) -> Vec<(&'static str, f64)> {
        self.stop.store(true, Ordering::Relaxed);
        let mut rows = self.sampler.take().and_then(|s| s.join().ok()).unwrap_or_default();
        let seen: f64 = rows.values().sum();
        rows.insert(SHORT, (children() - self.before - seen).max(0.0));
        let mut rows: Vec<_> = rows.into_iter().collect();
        rows.sort_by(|a, b| b.1.total_cmp(&a.1));
        rows
    }
}

fn sample(stop: &AtomicBool) -> BTreeMap<&'static str, f64> {
    let mut threads: BTreeMap<Key, (&'static str, f64)> = BTreeMap::new();
    while !stop.load(Ordering::Relaxed) {
        for process in descendants(std::process::id()) {
            let name = stat(&format!("/proc/{process}/stat")).map_or_else(String::new, |s| s.name);
            for thread in numbers(format!("/proc/{process}/task")) {
                if let Some(s) = stat(&format!("/proc/{process}/task/{thread}/stat")) {
                    threads.insert((process, thread, s.began), (kind(&s.name, &name), s.seconds));
                }
            }
        }
        std::thread::sleep(INTERVAL);
    }
    let mut rows = BTreeMap::new();
    for (row, seconds) in threads.into_values() {
        *rows.entry(row).or_default() += seconds;
    }
    rows
}

/// The row that counts a thread of this name in a process of that name.
fn kind(thread: &str, process: &str) -> &'static str {
    let find = |name: &str| KINDS.iter().find(|(prefix, _)| name.starts_with(prefix)).map(|(_, row)| *row);
    // Threads of the pool are called after moec in every program: the program decides.
    find(thread).filter(|_| thread == "llvm").or_else(|| find(process)).unwrap_or(OTHER)
}

/// Processes that this one has started, and those that they have.
fn descendants(root: u32) -> BTreeSet<u32> {
    let parents: Vec<(u32, u32)> = numbers("/proc")
        .into_iter()
        .filter_map(|p| Some((p, stat(&format!("/proc/{p}/stat"))?.parent)))
        .collect();
    let mut found = BTreeSet::from([root]);
    loop {
        let before = found.len();
        let below: Vec<u32> =
            parents.iter().filter(|(_, parent)| found.contains(parent)).map(|(p, _)| *p).collect();
        found.extend(below);
        if found.len() == before {
            found.remove(&root);
            return found;
        }
    }
}

/// Entries of a folder whose names are numbers.
fn numbers(folder: impl AsRef<Path>) -> Vec<u32> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|e| e.file_name().to_str()?.parse().ok()).collect()
}

/// Contents of a `stat` file of `/proc` for a process or thread.
#[derive(Debug, PartialEq)]
struct Stat {
    name: String,
    parent: u32,
    /// User and system time.
    seconds: f64,
    /// User and system time of the children that have ended and were waited for.
    children: f64,
    /// Time of its start, in ticks after the machine's.
    began: u64,
}

fn stat(path: &str) -> Option<Stat> {
    parse(&fs::read_to_string(path).ok()?)
}

/// `12 (name) S 1 …`: see proc_pid_stat(5), fields 2, 4, 14 to 17, 22.
fn parse(text: &str) -> Option<Stat> {
    let (head, rest) = text.rsplit_once(')')?;
    let name = head.split_once('(')?.1.to_owned();
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let number = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
    let seconds = |a: usize, b: usize| Some((number(a)? + number(b)?) as f64 / TICKS);
    Some(Stat {
        name,
        parent: number(4)?.try_into().ok()?,
        seconds: seconds(14, 15)?,
        children: seconds(16, 17)?,
        began: number(22)?,
    })
}

/// Core-seconds of a process and of its children that have ended.
pub(super) fn of_process(id: u32) -> Option<f64> {
    stat(&format!("/proc/{id}/stat")).map(|s| s.seconds + s.children)
}

/// Core-seconds of all children that have ended.
pub(super) fn children() -> f64 {
    stat("/proc/self/stat").map_or(0.0, |s| s.children)
}

#[cfg(test)]
mod tests {
    use super::{kind, parse};

    #[test]
    fn proc_stat_fields_are_parsed_after_bracketed_names() {
        let line = "7 (a) b (c) S 3 7 7 0 -1 4194304 1 2 3 4 150 50 300 100 20 0 1 0 9876 1 2";
        let stat = parse(line).unwrap();
        assert_eq!((stat.name.as_str(), stat.parent, stat.began), ("a) b (c", 3, 9876));
        assert_eq!((stat.seconds, stat.children), (2.0, 4.0));
        assert_eq!(parse("7 (a"), None);
    }

    #[test]
    fn threads_are_labelled_as_llvm_or_by_their_program() {
        assert_eq!(kind("llvm", "moec"), "LLVM, compiling kernels");
        assert_eq!(kind("moec-1", "golden-0a1b2c3d"), "test programs");
        assert_eq!(kind("moec-1", "run"), "programs of bundles");
        assert_eq!(kind("main", "qemu-aarch64"), "emulator of AArch64");
    }
}
