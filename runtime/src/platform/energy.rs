//! Energy that the machine takes during a measurement: the counters of Intel's and AMD's CPUs (RAPL), or the
//! battery of a machine that runs on it. Linux only.

use std::fs::{read_dir, read_to_string};
use std::path::{Path, PathBuf};

/// Folders of Linux's powercap and power supply classes.
const POWERCAP: &str = "/sys/class/powercap";
const SUPPLIES: &str = "/sys/class/power_supply";

/// Source of the figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EnergySource {
    /// CPU packages and their memory controllers, by RAPL.
    Rapl,
    /// The whole machine, by its battery. Batteries count in steps of some joules.
    Battery,
}

impl EnergySource {
    /// Name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Rapl => "rapl",
            Self::Battery => "battery",
        }
    }
}

/// Counters at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct EnergyMeter {
    source: EnergySource,
    counters: Vec<Counter>,
}

/// A counter of microjoules.
#[derive(Clone, Debug, PartialEq)]
struct Counter {
    path: PathBuf,
    microjoules: f64,
    /// Value at which it begins again at 0; `None`: it falls.
    wraps: Option<f64>,
}

fn number(path: &Path) -> Option<f64> {
    read_to_string(path).ok()?.trim().parse().ok().filter(|n: &f64| n.is_finite() && *n >= 0.0)
}

fn word(path: &Path) -> String {
    read_to_string(path).map(|s| s.trim().to_owned()).unwrap_or_default()
}

/// Folders in a folder, sorted.
fn folders(at: &Path) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = read_dir(at).into_iter().flatten().flatten().map(|e| e.path()).collect();
    all.sort();
    all
}

impl EnergyMeter {
    /// Reads the counters; `None` where the machine has none that this user may read.
    pub fn now() -> Option<Self> {
        Self::below(Path::new(POWERCAP), Path::new(SUPPLIES))
    }

    fn below(powercap: &Path, supplies: &Path) -> Option<Self> {
        let rapl: Vec<Counter> = folders(powercap).iter().filter_map(|at| Counter::rapl(at)).collect();
        if !rapl.is_empty() {
            return Some(Self { source: EnergySource::Rapl, counters: rapl });
        }
        let batteries: Vec<Counter> =
            folders(supplies).iter().filter_map(|at| Counter::battery(at)).collect();
        (!batteries.is_empty()).then_some(Self { source: EnergySource::Battery, counters: batteries })
    }

    /// Source of the figures.
    pub fn source(&self) -> EnergySource {
        self.source
    }

    /// Joules since this moment; `None` if a counter has vanished. Counters that began again at 0 are taken
    /// to have done so once: at 100 W that takes some 40 minutes.
    pub fn joules_since(&self) -> Option<f64> {
        let since = |counter: &Counter| {
            let taken = match (counter.wraps, counter.read()? - counter.microjoules) {
                (Some(range), taken) if taken < 0.0 => taken + range,
                (Some(_), taken) => taken,
                (None, fallen) => -fallen,
            };
            Some(taken.max(0.0) * 1e-6)
        };
        self.counters.iter().map(since).sum()
    }
}

impl Counter {
    /// A domain of RAPL: a package, or its memory controller. Cores and graphics are parts of a package.
    fn rapl(at: &Path) -> Option<Self> {
        let name = word(&at.join("name"));
        let counts = name.starts_with("package") || name == "dram";
        let driver = at.file_name().is_some_and(|n| n.to_string_lossy().starts_with("intel-rapl:"));
        let path = counts.then(|| at.join("energy_uj")).filter(|_| driver)?;
        let wraps = Some(number(&at.join("max_energy_range_uj"))?);
        Some(Self { microjoules: number(&path)?, path, wraps })
    }

    /// A battery that is being discharged.
    fn battery(at: &Path) -> Option<Self> {
        let used = word(&at.join("type")) == "Battery" && word(&at.join("status")) == "Discharging";
        let path = ["energy_now", "charge_now"].map(|name| at.join(name)).into_iter().find(|p| p.exists());
        let path = path.filter(|_| used)?;
        let mut counter = Self { path, microjoules: 0.0, wraps: None };
        counter.microjoules = counter.read()?;
        Some(counter)
    }

    /// Microjoules now. Batteries count microwatt hours, or microampere hours at a voltage in microvolts.
    fn read(&self) -> Option<f64> {
        const SECONDS: f64 = 3600.0;
        let value = number(&self.path)?;
        match self.path.file_name()?.to_str()? {
            "energy_now" => Some(value * SECONDS),
            "charge_now" => Some(value * SECONDS * number(&self.path.with_file_name("voltage_now"))? * 1e-6),
            _ => Some(value),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn write(folder: &Path, files: &[(&str, &str)]) {
        fs::create_dir_all(folder).unwrap();
        for (name, text) in files {
            fs::write(folder.join(name), format!("{text}\n")).unwrap();
        }
    }

    #[test]
    fn packages_and_memory_are_added_and_counters_wrap() {
        let at = tempfile::tempdir().unwrap();
        let domain = |name, kind, count| {
            let files = [("name", kind), ("energy_uj", count), ("max_energy_range_uj", "1000000000")];
            write(&at.path().join(name), &files);
        };
        domain("intel-rapl:0", "package-0", "999000000");
        domain("intel-rapl:0:0", "core", "5");
        domain("intel-rapl:0:1", "dram", "1000000");
        domain("intel-rapl-mmio:0", "package-0", "7");
        let meter = EnergyMeter::below(at.path(), Path::new("/nowhere")).unwrap();
        assert_eq!((meter.source(), meter.counters.len()), (EnergySource::Rapl, 2));
        domain("intel-rapl:0", "package-0", "2000000");
        domain("intel-rapl:0:1", "dram", "1500000");
        assert!((meter.joules_since().unwrap() - 3.5).abs() < 1e-9);
        fs::remove_file(at.path().join("intel-rapl:0:1/energy_uj")).unwrap();
        assert_eq!(meter.joules_since(), None);
    }

    #[test]
    fn batteries_count_where_they_are_discharged() {
        let at = tempfile::tempdir().unwrap();
        let battery = at.path().join("BAT0");
        let meter = || EnergyMeter::below(Path::new("/nowhere"), at.path());
        write(&at.path().join("AC"), &[("type", "Mains"), ("online", "1")]);
        write(&battery, &[("type", "Battery"), ("status", "Charging"), ("energy_now", "50000000")]);
        assert_eq!(meter(), None);
        write(&battery, &[("status", "Discharging")]);
        let before = meter().unwrap();
        write(&battery, &[("energy_now", "49990000")]);
        assert!((before.joules_since().unwrap() - 36.0).abs() < 1e-6);
        fs::remove_file(battery.join("energy_now")).unwrap();
        write(&battery, &[("charge_now", "3000000"), ("voltage_now", "12000000")]);
        let before = meter().unwrap();
        write(&battery, &[("charge_now", "2999000")]);
        assert!((before.joules_since().unwrap() - 43.2).abs() < 1e-6);
        write(&battery, &[("charge_now", "much")]);
        assert_eq!((before.joules_since(), meter()), (None, None));
    }
}
