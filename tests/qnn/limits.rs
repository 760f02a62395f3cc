//! Parts larger than a graph may be are split.

use super::{Tiny, files, without_costs};
use crate::support::ok;
use std::collections::BTreeSet;
use std::fs;

/// A head in 4 bits with one of sixteen rows in 8: 320 rows of 64 channels take 10880 bytes. A third of the
/// rows takes 3648 bytes with the alignment of its two matrices, which exceeds the limit.
#[test]
fn parts_of_a_head_are_below_the_limit() {
    const LIMIT: u64 = 3627;
    let made = Tiny::calibrated("mixtral", &[1], "[placement]\nexperts = \"cpu\"\n", Vec::new());
    let toml = made.at("model.toml");
    let text = fs::read_to_string(&toml).unwrap();
    let from = text.lines().find(|line| line.starts_with("embeddings")).unwrap();
    fs::write(&toml, text.replace(from, "embeddings = \"q4\"")).unwrap();
    let device = without_costs();
    let small = device.replace("value = 2147483648", &format!("value = {LIMIT}"));
    assert_ne!(small, device);
    fs::write(made.at("small.toml"), small).unwrap();
    ok(&mut made.build(made.at("small.toml")));
    let artifacts = files(&made.bundle().join("artifacts"));
    let weights: Vec<_> = artifacts.iter().filter(|(path, _)| path.ends_with("weights.bin")).collect();
    assert_eq!(weights.len(), 4, "{:?}", artifacts.keys().collect::<Vec<_>>());
    assert!(weights.iter().all(|(_, bytes)| bytes.len() as u64 <= LIMIT));
    let report = made.verify();
    let heads: BTreeSet<&str> =
        report["packages"].as_array().unwrap().iter().map(|f| f["package"].as_str().unwrap()).collect();
    let head_files = (0..4).map(|i| format!("artifacts/head.{i}.qnn")).collect::<BTreeSet<_>>();
    assert!(heads.into_iter().eq(head_files.iter().map(|name| &**name)), "{report}");
}
