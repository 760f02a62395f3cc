//! Tests of the program's command line.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::{Command, Output};

fn papers(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_moec-papers")).args(args).output().unwrap()
}

#[test]
fn every_evaluation_lists_its_options() {
    for (paper, option) in [
        ("npumoe", "--json"),
        ("trimoe", "--quick"),
        ("powerinfer2", "--quick"),
        ("hybrimoe", "--quick"),
        ("mobile", "--quick"),
    ] {
        let out = papers(&[paper, "--help"]);
        let help = String::from_utf8(out.stdout).unwrap();
        assert!(out.status.success() && help.contains(option), "{paper}: {help}");
    }
}

#[test]
fn unknown_evaluation_is_rejected() {
    let out = papers(&["nothing"]);
    let stderr = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("'nothing'"), "{stderr}");
}
