//! The logits of every golden checkpoint.

use super::support::{distance, expected, golden, logits, spec};
use moec_testing::checkpoints::{CHECKPOINTS, List};
use std::collections::BTreeSet;

/// Imports, lowers, verifies and evaluates; the prompt is not a multiple of the chunk.
fn check(path: &str, tokens: usize, chunk: usize) {
    let dir = golden(path);
    let (ids, want) = expected(&dir);
    let vocab = want.len() / ids.len();
    let ids = &ids[..tokens.min(ids.len())];
    let got = logits(&dir, ids, chunk);
    let off = distance(&got, &want[..ids.len() * vocab]);
    assert!(off < 1e-4, "{path}: logits differ by {off}");
}

#[test]
fn logits_of_every_checkpoint() {
    for of in CHECKPOINTS {
        check(&format!("hf/{}", of.name), 48, 20);
    }
}

#[test]
fn ferris() {
    check("models/ferris", 600, 64);
}

#[test]
fn every_checkpoint_and_every_family_is_in_the_table() {
    let folders = std::fs::read_dir(golden("hf")).unwrap().map(|entry| entry.unwrap().path());
    let folders: BTreeSet<_> = folders.filter(|path| path.join("config.json").exists()).collect();
    let rows: BTreeSet<_> = CHECKPOINTS.iter().map(|of| golden("hf").join(of.name)).collect();
    assert_eq!(folders, rows);
    let families: BTreeSet<_> = moec_import::FAMILIES.iter().map(|family| family.name).collect();
    assert_eq!(families, CHECKPOINTS.iter().map(|of| of.family).collect());
    for of in CHECKPOINTS {
        let spec = spec(&golden("hf").join(of.name));
        assert_eq!(spec.family, of.family, "{}", of.name);
        // Whether it has experts is no opinion of the table.
        let dense = spec.params == spec.active_params;
        let left_out = of.without.iter().any(|&(list, _)| list == List::Mixtures);
        assert_eq!(dense || of.without.iter().any(|&(list, _)| list == List::Families), left_out, "{}", of.name);
    }
}
