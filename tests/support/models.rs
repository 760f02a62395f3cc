//! Copies of checkpoints, with changes of a test.

use super::checkpoint;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// Words of [`with_words`]: the rows of every tiny checkpoint's embeddings.
pub const WORDS: u32 = 320;

/// Copies the files of a checkpoint into a new folder, without subfolders.
pub fn copy_checkpoint(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a folder is made");
    for file in fs::read_dir(from).expect("a checkpoint") {
        let file = file.expect("an entry").path();
        if file.is_file() {
            fs::copy(&file, to.join(file.file_name().expect("an entry has a name")))
                .expect("a file is copied");
        }
    }
}

/// Like [`copy_checkpoint`], with another `config.json`.
pub fn configured(from: &Path, to: &Path, change: impl FnOnce(&mut Value)) {
    copy_checkpoint(from, to);
    let text = fs::read_to_string(from.join("config.json")).expect("a configuration");
    let mut config: Value = serde_json::from_str(&text).expect("JSON");
    change(&mut config);
    fs::write(to.join("config.json"), config.to_string()).expect("the configuration is written");
}

/// Copies a tiny checkpoint with a tokenizer of the words `w0` … `w319`.
pub fn with_words(family: &str, to: &Path) {
    copy_checkpoint(&checkpoint(family), to);
    add_words(to);
}

/// Gives a checkpoint of [`WORDS`] tokens that tokenizer.
pub fn add_words(folder: &Path) {
    let vocab: serde_json::Map<_, _> = (0..WORDS).map(|i| (format!("w{i}"), i.into())).collect();
    let tokenizer = json!({
        "version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"},
    });
    fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).expect("the tokenizer is written");
}
