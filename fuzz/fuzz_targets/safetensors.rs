//! A checkpoint of arbitrary bytes: whatever opens can be listed and read, every rectangle of it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moec_import::{Checkpoint, ImportOptions};
use moec_ir::{Encoding, Leaf, Source};
use std::fs;
use std::sync::LazyLock;
use tempfile::TempDir;

/// Largest rectangle that is read whole, in elements.
const SMALL: usize = 4096;

static FOLDER: LazyLock<TempDir> = LazyLock::new(|| {
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("config.json"), "{}").expect("the file is written");
    folder
});

/// Reads the first rows of a leaf, and a rectangle from its middle.
fn read(checkpoint: &Checkpoint, leaf: &Leaf) {
    let axis = |i: usize| leaf.shape.iter().rev().nth(i).copied().unwrap_or(1);
    let (lead, rows, cols) = (axis(2), axis(1), axis(0));
    let some = |n: usize, of: usize| n.min(of);
    let width = some(cols, SMALL);
    let whole = (0, 0..some(rows, SMALL / width.max(1)), 0..width);
    let middle = (lead / 2, rows / 2..some(rows / 2 + 3, rows), cols / 2..some(cols / 2 + 40, cols));
    let end = (lead.saturating_sub(1), rows.saturating_sub(1)..rows, cols.saturating_sub(33)..cols);
    let outside = (lead, 0..1, 0..1);
    for (lead, rows, cols) in [whole, middle, end, outside] {
        let mut out = vec![0.0; rows.len() * cols.len()];
        // An error is an answer, too.
        let _ = checkpoint.read(leaf, lead, rows, cols, &mut out);
    }
}

fuzz_target!(|bytes: &[u8]| {
    let folder = FOLDER.path();
    fs::write(folder.join("model.safetensors"), bytes).expect("the file is written");
    let options = ImportOptions { allow_nonfinite: bytes.len().is_multiple_of(2) };
    let Ok(checkpoint) = Checkpoint::open(folder, &options) else { return };
    let all: Vec<_> = checkpoint.tensors().take(16).collect();
    for &(name, tensor) in &all {
        assert!(checkpoint.bytes(name).is_some_and(|b| b.len() <= bytes.len()), "`{name}` is outside of the file");
        let leaf = |shape: Vec<usize>, encoding| Leaf { tensor: name.to_owned(), shape, encoding };
        let shape = &tensor.shape;
        let mut decoded = shape[..shape.len().saturating_sub(2)].to_vec();
        decoded.push(shape.iter().rev().take(2).product::<usize>().saturating_mul(2));
        read(&checkpoint, &leaf(shape.clone(), Encoding::Plain));
        for (scales, _) in all.iter().take(4) {
            let scales = (*scales).to_owned();
            read(&checkpoint, &leaf(shape.clone(), Encoding::Fp8Block { scales: scales.clone() }));
            read(&checkpoint, &leaf(decoded.clone(), Encoding::Mxfp4 { scales }));
        }
    }
    assert_eq!(checkpoint.fingerprint().len(), 64);
});
