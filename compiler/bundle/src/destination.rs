//! Folders that a build may replace: nothing, an empty folder, or a bundle with nothing else in it.
//!
//! A folder is a bundle if its `manifest.json` is one that moec wrote; a file of that name is not enough.
//! What the manifest does not list belongs to the user, and a folder that holds any of it is left alone.
//! Links are never followed.

use super::manifest;
use moec_base::error::{Error, Result, io_error};
use moec_base::paths::MANIFEST;
use moec_base::paths::{RUN, SIGNATURE};
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Files of a bundle that its manifest need not list. `run` of a Mac is built after it.
const UNLISTED: [&str; 3] = [MANIFEST, SIGNATURE, RUN];

/// Most unlisted entries that an error names.
const NAMED: usize = 4;

/// State of a bundle's destination. Anything else is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FolderState {
    /// Nothing.
    Absent,
    /// A folder with nothing in it.
    Empty,
    /// A bundle.
    Bundle,
}

/// A path without a slash at its end, after which a link would be followed.
pub(super) fn plain(path: &Path) -> PathBuf {
    path.components().collect()
}

/// Checks whether a build may write to `path`; `shown` is the path as the user gave it.
///
/// # Errors
/// Fails if the folder has content that may not be replaced, and names the first entries that do not belong
/// to a bundle.
pub fn look(path: &Path, shown: &Path) -> Result<FolderState> {
    let path = &plain(path);
    let shown = shown.display();
    if path.file_name().is_none() {
        return Err(Error::usage(format!("`{shown}` cannot be a bundle")).hint("name a new folder with `-o`"));
    }
    let meta = match fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(FolderState::Absent),
        Err(e) => return Err(io_error("look at", path, &e)),
        Ok(meta) => meta,
    };
    if !meta.is_dir() {
        let what = if meta.is_symlink() { "a link" } else { "not a folder" };
        return Err(Error::usage(format!("`{shown}` exists and is {what}"))
            .hint("name another folder with `-o`: only an earlier bundle is replaced"));
    }
    if fs::read_dir(path).map_err(|e| io_error("read", path, &e))?.next().is_none() {
        return Ok(FolderState::Empty);
    }
    let hint = "name another folder with `-o`: only an earlier bundle without other files is replaced";
    let listed = manifest::listed(path).map_err(|why| {
        Error::usage(format!("`{shown}` already exists and is not a moec bundle")).because(why).hint(hint)
    })?;
    let unlisted = unlisted_entries(path, &listed).map_err(|e| io_error("read", path, &e))?;
    if unlisted.is_empty() {
        return Ok(FolderState::Bundle);
    }
    let error = Error::usage(format!("`{shown}` is a bundle, but contains other files"));
    Err(error
        .because(named(&unlisted))
        .hint("move them away, or name another folder with `-o`: a bundle is replaced whole"))
}

/// Names for a message: the first of them, and how many others there are.
pub(super) fn named(unlisted: &[String]) -> String {
    let first: Vec<String> = unlisted.iter().take(NAMED).map(|s| format!("`{s}`")).collect();
    let more = unlisted.len().saturating_sub(NAMED);
    let more = if more == 0 { String::new() } else { format!(" and {more} more") };
    format!("{}{more}", first.join(", "))
}

/// Entries of a bundle's folder that are not its own: files, links and folders, each named from the bundle
/// on, sorted. Unlisted folders are not entered. A listed path that is not a regular file is also
/// returned.
///
/// # Errors
/// A folder that cannot be read.
pub fn unlisted_entries(bundle: &Path, listed: &BTreeSet<String>) -> io::Result<Vec<String>> {
    let folders = folders(listed);
    let mut found = Vec::new();
    let mut left = vec![String::new()];
    while let Some(folder) = left.pop() {
        for entry in fs::read_dir(bundle.join(&folder))? {
            let entry = entry?;
            let name = entry.file_name();
            // A name that is not UTF-8 is in no manifest.
            let name = name.to_string_lossy();
            let path = if folder.is_empty() { name.into_owned() } else { format!("{folder}/{name}") };
            let kind = entry.file_type()?;
            let own = listed.contains(&path) || UNLISTED.contains(&&*path);
            if kind.is_dir() && folders.contains(&path) {
                left.push(path);
            } else if !(kind.is_file() && own) {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

/// Folders of the listed files.
fn folders(listed: &BTreeSet<String>) -> BTreeSet<String> {
    let above = |path: &String| {
        let ends: Vec<usize> = path.match_indices('/').map(|(at, _)| at).collect();
        ends.into_iter().filter_map(|at| path.get(..at).map(str::to_owned)).collect::<Vec<_>>()
    };
    listed.iter().flat_map(above).collect()
}

/// Removes a bundle file by file, its manifest last. Returns the entries that remain because they do not
/// belong to it. `tick` is called after every file.
///
/// # Errors
/// Fails if a file cannot be removed.
pub(super) fn remove(
    bundle: &Path,
    listed: &BTreeSet<String>,
    tick: &mut dyn FnMut(),
) -> io::Result<Vec<String>> {
    let strange: BTreeSet<String> = unlisted_entries(bundle, listed)?.into_iter().collect();
    let unlisted = UNLISTED.iter().filter(|f| **f != MANIFEST).map(|f| (*f).to_owned());
    for file in listed.iter().cloned().chain(unlisted) {
        // An unlisted entry of that name, or in place of a folder above, stays, and so does a link's target.
        let mut ends = file.match_indices('/').map(|(at, _)| at).chain([file.len()]);
        if ends.any(|at| file.get(..at).is_some_and(|f| strange.contains(f))) {
            continue;
        }
        ignore_missing(fs::remove_file(bundle.join(&file)))?;
        tick();
    }
    for folder in folders(listed).iter().rev() {
        if !strange.contains(folder) {
            // A folder that is not empty contains an unlisted entry.
            let _ = fs::remove_dir(bundle.join(folder));
        }
    }
    let left = unlisted_entries(bundle, listed)?;
    if left.is_empty() {
        ignore_missing(fs::remove_file(bundle.join(MANIFEST)))?;
        tick();
        ignore_missing(fs::remove_dir(bundle))?;
    }
    Ok(left)
}

/// Treats a missing file or folder as removed.
pub(super) fn ignore_missing(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|&n| n.to_owned()).collect()
    }

    #[test]
    fn unlisted_files_are_found_and_kept() {
        let folder = tempfile::tempdir().unwrap();
        let at = |p: &str| folder.path().join("b").join(p);
        for f in ["a/b/c", "a/d", "manifest.json", "run", "manifest.json.minisig", "a/mine", "a/own/x", "e"] {
            fs::create_dir_all(at(f).parent().unwrap()).unwrap();
            fs::write(at(f), f).unwrap();
        }
        let listed = set(&["a/b/c", "a/d", "gone"]);
        assert_eq!(unlisted_entries(&at(""), &listed).unwrap(), ["a/mine", "a/own", "e"]);
        assert_eq!(remove(&at(""), &listed, &mut || ()).unwrap(), ["a/mine", "a/own", "e"]);
        assert!(at("a/own/x").exists() && at("a/mine").exists() && at("manifest.json").exists());
        assert!(!at("a/b").exists() && !at("a/d").exists() && !at("run").exists());
        for f in ["a/mine", "a/own/x", "e"] {
            fs::remove_file(at(f)).unwrap();
        }
        fs::remove_dir(at("a/own")).unwrap();
        assert!(remove(&at(""), &listed, &mut || ()).unwrap().is_empty());
        assert!(!folder.path().join("b").exists());
    }

    #[cfg(unix)]
    #[test]
    fn links_are_unlisted_files_and_are_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (bundle, outside) = (folder.path().join("b"), folder.path().join("outside"));
        fs::create_dir_all(&bundle).unwrap();
        fs::create_dir_all(&outside).unwrap();
        fs::write(outside.join("c"), "years of work").unwrap();
        fs::write(bundle.join("manifest.json"), "").unwrap();
        std::os::unix::fs::symlink(&outside, bundle.join("a")).unwrap();
        std::os::unix::fs::symlink(outside.join("c"), bundle.join("d")).unwrap();
        let listed = set(&["a/c", "d"]);
        assert_eq!(unlisted_entries(&bundle, &listed).unwrap(), ["a", "d"]);
        assert_eq!(remove(&bundle, &listed, &mut || ()).unwrap(), ["a", "d"]);
        assert_eq!(fs::read(outside.join("c")).unwrap(), b"years of work");
        assert!(bundle.join("d").is_symlink());
    }
}
