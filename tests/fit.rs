//! `moec fit`: its prediction is within 1 % of what a build of its model.toml takes.
#![allow(unreachable_pub, clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::support::{fails, ferris, json_of, moec, ok};
use std::path::Path;
use std::process::Command;

const HUGE_PAGE: u64 = 2 << 20;

/// `moec fit` of ferris with these options.
fn fit(toml: &Path, options: &[&str]) -> Command {
    let mut fit = moec();
    fit.arg("fit").arg(ferris()).arg("--force").arg("-o").arg(toml).args(options);
    fit
}

#[test]
fn the_first_candidate_that_fits_is_built_to_the_predicted_size() {
    let dir = tempfile::tempdir().unwrap();
    let (toml, bundle) = (dir.path().join("model.toml"), dir.path().join("b"));
    let report = json_of(fit(&toml, &["--memory", "20MiB", "--json"]).args(["--quiet"]));
    let (candidates, chosen) = (report["candidates"].as_array().unwrap(), &report["chosen"]);
    let memory = |of: &serde_json::Value| of["memory_bytes"].as_u64().unwrap();
    let first = candidates.iter().find(|c| memory(c) <= 20 << 20).unwrap();
    assert_eq!(first, chosen);
    assert!(memory(&candidates[0]) > 20 << 20, "bf16 is the first, and too large: {report}");

    ok(moec().arg("build").arg(&toml).args(["--quiet", "-o"]).arg(&bundle));
    let info = json_of(moec().arg("run").arg(&bundle).args(["info", "--json"]));
    let files: Vec<u64> = bundle
        .join("weights")
        .read_dir()
        .unwrap()
        .map(|file| file.unwrap().metadata().unwrap().len())
        .collect();
    let (size, written) = (chosen["size_bytes"].as_u64().unwrap(), files.iter().sum::<u64>());
    assert!(size.abs_diff(written) * 100 <= written, "{size} bytes predicted, {written} written");
    let of = |key: &str| info["memory"][key].as_u64().unwrap();
    let weights: u64 = files.iter().map(|bytes| bytes.next_multiple_of(HUGE_PAGE)).sum();
    let threads = std::thread::available_parallelism().unwrap().get() as u64;
    let takes = weights + of("arena_bytes") + of("kv_bytes") + threads * of("scratch_bytes_per_thread");
    assert!(memory(chosen).abs_diff(takes) * 100 <= takes, "{chosen}: {takes} bytes are taken");
}

#[test]
fn experts_stay_on_disk_if_memory_is_too_small() {
    let dir = tempfile::tempdir().unwrap();
    let (toml, bundle) = (dir.path().join("model.toml"), dir.path().join("b"));
    // With the whole context, the resident data alone would exceed the limit.
    let options = ["--memory", "40MiB", "--disk", "--context", "256", "--json", "--tokens-per-s", "1"];
    let report = json_of(&mut fit(&toml, &options));
    let on_disk = |c: &serde_json::Value| c["disk"] == true;
    assert!(report["candidates"].as_array().unwrap().iter().any(on_disk), "{report}");
    assert!(report["chosen"]["memory_bytes"].as_u64() <= Some(40 << 20), "{report}");
    ok(moec().arg("build").arg(&toml).args(["--quiet", "--no-run", "-o"]).arg(&bundle));
}

#[test]
fn missing_memory_is_reported_if_nothing_fits() {
    let dir = tempfile::tempdir().unwrap();
    let toml = dir.path().join("model.toml");
    let (code, stderr) = fails(&mut fit(&toml, &["--memory", "5MiB"]));
    assert_eq!(code, 1);
    assert!(stderr.contains("no format fits into 5.0 MiB:") && stderr.contains("`--disk`"), "{stderr}");
    let (_, stderr) = fails(&mut fit(&toml, &["--tokens-per-s", "1e12"]));
    assert!(stderr.contains("no format that fits decodes 1000000000000 tokens per second"), "{stderr}");
    let (code, stderr) = fails(&mut fit(&toml, &["--memory", "much"]));
    assert_eq!(code, 2);
    assert!(stderr.contains("expected a size such as `16GiB`"), "{stderr}");
    assert!(!toml.exists(), "nothing is written where nothing fits");
}
