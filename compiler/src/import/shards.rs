//! Which files hold the tensors of a checkpoint: one, or those that an index names.

use super::header::{self, Entries};
use crate::error::{Error, Result};
use indexmap::IndexMap;
use std::fs;
use std::path::{Component, Path, PathBuf};

/// The file of an unsharded checkpoint.
pub(crate) const SINGLE: &str = "model.safetensors";
/// The index of a sharded one.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// Longest index that is read. That of a checkpoint with 100 000 tensors is a tenth of this.
const MAX_INDEX: u64 = 100_000_000;

/// The files of a checkpoint.
pub(crate) struct Shards {
    /// Names relative to the folder, and where they are.
    pub(crate) files: Vec<(String, PathBuf)>,
    /// Which of the files the index says each tensor is in; empty without an index.
    pub(crate) tensors: Vec<(String, usize)>,
}

/// Finds the files of the checkpoint in a folder.
pub(crate) fn find(dir: &Path) -> Result<Shards> {
    let single = dir.join(SINGLE);
    if single.exists() {
        return Ok(Shards { files: vec![(SINGLE.to_owned(), single)], tensors: Vec::new() });
    }
    if dir.join(INDEX).exists() {
        return sharded(dir);
    }
    let missing = Error::input(format!("`{}` has neither `{SINGLE}` nor `{INDEX}`", dir.display()));
    let pickled = dir.join("pytorch_model.bin").exists() || dir.join("pytorch_model.bin.index.json").exists();
    Err(if pickled {
        missing.hint(
            "the weights are there as `pytorch_model.bin`, which is not read; \
             save them as safetensors with `model.save_pretrained(dir, safe_serialization=True)`",
        )
    } else {
        missing.hint("give the folder of a Hugging Face checkpoint, with its weights as safetensors")
    })
}

fn sharded(dir: &Path) -> Result<Shards> {
    let path = dir.join(INDEX);
    let unreadable = |e: std::io::Error| Error::environment(format!("`{INDEX}` cannot be read")).because(e);
    if fs::metadata(&path).map_err(unreadable)?.len() > MAX_INDEX {
        return Err(Error::input(format!("`{INDEX}` is longer than {MAX_INDEX} bytes")));
    }
    let text = fs::read(&path).map_err(unreadable)?;
    let bad = |why: String| {
        Error::input(format!("`{INDEX}` is not a valid index"))
            .because(why)
            .hint("it needs an object `weight_map` from tensor names to file names; download it again")
    };
    let index: Index = serde_json::from_slice(&text).map_err(|e| bad(e.to_string()))?;
    let map = index.weight_map.0;
    if map.is_empty() {
        return Err(bad("`weight_map` is empty".to_owned()));
    }
    if let Some(twice) = header::first_repeated(&map) {
        return Err(Error::input(format!("tensor `{twice}` is twice in `{INDEX}`"))
            .hint("the file is damaged; download it again"));
    }
    let mut files: IndexMap<String, PathBuf> = IndexMap::new();
    let mut tensors = Vec::with_capacity(map.len());
    for (tensor, file) in map {
        let at = if let Some(at) = files.get_index_of(&file) {
            at
        } else {
            let path = inside(dir, &file)?;
            files.insert_full(file, path).0
        };
        tensors.push((tensor, at));
    }
    let files = files.into_iter().collect();
    Ok(Shards { files, tensors })
}

#[derive(serde::Deserialize)]
struct Index {
    weight_map: Entries<String>,
}

/// The path of a file that the index names. It must lie in the folder, or, as the download cache of
/// Hugging Face has it, be a link to a blob of the same model.
fn inside(dir: &Path, name: &str) -> Result<PathBuf> {
    let refused = |why: &str| {
        Error::input(format!("`{INDEX}` names the file `{name}`, which is outside of the folder"))
            .because(why)
            .hint("moec reads nothing outside of the checkpoint's folder; check where the checkpoint comes from")
    };
    let mut parts = Path::new(name).components().peekable();
    if parts.peek().is_none() || !parts.all(|p| matches!(p, Component::Normal(_))) {
        return Err(refused("only plain names and subfolders are allowed"));
    }
    let path = dir.join(name);
    let resolve = |p: &Path| {
        fs::canonicalize(p).map_err(|e| {
            let missing = Error::input(format!("`{name}` is missing from the folder")).because(e);
            missing.hint(format!("`{INDEX}` names it; the download may be incomplete"))
        })
    };
    let (home, real) = (resolve(dir)?, resolve(&path)?);
    let blobs =
        home.parent().filter(|p| p.ends_with("snapshots")).and_then(Path::parent).map(|p| p.join("blobs"));
    if real.starts_with(&home) || blobs.is_some_and(|blobs| real.starts_with(blobs)) {
        Ok(path)
    } else {
        Err(refused(&format!("it is a link to `{}`", real.display())))
    }
}
