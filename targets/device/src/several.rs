//! Devices of several CPUs like this machine's: `native-x2` is two hosts, `native-numa2` two NUMA nodes.

use crate::find::MOST_HOSTS;
use crate::{DeviceError, NATIVE};
use moec_ir::CpuList;
use moec_runtime::platform::numa;
use std::fmt::Write as _;

/// Rate and latency of a link between two processes of this machine, and their source. Hosts of `native-x2` and its
/// like may be processes of one machine; for machines on a network `moec profile-device --hosts` measures a file.
/// Nodes of `native-numa2` and its like copy between memories without processes between: these are lower limits.
const SHARED_MEMORY: (f64, f64, &str) = (
    2.0,
    1.7,
    "moec profile-device --hosts: two processes of an AMD EPYC (Zen 4) with two cores, by MPICH 4.0, answers of 1 MiB",
);

/// The device file of a name such as `native-x2` or `native-numa2`; `None` for other names.
///
/// # Errors
/// This machine cannot be divided into so many nodes.
pub(crate) fn find(name: &str) -> Option<Result<String, DeviceError>> {
    let of = name.strip_prefix(NATIVE)?.strip_prefix('-')?;
    let number = |of: &str| {
        let n: usize = of.parse().ok()?;
        ((2..=MOST_HOSTS).contains(&n) && of == n.to_string()).then_some(n)
    };
    if let Some(hosts) = of.strip_prefix('x').and_then(number) {
        return Some(Ok(text(name, &format!("{hosts} hosts like this machine"), hosts, "host", &[])));
    }
    let nodes = of.strip_prefix("numa").and_then(number)?;
    let divided =
        numa::divide(nodes).map_err(|message| DeviceError::Nodes { name: name.to_owned(), message });
    Some(divided.map(|division| {
        let description = if division.simulated {
            format!("{nodes} simulated NUMA nodes: this machine's CPUs, divided, and its one memory")
        } else {
            format!("{nodes} NUMA nodes of this machine")
        };
        text(name, &description, nodes, "node", &division.nodes)
    }))
}

/// A device file without figures but those of links: `count` CPUs, each with a memory, and the `cpus` of each, if
/// they are nodes. `kind`: name of the others, before their number.
fn text(name: &str, description: &str, count: usize, kind: &str, cpus: &[CpuList]) -> String {
    let (gb_per_s, latency_us, source) = SHARED_MEMORY;
    let cpus = |i: usize| cpus.get(i).map_or_else(String::new, |cpus| format!("cpus = \"{cpus}\"\n"));
    let mut text = format!(
        "name = \"{name}\"\ndescription = \"{description}\"\nbackend = \"cpu\"\n\
         triple = \"{NATIVE}\"\ncpu = \"{NATIVE}\"\n\
         [[unit]]\nname = \"cpu\"\nkind = \"cpu\"\nmemory = \"ram\"\n{}[[memory]]\nname = \"ram\"\n",
        cpus(0)
    );
    for i in 1..count {
        // Writing to a string cannot fail.
        let _ = write!(
            text,
            "[[host]]\nname = \"{kind}{i}\"\n\
             [[unit]]\nname = \"cpu{i}\"\nkind = \"cpu\"\nhost = \"{kind}{i}\"\nmemory = \"ram{i}\"\n{}\
             [[memory]]\nname = \"ram{i}\"\nhost = \"{kind}{i}\"\n",
            cpus(i)
        );
        for (from, to) in [("ram".to_owned(), format!("ram{i}")), (format!("ram{i}"), "ram".to_owned())] {
            let _ = write!(
                text,
                "[[link]]\nfrom = \"{from}\"\nto = \"{to}\"\ngb_per_s = {gb_per_s:?}\nlatency_us = {latency_us:?}\n\
                 source = \"{source}\"\n"
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use crate::{CPU_BACKEND, Device, HOST_BACKEND, NODE_BACKEND};

    #[test]
    fn names_of_several_hosts_and_nodes_are_found() {
        let hosts = Device::find("native-x3").unwrap();
        assert!(hosts.units.len() == 3 && hosts.units.iter().all(|u| u.cpus.is_none()));
        assert_eq!(hosts.backend_of(&hosts.units[2]), HOST_BACKEND);
        for none in ["native-x1", "native-x02", "native-numa1", "native-numa65", "native-numa", "native-2"] {
            assert!(Device::find(none).unwrap_err().to_string().contains("no target is named"), "{none}");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_machine_is_divided_into_nodes() {
        let cpus = moec_runtime::platform::cpu::cores();
        let found = Device::find("native-numa2");
        if cpus < 2 {
            assert!(found.unwrap_err().to_string().contains("1 CPU"));
            return;
        }
        let found = found.unwrap();
        let lists: Vec<_> = found.units.iter().map(|u| u.cpus.clone().unwrap()).collect();
        assert!(lists.iter().all(|l| !l.is_empty()) && lists[0].shared(&lists[1]).is_none(), "{lists:?}");
        let backends = found.units.iter().map(|u| found.backend_of(u)).collect::<Vec<_>>();
        assert_eq!(backends, [CPU_BACKEND, NODE_BACKEND]);
        if cpus < 64 {
            let error = Device::find("native-numa64").unwrap_err();
            assert!(
                error.to_string().contains("`native-numa64`: ") && error.to_string().contains("64 nodes")
            );
            assert!(error.hint().contains("`--target native`"), "{}", error.hint());
        }
    }
}
