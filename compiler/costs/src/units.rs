//! Units of a device with the costs of experts there: all of them, and the two that `tier`, `group` and
//! `assign_residency` divide a model between.

use moec_backend::{Backend, StaticGraphs};
use moec_base::error::{Error, Result};
use moec_config::{PlacementConfig, UnitSetting};
use moec_device::{Device, DeviceUnit, UnitKind};
use moec_ir::placement::CAPACITY_ALIGN;
use moec_ir::plan::{Memory, MemoryLink, UnitRef};
use moec_ir::{Module, Operand, Weight};
use moec_profile::loads::LayerLoads;
use moec_targets::backends;
use std::collections::BTreeMap;

/// Preferred unit of operators and experts that static graphs can compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum UnitPreference {
    /// The unit with lower costs.
    #[default]
    Auto,
    /// The unit with static graphs.
    Graphs,
    /// The CPU.
    Cpu,
}

impl UnitPreference {
    /// All preferences.
    pub const ALL: [Self; 3] = [Self::Auto, Self::Graphs, Self::Cpu];
}

/// A unit without static graphs: it runs operators with dynamic shapes.
#[derive(Clone, Copy, Debug)]
pub struct DynamicUnit<'a> {
    /// Index in the device, and in the plan.
    pub index: u32,
    /// The unit.
    pub unit: &'a DeviceUnit,
    /// Its backend.
    pub backend: &'static dyn Backend,
}

/// All units of a device, in its order.
#[derive(Clone, Debug)]
pub struct UnitList<'a> {
    /// The device.
    pub device: &'a Device,
    /// Accelerators with dynamic shapes.
    pub accelerators: Vec<DynamicUnit<'a>>,
    /// True if one of these has NDP DIMMs.
    pub has_near_data: bool,
}

/// Unit that a key of `[placement]` names: the CPU or a unit with dynamic shapes.
#[derive(Clone, Copy, Debug)]
pub enum Named<'a> {
    /// No unit: the compiler decides.
    Auto,
    /// The CPU.
    Cpu,
    /// Another unit.
    Unit(DynamicUnit<'a>),
}

impl<'a> UnitList<'a> {
    /// The units of a device.
    pub fn of(device: &'a Device) -> Self {
        let dynamic = |(i, unit): (usize, &'a DeviceUnit)| {
            let backend = backends::of(unit, device).ok()?;
            let other = unit.kind != UnitKind::Cpu || unit.host.is_some();
            let accelerates = other && backend.graphs().is_none();
            Some(DynamicUnit { index: u32::try_from(i).ok()?, unit, backend }).filter(|_| accelerates)
        };
        let accelerators: Vec<DynamicUnit<'a>> =
            device.units.iter().enumerate().filter_map(dynamic).collect();
        let has_near_data = accelerators.iter().any(|f| f.backend.command_streams().is_some());
        Self { device, accelerators, has_near_data }
    }

    /// The CPU of each host, the first host's first.
    pub fn hosts(&self) -> Vec<u32> {
        let others = self.accelerators.iter().filter(|a| a.unit.host.is_some()).map(|a| a.index);
        std::iter::once(0).chain(others).collect()
    }

    /// Share of each host in the rate at which all of them read weights; equal where the device does not say.
    pub fn host_shares(&self) -> Vec<f64> {
        let hosts = self.hosts();
        let rate = |&unit: &u32| self.device.bandwidth_of(self.device.units.get(unit as usize)?);
        let rates = hosts.iter().map(rate).collect::<Option<Vec<f64>>>();
        let rates = rates.unwrap_or_else(|| vec![1.0; hosts.len()]);
        let sum: f64 = rates.iter().sum();
        rates.into_iter().map(|rate| rate / sum).collect()
    }

    /// The unit that a key of `[placement]` names, by its name or else its kind; `None` for `auto`.
    ///
    /// # Errors
    /// Fails if no unit has that name.
    pub fn named(&self, key: &str, setting: &UnitSetting) -> Result<Option<u32>> {
        let Some(name) = setting.unit() else { return Ok(None) };
        let units = &self.device.units;
        let by_name = units.iter().position(|u| u.name == name);
        let found = by_name.or_else(|| units.iter().position(|u| u.kind.name() == name));
        if found.is_none() && name == UnitKind::Cpu.name() {
            return Ok(Some(0));
        }
        let index = found.and_then(|i| u32::try_from(i).ok());
        let known: Vec<_> = units.iter().map(|u| format!("`{}`", u.name)).collect();
        let known = if known.is_empty() { "`cpu`".to_owned() } else { known.join(", ") };
        index.map(Some).ok_or_else(|| {
            Error::input(format!(
                "`{key}` under `[placement]` is `{name}`, and `{}` has no such unit",
                self.device.name
            ))
            .hint(format!("its units are {known}"))
        })
    }

    /// The unit with dynamic shapes that `mixer` or `rest` of `[placement]` names.
    ///
    /// # Errors
    /// Fails as [`UnitList::named`] does, or if the unit has static graphs.
    pub fn dynamic(&self, key: &str, setting: &UnitSetting) -> Result<Named<'a>> {
        match self.named(key, setting)? {
            None => Ok(Named::Auto),
            Some(0) => Ok(Named::Cpu),
            Some(index) => self.accelerator(index).map(Named::Unit).ok_or_else(|| {
                let name = self.device.units.get(index as usize).map_or("", |u| &u.name);
                Error::input(format!("`{key}` under `[placement]` is `{name}`, whose graphs are static"))
                    .hint("what of it such a unit runs goes with `attention`")
            }),
        }
    }

    /// Checks all names of units in `[placement]`, also those that no pass of this device uses. On a device
    /// with only a CPU, unknown names are valid and everything runs there, so that a `model.toml` serves
    /// several targets. Returns notes on these names.
    ///
    /// # Errors
    /// On devices with other units, fails as [`UnitList::named`] and [`UnitList::dynamic`] do.
    pub fn check(&self, placement: &PlacementConfig) -> Result<Vec<String>> {
        let alone = self.device.units.iter().all(|u| u.kind == UnitKind::Cpu);
        let mut notes = Vec::new();
        let roles = [
            ("attention", &placement.attention),
            ("mixer", &placement.mixer),
            ("experts", &placement.experts),
            ("decode", &placement.decode),
            ("rest", &placement.rest),
        ];
        for (key, setting) in roles {
            let found = self.named(key, setting);
            if let (true, Err(_), Some(name)) = (alone, &found, setting.unit()) {
                let device = &self.device.name;
                notes.push(format!(
                    "`{key}` under `[placement]` is `{name}`, which `{device}` has not: the CPU runs all of it"
                ));
                continue;
            }
            found?;
        }
        if !alone {
            self.dynamic("mixer", &placement.mixer)?;
            self.dynamic("rest", &placement.rest)?;
        }
        Ok(notes)
    }

    /// The preference for static graphs that a setting means.
    ///
    /// # Errors
    /// Fails as [`UnitList::named`] does, or for a share of a unit with static graphs, which takes experts by
    /// groups.
    pub fn preference(&self, key: &str, setting: &UnitSetting) -> Result<UnitPreference> {
        let Some(index) = self.named(key, setting)? else { return Ok(UnitPreference::Auto) };
        let unit = self.device.units.get(index as usize);
        let graphs = unit.is_some_and(|u| backends::graphs(u, self.device).is_some());
        match setting {
            UnitSetting::Share(name, _) if graphs => Err(Error::input(format!(
                "`{key}` under `[placement]` gives `{name}` a share of the experts"
            ))
            .because("a unit with static graphs takes experts by groups, as their loads pay for launches")
            .hint(format!("write `{key} = \"{name}\"` or `{key} = \"auto\"`"))),
            _ => Ok(if graphs { UnitPreference::Graphs } else { UnitPreference::Cpu }),
        }
    }

    /// The accelerator with that index, if its shapes are dynamic.
    pub fn accelerator(&self, index: u32) -> Option<DynamicUnit<'a>> {
        self.accelerators.iter().copied().find(|f| f.index == index)
    }

    /// Units, memories and links, in the form of a plan.
    pub fn for_plan(&self) -> (Vec<UnitRef>, Vec<Memory>, Vec<MemoryLink>) {
        let host =
            Memory { name: self.device.cpu_memory().unwrap_or("memory").to_owned(), ..Memory::default() };
        let mut memories = vec![host];
        let mut units = Vec::new();
        for unit in &self.device.units {
            let memory = self.device.memory_of(unit).map_or(0, |name| {
                memories.iter().position(|m| m.name == name).unwrap_or_else(|| {
                    let of = self.device.memories.iter().find(|m| m.name == name);
                    let capacity = of.and_then(|m| m.capacity.as_ref()).map(|c| c.value as u64);
                    memories.push(Memory { name: name.to_owned(), capacity, ..Memory::default() });
                    memories.len() - 1
                })
            });
            units.push(UnitRef {
                name: unit.name.clone(),
                backend: self.device.backend_of(unit).to_owned(),
                memory: memory as u32,
                queues: unit.queues(),
                cpus: unit.cpus.clone().unwrap_or_default(),
            });
        }
        let has_accelerator = units.iter().any(|u| u.backend != moec_device::CPU_BACKEND);
        if !has_accelerator {
            units = vec![UnitRef::cpu()];
        }
        let links = (1..memories.len() as u32).map(|to| MemoryLink { from: 0, to }).collect();
        (units, memories, links)
    }
}

/// A CPU and an NPU, with their indices in the device.
#[derive(Clone, Debug)]
pub struct Units<'a> {
    /// The device.
    pub device: &'a Device,
    /// Its CPU.
    pub cpu: &'a DeviceUnit,
    /// Its NPU.
    pub npu: &'a DeviceUnit,
    /// Static graphs of the NPU's backend.
    pub graphs: &'static dyn StaticGraphs,
    cpu_index: u32,
    npu_index: u32,
}

/// The matrices of one expert of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertSize {
    /// Numbers of its matrices.
    pub weights: u64,
    /// Bytes that count against a graph's limit, biases included.
    pub bytes: u64,
}

impl<'a> Units<'a> {
    /// The units of a device; `None` if it has no NPU, so that all shapes are dynamic.
    pub fn of(device: &'a Device) -> Option<Self> {
        let cpu = device.unit_of(UnitKind::Cpu)?;
        let (npu, graphs) =
            device.units.iter().enumerate().find_map(|(i, u)| Some((i, backends::graphs(u, device)?)))?;
        let index = |i: usize| u32::try_from(i).ok();
        Some(Self {
            device,
            cpu: device.units.get(cpu)?,
            npu: device.units.get(npu)?,
            graphs,
            cpu_index: index(cpu)?,
            npu_index: index(npu)?,
        })
    }

    /// Index of the CPU.
    pub fn cpu_index(&self) -> u32 {
        self.cpu_index
    }

    /// Index of the NPU.
    pub fn npu_index(&self) -> u32 {
        self.npu_index
    }

    /// Queues of the NPU, by index into [`super::timeline::queues`].
    pub fn npu_queues(&self) -> Vec<usize> {
        super::timeline::queues_of(self.device, self.npu_index as usize)
    }

    /// Names of the device's units.
    pub fn names(&self) -> Vec<String> {
        self.device.units.iter().map(|u| u.name.clone()).collect()
    }

    /// Alignment of capacities: the device's, and at least [`CAPACITY_ALIGN`].
    pub fn alignment(&self) -> u32 {
        let own = self.npu.capacity_alignment.as_ref().map_or(1, |f| f.value as u32).max(1);
        if own.is_multiple_of(CAPACITY_ALIGN) { own } else { own.saturating_mul(CAPACITY_ALIGN) }
    }

    /// Microseconds of a launch of `experts` experts with `capacity` rows each on the NPU. Padding costs as
    /// much as rows.
    pub fn graph_us(&self, experts: usize, capacity: u32, size: ExpertSize) -> f64 {
        let each = self.npu.matmul_us(f64::from(capacity), size.weights as f64).unwrap_or(0.0);
        self.npu.launch_us() + experts as f64 * each
    }

    /// Expected microseconds per call of experts in one graph, which has functions of these sizes. The graph
    /// is launched if one of the experts has a token, at the smallest size that holds all rows, or else the
    /// last.
    pub fn npu_us(&self, layer: &LayerLoads, experts: &[usize], sizes: &[u32], size: ExpertSize) -> f64 {
        let us: Vec<f64> = sizes.iter().map(|&rows| self.graph_us(experts.len(), rows, size)).collect();
        let of =
            |most: u32| sizes.iter().position(|&rows| rows >= most).and_then(|i| us.get(i)).or(us.last());
        let most = layer.samples.iter().map(|s| experts.iter().map(|&e| s[e]).max().unwrap_or(0));
        let sum: f64 = most.filter(|&n| n > 0).filter_map(|n| of(n).copied()).sum();
        sum / layer.samples.len().max(1) as f64
    }

    /// Expected microseconds per call of one expert on the CPU, which computes no padding.
    pub fn cpu_us(&self, layer: &LayerLoads, expert: usize, size: ExpertSize) -> f64 {
        let cost = |n: u32| self.cpu.matmul_us(f64::from(n), size.weights as f64).unwrap_or(0.0);
        layer.samples.iter().map(|s| cost(s[expert])).sum::<f64>() / layer.samples.len().max(1) as f64
    }
}

/// Sizes of the experts of every MoE layer.
///
/// # Errors
/// A bug of the compiler: a layer of experts without matrices.
pub fn expert_sizes(module: &Module) -> Result<BTreeMap<u32, ExpertSize>> {
    sizes(module, |_, numbers| numbers * 2)
}

/// The same sizes with the bytes that a unit counts: its graphs may store codes.
///
/// # Errors
/// Fails as [`expert_sizes`] does.
pub fn expert_sizes_on(module: &Module, units: &Units<'_>) -> Result<BTreeMap<u32, ExpertSize>> {
    sizes(module, |weight, numbers| units.graphs.bytes(units.npu, weight, numbers))
}

fn sizes(module: &Module, of: impl Fn(&Weight, u64) -> u64) -> Result<BTreeMap<u32, ExpertSize>> {
    let mut sizes = BTreeMap::new();
    let Some(graph) = module.entries.first() else { return Ok(sizes) };
    for node in graph.nodes.iter().filter(|n| n.op.expert_ffn().is_some()) {
        let (mut weights, mut bytes) = (0_u64, 0_u64);
        for input in &node.inputs {
            let Operand::Weight(id) = *input else { continue };
            let weight = module.weight(id);
            let each = weight.shape.iter().skip(1).map(|&d| d as u64).product::<u64>();
            bytes += of(weight, each);
            // Biases are one number per row; their cost is negligible.
            weights += if weight.shape.len() > 2 { each } else { 0 };
        }
        let layer =
            node.scope.layer.filter(|_| weights > 0).ok_or_else(|| Error::bug("experts without a layer"))?;
        sizes.insert(layer, ExpertSize { weights, bytes });
    }
    Ok(sizes)
}
