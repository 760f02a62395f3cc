//! Grammars in the runtime's `generate`, with the small model of the runtime's tests.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

#[path = "../../runtime/tests/common/mod.rs"]
mod common;

use common::*;
use moec_runtime::cli::Io;
use serde_json::Value;
use std::ffi::OsString;
use std::path::Path;

/// Exit status, stdout and stderr of `generate` with these arguments.
fn generate(bundle: &Path, args: &[&str]) -> (u8, String, String) {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let io = Io { input: None, out: &mut out, err: &mut err };
    let args = ["generate", "--prompt", "hi", "--quiet"].iter().chain(args).map(OsString::from);
    let status = moec_service::front(&[]).run_with(&program(&ENTRIES), bundle, args, io);
    (status, String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap())
}

#[test]
fn generated_answers_follow_the_grammar() {
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
    let answer: Value = serde_json::from_str(&json).unwrap();
    assert!(["\"ab\"", "\"cd\""].contains(&answer["text"].as_str().unwrap()), "{json}");
    // Together with a stop string; and with several sequences, each of which has its own grammar state.
    let stop = text.chars().nth(2).unwrap().to_string();
    let (_, cut, _) = generate(dir.path(), &["--regex", "[a-d]{5}", "--stop", &stop]);
    assert_eq!(cut, format!("{}\n", &text[..text.find(&stop).unwrap()]));
    let several = ["--regex", "[a-d]{5}", "--best-of", "2", "--all", "--temperature", "2", "--seed", "3"];
    let (_, several, _) = generate(dir.path(), &several);
    let answers: Vec<&str> = several.lines().filter(|line| !line.starts_with('#')).collect();
    assert!(answers.len() == 2 && answers.iter().all(|a| a.len() == 5), "{several}");
}

#[test]
fn unusable_answer_constraints_are_rejected() {
    let dir = bundle();
    add_tokenizer(dir.path());
    for (args, status, says) in [
        (&["--regex", "("][..], 1, "the regular expression cannot be used"),
        (&["--grammar", "/nowhere"], 1, "cannot read `/nowhere`"),
        (&["--regex", "a", "--grammar", "/nowhere"], 2, "cannot be used with"),
        (&["--regex", "a", "--speculate", "2"], 2, "which a grammar may forbid"),
    ] {
        let (found, _, err) = generate(dir.path(), args);
        assert!(found == status && err.contains(says), "{args:?}: {found} {err}");
    }
}
