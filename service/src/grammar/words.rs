//! The bytes of every token, from a `tokenizer.json`.

use crate::error::{Error, Result};
use serde_json::Value;
use std::collections::BTreeSet;

/// A token of a vocabulary.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Word {
    /// Its bytes in a text; empty if the tokenizer does not have it.
    pub(crate) bytes: Vec<u8>,
    /// Whether it is special: never part of an answer's text.
    pub(crate) special: bool,
}

/// Effect of a tokenizer's decoder on a token's spelling.
enum Spelling {
    /// Each character stands for a byte (GPT-2).
    Bytes,
    /// Text with `▁` for a space, and `<0x0A>` for a byte that no token has (SentencePiece).
    Pieces,
}

impl Spelling {
    /// The bytes that a token spells, if it does.
    fn bytes(&self, token: &str) -> Option<Vec<u8>> {
        match self {
            Self::Bytes => token.chars().map(byte_of).collect(),
            Self::Pieces => Some(piece(token)),
        }
    }
}

/// The tokens `0..vocab`.
///
/// # Errors
/// An unknown kind of decoder, tokens outside of the vocabulary, invalid spellings.
pub(crate) fn words(tokenizer: &Value, vocab: usize) -> Result<Vec<Word>> {
    let unfit = |why: String| Error::new(format!("the tokenizer cannot be used with a grammar: {why}"));
    let spelling = spelling(&tokenizer["decoder"])
        .ok_or_else(|| unfit("its decoder is neither of bytes nor of pieces".to_owned()))?;
    let mut words = vec![Word::default(); vocab];
    let mut put = |id: &Value, word: Word| -> Result<()> {
        let place = id.as_u64().and_then(|id| words.get_mut(usize::try_from(id).ok()?));
        *place.ok_or_else(|| unfit(format!("token {id} is not in the vocabulary of {vocab}")))? = word;
        Ok(())
    };
    let added = || tokenizer["added_tokens"].as_array().into_iter().flatten();
    // Entries of added tokens take precedence over the vocabulary.
    let apart: BTreeSet<u64> = added().filter_map(|token| token["id"].as_u64()).collect();
    for (token, id) in tokenizer["model"]["vocab"].as_object().into_iter().flatten() {
        if id.as_u64().is_some_and(|id| apart.contains(&id)) {
            continue;
        }
        let bytes = spelling.bytes(token);
        let bytes = bytes.ok_or_else(|| unfit(format!("`{token}` is not a spelling of bytes")))?;
        put(id, Word { bytes, special: false })?;
    }
    for token in added() {
        let content = token["content"].as_str().unwrap_or_default();
        let special = token["special"] == true;
        // Decoders treat them like all others, except those that spell nothing. Special ones are named as
        // they are written.
        let spelled = if special { None } else { spelling.bytes(content) };
        put(&token["id"], Word { bytes: spelled.unwrap_or_else(|| content.into()), special })?;
    }
    Ok(words)
}

fn spelling(decoder: &Value) -> Option<Spelling> {
    match decoder["type"].as_str()? {
        "ByteLevel" => Some(Spelling::Bytes),
        "ByteFallback" | "Metaspace" => Some(Spelling::Pieces),
        "Sequence" => decoder["decoders"].as_array()?.iter().find_map(spelling),
        _ => None,
    }
}

/// The byte that a character of GPT-2's spelling stands for: itself if it is printable, else by order from
/// `Ā` on.
fn byte_of(c: char) -> Option<u8> {
    let printable = |b: u32| matches!(b, 33..=126 | 161..=172 | 174..=255);
    let code = c as u32;
    if printable(code) {
        return u8::try_from(code).ok();
    }
    let nth = usize::try_from(code.checked_sub(256)?).ok()?;
    (0..=255u8).filter(|&b| !printable(u32::from(b))).nth(nth)
}

fn piece(token: &str) -> Vec<u8> {
    let hex = token.strip_prefix("<0x").and_then(|t| t.strip_suffix('>')).filter(|t| t.len() == 2);
    match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
        Some(byte) => vec![byte],
        None => token.replace('▁', " ").into_bytes(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moec_runtime::Text;
    use serde_json::json;

    #[test]
    fn token_spellings_decode_to_bytes() {
        let of = |decoder: &str, token: &str| {
            let tokenizer =
                json!({"decoder": {"type": decoder}, "model": {"vocab": {token: 1}}, "added_tokens": []});
            words(&tokenizer, 2).map(|mut words| words.remove(1).bytes)
        };
        assert_eq!(of("ByteLevel", "ĠaĊÃ©").unwrap(), " a\né".as_bytes());
        assert_eq!(of("ByteFallback", "▁a").unwrap(), b" a");
        assert_eq!(of("ByteFallback", "<0x0A>").unwrap(), b"\n");
        // Text that only looks like a byte stays text.
        assert_eq!(of("ByteFallback", "<0xZZ>").unwrap(), b"<0xZZ>");
        assert!(of("ByteLevel", "日").is_err() && of("WordPiece", "a").is_err());
        let far = json!({"decoder": {"type": "ByteLevel"}, "model": {"vocab": {}}, "added_tokens": [{"id": 4_000_000_000u32, "content": "x"}]});
        assert!(words(&far, 2).unwrap_err().what.contains("not in the vocabulary"));
    }

    #[test]
    fn special_tokens_are_spelled_as_written() {
        // As in tokenizers made from GGUF: added tokens are in the vocabulary, too, where their spelling does
        // not encode bytes.
        let tokenizer = |decoder: &str| {
            json!({
                "added_tokens": [
                    {"id": 1, "content": "<｜begin▁of▁sentence｜>", "special": true},
                    {"id": 2, "content": "日", "special": false},
                ],
                "decoder": {"type": decoder},
                "model": {"vocab": {"a": 0, "<｜begin▁of▁sentence｜>": 1, "日": 2}},
            })
        };
        let word = |text: &str, special| Word { bytes: text.into(), special };
        let all =
            [word("a", false), word("<｜begin▁of▁sentence｜>", true), word("日", false), Word::default()];
        for decoder in ["ByteLevel", "ByteFallback"] {
            assert_eq!(words(&tokenizer(decoder), 4).unwrap(), all, "{decoder}");
        }
    }

    #[test]
    fn added_tokens_are_spelled_as_decoders_write_them() {
        let level =
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
        let replace = json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "});
        let fallback =
            json!({"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]});
        let metaspace =
            json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true});
        for (decoder, content, bytes) in [
            (&fallback, "▁a▁▁b", " a  b".as_bytes()),
            (&fallback, "<0x0A>", b"\n"),
            (&fallback, "Ġé", "Ġé".as_bytes()),
            (&metaspace, "▁a▁▁b", " a  b".as_bytes()),
            (&level, "▁a", "▁a".as_bytes()),
            (&level, "a b", b"a b"),
            (&level, "ĠaĊ", b" a\n"),
            // It spells a byte that is not a character.
            (&level, "é", b"\xe9"),
            (&level, "日é", "日é".as_bytes()),
        ] {
            let added = json!({"id": 1, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": false});
            let tokenizer = json!({
                "version": "1.0", "truncation": null, "padding": null, "added_tokens": [added], "normalizer": null,
                "pre_tokenizer": null, "post_processor": null, "decoder": decoder,
                "model": {"type": "BPE", "vocab": {"x": 0}, "merges": []},
            });
            let word = Word { bytes: bytes.to_vec(), special: false };
            assert_eq!(words(&tokenizer, 2).unwrap()[1], word, "{content}");
            let text = Text::parse(tokenizer.to_string().as_bytes(), None).unwrap();
            let written = format!("x{}", String::from_utf8_lossy(bytes));
            assert_eq!(text.decode(&[0, 1]).unwrap(), written, "{content}");
        }
    }
}
