//! The logits of every golden checkpoint.

use super::support::{Folder, Tensor, distance, expected, golden, logits, shapes, spec};
use moec_import::lower::lower;
use moec_testing::checkpoints::{CHECKPOINTS, Checkpoint, FOLDED, List};
use std::collections::BTreeSet;
use std::fs;

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

/// The same weights with the published configuration give bitwise equal logits.
#[test]
fn published_configurations() {
    let published = |of: &&Checkpoint| golden("hf").join(of.name).join("published.json").exists();
    let all: Vec<_> = CHECKPOINTS.iter().filter(published).collect();
    assert!(all.len() > 15, "{all:?}");
    for of in all {
        let dir = golden("hf").join(of.name);
        let (ids, _) = expected(&dir);
        let folder = tempfile::tempdir().unwrap();
        fs::copy(dir.join("published.json"), folder.path().join("config.json")).unwrap();
        fs::copy(dir.join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
        let as_published = logits(folder.path(), &ids[..20], 16);
        assert_eq!(as_published, logits(&dir, &ids[..20], 16), "{}", of.name);
    }
}

/// Names of multimodal checkpoints: vision tensors are skipped, and a warning names them.
#[test]
fn text_parts_of_multimodal_models_are_imported() {
    for (family, seen) in [
        ("mistral4", "vision_tower.patch_conv.weight"),
        ("llama4", "multi_modal_projector.linear_1.weight"),
        ("step3p7", "vit_large_projector.weight"),
    ] {
        let dir = golden("hf").join(family);
        let (ids, _) = expected(&dir);
        let mut folder = Folder::golden(family);
        let text = fs::read(dir.join("published.json")).unwrap();
        folder.config = serde_json::from_slice(&text).unwrap();
        // Step's text part keeps its own names.
        if family != "step3p7" {
            let names = std::mem::take(&mut folder.tensors).into_iter();
            folder.tensors = names.map(|(name, t)| (format!("language_model.{name}"), t)).collect();
        }
        folder.tensors.insert(seen.into(), Tensor::f32(&[1], &[1.0]));
        let published = folder.write();
        let warnings = spec(published.path()).warnings.join("\n");
        assert_eq!(
            warnings,
            "the vision part of the model (1 tensors) is not used: moec runs the text part alone"
        );
        assert_eq!(logits(published.path(), &ids[..20], 16), logits(&dir, &ids[..20], 16), "{family}");
    }
}

#[test]
fn ferris() {
    check("models/ferris", 600, 64);
}

#[test]
fn every_checkpoint_and_every_family_is_in_the_table() {
    let folders = fs::read_dir(golden("hf")).unwrap().map(|entry| entry.unwrap().path());
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

/// A family fits on two pages; code that families share lies in `mixers` and `common.rs`.
#[test]
fn family_files_are_short() {
    let folder = golden("../compiler/import/src/families");
    let mut files = 0;
    for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if path.file_stem().unwrap() == "mod" {
            continue;
        }
        let lines = fs::read_to_string(&path).unwrap().lines().count();
        assert!(lines <= 120, "{}: {lines} lines", path.display());
        files += 1;
    }
    assert_eq!(files, moec_import::FAMILIES.len());
}
