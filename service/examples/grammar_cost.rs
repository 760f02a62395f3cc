//! Cost of a grammar for each token: `cargo run -p moec-service --example grammar_cost [tokenizer.json]`.
//!
//! A JSON schema is held against a vocabulary, and the most probable allowed token of random logits is taken, over and over. Without a
//! file, the vocabulary is made up: all bytes, and words of random letters up to the size of Qwen3's.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]

use moec_runtime::{Sampler, Sampling};
use moec_service::grammar::{Grammar, Grammars};
use serde_json::{Map, Value, json};
use std::error::Error;
use std::io::Write as _;
use std::time::{Duration, Instant};

/// Tokens of Qwen3's vocabulary.
const QWEN3: usize = 151_936;
/// Tokens that are drawn.
const TOKENS: usize = 2000;

/// A generator of numbers that are random enough (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// A vocabulary in pieces, its last token the end.
fn made_up(random: &mut Random) -> Value {
    let mut vocab: Map<String, Value> = (0..256u32).map(|b| (format!("<0x{b:02X}>"), b.into())).collect();
    while vocab.len() < QWEN3 - 1 {
        let letters = 1 + random.below(9);
        let space = if random.below(2) == 0 { "▁" } else { "" };
        let word: String = (0..letters).map(|_| char::from(b'a' + random.below(26) as u8)).collect();
        let id = vocab.len();
        vocab.entry(format!("{space}{word}")).or_insert_with(|| id.into());
    }
    let end = json!({"id": QWEN3 - 1, "content": "</s>", "special": true});
    json!({"decoder": {"type": "ByteFallback"}, "model": {"vocab": vocab}, "added_tokens": [end]})
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut random = Random(7);
    let tokenizer = match std::env::args().nth(1) {
        Some(path) => serde_json::from_slice(&std::fs::read(path)?)?,
        None => made_up(&mut random),
    };
    let ids = tokenizer["model"]["vocab"].as_object().into_iter().flatten().filter_map(|(_, id)| id.as_u64());
    let added = tokenizer["added_tokens"].as_array().into_iter().flatten().filter_map(|t| t["id"].as_u64());
    let vocab = 1 + ids.chain(added.clone()).max().unwrap_or(0) as usize;
    let end = added.max().ok_or("the tokenizer has no added token to end with")? as u32;
    let start = Instant::now();
    let grammars = Grammars::new(tokenizer.to_string().as_bytes(), vocab, &[end])?;
    let opened = start.elapsed();
    let schema = json!({"type": "object", "properties": {
        "name": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}},
        "size": {"type": "integer"}, "inside": {"type": "object", "additionalProperties": {"type": "number"}},
    }, "required": ["name", "tags", "size"]});
    let grammar = Grammar::Schema(schema);
    let logits: Vec<Vec<f32>> =
        (0..7).map(|_| (0..vocab).map(|_| random.below(1 << 20) as f32 / 65536.0).collect()).collect();
    let (mut compiled, mut held, mut free) = (Duration::ZERO, Vec::new(), Vec::new());
    let mut sampler: Option<Sampler> = None;
    let mut plain = Sampler::new(Sampling::GREEDY);
    for i in 0..TOKENS {
        let start = Instant::now();
        let constrained = match sampler.take().filter(|s| !s.ended()) {
            Some(constrained) => constrained,
            None => Sampler::new(Sampling::GREEDY).constrained(grammars.constraint(&grammar)?),
        };
        compiled = compiled.max(start.elapsed());
        let start = Instant::now();
        sampler.insert(constrained).sample(&logits[i % 7])?;
        held.push(start.elapsed());
        let start = Instant::now();
        plain.sample(&logits[i % 7])?;
        free.push(start.elapsed());
    }
    let mut out = std::io::stdout();
    writeln!(out, "vocabulary of {vocab}: opened in {opened:.0?}; a grammar in {compiled:.1?} at most")?;
    for (what, mut times) in [("held to a schema", held), ("free", free)] {
        times.sort();
        let [median, late] = [times[TOKENS / 2], times[TOKENS * 99 / 100]];
        writeln!(out, "{what}: {median:.1?} a token (median), {late:.1?} (99 of 100 take less)")?;
    }
    Ok(())
}
