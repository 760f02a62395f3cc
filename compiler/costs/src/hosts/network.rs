//! Hosts by their rates, and the network between them.

use super::Load;
use super::shape::{Experts, Product};
use moec_cpu::{CpuTarget, Figures};
use moec_device::{Bandwidth, Device, Memory, UnitKind};
use std::str::FromStr;

/// Assumed rate of a disk that was not measured, in 10⁹ bytes per second.
pub const DISK_GB_PER_S: f64 = 2.0;

/// A host.
#[derive(Clone, Debug, PartialEq)]
pub struct Host {
    /// 10⁹ bytes per second that its memory gives.
    pub gb_per_s: f64,
    /// The same while the other hosts read theirs.
    pub shared_gb_per_s: f64,
    /// 10⁹ operations per second of its CPU; a multiply-add counts as two.
    pub gops: f64,
    /// Bytes that a program can have of its memory, where the device file says.
    pub capacity: Option<f64>,
    /// Its connection to the first host; `None` for that one.
    pub link: Option<Network>,
}

impl Host {
    /// Microseconds in which rows are multiplied by weights.
    pub fn product_us(&self, product: Product, rows: f64) -> f64 {
        let read = product.bytes as f64 / (self.gb_per_s * 1e3);
        read.max(2.0 * rows * product.numbers as f64 / (self.gops * 1e3))
    }

    /// This host while the others work, too.
    #[must_use]
    pub fn beside_others(&self) -> Self {
        Self { gb_per_s: self.shared_gb_per_s, ..self.clone() }
    }

    /// Microseconds of a load of experts, of which a share is first read from a disk of so many 10⁹ bytes per second.
    pub fn experts_us(&self, of: &Experts, load: Load, (missing, disk_gb_per_s): (f64, f64)) -> f64 {
        let bytes = load.experts * of.bytes as f64;
        let read = bytes / (self.gb_per_s * 1e3);
        read.max(2.0 * load.pairs * of.numbers as f64 / (self.gops * 1e3))
            + missing * bytes / (disk_gb_per_s * 1e3)
    }

    /// Whether its memory holds so many bytes.
    pub fn holds(&self, bytes: u64) -> bool {
        self.capacity.is_none_or(|capacity| bytes as f64 <= capacity)
    }
}

/// A connection between two hosts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Network {
    /// 10⁹ bytes per second in one direction.
    pub gb_per_s: f64,
    /// Microseconds from a small message to its answer.
    pub round_trip_us: f64,
}

impl Network {
    /// Microseconds that bytes take, after the first.
    pub fn bytes_us(self, bytes: f64) -> f64 {
        bytes / (self.gb_per_s * 1e3)
    }
}

/// `10 Gb/s, 100 us`: a rate in bits (`Gb/s`, `Mb/s`) or bytes (`GB/s`, `MB/s`), and a round trip (`us`, `µs`,
/// `ms`).
impl FromStr for Network {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || "expected a rate and a round trip, such as `10 Gb/s, 100 us`".to_owned();
        let (rate, round_trip) = text.split_once(',').ok_or_else(wrong)?;
        let number = |text: &str, units: &[(&str, f64)]| {
            let text = text.trim();
            let (digits, factor) = units.iter().find_map(|(u, by)| Some((text.strip_suffix(u)?, by)))?;
            digits.trim().parse::<f64>().ok().map(|n| n * factor).filter(|n| n.is_finite() && *n > 0.0)
        };
        let rates = [("Gb/s", 0.125), ("Mb/s", 0.125e-3), ("GB/s", 1.0), ("MB/s", 1e-3)];
        let times = [("us", 1.0), ("µs", 1.0), ("ms", 1e3)];
        let gb_per_s = number(rate, &rates).ok_or_else(wrong)?;
        Ok(Self { gb_per_s, round_trip_us: number(round_trip, &times).ok_or_else(wrong)? })
    }
}

/// A rate of the hosts, and where it comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Constant {
    /// Description.
    pub what: &'static str,
    /// Its value, with the unit.
    pub value: String,
    /// Its source.
    pub source: String,
}

/// Several hosts, the first at the head.
#[derive(Clone, Debug, PartialEq)]
pub struct Hosts {
    /// The hosts; at least one.
    pub list: Vec<Host>,
    /// Their rates.
    pub constants: Vec<Constant>,
    /// 10⁹ bytes per second that the disk of each gives, if experts that its memory does not hold stay there.
    pub disk_gb_per_s: Option<f64>,
}

impl Hosts {
    /// The hosts of a target: what its device file says of their memories, CPUs and links, else what the CPU's cost
    /// model assumes.
    pub fn of(target: &CpuTarget) -> Self {
        let (device, figures) = (target.device(), target.figures());
        let names = std::iter::once(None).chain(device.hosts.iter().map(|h| Some(h.name.as_str())));
        let mut constants = Vec::new();
        let list = names.map(|name| host(device, figures, name, &mut constants)).collect();
        Self { list, constants, disk_gb_per_s: None }
    }

    /// The same hosts, each with so many bytes of memory at most, and experts on a disk like the target's.
    #[must_use]
    pub fn with_budget(mut self, budget: u64, target: &CpuTarget) -> Self {
        for host in &mut self.list {
            host.capacity = Some(host.capacity.map_or(budget as f64, |capacity| capacity.min(budget as f64)));
        }
        let measured = target.disk().and_then(|disk| disk.bandwidth.last());
        self.disk_gb_per_s = Some(measured.map_or(DISK_GB_PER_S, Bandwidth::rate));
        self
    }

    /// So many hosts like one, each connected with the first in the same way.
    pub fn alike(host: &Host, hosts: usize, network: Network) -> Self {
        let link = |i: usize| (i > 0).then_some(network);
        let list = (0..hosts.max(1)).map(|i| Host { link: link(i), ..host.clone() }).collect();
        Self { list, constants: Vec::new(), disk_gb_per_s: None }
    }

    /// The host where programs start.
    pub fn first(&self) -> &Host {
        &self.list[0]
    }

    /// Share of each host in the rate at which all of them read.
    pub fn shares(&self) -> Vec<f64> {
        let sum: f64 = self.list.iter().map(|h| h.gb_per_s).sum();
        self.list.iter().map(|h| h.gb_per_s / sum).collect()
    }

    /// Connections of the first host with the others.
    pub fn others(&self) -> impl Iterator<Item = Network> + '_ {
        self.list.iter().filter_map(|h| h.link)
    }

    /// Microseconds until all other hosts have got `to` bytes each and sent `from` bytes back: the longest round
    /// trip, and all bytes after each other.
    pub fn exchange_us(&self, to: f64, from: f64) -> f64 {
        let round_trip = self.others().map(|link| link.round_trip_us).fold(0.0, f64::max);
        round_trip + self.others().map(|link| link.bytes_us(to + from)).sum::<f64>()
    }
}

/// A host of a device, by its name; `None` is the first.
fn host(device: &Device, figures: &Figures, name: Option<&str>, constants: &mut Vec<Constant>) -> Host {
    let cpu = device.units.iter().find(|u| u.kind == UnitKind::Cpu && u.host.as_deref() == name);
    let memory = match name {
        None => device.cpu_memory(),
        Some(_) => cpu.and_then(|cpu| cpu.memory.as_deref()),
    };
    let memory: Option<&Memory> = device.memories.iter().find(|m| Some(m.name.as_str()) == memory);
    let mut constant = |what: &'static str, value: String, source: &str| {
        let constant = Constant { what, value, source: source.to_owned() };
        if !constants.contains(&constant) {
            constants.push(constant);
        }
    };
    let assumed = (figures.read.value * 1e-9, &figures.read.source);
    let stated = cpu.and_then(|cpu| {
        let own = cpu.bandwidth_gb_per_s.as_ref().map(|f| &f.source);
        let source = own.or(memory.and_then(|m| m.bandwidth.last()).map(|b| &b.source))?;
        Some((device.bandwidth_of(cpu)?, source))
    });
    let (gb_per_s, source) = stated.unwrap_or(assumed);
    constant("memory", format!("{gb_per_s:.1} GB/s"), source);
    let shared = memory.and_then(|m| m.shared_gb_per_s.as_ref());
    if let Some(shared) = shared {
        constant("memory, all hosts at once", format!("{:.1} GB/s", shared.value), &shared.source);
    }
    let shared_gb_per_s = shared.map_or(gb_per_s, |shared| shared.value.min(gb_per_s));
    let peaks = cpu.into_iter().flat_map(|cpu| cpu.peak.values()).filter(|p| p.rate() > 0.0);
    let peak = peaks.max_by(|a, b| a.rate().total_cmp(&b.rate()));
    // A NUMA node has its own cores, another host as many as this one.
    let count =
        cpu.and_then(|cpu| cpu.cpus.as_ref()).map_or(f64::from(figures.cores), |cpus| cpus.len() as f64);
    let cores = format!("{}; {count} cores", figures.bf16.source);
    let assumed = (figures.bf16.value * count * 1e-9, &cores);
    let (gops, source) = peak.map_or(assumed, |p| (p.rate(), &p.source));
    constant("peak", format!("{gops:.0} GOP/s"), source);
    let capacity = memory.and_then(|m| m.available.as_ref().or(m.capacity.as_ref())).map(|f| f.value);
    let ends = name.and(device.cpu_memory().zip(memory.map(|m| m.name.as_str())));
    let links = ends.and_then(|(own, other)| Some((device.link(own, other)?, device.link(other, own)?)));
    let link = links.map(|(there, back)| Network {
        gb_per_s: there.rate().min(back.rate()),
        round_trip_us: there.latency_us.unwrap_or(0.0) + back.latency_us.unwrap_or(0.0),
    });
    if let Some((link, (there, _))) = link.zip(links) {
        let value = format!("{:.3} GB/s, {:.1} µs there and back", link.gb_per_s, link.round_trip_us);
        constant("link", value, &there.source);
    }
    Host { gb_per_s, shared_gb_per_s, gops, capacity, link }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_are_read_with_their_units() {
        let of = |text: &str| text.parse::<Network>();
        assert_eq!(of("10 Gb/s, 100 us"), Ok(Network { gb_per_s: 1.25, round_trip_us: 100.0 }));
        assert_eq!(of("12.5GB/s,1.5 ms"), Ok(Network { gb_per_s: 12.5, round_trip_us: 1500.0 }));
        for wrong in ["10 Gb/s", "10, 100", "0 Gb/s, 1 us", "inf GB/s, 1 us", "10 Gb/s, -1 us"] {
            assert!(of(wrong).unwrap_err().contains("10 Gb/s, 100 us"), "{wrong}");
        }
    }
}
