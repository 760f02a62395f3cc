//! Cores of several kinds: their clusters on this machine, and the cores that read and compute in a run.

use crate::platform::cpu::CoreSet;
use crate::platform::regular::{self, Limit};
use moec_ir::plan::CoreClass;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

/// Folder where Linux describes the cores, one folder each.
pub const SYS: &str = "/sys/devices/system/cpu";

/// File with the highest clock of a core, in kHz.
const CLOCK: &str = "cpufreq/cpuinfo_max_freq";
/// Limit of such a file: a number, for which the kernel reports the size of a page.
const CLOCK_FILE: Limit = Limit { what: "the clock of a core", bytes: 64 << 10 };
/// Most entries of the folder that are looked at.
const MOST_ENTRIES: usize = 4096;
/// Most cores, as many as a [`CoreSet`] has.
const MOST_CORES: usize = 1024;

/// Cores with one highest clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CoreCluster {
    /// Highest clock, in kHz.
    pub khz: u64,
    /// Numbers of the cores, ascending.
    pub cores: Vec<usize>,
}

/// Clusters of cores in a folder in the form of [`SYS`], the fastest first. Cores whose clock cannot be read
/// are left out; empty where that is true of all.
pub fn clusters(folder: &Path) -> Vec<CoreCluster> {
    let mut found: BTreeMap<Reverse<u64>, Vec<usize>> = BTreeMap::new();
    let entries = folder.read_dir().into_iter().flatten().flatten();
    for entry in entries.take(MOST_ENTRIES) {
        let name = entry.file_name();
        let core = name.to_str().and_then(|n| n.strip_prefix("cpu")?.parse::<usize>().ok());
        let Some(core) = core.filter(|&c| c < MOST_CORES && *name == *format!("cpu{c}")) else { continue };
        let clock = regular::read_text(&entry.path().join(CLOCK), CLOCK_FILE).ok();
        if let Some(khz) = clock.and_then(|text| text.trim().parse().ok()).filter(|&khz| khz > 0) {
            found.entry(Reverse(khz)).or_default().push(core);
        }
    }
    let cluster = |(Reverse(khz), mut cores): (_, Vec<usize>)| {
        cores.sort_unstable();
        CoreCluster { khz, cores }
    };
    found.into_iter().map(cluster).collect()
}

/// Cores that a run binds its threads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CoreUse {
    /// Threads are bound.
    Bound {
        /// Core of the thread that reads from disk; `None`: it is not bound.
        reader: Option<usize>,
        /// Cores of the threads that compute; empty: these are not bound.
        compute: Vec<usize>,
        /// Cores for neither.
        unused: Vec<usize>,
    },
    /// No thread is bound, for this reason.
    Unbound(String),
}

impl CoreUse {
    /// Core of the thread that reads from disk, if it is bound.
    pub const fn reader(&self) -> Option<usize> {
        match self {
            Self::Bound { reader, .. } => *reader,
            Self::Unbound(_) => None,
        }
    }

    /// Cores of the threads that compute; empty if these are not bound.
    pub fn compute(&self) -> &[usize] {
        match self {
            Self::Bound { compute, .. } => compute,
            Self::Unbound(_) => &[],
        }
    }

    /// The cores of `threads` threads that compute, if these are bound: more threads than cores are not.
    pub(crate) fn set(&self, threads: usize) -> Option<CoreSet> {
        let compute = self.compute();
        (!compute.is_empty() && threads <= compute.len()).then(|| CoreSet::of(compute))
    }
}

/// Cores of a run on a machine with these clusters. `allowed`: cores that the process may use.
///
/// Kinds of cores and clusters are matched by rank if there are as many of both. Otherwise neighbouring
/// clusters together are one kind, if their cores are as many: the five middle cores of a phone may have two
/// clocks.
pub fn choose(classes: &[CoreClass], clusters: &[CoreCluster], allowed: &[usize]) -> CoreUse {
    if clusters.len() < 2 {
        return CoreUse::Unbound(match clusters.len() {
            0 => "the operating system states no clocks of cores".to_owned(),
            _ => "all cores of this machine are alike".to_owned(),
        });
    }
    let Some(kinds) = matched(classes, clusters) else {
        let here = clusters.iter().map(|c| format!("{} of {}", c.cores.len(), ghz(c.khz)));
        let planned = classes.iter().map(|c| format!("{} {}", c.count, c.name));
        let [here, planned] = [here.collect::<Vec<_>>(), planned.collect()].map(|list| list.join(", "));
        return CoreUse::Unbound(format!("this machine's cores ({here}) are not the plan's ({planned})"));
    };
    let is_allowed = |core: &usize| allowed.contains(core);
    let of = |includes: &dyn Fn(&CoreClass) -> bool| {
        let kinds = classes.iter().zip(&kinds).filter(|(class, _)| includes(class));
        let mut cores: Vec<usize> = kinds.flat_map(|(_, cores)| cores).copied().filter(is_allowed).collect();
        cores.sort_unstable();
        cores
    };
    let reader = of(&|c| c.reads).first().copied();
    let mut compute = of(&|c| c.computes);
    compute.retain(|&core| Some(core) != reader);
    let mut unused = of(&|_| true);
    unused.retain(|&core| Some(core) != reader && !compute.contains(&core));
    if reader.is_none() && compute.is_empty() {
        return CoreUse::Unbound("this process may not use the cores that read and compute".to_owned());
    }
    CoreUse::Bound { reader, compute, unused }
}

/// Cores of each kind; `None` if kinds and clusters do not match.
fn matched(classes: &[CoreClass], clusters: &[CoreCluster]) -> Option<Vec<Vec<usize>>> {
    if classes.len() == clusters.len() {
        return Some(clusters.iter().map(|c| c.cores.clone()).collect());
    }
    let mut rest = clusters.iter();
    let kinds = classes.iter().map(|class| {
        let mut cores = Vec::new();
        while cores.len() < class.count as usize {
            cores.extend_from_slice(&rest.next()?.cores);
        }
        (cores.len() == class.count as usize).then_some(cores)
    });
    let kinds: Vec<_> = kinds.collect::<Option<_>>()?;
    rest.next().is_none().then_some(kinds)
}

/// A clock in words.
fn ghz(khz: u64) -> String {
    format!("{:.2} GHz", khz as f64 / 1e6)
}

/// Cores in words: `core 0`, `cores 1 to 5`, `cores 1, 3`.
fn named(cores: &[usize]) -> String {
    match cores {
        [core] => format!("core {core}"),
        [first, _, .., last] if last.checked_sub(*first) == Some(cores.len() - 1) => {
            format!("cores {first} to {last}")
        }
        _ => format!("cores {}", cores.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")),
    }
}

impl fmt::Display for CoreUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (reader, compute, unused) = match self {
            Self::Bound { reader, compute, unused } => (reader, compute, unused),
            Self::Unbound(why) => return write!(f, "threads are not bound: {why}"),
        };
        match reader {
            Some(core) => write!(f, "core {core} reads from disk")?,
            None => write!(f, "any core reads from disk")?,
        }
        match compute.as_slice() {
            [] => write!(f, ", any core computes")?,
            cores => {
                let what = if cores.len() == 1 { "computes" } else { "compute" };
                write!(f, ", {} {what}", named(cores))?;
            }
        }
        match unused.as_slice() {
            [] => Ok(()),
            cores => write!(f, ", {} {} neither", named(cores), if cores.len() == 1 { "does" } else { "do" }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder in the form of [`SYS`] with these clocks; `None`: a core without a clock.
    fn folder(clocks: &[Option<&str>]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (core, clock) in clocks.iter().enumerate() {
            let of = folder.path().join(format!("cpu{core}/cpufreq"));
            std::fs::create_dir_all(&of).unwrap();
            if let Some(clock) = clock {
                std::fs::write(of.join("cpuinfo_max_freq"), clock).unwrap();
            }
        }
        folder
    }

    /// Clusters of cores with these clocks, in MHz.
    fn machine(mhz: &[u64]) -> Vec<CoreCluster> {
        let texts: Vec<_> = mhz.iter().map(|mhz| format!("{mhz}000\n")).collect();
        clusters(folder(&texts.iter().map(|t| Some(t.as_str())).collect::<Vec<_>>()).path())
    }

    fn class(name: &str, count: u32, computes: bool, reads: bool) -> CoreClass {
        CoreClass { name: name.to_owned(), count, computes, reads }
    }

    /// The kinds of `snapdragon-8-gen-3`.
    fn phone() -> Vec<CoreClass> {
        vec![class("big", 1, true, true), class("middle", 5, true, false), class("little", 2, false, false)]
    }

    const ALL: [usize; 8] = [0, 1, 2, 3, 4, 5, 6, 7];

    fn bound(reader: usize, compute: &[usize], unused: &[usize]) -> CoreUse {
        CoreUse::Bound { reader: Some(reader), compute: compute.to_vec(), unused: unused.to_vec() }
    }

    #[test]
    fn clusters_are_read_from_the_kernel_folder_fastest_first() {
        // Qualcomm numbers the slowest cores first.
        let found = machine(&[2200, 2200, 3000, 3000, 3000, 3000, 3000, 3300]);
        let cores: Vec<_> = found.iter().map(|c| (c.khz, c.cores.clone())).collect();
        let expected = [(3_300_000, vec![7]), (3_000_000, vec![2, 3, 4, 5, 6]), (2_200_000, vec![0, 1])];
        assert_eq!(cores, expected);
    }

    #[test]
    fn unreadable_entries_of_the_kernel_folder_are_left_out() {
        let long = "1".repeat(70 << 10);
        let of = folder(&[Some("3000000"), None, Some("fast"), Some("0"), Some("-5"), Some(""), Some(&long)]);
        let path = of.path();
        for name in ["cpu01", "cpu+2", "cpu1024", "cpu99999999999999999999", "cpufreq", "gpu0"] {
            std::fs::create_dir_all(path.join(name).join("cpufreq")).unwrap();
            std::fs::write(path.join(name).join(CLOCK), "1000000").unwrap();
        }
        // A folder in place of the file.
        std::fs::create_dir_all(path.join("cpu7").join(CLOCK)).unwrap();
        assert_eq!(clusters(path), [CoreCluster { khz: 3_000_000, cores: vec![0] }]);
        assert_eq!(clusters(&path.join("none")), []);
        assert_eq!(clusters(&path.join("cpu0").join(CLOCK)), []);
    }

    #[test]
    fn big_core_reads_middle_cores_compute_and_slowest_cores_do_neither() {
        let found = machine(&[2200, 2200, 3000, 3000, 3000, 3000, 3000, 3300]);
        let cores = choose(&phone(), &found, &ALL);
        assert_eq!(cores, bound(7, &[2, 3, 4, 5, 6], &[0, 1]));
        assert_eq!(cores.to_string(), "core 7 reads from disk, cores 2 to 6 compute, cores 0, 1 do neither");
        // Another phone with as many clusters, of other sizes and clocks.
        let other = machine(&[2000, 2000, 2000, 2000, 2750, 2750, 2750, 3200]);
        assert_eq!(choose(&phone(), &other, &ALL), bound(7, &[4, 5, 6], &[0, 1, 2, 3]));
        // A cluster of several fast cores: one reads, the others compute.
        let fast = machine(&[3000, 3000, 2000, 2000, 1000, 1000]);
        assert_eq!(choose(&phone(), &fast, &ALL), bound(0, &[1, 2, 3], &[4, 5]));
    }

    #[test]
    fn neighbouring_clusters_with_as_many_cores_are_one_kind() {
        // Qualcomm's product brief has middle cores of 3.2 and 3.0 GHz.
        let found = machine(&[2300, 2300, 3200, 3200, 3200, 3000, 3000, 3300]);
        assert_eq!(choose(&phone(), &found, &ALL), bound(7, &[2, 3, 4, 5, 6], &[0, 1]));
        // Four of one clock and four of another cannot be one, five and two.
        let cores = choose(&phone(), &machine(&[2000, 2000, 2000, 2000, 3000, 3000, 3000, 3000]), &ALL);
        assert_eq!(
            cores.to_string(),
            "threads are not bound: this machine's cores (4 of 3.00 GHz, 4 of 2.00 GHz) are not the plan's \
             (1 big, 5 middle, 2 little)"
        );
        let more = machine(&[2300, 2300, 3200, 3200, 3200, 3000, 3000, 3300, 1000]);
        assert!(matches!(choose(&phone(), &more, &ALL), CoreUse::Unbound(_)));
        let fewer = machine(&[2300, 3200, 3200, 3200, 3000, 3000, 3300, 3400]);
        assert!(matches!(choose(&phone(), &fewer, &ALL), CoreUse::Unbound(_)));
    }

    #[test]
    fn equal_or_unknown_cores_are_not_bound() {
        let equal = choose(&phone(), &machine(&[3000; 8]), &ALL);
        assert_eq!(equal.to_string(), "threads are not bound: all cores of this machine are alike");
        assert_eq!((equal.reader(), equal.compute(), equal.set(1).is_some()), (None, &[][..], false));
        let unknown = choose(&phone(), &[], &ALL);
        assert_eq!(
            unknown.to_string(),
            "threads are not bound: the operating system states no clocks of cores"
        );
    }

    #[test]
    fn only_cores_of_the_process_are_used() {
        let found = machine(&[2200, 2200, 3000, 3000, 3000, 3000, 3000, 3300]);
        let within = |allowed: &[usize]| choose(&phone(), &found, allowed);
        assert_eq!(within(&[0, 3, 7]), bound(7, &[3], &[0]));
        assert_eq!(
            within(&[0, 3, 7]).to_string(),
            "core 7 reads from disk, core 3 computes, core 0 does neither"
        );
        let slow = within(&[0, 1]);
        assert!(slow.to_string().contains("may not use"), "{slow}");
        let middle = CoreUse::Bound { reader: None, compute: vec![2, 4], unused: vec![] };
        assert_eq!(within(&[2, 4]), middle);
        assert_eq!(middle.to_string(), "any core reads from disk, cores 2, 4 compute");
        assert_eq!(within(&[7]).to_string(), "core 7 reads from disk, any core computes");
    }

    #[test]
    fn more_threads_than_cores_are_not_bound() {
        let cores = bound(7, &[2, 3], &[]);
        let bound: Vec<_> = (1..4).map(|threads| cores.set(threads).is_some()).collect();
        assert_eq!(bound, [true, true, false]);
    }
}
