//! Silicon on which built-in devices were measured.

use serde::Serialize;

/// A measurement of a built-in device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Measured {
    /// The machine.
    pub machine: &'static str,
    /// Year and month, as `2026-11`.
    pub when: &'static str,
    /// Measurements there.
    pub what: &'static str,
}

/// Devices by name, with their measurements. A device without a row was never measured.
const MEASURED: &[(&str, Measured)] = &[
    (
        "native",
        Measured {
            machine: "Intel Xeon with AMX, 2 cores",
            when: "2026-11",
            what: "models (docs/benchmarks.md)",
        },
    ),
    (
        "native",
        Measured {
            machine: "AMD EPYC (Zen 5), 2 cores",
            when: "2026-11",
            what: "models (docs/benchmarks.md)",
        },
    ),
    (
        "sapphire-rapids",
        Measured {
            machine: "Intel Xeon with AMX, 1 core",
            when: "2026-11",
            what: "peaks of its device file",
        },
    ),
    (
        "h100-x86",
        Measured {
            machine: "NVIDIA H100 80GB HBM3, Xeon with AMX, 16 cores",
            when: "2026-11",
            what: "kernels, tiny families, four layers of OLMoE's shapes, the GPU's figures (docs/benchmarks.md)",
        },
    ),
];

/// Measurements of a built-in device.
pub fn measured(device: &str) -> impl Iterator<Item = &'static Measured> {
    MEASURED.iter().filter(move |(name, _)| *name == device).map(|(_, measured)| measured)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BUILT_IN;

    #[test]
    fn measurements_are_of_built_in_devices_and_dated() {
        for (name, measured) in MEASURED {
            assert!(BUILT_IN.iter().any(|(built_in, _)| built_in == name), "{name}");
            let dated = measured.when.split_once('-').is_some_and(|(year, month)| {
                year.parse::<u32>().is_ok() && (1..=12).contains(&month.parse::<u32>().unwrap_or(0))
            });
            assert!(dated, "{}", measured.when);
        }
        assert_eq!(measured("native").count(), 2);
        assert_eq!(measured("m2-ultra").count(), 0);
    }
}
