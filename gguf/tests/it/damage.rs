//! Malformed headers with one mistake each, and their errors.

use super::builder::*;
use moec_gguf::types::TYPES;
use moec_gguf::{Error, Header};

/// Error of a file.
fn error_of(file: &[u8]) -> String {
    let error = Header::read(file).expect_err("the file is damaged");
    assert!(!error.hint().is_empty());
    error.to_string()
}

/// A file with one tensor in its table, and this many bytes of data.
fn one(extents: &[u64], kind: u32, offset: u64, data: usize) -> String {
    let mut builder = Builder::default().entry("t", extents, kind, offset);
    builder.data = vec![0; data];
    error_of(&builder.build())
}

#[test]
fn other_files_and_versions_are_not_gguf() {
    assert_eq!(error_of(b""), "it is empty");
    assert_eq!(error_of(b"PK\x03\x04 and so on"), "it begins with `PK\\x03\\x04`, not with `GGUF`");
    for (version, want) in [
        (1, "it is of version 1; versions 2 and 3 are read"),
        (4, "it is of version 4; versions 2 and 3 are read"),
        (3_u32.swap_bytes(), "its numbers are big-endian"),
    ] {
        assert_eq!(error_of(&Builder { version, ..Builder::default() }.build()), want);
    }
}

#[test]
fn gguf_file_truncated_anywhere_is_an_error() {
    let file = Builder::default()
        .key("a", TEXT, &text("some text"))
        .key("b", ARRAY, &[array(TEXT, 2), text("x"), text("yz")].concat())
        .tensor("t", &[32], 8, &[1; 34])
        .tensor("u", &[4, 2], 0, &[2; 32])
        .build();
    assert!(Header::read(&file).is_ok());
    for end in 0..file.len() {
        let error = Header::read(&file[..end]).unwrap_err();
        let expected = matches!(error, Error::Magic(_) | Error::Cut { .. } | Error::Outside { .. });
        assert!(expected, "{end}: {error}");
    }
}

#[test]
fn counts_and_lengths_beyond_the_file() {
    let builder = Builder::default().key("a", TEXT, &text("b")).tensor("t", &[4], 0, &[0; 16]);
    for n in [100, 1 << 40, u64::MAX] {
        assert!(error_of(&builder.build_of(1, n)).starts_with(&format!("it ends inside its {n} keys")));
        assert!(
            error_of(&builder.build_of(n, 1)).starts_with(&format!("it ends inside the table of its {n} te"))
        );
        let long = [array(F32, n), vec![0; 8]].concat();
        let file = Builder::default().key("list", ARRAY, &long).build();
        assert!(error_of(&file).starts_with("it ends inside `list`, which wants "), "{}", error_of(&file));
        let file = Builder::default().key("text", TEXT, &n.to_le_bytes()).build();
        assert!(error_of(&file).starts_with("it ends inside `text`, which wants "), "{}", error_of(&file));
    }
    // The name of a key.
    let mut file = builder.build();
    file[24..32].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(error_of(&file).starts_with("it ends inside key 0"));
}

#[test]
fn invalid_keys_are_refused() {
    let file = Builder::default().key("a", U8, &[1]).key("a", U8, &[1]).build();
    assert_eq!(error_of(&file), "key `a` is there twice");
    assert_eq!(error_of(&Builder::default().key("", U8, &[1]).build()), "key 0 has no name");
    assert_eq!(
        error_of(&Builder::default().key("a", 13, &[0; 8]).build()),
        "`a` has values of type 13, which GGUF does not have"
    );
    assert_eq!(
        error_of(&Builder::default().key("a", BOOL, &[2]).build()),
        "`a` is a truth value of 2, neither 0 nor 1"
    );
    let bad = [&1_u64.to_le_bytes()[..], &[0xff]].concat();
    assert_eq!(error_of(&Builder::default().key("a", TEXT, &bad).build()), "`a` is not UTF-8");
    let list = [array(TEXT, 1), bad].concat();
    assert_eq!(error_of(&Builder::default().key("a", ARRAY, &list).build()), "`a` is not UTF-8");
}

#[test]
fn arrays_nested_without_end() {
    let deep = array(ARRAY, 1).repeat(5000);
    assert_eq!(
        error_of(&Builder::default().key("a", ARRAY, &deep).build()),
        "`a` nests arrays more than 4 deep"
    );
}

#[test]
fn invalid_alignments_are_refused() {
    for bad in [0_u32, 1, 4, 12, 1 << 31] {
        let file = Builder::default().key("general.alignment", U32, &bad.to_le_bytes()).build();
        assert_eq!(
            error_of(&file),
            format!("`general.alignment` is {bad}, expected a power of two of at least 8")
        );
    }
    let file = Builder::default().key("general.alignment", TEXT, &text("32")).build();
    assert_eq!(error_of(&file), "`general.alignment` is a text, expected a whole number");
}

#[test]
fn partial_blocks_and_truncated_tensors_are_refused() {
    for kind in &TYPES {
        let (block, bytes) = (kind.block as u64, kind.bytes);
        if block > 1 {
            let want = format!(
                "tensor `t` has rows of {} numbers, which are not whole blocks of {block} ({})",
                block / 2,
                kind.name
            );
            assert_eq!(one(&[block / 2, 2], kind.id, 0, bytes), want);
        }
        assert_eq!(
            one(&[block, 2], kind.id, 0, 2 * bytes - 1),
            format!(
                "tensor `t` ends at byte {} of the data, of which the file has {}",
                2 * bytes,
                2 * bytes - 1
            )
        );
    }
}

#[test]
fn invalid_tensors_are_refused() {
    assert_eq!(one(&[4], 99, 0, 16), "tensor `t` is stored as type 99, which is not known");
    assert_eq!(one(&[], 0, 0, 16), "tensor `t` has 0 axes, expected 1 to 4");
    assert_eq!(one(&[1; 5], 0, 0, 16), "tensor `t` has 5 axes, expected 1 to 4");
    assert_eq!(one(&[4, 0], 0, 0, 16), "tensor `t` has no numbers: its extents are [4, 0]");
    assert_eq!(
        one(&[40, 2], 8, 0, 999),
        "tensor `t` has rows of 40 numbers, which are not whole blocks of 32 (Q8_0)"
    );
    let large = u64::MAX / 4;
    assert!(one(&[4, large, 4], 0, 0, 16).starts_with("tensor `t` is too large"));
    assert!(one(&[large], 0, 0, 16).starts_with("tensor `t` ends at byte"));
    assert_eq!(one(&[4], 0, 16, 64), "tensor `t` begins at byte 16 of the data, not at a multiple of 32");
    assert_eq!(one(&[4], 0, 0, 15), "tensor `t` ends at byte 16 of the data, of which the file has 15");
    assert!(one(&[64], 0, u64::MAX - 31, 64).starts_with("tensor `t` ends at byte 18446744073709551615"));
    assert_eq!(one(&[4], 0, 32, 64), "32 bytes before tensor `t` belong to no tensor");
    let twice = Builder::default().tensor("t", &[4], 0, &[0; 16]).tensor("t", &[4], 0, &[0; 16]);
    assert_eq!(error_of(&twice.build()), "tensor `t` is there twice");
    assert_eq!(error_of(&Builder::default().tensor("", &[4], 0, &[0; 16]).build()), "tensor 0 has no name");
    let mut both = Builder::default().entry("t", &[16], 0, 0).entry("u", &[4], 0, 32);
    both.data = vec![0; 64];
    assert_eq!(error_of(&both.build()), "tensors `t` and `u` overlap");
}
