//! Bundles that several tests use, built only once.

use super::{moec, ok, packed, program, root};
use std::collections::hash_map::DefaultHasher;
use std::fs::{self, File};
use std::hash::{Hash as _, Hasher as _};
use std::path::{Path, PathBuf};

/// Builds with `moec build TOML ARGS`, and copies the bundle to `bundle`, where the test may change it.
///
/// Equal configurations of a model in the tree are built once per moec binary, by the first test that needs
/// them. They are in cargo's folder for test output. Tests of building itself do not use this.
pub fn built(toml: &Path, args: &[&str], bundle: &Path) {
    shared("build", toml, &[args, &["--no-run"]].concat(), bundle);
}

/// Writes the profile of `moec calibrate TOML ARGS` with one thread to `profile`. It is recorded once, like
/// bundles of [`built`].
pub fn recorded(toml: &Path, args: &[&str], profile: &Path) {
    shared("calibrate", toml, args, profile);
}

/// Writes the output of a subcommand on a `model.toml` to `to`. Equal files with a model of the tree share
/// one output.
fn shared(subcommand: &str, toml: &Path, args: &[&str], to: &Path) {
    let make = |toml: &Path, to: &Path| {
        let mut command = moec();
        if subcommand == "calibrate" {
            // The output of the first test is kept, so it must not depend on other recorded profiles.
            let folder = to.parent().expect("a folder");
            command.env("MOEC_THREADS", "1").env("MOEC_CACHE", cache(folder));
        }
        ok(command.arg(subcommand).arg(toml).args(args).args(["--quiet", "-o"]).arg(to));
    };
    let text = fs::read_to_string(toml).expect("model.toml is there");
    // A model that the test made itself is not shared.
    if text.contains(&*std::env::temp_dir().to_string_lossy()) {
        return make(toml, to);
    }
    let folder =
        all().join(format!("{:016x}", hash(&(subcommand, &text, args, stamps(&root().join("golden"))))));
    fs::create_dir_all(&folder).expect("the folder is made");
    // The lock is released however a test ends. A bundle or profile is complete or absent.
    let lock = File::create(folder.join("lock")).expect("a lock is made");
    lock.lock().expect("a file can be locked");
    let made = folder.join("made");
    if !made.exists() {
        fs::write(folder.join("model.toml"), text).expect("model.toml is written");
        make(&folder.join("model.toml"), &made);
    }
    if made.is_dir() {
        copy(&made, to);
    } else {
        fs::copy(&made, to).expect("a file is copied");
    }
}

/// A cache folder below `folder`, empty except for the objects of kernels. All tests share these, since they
/// are what LLVM would write.
pub fn cache(folder: &Path) -> PathBuf {
    let cache = folder.join("cache");
    if !cache.exists() {
        let objects = moec_base::cache_dir::path().expect("there is a cache folder").join("objects");
        for folder in [&objects, &cache] {
            fs::create_dir_all(folder).expect("a folder is made");
        }
        std::os::unix::fs::symlink(objects, cache.join("objects")).expect("a link is made");
    }
    cache
}

/// The folder with the bundles of this moec binary. Those of other binaries are removed.
fn all() -> PathBuf {
    let temporary = packed().map_or_else(|| env!("CARGO_TARGET_TMPDIR").into(), |folder| folder.join("tmp"));
    let folder = temporary.join("bundles");
    let own = folder.join(format!("{:016x}", hash(&stamp(&program()))));
    if !own.exists() {
        for other in fs::read_dir(&folder).into_iter().flatten().flatten() {
            if other.path() != own {
                // Another process may remove it at the same time.
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
