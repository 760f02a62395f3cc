//! SentencePiece pieces that are merged by their scores, as in Llama and Mixtral, or in a given order, as in
//! Gemma 4.

use super::{Parts, Tokens, UNKNOWN, bytes};
use crate::containers::gguf::keys::Keys;
use moec_base::error::{Error, Result};
use serde_json::{Value, json};

const SCORES: &str = "tokenizer.ggml.scores";
const PREFIX: &str = "tokenizer.ggml.add_space_prefix";
/// The character that replaces a space.
const SPACE: &str = "▁";
/// Most characters of a piece that is split into halves; by default SentencePiece makes no piece longer than
/// 16.
const LONGEST: usize = 256;

/// Returns the parts of a tokenizer whose pieces are merged by scores.
///
/// # Errors
/// Fails if scores are missing or do not fit.
pub(super) fn by_scores(keys: &Keys<'_>, tokens: &Tokens<'_>) -> Result<Parts> {
    let scores = keys.numbers(SCORES)?.ok_or_else(|| keys.missing(SCORES))?;
    if scores.len() != tokens.texts.len() {
        return Err(Error::input(format!(
            "{} has {} values, but there are {} tokens",
            keys.name(SCORES),
            scores.len(),
            tokens.texts.len()
        ))
        .hint("the file is damaged; download it again"));
    }
    Ok(parts(tokens, &merges(tokens, &scores), keys.flag(PREFIX)?.unwrap_or(true)))
}

/// Returns the parts of a tokenizer whose pieces are merged in a given order. No space is added before texts.
///
/// # Errors
/// Fails if merges are missing or are not pairs.
pub(super) fn in_order(keys: &Keys<'_>, tokens: &Tokens<'_>) -> Result<Parts> {
    Ok(parts(tokens, &bytes::merges(keys)?, false))
}

fn parts(tokens: &Tokens<'_>, merges: &[Value], prefixed: bool) -> Parts {
    let unknown = tokens.types.iter().position(|kind| *kind == UNKNOWN).map(|id| tokens.texts[id]);
    let spaces = json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE});
    let normalizers: Vec<Value> =
        prefixed.then(|| json!({"type": "Prepend", "prepend": SPACE})).into_iter().chain([spaces]).collect();
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    decoders.extend(prefixed.then(|| json!({"type": "Strip", "content": " ", "start": 1, "stop": 0})));
    Parts {
        normalizer: json!({"type": "Sequence", "normalizers": normalizers}),
        pre_tokenizer: Value::Null,
        decoder: json!({"type": "Sequence", "decoders": decoders}),
        model: json!({
            "type": "BPE",
            "dropout": null,
            "unk_token": unknown,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": true,
            "byte_fallback": true,
            "ignore_merges": false,
            "vocab": tokens.vocabulary(),
            "merges": merges,
        }),
        added: tokens.added(),
    }
}

/// Pairs of pieces whose union is a piece, by descending score of the union. Pairs with the same union are in
/// the order of the ids of their halves.
fn merges(tokens: &Tokens<'_>, scores: &[f64]) -> Vec<Value> {
    let ids = tokens.ids();
    let mut found: Vec<(f64, usize, usize)> = Vec::new();
    for (text, score) in tokens.texts.iter().zip(scores) {
        if text.chars().nth(LONGEST).is_some() {
            continue;
        }
        let halves = text.char_indices().skip(1).filter_map(|(at, _)| {
            let (left, right) = text.split_at_checked(at)?;
            Some((*score, *ids.get(left)?, *ids.get(right)?))
        });
        found.extend(halves);
    }
    found.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
    found.into_iter().map(|(_, left, right)| json!([tokens.texts[left], tokens.texts[right]])).collect()
}
