//! NUMA nodes in a device file: the CPUs of its units.

use crate::{Device, UnitKind};
use moec_ir::CpuList;
use moec_runtime::platform::numa::Node;

/// Key of the CPUs.
pub(crate) const KEY: &str = "unit.cpus";

/// Checks the CPUs of all units.
///
/// # Errors
/// CPUs of a unit that is not a CPU, a node without CPUs, two nodes with the same CPU, a system that binds no threads.
pub(crate) fn check(device: &Device) -> Result<(), String> {
    let Some(some) = device.units.iter().find(|u| u.cpus.is_some()) else { return Ok(()) };
    if !device.is_native() && !device.triple.contains("linux") {
        return Err(format!(
            "threads are bound to NUMA nodes on Linux alone, and this is `{}`",
            device.triple
        ));
    }
    let mut earlier: Vec<(&str, &CpuList)> = Vec::new();
    for unit in &device.units {
        let (name, is_cpu) = (&unit.name, unit.kind == UnitKind::Cpu);
        let Some(cpus) = &unit.cpus else {
            if is_cpu {
                return Err(format!("`{name}` has none, and `{}` has: every node names its CPUs", some.name));
            }
            continue;
        };
        if !is_cpu {
            return Err(format!("`{name}` is no CPU: only nodes of CPUs have them"));
        }
        if cpus.is_empty() {
            return Err(format!("`{name}` is a node without CPUs"));
        }
        if let Some((other, cpu)) = earlier.iter().find_map(|(of, c)| Some((of, c.shared(cpus)?))) {
            return Err(format!("CPU {cpu} is of `{other}` and of `{name}`: each is of one node"));
        }
        earlier.push((name, cpus));
    }
    Ok(())
}

/// The first CPU of a device for this machine that this machine does not have, in words; `None` if all are there, or
/// the device is for another machine.
pub(crate) fn absent(device: &Device) -> Option<String> {
    let nodes = device.units.iter().filter_map(|u| Some((&u.name, u.cpus.as_ref()?)));
    let mut missing = nodes.filter_map(|(name, cpus)| Some(Node::new(name, cpus).err()?.to_string()));
    missing.next().filter(|_| device.is_native())
}

/// CPUs in a device file are text.
pub(crate) mod form {
    use moec_ir::CpuList;
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

    #[allow(clippy::ref_option, reason = "serde passes the field")]
    pub(crate) fn serialize<S: Serializer>(cpus: &Option<CpuList>, to: S) -> Result<S::Ok, S::Error> {
        cpus.as_ref().map(ToString::to_string).serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<CpuList>, D::Error> {
        String::deserialize(from)?.parse().map(Some).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use crate::Device;
    use std::path::Path;

    /// Two nodes with these lines in the first unit and in the second, as a device file for another machine.
    fn parsed(first: &str, second: &str) -> Result<Device, String> {
        let link = |from: &str, to: &str| {
            format!("[[link]]\nfrom = \"{from}\"\nto = \"{to}\"\ngb_per_s = 1.0\nsource = \"t\"\n")
        };
        let text = format!(
            "name = \"t\"\ndescription = \"t\"\nbackend = \"cpu\"\ntriple = \"x86_64-unknown-linux-gnu\"\n\
             cpu = \"x86-64-v3\"\n[[host]]\nname = \"node1\"\n\
             [[unit]]\nname = \"cpu\"\nkind = \"cpu\"\nmemory = \"ram\"\n{first}\n\
             [[unit]]\nname = \"cpu1\"\nkind = \"cpu\"\nhost = \"node1\"\nmemory = \"ram1\"\n{second}\n\
             [[memory]]\nname = \"ram\"\n[[memory]]\nname = \"ram1\"\nhost = \"node1\"\n{}{}",
            link("ram", "ram1"),
            link("ram1", "ram")
        );
        Device::parse(&text, Path::new("t.toml")).map_err(|e| e.to_string())
    }

    #[test]
    fn nodes_have_cpus_of_their_own() {
        let device = parsed("cpus = \"0-15,64\"", "cpus = \"16-31\"").unwrap();
        let text = toml::to_string(&device).unwrap();
        assert!(text.contains("cpus = \"0-15,64\""), "{text}");
        assert_eq!(Device::parse(&text, Path::new("t.toml")).unwrap(), device);
        for (first, second, why) in [
            ("cpus = \"0-16\"", "cpus = \"16-31\"", "`unit.cpus`: CPU 16 is of `cpu` and of `cpu1`"),
            ("cpus = \"0-15\"", "cpus = \"\"", "`unit.cpus`: `cpu1` is a node without CPUs"),
            ("cpus = \"0-15\"", "", "`unit.cpus`: `cpu1` has none, and `cpu` has"),
            ("", "cpus = \"0-15\"", "`unit.cpus`: `cpu` has none, and `cpu1` has"),
            ("cpus = \"0-\"", "cpus = \"1\"", "expected CPUs such as `0-15,32`"),
        ] {
            let error = parsed(first, second).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}
