//! Files that hold the tensors of a checkpoint: one file, or those that an index names.

use super::super::folder;
use super::header::{self, Entries};
use indexmap::IndexMap;
use moec_base::error::{Error, Result};
use moec_runtime::platform::regular;
use std::path::{Path, PathBuf};

/// The file of an unsharded checkpoint.
pub(crate) const SINGLE: &str = "model.safetensors";
/// The index of a sharded one.
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// The files of a checkpoint.
pub(crate) struct Shards {
    /// Names relative to the folder, and paths.
    pub(crate) files: Vec<(String, PathBuf)>,
    /// File of each tensor, by the index; empty without an index.
    pub(crate) tensors: Vec<(String, usize)>,
}

/// Finds the files of the checkpoint in a folder.
pub(crate) fn find(dir: &Path) -> Result<Shards> {
    if let Some(single) = folder::find(dir, SINGLE)? {
        return Ok(Shards { files: vec![(SINGLE.to_owned(), single)], tensors: Vec::new() });
    }
    if let Some(index) = folder::find(dir, INDEX)? {
        return sharded(dir, &index);
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

fn sharded(dir: &Path, index: &Path) -> Result<Shards> {
    let text = regular::read(index, regular::INDEX).map_err(|e| folder::unreadable(INDEX, &e))?;
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
    if let Some(duplicate) = header::first_repeated(&map) {
        return Err(Error::input(format!("tensor `{duplicate}` occurs twice in `{INDEX}`"))
            .hint("the file is damaged; download it again"));
    }
    let mut files: IndexMap<String, PathBuf> = IndexMap::new();
    let mut tensors = Vec::with_capacity(map.len());
    for (tensor, file) in map {
        let at = if let Some(at) = files.get_index_of(&file) {
            at
        } else {
            let path = named(dir, &file)?;
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

/// The path of a file that the index names.
fn named(dir: &Path, name: &str) -> Result<PathBuf> {
    let at = |e: Error| e.because(format!("`{INDEX}` names it"));
    folder::find(dir, name).map_err(at)?.ok_or_else(|| {
        Error::input(format!("`{name}` is missing from the folder"))
            .hint(format!("`{INDEX}` names it; the download may be incomplete"))
    })
}
