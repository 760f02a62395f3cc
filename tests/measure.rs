//! Measuring subcommands: their output must be usable with any times.
#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

use crate::support;

use moec_device::Device;
use serde_json::Value;
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
    // The times of experts are read back exactly.
    let unit = &Device::find(device.to_str().unwrap()).unwrap().units[0];
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
    assert_eq!(steps(&["--decode", "1", "--context", "9"])["entry"], "decode[1]");
    let (code, stderr) = fails(moec().arg("steps").arg(&bundle).args(["--prefill", "17"]));
    assert!(code == 2 && stderr.contains("the largest of that kind takes 16"), "{stderr}");
}

/// With only peaks and bandwidth requested, experts are not measured, and there is no empty table.
#[test]
fn device_profile_without_matmul_has_no_expert_table() {
    let stdout = ok(moec().args(["profile-device", "--threads", "1", "--no-matmul"])).stdout;
    let text = String::from_utf8(stdout).unwrap();
    assert!(text.contains("[unit.peak.f32]") && !text.contains("matmul"), "{text}");
}
