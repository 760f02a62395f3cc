//! Device files: built-in, complete and invalid ones.

use moec_device::{BUILT_IN, Device, DeviceError, DeviceUnit, Figure, LegalOps, UnitKind};
use proptest::prelude::*;
use std::path::Path;

const FULL: &str = r#"
name = "box"
description = "a box"
backend = "cpu"
triple = "x86_64-unknown-linux-gnu"
cpu = "sapphirerapids"
features = ["avx512f", "amx-bf16"]
legal_ops = ["linear", "add"]

[[unit]]
name = "cores"
kind = "cpu"
cores = 2
dispatch_cost_us = { value = 1.5, source = "measured" }
peak.bf16 = { gops = 5800, source = "measured, two threads" }

[[memory]]
name = "dram"
capacity = { value = 24e9, source = "/proc/meminfo" }
bandwidth = [{ block_bytes = 4096, gb_per_s = 25.4, source = "measured" }]

[[cache]]
level = 2
bytes = 2097152
source = "cpuid"

[[link]]
from = "cores"
to = "dram"
gb_per_s = 25.4
source = "measured"

[power]
idle_w = { value = 20, source = "wall meter" }
"#;

fn parse(text: &str) -> Result<Device, DeviceError> {
    Device::parse(text, Path::new("box.toml"))
}

/// The error of a text, as the user reads it.
fn error(text: &str) -> String {
    parse(text).expect_err("the text is wrong").to_string()
}

#[test]
fn built_in_devices_are_valid_and_named_like_their_files() {
    for (name, _) in BUILT_IN {
        let d = Device::find(name).unwrap();
        assert_eq!(d.name, *name);
        assert!(d.legal_ops.allows("expert_ffn"));
        let text = toml::to_string(&d).unwrap();
        assert_eq!(Device::parse(&text, Path::new(name)).unwrap(), d, "written and read again");
        // Kernels are blocked for these two caches; the caches of `native` are those that the operating
        // system reports.
        if !d.is_native() {
            let (first, second) = (d.cache_per_core(1).unwrap(), d.cache_per_core(2).unwrap());
            assert!(16 << 10 <= first && first < second, "{name}");
        }
    }
    assert!(Device::find("native").unwrap().is_native());
}

#[test]
#[cfg(target_os = "linux")]
fn the_caches_of_this_machine_are_found() {
    let native = Device::find("native").unwrap();
    let (first, second) = (native.cache_bytes(1).unwrap(), native.cache_bytes(2).unwrap());
    assert!(8 << 10 <= first && first < second, "{:?}", native.caches);
}

#[test]
fn every_file_of_the_folder_is_built_in() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../devices");
    for file in dir.read_dir().unwrap() {
        let path = file.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        let name = path.file_stem().unwrap().to_str().unwrap();
        assert!(BUILT_IN.contains(&(name, &text)), "`{name}` is missing in BUILT_IN");
    }
}

#[test]
fn each_feature_level_contains_the_lower_one() {
    let (v3, v4) = (Device::find("x86-64-v3").unwrap(), Device::find("x86-64-v4").unwrap());
    assert!(v3.features.iter().all(|f| v4.features.contains(f)));
    let amx = Device::find("sapphire-rapids").unwrap();
    assert!(v4.features.iter().all(|f| amx.features.contains(f)));
}

#[test]
fn a_full_file_is_read_and_written() {
    let d = parse(FULL).unwrap();
    assert_eq!(d.dispatch_cost_us(0), Some(1.5));
    assert_eq!(d.dispatch_cost_us(1), None);
    assert_eq!(d.cache_bytes(2), Some(2 << 20));
    assert_eq!(d.cache_bytes(3), None);
    assert_eq!(d.cache_per_core(2), Some(2 << 20));
    let shared = parse(&FULL.replace("bytes = 2097152", "bytes = 2097152\nshared_by = 4")).unwrap();
    assert_eq!(shared.cache_per_core(2), Some(512 << 10));
    assert_eq!(d.units[0].peak["bf16"].gops, 5800.0);
    assert!(d.legal_ops.allows("add") && !d.legal_ops.allows("softmax"));
    assert_eq!(parse(&toml::to_string(&d).unwrap()).unwrap(), d);
    let all = parse(&FULL.replace(r#"["linear", "add"]"#, "\"all\"")).unwrap();
    assert_eq!(all.legal_ops, LegalOps::All);
    assert_eq!(parse(&toml::to_string(&all).unwrap()).unwrap(), all);
}

/// Devices with a Neural Engine, and that unit.
fn with_npu() -> Vec<(Device, DeviceUnit)> {
    let all = BUILT_IN.iter().map(|(name, _)| Device::find(name).expect("a built-in device"));
    let found: Vec<_> = all
        .filter(|d| d.backend == "coreml")
        .filter_map(|d| Some((d.clone(), d.units[d.unit_of(UnitKind::Npu)?].clone())))
        .collect();
    assert!(found.len() >= 2);
    found
}

#[test]
fn npu_executes_only_operators_listed_as_legal() {
    for (device, npu) in with_npu() {
        assert_eq!((device.backend_of(&npu), device.backend_of(&device.units[0])), ("coreml", "cpu"));
        assert!(["linear", "attention", "expert_ffn", "add"].iter().all(|op| npu.is_legal(op)));
        // NPUMoE, Figure 4.
        let dynamic = ["router", "dispatch", "combine", "embed", "gather_rows", "layer_norm"];
        assert!(dynamic.iter().all(|op| npu.row(op).is_some() && !npu.is_legal(op)));
        assert!(!npu.is_legal("an operator of tomorrow"));
        // Figure 4: linear layers run as convolutions.
        for op in ["linear", "linear_glu", "head_linear"] {
            assert_eq!((npu.form(op), npu.runs(op)), (Some("conv1x1"), false), "{op}");
        }
        assert!(["conv1x1", "to_nchw", "from_nchw", "expert_ffn"].iter().all(|op| npu.runs(op)));
        assert_eq!((npu.form("router"), npu.runs("router")), (None, false));
        assert!(device.units[device.unit_of(UnitKind::Cpu).unwrap()].is_legal("router"));
    }
}

#[test]
fn costs_follow_the_table_of_times() {
    for (_, npu) in with_npu() {
        let (first, second) = (&npu.matmul[0], &npu.matmul[1]);
        let us = |rows: f64| npu.matmul_us(rows, first.weights as f64).unwrap();
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-6 * b, "{a} instead of {b}");
        near(us(f64::from(first.rows)), first.ms * 1e3);
        near(us(f64::from(first.rows + second.rows) / 2.0), (first.ms + second.ms) * 500.0);
        let last = npu.matmul.last().unwrap();
        near(us(f64::from(last.rows) * 3.0), last.ms * 3e3);
        near(npu.matmul_us(7.0, 2.0).unwrap(), npu.matmul_us(7.0, 1.0).unwrap() * 2.0);
        assert_eq!(us(0.0), 0.0);
        assert!(us(1.0) > 0.0 && us(1.0) < us(16.0));
        near(npu.launch_us(), 2800.0);
        // Eight experts of Phi-3.5-MoE fit, nine do not (NPUMoE, §4.2 and Table 5).
        let expert = 3 * 4096 * 6400 * 2;
        assert_eq!(npu.graph_limit().unwrap() / expert, 8);
    }
    assert_eq!(DeviceUnit::default().matmul_us(1.0, 1.0), None);
}

/// Published rates, and those computed from clocks and widths, are bounds that programs do not reach. The
/// cost model multiplies them by the share that programs reach.
#[test]
fn published_rates_are_derated() {
    let published = [
        "data sheet",
        "Intel ARK",
        "press release",
        "product brief",
        "PCI Express",
        "TriMoE, Table 1",
        "Ada GPU",
        "per cycle",
        "rated at",
        "TFLOPS",
    ];
    let is = |source: &str| published.iter().any(|p| source.contains(p)) && !source.contains("found from");
    let mut seen = 0;
    for (name, _) in BUILT_IN {
        let d = Device::find(name).unwrap();
        let mut check = |source: &str, achieved: Option<&Figure>| {
            if is(source) {
                let share = achieved.unwrap_or_else(|| panic!("{name}: {source}")).value;
                assert!(share < 0.95, "{name}: {source}");
                seen += 1;
            }
        };
        for u in &d.units {
            u.peak.values().for_each(|p| check(&p.source, p.achieved.as_ref()));
            u.bandwidth_gb_per_s.iter().for_each(|b| check(&b.source, u.achieved_bandwidth.as_ref()));
            if u.kind == UnitKind::Gpu {
                assert!(u.launch_us() > 0.0, "{name}: a launch costs something");
            }
        }
        for b in d.memories.iter().flat_map(|m| m.bandwidth.iter().chain(&m.sequential)) {
            check(&b.source, b.achieved.as_ref());
        }
        d.links.iter().for_each(|l| check(&l.source, l.achieved.as_ref()));
    }
    assert!(seen > 25, "{seen}");
}

/// Ranges of every `source = "…"` in a text: from the key to after the closing quote.
fn sources(text: &str) -> Vec<std::ops::Range<usize>> {
    const KEY: &str = "source = \"";
    let end = |from: usize| {
        let escaped = |at: usize| text[..at].ends_with('\\');
        text[from..]
            .match_indices('"')
            .map(|(i, _)| from + i)
            .find(|&at| !escaped(at))
            .expect("a closing quote")
            + 1
    };
    text.match_indices(KEY).map(|(at, _)| at..end(at + KEY.len())).collect()
}

/// Names of units that state facts other than figures (cores, GPU generation, organisation of DIMMs), but not
/// their source.
fn unsourced(d: &Device) -> Vec<&str> {
    let states = |u: &&DeviceUnit| u.cores.is_some() || u.sm.is_some() || u.dimms.is_some();
    d.units.iter().filter(states).filter(|u| u.source.is_none()).map(|u| &*u.name).collect()
}

#[test]
fn built_in_files_are_refused_without_any_one_of_their_sources() {
    let mut seen = 0;
    for (name, text) in BUILT_IN {
        assert!(unsourced(&Device::find(name).unwrap()).is_empty(), "{name}");
        for at in sources(text) {
            let line = text[..at.start].lines().count();
            let parsed = |start: usize, what: &str| {
                Device::parse(&format!("{}{what}{}", &text[..start], &text[at.end..]), Path::new(name))
            };
            let empty = parsed(at.start, "source = \" \"").expect_err(name).to_string();
            assert!(empty.contains("a figure needs a `source`"), "{name}, line {line}: {empty}");
            let comma = if text[..at.start].ends_with(", ") { 2 } else { 0 };
            match parsed(at.start - comma, "") {
                Err(e) => {
                    let gone = e.to_string();
                    assert!(gone.contains("missing field `source`"), "{name}, line {line}: {gone}");
                }
                // Users' files may leave the source of a unit's facts out. Built-in ones may not.
                Ok(d) => assert_eq!(unsourced(&d).len(), 1, "{name}, line {line}"),
            }
            seen += 1;
        }
    }
    assert!(seen > 250, "{seen}");
}

#[test]
fn achieved_rate_is_a_fraction_of_the_peak() {
    let text = BUILT_IN.iter().find(|(n, _)| *n == "h100-x86").unwrap().1;
    let d = parse(text).unwrap();
    let gpu = &d.units[1];
    assert_eq!(gpu.bandwidth(), Some(3350.0 * 0.9));
    assert_eq!(gpu.peak["bf16"].rate(), 989_500.0 * 0.0985);
    assert_eq!(d.links[0].rate(), 63.0 * 0.836);
    let transfer = d.transfer_us("dram", "vram", 63e3 * 0.836).unwrap();
    assert!((transfer - 9.74).abs() < 1e-9, "{transfer}: the link's latency and a microsecond");
    for (from, to) in
        [("value = 0.9,", "value = 1.1,"), ("value = 0.0985", "value = 0"), ("value = 0.836", "value = 79")]
    {
        assert!(error(&text.replacen(from, to, 1)).contains("must be a share above 0 and at most 1"), "{to}");
    }
}

#[test]
fn phone_devices_match_the_papers_measurements() {
    let phone = |name| Device::find(name).unwrap();
    let (best, middle) = (phone("snapdragon-8-gen-3"), phone("snapdragon-8-plus-gen-1"));
    for (d, cores, soc) in [(&best, [1, 5, 2], (57, 75)), (&middle, [1, 3, 4], (42, 69))] {
        assert_eq!(d.units[0].clusters.iter().map(|c| c.cores).collect::<Vec<_>>(), cores);
        let npu = &d.units[d.unit_of(UnitKind::Npu).unwrap()];
        let hexagon = npu.hexagon.as_ref().unwrap();
        assert_eq!((hexagon.soc, hexagon.arch), soc);
        assert!(npu.is_legal("linear") && npu.runs("linear") && !npu.is_legal("router"));
        // The memory available to a program is smaller than the capacity (PowerInfer-2, Table 3).
        let dram = &d.memories[0];
        assert!(dram.available.as_ref().unwrap().value < dram.capacity.as_ref().unwrap().value);
        assert!(d.memories.iter().any(|m| m.name == "disk" && !m.sequential.is_empty()));
    }
    // Reads of 4 KiB are faster the nearer they are (§2.3.2), those of larger blocks likewise.
    let disk = best.memories.iter().find(|m| m.name == "disk").unwrap();
    let reads = |block: u64, range: u64| {
        let (row, gain) = disk.random_reads(block, range).unwrap();
        row.rate() * gain
    };
    let [near, far] = [128 << 20, 1 << 40];
    assert!((reads(4096, near) - 1.0).abs() < 1e-9 && (reads(4096, far) - 0.85).abs() < 1e-9);
    assert_eq!(reads(100, far), reads(4096, far));
    assert!(reads(1 << 20, near) > reads(1 << 20, far));
    assert!(best.memories[0].random_reads(4096, near).unwrap().1 == 1.0);
    // Both units together read faster than either alone, but slower than the sum (§2.3.1).
    let rate = |i: usize| best.units[i].bandwidth_gb_per_s.as_ref().unwrap().value;
    let both = best.memories[0].bandwidth.last().unwrap().gb_per_s;
    assert!(rate(0) < rate(1) && rate(1) < both && both < rate(0) + rate(1));
    let text = BUILT_IN.iter().find(|(n, _)| *n == "snapdragon-8-gen-3").unwrap().1;
    for (from, to, expected) in [
        ("cores = 8", "cores = 7", "`unit.cluster`: clusters have 8 cores in all"),
        ("vtcm_mib = 8", "vtcm_mib = 0", "`unit.hexagon.vtcm_mib`: expected 1 to 64"),
        (
            "available = { value = 19",
            "available = { value = 29",
            "`memory.available`: more than the memory has",
        ),
    ] {
        assert!(text.contains(from), "{from}");
        assert!(error(&text.replacen(from, to, 1)).contains(expected), "{expected}");
    }
}

#[test]
fn reading_cluster_is_named_by_the_disk_or_has_the_highest_rate() {
    let text = |name| BUILT_IN.iter().find(|(n, _)| *n == name).unwrap().1;
    let reads = |text: &str| parse(text).unwrap().reading_cluster().map(|c| c.name.clone());
    // Table 1 has a rate for each cluster of one phone; the file of the other names the cluster.
    let (rated, named) = (text("snapdragon-8-gen-3"), text("snapdragon-8-plus-gen-1"));
    assert_eq!(reads(rated).as_deref(), Some("big"));
    assert_eq!(reads(&rated.replacen("value = 1076.10", "value = 900", 1)).as_deref(), Some("middle"));
    let key = "reads_on = { value = \"big\"";
    assert_eq!(reads(named).as_deref(), Some("big"));
    assert_eq!(reads(&named.replacen(key, "reads_on = { value = \"little\"", 1)).as_deref(), Some("little"));
    let without = named.lines().filter(|l| !l.starts_with("reads_on")).collect::<Vec<_>>().join("\n");
    assert_eq!((reads(&without), reads(FULL)), (None, None));
    for (from, to, expected) in [
        (
            key,
            "reads_on = { value = \"huge\"",
            "`memory.reads_on`: no cluster of the CPU is named `huge`; it has `big`, `middle`, `little`",
        ),
        ("name = \"middle\"", "name = \"big\"", "`unit.cluster.name`: `big` occurs twice"),
        ("source = \"assumed: as on snapdragon", "sources = \"", "unknown field `sources`"),
    ] {
        assert!(named.contains(from), "{from}");
        let found = error(&named.replacen(from, to, 1));
        assert!(found.contains(expected), "{found}");
    }
    let none = FULL.replacen(
        "name = \"dram\"",
        "name = \"dram\"\nreads_on = { value = \"big\", source = \"x\" }",
        1,
    );
    assert!(error(&none).contains("no cluster of the CPU is named `big`; it has none"));
}

#[test]
fn a_file_of_the_users_is_found_by_its_path() {
    let path = std::env::temp_dir().join(format!("moec-device-{}.toml", std::process::id()));
    std::fs::write(&path, FULL).unwrap();
    let found = Device::find(path.to_str().unwrap());
    std::fs::remove_file(&path).unwrap();
    assert_eq!(found.unwrap().name, "box");
    let gone = Device::find("no/such.toml").expect_err("there is no such file");
    assert_eq!(gone.to_string(), "device file `no/such.toml` cannot be read");
}

#[test]
fn unknown_names_get_the_nearest() {
    let e = Device::find("x86-64-v5").expect_err("no such device");
    assert_eq!(e.to_string(), "no target is named `x86-64-v5`");
    assert_eq!(e.hint(), "did you mean `x86-64-v3`? `moec targets` lists them all");
    let e = Device::find("quantum").expect_err("no such device");
    assert!(e.hint().starts_with("`moec targets` lists"));
}

/// NPUMoE, Table 5: what parallel launches save.
#[test]
fn parallel_graphs_take_the_time_of_the_papers_table() {
    let device = Device::find("m2-ultra").unwrap();
    let npu = &device.units[device.unit_of(UnitKind::Npu).unwrap()];
    assert_eq!(npu.queues(), 16);
    for (graphs, speedup) in
        [(0, 1.0), (1, 1.0), (2, 1.64), (3, 1.77), (4, 1.9), (10, 2.39), (16, 2.88), (40, 2.88)]
    {
        let found = npu.parallel_speedup(graphs);
        assert!((found - speedup).abs() < 1e-12, "{graphs} graphs: {found}");
    }
    // Two launches of 8 experts with 64 rows each: 0.11 ms per token of 1024.
    let us = 8.0 * npu.matmul_us(64.0, 78_643_200.0).unwrap();
    let all = 2.0 * 1830.0 + npu.parallel_us(2, 2, us) + 970.0;
    assert!((all / 1024.0 - 110.0).abs() < 1.0, "{all}");
    // Four of them on two queues take twice that.
    let twice = 1830.0 + 2.0 * (2800.0 + npu.parallel_us(2, 4, us));
    assert!((twice / all - 2.0).abs() < 1e-9, "{twice}");
    // One graph, and graphs of a unit without rates, take no less.
    assert!((npu.parallel_us(1, 4, us) - us).abs() < 1e-6);
    let unknown = DeviceUnit { parallel: Vec::new(), ..npu.clone() };
    assert!(unknown.parallel_us(4, 4, us) >= us && unknown.parallel_speedup(4) == 1.0);
}

#[test]
fn wrong_files_are_refused_with_line_and_key() {
    for (from, to, expected) in [
        (
            "cores = 2",
            "coers = 2",
            "line 13, column 1: unknown field `coers`, expected one of `name`, `kind`",
        ),
        ("name = \"box\"", "name = 3", "line 2, column 8: invalid type: integer `3`, expected a string"),
        ("level = 2", "level = 9", "`cache.level`: 9 is not in 1..=3"),
        (
            "level = 2",
            "shared_by = 0\nlevel = 2",
            "`cache.shared_by`: a cache must belong to at least one core",
        ),
        ("value = 1.5", "value = -1.5", "`unit.dispatch_cost_us`: -1.5 is not a finite number of at least 0"),
        ("source = \"cpuid\"", "source = \" \"", "`cache`: a figure needs a `source`"),
        ("to = \"dram\"", "to = \"disk\"", "`link`: no unit or memory is named `disk`"),
        ("name = \"dram\"", "name = \"cores\"", "`memory.name`: `cores` is empty, invalid or a duplicate"),
        ("\"avx512f\"", "\"+avx512f\"", "`features`: `+avx512f` is not an LLVM feature name"),
        ("cpu = \"sapphirerapids\"", "cpu = \"native\"", "`cpu` and `triple` must both be `native`"),
        ("cpu = \"sapphirerapids\"\n", "", "missing field `cpu`"),
        (
            "cores = 2",
            "max_graph_bytes = { value = 0.5, source = \"x\" }",
            "`unit.max_graph_bytes`: expected a whole",
        ),
        (
            "cores = 2",
            "matmul = [{ rows = 1, weights = 0, ms = 1, source = \"x\" }]",
            "`unit.matmul`: matrices must have",
        ),
        (
            "cores = 2",
            "matmul = [{ rows = 0, weights = 1, ms = 1, source = \"x\" }]",
            "`unit.matmul`: rows must ascend",
        ),
        (
            "cores = 2",
            "queues = { value = 65, source = \"x\" }",
            "`unit.queues`: expected a whole number in 1..=64",
        ),
        (
            "cores = 2",
            "parallel = [{ graphs = 2, speedup = 2.5, source = \"x\" }]",
            "`unit.parallel`: numbers of graphs must ascend from 2",
        ),
        (
            "cores = 2",
            "legality = [{ operation = \"a\", legal = true, ops = [\"add\", \"add\"], source = \"x\" }]",
            "`unit.legality`: `add` has two rows",
        ),
        (
            "cores = 2",
            "legality = [{ operation = \"a\", legal = true, ops = [\"add\"], form = \"mul\", source = \"x\" }]",
            "`unit.legality.form`: `mul` is not an operator that the unit runs directly",
        ),
        (
            "cores = 2",
            "legality = [{ operation = \"a\", legal = true, source = \"\" }]",
            "`unit.legality`: a figure",
        ),
    ] {
        let message = error(&FULL.replacen(from, to, 1));
        assert!(message.contains(expected), "`{to}`: {message}");
    }
}

proptest! {
    #[test]
    fn no_device_text_panics(text in "\\PC{0,200}") {
        let _ = parse(&text);
    }

    #[test]
    fn no_changed_device_line_panics(line in 0usize..40, with in "[a-z_]{0,9} ?=? ?[\\[\\]{}\"0-9a-z.,=-]{0,20}") {
        let text: Vec<&str> = FULL.lines().enumerate().map(|(i, l)| if i == line { &*with } else { l }).collect();
        let _ = parse(&text.join("\n"));
    }

    #[test]
    fn no_device_name_panics(name in "\\PC{0,40}") {
        let _ = Device::find(&name);
    }
}
