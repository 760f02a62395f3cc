//! Conversion of the metadata to a `tokenizer.json`.
#![expect(clippy::cast_possible_truncation, reason = "a type that is not a small number is an unknown one")]

mod bytes;
mod pieces;
mod splits;
#[cfg(test)]
mod tests;

use super::keys::Keys;
use moec_base::error::{Error, Result};
use serde_json::{Map, Value, json};
use std::collections::HashMap;

const MODEL: &str = "tokenizer.ggml.model";
/// Gemma 4's value of it. As in llama.cpp, the first token is added before texts whatever the file says.
const GEMMA4: &str = "gemma4";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const BOS: &str = "tokenizer.ggml.add_bos_token";
const TEMPLATE: &str = "tokenizer.chat_template";
/// Special tokens by their names in `tokenizer_config.json`, and the keys of their ids.
const SPECIAL: [(&str, &str); 4] = [
    ("bos_token", "tokenizer.ggml.bos_token_id"),
    ("eos_token", "tokenizer.ggml.eos_token_id"),
    ("unk_token", "tokenizer.ggml.unknown_token_id"),
    ("pad_token", "tokenizer.ggml.padding_token_id"),
];
/// Types of tokens that are matched as they are in a text.
const UNKNOWN: u64 = 2;
const CONTROL: u64 = 3;
const DEFINED: u64 = 4;

/// Tokens that are added before texts, by the keys of `tokenizer_config.json`.
///
/// # Errors
/// Fails if values are invalid.
pub(super) fn config(keys: &Keys<'_>) -> Result<Map<String, Value>> {
    let mut map = Map::new();
    // If the file does not say, llama.cpp adds the first token before pieces, and for some byte-level ways to
    // split.
    let of_split = keys.text(bytes::PRE)?.and_then(splits::find).is_some_and(|split| split.begins);
    let model = keys.text(MODEL)?;
    let begins = model == Some(GEMMA4) || keys.flag(BOS)?.unwrap_or(model == Some("llama") || of_split);
    map.insert("add_bos_token".to_owned(), begins.into());
    if let Some(template) = keys.text(TEMPLATE)? {
        map.insert("chat_template".to_owned(), template.into());
        // Templates name special tokens by their texts.
        let texts = keys.texts(TOKENS)?.unwrap_or_default();
        for (key, id) in SPECIAL {
            let id = keys.count(id)?.and_then(|id| usize::try_from(id).ok());
            if let Some(text) = id.and_then(|id| texts.get(id)) {
                map.insert(key.to_owned(), (*text).into());
            }
        }
    }
    Ok(map)
}

/// The tokenizer, if the file has one.
///
/// # Errors
/// Fails if lists do not fit each other, or if the kind of tokenizer is not supported.
pub(super) fn json(keys: &Keys<'_>) -> Result<Option<Vec<u8>>> {
    let parts = match keys.text(MODEL)? {
        None | Some("none") => return Ok(None),
        Some("gpt2") => bytes::parts(keys, &Tokens::read(keys)?)?,
        Some("llama") => pieces::by_scores(keys, &Tokens::read(keys)?)?,
        Some(GEMMA4) => pieces::in_order(keys, &Tokens::read(keys)?)?,
        Some(other) => return Err(keys.unsupported(MODEL, other, &["gpt2", "llama", GEMMA4])),
    };
    let Parts { normalizer, pre_tokenizer, decoder, model, added } = parts;
    let whole = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": null,
        "decoder": decoder,
        "model": model,
    });
    Ok(Some(whole.to_string().into_bytes()))
}

/// Parts that differ between kinds of tokenizers.
struct Parts {
    normalizer: Value,
    pre_tokenizer: Value,
    decoder: Value,
    model: Value,
    added: Vec<Value>,
}

/// The tokens of a file.
struct Tokens<'a> {
    texts: Vec<&'a str>,
    types: Vec<u64>,
}

impl<'a> Tokens<'a> {
    fn read(keys: &Keys<'a>) -> Result<Self> {
        let texts = keys.texts(TOKENS)?.ok_or_else(|| keys.missing(TOKENS))?;
        let types = match keys.numbers(TYPES)? {
            Some(types) => types.into_iter().map(|t| t as u64).collect(),
            None => vec![1; texts.len()],
        };
        if types.len() != texts.len() {
            return Err(Error::input(format!(
                "{} has {} values, but there are {} tokens",
                keys.name(TYPES),
                types.len(),
                texts.len()
            ))
            .hint("the file is damaged; download it again"));
        }
        Ok(Self { texts, types })
    }

    /// Ids by their texts. If several tokens have the same text, the first one is used.
    fn ids(&self) -> HashMap<&'a str, usize> {
        let mut ids = HashMap::with_capacity(self.texts.len());
        for (id, text) in self.texts.iter().enumerate() {
            ids.entry(*text).or_insert(id);
        }
        ids
    }

    /// The same as JSON, in the order of ids.
    fn vocabulary(&self) -> Map<String, Value> {
        let ids = self.ids();
        let first = |(id, text): &(usize, &&str)| ids.get(**text) == Some(id);
        self.texts
            .iter()
            .enumerate()
            .filter(first)
            .map(|(id, text)| ((*text).to_owned(), id.into()))
            .collect()
    }

    /// Tokens that are matched in a text before anything else. Control tokens are left out of decoded texts.
    fn added(&self) -> Vec<Value> {
        let with_types = self.texts.iter().zip(&self.types).enumerate();
        let special = with_types
            .filter(|(_, (text, kind))| matches!(**kind, UNKNOWN | CONTROL | DEFINED) && !text.is_empty());
        let added = special.map(|(id, (text, kind))| {
            json!({
                "id": id,
                "content": text,
                "single_word": false,
                "lstrip": false,
                "rstrip": false,
                "normalized": false,
                "special": *kind != DEFINED,
            })
        });
        added.collect()
    }
}
