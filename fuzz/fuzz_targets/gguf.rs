//! A GGUF file: what is read lies inside of the file, no tensor in another, and every number decodes. Its metadata
//! are a configuration and a tokenizer, or are refused.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moec_gguf::{Array, Header};
use moec_import::ImportOptions;
use std::fs;
use std::sync::LazyLock;
use tempfile::TempDir;

static FOLDER: LazyLock<TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a folder"));

/// Numbers of a tensor that are decoded at most.
const SMALL: usize = 4096;

/// Goes through an array and the arrays in it.
fn walk(array: &Array<'_>) {
    let inner: Vec<_> = array.iter().collect();
    assert_eq!(inner.len(), array.len());
    inner.iter().filter_map(|value| value.as_array()).for_each(walk);
}

fuzz_target!(|bytes: &[u8]| {
    let Ok(header) = Header::read(bytes) else { return };
    for (key, value) in header.keys() {
        assert_eq!(header.get(key).map(|v| v.kind()), Some(value.kind()));
        value.as_array().into_iter().for_each(walk);
    }
    let mut free = 0;
    for tensor in header.tensors() {
        assert!(tensor.bytes.start >= free && tensor.bytes.end <= bytes.len(), "`{}`", tensor.name);
        free = tensor.bytes.end;
        let numbers: usize = tensor.shape.iter().product();
        assert_eq!(tensor.bytes.len(), numbers / tensor.kind.block * tensor.kind.bytes);
        let Some(decode) = tensor.kind.decode else { continue };
        let stored = &bytes[tensor.bytes.clone()];
        let mut whole = vec![0.0; numbers.min(SMALL)];
        decode(stored, 0, &mut whole);
        let from = whole.len() / 2;
        let mut part = vec![0.0; whole.len() - from];
        decode(&stored[from / tensor.kind.block * tensor.kind.bytes..], from, &mut part);
        assert!(
            part.iter().zip(&whole[from..]).all(|(a, b)| a.to_bits() == b.to_bits()),
            "`{}`",
            tensor.name
        );
    }
    let path = FOLDER.path().join("model.gguf");
    fs::write(&path, bytes).expect("the file is written");
    if let Ok(container) = moec_import::containers::open(&path, |_| Ok(())) {
        // An error is an answer, too.
        let _ = (container.tokenizer(), container.tokenizer_config(), container.chat_template());
    }
    let _ = moec_import::open(&path, &ImportOptions::default());
});
