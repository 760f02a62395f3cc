//! Grammars in the runtime's `generate`, over the small model of the runtime's tests.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

#[path = "../../runtime/tests/common/mod.rs"]
mod common;

use common::*;
use moec_runtime::cli::Io;
use serde_json::Value;
use std::ffi::OsString;
use std::path::Path;

/// Status, data and notes of `generate` with these arguments.
fn generate(bundle: &Path, args: &[&str]) -> (u8, String, String) {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let io = Io { input: None, out: &mut out, err: &mut err };
    let args = ["generate", "--prompt", "hi", "--quiet"].iter().chain(args).map(OsString::from);
    let status = moec_service::front(&[]).run_with(&program(&ENTRIES), bundle, args, io);
    (status, String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap())
}

#[test]
fn answers_are_held_to_a_form() {
    let dir = bundle();
    add_tokenizer(dir.path());
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (lark, schema) =
        (file("g.lark", "start: \"yes\" | \"no\""), file("s.json", r#"{"enum": ["ab", "cd"]}"#));
    let (status, text, err) = generate(dir.path(), &["--regex", "[a-d]{5}"]);
    assert!(
        status == 0 && text.len() == 6 && text.trim().bytes().all(|b| (b'a'..=b'd').contains(&b)),
        "{text} {err}"
    );
    let (_, held, _) = generate(dir.path(), &["--grammar", &lark]);
    assert!(["yes\n", "no\n"].contains(&&*held), "{held}");
    let (_, json, _) = generate(dir.path(), &["--json-schema", &schema, "--json"]);
    let said: Value = serde_json::from_str(&json).unwrap();
    assert!(["\"ab\"", "\"cd\""].contains(&said["text"].as_str().unwrap()), "{json}");
    // Together with a text that ends it, and several sequences, each with a grammar of its own.
    let stop = text.chars().nth(2).unwrap().to_string();
    let (_, cut, _) = generate(dir.path(), &["--regex", "[a-d]{5}", "--stop", &stop]);
    assert_eq!(cut, format!("{}\n", &text[..text.find(&stop).unwrap()]));
    let several = ["--regex", "[a-d]{5}", "--best-of", "2", "--all", "--temperature", "2", "--seed", "3"];
    let (_, several, _) = generate(dir.path(), &several);
    let answers: Vec<&str> = several.lines().filter(|line| !line.starts_with('#')).collect();
    assert!(answers.len() == 2 && answers.iter().all(|a| a.len() == 5), "{several}");
}

#[test]
fn what_cannot_be_held_is_refused() {
    let dir = bundle();
    add_tokenizer(dir.path());
    for (args, status, says) in [
        (&["--regex", "("][..], 1, "the regular expression cannot be used"),
        (&["--grammar", "/nowhere"], 1, "cannot read `/nowhere`"),
        (&["--regex", "a", "--grammar", "/nowhere"], 2, "cannot be used with"),
        (&["--regex", "a", "--speculate", "2"], 2, "a grammar forbids some of them"),
    ] {
        let (found, _, err) = generate(dir.path(), args);
        assert!(found == status && err.contains(says), "{args:?}: {found} {err}");
    }
}
