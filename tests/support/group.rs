//! A Linux control group (version 1 or 2) that counts the memory of its processes, including pages of files.

use std::fs;
use std::io::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// File names of a version of control groups.
#[derive(Debug)]
struct Version {
    limit: &'static str,
    no_limit: &'static str,
    /// The file that limits swap, and the value that turns swap off.
    swap: (&'static str, &'static str),
    peak: &'static str,
    /// The file with the row `oom_kill`, which counts killed processes.
    kills: &'static str,
}

static V1: Version = Version {
    limit: "memory.limit_in_bytes",
    no_limit: "-1",
    swap: ("memory.swappiness", "0"),
    peak: "memory.max_usage_in_bytes",
    kills: "memory.oom_control",
};
static V2: Version = Version {
    limit: "memory.max",
    no_limit: "max",
    swap: ("memory.swap.max", "0"),
    peak: "memory.peak",
    kills: "memory.events",
};

/// Folder in which groups can be created.
fn hierarchy() -> Result<(PathBuf, &'static Version)> {
    for line in fs::read_to_string("/proc/mounts")?.lines() {
        let [_, path, kind, options, ..] = line.split(' ').collect::<Vec<_>>()[..] else { continue };
        let has = |file: &str| fs::read_to_string(Path::new(path).join(file)).unwrap_or_default();
        if kind == "cgroup" && options.split(',').any(|o| o == "memory") {
            return Ok((path.into(), &V1));
        }
        if kind == "cgroup2" && has("cgroup.controllers").split_whitespace().any(|c| c == "memory") {
            if !has("cgroup.subtree_control").split_whitespace().any(|c| c == "memory") {
                fs::write(Path::new(path).join("cgroup.subtree_control"), "+memory")?;
            }
            return Ok((path.into(), &V2));
        }
    }
    Err(Error::new(ErrorKind::NotFound, "this kernel has no group that limits memory"))
}

/// A control group, which is removed on drop.
#[derive(Debug)]
pub struct Group {
    path: PathBuf,
    version: &'static Version,
}

impl Group {
    /// Creates a group whose processes may use `limit` bytes together.
    ///
    /// # Errors
    /// Fails if groups cannot be created, usually for lack of permissions.
    pub fn new(name: &str, limit: Option<u64>) -> Result<Self> {
        let (parent, version) = hierarchy()?;
        let path = parent.join(format!("moec-{name}-{}", std::process::id()));
        fs::create_dir(&path)?;
        let group = Self { path, version };
        let limit = limit.map_or(version.no_limit.to_owned(), |l| l.to_string());
        fs::write(group.path.join(version.limit), limit)?;
        let (swap, off) = version.swap;
        if group.path.join(swap).exists() {
            fs::write(group.path.join(swap), off)?;
        }
        // Version 2 reports the peak since Linux 5.19.
        fs::metadata(group.path.join(version.peak))?;
        Ok(group)
    }

    /// A command whose process enters the group before it executes the program.
    pub fn enter(&self, command: &Command) -> Command {
        let mut shell = Command::new("sh");
        shell.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]).arg(self.path.join("cgroup.procs"));
        shell.arg(command.get_program()).args(command.get_args());
        for (key, value) in command.get_envs() {
            match value {
                Some(value) => shell.env(key, value),
                None => shell.env_remove(key),
            };
        }
        shell
    }

    /// Peak of the group's memory in bytes.
    pub fn peak(&self) -> u64 {
        let text = fs::read_to_string(self.path.join(self.version.peak)).expect("a group says its peak");
        text.trim().parse().expect("a peak is a number")
    }

    /// Number of processes that the kernel killed for lack of memory.
    pub fn kills(&self) -> u64 {
        let text = fs::read_to_string(self.path.join(self.version.kills)).expect("a group counts these");
        let row = text.lines().find_map(|l| l.strip_prefix("oom_kill "));
        row.map_or(0, |n| n.trim().parse().expect("a count is a number"))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for _ in 0..50 {
            // Version 1: releases pages that the processes left in the page cache.
            let _ = fs::write(self.path.join("memory.force_empty"), "0");
            if fs::remove_dir(&self.path).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(100)); // the last process is still ending
        }
    }
}

/// Drops a file from the page cache, so that its next reader is charged for it.
pub fn forget(path: &Path) {
    use std::os::fd::AsRawFd as _;
    let file = fs::File::open(path).expect("a file of the bundle");
    file.sync_all().expect("a file is written out");
    // SAFETY: a call on a descriptor that is open.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
}
