//! Tests of tokenizers that are put together, against SentencePiece, transformers and the purpose of splits.

use super::splits;
use super::*;
use moec_gguf::Header;
use moec_runtime::serving::text::Text;
use std::path::Path;

/// Returns the tokenizer of a file.
fn read(header: &Header<'_>) -> Text {
    let text = json(&Keys::new("sample", header)).unwrap().unwrap();
    Text::parse(&text, None).unwrap()
}

/// Compares a file's tokenizer with the ids that its reference gives texts.
fn compare(file: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../golden/gguf").join(file);
    let bytes = std::fs::read(path).unwrap();
    let header = Header::read(&bytes).unwrap();
    let text = read(&header);
    let list = |key| header.get(key).unwrap().as_array().unwrap().texts().unwrap();
    let mut longest = 0;
    for (sample, ids) in list("sample.texts").zip(list("sample.ids")) {
        let want: Vec<u32> =
            ids.split(',').filter(|id| !id.is_empty()).map(|id| id.parse().unwrap()).collect();
        assert_eq!(text.encode(sample).unwrap(), want, "{sample:?}");
        // The replacement of a space is itself a token.
        assert_eq!(text.decode(&want).unwrap(), sample.replace('▁', " "));
        longest = longest.max(want.len());
    }
    assert!(longest > 15);
    let config = config(&Keys::new("sample", &header)).unwrap();
    assert_eq!(config["add_bos_token"], true);
}

#[test]
fn pieces_are_merged_like_sentencepiece() {
    compare("pieces.gguf");
}

#[test]
fn characters_of_gemma_are_merged_like_transformers() {
    compare("gemma4.gguf");
}

/// Writes a text after its length.
fn entry(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

/// Writes a file of a byte-level tokenizer with only these words, each merged from left to right.
fn file(pre: &str, words: &[&str]) -> Vec<u8> {
    // The characters that GPT-2 uses for bytes.
    let plain = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut next = 256;
    let characters: Vec<char> = (0..=255_u8)
        .map(|b| {
            if plain(b) {
                return char::from(b);
            }
            next += 1;
            char::from_u32(next - 1).unwrap()
        })
        .collect();
    let mut tokens: Vec<String> = characters.iter().map(char::to_string).collect();
    let mut merges = Vec::new();
    for word in words {
        let mut left = String::new();
        for byte in word.bytes() {
            let right = characters[usize::from(byte)];
            if !left.is_empty() {
                merges.push(format!("{left} {right}"));
                tokens.push(format!("{left}{right}"));
            }
            left.push(right);
        }
    }
    let list = |key: &str, texts: &[String]| {
        let mut out = entry(key);
        out.extend([9_u32.to_le_bytes(), 8_u32.to_le_bytes()].concat());
        out.extend((texts.len() as u64).to_le_bytes());
        out.extend(texts.iter().flat_map(|t| entry(t)));
        out
    };
    let text = |key: &str, value: &str| [entry(key), 8_u32.to_le_bytes().to_vec(), entry(value)].concat();
    let keys = [
        text(MODEL, "gpt2"),
        text("tokenizer.ggml.pre", pre),
        list(TOKENS, &tokens),
        list("tokenizer.ggml.merges", &merges),
    ];
    let mut out = b"GGUF\x03\0\0\0".to_vec();
    out.extend([0_u64.to_le_bytes(), (keys.len() as u64).to_le_bytes()].concat());
    out.extend(keys.concat());
    out
}

/// Token counts of words which would be one token each without splits.
#[test]
fn texts_are_split_like_each_tokenizer() {
    const WORDS: [&str; 6] = ["1234", "aB", ".\n", "don't", " x", "(a"];
    let rows: [(&str, [usize; 6]); 15] = [
        ("gpt-2", [1, 1, 2, 3, 1, 2]),
        ("olmo", [1, 1, 2, 3, 1, 2]),
        ("smollm", [4, 1, 2, 3, 1, 2]),
        ("qwen2", [4, 1, 1, 3, 1, 1]),
        ("hunyuan", [4, 1, 1, 3, 1, 1]),
        ("qwen35", [4, 1, 1, 3, 1, 1]),
        ("glm4", [2, 1, 1, 3, 1, 1]),
        ("llama-bpe", [2, 1, 1, 3, 1, 1]),
        ("tekken", [4, 2, 1, 3, 1, 1]),
        ("exaone-moe", [4, 1, 1, 3, 1, 1]),
        ("gpt-4o", [2, 2, 1, 1, 1, 1]),
        ("deepseek-llm", [4, 1, 2, 3, 1, 2]),
        ("deepseek-v3", [2, 1, 1, 3, 1, 1]),
        ("kimi-k2", [2, 2, 1, 1, 1, 1]),
        ("afmoe", [4, 1, 1, 3, 1, 1]),
    ];
    for (pre, want) in rows {
        let bytes = file(pre, &WORDS);
        let text = read(&Header::read(&bytes).unwrap());
        let counts = WORDS.map(|word| text.encode(word).unwrap().len());
        assert_eq!(counts, want, "{pre}");
    }
}

/// Parts of a text, each of which is a token if texts are split there.
fn check_parts(pre: &str, parts: &[&str]) {
    let bytes = file(pre, parts);
    let text = read(&Header::read(&bytes).unwrap());
    let whole = parts.concat();
    let ids = text.encode(&whole).unwrap();
    let got: Vec<String> = ids.iter().map(|id| text.decode(&[*id]).unwrap()).collect();
    assert_eq!(got, parts, "{pre}: {whole:?}");
}

/// Kimi's own rule: Chinese characters apart from other letters, and a word ends before an upper-case letter.
#[test]
fn chinese_characters_are_words_of_their_own_for_kimi() {
    check_parts(
        "kimi-k2",
        &["get", "User", "Name", " don't", " ", "世界", "Hello", " ", "123", "45", "!\n", " a"],
    );
}

/// Trinity's digits are in groups of three from the last one on. A number of digits that has no end in sight
/// takes no longer than others.
#[test]
fn digits_are_grouped_from_the_right_for_trinity() {
    check_parts(
        "afmoe",
        &["The", " ", "1", "234", "567", " (", "abc", ")", "12", " .", "foo", "\n\n", "世界"],
    );
    check_parts("afmoe", &["123", "456", "x", "12", " ", "1", "234"]);
    let bytes = file("afmoe", &["777"]);
    let text = read(&Header::read(&bytes).unwrap());
    let started = std::time::Instant::now();
    assert_eq!(text.encode(&"7".repeat(300_000)).unwrap().len(), 100_000);
    assert!(started.elapsed().as_secs() < 20, "{:?}", started.elapsed());
}

/// Without a key in the file, llama.cpp adds the first token before texts for some rules.
#[test]
fn default_bos_follows_the_pre_tokenizer() {
    for (pre, begins) in [("llama-bpe", true), ("tekken", true), ("qwen2", false), ("gpt-4o", false)] {
        let bytes = file(pre, &[]);
        let config = config(&Keys::new("sample", &Header::read(&bytes).unwrap())).unwrap();
        assert_eq!(config["add_bos_token"], begins, "{pre}");
    }
}

#[test]
fn every_split_keeps_every_character() {
    let sample = "Grüße, 世界! 🦀 fn main() { 12345 }\r\n\t  don't  \u{3000}。（x）aB9 e\u{301}";
    for pre in splits::names() {
        let bytes = file(pre, &["Gr", "12"]);
        let text = read(&Header::read(&bytes).unwrap());
        let back = text.decode(&text.encode(sample).unwrap()).unwrap();
        let composed = splits::find(pre).unwrap().composed;
        assert_eq!(back, if composed { sample.replace("e\u{301}", "é") } else { sample.to_owned() }, "{pre}");
    }
}

#[test]
fn unknown_pre_tokenizer_is_refused() {
    let bytes = file("whatever", &[]);
    let header = Header::read(&bytes).unwrap();
    let error = json(&Keys::new("sample", &header)).unwrap_err();
    assert!(error.message.contains("tokenizer.ggml.pre") && error.message.contains("whatever"), "{error}");
    assert!(splits::names().iter().all(|name| error.hint.as_ref().unwrap().contains(name)));
}

#[test]
fn gguf_chat_template_includes_special_token_texts() {
    let text = |key: &str, value: &str| [entry(key), 8_u32.to_le_bytes().to_vec(), entry(value)].concat();
    let id =
        |key: &str, id: u32| [entry(key), 4_u32.to_le_bytes().to_vec(), id.to_le_bytes().to_vec()].concat();
    let mut tokens = entry(TOKENS);
    tokens.extend([9_u32.to_le_bytes(), 8_u32.to_le_bytes()].concat());
    tokens.extend(2_u64.to_le_bytes());
    tokens.extend([entry("<s>"), entry("</s>")].concat());
    let keys = [
        text(TEMPLATE, "{{ eos_token }}"),
        tokens,
        id("tokenizer.ggml.bos_token_id", 0),
        id("tokenizer.ggml.eos_token_id", 1),
        // A token that does not exist has no text.
        id("tokenizer.ggml.padding_token_id", 9),
    ];
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    bytes.extend([0_u64.to_le_bytes(), (keys.len() as u64).to_le_bytes()].concat());
    bytes.extend(keys.concat());
    let header = Header::read(&bytes).unwrap();
    let found = config(&Keys::new("sample", &header)).unwrap();
    let expected = json!({
        "add_bos_token": false,
        "chat_template": "{{ eos_token }}",
        "bos_token": "<s>",
        "eos_token": "</s>",
    });
    assert_eq!(Value::Object(found), expected);
}
