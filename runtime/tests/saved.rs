//! Saved prompts: a restored prompt continues as if it had just been computed. A file that is damaged or of
//! another bundle is refused.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "what fails here fails the test")]

mod common;

use common::*;
use moec_runtime::kv::saved::{Saved, save};
use moec_runtime::serving::generate::{GenerateOptions, generate_by};
use moec_runtime::{Decoder, Engine, Error, LogitRows, Program, Request, Sampler, Sampling};
use proptest::prelude::*;
use std::path::Path;

fn read(engine: &mut Engine<'_>, slot: u32, ids: &[u32]) {
    engine.prefill(slot, 0, ids, LogitRows::None, &mut |_, _| Ok(())).unwrap();
}

/// A file with the prompt, and the engine's folder.
fn saved(p: &Program, ids: &[u32]) -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = bundle();
    let path = dir.path().join("prompt.kv");
    let mut engine = open(p, dir.path(), 1);
    read(&mut engine, 1, ids);
    let bytes = save(&engine, 1, ids, &path).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().len(), bytes);
    drop(engine);
    (dir, path)
}

/// Continuation of a prompt whose prefix is saved in a file.
fn continued(p: &Program, folder: &Path, path: &Path, prompt: &[u32]) -> (Vec<u32>, usize) {
    let mut engine = open(p, folder, 2);
    // The slot had another sequence before.
    read(&mut engine, 0, &[3; 40]);
    let file = Saved::open(path, p).unwrap();
    let held = file.ids().to_vec();
    file.restore(&mut engine, 0).unwrap();
    let request = Request { slot: 0, prompt, n: 10, end: &[] };
    let mut sampler = Sampler::new(Sampling::default());
    let options = GenerateOptions { held: &held, ..GenerateOptions::default() };
    let by = (&mut Decoder::full(), &mut sampler);
    let (done, _) = generate_by(&mut engine, &request, options, by, &mut |_| Ok(())).unwrap();
    (done.ids, done.held)
}

#[test]
fn saved_prompt_continues_like_a_prefilled_one() {
    let p = program(&ENTRIES);
    let ids: Vec<u32> = (0..30).map(|i| (i * 7 + 5) % 250).collect();
    let (dir, path) = saved(&p, &ids);
    let longer = [&ids[..], &[9, 8, 7]].concat();
    let other = [&ids[..12], &[1, 2]].concat();
    for (prompt, held) in [(&longer, 30), (&ids, 29), (&other, 12), (&ids[..4].to_vec(), 3)] {
        assert_eq!(continued(&p, dir.path(), &path, prompt), (continuation(prompt, 10), held));
    }
    // The file replaces the old one, and no temporary file is left.
    let mut engine = open(&p, dir.path(), 1);
    read(&mut engine, 0, &ids[..5]);
    save(&engine, 0, &ids[..5], &path).unwrap();
    assert_eq!(Saved::open(&path, &p).unwrap().ids(), &ids[..5]);
    assert!(matches!(save(&engine, 0, &ids, &path), Err(Error::Request { .. })));
    assert!(save(&engine, 0, &ids[..5], &dir.path().join("no/where")).is_err());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
}

#[test]
fn saved_prompt_of_another_bundle_is_rejected() {
    let (_dir, path) = saved(&program(&ENTRIES), &[1, 2, 3]);
    let mut other = plan(&ENTRIES);
    other.files[0].sha256[0] ^= 1;
    let e = Saved::open(&path, &Program::new(other, &resolve).unwrap()).unwrap_err();
    assert!(matches!(&e, Error::BadFile { what, .. } if what.contains("another bundle")), "{e}");
    assert!(e.hint().unwrap().contains("belongs to one build"));
}

#[test]
fn invalid_saved_prompt_file_is_reported() {
    let p = program(&ENTRIES);
    let (dir, path) = saved(&p, &[1, 2, 3]);
    let whole = std::fs::read(&path).unwrap();
    let with = |at: usize, bytes: &[u8]| {
        let mut changed = whole.clone();
        changed[at..at + bytes.len()].copy_from_slice(bytes);
        changed
    };
    let cases = [
        (Vec::new(), "too short"),
        (vec![0; 200], "does not begin as one"),
        (with(8, &[1]), "another version"),
        (with(44, &[0]), "number of tokens"),
        (with(44, &u64::MAX.to_le_bytes()), "number of tokens"),
        (with(52, &[2]), "number of tokens"),
        (with(44, &[40, 0, 0, 0, 0, 0, 0, 0, 40]), "cut off"),
        (with(60, &[1]), "number of snapshots"),
        (with(60, &u64::MAX.to_le_bytes()), "number of snapshots"),
        (with(68, &[255, 255]), "outside of the vocabulary"),
        (whole[..whole.len() - 1].to_vec(), "bytes in place of"),
        ([&whole[..], &[0]].concat(), "bytes in place of"),
        (with(68, &[7]), "not what was saved"),
        (with(whole.len() - 40, &[7]), "not what was saved"),
        (with(whole.len() - 1, &[whole[whole.len() - 1] ^ 1]), "not what was saved"),
    ];
    let mut engine = open(&p, dir.path(), 1);
    for (bytes, why) in cases {
        std::fs::write(&path, bytes).unwrap();
        let e = Saved::open(&path, &p).and_then(|s| s.restore(&mut engine, 0)).unwrap_err();
        assert!(matches!(e, Error::BadFile { .. }) && e.to_string().contains(why), "{e}, not {why}");
        assert!(engine.is_empty(0) && e.hint().is_some());
    }
    assert!(matches!(Saved::open(dir.path(), &p), Err(Error::Io { .. })));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Any changed byte is an error, not a panic.
    #[test]
    fn damaged_saved_prompt_is_always_an_error(at in any::<prop::sample::Index>(), by in 1_u8.., cut in any::<Option<prop::sample::Index>>()) {
        let p = program(&ENTRIES);
        let (dir, path) = saved(&p, &[5, 6, 7, 8]);
        let mut bytes = std::fs::read(&path).unwrap();
        let at = at.index(bytes.len());
        bytes[at] ^= by;
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        std::fs::write(&path, bytes).unwrap();
        let mut engine = open(&p, dir.path(), 1);
        let done = Saved::open(&path, &p).and_then(|s| s.restore(&mut engine, 0));
        prop_assert!(done.is_err() && engine.is_empty(0));
    }
}
