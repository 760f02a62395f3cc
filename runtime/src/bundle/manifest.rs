//! Comparison of the bundle's `manifest.json` with the files that it lists, for `--check`.
//!
//! A program needs its weights and its tokenizer; the manifest lists the rest, too: plan, graph, kernels,
//! packages, sources, and the program itself.

use crate::bundle::program::Program;
use crate::bundle::{BundleFile, BundleReader};
use crate::error::{DAMAGED, Error, Result};
use crate::platform::regular;
use moec_ir::plan::FileRef;
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use std::collections::HashSet;
use std::io::ErrorKind;
use std::path::Path;

/// The manifest's name.
pub const MANIFEST: &str = "manifest.json";
/// Name of the program in a bundle.
const RUN: &str = "run";

/// Result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checked {
    /// Number of files, without the manifest.
    pub files: usize,
    /// Bytes of these files.
    pub bytes: u64,
    /// Bytes among them of the program's weights, whose content is not checked yet.
    pub left: u64,
    /// Whether there is a `run` that the manifest does not list, because it was built later (on a Mac).
    pub run_unlisted: bool,
}

/// Reads the list of a bundle's files.
///
/// # Errors
/// No manifest, or one that is malformed.
pub fn files(bundle: &Path) -> Result<Vec<FileRef>> {
    parse(&read(&bundle.join(MANIFEST))?, bundle)
}

/// As [`files`], from the content of the manifest of the folder `bundle`.
///
/// # Errors
/// A manifest that is malformed.
pub fn parse(manifest: &[u8], bundle: &Path) -> Result<Vec<FileRef>> {
    let malformed = |why| bad(bundle, why);
    let manifest: Value = serde_json::from_slice(manifest).map_err(|e| malformed(e.to_string()))?;
    let listed = manifest["files"].as_object().ok_or_else(|| malformed("it lists no files".to_owned()))?;
    let file = |(name, entry): (&String, &Value)| {
        let known = entry["bytes"].as_u64().zip(entry["sha256"].as_str().and_then(unhex));
        let (bytes, sha256) =
            known.ok_or_else(|| malformed(format!("`{name}` has no size, or no SHA-256")))?;
        Ok(FileRef { path: name.clone(), bytes, sha256 })
    };
    listed.iter().map(file).collect()
}

/// Compares size and SHA-256 of every listed file. With `program`, the list must come from the same build as
/// this program. Of files with its weights only the sizes are compared here: their store hashes them when it
/// maps or reads them.
///
/// # Errors
/// A manifest of another build; the first file that is missing or was changed.
pub fn check(bundle: &BundleReader, program: Option<&Program>) -> Result<Checked> {
    let files: Vec<&FileRef> = bundle.listed().into_iter().flatten().collect();
    let folder = bundle.folder();
    for own in program.iter().flat_map(|p| &p.files) {
        if !files.contains(&own) {
            let why =
                format!("its entry of `{}` differs from the one that the program was built for", own.path);
            return Err(bad(&folder, why));
        }
    }
    // Sizes of all files first: they cost nothing and catch most damage.
    for info in &files {
        BundleFile::open(&folder, &info.path, Some(info.bytes))?;
    }
    let weights: HashSet<&str> = program.iter().flat_map(|p| p.weight_files()).collect();
    let (left, here): (Vec<&FileRef>, Vec<_>) = files.iter().partition(|f| weights.contains(&*f.path));
    for info in &here {
        bundle.open(&info.path)?.digest()?;
    }
    let bytes = |files: &[&FileRef]| files.iter().fold(0_u64, |sum, f| sum.saturating_add(f.bytes));
    Ok(Checked {
        files: files.len(),
        bytes: bytes(&here).saturating_add(bytes(&left)),
        left: bytes(&left),
        run_unlisted: files.iter().all(|f| f.path != RUN) && folder.join(RUN).exists(),
    })
}

/// SHA-256 of the manifest itself, by which bundles can be compared; `None` if there is no readable manifest.
pub fn digest(bundle: &Path) -> Option<[u8; 32]> {
    read(&bundle.join(MANIFEST)).ok().map(|bytes| Sha256::digest(bytes).into())
}

/// Error for a manifest that cannot be used.
fn bad(bundle: &Path, why: String) -> Error {
    Error::file(bundle.join(MANIFEST), format!("is not a manifest of this bundle: {why}")).with_hint(DAMAGED)
}

/// Reads the manifest: a regular file of bounded size, not a link.
fn read(path: &Path) -> Result<Vec<u8>> {
    regular::read_unlinked(path, regular::MANIFEST).map_err(|source| {
        if source.kind() == ErrorKind::NotFound {
            return Error::MissingFile(path.to_owned());
        }
        Error::io("read", path.to_owned(), source)
    })
}

/// Bytes of a hash in hexadecimal.
fn unhex(text: &str) -> Option<[u8; 32]> {
    let digits: Vec<u8> =
        text.chars().map(|c| c.to_digit(16).and_then(|d| u8::try_from(d).ok())).collect::<Option<_>>()?;
    let bytes: Vec<u8> = digits.chunks_exact(2).map(|pair| (pair[0] << 4) | pair[1]).collect();
    (digits.len() == 64).then_some(bytes)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::store::CheckLevel;
    use std::fs;

    fn bundle(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let mut listed = serde_json::Map::new();
        for (name, text) in files {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, text).unwrap();
            let sha256 = Sha256::digest(text).iter().fold(String::new(), |hex, b| format!("{hex}{b:02x}"));
            listed.insert((*name).to_owned(), serde_json::json!({"bytes": text.len(), "sha256": sha256}));
        }
        let text = serde_json::json!({"bundle_version": 1, "files": listed}).to_string();
        fs::write(dir.path().join(MANIFEST), text).unwrap();
        dir
    }

    fn check(bundle: &Path) -> Result<Checked> {
        super::check(&BundleReader::of_manifest(bundle, &files(bundle)?, CheckLevel::All), None)
    }

    #[test]
    fn every_listed_file_is_checked() {
        let dir = bundle(&[("plan.bin", "plan"), ("artifacts/kernels.o", "code"), ("run", "program")]);
        let whole = Checked { files: 3, bytes: 15, left: 0, run_unlisted: false };
        assert_eq!(check(dir.path()).unwrap(), whole);
        for (name, text) in [("plan.bin", "plan"), ("artifacts/kernels.o", "code"), ("run", "program")] {
            let path = dir.path().join(name);
            for damage in [Some("pla"), Some("PLAN"), Some("CODE"), Some("PROGRAM"), None] {
                match damage {
                    Some(text) => fs::write(&path, text).unwrap(),
                    None => fs::remove_file(&path).unwrap(),
                }
                let message = check(dir.path()).unwrap_err().to_string();
                assert!(message.contains(name), "{message}");
            }
            fs::write(&path, text).unwrap();
        }
        assert_eq!(check(dir.path()).unwrap(), whole);
    }

    #[test]
    fn invalid_manifest_is_reported() {
        let dir = bundle(&[("plan.bin", "plan")]);
        let path = dir.path().join(MANIFEST);
        for (text, word) in [
            ("", "EOF"),
            ("[]", "lists no files"),
            ("{\"files\": {\"plan.bin\": {\"bytes\": 4}}}", "no SHA-256"),
            ("{\"files\": {\"plan.bin\": {\"bytes\": 4, \"sha256\": \"00\"}}}", "no SHA-256"),
        ] {
            fs::write(&path, text).unwrap();
            let message = check(dir.path()).unwrap_err().to_string();
            assert!(message.contains(MANIFEST) && message.contains(word), "{message}");
        }
        let zeros = "0".repeat(64);
        fs::write(&path, format!("{{\"files\": {{\"../x\": {{\"bytes\": 4, \"sha256\": \"{zeros}\"}}}}}}"))
            .unwrap();
        assert!(matches!(check(dir.path()), Err(Error::Bundle(why)) if why.contains("not a path inside")));
        fs::remove_file(&path).unwrap();
        assert!(matches!(check(dir.path()), Err(Error::MissingFile(_))));
        assert_eq!(digest(dir.path()), None);
    }

    #[test]
    fn program_built_later_is_reported_as_unlisted() {
        let dir = bundle(&[("plan.bin", "plan")]);
        fs::write(dir.path().join(RUN), "built here").unwrap();
        assert!(check(dir.path()).unwrap().run_unlisted);
    }
}
