//! Bundles that several tests want, built once for all of them.

use super::{moec, ok, root};
use std::collections::hash_map::DefaultHasher;
use std::fs::{self, File};
use std::hash::{Hash as _, Hasher as _};
use std::path::{Path, PathBuf};

/// Puts what `moec build TOML ARGS` makes at `bundle`: a copy, which the test may change.
///
/// Equal files of a model that lies in the tree are built once for every moec, by whoever asks first, in cargo's folder for what tests
/// leave. Tests of building itself have no use for this.
pub fn built(toml: &Path, args: &[&str], bundle: &Path) {
    let build = |toml: &Path, bundle: &Path| {
        ok(moec().arg("build").arg(toml).args(args).args(["--no-run", "--quiet", "-o"]).arg(bundle));
    };
    let text = fs::read_to_string(toml).expect("model.toml is there");
    // What a test has made itself is its own.
    if text.contains(&*std::env::temp_dir().to_string_lossy()) {
        return build(toml, bundle);
    }
    let folder = all().join(format!("{:016x}", hash(&(&text, args, stamps(&root().join("golden"))))));
    fs::create_dir_all(&folder).expect("the folder is made");
    // Freed by its end, however a test ends. A bundle is there whole or not at all.
    let lock = File::create(folder.join("lock")).expect("a lock is made");
    lock.lock().expect("a file can be locked");
    if !folder.join("b").exists() {
        fs::write(folder.join("model.toml"), text).expect("model.toml is written");
        build(&folder.join("model.toml"), &folder.join("b"));
    }
    copy(&folder.join("b"), bundle);
}

/// The folder of what this moec has built. That of another, which is gone, goes, too.
fn all() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("bundles");
    let own = folder.join(format!("{:016x}", hash(&stamp(Path::new(env!("CARGO_BIN_EXE_moec"))))));
    if !own.exists() {
        for other in fs::read_dir(&folder).into_iter().flatten().flatten() {
            if other.path() != own {
                // Somebody beside this one may do the same.
                let _ = fs::remove_dir_all(other.path());
            }
        }
    }
    own
}

fn hash(value: &impl std::hash::Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// Path, size and time of a file.
fn stamp(path: &Path) -> (PathBuf, u64, std::time::SystemTime) {
    let data = fs::metadata(path).expect("the file is there");
    (path.to_owned(), data.len(), data.modified().expect("files have times"))
}

/// Stamps of all files below a folder, in order.
fn stamps(folder: &Path) -> Vec<(PathBuf, u64, std::time::SystemTime)> {
    let mut all = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            all.extend(stamps(&path));
        } else {
            all.push(stamp(&path));
        }
    }
    all.sort();
    all
}

/// Copies a folder of files and folders.
fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a folder is made");
    for entry in fs::read_dir(from).expect("a folder") {
        let from = entry.expect("an entry").path();
        let to = to.join(from.file_name().expect("an entry has a name"));
        if from.is_dir() {
            copy(&from, &to);
        } else {
            fs::copy(&from, &to).expect("a file is copied");
        }
    }
}
