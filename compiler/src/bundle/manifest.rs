//! `manifest.json`: what a bundle is made of.

use super::hashing::hex;
use super::partial::{MANIFEST, io_error};
use crate::error::{Error, Result};
use moec_runtime::regular;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Component, Path};

/// Format of bundles that this version writes and reads.
pub const BUNDLE_VERSION: u32 = 1;

/// The manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`BUNDLE_VERSION`].
    pub bundle_version: u32,
    /// Version of moec that wrote it.
    pub moec_version: String,
    /// Family of the model.
    pub family: String,
    /// Name of the target.
    pub target: String,
    /// Version of LLVM that compiled the kernels.
    pub llvm: String,
    /// SHA-256 over the names, types, shapes and places of the checkpoint's tensors.
    pub source_fingerprint: String,
    /// Profile whose importance the weights were rounded by, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<ProfileEntry>,
    /// Every other file, by path.
    pub files: BTreeMap<String, FileEntry>,
}

/// The profile that a build took.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProfileEntry {
    /// Its file's name, or the names of the texts that the build took it from.
    pub name: String,
    /// SHA-256 of its stored form, hexadecimal.
    pub sha256: String,
}

/// Size and hash of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Bytes.
    pub bytes: u64,
    /// SHA-256, hexadecimal.
    pub sha256: String,
}

impl Manifest {
    /// Reads the manifest of the bundle `folder`.
    ///
    /// # Errors
    /// No bundle, a manifest that is not well-formed, or another version's.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(MANIFEST);
        let text = regular::read_text(&path, regular::MANIFEST).map_err(|e| {
            io_error("read", &path, &e).hint("a bundle is the folder that `moec build` leaves behind")
        })?;
        let manifest: Self = serde_json::from_str(&text).map_err(|e| {
            Error::input(format!("`{}` is not well-formed", path.display()))
                .because(e)
                .hint("build the bundle again")
        })?;
        if manifest.bundle_version != BUNDLE_VERSION {
            return Err(Error::limit(format!(
                "`{}` is a bundle of version {}; this moec reads version {BUNDLE_VERSION}",
                folder.display(),
                manifest.bundle_version
            ))
            .hint("build the bundle again"));
        }
        for path in manifest.files.keys() {
            let plain = Path::new(path).components().all(|c| matches!(c, Component::Normal(_)));
            if !plain || path.is_empty() {
                return Err(Error::input(format!("the manifest names `{path}`, which leaves the bundle")));
            }
        }
        Ok(manifest)
    }

    /// Compares every file with its size and, if `hash`, its SHA-256.
    ///
    /// # Errors
    /// The first file that differs.
    pub fn check(&self, folder: &Path, hash: bool) -> Result<()> {
        for (name, entry) in &self.files {
            let path = folder.join(name);
            let changed = |what: String| {
                Error::input(format!("`{}` was changed after the build: {what}", path.display()))
                    .hint("build the bundle again")
            };
            let bytes = regular::size(&path).map_err(|e| io_error("read", &path, &e))?;
            if bytes != entry.bytes {
                return Err(changed(format!("{bytes} bytes instead of {}", entry.bytes)));
            }
            if hash {
                let found = hash_file(&path)?;
                if found != entry.sha256 {
                    return Err(changed(format!("SHA-256 {:.12}… instead of {:.12}…", found, entry.sha256)));
                }
            }
        }
        Ok(())
    }
}

/// Size and hash of a file.
///
/// # Errors
/// A file that cannot be read.
pub fn entry(path: &Path) -> Result<FileEntry> {
    let bytes = regular::size(path).map_err(|e| io_error("read", path, &e))?;
    Ok(FileEntry { bytes, sha256: hash_file(path)? })
}

fn hash_file(path: &Path) -> Result<String> {
    let mut file = regular::open(path).map_err(|e| io_error("read", path, &e))?;
    let mut sha = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let n = file.read(&mut buffer).map_err(|e| io_error("read", path, &e))?;
        if n == 0 {
            return Ok(hex(&sha.finalize()));
        }
        sha.update(&buffer[..n]);
    }
}
