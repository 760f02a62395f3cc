//! Figures of a device: what it can do, each with the place where the number comes from.

use crate::{Choice, GraphForm, Legality, MatmulTime};
use moec_ir::CpuList;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A number and its source.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Figure {
    /// The number; the field that holds it says the unit.
    pub value: f64,
    /// Source: a document with its page, or how it was measured.
    pub source: String,
}

/// Kind of a unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum UnitKind {
    /// Cores of a CPU.
    #[default]
    Cpu,
    /// A neural processing unit: static graphs of dense operations.
    Npu,
    /// A GPU with a memory of its own.
    Gpu,
    /// NDP DIMMs (near-data processing).
    Ndp,
}

impl UnitKind {
    /// Name in device files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Npu => "npu",
            Self::Gpu => "gpu",
            Self::Ndp => "ndp",
        }
    }
}

/// Throughput of one number format.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Peak {
    /// 10⁹ operations per second over the whole unit; a multiply-add counts as two.
    pub gops: f64,
    /// Source.
    pub source: String,
    /// Share of it that programs achieve, if the figure was published and not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub achieved: Option<Figure>,
}

impl Peak {
    /// 10⁹ operations per second that programs achieve.
    pub fn rate(&self) -> f64 {
        self.gops * share(self.achieved.as_ref())
    }
}

/// The achieved share; 1 if the file has none.
fn share(achieved: Option<&Figure>) -> f64 {
    achieved.map_or(1.0, |f| f.value)
}

/// A compute unit of a device, as its file describes it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceUnit {
    /// Name, unique in the device.
    pub name: String,
    /// Kind.
    pub kind: UnitKind,
    /// Memory that it works in, by its name; none: the CPU's ([`crate::Device::memory_of`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<String>,
    /// Host that it is of, by its name; none: the first, where the program starts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// CPUs that it is, of those of the machine where the program starts: a NUMA node of it, whose memory is the unit's.
    /// All nodes have them, the first unit too. Written as Linux does: `"0-15,32"`.
    #[serde(default, with = "crate::nodes::form", skip_serializing_if = "Option::is_none")]
    pub cpus: Option<CpuList>,
    /// Backend, where it is not the usual one; `family` in older files ([`crate::Device::backend_of`]).
    #[serde(default, alias = "family", skip_serializing_if = "Option::is_none")]
    pub backend: Option<String>,
    /// Cores, or what comes closest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cores: Option<u32>,
    /// Source of the unit's facts that are not figures: its cores, its generation, the organisation of its
    /// DIMMs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// Microseconds to start one step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dispatch_cost_us: Option<Figure>,
    /// Microseconds for another unit to learn that a step has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sync_cost_us: Option<Figure>,
    /// Most bytes of weights in one graph.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_graph_bytes: Option<Figure>,
    /// Rows of a graph are multiples of this many.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity_alignment: Option<Figure>,
    /// 10⁹ bytes per second that the unit reads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth_gb_per_s: Option<Figure>,
    /// Share of that bandwidth that programs achieve, if the figure was published and not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub achieved_bandwidth: Option<Figure>,
    /// Static graphs of one layer that the unit runs at a time ([`DeviceUnit::queues`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queues: Option<Figure>,
    /// Rates of graphs that run at a time, by ascending number of graphs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parallel: Vec<ParallelRate>,
    /// Microseconds to load one context, a compiled artifact of static graphs, at the start of a program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context_cost_us: Option<Figure>,
    /// Watts when it works.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy_w: Option<Figure>,
    /// Peak by number format (`f32`, `bf16`, `int8`).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub peak: BTreeMap<String, Peak>,
    /// Times of matrix products by ascending rows.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub matmul: Vec<MatmulTime>,
    /// Kinds of cores that it has, where they differ, the fastest first.
    #[serde(default, rename = "cluster", skip_serializing_if = "Vec::is_empty")]
    pub clusters: Vec<Cluster>,
    /// The Hexagon NPU that it is, where it is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hexagon: Option<Hexagon>,
    /// Generation of an NVIDIA GPU that its kernels are written for, as NVIDIA names it (`sm_90`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sm: Option<String>,
    /// NDP DIMMs, where the unit has them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dimms: Option<Dimms>,
    /// Form of its graphs.
    #[serde(default, skip_serializing_if = "GraphForm::is_default")]
    pub graph: GraphForm,
    /// Operations that the unit has or lacks; empty if it runs every operator.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub legality: Vec<Legality>,
}

/// Rate of several graphs that run at a time (NPUMoE, Table 5).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParallelRate {
    /// Graphs.
    pub graphs: u32,
    /// Time of these graphs one after the other, over their time in parallel; launching and waiting included.
    pub speedup: f64,
    /// Source.
    pub source: String,
}

/// Cores of one kind in a CPU that has several.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// Name.
    pub name: String,
    /// Number of cores.
    pub cores: u32,
    /// Highest clock, in 10⁹ per second.
    pub ghz: Figure,
    /// 10⁶ bytes per second that one of them reads from disk in random blocks of 4 KiB: a driver's work is a
    /// core's (PowerInfer-2, Table 1).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_mb_per_s: Option<Figure>,
}

/// Qualcomm's Hexagon NPU with its tensor unit, as graphs are compiled for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hexagon {
    /// Number of the system on chip in QNN: a graph is for one.
    pub soc: u32,
    /// Architecture: 75 is v75.
    pub arch: u32,
    /// MiB of tightly coupled memory (VTCM), where graphs keep what they work on.
    pub vtcm_mib: u32,
    /// Source of these.
    pub source: String,
}

/// NDP DIMMs where weights lie (TriMoE, §4.1 and Table 1).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dimms {
    /// NDP DIMMs in all.
    pub count: u32,
    /// Channels of the CPU that they share; a divisor of `count`.
    pub channels: u32,
    /// Ranks of a subchannel. A module of DDR5 has two subchannels.
    pub ranks: u32,
    /// Bank groups of a rank.
    pub bank_groups: u32,
    /// Banks of a bank group.
    pub banks: u32,
    /// Bytes of a row of a bank, over all chips of a rank.
    pub row_bytes: u32,
    /// Name of the timings of its memory, as `moec ndp-sim --timing` has them.
    pub timing: String,
    /// Bytes of one module.
    pub capacity: Figure,
    /// 10⁹ operations per second of one module in bf16; a multiply-add counts as two.
    pub gops: Figure,
    /// 10⁹ bytes per second of a link from one module to another; none: weights stay in their module.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_gb_per_s: Option<Figure>,
}

/// Read bandwidth of a memory for one block size.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bandwidth {
    /// Bytes per access.
    pub block_bytes: u64,
    /// 10⁹ bytes per second.
    pub gb_per_s: f64,
    /// Source.
    pub source: String,
    /// Share of it that programs achieve, if the figure was published and not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub achieved: Option<Figure>,
}

impl Bandwidth {
    /// 10⁹ bytes per second that programs achieve.
    pub fn rate(&self) -> f64 {
        self.gb_per_s * share(self.achieved.as_ref())
    }
}

/// Read bandwidth where reads are random within a range of a storage.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RangeBandwidth {
    /// Bytes of the range.
    pub range_bytes: u64,
    /// Bytes per access.
    pub block_bytes: u64,
    /// 10⁹ bytes per second.
    pub gb_per_s: f64,
    /// Source.
    pub source: String,
}

/// A memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Memory {
    /// Name, unique in the device.
    pub name: String,
    /// Host that it is of, by its name; none: the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity: Option<Figure>,
    /// Watts when units move data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy_w: Option<Figure>,
    /// Bytes that one program can have of it, where a system leaves it less.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub available: Option<Figure>,
    /// Bandwidth by block size, ascending; of a storage, that of random reads.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bandwidth: Vec<Bandwidth>,
    /// 10⁹ bytes per second that are left of it while the other hosts read theirs, where hosts share a machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared_gb_per_s: Option<Figure>,
    /// The same as `bandwidth` where reads follow each other.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sequential: Vec<Bandwidth>,
    /// Random reads within smaller ranges, by ascending range.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranges: Vec<RangeBandwidth>,
    /// Share of the bandwidth that is left where several cores read at once: a single queue is contended for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared_queue: Option<Figure>,
    /// Cluster of the CPU's cores that reads fastest from it, where the clusters state no rates
    /// ([`crate::Device::reading_cluster`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reads_on: Option<Choice<String>>,
}

/// A cache.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cache {
    /// 1, 2 or 3.
    pub level: u8,
    /// Size.
    pub bytes: u64,
    /// Cores that share it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared_by: Option<u32>,
    /// Source.
    pub source: String,
}

/// A link between two units or memories, by their names; those of two hosts are a network.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// One end of the link.
    pub from: String,
    /// The other.
    pub to: String,
    /// 10⁹ bytes per second in that direction.
    pub gb_per_s: f64,
    /// Microseconds from the start of a transfer to its first byte. Between hosts, that and the other direction's
    /// are a round trip.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency_us: Option<f64>,
    /// Source.
    pub source: String,
    /// Share of it that programs achieve, if the figure was published and not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub achieved: Option<Figure>,
}

impl Link {
    /// 10⁹ bytes per second that transfers achieve.
    pub fn rate(&self) -> f64 {
        self.gb_per_s * share(self.achieved.as_ref())
    }
}

/// Power.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Power {
    /// Watts when nothing runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_w: Option<Figure>,
    /// Watts when every unit works.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy_w: Option<Figure>,
}
