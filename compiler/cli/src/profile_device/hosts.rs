//! Several hosts as one device: each measured its own machine, and the first its connection with each.

use super::rounded;
use moec_backend::{Links, Peer, Trip};
use moec_base::{Error, Result};
use moec_cpu::{DISK, roofline};
use moec_device::{Bandwidth, Device, DeviceUnit, Figure, Host, Link, Memory};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

/// Lets the hosts meet. The first gets the device of all, and what it learned of the others; these get nothing.
///
/// # Errors
/// A host that cannot be reached, or that has another CPU.
pub(super) fn meet(links: &dyn Links, own: &Device) -> Result<Option<(Device, Vec<Peer>)>> {
    let text = toml::to_string(own).map_err(|e| Error::bug("a device cannot be written").because(e))?;
    let peers = links.meet(&text).map_err(Error::from)?;
    if !links.is_first() {
        return Ok(None);
    }
    join(own.clone(), &peers).map(|device| Some((device, peers)))
}

/// Span in which hosts read their memories, for each loop of the CPU.
const READING: Duration = Duration::from_millis(300);
/// Least share of its bandwidth that a host has while others read, if its memory is its own.
const OWN: f64 = 0.9;

/// Measures the memory of every host alone, in turns, and then those of all at once: hosts of one machine have less.
/// Every process calls it.
///
/// # Errors
/// A host that cannot be reached.
pub(super) fn read_memories(links: &dyn Links, threads: usize, memory: &mut Memory) -> Result<()> {
    let hosts = links.hosts();
    let rate = || rounded(roofline::reading_gb_per_s(threads, READING));
    // All start when all are ready.
    let meet = || -> Result<()> {
        if links.is_first() {
            (1..hosts).try_for_each(|host| links.receive(host).map(drop)).map_err(Error::from)?;
        } else {
            links.send(b"ready").map_err(Error::from)?;
        }
        links.broadcast(b"go").map(drop).map_err(Error::from)
    };
    meet()?;
    let mut alone = 0.0;
    for host in 0..hosts {
        if host == links.rank() {
            alone = rate();
        }
        meet()?;
    }
    let shared = rate();
    let source =
        |what: &str| format!("moec profile-device: reading memory in order, {threads} threads, {what}");
    for row in &mut memory.bandwidth {
        (row.gb_per_s, row.source) = (alone, source("no other host at work"));
    }
    if shared < OWN * alone {
        let figure = Figure { value: shared, source: source(&format!("{hosts} hosts at once")) };
        memory.shared_gb_per_s = Some(figure);
    }
    Ok(())
}

/// One device of the first host's and the others'.
fn join(mut device: Device, peers: &[Peer]) -> Result<Device> {
    let unnamed = || Error::bug("a measured device without a CPU and a memory");
    let memory = device.memories.first().ok_or_else(unnamed)?.name.clone();
    device.units.iter_mut().for_each(|unit| unit.memory = Some(memory.clone()));
    for (i, peer) in (1..).zip(peers) {
        let other = Device::parse(&peer.says, Path::new(&format!("host {i}")))
            .map_err(|e| Error::environment(format!("host {i} has another version of moec")).because(e))?;
        if (&other.triple, &other.cpu) != (&device.triple, &device.cpu) {
            return Err(Error::environment(format!(
                "host {i} has a CPU of LLVM's `{}` ({}), and the first host of `{}` ({})",
                other.cpu, other.triple, device.cpu, device.triple
            ))
            .hint("all hosts run the same kernels: measure hosts with one kind of CPU"));
        }
        device.features.retain(|feature| other.features.contains(feature));
        keep_slower_disk(&mut device.memories, &other.memories);
        let (unit, own) =
            other.units.into_iter().next().zip(other.memories.into_iter().next()).ok_or_else(unnamed)?;
        let name = format!("{memory}{i}");
        let host = format!("host{i}");
        device.units.push(DeviceUnit {
            name: format!("{}{i}", unit.name),
            host: Some(host.clone()),
            memory: Some(name.clone()),
            ..unit
        });
        device.memories.push(Memory { name: name.clone(), host: Some(host.clone()), ..own });
        device.hosts.push(Host { name: host });
        for (from, to, trips) in [(&memory, &name, &peer.to), (&name, &memory, &peer.from)] {
            device.links.push(link(from, to, trips).ok_or_else(|| {
                Error::environment(format!(
                    "large messages between `{from}` and `{to}` are not slower than small ones"
                ))
                .hint("other programs disturbed the measurement: try again")
            })?);
        }
    }
    device.description = format!("{} hosts, the first: {}", device.hosts.len() + 1, device.description);
    Ok(device)
}

/// Keeps the slower of two disks, if both were measured: costs take those of all hosts to be alike.
fn keep_slower_disk(own: &mut [Memory], theirs: &[Memory]) {
    let rate = |memory: &Memory| memory.bandwidth.last().map_or(0.0, Bandwidth::rate);
    let is_disk = |memory: &Memory| memory.name == DISK;
    let own = own.iter_mut().find(|memory| is_disk(memory));
    if let Some((own, theirs)) = own.zip(theirs.iter().find(|memory| is_disk(memory)))
        && rate(theirs) < rate(own)
    {
        *own = theirs.clone();
    }
}

/// A link with these measurements.
fn link(from: &str, to: &str, trips: &[Trip]) -> Option<Link> {
    let (least, most) = trips.first().zip(trips.last())?;
    Some(Link {
        from: from.to_owned(),
        to: to.to_owned(),
        gb_per_s: rounded(Trip::gb_per_s(trips)?),
        latency_us: Some(rounded(least.us / 2.0)),
        source: format!(
            "moec profile-device: messages of {} to {} bytes through MPI; the latency is half of a round trip",
            least.bytes, most.bytes
        ),
        achieved: None,
    })
}

/// Measurements of the connections.
pub(super) fn report(peers: &[Peer]) -> Value {
    let trips = |of: &[Trip]| {
        of.iter().map(|t| json!({"bytes": t.bytes, "round_trip_us": rounded(t.us)})).collect::<Vec<_>>()
    };
    let peer = |(host, peer): (usize, &Peer)| {
        json!({
            "host": host,
            "to": trips(&peer.to),
            "from": trips(&peer.from),
            "to_gb_per_s": Trip::gb_per_s(&peer.to).map(rounded),
            "from_gb_per_s": Trip::gb_per_s(&peer.from).map(rounded),
        })
    };
    (1..).zip(peers).map(peer).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use moec_device::LegalOps;

    fn device() -> Device {
        Device {
            name: "two".to_owned(),
            description: "a machine".to_owned(),
            backend: "cpu".to_owned(),
            triple: "x86_64-unknown-linux-gnu".to_owned(),
            cpu: "znver5".to_owned(),
            features: vec!["avx2".to_owned(), "avx512f".to_owned()],
            legal_ops: LegalOps::All,
            hosts: Vec::new(),
            units: vec![DeviceUnit { name: "cpu".to_owned(), ..DeviceUnit::default() }],
            memories: vec![Memory {
                name: "dram".to_owned(),
                bandwidth: vec![Bandwidth {
                    block_bytes: 64,
                    gb_per_s: 20.0,
                    source: "measured".to_owned(),
                    achieved: None,
                }],
                ..Memory::default()
            }],
            caches: Vec::new(),
            links: Vec::new(),
            power: None,
        }
    }

    fn peer(device: &Device) -> Peer {
        let trips = |us: f64| vec![Trip { bytes: 64, us: 50.0 }, Trip { bytes: 4 << 20, us }];
        Peer { says: toml::to_string(device).unwrap(), to: trips(3400.0), from: trips(1727.7) }
    }

    #[test]
    fn hosts_become_one_device_with_links_both_ways() {
        let other = Device { features: vec!["avx2".to_owned()], ..device() };
        let joined = join(device(), &[peer(&other), peer(&device())]).unwrap();
        let text = toml::to_string(&joined).unwrap();
        let read = Device::parse(&text, Path::new("two.toml")).unwrap();
        assert_eq!(read, joined);
        assert_eq!(read.features, ["avx2"]);
        assert_eq!(read.hosts.len(), 2);
        assert_eq!(read.bandwidth_of(&read.units[2]), Some(20.0));
        let rates = |from: &str, to: &str| {
            let link = read.link(from, to).unwrap();
            (link.gb_per_s, link.latency_us)
        };
        assert_eq!(rates("dram", "dram2"), (1.25, Some(25.0)));
        assert_eq!(rates("dram1", "dram"), (2.5, Some(25.0)));
    }

    #[test]
    fn disk_of_several_hosts_is_the_slowest() {
        let with_disk = |gb_per_s: f64| {
            let mut device = device();
            let mut disk = Memory { name: DISK.to_owned(), ..device.memories[0].clone() };
            disk.bandwidth[0].gb_per_s = gb_per_s;
            device.memories.push(disk);
            device
        };
        let joined = join(with_disk(2.5), &[peer(&with_disk(3.5)), peer(&with_disk(1.5)), peer(&device())]);
        let joined = joined.unwrap();
        let disks: Vec<_> = joined.memories.iter().filter(|memory| memory.name == DISK).collect();
        assert_eq!(disks.len(), 1);
        assert_eq!(disks[0].bandwidth[0].gb_per_s, 1.5);
        assert_eq!(joined.memories.iter().filter(|memory| memory.host.is_some()).count(), 3);
    }

    #[test]
    fn hosts_of_another_cpu_are_refused_by_name() {
        let other = Device { cpu: "sapphirerapids".to_owned(), ..device() };
        let error = join(device(), &[peer(&other)]).unwrap_err().to_string();
        assert!(error.contains("host 1 has a CPU of LLVM's `sapphirerapids`"), "{error}");
        let error = join(device(), &[Peer { says: "?".to_owned(), ..peer(&other) }]).unwrap_err().to_string();
        assert!(error.contains("host 1 has another version of moec"), "{error}");
    }
}
