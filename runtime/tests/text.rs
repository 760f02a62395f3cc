//! Text in and out.
#![allow(clippy::unwrap_used, clippy::panic, reason = "what fails here fails the test")]

mod common;

use common::*;
use moec_runtime::{Error, Text};

fn text(bos: Option<u32>) -> (tempfile::TempDir, Text) {
    let dir = tempfile::tempdir().unwrap();
    add_tokenizer(dir.path());
    let text = Text::open(dir.path(), bos).unwrap();
    (dir, text)
}

#[test]
fn the_first_token() {
    let (_dir, with) = text(Some(BOS));
    assert_eq!(with.encode("ab").unwrap(), [BOS, 97, 98]);
    assert_eq!(with.encode("<s>ab").unwrap(), [BOS, 97, 98]);
    assert_eq!(with.encode_plain("ab").unwrap(), [97, 98]);
    let (_dir, without) = text(None);
    assert_eq!(without.encode("ab").unwrap(), [97, 98]);
    assert_eq!(without.decode(&[BOS, 97, 98, EOS]).unwrap(), "ab");
}

#[test]
fn pieces_are_whole_characters() {
    let (_dir, text) = text(None);
    for sample in ["plain", "naïve café", "日本語 🦀🎉 x", "", "a\u{fffd}b"] {
        let mut stream = text.stream();
        let pieces: Vec<String> = sample.bytes().map(|b| stream.push(u32::from(b)).unwrap()).collect();
        let whole = pieces.concat() + &stream.finish().unwrap();
        assert_eq!(whole, sample);
        if !sample.contains('\u{fffd}') {
            assert!(pieces.iter().all(|p| p.is_empty() || sample.contains(p.as_str())), "{pieces:?}");
        }
    }
}

#[test]
fn bytes_that_are_no_characters() {
    let (_dir, text) = text(None);
    for bytes in
        [&[0xffu8, b'a', 0xe6, b'b'][..], &[0xe6, 0x97], &[b'x', 0xf0, 0x9f, 0xf0, 0x9f, 0xa6, 0x80, b'y']]
    {
        let ids: Vec<u32> = bytes.iter().map(|&b| u32::from(b)).collect();
        let mut stream = text.stream();
        let mut whole: String = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
        whole += &stream.finish().unwrap();
        assert_eq!(whole, text.decode(&ids).unwrap());
    }
}

#[test]
fn no_tokenizer_or_a_bad_one() {
    let dir = tempfile::tempdir().unwrap();
    let e = Text::open(dir.path(), None).err().unwrap();
    assert!(matches!(e, Error::NoTokenizer(_)));
    assert!(e.hint().unwrap().contains("--ids"));
    add_tokenizer(dir.path());
    std::fs::write(dir.path().join("artifacts/tokenizer.json"), "{}").unwrap();
    assert!(matches!(Text::open(dir.path(), None), Err(Error::BadTokenizer { .. })));
}
