//! Device descriptions: what a machine is, as far as the compiler needs to know.
//!
//! A device is a TOML file. Some are built in ([`BUILT_IN`]); [`Device::find`] takes the name of one of
//! them or the path of a user's own file. Every figure carries its source, and a figure that was never
//! measured or published is absent: nothing is estimated here.
//!
//! Invariant: this crate knows no model family and no LLVM.
#![cfg_attr(test, allow(clippy::cast_possible_truncation, reason = "numbers of tests are small"))]

mod cost;
mod error;
mod figures;
mod find;
mod form;
mod host;
mod legality;
mod nearest;
mod nodes;
mod several;
mod silicon;

pub use cost::MatmulTime;
pub use error::DeviceError;
pub use figures::{
    Bandwidth, Cache, Cluster, DeviceUnit, Dimms, Figure, Hexagon, Link, Memory, ParallelRate, Peak, Power,
    RangeBandwidth, UnitKind,
};
pub use find::BUILT_IN;
pub use form::{CacheWrite, Choice, Counted, GraphForm, NUMBER_BYTES, StoredFormat};
pub use host::{caches as host_caches, tiles};
pub use legality::Legality;
pub use nearest::nearest;
pub use silicon::{Measured, measured};

use serde::{Deserialize, Serialize};

/// Value of [`Device::cpu`] and [`Device::triple`] for the machine that runs the build.
pub const NATIVE: &str = "native";

/// A device description, checked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// Name, as in `--target`.
    pub name: String,
    /// Description, in a line.
    pub description: String,
    /// Backend of the device's units other than CPUs.
    #[serde(alias = "family")]
    pub backend: String,
    /// LLVM triple, or [`NATIVE`].
    pub triple: String,
    /// LLVM CPU name, or [`NATIVE`].
    pub cpu: String,
    /// Features that the CPU must have at run time, in LLVM's spelling (`avx512f`), no leading sign.
    /// Empty for `native`: the host's own are taken.
    #[serde(default)]
    pub features: Vec<String>,
    /// Graph operations that the device can run.
    #[serde(default)]
    pub legal_ops: LegalOps,
    /// Hosts beside the first one, each with units and memories of its own.
    #[serde(default, rename = "host", skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<Host>,
    /// Units that compute.
    #[serde(default, rename = "unit", skip_serializing_if = "Vec::is_empty")]
    pub units: Vec<DeviceUnit>,
    /// Memories.
    #[serde(default, rename = "memory", skip_serializing_if = "Vec::is_empty")]
    pub memories: Vec<Memory>,
    /// Caches of one core, or shared by several. For `native` they are this machine's, if the file has none.
    #[serde(default, rename = "cache", skip_serializing_if = "Vec::is_empty")]
    pub caches: Vec<Cache>,
    /// Links between units and memories.
    #[serde(default, rename = "link", skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<Link>,
    /// Power.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power: Option<Power>,
}

/// A machine beside the one where a program starts, which runs the same program. Or, if its unit has
/// [`DeviceUnit::cpus`], another NUMA node of that machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// Name, by which units and memories say that they are of it.
    pub name: String,
}

/// Operations of the Graph that a device can run, by their text-form names (`expert_ffn`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum LegalOps {
    /// Every one: written `"all"`.
    #[default]
    #[serde(with = "all")]
    All,
    /// Only these.
    Only(Vec<String>),
}

/// `LegalOps::All` is the string `"all"`.
mod all {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str("all")
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<(), D::Error> {
        let word = String::deserialize(d)?;
        if word == "all" { Ok(()) } else { Err(D::Error::custom("expected `all` or a list of operations")) }
    }
}

impl LegalOps {
    /// Whether the operation of that name can run.
    pub fn allows(&self, op: &str) -> bool {
        match self {
            Self::All => true,
            Self::Only(ops) => ops.iter().any(|o| o == op),
        }
    }
}

/// Whether programs of an LLVM triple are of this machine's architecture and operating system.
///
/// ```
/// assert!(moec_device::is_host(&format!("{}-unknown-{}", std::env::consts::ARCH, std::env::consts::OS)));
/// assert!(!moec_device::is_host("riscv64-unknown-linux-gnu") || cfg!(target_arch = "riscv64"));
/// ```
pub fn is_host(triple: &str) -> bool {
    let (arch, rest) = triple.split_once('-').unwrap_or((triple, ""));
    // Apple's word for it.
    let arch = if arch == "arm64" { "aarch64" } else { arch };
    arch == std::env::consts::ARCH && rest.contains(std::env::consts::OS)
}

/// Name of the CPU backend.
pub const CPU_BACKEND: &str = "cpu";

/// Backend of the CPUs of other hosts than the first.
pub const HOST_BACKEND: &str = "host";

/// Backend of the CPUs of other NUMA nodes than the first.
pub const NODE_BACKEND: &str = "node";

/// Whether units of a backend are CPUs beside the first unit, which a model is divided with: those of other hosts,
/// or of other NUMA nodes.
pub fn is_beside(backend: &str) -> bool {
    [HOST_BACKEND, NODE_BACKEND].contains(&backend)
}

impl Device {
    /// The backend of a unit: its own where it names one, else the CPU's, else the device's.
    pub fn backend_of<'a>(&'a self, unit: &'a DeviceUnit) -> &'a str {
        match (&unit.backend, unit.kind) {
            (Some(backend), _) => backend,
            (None, UnitKind::Cpu) if unit.host.is_some() && unit.cpus.is_some() => NODE_BACKEND,
            (None, UnitKind::Cpu) if unit.host.is_some() => HOST_BACKEND,
            (None, UnitKind::Cpu) => CPU_BACKEND,
            (None, _) => &self.backend,
        }
    }

    /// Name of the CPU's memory: the one that it names, else the first that no other unit names. `None` where
    /// the file names none.
    pub fn cpu_memory(&self) -> Option<&str> {
        let own = self.units.iter().find(|u| u.kind == UnitKind::Cpu).and_then(|u| u.memory.as_deref());
        let taken = |name: &str| self.units.iter().any(|u| u.memory.as_deref() == Some(name));
        let free = || self.memories.iter().map(|m| m.name.as_str()).find(|n| !taken(n) && *n != "disk");
        own.or_else(free)
    }

    /// Clusters of the CPU's cores; empty where the file names none.
    pub fn clusters(&self) -> &[Cluster] {
        self.units.iter().find(|u| u.kind == UnitKind::Cpu).map_or(&[], |u| &u.clusters)
    }

    /// Cluster whose cores read fastest from disk: the one that the disk names, else the one of the highest
    /// rate. `None` where the file states neither.
    pub fn reading_cluster(&self) -> Option<&Cluster> {
        let named = self.memories.iter().find_map(|m| m.reads_on.as_ref());
        if let Some(named) = named {
            return self.clusters().iter().find(|c| c.name == named.value);
        }
        let rated = self.clusters().iter().filter_map(|c| Some((c, c.disk_mb_per_s.as_ref()?.value)));
        rated.max_by(|a, b| a.1.total_cmp(&b.1)).map(|(cluster, _)| cluster)
    }

    /// Name of the memory that a unit works in, where that is not the CPU's.
    pub fn memory_of<'a>(&'a self, unit: &'a DeviceUnit) -> Option<&'a str> {
        unit.memory.as_deref().filter(|m| Some(*m) != self.cpu_memory())
    }

    /// 10⁹ bytes per second that programs read on a unit: its own figure, else that of its memory, where the file has
    /// one.
    pub fn bandwidth_of(&self, unit: &DeviceUnit) -> Option<f64> {
        let memory = unit.memory.as_deref().or(self.cpu_memory());
        let memory = self.memories.iter().find(|m| Some(m.name.as_str()) == memory);
        let of_memory = || memory?.bandwidth.last().map(Bandwidth::rate);
        unit.bandwidth().or_else(of_memory).filter(|&rate| rate > 0.0)
    }

    /// The link from one unit or memory to another.
    pub fn link(&self, from: &str, to: &str) -> Option<&Link> {
        self.links.iter().find(|l| l.from == from && l.to == to)
    }

    /// Microseconds that `bytes` bytes take from one memory to another; `None` where no link leads there.
    pub fn transfer_us(&self, from: &str, to: &str, bytes: f64) -> Option<f64> {
        let link = self.link(from, to)?;
        Some(link.latency_us.unwrap_or(0.0) + bytes / (link.rate() * 1e3))
    }

    /// Whether this machine's architecture and operating system are the device's.
    pub fn is_host(&self) -> bool {
        self.is_native() || is_host(&self.triple)
    }

    /// Whether the description is for the machine that runs the build.
    pub fn is_native(&self) -> bool {
        self.cpu == NATIVE
    }

    /// Cost of starting one step on a unit, in microseconds, where the file states it.
    pub fn dispatch_cost_us(&self, unit: usize) -> Option<f64> {
        self.units.get(unit)?.dispatch_cost_us.as_ref().map(|f| f.value)
    }

    /// Size of the cache of that level in bytes, where the file states it.
    pub fn cache_bytes(&self, level: u8) -> Option<u64> {
        self.caches.iter().find(|c| c.level == level).map(|c| c.bytes)
    }

    /// Share of the cache of that level for one core when all that share it work, in bytes, where the
    /// file states the size. A cache without stated sharers belongs to one core.
    pub fn cache_per_core(&self, level: u8) -> Option<u64> {
        let cache = self.caches.iter().find(|c| c.level == level)?;
        Some(cache.bytes / u64::from(cache.shared_by.unwrap_or(1).max(1)))
    }
}
