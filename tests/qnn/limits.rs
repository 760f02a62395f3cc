//! What is larger than a graph may be comes in parts that are not.

use super::{PHONE, files};
use crate::support::{Setup, checkpoint, moec, ok};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;

/// A head in 4 bits, with one row of sixteen in 8: 320 rows of 64 channels are 10880 bytes. A third of the rows would be
/// 3648 bytes with what aligns its two matrices, which is more than the limit.
#[test]
fn parts_of_a_head_are_below_the_limit() {
    const LIMIT: u64 = 3627;
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let setup = Setup { format: "f16", chunk: 16, batch: &[1], context: 64 };
    let toml = setup.write(&checkpoint("mixtral"), folder.path());
    let text = fs::read_to_string(&toml).unwrap();
    let from = text.lines().find(|line| line.starts_with("embeddings")).unwrap();
    fs::write(&toml, text.replace(from, "embeddings = \"q4\"") + "[placement]\nexperts = \"cpu\"\n").unwrap();
    let device = String::from_utf8(ok(moec().args(["targets", PHONE])).stdout).unwrap();
    let small = device.replace("value = 2147483648", &format!("value = {LIMIT}"));
    assert_ne!(small, device);
    fs::write(at("small.toml"), small).unwrap();
    let command = |verb: &str| {
        let mut command = moec();
        command.env("MOEC_CACHE", at("cache")).args([verb, "--quiet"]);
        command
    };
    let mut build = command("build");
    ok(build.arg(&toml).arg("--target").arg(at("small.toml")).args(["--no-run", "-o"]).arg(at("a.moec")));
    let artifacts = files(&at("a.moec/artifacts"));
    let weights: Vec<_> = artifacts.iter().filter(|(path, _)| path.ends_with("weights.bin")).collect();
    assert_eq!(weights.len(), 4, "{:?}", artifacts.keys().collect::<Vec<_>>());
    assert!(weights.iter().all(|(_, bytes)| bytes.len() as u64 <= LIMIT));
    let mut verify = command("verify");
    verify.arg(at("a.moec")).arg("--source").arg(checkpoint("mixtral")).arg("--json");
    let report: Value = serde_json::from_slice(&ok(&mut verify).stdout).unwrap();
    let heads: BTreeSet<&str> =
        report["packages"].as_array().unwrap().iter().map(|f| f["package"].as_str().unwrap()).collect();
    let wanted = (0..4).map(|i| format!("artifacts/head.{i}.qnn")).collect::<BTreeSet<_>>();
    assert!(heads.into_iter().eq(wanted.iter().map(|name| &**name)), "{report}");
}
