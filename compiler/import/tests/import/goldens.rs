//! The logits of every golden checkpoint.

use super::support::{distance, expected, golden, logits, shapes, spec};
use moec_import::lower::lower;
use moec_testing::checkpoints::{CHECKPOINTS, FOLDED, List};
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
        let left_out = |list| of.without.iter().any(|&(from, _)| from == list);
        let dense = spec.layers.iter().all(|layer| layer.moe().is_none());
        assert_eq!(left_out(List::Mixtures), dense || left_out(List::Families), "{}", of.name);
        let module = lower(&spec, &shapes(64, 16)).unwrap();
        let folded = module.states.iter().any(|state| state.kind.needs_snapshots());
        assert_eq!(FOLDED.contains(&of.name), folded && !left_out(List::Families), "{}", of.name);
    }
}
