//! Bundles that several tests want, built once for all of them.

use super::{moec, ok, packed, program, root};
use std::collections::hash_map::DefaultHasher;
use std::fs::{self, File};
use std::hash::{Hash as _, Hasher as _};
use std::path::{Path, PathBuf};

/// Puts what `moec build TOML ARGS` makes at `bundle`: a copy, which the test may change.
///
/// Equal files of a model in the tree are built once for every moec, by the first test that needs
/// them, in cargo's folder for what tests leave. Tests of building itself have no use for this.
pub fn built(toml: &Path, args: &[&str], bundle: &Path) {
    shared("build", toml, &[args, &["--no-run"]].concat(), bundle);
}

/// Puts the profile that `moec calibrate TOML ARGS` records with one thread at `profile`, recorded once as
/// [`built`] builds once.
pub fn recorded(toml: &Path, args: &[&str], profile: &Path) {
    shared("calibrate", toml, args, profile);
}

/// Puts what a subcommand makes of a `model.toml` at `to`. It is made once for equal files whose model lies
/// in the tree.
fn shared(subcommand: &str, toml: &Path, args: &[&str], to: &Path) {
    let make = |toml: &Path, to: &Path| {
        let mut command = moec();
        if subcommand == "calibrate" {
            // What is kept is that of the first, and a run by itself has no use for what others recorded.
            let folder = to.parent().expect("a folder");
            command.env("MOEC_THREADS", "1").env("MOEC_CACHE", cache(folder));
        }
        ok(command.arg(subcommand).arg(toml).args(args).args(["--quiet", "-o"]).arg(to));
    };
    let text = fs::read_to_string(toml).expect("model.toml is there");
    // What a test has made itself is its own.
    if text.contains(&*std::env::temp_dir().to_string_lossy()) {
        return make(toml, to);
    }
    let folder =
        all().join(format!("{:016x}", hash(&(subcommand, &text, args, stamps(&root().join("golden"))))));
    fs::create_dir_all(&folder).expect("the folder is made");
    // Freed by its end, however a test ends. A bundle or profile is there whole or not at all.
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

/// A cache folder below `folder` that has nothing of others but the object code of kernels, which all share:
/// what is found is what LLVM would write.
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

/// The folder of what this moec has built. That of another, which is gone, goes, too.
fn all() -> PathBuf {
    let temporary = packed().map_or_else(|| env!("CARGO_TARGET_TMPDIR").into(), |folder| folder.join("tmp"));
    let folder = temporary.join("bundles");
    let own = folder.join(format!("{:016x}", hash(&stamp(&program()))));
    if !own.exists() {
        for other in fs::read_dir(&folder).into_iter().flatten().flatten() {
            if other.path() != own {
                // Another process may do the same.
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
