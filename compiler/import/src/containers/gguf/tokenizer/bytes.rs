//! Byte-level BPE, as in GPT-2.

use super::splits;
use super::{Parts, Tokens};
use crate::containers::gguf::keys::Keys;
use moec_base::error::{Error, Result};
use serde_json::{Value, json};

const MERGES: &str = "tokenizer.ggml.merges";
pub(super) const PRE: &str = "tokenizer.ggml.pre";

/// Returns the parts of a byte-level tokenizer.
///
/// # Errors
/// Fails if merges are missing or are not pairs, or if the way to split texts is unknown.
pub(super) fn parts(keys: &Keys<'_>, tokens: &Tokens<'_>) -> Result<Parts> {
    let merges = merges(keys)?;
    let pre = keys
        .text(PRE)?
        .ok_or_else(|| keys.missing(PRE).because("it is required to split text before byte-pair merges"))?;
    let split = splits::find(pre).ok_or_else(|| keys.unsupported(PRE, pre, &splits::names()))?;
    Ok(Parts {
        normalizer: if split.composed { json!({"type": "NFC"}) } else { Value::Null },
        pre_tokenizer: split.json(),
        decoder: json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}),
        model: json!({
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": split.whole_words,
            "vocab": tokens.vocabulary(),
            "merges": merges,
        }),
        added: tokens.added(),
    })
}

/// Pairs that are merged, the first first.
///
/// # Errors
/// Fails if merges are missing or are not pairs.
pub(super) fn merges(keys: &Keys<'_>) -> Result<Vec<Value>> {
    let merges = keys.texts(MERGES)?.ok_or_else(|| keys.missing(MERGES))?;
    let pair = |merge: &&str| {
        // The first half may begin with a space.
        let space = merge.char_indices().skip(1).find(|(_, c)| *c == ' ').map(|(at, _)| at);
        let (left, right) = merge.split_at_checked(space?)?;
        Some(json!([left, right.get(1..)?]))
    };
    let bad = || Error::input(format!("{} has an entry that is not a pair", keys.name(MERGES)));
    merges.iter().map(|merge| pair(merge).ok_or_else(bad)).collect()
}
