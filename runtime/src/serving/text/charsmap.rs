//! Check of SentencePiece's table of characters in a tokenizer (`precompiled_charsmap`), before the crate
//! `tokenizers` reads it. The crate allocates by the lengths in the table, and indexes by its contents.
//!
//! The table is base64 of three parts: the length of a trie in bytes (u32), the trie (u32 units, a double
//! array as in *darts-clone*), and zero-terminated replacements in UTF-8. A search begins at unit 0. A byte
//! leads from position `p` to unit `p ^ byte`, whose label must be that byte, and from there to position
//! `p ^ byte ^ offset`. The value of a leaf is the offset of a replacement.

use super::template;
use serde::Deserialize;
use serde_json::Value;
use tokenizers::NormalizerWrapper;

/// Longest replacement; the longest published one has 33 bytes.
const LONGEST: usize = 64;
/// Key of the table in JSON.
const KEY: &str = "precompiled_charsmap";

/// Checks the rules of a `tokenizer.json`, and the tables and templates in them.
///
/// # Errors
/// Invalid JSON; the reason that a table or a template cannot be used.
pub(super) fn check(json: &[u8]) -> Result<(), String> {
    /// Rules of a tokenizer; `tokenizers` panics if one of them is not JSON.
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Rules {
        normalizer: Value,
        #[serde(rename = "pre_tokenizer")]
        _pre_tokenizer: Value,
        post_processor: Value,
        #[serde(rename = "decoder")]
        _decoder: Value,
    }
    let rules: Rules = serde_json::from_slice(json).map_err(|e| e.to_string())?;
    template::check(&rules.post_processor)?;
    let mut left = vec![&rules.normalizer];
    while let Some(value) = left.pop() {
        match value {
            Value::Object(map) => {
                map.get(KEY).map_or(Ok(1), check_value)?;
                left.extend(map.values());
            }
            Value::Array(values) => left.extend(values),
            _ => {}
        }
    }
    Ok(())
}

/// Bytes of the longest replacement of a table.
///
/// # Errors
/// As [`check`].
pub(super) fn longest(precompiled: &NormalizerWrapper) -> Result<usize, String> {
    let json = serde_json::to_value(precompiled).map_err(|e| e.to_string())?;
    check_value(&json[KEY])
}

/// As [`check_table`], for a JSON value.
fn check_value(table: &Value) -> Result<usize, String> {
    check_table(&from_base64(table.as_str().unwrap_or_default()))
}

/// Decodes base64; characters that are not digits are skipped.
fn from_base64(text: &str) -> Vec<u8> {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut count) = (0_u32, 0);
    for digit in text.bytes().filter_map(|c| (0..).zip(DIGITS).find_map(|(i, &d)| (d == c).then_some(i))) {
        let digit: u32 = digit;
        bits = bits << 6 | digit;
        count += 6;
        if count >= 8 {
            count -= 8;
            out.push((bits >> count & 0xff) as u8);
        }
    }
    out
}

/// Checks a table: for any text, every unit and every replacement of a lookup exists. Returns the bytes of
/// the longest replacement.
fn check_table(table: &[u8]) -> Result<usize, String> {
    let damaged = |what: &str| format!("its table of characters is damaged: {what}");
    let (size, rest) = table.split_first_chunk().ok_or_else(|| damaged("it has no length"))?;
    let size = u32::from_le_bytes(*size) as usize;
    let (trie, texts) = rest.split_at_checked(size).ok_or_else(|| damaged("it is shorter than its trie"))?;
    let texts = std::str::from_utf8(texts).map_err(|_| damaged("its replacements are not UTF-8"))?;
    let longest = texts.split('\0').map(str::len).max().unwrap_or(0);
    if longest > LONGEST {
        return Err(format!(
            "its table of characters replaces one by {longest} bytes; {LONGEST} is the maximum"
        ));
    }
    let units: Vec<u32> = trie.as_chunks().0.iter().map(|unit| u32::from_le_bytes(*unit)).collect();
    let unit = |at: usize| units.get(at).copied().ok_or_else(|| damaged("its trie leads out of itself"));
    let mut seen = vec![false; units.len()];
    let mut left = vec![offset(unit(0)?)];
    while let Some(position) = left.pop() {
        match seen.get_mut(position) {
            Some(true) => continue,
            Some(seen) => *seen = true,
            None => return Err(damaged("its trie leads out of itself")),
        }
        for byte in 1..=255_u8 {
            let at = position ^ usize::from(byte);
            let unit_at = unit(at)?;
            if unit_at & LABEL != u32::from(byte) {
                continue;
            }
            let next = at ^ offset(unit_at);
            if unit_at & HAS_LEAF != 0 {
                let value = (unit(next)? & VALUE) as usize;
                if !texts.is_char_boundary(value) {
                    return Err(damaged("its trie names a replacement that is not there"));
                }
            }
            left.push(next);
        }
    }
    Ok(longest.max(1))
}

/// Bits of a unit's label, and the bit that no label has.
const LABEL: u32 = 1 << 31 | 0xff;
/// Bit of a unit at which a word may end.
const HAS_LEAF: u32 = 1 << 8;
/// Bits of a leaf's value.
const VALUE: u32 = (1 << 31) - 1;

/// Distance of a unit's position.
fn offset(unit: u32) -> usize {
    (unit as usize >> 10) << ((unit & 1 << 9) >> 6)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Text;
    use proptest::prelude::*;

    /// A table that replaces `a` by `b`.
    fn table() -> Vec<u8> {
        let mut units = [0_u32; 256];
        units[0x61] = 0xe1 << 10 | HAS_LEAF | 0x61;
        units[0x80] = 1 << 31;
        let trie = units.iter().flat_map(|unit| unit.to_le_bytes());
        1024_u32.to_le_bytes().into_iter().chain(trie).chain(*b"b\0").collect()
    }

    fn to_base64(bytes: &[u8]) -> String {
        let digit = |bits: u32| {
            char::from(
                b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"[bits as usize & 63],
            )
        };
        let mut out = String::new();
        for part in bytes.chunks(3) {
            let byte = |i: usize| u32::from(part.get(i).copied().unwrap_or(0));
            let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
            out.extend((0..=part.len()).map(|i| digit(bits >> (18 - 6 * i))));
            out.extend(std::iter::repeat_n('=', 3 - part.len()));
        }
        out
    }

    fn tokenizer(table: &[u8]) -> Result<Text, String> {
        let normalizer = serde_json::json!({"type": "Precompiled", (KEY): to_base64(table)});
        let model = serde_json::json!({"type": "Unigram", "unk_id": 0, "vocab": [["?", -9.0], ["a", -1.0], ["b", -1.0]]});
        let file = serde_json::json!({"normalizer": {"type": "Sequence", "normalizers": [normalizer]}, "model": model});
        Text::parse(file.to_string().as_bytes(), None)
    }

    #[test]
    fn characters_are_replaced() {
        let text = tokenizer(&table()).unwrap();
        assert_eq!(text.encode("ab").unwrap(), [2, 2]);
    }

    #[test]
    fn rules_that_are_not_json_are_refused() {
        for rule in ["normalizer", "pre_tokenizer", "post_processor", "decoder"] {
            for broken in [r#"{"type": "Fuse", "\ud800": 1}"#, r#"{"type": "Fuse""#] {
                let file = format!(
                    r#"{{"model": {{"type": "BPE", "vocab": {{}}, "merges": []}}, "{rule}": {broken}}}"#
                );
                assert!(Text::parse(file.as_bytes(), None).is_err(), "{file}");
            }
        }
    }

    #[test]
    fn damaged_tables_are_refused() {
        let change = |at: usize, unit: u32| {
            let mut table = table();
            table[4 * at + 4..][..4].copy_from_slice(&unit.to_le_bytes());
            table
        };
        for (table, why) in [
            (vec![0, 4, 0], "no length"),
            (table()[..900].to_vec(), "shorter than its trie"),
            // A length of gigabytes.
            ([vec![0xff; 4], table()[4..].to_vec()].concat(), "shorter than its trie"),
            (change(0, u32::MAX), "leads out of itself"),
            (change(0x61, 0x1000 << 10 | 0x61), "leads out of itself"),
            (change(0x80, 1 << 31 | 3), "a replacement that is not there"),
            ([table(), vec![0xff]].concat(), "not UTF-8"),
            ([table(), vec![b'x'; 65]].concat(), "by 65 bytes"),
        ] {
            let refused = tokenizer(&table).err().unwrap();
            assert!(refused.contains(why), "{refused}");
        }
    }

    proptest! {
        #[test]
        fn accepted_charsmap_encodes_without_panic(at in 0..1030_usize, byte: u8, text in "[a-cé€]{0,8}") {
            let mut table = table();
            table[at] = byte;
            if let Ok(tokenizer) = tokenizer(&table) {
                let _ = tokenizer.encode(&text);
            }
        }
    }
}
