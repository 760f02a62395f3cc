//! A grammar of a request, a JSON schema, a regular expression or Lark: it is compiled or refused within its limits, and what is sampled
//! under a schema is JSON. Like the server, it leaves that to a process: this program, started again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moec_runtime::{Sampler, Sampling};
use moec_service::grammar::Grammar;
use moec_service::grammar::remote::Workers;
use moec_service::worker;
use serde_json::{Map, Value, json};
use std::sync::LazyLock;

/// Logits, of which the last is the end token's.
const VOCAB: usize = 129;
/// Bytes of an answer at most.
const LONGEST: usize = 200;

/// The process, which is started again where a grammar has ended it.
static WORKERS: LazyLock<Workers> =
    LazyLock::new(|| Workers::new(tokenizer().into_bytes().into(), VOCAB, vec![128]).unwrap());

/// A tokenizer whose tokens are the bytes of ASCII.
fn tokenizer() -> String {
    let spelled = |b: u32| {
        char::from_u32(b).filter(char::is_ascii_graphic).map_or(format!("<0x{b:02X}>"), String::from)
    };
    let vocab: Map<String, Value> = (0..128u32).map(|b| (spelled(b), b.into())).collect();
    let end = json!({"id": 128, "content": "</s>", "special": true});
    json!({"added_tokens": [end], "decoder": {"type": "ByteFallback"}, "model": {"vocab": vocab}}).to_string()
}

/// The first byte says what the others are, and how tokens are drawn.
fn grammar(kind: u8, text: &str) -> Option<Grammar> {
    match kind % 4 {
        0 => Some(Grammar::Lark(text.to_owned())),
        1 => Some(Grammar::Regex(text.to_owned())),
        _ => serde_json::from_str(text).ok().map(Grammar::Schema),
    }
}

fuzz_target!(
    init: {
        if worker::is_started() {
            let done = worker::run();
            std::process::exit(i32::from(done.is_err()));
        }
    },
    |data: &[u8]| {
        let Some((&kind, text)) = data.split_first() else { return };
        let Some(grammar) = std::str::from_utf8(text).ok().and_then(|text| grammar(kind, text)) else { return };
        let Ok(mut made) = WORKERS.constraints(&grammar, 1) else { return };
        let sampling = Sampling { temperature: 1.0, seed: kind.into(), ..Sampling::GREEDY };
        let mut sampler = Sampler::new(sampling).constrained(made.remove(0));
        let mut generated = String::new();
        while !sampler.ended() && generated.len() < LONGEST {
            match sampler.sample(&[0.0; VOCAB]) {
                Ok(id @ 0..128) => generated.push(char::from(id as u8)),
                Ok(_) => break,
                Err(_) => return,
            }
        }
        if generated.len() < LONGEST && matches!(grammar, Grammar::Schema(_)) {
            // JSON has numbers that are larger than any of a machine.
            let json = serde_json::from_str::<Value>(&generated).or_else(|e| {
                if e.to_string().contains("out of range") { Ok(Value::Null) } else { Err(e) }
            });
            assert!(json.is_ok(), "{generated:?} is not valid JSON, of {grammar:?}");
        }
    }
);
