//! Damage to files: their bytes, their lengths, and other kinds of files in their place.

use super::case::{CaseFolders, Truncation};
use super::judge::listing;
use super::rng::Rng;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Regular files of the subject, as paths inside of it.
pub(crate) fn all(place: &CaseFolders) -> Vec<PathBuf> {
    let files = listing(&place.subject).into_keys();
    files.filter(|p| place.subject.join(p).is_file() && !p.starts_with("runner")).collect()
}

/// A random file. Important files of a checkpoint are chosen more often.
fn one(rng: &mut Rng, place: &CaseFolders) -> PathBuf {
    let mut files = all(place);
    let notes =
        |p: &PathBuf| p.extension().is_some_and(|e| e == "md") || p.ends_with("reference_metrics.json");
    files.retain(|p| !notes(p));
    rng.pick(&files).clone()
}

/// Changes some bytes of a text or of a binary, in its first part or anywhere.
pub(crate) fn flip(rng: &mut Rng, bytes: &mut [u8]) -> String {
    let within = if rng.below(2) == 0 { bytes.len().min(512) } else { bytes.len() };
    let mut changes = Vec::new();
    for _ in 0..=rng.below(8) {
        let at = rng.below(within);
        let new = match rng.below(4) {
            0 => bytes.get(at).map_or(0, |b| b ^ 1 << rng.below(8)),
            1 => 0,
            2 => 0xff,
            _ => rng.next() as u8,
        };
        if let Some(byte) = bytes.get_mut(at) {
            *byte = new;
            changes.push(format!("{at}={new:#04x}"));
        }
    }
    changes.join(" ")
}

pub(crate) fn bytes(rng: &mut Rng, place: &mut CaseFolders) -> String {
    let file = one(rng, place);
    let path = place.subject.join(&file);
    let mut bytes = fs::read(&path).unwrap();
    let changes = flip(rng, &mut bytes);
    fs::write(&path, bytes).unwrap();
    format!("`{}` with bytes {changes}", file.display())
}

pub(crate) fn size(rng: &mut Rng, place: &mut CaseFolders) -> String {
    let file = one(rng, place);
    let path = place.subject.join(&file);
    let length = fs::metadata(&path).unwrap().len();
    let new = match rng.below(6) {
        0 => 0,
        1 => length.saturating_sub(1),
        2 => length + 1,
        // Sparse: long, but without blocks on the disk. Weights are mapped, and the memory limit has room for
        // this.
        3 => length + (64 << 20),
        4 if weights(&file) => length + (256 << 20),
        4 => 1 << 40,
        _ => rng.next() % length.max(1),
    };
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(new).unwrap();
    format!("`{}` of {new} bytes in place of {length}", file.display())
}

/// Whether a file holds weights.
fn weights(file: &Path) -> bool {
    file.extension().is_some_and(|e| e == "safetensors") || file.starts_with("weights")
}

pub(crate) fn missing(rng: &mut Rng, place: &mut CaseFolders) -> String {
    let file = one(rng, place);
    fs::remove_file(place.subject.join(&file)).unwrap();
    format!("`{}` is missing", file.display())
}

/// Replacement of a file: its description, and how it is created. The original has been moved outside.
type Instead = (&'static str, fn(&Path, &Path));

const INSTEAD: [Instead; 12] = [
    ("a folder", |path, _| fs::create_dir(path).unwrap()),
    ("a FIFO", |path, _| assert!(Command::new("mkfifo").arg(path).status().unwrap().success())),
    ("a socket", |path, _| {
        // The path of a socket is limited to about 100 bytes; if it is longer, the file is missing.
        drop(std::os::unix::net::UnixListener::bind(path));
    }),
    ("a link to /dev/zero", |path, _| symlink("/dev/zero", path).unwrap()),
    ("a link to /dev/full", |path, _| symlink("/dev/full", path).unwrap()),
    ("a link to /dev/null", |path, _| symlink("/dev/null", path).unwrap()),
    ("a link to /proc/self/mem", |path, _| symlink("/proc/self/mem", path).unwrap()),
    ("a dangling link", |path, _| symlink("nowhere", path).unwrap()),
    ("a link to itself", |path, _| symlink(path.file_name().unwrap(), path).unwrap()),
    ("a link to outside", |path, copy| symlink(copy, path).unwrap()),
    ("a link to a FIFO", |path, copy| {
        let fifo = copy.with_file_name("fifo");
        assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        symlink(fifo, path).unwrap();
    }),
    ("unreadable", |path, copy| {
        // A copy of the original bytes, since root can read the file nevertheless.
        fs::copy(original(copy), path).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o0)).unwrap();
    }),
];

/// Path of the original of a replaced file.
fn original(copy: &Path) -> PathBuf {
    copy.with_extension("original")
}

pub(crate) fn replaced(rng: &mut Rng, place: &mut CaseFolders) -> String {
    let file = one(rng, place);
    let path = place.subject.join(&file);
    let copy = place.outside.join(file.file_name().unwrap());
    // Files outside have a secret (`tensors::plant`); other files are copied there unchanged.
    if !copy.exists() {
        fs::copy(&path, &copy).unwrap();
    }
    fs::rename(&path, original(&copy)).unwrap();
    let (what, put) = rng.pick(&INSTEAD);
    put(&path, &copy);
    format!("`{}` is {what}", file.display())
}

/// Unusual file names.
const NAMES: [&[u8]; 8] = [
    b"two\nlines",
    b"no \xff utf-8",
    b"a \"quoted\" 'name'",
    b"\x1b[31mred",
    b"%s%n{}$(touch x)`touch y`",
    b" ",
    b"...",
    &[b'n'; 200],
];

pub(crate) fn named(rng: &mut Rng, place: &mut CaseFolders) -> String {
    let name = OsStr::from_bytes(rng.pick::<&[u8]>(&NAMES));
    if rng.below(3) == 0 {
        // An additional file.
        fs::write(place.subject.join(name), "a note").unwrap();
        return format!("a file `{}` beside the others", name.to_string_lossy().escape_debug());
    }
    let to = place.work.join(name);
    fs::rename(&place.subject, &to).unwrap();
    let toml = place.work.join("model.toml");
    let text = fs::read_to_string(&toml).unwrap();
    let quoted = serde_json::Value::from(name.to_string_lossy()).to_string();
    fs::write(&toml, text.replace("\"hf\"", &quoted)).unwrap();
    place.subject = to;
    format!("a folder `{}`", name.to_string_lossy().escape_debug())
}

/// A weight file is truncated while the subcommand reads it.
pub(crate) fn cut(rng: &mut Rng, place: &mut CaseFolders) -> String {
    let files: Vec<_> = all(place).into_iter().filter(|f| weights(f)).collect();
    let file = rng.pick(&files);
    let path = place.subject.join(file);
    let whole = fs::read(&path).unwrap();
    let length = rng.next() % whole.len() as u64 / 4096 * 4096;
    let after = Duration::from_millis(rng.next() % 400);
    place.later = Some(Truncation { path, whole, length, after });
    format!("`{}` is cut to {length} bytes after {} ms", file.display(), after.as_millis())
}
