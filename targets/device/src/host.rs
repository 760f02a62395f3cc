//! Facts about the machine that runs the build, for `native` and for measured device files: its caches, and
//! the rates of its matrix tiles.

use crate::{Cache, Device, Peak};
use std::path::Path;

/// Folder where Linux describes the caches of the first core, one folder each.
const SYS: &str = "/sys/devices/system/cpu/cpu0/cache";

/// Caches for data of this machine, by level; empty where the system does not report it.
pub fn caches() -> Vec<Cache> {
    let mut found = from_sys(Path::new(SYS));
    if found.is_empty() {
        found = from_cpu();
    }
    found.sort_by_key(|c| c.level);
    found.dedup_by_key(|c| c.level);
    found
}

/// Device file whose rates of tiles were measured on such a CPU.
const TILES: &str = "sapphire-rapids";

/// Rate of the tiles (AMX) of one core in a number format (`bf16`, `int8`), for machines whose file states no
/// rates. `native` detects the features of the CPU, not its speed, since two builds of one input must give
/// one bundle. `None`: the format does not exist.
pub fn tiles(format: &str) -> Option<Peak> {
    let device = Device::find(TILES).ok()?;
    let unit = device.units.first()?;
    let peak = unit.peak.get(format)?;
    let gops = peak.rate() / f64::from(unit.cores.unwrap_or(1).max(1));
    Some(Peak { gops, source: format!("as `{TILES}`: {}", peak.source), achieved: None })
}

/// Caches in a folder in the form of [`SYS`].
fn from_sys(folder: &Path) -> Vec<Cache> {
    let Ok(entries) = folder.read_dir() else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|entry| {
            let read = |file: &str| std::fs::read_to_string(entry.path().join(file)).ok();
            let kind = read("type")?;
            if !matches!(kind.trim(), "Data" | "Unified") {
                return None;
            }
            let shared_by = read("shared_cpu_list").and_then(|list| count(list.trim()));
            cache(read("level")?.trim().parse().ok()?, size(read("size")?.trim())?, shared_by, SYS)
        })
        .collect()
}

/// A cache of a level that device files know, of at least one byte.
fn cache(level: u8, bytes: u64, shared_by: Option<u32>, source: &str) -> Option<Cache> {
    ((1..=3).contains(&level) && bytes > 0).then(|| Cache { level, bytes, shared_by, source: source.into() })
}

/// Bytes of `32K`, `1M` or `512`.
fn size(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "" => 1,
        "K" => 1 << 10,
        "M" => 1 << 20,
        "G" => 1 << 30,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

/// Logical CPUs in a list such as `0-3,8`.
fn count(list: &str) -> Option<u32> {
    list.split(',').try_fold(0u32, |sum, range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        sum.checked_add(last.checked_sub(first)?.checked_add(1)?)
    })
}

/// Caches by CPUID: leaf 4 of Intel, leaf 8000001D of AMD, which have one form.
#[cfg(target_arch = "x86_64")]
fn from_cpu() -> Vec<Cache> {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    const AMD: u32 = 0x8000_001d;
    /// More caches than any CPU has.
    const MOST: u32 = 16;
    // AMD says in a feature bit whether its leaf is there; Intel has leaf 4 since 2004.
    let amd = __cpuid(0x8000_0000).eax >= AMD && __cpuid(0x8000_0001).ecx >> 22 & 1 != 0;
    if !amd && __cpuid(0).eax < 4 {
        return Vec::new();
    }
    let (leaf, source) = if amd { (AMD, "CPUID leaf 8000001D") } else { (4, "CPUID leaf 4") };
    (0..MOST)
        .map(|i| __cpuid_count(leaf, i))
        .take_while(|r| r.eax & 31 != 0)
        .filter(|r| matches!(r.eax & 31, 1 | 3)) // data, unified
        .filter_map(|r| {
            let field = |from: u32, bits: u32| u64::from(r.ebx >> from & ((1 << bits) - 1)) + 1;
            let bytes = field(0, 12) * field(12, 10) * field(22, 10) * (u64::from(r.ecx) + 1);
            cache((r.eax >> 5 & 7) as u8, bytes, Some((r.eax >> 14 & 0xfff) + 1), source)
        })
        .collect()
}

/// Caches of the fastest cores by macOS.
#[cfg(all(target_os = "macos", not(target_arch = "x86_64")))]
fn from_cpu() -> Vec<Cache> {
    let sysctl = |name: &str| -> Option<u64> {
        let out = std::process::Command::new("/usr/sbin/sysctl").args(["-n", name]).output().ok()?;
        String::from_utf8(out.stdout).ok()?.trim().parse().ok()
    };
    let shared = sysctl("hw.perflevel0.cpusperl2").and_then(|n| u32::try_from(n).ok());
    [(1, "hw.perflevel0.l1dcachesize", Some(1)), (2, "hw.perflevel0.l2cachesize", shared)]
        .into_iter()
        .filter_map(|(level, name, shared)| cache(level, sysctl(name)?, shared, &format!("sysctl {name}")))
        .collect()
}

/// Unknown on this system.
#[cfg(not(any(target_arch = "x86_64", target_os = "macos")))]
fn from_cpu() -> Vec<Cache> {
    Vec::new()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn host_sizes_and_cpu_lists_are_parsed() {
        let sizes = ["48K", "2M", "512", "1G", "K", "3T", "99999999999999999999K"].map(size);
        assert_eq!(sizes, [Some(49152), Some(2 << 20), Some(512), Some(1 << 30), None, None, None]);
        let lists = ["0", "0-1", "0-3,8-11,16", "", "3-1", "a"].map(count);
        assert_eq!(lists, [Some(1), Some(2), Some(9), None, None, None]);
    }

    #[test]
    fn tiles_have_rates_of_a_measured_machine() {
        let rate = |format: &str| tiles(format).map(|p| p.gops);
        // Sixteen cycles for a product of 16 by 16 by 64 bytes: 1024 operations per cycle in bf16, 2048 in
        // int8.
        assert!(rate("bf16").is_some_and(|g| (2000.0..4096.0).contains(&g)), "{:?}", rate("bf16"));
        assert!(rate("int8").zip(rate("bf16")).is_some_and(|(i, b)| i > 1.5 * b && i < 2.5 * b));
        assert!(tiles("bf16").is_some_and(|p| p.source.contains("measured")) && tiles("f64").is_none());
    }

    #[test]
    fn sysfs_folder_is_parsed() {
        let folder = std::env::temp_dir().join(format!("moec-caches-{}", std::process::id()));
        for (name, kind, level, size, shared) in [
            ("index0", "Data", "1", "48K", "0"),
            ("index1", "Instruction", "1", "32K", "0"),
            ("index2", "Unified", "2", "2048K", "0-1"),
            ("index4", "Unified", "4", "128M", "0-1"),
        ] {
            let one = folder.join(name);
            std::fs::create_dir_all(&one).unwrap();
            for (file, text) in
                [("type", kind), ("level", level), ("size", size), ("shared_cpu_list", shared)]
            {
                std::fs::write(one.join(file), format!("{text}\n")).unwrap();
            }
        }
        let mut found = from_sys(&folder);
        std::fs::remove_dir_all(&folder).unwrap();
        found.sort_by_key(|c| c.level);
        let facts: Vec<_> = found.iter().map(|c| (c.level, c.bytes, c.shared_by)).collect();
        assert_eq!(facts, [(1, 48 << 10, Some(1)), (2, 2 << 20, Some(2))]);
        assert_eq!(from_sys(Path::new("/no/such/folder")), []);
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn cpuid_and_the_operating_system_agree() {
        let (sys, own) = (from_sys(Path::new(SYS)), from_cpu());
        for a in &sys {
            if let Some(b) = own.iter().find(|b| b.level == a.level && a.level < 3) {
                assert_eq!(a.bytes, b.bytes, "level {}", a.level);
            }
        }
    }
}
