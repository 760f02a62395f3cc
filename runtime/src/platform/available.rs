//! Memory that this process may take.

#[cfg(target_os = "linux")]
use std::{fs, path::Path};

/// Bytes of memory that this process may take without taking it from others, within the machine's memory and
/// the limits of its control groups. `None`: the operating system does not report it.
#[cfg(target_os = "linux")]
pub fn available() -> Option<u64> {
    let read = |path: &Path| fs::read_to_string(path).ok();
    let machine = field(&read(Path::new("/proc/meminfo"))?, "MemAvailable:")?.saturating_mul(1024);
    let groups = read(Path::new("/proc/self/cgroup")).unwrap_or_default();
    Some(limits(&groups, Path::new("/sys/fs/cgroup"), &read).fold(machine, u64::min))
}

/// Not reported on this operating system.
#[cfg(not(target_os = "linux"))]
pub fn available() -> Option<u64> {
    None
}

/// Number after a name, in a file of lines.
#[cfg(target_os = "linux")]
pub(crate) fn field(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name))?;
    value.split_whitespace().next()?.parse().ok()
}

/// File names of a version of control groups.
#[cfg(target_os = "linux")]
struct Version {
    limit: &'static str,
    /// Rows of `memory.stat` with the bytes that the kernel cannot drop: memory of processes and shared
    /// memory, including child groups. Pages of files can be dropped, so they take no room.
    held: [&'static str; 2],
}

#[cfg(target_os = "linux")]
const V1: Version = Version { limit: "memory.limit_in_bytes", held: ["total_rss ", "total_shmem "] };
#[cfg(target_os = "linux")]
const V2: Version = Version { limit: "memory.max", held: ["anon ", "shmem "] };

/// Memory that is left under the limits of the control groups in `groups` (`/proc/self/cgroup`) and of their
/// ancestors, for both versions. Groups without a limit are skipped.
#[cfg(target_os = "linux")]
fn limits<'a>(
    groups: &'a str,
    root: &'a Path,
    read: &'a dyn Fn(&Path) -> Option<String>,
) -> impl Iterator<Item = u64> + 'a {
    groups.lines().flat_map(move |line| {
        let parts: Vec<&str> = line.splitn(3, ':').collect();
        let &[_, kinds, group] = parts.as_slice() else { return Vec::new() };
        let (folder, version) = match kinds {
            "" => (root.to_owned(), V2),
            _ if kinds.split(',').any(|k| k == "memory") => (root.join("memory"), V1),
            _ => return Vec::new(),
        };
        let room = |folder: &Path| {
            // "max": no limit.
            let limit: u64 = read(&folder.join(version.limit))?.trim().parse().ok()?;
            let stat = read(&folder.join("memory.stat")).unwrap_or_default();
            let held = version.held.iter().filter_map(|name| field(&stat, name)).fold(0, u64::saturating_add);
            Some(limit.saturating_sub(held))
        };
        let above = Path::new(group.trim_start_matches('/')).ancestors();
        above.filter_map(|g| room(&folder.join(g))).collect()
    })
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn cgroup_with_the_least_available_memory_counts() {
        let read = |path: &Path| {
            let text = match path.to_str()? {
                "/g/memory/a/b/memory.limit_in_bytes" => "9223372036854771712\n",
                "/g/memory/a/memory.limit_in_bytes" => "5000\n",
                "/g/memory/a/memory.stat" => "rss 1\ntotal_cache 4000\ntotal_rss 300\ntotal_shmem 20\n",
                "/g/u/memory.max" => "max\n",
                "/g/u/memory.stat" => "anon 6000\n",
                "/g/memory.max" => "7000\n",
                "/g/w/memory.max" => "8000\n",
                "/g/w/memory.stat" => "anon 5500\nfile 2400\nshmem 100\nanon_thp 0\n",
                "/g/full/memory.max" => "10\n",
                "/g/full/memory.stat" => "anon 4096\n",
                _ => return None,
            };
            Some(text.to_owned())
        };
        let of = |groups: &str| limits(groups, Path::new("/g"), &read).min();
        for (groups, room) in [
            ("4:memory:/a/b\n3:cpuset:/\n0::/\n", Some(4680)),
            ("0::/u/v\n", Some(7000)),
            ("0::/w\n", Some(2400)),
            ("0::/full\n", Some(0)),
            ("5:cpu,cpuacct:/a\n", None),
            ("nonsense", None),
        ] {
            assert_eq!(of(groups), room, "{groups}");
        }
        assert_eq!(field("MemTotal: 5 kB\nMemAvailable:   12 kB\n", "MemAvailable:"), Some(12));
        assert_eq!(field("MemAvailable:", "MemAvailable:"), None);
        assert!(available().is_some_and(|bytes| bytes > 0));
    }
}
