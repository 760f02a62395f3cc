//! Verdict on a command that read damaged files.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use wait_timeout::ChildExt as _;

/// Time limit of a command. The slowest take some seconds alone on a machine, and a minute on a shared one.
const DEADLINE: Duration = Duration::from_mins(5);
/// Limit of a process's address space in KiB. Builds of these models take less than 600 MiB.
const MEMORY: u64 = 1536 << 10;
/// Limit of a file's length, in blocks of 512 or 1024 bytes, depending on the shell.
const FILE: u64 = 128 << 11;

/// Outcome of a command.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    /// Exit code, unless a signal ended it.
    pub(crate) code: Option<i32>,
    /// The signal.
    pub(crate) signal: Option<i32>,
    /// Its standard error.
    pub(crate) stderr: String,
    /// Whether it had to be killed.
    pub(crate) hung: bool,
}

/// Runs a command under the limits; `meanwhile` runs in parallel.
pub(crate) fn run(command: &Command, meanwhile: impl FnOnce()) -> Outcome {
    let mut limited = Command::new("sh");
    let limits = format!("ulimit -c 0; ulimit -v {MEMORY}; ulimit -f {FILE}; exec \"$0\" \"$@\"");
    limited.arg("-c").arg(limits).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => limited.env(name, value),
            None => limited.env_remove(name),
        };
    }
    limited.current_dir(command.get_current_dir().unwrap()).process_group(0);
    limited.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = limited.spawn().unwrap();
    let mut pipe = child.stderr.take().unwrap();
    let reader = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        pipe.read_to_end(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes).into_owned()
    });
    meanwhile();
    let ended = child.wait_timeout(DEADLINE).unwrap();
    if ended.is_none() {
        // The whole process group, since helper processes hold the pipe open.
        let group = format!("-{}", child.id());
        Command::new("kill").args(["-KILL", "--", &group]).status().unwrap();
        child.wait().unwrap();
    }
    let stderr = reader.join().unwrap();
    let (code, signal) = (ended.and_then(|s| s.code()), ended.and_then(|s| s.signal()));
    Outcome { code, signal, stderr, hung: ended.is_none() }
}

/// Fails if a command crashed, hung, or failed without a proper message.
pub(crate) fn verdict(outcome: &Outcome) -> Result<(), String> {
    let stderr = &outcome.stderr;
    let wrong = |why: String| Err(format!("{why}; it said:\n{}", shortened(stderr)));
    if outcome.hung {
        return wrong(format!("it hangs: not done in {} s", DEADLINE.as_secs()));
    }
    if let Some(signal) = outcome.signal {
        return wrong(format!("signal {signal} ended it"));
    }
    if !matches!(outcome.code, Some(0..=2)) {
        return wrong(format!("exit code {:?}", outcome.code));
    }
    if let Some(word) = ["panicked", "stack overflow", "out of memory", "annot allocate", "a bug in moec"]
        .iter()
        .find(|w| stderr.contains(**w))
    {
        return wrong(format!("`{word}`"));
    }
    if outcome.code == Some(0) {
        return Ok(());
    }
    let Some(error) = stderr.find("error: ").map(|at| &stderr[at..]) else {
        return wrong(format!("exit code {:?} and no error", outcome.code));
    };
    // Files, keys, tensors and options are in backticks; arguments of the command line are in quotes.
    let error = error.split("\nhint").next().unwrap_or(error);
    if !error.contains('`') && !error.contains('\'') {
        return wrong("the error names nothing".to_owned());
    }
    Ok(())
}

fn shortened(stderr: &str) -> String {
    let lines: Vec<&str> = stderr.lines().collect();
    let from = lines.len().saturating_sub(12);
    lines[from..].iter().flat_map(|l| "    ".chars().chain(l.chars().take(300)).chain(['\n'])).collect()
}

/// Listing of a folder: kind, length, time and link target of every entry.
pub(crate) type Listing = BTreeMap<PathBuf, (u32, u64, i64, i64, Option<PathBuf>)>;

/// Lists a folder without opening a file.
pub(crate) fn listing(folder: &Path) -> Listing {
    fn walk(root: &Path, folder: &Path, out: &mut Listing) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let about = fs::symlink_metadata(&path).unwrap();
            let name = path.strip_prefix(root).unwrap().to_owned();
            // The times of folders change with temporary files, which are permitted.
            let (time, nanos) = if about.is_dir() { (0, 0) } else { (about.mtime(), about.mtime_nsec()) };
            let length = if about.is_dir() { 0 } else { about.len() };
            out.insert(name, (about.mode(), length, time, nanos, fs::read_link(&path).ok()));
            if about.is_dir() {
                walk(root, &path, out);
            }
        }
    }
    let mut out = Listing::new();
    walk(folder, folder, &mut out);
    out
}

/// Changes between two listings, except those below the paths `may`.
pub(crate) fn changes(before: &Listing, after: &Listing, may: &[PathBuf]) -> Vec<String> {
    let shown = |path: &Path, what: &str| format!("`{}` {what}", path.display());
    let gone = before.keys().filter(|p| !after.contains_key(*p)).map(|p| (p, "is gone"));
    let others = after.iter().filter_map(|(path, entry)| match before.get(path) {
        None => Some((path, "is new")),
        Some(old) if old != entry => Some((path, "was changed")),
        Some(_) => None,
    });
    gone.chain(others)
        .filter(|(path, _)| !may.iter().any(|m| path.starts_with(m)))
        .map(|(path, what)| shown(path, what))
        .collect()
}

/// Finds a file below a folder that contains these bytes.
pub(crate) fn holds(folder: &Path, bytes: &[u8]) -> Option<PathBuf> {
    let found = |(path, (mode, ..)): (PathBuf, (u32, u64, i64, i64, Option<PathBuf>))| {
        const REGULAR: u32 = 0o100_000;
        let whole = folder.join(path);
        let has =
            mode & 0o170_000 == REGULAR && fs::read(&whole).unwrap().windows(bytes.len()).any(|w| w == bytes);
        has.then_some(whole)
    };
    listing(folder).into_iter().find_map(found)
}
