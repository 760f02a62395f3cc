//! A checkpoint of arbitrary bytes: whatever opens can be listed and read, every rectangle of it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moec_import::quantised::LAYOUTS;
use moec_import::{Checkpoint, ImportOptions};
use moec_ir::{Axis, Coded, Encoding, Leaf, Source};
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
    let (matrices, rows, cols) = (axis(2), axis(1), axis(0));
    let some = |n: usize, of: usize| n.min(of);
    let width = some(cols, SMALL);
    let whole = (0, 0..some(rows, SMALL / width.max(1)), 0..width);
    let middle = (matrices / 2, rows / 2..some(rows / 2 + 3, rows), cols / 2..some(cols / 2 + 40, cols));
    let end = (matrices.saturating_sub(1), rows.saturating_sub(1)..rows, cols.saturating_sub(33)..cols);
    let outside = (matrices, 0..1, 0..1);
    for (matrix, rows, cols) in [whole, middle, end, outside] {
        let mut out = vec![0.0; rows.len() * cols.len()];
        // An error is an answer, too.
        let _ = checkpoint.read(leaf, matrix, rows, cols, &mut out);
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
        read(&checkpoint, &leaf(shape.clone(), Encoding::Plain));
        // Every layout, with tensors of the file in all parts.
        let other = |i: usize| all[i % all.len()].0.to_owned();
        for (i, layout) in LAYOUTS.into_iter().enumerate() {
            let seed = bytes.get(i).copied().map_or(0, usize::from);
            let bits = [1, 2, 4, 8, 3][seed % 5];
            let mut decoded = shape.clone();
            if layout.split.is_some() {
                let bytes = decoded.pop().unwrap_or(1);
                decoded.last_mut().into_iter().for_each(|n| *n = n.saturating_mul(bytes));
            }
            let axis = decoded.len().wrapping_sub(if layout.codes.axis == Axis::Rows { 2 } else { 1 });
            decoded.get_mut(axis).into_iter().for_each(|n| *n = n.saturating_mul(layout.codes.codes(bits)));
            let sizes = [0, 1, 16, 32, 128, usize::MAX];
            let coded = Coded {
                layout: layout.name.to_owned(),
                bits,
                block: [sizes[seed / 5 % 6], sizes[seed / 30 % 6]],
                scales: other(seed),
                zeros: (seed % 2 == 0).then(|| other(seed / 2)),
                factor: (seed % 3 == 0).then(|| other(seed / 3)),
                groups: (seed % 7 == 0).then(|| other(seed / 7)),
            };
            read(&checkpoint, &leaf(decoded, Encoding::Coded(Box::new(coded))));
        }
    }
    assert_eq!(checkpoint.fingerprint().len(), 64);
});
