//! The bytes of every token, from a `tokenizer.json`.

use crate::error::{Error, Result};
use serde_json::Value;
use std::collections::BTreeSet;

/// A token of a vocabulary.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Word {
    /// What it stands for in a text; none if the tokenizer does not have it.
    pub(crate) bytes: Vec<u8>,
    /// Whether it is special: never part of an answer's text.
    pub(crate) special: bool,
}

/// What the decoder of a tokenizer makes of a token's spelling.
enum Spelling {
    /// Each character stands for a byte (GPT-2).
    Bytes,
    /// Text with `▁` for a space, and `<0x0A>` for a byte that no token has (SentencePiece).
    Pieces,
}

/// The tokens `0..vocab`.
///
/// # Errors
/// A decoder that is of neither kind, tokens outside of the vocabulary, spellings that cannot be.
pub(crate) fn words(tokenizer: &Value, vocab: usize) -> Result<Vec<Word>> {
    let unfit = |why: String| Error::new(format!("the tokenizer cannot be held to a grammar: {why}"));
    let spelling = spelling(&tokenizer["decoder"])
        .ok_or_else(|| unfit("its decoder is neither of bytes nor of pieces".to_owned()))?;
    let mut words = vec![Word::default(); vocab];
    let mut put = |id: &Value, word: Word| -> Result<()> {
        let place = id.as_u64().and_then(|id| words.get_mut(usize::try_from(id).ok()?));
        *place.ok_or_else(|| unfit(format!("token {id} is not in the vocabulary of {vocab}")))? = word;
        Ok(())
    };
    let added = || tokenizer["added_tokens"].as_array().into_iter().flatten();
    // They stand for what they are written as, wherever else they stand.
    let written: BTreeSet<u64> = added().filter_map(|token| token["id"].as_u64()).collect();
    for (token, id) in tokenizer["model"]["vocab"].as_object().into_iter().flatten() {
        if id.as_u64().is_some_and(|id| written.contains(&id)) {
            continue;
        }
        let bytes = match spelling {
            Spelling::Bytes => token.chars().map(byte_of).collect::<Option<Vec<u8>>>(),
            Spelling::Pieces => Some(piece(token)),
        };
        let bytes = bytes.ok_or_else(|| unfit(format!("`{token}` is no spelling of bytes")))?;
        put(id, Word { bytes, special: false })?;
    }
    for token in added() {
        let bytes = token["content"].as_str().unwrap_or_default().into();
        put(&token["id"], Word { bytes, special: token["special"] == true })?;
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

/// The byte that a character of GPT-2's spelling stands for: itself where it can be printed, else by order from `Ā` on.
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
    use serde_json::json;

    #[test]
    fn spellings_are_bytes() {
        let of = |decoder: &str, token: &str| {
            let tokenizer =
                json!({"decoder": {"type": decoder}, "model": {"vocab": {token: 1}}, "added_tokens": []});
            words(&tokenizer, 2).map(|mut words| words.remove(1).bytes)
        };
        assert_eq!(of("ByteLevel", "ĠaĊÃ©").unwrap(), " a\né".as_bytes());
        assert_eq!(of("ByteFallback", "▁a").unwrap(), b" a");
        assert_eq!(of("ByteFallback", "<0x0A>").unwrap(), b"\n");
        // What only looks like a byte is text.
        assert_eq!(of("ByteFallback", "<0xZZ>").unwrap(), b"<0xZZ>");
        assert!(of("ByteLevel", "日").is_err() && of("WordPiece", "a").is_err());
        let far = json!({"decoder": {"type": "ByteLevel"}, "model": {"vocab": {}}, "added_tokens": [{"id": 4_000_000_000u32, "content": "x"}]});
        assert!(words(&far, 2).unwrap_err().what.contains("not in the vocabulary"));
    }

    #[test]
    fn added_tokens_are_what_they_are_written_as() {
        // As tokenizers made from GGUF have them: in the vocabulary, too, where they are no spelling of bytes.
        let tokenizer = json!({
            "added_tokens": [
                {"id": 1, "content": "<｜begin▁of▁sentence｜>", "special": true},
                {"id": 2, "content": "é", "special": false},
            ],
            "decoder": {"type": "ByteLevel"},
            "model": {"vocab": {"a": 0, "<｜begin▁of▁sentence｜>": 1, "é": 2}},
        });
        let word = |text: &str, special| Word { bytes: text.into(), special };
        let all =
            [word("a", false), word("<｜begin▁of▁sentence｜>", true), word("é", false), Word::default()];
        assert_eq!(words(&tokenizer, 4).unwrap(), all);
    }
}
