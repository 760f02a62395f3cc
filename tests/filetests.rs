//! Tests of every pass on small files: `golden/passes/*.moe` have input and expected output.
//!
//! `MOEC_BLESS=1 cargo xtask test filetests` updates the output; check the difference. `moec pass NAME FILE`
//! prints it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::support;

use moec_base::Fault;
use moec_filetest::{Filetest, check};
use std::fs;
use std::path::PathBuf;

/// The files in order.
fn files() -> Vec<PathBuf> {
    let folder = support::root().join("golden/passes");
    let mut all: Vec<_> = fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    all.retain(|path| path.extension().is_some_and(|e| e == "moe"));
    all.sort();
    all
}

#[test]
fn every_filetest() {
    let bless = std::env::var_os("MOEC_BLESS").is_some();
    let wrong: Vec<_> = files().iter().filter_map(|path| check(path, bless).err()).map(report).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The error with its causes and its hint.
fn report(e: moec_base::Error) -> String {
    format!("{e}\n{}\nhint: {}\n", e.causes.join("\n"), e.hint.as_deref().unwrap_or_default())
}

#[test]
fn every_pass_has_at_least_two_filetests() {
    let passes: Vec<_> = files().iter().map(|f| Filetest::read(f, None).unwrap().pass().name).collect();
    for name in moec_pipeline::names() {
        let count = passes.iter().filter(|p| **p == name).count();
        assert!(count >= 2, "`golden/passes` has {count} files for `{name}`");
    }
    for path in files() {
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let pass = Filetest::read(&path, None).unwrap().pass().name;
        assert!(name.starts_with(pass), "`{name}` is for `{pass}`");
    }
}

/// Errors of invalid files, and their places.
#[test]
fn malformed_filetests_are_refused_with_a_position() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.moe");
    let graph = "
;! graph
weight @embed: f32[4, 8] embeddings = t\"embed\"[4, 8]
entry prefill[1] -> %6 {
  inputs %0: i32[1], %1: i32[1], %2: i32[1], %3: i32[1]
  %4: f32[1, 8] = embed %0, @embed
  %5: f32[1, 8] = gather_rows %4, %3
  %6: f32[1, 4] = linear %5, @embed
}
";
    let error_of = |text: &str| {
        fs::write(&path, text).unwrap();
        let e = Filetest::read(&path, None).and_then(|f| f.run()).unwrap_err();
        assert_eq!(e.fault, Fault::Input, "{e}");
        e.message.replace(&path.display().to_string(), "x.moe")
    };
    for (text, expected) in [
        ("; nothing\n", "`x.moe` does not name a pass"),
        (";! pass: magic\n;! graph\n", "`x.moe:1`: there is no pass `magic`"),
        (";! pas: lower\n;! graph\n", "`x.moe:1`: there is no key `pas`"),
        (";! pass: tune\n\n;! pass: tune\n;! graph\n", "`x.moe:3`: `pass` is given twice"),
        (";! pass: tune\n;! grahp\n;! expect\n", "`x.moe:2`: expected `key: value`, found `grahp`"),
        (";! pass: tune\n;! graph\n;! graphs\n", "`x.moe:3`: there is no section `graphs`"),
        (";! pass: tune\n;! graph\n;! graph\n", "`x.moe:3`: there is a section `graph` already"),
        (";! pass: tune\nentry\n;! graph\n", "`x.moe:2`: expected a comment or a section"),
        (";! pass: tune\n;! show: all\n;! graph\n", "`x.moe:2`: `all` is not a value of `show`"),
        (";! pass: lower\n;! expect\n", "`x.moe` has no section `config`"),
        (";! pass: lower\n;! config\n{}\n;! tensors\nnorm\n;! expect\n", "`x.moe:5`: `norm` is not a tensor"),
        (
            ";! pass: format\n\n;! graph\n\nweigth\n",
            "`x.moe:5:1: expected `weight`, `state` or `entry`, found `weigth``",
        ),
    ] {
        assert_eq!(error_of(text), expected, "{text}");
    }
    for (header, expected) in [
        (";! pass: tier\n", "pass `tier` has nothing to do here"),
        (";! pass: format\n;! from: layout\n", "`layout` comes after `format`"),
        (";! pass: format\n\n;! wieghts.experts = 1\n", "`x.moe:3:4`: unknown section `[wieghts]`"),
    ] {
        assert_eq!(error_of(&format!("{header}{graph}")), expected, "{header}");
    }
    let wrong = format!(";! pass: format\n{}", graph.replace("linear %5", "linear %9"));
    assert_eq!(error_of(&wrong), "the Graph of `x.moe` is wrong");
    for (loads, expected) in [
        (
            "chunk = 4\nlayer = [{layer = 0, k = 1, samples = [[1, 2], [3]]}]",
            "the loads of `x.moe` are wrong",
        ),
        ("chunk = 4\nlayer = [{layer = 0, k = 1, samples = [[1, 2]]}]", "the input of `x.moe` is wrong"),
    ] {
        let text = format!(";! pass: tier\n;! target: m2-ultra\n{graph}\n;! loads\n{loads}\n");
        assert_eq!(error_of(&text), expected, "{loads}");
    }
}
