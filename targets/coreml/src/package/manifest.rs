//! `Manifest.json`: which file of a package is the model.

use super::error::PackageError;
use super::weights::read;
use moec_runtime::bundle::BundleReader;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Component, Path};

/// Largest manifest, in bytes.
const LIMIT: u64 = 1 << 20;
/// Name of the manifest in a package.
const NAME: &str = "Manifest.json";
/// Folder that the paths of items are relative to.
const DATA: &str = "Data";

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Manifest {
    item_info_entries: BTreeMap<String, Item>,
    root_model_identifier: String,
}

#[derive(Deserialize)]
struct Item {
    path: String,
}

/// The name of something in a folder of a package; `None` if it would leave the folder.
///
/// A link in the folder that leads out of it counts as outside.
pub(super) fn inside(package: &BundleReader, folder: &str, relative: &str) -> Option<String> {
    let path = Path::new(relative);
    let plain = path.components().all(|c| matches!(c, Component::Normal(_)));
    if relative.is_empty() || relative.contains('\0') || !plain {
        return None;
    }
    let name = format!("{folder}/{relative}");
    let folder = package.folder().join(folder);
    match (folder.join(path).canonicalize(), folder.canonicalize()) {
        (Ok(file), Ok(folder)) => file.starts_with(folder).then_some(name),
        // A missing file cannot be outside; opening it reports the error.
        _ => Some(name),
    }
}

/// The name of the model of a package.
pub(super) fn model(package: &BundleReader) -> Result<String, PackageError> {
    let bytes = read(package, NAME, LIMIT)?;
    let wrong = |message: String| PackageError::Manifest { path: package.folder().join(NAME), message };
    let manifest: Manifest = serde_json::from_slice(&bytes).map_err(|e| wrong(e.to_string()))?;
    let root = &manifest.root_model_identifier;
    let item = manifest.item_info_entries.get(root);
    let item = item.ok_or_else(|| wrong(format!("no item `{root}`, which should be the model")))?;
    inside(package, DATA, &item.path)
        .ok_or_else(|| wrong(format!("item `{root}`: `{}` is outside of the package", item.path)))
}
