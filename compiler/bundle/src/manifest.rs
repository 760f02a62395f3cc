//! `manifest.json`: the files of a bundle, with versions, sizes and hashes.

use moec_base::error::{Error, Result, io_error};
use moec_base::hashing::{hex, sha256};
use moec_base::paths::MANIFEST;
use moec_runtime::platform::regular::{self, Limit};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
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
    /// Assembler of GPU kernels, with its release; `None` where they are only PTX.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub assembler: Option<String>,
    /// SHA-256 over the names, types, shapes and places of the checkpoint's tensors.
    pub source_fingerprint: String,
    /// Profile that the build took, if any.
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

/// Fields of manifests of every version, for replacing bundles of earlier ones.
#[derive(Deserialize)]
struct AnyVersion {
    bundle_version: u32,
    #[serde(rename = "moec_version")]
    _moec_version: String,
    files: BTreeMap<String, FileEntry>,
}

impl Manifest {
    /// Reads the manifest of the bundle `folder`.
    ///
    /// # Errors
    /// No bundle, a manifest that is not well-formed, or another version's.
    pub fn read(folder: &Path) -> Result<Self> {
        Self::load(folder).map(|(manifest, _)| manifest)
    }

    /// Like [`Manifest::read`], with its bytes: the bytes that a signature covers, and whose hash is the
    /// manifest's.
    ///
    /// # Errors
    /// As [`Manifest::read`].
    pub fn load(folder: &Path) -> Result<(Self, Vec<u8>)> {
        let path = folder.join(MANIFEST);
        let bytes = regular::read_unlinked(&path, regular::MANIFEST).map_err(|e| {
            io_error("read", &path, &e).hint("a bundle is the folder that `moec build` writes")
        })?;
        let malformed = |cause: String| {
            Error::input(format!("`{}` is not well-formed", path.display()))
                .because(cause)
                .hint("build the bundle again")
        };
        // The version decides what the rest has to look like.
        let any: AnyVersion = serde_json::from_slice(&bytes).map_err(|e| malformed(e.to_string()))?;
        if any.bundle_version != BUNDLE_VERSION {
            return Err(Error::limit(format!(
                "`{}` is a bundle of version {}; this moec reads version {BUNDLE_VERSION}",
                folder.display(),
                any.bundle_version
            ))
            .hint("build the bundle again"));
        }
        let manifest: Self = serde_json::from_slice(&bytes).map_err(|e| malformed(e.to_string()))?;
        if let Some(path) = manifest.files.keys().find(|p| !plain(p)) {
            return Err(Error::input(format!("the manifest names `{path}`, which leaves the bundle")));
        }
        Ok((manifest, bytes))
    }

    /// Names of all files that it lists.
    pub fn listed(&self) -> BTreeSet<String> {
        self.files.keys().cloned().collect()
    }

    /// Bytes of all files that it lists.
    pub fn bytes(&self) -> u64 {
        self.files.values().fold(0, |sum, f| sum.saturating_add(f.bytes))
    }

    /// Reads a whole file of the bundle. The returned bytes have the manifest's SHA-256, even if the file has
    /// changed since it was checked.
    ///
    /// # Errors
    /// A file that the manifest does not list, that cannot be read, or that was changed.
    pub fn read_file(&self, folder: &Path, name: &str, limit: Limit) -> Result<Vec<u8>> {
        let path = folder.join(name);
        let entry = self.files.get(name).ok_or_else(|| {
            Error::input(format!("the manifest of `{}` lists no `{name}`", folder.display()))
                .hint("build the bundle again")
        })?;
        let bytes = regular::read(&path, limit).map_err(|e| io_error("read", &path, &e))?;
        let found = hex(&sha256(&bytes));
        if found == entry.sha256 { Ok(bytes) } else { Err(changed(&path, &other_hash(&found, entry))) }
    }

    /// The part of it that is about the files which `keep` names.
    #[must_use]
    pub fn part(&self, keep: impl Fn(&str) -> bool) -> Self {
        let files = self.files.iter().filter(|(name, _)| keep(name));
        Self { files: files.map(|(name, entry)| (name.clone(), entry.clone())).collect(), ..self.clone() }
    }

    /// Compares every file with its size and, if `hash`, its SHA-256.
    ///
    /// # Errors
    /// The first file that differs, is not there, or is no regular file of the bundle.
    pub fn check(&self, folder: &Path, hash: bool) -> Result<()> {
        let root = fs::canonicalize(folder).map_err(|e| io_error("find", folder, &e))?;
        for (name, entry) in &self.files {
            let path = folder.join(name);
            let real = fs::canonicalize(&path).map_err(|e| io_error("read", &path, &e))?;
            if !real.starts_with(&root) {
                return Err(changed(&path, "a link leads out of the bundle"));
            }
            let mut file = regular::open(&real).map_err(|e| io_error("read", &path, &e))?;
            let bytes = file.metadata().map_err(|e| io_error("read", &path, &e))?.len();
            if bytes != entry.bytes {
                return Err(changed(&path, &format!("{bytes} bytes instead of {}", entry.bytes)));
            }
            if hash {
                let found = hash_of(&mut file, &path)?;
                if found != entry.sha256 {
                    return Err(changed(&path, &other_hash(&found, entry)));
                }
            }
        }
        Ok(())
    }
}

/// Error for a file that differs from the manifest.
fn changed(path: &Path, what: &str) -> Error {
    Error::input(format!("`{}` was changed after the build: {what}", path.display()))
        .hint("build the bundle again")
}

fn other_hash(found: &str, entry: &FileEntry) -> String {
    format!("SHA-256 {found:.12}… instead of {:.12}…", entry.sha256)
}

/// Whether a path stays in its folder.
fn plain(path: &str) -> bool {
    !path.is_empty() && Path::new(path).components().all(|c| matches!(c, Component::Normal(_)))
}

/// The files that the manifest in `folder` lists, of this version of bundles or an earlier one.
///
/// # Errors
/// The folder is not a bundle that this moec can read; the text is the reason.
pub fn listed(folder: &Path) -> Result<BTreeSet<String>, String> {
    let bytes = regular::read_unlinked(&folder.join(MANIFEST), regular::MANIFEST)
        .map_err(|e| format!("`{MANIFEST}`: {e}"))?;
    let no = |e: serde_json::Error| format!("`{MANIFEST}` is not a manifest of moec: {e}");
    let any: AnyVersion = serde_json::from_slice(&bytes).map_err(no)?;
    if !(1..=BUNDLE_VERSION).contains(&any.bundle_version) {
        return Err(format!(
            "`{MANIFEST}` is of version {}, which this moec does not support",
            any.bundle_version
        ));
    }
    if any.bundle_version == BUNDLE_VERSION {
        serde_json::from_slice::<Manifest>(&bytes).map_err(no)?;
    }
    match any.files.keys().find(|p| !plain(p)) {
        Some(path) => Err(format!("`{MANIFEST}` names `{path}`, which leaves the bundle")),
        None => Ok(any.files.into_keys().collect()),
    }
}

/// The hash by which a bundle can be compared: that of its manifest's bytes, which hold those of all other
/// files.
pub fn digest(manifest: &[u8]) -> String {
    hex(&sha256(manifest))
}

/// Size and hash of a file.
///
/// # Errors
/// A file that cannot be read.
pub fn entry(path: &Path) -> Result<FileEntry> {
    let mut file = regular::open(path).map_err(|e| io_error("read", path, &e))?;
    let bytes = file.metadata().map_err(|e| io_error("read", path, &e))?.len();
    Ok(FileEntry { bytes, sha256: hash_of(&mut file, path)? })
}

fn hash_of(file: &mut File, path: &Path) -> Result<String> {
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn file_changed_after_its_check_is_not_returned() {
        const OBJECT: &str = "kernels.o";
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(OBJECT);
        fs::write(&path, "code").unwrap();
        let manifest = Manifest {
            bundle_version: BUNDLE_VERSION,
            moec_version: String::new(),
            family: String::new(),
            target: String::new(),
            llvm: String::new(),
            assembler: None,
            source_fingerprint: String::new(),
            profile: None,
            files: [(OBJECT.to_owned(), entry(&path).unwrap())].into(),
        };
        manifest.check(dir.path(), true).unwrap();
        assert_eq!(manifest.read_file(dir.path(), OBJECT, regular::OBJECT).unwrap(), b"code");
        fs::write(&path, "evil").unwrap();
        let e = manifest.read_file(dir.path(), OBJECT, regular::OBJECT).unwrap_err();
        assert!(e.to_string().contains("kernels.o` was changed after the build"), "{e}");
        let e = manifest.read_file(dir.path(), "other", regular::OBJECT).unwrap_err();
        assert!(e.to_string().contains("lists no `other`"), "{e}");
    }
}
