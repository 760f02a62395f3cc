//! Damage to bundles with updated hashes, so that the parsers of the files are reached.

use super::case::CaseFolders;
use super::files;
use super::judge::holds;
use super::rng::Rng;
use super::support::{finish, moec};
use super::{tensors, text};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

/// Writes a file of the bundle, with its size and hash in the manifest.
fn write(place: &CaseFolders, file: &Path, bytes: &[u8]) {
    fs::write(place.subject.join(file), bytes).unwrap();
    let manifest = place.subject.join("manifest.json");
    let mut value: Value = serde_json::from_slice(&fs::read(&manifest).unwrap()).unwrap();
    let hash = Sha256::digest(bytes).iter().fold(String::new(), |mut s, b| {
        let _ = write!(s, "{b:02x}");
        s
    });
    let name = file.to_string_lossy().into_owned();
    value["files"][name] = json!({"bytes": bytes.len(), "sha256": hash});
    fs::write(&manifest, format!("{value:#}\n")).unwrap();
}

/// Changes the bytes of a file: single bytes, whole words, or its length.
fn damaged(rng: &mut Rng, bytes: &mut Vec<u8>) -> String {
    match rng.below(6) {
        0 => {
            let length = rng.below(bytes.len());
            bytes.truncate(length);
            format!("cut to {length} bytes")
        }
        1 => {
            let at = rng.below(bytes.len());
            // The encoding of lengths and offsets: a byte with the width, then the number.
            let wide: &[u8] = rng.pick::<&[u8]>(&[
                &[251_u8, 0xff, 0xff][..],
                &[252, 0xff, 0xff, 0xff, 0x7f],
                &[253, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff],
                &[253, 0, 0, 0, 0, 0, 0, 0, 0x80],
            ]);
            if rng.below(2) == 0 {
                let end = (at + wide.len()).min(bytes.len());
                bytes[at..end].copy_from_slice(&wide[..end - at]);
            } else {
                bytes.splice(at..=at, wide.iter().copied());
            }
            format!("{wide:?} at {at}")
        }
        2 => {
            let (from, at) = (rng.below(bytes.len()), rng.below(bytes.len()));
            let length = rng.below(64).min(bytes.len() - from.max(at));
            bytes.copy_within(from..from + length, at);
            format!("{length} bytes of {from} at {at}")
        }
        _ => files::flip(rng, bytes),
    }
}

/// Damages the files that describe code: the plan and the object.
pub(crate) fn code(rng: &mut Rng, place: &mut CaseFolders) -> String {
    let file = Path::new(*rng.pick(&["plan.bin", "plan.bin", "plan.bin", "artifacts/kernels.o"]));
    let mut bytes = fs::read(place.subject.join(file)).unwrap();
    let change = damaged(rng, &mut bytes);
    write(place, file, &bytes);
    format!("`{}`, its hash made to fit: {change}", file.display())
}

/// Damages other files: weights, the Graph, decisions, tokenizer, packages.
pub(crate) fn data(rng: &mut Rng, place: &mut CaseFolders) -> String {
    let code =
        |p: &PathBuf| p.ends_with("plan.bin") || p.ends_with("kernels.o") || p.ends_with("manifest.json");
    let files: Vec<_> = files::all(place).into_iter().filter(|p| !code(p)).collect();
    let file = rng.pick(&files).clone();
    let mut bytes = fs::read(place.subject.join(&file)).unwrap();
    let is_json = file.extension().is_some_and(|e| e == "json");
    let change = match (is_json, String::from_utf8(bytes.clone())) {
        (true, Ok(mut whole)) => {
            let change = text::change(rng, &mut whole);
            bytes = whole.into_bytes();
            change
        }
        (false, Ok(mut whole)) if rng.below(2) == 0 => {
            let change = numbers(rng, &mut whole);
            bytes = whole.into_bytes();
            change
        }
        _ => damaged(rng, &mut bytes),
    };
    write(place, &file, &bytes);
    format!("`{}`, its hash made to fit: {change}", file.display())
}

/// Replaces a number in a text.
fn numbers(rng: &mut Rng, text: &mut String) -> String {
    let digit = |c: char| c.is_ascii_digit();
    let mut places = Vec::new();
    let mut at = 0;
    while let Some(start) = text[at..].find(digit).map(|n| at + n) {
        let end = text[start..].find(|c| !digit(c)).map_or(text.len(), |n| start + n);
        places.push(start..end);
        at = end;
    }
    if places.is_empty() {
        return "nothing".to_owned();
    }
    let range = rng.pick(&places).clone();
    let new = *rng.pick(&[
        "0",
        "1",
        "7",
        "65536",
        "4294967295",
        "4294967296",
        "18446744073709551615",
        "99999999999999999999",
        "x",
        "-1",
    ]);
    let change = format!("{new} in place of {} at {}", &text[range.clone()], range.start);
    text.replace_range(range, new);
    change
}

/// A bundle built from damaged files must be valid, and contain nothing from files outside of the checkpoint.
pub(crate) fn sound(bundle: &Path) -> Result<(), String> {
    for secret in tensors::secrets() {
        if let Some(file) = holds(bundle, &secret) {
            return Err(format!("`{}` holds what lies outside of the checkpoint", file.display()));
        }
    }
    for args in [&["inspect"][..], &["explain"]] {
        let output = finish(moec().args(args).arg(bundle));
        if !output.status.success() {
            return Err(format!(
                "the bundle that was built is none: {}",
                String::from_utf8_lossy(&output.stderr)
            ));
        }
    }
    Ok(())
}
