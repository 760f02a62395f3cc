//! Later builds reuse packed weights from earlier bundles exactly if they would be equal.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::support;

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use support::{Setup, checkpoint, copy_checkpoint, moec, ok, tree};
use tempfile::TempDir;

/// A copy of a tiny checkpoint with its own cache.
struct Case(TempDir);

impl Case {
    fn new(family: &str) -> Self {
        let case = Self(tempfile::tempdir().unwrap());
        copy_checkpoint(&checkpoint(family), &case.path("hf"));
        case
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A `model.toml` with this format and more lines under `[weights]`.
    fn toml(&self, format: &str, more: &str) -> PathBuf {
        let setup = Setup { format, chunk: 16, batch: &[1], context: 64 };
        let path = setup.write(&self.path("hf"), self.0.path());
        let text = fs::read_to_string(&path).unwrap() + more;
        fs::write(&path, text).unwrap();
        path
    }

    /// Builds; returns the bytes of all weights, and of those that were reused from an earlier bundle.
    fn build(&self, toml: &Path, bundle: &str, more: &[&str]) -> (u64, u64) {
        let mut build = moec();
        build.arg("build").arg(toml).arg("-o").arg(self.path(bundle)).args(["--no-run", "--quiet", "--json"]);
        let stdout = ok(build.args(more).env("MOEC_CACHE", self.path("cache"))).stdout;
        let report: Value = serde_json::from_slice(&stdout).unwrap();
        let of = |key: &str| report[key].as_u64().unwrap();
        (of("weight_bytes"), of("reused_bytes"))
    }

    /// Whether two bundles are equal, byte for byte.
    fn equal(&self, a: &str, b: &str) -> bool {
        tree(&self.path(a)) == tree(&self.path(b))
    }

    /// Records of packed weights.
    fn notes(&self) -> Vec<PathBuf> {
        let all = tree(&self.path("cache/packed")).into_iter().map(|(name, _)| name.into());
        all.collect()
    }
}

#[test]
fn equal_weights_are_reused_from_an_earlier_bundle() {
    for format in ["bf16", "q8", "q4", "q4o"] {
        let case = Case::new("olmoe");
        let toml = case.toml(format, "");
        let (all, reused) = case.build(&toml, "first", &[]);
        assert_eq!(reused, 0, "{format}");
        assert_eq!(case.build(&toml, "again", &["--no-reuse"]), (all, 0));
        // Another bundle, then the same path again.
        assert_eq!(case.build(&toml, "second", &[]), (all, all), "{format}");
        assert_eq!(case.build(&toml, "second", &[]), (all, all), "{format}");
        assert!(case.equal("first", "again") && case.equal("first", "second"), "{format}");
    }
}

#[test]
fn target_with_the_same_layout_reuses_packed_weights() {
    let case = Case::new("deepseek_v2");
    let toml = case.toml("bf16", "");
    case.build(&toml, "v4", &["--target", "x86-64-v4"]);
    let (all, reused) = case.build(&toml, "v3", &["--target", "x86-64-v3"]);
    assert!(0 < reused && reused < all, "{reused} of {all}");
    case.build(&toml, "fresh", &["--target", "x86-64-v3", "--no-reuse"]);
    assert!(case.equal("v3", "fresh"));
}

#[test]
fn changed_format_reuses_weights_of_unchanged_format() {
    let case = Case::new("qwen3_moe");
    let (all, _) = case.build(&case.toml("bf16", ""), "bf16", &[]);
    let toml = case.toml("q8", "");
    let (smaller, reused) = case.build(&toml, "q8", &[]);
    assert!(smaller < all && 0 < reused && reused < smaller / 2, "{reused} of {smaller}");
    case.build(&toml, "fresh", &["--no-reuse"]);
    assert!(case.equal("q8", "fresh"));
}

#[test]
fn experts_on_disk_reuse_those_packed_for_memory() {
    let case = Case::new("olmoe");
    let toml = case.toml("bf16", "");
    let (all, _) = case.build(&toml, "memory", &[]);
    let paged = fs::read_to_string(&toml).unwrap() + "[memory]\nbudget = \"64 MiB\"\n";
    fs::write(&toml, paged).unwrap();
    let (bytes, reused) = case.build(&toml, "disk", &[]);
    assert_eq!((bytes, reused), (all, all));
    case.build(&toml, "fresh", &["--no-reuse"]);
    assert!(case.equal("disk", "fresh"));
}

#[test]
fn a_block_that_was_damaged_is_packed() {
    let case = Case::new("olmoe");
    let toml = case.toml("bf16", "");
    let (all, _) = case.build(&toml, "first", &[]);
    case.build(&toml, "whole", &["--no-reuse"]);
    let path = case.path("first/weights/experts.bin");
    let mut bytes = fs::read(&path).unwrap();
    bytes[1000] ^= 1;
    fs::write(&path, &bytes).unwrap();
    fs::remove_dir_all(case.path("whole")).unwrap();
    let (_, reused) = case.build(&toml, "second", &[]);
    assert!(0 < reused && reused < all, "{reused} of {all}");
    // A truncated file.
    fs::write(&path, &bytes[..100]).unwrap();
    fs::remove_dir_all(case.path("second")).unwrap();
    let (_, fewer) = case.build(&toml, "second", &[]);
    assert!(fewer < reused, "{fewer} of {reused}");
    case.build(&toml, "fresh", &["--no-reuse"]);
    assert!(case.equal("second", "fresh"));
}

#[test]
fn rewritten_checkpoint_is_not_reused() {
    let case = Case::new("olmoe");
    let toml = case.toml("bf16", "");
    case.build(&toml, "first", &[]);
    let file = case.path("hf/model.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&file, bytes).unwrap();
    assert_eq!(case.build(&toml, "second", &[]).1, 0);
    assert!(!case.equal("first", "second"));
}

#[test]
fn reuse_notes_are_removed_with_their_bundles() {
    let case = Case::new("olmoe");
    let toml = case.toml("bf16", "");
    case.build(&toml, "first", &[]);
    case.build(&toml, "second", &[]);
    assert_eq!(case.notes().len(), 2);
    fs::remove_dir_all(case.path("first")).unwrap();
    // An unreadable record is ignored.
    fs::write(case.path("cache").join("packed").join(&case.notes()[0]).with_file_name("x.json"), "{")
        .unwrap();
    assert!(case.build(&toml, "third", &[]).1 > 0);
    assert_eq!(case.notes().len(), 2);
    // A failure to write the record is not an error.
    let mut build = moec();
    build.arg("build").arg(&toml).arg("-o").arg(case.path("fourth")).args(["--no-run", "--quiet"]);
    ok(build.env("MOEC_CACHE", "/proc/nowhere"));
}
