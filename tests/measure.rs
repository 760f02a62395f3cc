//! Measuring subcommands: their output must be usable with any times.
#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

use crate::support;

use moec_costs::units::Units;
use moec_device::Device;
use moec_ir::plan::GraphDecl;
use moec_measure::npu::{self, Observer, Shape};
use moec_runtime::bundle::BundleReader;
use moec_runtime::exec::graphs::{Graphs, f16};
use moec_testing::COREML;
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use support::{checkpoint, fails, moec, ok};

#[test]
fn a_measured_device_is_a_target() {
    let dir = tempfile::tempdir().unwrap();
    let profile = |args: &[&str]| {
        let mut command = moec();
        command.current_dir(&dir).args(["profile-device", "--threads", "1", "--name", "here"]).args(args);
        command
    };
    let report: Value = serde_json::from_slice(
        &ok(&mut profile(&["devices", "--json", "--disk", ".", "--disk-size", "4"])).stdout,
    )
    .unwrap();
    let peaks = report["peaks"].as_array().unwrap();
    assert!(peaks.iter().any(|p| p["format"] == "f32" && p["gops"].as_f64().unwrap() > 0.0));
    assert!(report["read_gb_per_s"].as_f64().unwrap() > 0.0);
    let rates = report["disk"]["rates"].as_array().unwrap();
    let orders = ["random", "sequential"];
    assert!(
        orders.iter().all(|order| rates.iter().any(|r| r["order"] == *order && r["block_bytes"] == 4096))
    );
    assert!(rates.iter().all(|r| r["gb_per_s"].as_f64().unwrap() > 0.0), "{report}");
    let matmul = report["matmul"].as_array().unwrap();
    let rows: Vec<u64> = matmul.iter().map(|m| m["rows"].as_u64().unwrap()).collect();
    assert_eq!(rows, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]);
    assert!(matmul.iter().all(|m| m["ms"].as_f64().unwrap() > 0.0), "{report}");
    let written = std::fs::read_to_string(dir.path().join("devices/here.toml")).unwrap();
    assert!(written.contains("name = \"disk\"") && written.contains("block_bytes = 524288"), "{written}");
    // The file that was measured is removed.
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 1);
    // An existing file of the same name is not replaced.
    assert!(fails(&mut profile(&["devices"])).1.contains("exists already"));
    let nameless = ["profile-device", "--no-matmul", "--name", "no such/name"];
    assert!(fails(moec().args(nameless)).1.contains("hint"));

    let device = dir.path().join("devices/here.toml");
    let found = Device::find(device.to_str().unwrap()).unwrap();
    let disk = found.memories.iter().find(|m| m.name == "disk").unwrap();
    assert_eq!([disk.bandwidth.len(), disk.sequential.len()], [8, 8]);
    assert!(matches!(&*disk.ranges, [near] if near.range_bytes == 512 << 10 && near.block_bytes == 4096));
    // The times of experts are read back exactly.
    let unit = &found.units[0];
    for (entry, printed) in unit.matmul.iter().zip(matmul) {
        let us = unit.matmul_us(f64::from(entry.rows), entry.weights as f64).unwrap();
        assert!((us / 1e3 / printed["ms"].as_f64().unwrap() - 1.0).abs() < 1e-9, "{entry:?} {printed}");
        assert!(entry.source.starts_with("measured by `moec profile-device`"), "{entry:?}");
    }
    assert_eq!(unit.matmul.len(), rows.len());
    let described = ok(moec().args(["targets", "--json"]).arg(&device)).stdout;
    let described: Value = serde_json::from_slice(&described).unwrap();
    assert_eq!(described["runs_here"], true, "{described}");
    let config = dir.path().join("model.toml");
    let source = checkpoint("olmoe");
    std::fs::write(
        &config,
        format!("[model]\nsource = {source:?}\n[shapes]\nmax_context = 64\nprefill_chunk = 16\n"),
    )
    .unwrap();
    let bundle = dir.path().join("olmoe.moec");
    ok(moec().arg("build").arg(&config).arg("--target").arg(&device).arg("--no-run").arg("-o").arg(&bundle));

    let steps = |args: &[&str]| {
        let out = ok(moec().arg("steps").arg(&bundle).args(["--threads", "2", "--json"]).args(args)).stdout;
        serde_json::from_slice::<Value>(&out).unwrap()
    };
    let report = steps(&["--prefill", "5"]);
    assert_eq!((report["entry"].as_str(), report["rows"].as_u64()), (Some("prefill[16]"), Some(5)));
    let steps_of = report["steps"].as_array().unwrap();
    let op = |name: &str| steps_of.iter().any(|s| s["op"] == name && s["kernel"] != "");
    assert!(op("router") && op("dispatch") && op("attention"), "{report}");
    assert!(steps_of.iter().all(|s| s["seconds"].as_f64().unwrap() >= 0.0));
    let decode = steps(&["--decode", "1", "--context", "9", "--limits"]);
    assert_eq!(decode["entry"], "decode[1]");
    // Two layers of 64 channels, 4 heads of 16, a router of 8 experts, two of them of 48 inner channels each; a
    // head of 320 tokens; ten positions. A multiply-add is two operations.
    let layer = 4 * 64 * 64 + 64 * 8 + 2 * 3 * 64 * 48 + 10 * 4 * (16 + 16);
    let limits: Vec<&Value> =
        decode["steps"].as_array().unwrap().iter().filter_map(|s| s.get("limit")).collect();
    let sum = |key: &str| limits.iter().map(|limit| limit[key].as_f64().unwrap()).sum::<f64>();
    assert_eq!(sum("operations"), f64::from(2 * (2 * layer + 64 * 320)), "{decode}");
    assert!(limits.iter().all(|limit| limit["seconds"].as_f64().unwrap() > 0.0), "{decode}");
    // Two of eight experts are read, and of the embedding a row.
    let bytes =
        std::fs::read_dir(bundle.join("weights")).unwrap().map(|f| f.unwrap().metadata().unwrap().len());
    assert!(sum("bytes") < 0.6 * bytes.sum::<u64>() as f64, "{decode}");
    let (code, stderr) = fails(moec().arg("steps").arg(&bundle).args(["--prefill", "17"]));
    assert!(code == 2 && stderr.contains("the largest of that kind takes 16"), "{stderr}");
}

/// A recurrent state begins each measurement as the tokens before the call have left it.
#[test]
fn steps_of_a_hybrid_are_timed_after_a_context() {
    let dir = tempfile::tempdir().unwrap();
    let (config, bundle) = (dir.path().join("model.toml"), dir.path().join("m.moec"));
    let source = checkpoint("qwen3_next");
    std::fs::write(&config, format!("[model]\nsource = {source:?}\n[shapes]\nmax_context = 64\n")).unwrap();
    ok(moec().arg("build").arg(&config).arg("--no-run").arg("-o").arg(&bundle));
    let steps = ["steps", "--decode", "1", "--context", "9", "--repeat", "3", "--threads", "1", "--json"];
    let report: Value = serde_json::from_slice(&ok(moec().args(steps).arg(&bundle)).stdout).unwrap();
    assert_eq!((report["entry"].as_str(), report["context"].as_u64()), (Some("decode[1]"), Some(9)));
    assert!(report["steps"].as_array().unwrap().iter().any(|s| s["op"] == "delta_rule"), "{report}");
    let (_, stderr) = fails(moec().arg("steps").arg(&bundle).args(["--decode", "1", "--context", "64"]));
    assert!(stderr.contains("context"), "{stderr}");
}

/// With only peaks and bandwidth requested, experts are not measured, and there is no empty table.
#[test]
fn device_profile_without_matmul_has_no_expert_table() {
    let stdout = ok(moec().args(["profile-device", "--threads", "1", "--no-matmul"])).stdout;
    let text = String::from_utf8(stdout).unwrap();
    assert!(text.contains("[unit.peak.f32]") && !text.contains("matmul"), "{text}");
}

/// Nanoseconds of a clock that runs of a unit advance.
#[derive(Clone, Default)]
struct Clock(Arc<AtomicU64>);

impl Observer for Clock {
    fn now(&mut self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }

    fn beside(&mut self, body: &mut dyn FnMut(&mut Self) -> moec_base::Result<()>) -> moec_base::Result<f64> {
        body(self).map(|()| 10.0)
    }
}

/// An emulator of a unit, with known times.
struct Timed {
    emulator: Box<dyn Graphs>,
    clock: Clock,
    rows: Vec<u64>,
    ran: AtomicU64,
}

const LAUNCH_NS: u64 = 500_000;
const ROW_NS: u64 = 7_000;

impl Graphs for Timed {
    fn name(&self) -> &'static str {
        self.emulator.name()
    }

    fn load(
        &mut self,
        bundle: &BundleReader,
        graphs: &[GraphDecl],
        slots: usize,
    ) -> moec_runtime::Result<()> {
        self.rows = graphs.iter().map(|g| u64::from(g.inputs[0].shape[0])).collect();
        self.emulator.load(bundle, graphs, slots)
    }

    fn run(
        &self,
        graph: usize,
        slot: usize,
        inputs: &[&[f16]],
        outputs: &mut [&mut [f16]],
    ) -> moec_runtime::Result<()> {
        self.emulator.run(graph, slot, inputs, outputs)?;
        assert!(outputs[0].iter().any(|x| *x != f16::ZERO), "experts of small numbers give some");
        self.ran.fetch_add(1, Ordering::Relaxed);
        // Slow enough that few runs fill the time of a measurement.
        self.clock.0.fetch_add(100 * (LAUNCH_NS + self.rows[graph] * ROW_NS), Ordering::Relaxed);
        Ok(())
    }
}

/// The graphs that a measurement writes are those of a build: emulators load and execute them. Known times of
/// a launch and of rows come out again.
#[test]
fn npu_is_measured_by_graphs_that_emulators_execute() {
    let coreml = COREML.met_or_skip();
    for name in ["snapdragon-8-gen-3", "m2-ultra"].into_iter().take(1 + usize::from(coreml)) {
        let device = Device::find(name).unwrap();
        let units = Units::of(&device).unwrap();
        let shape = Shape { hidden: 64, inner: 32, experts: 3, rows: vec![32, 64, 128] };
        let folder = tempfile::tempdir().unwrap();
        let written = npu::write(&shape, units.npu, units.graphs, folder.path()).unwrap();
        let mut clock = Clock::default();
        let (emulator, rows, ran) = (units.graphs.host(), Vec::new(), AtomicU64::default());
        let mut unit = Timed { emulator, clock: clock.clone(), rows, ran };
        let found = npu::measure(&shape, &written, folder.path(), &mut unit, &mut clock, name).unwrap();
        let near = |found: f64, known: u64| (found / known as f64 - 1.0).abs() < 1e-6;
        assert!(near(found.launch_us, 100 * LAUNCH_NS / 1000), "{name}: {found:?}");
        let table = found.experts.iter().map(|t| (t.rows, t.ms * 1e6));
        assert!(
            table.clone().all(|(rows, ns)| near(ns, 100 * u64::from(rows) * ROW_NS)),
            "{name}: {found:?}"
        );
        assert_eq!(table.map(|(rows, _)| rows).collect::<Vec<_>>(), shape.rows, "{name}");
        assert!(found.shared_gb_per_s[1] == 10.0 && near(found.shared_gb_per_s[0] / found.gb_per_s, 1));
        assert!(unit.ran.into_inner() >= 7 * 6, "{name}: each graph runs several times");
    }
}

/// Without an NPU, the reason is a warning, and the device has the published figures of the target.
#[test]
fn absent_npu_keeps_published_figures() {
    let dir = tempfile::tempdir().unwrap();
    let profile = |npu: &str| {
        let mut command = moec();
        command.current_dir(&dir).args([
            "profile-device",
            ".",
            "--threads",
            "1",
            "--name",
            "mine",
            "--npu",
            npu,
        ]);
        command
    };
    let (code, stderr) = fails(&mut profile("native"));
    assert!(code == 2 && stderr.contains("`native` has no NPU"), "{stderr}");
    let out = ok(&mut profile("m2-ultra"));
    let stderr = String::from_utf8(out.stderr).unwrap();
    if !cfg!(target_os = "macos") {
        assert!(stderr.contains("`npu` is not measured: this system has no driver"), "{stderr}");
        let published = Device::find("m2-ultra").unwrap();
        let mine = Device::find(dir.path().join("mine.toml").to_str().unwrap()).unwrap();
        let [own, published] = [&mine, &published].map(|d| d.units.iter().find(|u| u.name == "npu").unwrap());
        assert_eq!((&own.matmul, &own.dispatch_cost_us), (&published.matmul, &published.dispatch_cost_us));
        assert_eq!(own.backend.as_deref(), Some("coreml"));
    }
    ok(moec().args(["targets", "--json"]).arg(dir.path().join("mine.toml")));
}
