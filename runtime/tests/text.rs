//! Tests of tokenization and of decoding.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "what fails here fails the test")]

mod common;

use common::*;
use moec_runtime::bundle::BundleReader;
use moec_runtime::{Error, Limit, Text};
use serde_json::{Value, json};

fn text(bos: Option<u32>) -> (tempfile::TempDir, Text) {
    let dir = tempfile::tempdir().unwrap();
    add_tokenizer(dir.path());
    let text = Text::open(&BundleReader::unchecked(dir.path()), bos).unwrap();
    (dir, text)
}

#[test]
fn first_token_is_decoded_without_a_leading_space() {
    let (_dir, with) = text(Some(BOS));
    assert_eq!(with.encode("ab").unwrap(), [BOS, 97, 98]);
    assert_eq!(with.encode("<s>ab").unwrap(), [BOS, 97, 98]);
    assert_eq!(with.encode_plain("ab").unwrap(), [97, 98]);
    let (_dir, without) = text(None);
    assert_eq!(without.encode("ab").unwrap(), [97, 98]);
    assert_eq!(without.decode(&[BOS, 97, 98, EOS]).unwrap(), "ab");
}

#[test]
fn streamed_pieces_are_whole_characters() {
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
fn invalid_utf8_streams_like_whole_decoding() {
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
fn missing_or_invalid_tokenizer_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let e = Text::open(&BundleReader::unchecked(dir.path()), None).err().unwrap();
    assert!(matches!(e, Error::Request { .. }));
    assert!(e.hint().unwrap().contains("--ids"));
    add_tokenizer(dir.path());
    std::fs::write(dir.path().join("artifacts/tokenizer.json"), "{}").unwrap();
    assert!(matches!(Text::open(&BundleReader::unchecked(dir.path()), None), Err(Error::BadFile { .. })));
}

/// A tokenizer whose decoder strips the first space and joins bytes (SentencePiece): ids of bytes are
/// `BYTES + byte`.
fn pieces() -> Text {
    let words = ["▁foo", "bar", "▁hello", "▁"];
    let special = ["<unk>", "<s>", "</s>"];
    let bytes = (0..=255u8).map(|b| format!("<0x{b:02X}>"));
    let all = special.map(str::to_owned).into_iter().chain(bytes).chain(words.map(str::to_owned));
    let vocab: serde_json::Map<_, _> = all.zip(0..).map(|(token, id)| (token, json!(id))).collect();
    let added = |(id, content): (usize, &&str)| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    };
    let added: Vec<_> = special.iter().enumerate().map(added).collect();
    let decoders = json!([
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]);
    let json = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {"type": "BPE", "unk_token": "<unk>", "byte_fallback": true, "vocab": vocab, "merges": []},
    });
    Text::parse(json.to_string().as_bytes(), None).unwrap()
}

const BYTES: u32 = 3;
const FOO: u32 = BYTES + 256;
const BAR: u32 = FOO + 1;
const HELLO: u32 = FOO + 2;

fn joined(mut stream: moec_runtime::serving::text::TextStream<'_>, ids: &[u32]) -> String {
    let mut whole: String = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
    whole += &stream.finish().unwrap();
    whole
}

fn bytes(text: &str) -> impl Iterator<Item = u32> {
    text.as_bytes().to_vec().into_iter().map(|b| BYTES + u32::from(b))
}

#[test]
fn special_tokens_are_hidden_in_streams() {
    let text = pieces();
    for many in [0, 1, 63, 64, 200] {
        let ids = [&[BAR][..], &vec![2; many], &[FOO]].concat();
        assert_eq!(joined(text.stream(), &ids), "bar foo", "{many}");
        let ids: Vec<u32> = vec![2; many].into_iter().chain(bytes("😀")).chain([HELLO]).collect();
        assert_eq!(joined(text.stream(), &ids), "😀 hello", "{many}");
    }
    assert_eq!(joined(text.stream_with_special(), &[BAR, 2, FOO]), "bar</s> foo");
}

#[test]
fn invalid_bytes_do_not_delay_later_text() {
    let text = pieces();
    for many in [1, 3, 60, 61, 62, 63, 64, 65, 200] {
        // A run of bytes is decoded as a whole: if one byte is invalid, the whole run is.
        let ids: Vec<u32> =
            vec![BYTES + 0xff; many].into_iter().chain(bytes("😀")).chain([HELLO, FOO]).collect();
        assert_eq!(joined(text.stream(), &ids), text.decode(&ids).unwrap(), "{many}");
        let mut stream = text.stream();
        let given = ids[..many].iter().filter(|&&id| !stream.push(id).unwrap().is_empty()).count();
        assert_eq!(given > 0, many >= 64, "{many}");
        // An invalid byte after a character that was already returned does not change that character.
        let ids: Vec<u32> = bytes("é").chain(vec![BYTES + 0xff; many]).chain([HELLO, FOO, BAR]).collect();
        assert_eq!(
            joined(text.stream(), &ids),
            format!("é{} hello foobar", "\u{fffd}".repeat(many)),
            "{many}"
        );
    }
    // After such bytes a byte-level character is still whole, at whichever of its bytes the run is given up.
    // Ids outside of the tokenizer's have no text.
    let (_dir, level) = self::text(None);
    for many in 50..140 {
        let ids: Vec<u32> = vec![0xff; many].into_iter().chain("😀 x".bytes().map(u32::from)).collect();
        assert_eq!(joined(level.stream(), &ids), level.decode(&ids).unwrap(), "{many}");
        let ids: Vec<u32> = vec![99_999; many].into_iter().chain("😀 x".bytes().map(u32::from)).collect();
        assert_eq!(joined(level.stream(), &ids), "😀 x", "{many}");
        let ids = [&[BAR][..], &vec![99_999; many], &[FOO]].concat();
        assert_eq!(joined(text.stream(), &ids), "bar foo", "{many}");
    }
}

/// Tokens that each end inside of a character: pieces are returned, although the window is never whole.
#[test]
fn text_streams_when_no_token_ends_a_character() {
    let mut tokenizer: Value = serde_json::from_str(&tokenizer()).unwrap();
    // The second byte of `é` and the first one of the next.
    tokenizer["model"]["vocab"]["©Ã"] = json!(500);
    let text = Text::parse(tokenizer.to_string().as_bytes(), None).unwrap();
    let ids: Vec<u32> = [0xc3].into_iter().chain([500; 300]).chain([0xa9]).collect();
    assert_eq!(joined(text.stream(), &ids), "é".repeat(301));
}

#[test]
fn streamed_text_continues_after_its_prompt() {
    let text = pieces();
    let answer = [FOO, BAR];
    assert_eq!(joined(text.stream(), &answer), "foobar");
    for prompt in [&[HELLO][..], &[1, HELLO], &[HELLO; 20], &[HELLO, 2, 2, 2, 2, 2, 2, 2]] {
        assert_eq!(joined(text.stream().continue_after(prompt).unwrap(), &answer), " foobar", "{prompt:?}");
    }
    // After tokens without text, a text begins.
    assert_eq!(joined(text.stream().continue_after(&[1]).unwrap(), &answer), "foobar");
    // Tokens that form a character only together, and text that ends inside of one.
    let crab: Vec<u32> = bytes("🦀").collect();
    for prompt in [
        crab.clone(),
        [&crab[..], &[BYTES + 10; 3]].concat(),
        [&crab[..], &crab].concat(),
        crab[..2].to_vec(),
    ] {
        let prompt = [&[HELLO][..], &prompt].concat();
        assert_eq!(joined(text.stream().continue_after(&prompt).unwrap(), &answer), " foobar", "{prompt:?}");
        assert_eq!(text.stream().continue_after(&prompt).unwrap().finish().unwrap(), "");
    }
    let (_dir, level) = self::text(None);
    let prompt: Vec<u32> = "abc\u{fffd}".bytes().map(u32::from).collect();
    assert_eq!(joined(level.stream().continue_after(&prompt).unwrap(), &[100, 101]), "de");
}

/// A tokenizer with bytes, and `a` two, four and eight times; `normalizer`: its part of the JSON.
fn of_eights(normalizer: Value) -> Text {
    let mut json: Value = serde_json::from_str(&tokenizer()).unwrap();
    for (i, half) in ["a", "aa", "aaaa"].iter().enumerate() {
        json["model"]["vocab"][half.repeat(2)] = json!(256 + i);
    }
    json["model"]["merges"] = json!([["a", "a"], ["aa", "aa"], ["aaaa", "aaaa"]]);
    json["added_tokens"] = json!([]);
    json["normalizer"] = normalizer;
    Text::parse(json.to_string().as_bytes(), None).unwrap()
}

#[test]
fn a_text_of_too_many_tokens_is_refused_and_one_that_fits_is_not() {
    const MOST: usize = 10_000;
    let text = of_eights(Value::Null).at_most(MOST, 260);
    let ids = |n: usize| text.encode(&"a".repeat(n)).map(|ids| ids.len());
    assert_eq!(ids(8 * MOST).unwrap(), MOST);
    // Refused by its bytes; refused by its tokens, which are counted in pieces.
    let letters = "b".repeat(8 * MOST);
    for refused in [ids(8 * MOST + 1), text.encode(&letters).map(|ids| ids.len())] {
        assert!(
            matches!(refused, Err(Error::Limit { limit: Limit::Context, most: MOST, .. })),
            "{refused:?}"
        );
    }
    // All parts together.
    assert_eq!(text.encode_parts(["ab", "b"].into_iter().cycle().take(6000)).unwrap().len(), 9000);
    let refused = text.encode_parts(["ab", "b"].into_iter().cycle().take(8000));
    assert!(matches!(refused, Err(Error::Limit { limit: Limit::Context, most: MOST, .. })), "{refused:?}");
    // Without a limit it is encoded, however long it is.
    assert_eq!(of_eights(Value::Null).encode(&letters).unwrap().len(), letters.len());
}

/// A mathematical letter of four bytes becomes one of one byte.
#[test]
fn text_limit_applies_after_normalization() {
    const MOST: usize = 10_000;
    let text = of_eights(json!({"type": "NFKC"})).at_most(MOST, 260);
    assert_eq!(text.encode(&"𝐚".repeat(8 * MOST)).unwrap().len(), MOST);
    assert!(text.encode(&"𝐚".repeat(8 * MOST + 1)).is_err());
}

/// A tokenizer of bytes with other parts of a file; BPE without merges has a token for each byte's character.
fn with(parts: &Value) -> Result<Text, String> {
    let vocab: serde_json::Map<_, _> =
        (0..128u8).map(|b| (char::from(b).to_string(), json!(u32::from(b)))).collect();
    let mut json = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": null, "post_processor": null, "decoder": null,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    });
    json.as_object_mut().unwrap().extend(parts.as_object().unwrap().clone());
    Text::parse(json.to_string().as_bytes(), None)
}

fn rule(pattern: &Value, content: &str) -> Value {
    json!({"type": "Replace", "pattern": pattern, "content": content})
}

#[test]
fn rules_that_lengthen_texts_without_bound_are_refused() {
    let hundred = "a".repeat(100);
    let five = |pattern: &Value| vec![rule(pattern, &hundred); 5];
    for pattern in
        [json!({"String": "a"}), json!({"Regex": "a"}), json!({"String": ""}), json!({"Regex": "x*"})]
    {
        for (key, part) in [
            ("normalizer", json!({"type": "Sequence", "normalizers": five(&pattern)})),
            ("decoder", json!({"type": "Sequence", "decoders": five(&pattern)})),
        ] {
            let e = with(&json!({ key: part })).err().unwrap();
            assert!(e.contains(key) && e.contains("times as long; 64 times is the maximum"), "{e}");
        }
    }
    let metaspace = |c: &str| json!({"type": "Metaspace", "replacement": c, "prepend_scheme": "always"});
    let e = with(
        &json!({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [metaspace("_"), metaspace("x"), metaspace("y")]}}),
    );
    assert!(e.err().unwrap().contains("rewrite a text"));
    let e = with(&json!({"pre_tokenizer": {"type": "FixedLength", "length": 0}})).err().unwrap();
    assert!(e.contains("no characters"), "{e}");
    let many = json!({"type": "Sequence", "normalizers": vec![json!({"type": "Lowercase"}); 257]});
    assert!(with(&json!({ "normalizer": many })).err().unwrap().contains("256 is the maximum"));
}

#[test]
fn a_text_that_rules_would_make_too_long_is_refused() {
    // Matches without length are found in texts alone: here, one before each letter.
    let empty = rule(&json!({"Regex": "(?=a)"}), &"b".repeat(64));
    let text = with(&json!({ "normalizer": empty })).unwrap();
    assert_eq!(text.encode_plain("a").unwrap().len(), 65);
    let e = text.encode_plain(&"a".repeat(100_000)).unwrap_err();
    assert!(e.to_string().contains("can make a text of 100000 bytes"), "{e}");
    let text = with(&json!({ "decoder": empty })).unwrap();
    let e = text.decode(&vec![97; 100_000]).unwrap_err();
    assert!(e.to_string().contains("can make a text of 100000 bytes"), "{e}");
    // The same while tokens are added, which are normalized as the file is read.
    let token = json!({"id": 200, "content": "a".repeat(100_000), "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": true, "special": false});
    let e = with(&json!({ "normalizer": empty, "added_tokens": [token] })).err().unwrap();
    assert!(e.contains("can make a text of 100000 bytes"), "{e}");
}

/// The crate's own rules panic in this case.
#[test]
fn insertion_before_the_text_is_rejected_if_not_last() {
    let token = json!({"id": 200, "content": "a", "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": true, "special": false});
    for pattern in [json!({"String": ""}), json!({"Regex": "x*"}), json!({"Regex": "(?=a)"})] {
        for last in ["NFKC", "NFD", "Lowercase"] {
            let steps = [rule(&pattern, "_"), json!({ "type": last })];
            let normalizer = json!({"type": "Sequence", "normalizers": steps});
            let text = with(&json!({ "normalizer": normalizer })).unwrap();
            let e = text.encode_plain("abc").unwrap_err().to_string();
            assert!(e.contains("replaces nothing by text at the beginning"), "{e}");
            let e = with(&json!({ "normalizer": normalizer, "added_tokens": [token] })).err().unwrap();
            assert!(e.contains("replaces nothing by text at the beginning"), "{e}");
        }
        // As the last rule it gives the crate's result.
        let last = json!({"type": "Sequence", "normalizers": [{"type": "NFKC"}, rule(&pattern, "_")]});
        assert!(with(&json!({ "normalizer": last })).unwrap().encode_plain("abc").unwrap().len() >= 4);
    }
}

#[test]
fn text_rules_match_the_tokenizers_crate() {
    let normalizers = json!({"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "^"},
        rule(&json!({"String": " "}), "_"), rule(&json!({"Regex": "b+"}), "B"), rule(&json!({"String": "."}), "()"),
    ]});
    let decoders = json!({"type": "Sequence", "decoders": [
        rule(&json!({"String": "_"}), " "), {"type": "Strip", "content": "x", "start": 1, "stop": 0},
    ]});
    let text = with(&json!({ "normalizer": normalizers, "decoder": decoders })).unwrap();
    let vocab: std::collections::BTreeMap<_, _> =
        (0..128u8).map(|b| (char::from(b).to_string(), u32::from(b))).collect();
    let whole = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": normalizers,
        "pre_tokenizer": null, "post_processor": null, "decoder": decoders,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    });
    let whole = tokenizers::Tokenizer::from_bytes(whole.to_string()).unwrap();
    for sample in ["a bbb c.", "", "...", "bb b", "x_x"] {
        let ids = text.encode_plain(sample).unwrap();
        assert_eq!(ids, whole.encode(sample, false).unwrap().get_ids(), "{sample}");
        assert_eq!(text.decode(&ids).unwrap(), whole.decode(&ids, true).unwrap(), "{sample}");
    }
    // A token that is shorter than the stripped text: the crate's own decoder panics.
    let strip = json!({"type": "Strip", "content": "x", "start": 0, "stop": 3});
    assert_eq!(with(&json!({ "decoder": strip })).unwrap().decode(&[120, 97, 120]).unwrap(), "a");
}
