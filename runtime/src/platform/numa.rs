//! NUMA nodes: CPUs of this machine with a memory of their own, and the threads and the memory that are bound there.

use crate::error::{Error, Result};
use crate::platform::cpu::CoreSet;
use crate::platform::memory::Region;
use crate::platform::regular::{self, Limit};
use moec_ir::CpuList;
use std::path::Path;

/// Folder where Linux describes the nodes, one folder each.
const SYS: &str = "/sys/devices/system/node";
/// Limit of a file there.
const FILE: Limit = Limit { what: "a NUMA node", bytes: 64 << 10 };
/// Number above those of all nodes.
const MOST_NODES: u32 = 1024;

/// The kernel's nodes that have CPUs, in a folder in the form of [`SYS`], ascending. Empty where it reports none.
fn nodes(folder: &Path) -> Vec<(u32, CpuList)> {
    let of = |number: u32| {
        let text = regular::read_text(&folder.join(format!("node{number}/cpulist")), FILE).ok()?;
        Some((number, text.parse().ok()?)).filter(|(_, cpus): &(u32, CpuList)| !cpus.is_empty())
    };
    let entries = folder.read_dir().into_iter().flatten().flatten();
    let number = |name: &str| name.strip_prefix("node")?.parse().ok().filter(|&n: &u32| n < MOST_NODES);
    let mut numbers: Vec<u32> = entries.filter_map(|entry| number(entry.file_name().to_str()?)).collect();
    numbers.sort_unstable();
    numbers.dedup();
    numbers.into_iter().filter_map(of).collect()
}

/// CPUs that this process may use; `None`: the operating system does not report them.
fn allowed() -> Option<CpuList> {
    let cores = CoreSet::of_this_thread()?.cores();
    Some(cores.into_iter().filter_map(|core| u32::try_from(core).ok()).collect())
}

/// CPUs that are divided into nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Division {
    /// CPUs of each node.
    pub nodes: Vec<CpuList>,
    /// Whether they share a memory, because the machine has fewer nodes.
    pub simulated: bool,
}

/// Divides the CPUs of this process into `count` nodes: those of the machine, neighbours together if it has more. If
/// it has fewer, the CPUs are divided into as many consecutive sets.
///
/// # Errors
/// Fewer CPUs than nodes; an operating system that does not bind threads.
pub fn divide(count: usize) -> Result<Division, String> {
    let allowed = allowed().ok_or("threads are bound to NUMA nodes on Linux alone")?;
    let nodes: Vec<CpuList> = nodes(Path::new(SYS)).into_iter().map(|(_, cpus)| cpus).collect();
    divided(count, &nodes, &allowed).ok_or_else(|| {
        format!("this process has {} CPUs ({allowed}), fewer than {count} nodes", allowed.len())
    })
}

/// As [`divide`], of a machine with these nodes; `None` for fewer CPUs than nodes.
fn divided(count: usize, nodes: &[CpuList], allowed: &CpuList) -> Option<Division> {
    let own = |node: &CpuList| -> CpuList { node.iter().filter(|&cpu| allowed.contains(cpu)).collect() };
    let nodes: Vec<CpuList> = nodes.iter().map(own).filter(|node| !node.is_empty()).collect();
    let simulated = nodes.len() < count;
    let all: Vec<u32> = allowed.iter().collect();
    let parts = if simulated { all.len() } else { nodes.len() };
    let range = |i: usize| i * parts / count..(i + 1) * parts / count;
    let of = |i: usize| -> CpuList {
        if simulated {
            all.get(range(i)).into_iter().flatten().copied().collect()
        } else {
            nodes.get(range(i)).into_iter().flatten().flat_map(CpuList::iter).collect()
        }
    };
    (parts >= count).then(|| Division { nodes: (0..count).map(of).collect(), simulated })
}

/// A node of this process.
#[derive(Clone, Debug)]
pub struct Node {
    cores: CoreSet,
    count: usize,
    /// The kernel's nodes of its CPUs: empty where it reports none.
    memories: Vec<u32>,
}

impl Node {
    /// The node of these CPUs; `name` is for messages.
    ///
    /// # Errors
    /// [`Error::Machine`] for a CPU that this process may not use, or an operating system that binds no threads.
    pub fn new(name: &str, cpus: &CpuList) -> Result<Self> {
        let Some(allowed) = allowed() else {
            return Err(Error::machine(format!(
                "`{name}` is a NUMA node, and threads are bound to nodes on Linux alone"
            ))
            .with_hint(HERE));
        };
        if let Some(missing) = cpus.iter().find(|&cpu| !allowed.contains(cpu)) {
            let what = format!(
                "CPU {missing} of node `{name}` is none that this process may use: those are {allowed}"
            );
            return Err(Error::machine(what).with_hint(HERE));
        }
        let cores: Vec<usize> = cpus.iter().map(|cpu| cpu as usize).collect();
        let memories = nodes(Path::new(SYS)).into_iter().filter(|(_, node)| node.shared(cpus).is_some());
        Ok(Self {
            cores: CoreSet::of(&cores),
            count: cores.len(),
            memories: memories.map(|(number, _)| number).collect(),
        })
    }

    /// Its CPUs, for threads to be bound to.
    pub fn cores(&self) -> CoreSet {
        self.cores
    }

    /// Number of its CPUs.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Bytes of its memory that are free or hold pages of files; `None`: the operating system does not report them.
    pub fn free(&self) -> Option<u64> {
        let of = |&number: &u32| {
            let file = Path::new(SYS).join(format!("node{number}/meminfo"));
            free_of(&regular::read_text(&file, FILE).ok()?)
        };
        let free = self.memories.iter().map(of).collect::<Option<Vec<u64>>>()?;
        (!free.is_empty()).then(|| free.into_iter().fold(0, u64::saturating_add))
    }

    /// Binds the memory of a region to the node's: pages that are not there yet will be. Returns whether the operating
    /// system agreed; without it, pages are where the thread runs that first writes them.
    pub fn hold(&self, region: &Region) -> bool {
        policy::bind(region, &self.memories)
    }

    /// Does work on the node: this thread and those that it starts meanwhile run on its CPUs, and their new pages are in
    /// its memory. Afterwards this thread is as before.
    pub fn within<T>(&self, work: impl FnOnce() -> T) -> T {
        let own = CoreSet::of_this_thread().filter(|_| self.cores.bind());
        let before = policy::replace(&self.memories);
        let result = work();
        if let Some(before) = before {
            before.restore();
        }
        if let Some(own) = own {
            own.bind();
        }
        result
    }
}

/// Remedy if CPUs are not this machine's.
const HERE: &str = "build for the nodes of this machine with `--target native-numa2`, or for all of it with `--target native`";

/// Bytes of a node's `meminfo` that are free or hold pages of files.
fn free_of(text: &str) -> Option<u64> {
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.split_once(name))?;
        line.1.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
    };
    Some(field(" MemFree:")?.saturating_add(field(" FilePages:")?).saturating_mul(1024))
}

/// Policies of memory, as `set_mempolicy` and `mbind` have them.
#[cfg(target_os = "linux")]
mod policy {
    use super::MOST_NODES;
    use crate::platform::memory::Region;
    use libc::{c_int, c_long, c_ulong};

    const WORD: u32 = c_ulong::BITS;
    const WORDS: usize = (MOST_NODES / WORD) as usize;
    /// The kernel takes one less than it is told.
    const BITS: c_ulong = MOST_NODES as c_ulong + 1;

    /// No flag, no address.
    const NONE: c_long = 0;

    type Nodes = [c_ulong; WORDS];

    fn nodes(memories: &[u32]) -> Nodes {
        let mut nodes = [0; WORDS];
        for &number in memories {
            if let Some(word) = nodes.get_mut((number / WORD) as usize) {
                *word |= 1 << (number % WORD);
            }
        }
        nodes
    }

    /// Policy of a thread.
    pub(super) struct Policy {
        mode: c_int,
        nodes: Nodes,
    }

    impl Policy {
        /// Policy of the calling thread.
        pub(super) fn now() -> Option<Self> {
            let mut policy = Self { mode: 0, nodes: [0; WORDS] };
            // SAFETY: the call writes a number and so many bits, for which there is room; no address is asked about.
            let done = unsafe {
                let (mode, nodes) = (&raw mut policy.mode, policy.nodes.as_mut_ptr());
                libc::syscall(libc::SYS_get_mempolicy, mode, nodes, BITS, NONE, NONE)
            };
            (done == 0).then_some(policy)
        }

        /// Makes it the policy of the calling thread. Returns whether the operating system agreed.
        pub(super) fn restore(&self) -> bool {
            // SAFETY: the call reads so many bits, which are there.
            unsafe { libc::syscall(libc::SYS_set_mempolicy, self.mode, self.nodes.as_ptr(), BITS) == 0 }
        }

        #[cfg(test)]
        pub(super) fn binds_to(&self, memories: &[u32]) -> bool {
            self.mode == libc::MPOL_BIND && self.nodes == nodes(memories)
        }
    }

    /// Binds new pages of the calling thread to these nodes, and returns its policy so far; `None`: not done.
    pub(super) fn replace(memories: &[u32]) -> Option<Policy> {
        let before = Policy::now().filter(|_| !memories.is_empty())?;
        Policy { mode: libc::MPOL_BIND, nodes: nodes(memories) }.restore().then_some(before)
    }

    /// Binds the pages of a region to these nodes.
    pub(super) fn bind(region: &Region, memories: &[u32]) -> bool {
        let nodes = nodes(memories);
        let (at, bytes) = (region.base().ptr(), region.bytes());
        // SAFETY: the range is the region's, whose first byte begins a page; its content does not change. The call reads
        // so many bits, which are there.
        !memories.is_empty()
            && unsafe {
                libc::syscall(libc::SYS_mbind, at, bytes, libc::MPOL_BIND, nodes.as_ptr(), BITS, NONE) == 0
            }
    }
}

/// No memory is bound on this system.
#[cfg(not(target_os = "linux"))]
mod policy {
    use crate::platform::memory::Region;

    /// There is none.
    pub(super) enum Policy {}

    impl Policy {
        pub(super) fn restore(&self) -> bool {
            match *self {}
        }
    }

    pub(super) fn replace(_memories: &[u32]) -> Option<Policy> {
        None
    }

    pub(super) fn bind(_region: &Region, _memories: &[u32]) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(text: &str) -> CpuList {
        text.parse().unwrap()
    }

    #[test]
    fn cpus_are_divided_into_nodes() {
        let machine = [list("0-3,16-19"), list("4-7"), list("8-11"), list("12-15")];
        let of = |count, nodes: &[CpuList], allowed: &str| {
            divided(count, nodes, &list(allowed)).map(|division| {
                let nodes: Vec<_> = division.nodes.iter().map(ToString::to_string).collect();
                (nodes.join(" "), division.simulated)
            })
        };
        let found = |nodes: &str, simulated| Some((nodes.to_owned(), simulated));
        assert_eq!(of(4, &machine, "0-19"), found("0-3,16-19 4-7 8-11 12-15", false));
        assert_eq!(of(2, &machine, "0-19"), found("0-7,16-19 8-15", false));
        assert_eq!(of(3, &machine, "0-19"), found("0-3,16-19 4-7 8-15", false));
        // Nodes without a CPU of this process are none.
        assert_eq!(of(2, &machine, "1,4-9"), found("1 4-9", false));
        assert_eq!(of(5, &machine, "0-9"), found("0-1 2-3 4-5 6-7 8-9", true));
        assert_eq!(of(2, &machine[..1], "0-2"), found("0 1-2", true));
        assert_eq!(of(3, &[], "0-1"), None);
    }

    #[test]
    fn nodes_are_read_from_the_kernels_files() {
        let folder = tempfile::tempdir().unwrap();
        for (name, cpus) in [("node10", "4-7\n"), ("node2", "0-3\n"), ("node3", "\n"), ("nodes", "9")] {
            std::fs::create_dir(folder.path().join(name)).unwrap();
            std::fs::write(folder.path().join(name).join("cpulist"), cpus).unwrap();
        }
        assert_eq!(nodes(folder.path()), [(2, list("0-3")), (10, list("4-7"))]);
        assert_eq!(nodes(&folder.path().join("none")), []);
        let text = "Node 0 MemTotal:  99 kB\nNode 0 MemFree:    5 kB\nNode 0 FilePages: 2 kB\n";
        assert_eq!((free_of(text), free_of("Node 0 MemFree: 5 kB")), (Some(7 << 10), None));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn work_within_a_node_is_bound_to_its_cpus_and_its_memory() {
        let all = allowed().unwrap();
        let last = all.iter().last().unwrap();
        let node = Node::new("last", &[last].into_iter().collect()).unwrap();
        let seen = node.within(|| {
            let cores = std::thread::spawn(|| allowed().unwrap()).join().unwrap();
            (cores, policy::Policy::now().map(|policy| policy.binds_to(&node.memories)))
        });
        assert_eq!(seen.0.to_string(), last.to_string());
        // A kernel without NUMA, or a sandbox, has no policies.
        assert!(seen.1 != Some(false) || node.memories.is_empty(), "{seen:?}");
        assert_eq!(allowed().unwrap(), all);
        assert!(policy::Policy::now().is_none_or(|policy| !policy.binds_to(&node.memories)));
        let error = Node::new("cpu1", &[1023].into_iter().collect()).unwrap_err();
        assert!(error.to_string().contains("CPU 1023 of node `cpu1`"), "{error}");
        assert!(error.hint().unwrap().contains("native-numa2"));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn memory_of_a_region_is_bound_to_a_node() {
        let node = Node::new("all", &allowed().unwrap()).unwrap();
        let region = Region::new("test", 1 << 20).unwrap();
        if !node.hold(&region) {
            eprintln!("skipped: this kernel binds no memory");
            return;
        }
        let maps = std::fs::read_to_string("/proc/self/numa_maps").unwrap();
        let at = format!("{:x} bind:", region.base().ptr().addr());
        assert!(maps.lines().any(|line| line.starts_with(&at)), "{at} in {maps}");
        assert!(node.free().is_none_or(|free| free > 0));
    }
}
