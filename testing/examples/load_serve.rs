//! Clients that query a server with OpenAI's interface, and the times of the answers: `cargo xtask
//! bench-serve` runs it against `run serve` and llama.cpp's server.
//!
//! Each client requests one answer after the other, as a stream, with a prompt of its own in token ids. One
//! JSON object has the results: tokens, seconds of the whole, and for each answer the time to its first token
//! and between tokens, in seconds.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program for people")]

use moec_testing::http::post;
use serde_json::{Value, json};
use std::process::ExitCode;
use std::time::Instant;

/// Load of the clients.
#[derive(Clone, Copy)]
struct Load {
    clients: u64,
    /// Number of answers for each client.
    answers: u64,
    /// Tokens of a prompt.
    prompt: u64,
    /// Tokens of an answer.
    tokens: u64,
    vocab: u64,
    /// No two runs with different ones have the same prompts.
    seed: u64,
    sampling: SamplingMode,
}

/// Sampling options.
#[derive(Clone, Copy)]
enum SamplingMode {
    /// The most probable one.
    Greedy,
    /// At temperature 0.7.
    Sampled,
    /// At temperature 0.7, as a list of texts that is longer than the answer.
    Schema,
}

impl SamplingMode {
    fn read(word: &str) -> Option<Self> {
        match word {
            "greedy" => Some(Self::Greedy),
            "sampled" => Some(Self::Sampled),
            "schema" => Some(Self::Schema),
            _ => None,
        }
    }

    /// Sets the fields of a request.
    fn set(self, body: &mut Value) {
        body["temperature"] = if matches!(self, Self::Greedy) { json!(0) } else { json!(0.7) };
        if matches!(self, Self::Schema) {
            let schema =
                json!({"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 1000});
            body["response_format"] =
                json!({"type": "json_schema", "json_schema": {"name": "list", "schema": schema}});
        }
    }
}

/// Times of one answer.
struct Times {
    tokens: u64,
    first: f64,
    next: Vec<f64>,
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let numbers: Vec<u64> = words.iter().skip(1).filter_map(|word| word.parse().ok()).collect();
    let sampling = words.last().and_then(|word| SamplingMode::read(word));
    let ([address, ..], &[clients, answers, prompt, tokens, vocab, seed], Some(sampling)) =
        (&*words, &*numbers, sampling)
    else {
        eprintln!(
            "usage: load_serve ADDRESS CLIENTS ANSWERS PROMPT TOKENS VOCABULARY SEED greedy|sampled|schema"
        );
        return ExitCode::from(2);
    };
    match all(address, Load { clients, answers, prompt, tokens, vocab, seed, sampling }) {
        Ok(summary) => {
            println!("{summary}");
            ExitCode::SUCCESS
        }
        Err(why) => {
            eprintln!("error: {why}");
            ExitCode::FAILURE
        }
    }
}

/// Makes all clients send requests.
fn all(address: &str, load: Load) -> Result<Value, String> {
    let start = Instant::now();
    let client =
        |client: u64| (0..load.answers).map(|i| one(address, load, client * load.answers + i)).collect();
    let all: Vec<Result<Vec<Times>, String>> = std::thread::scope(|scope| {
        let client = &client;
        let threads: Vec<_> = (0..load.clients).map(|i| scope.spawn(move || client(i))).collect();
        threads
            .into_iter()
            .map(|t| t.join().unwrap_or_else(|_| Err("a client panicked".to_owned())))
            .collect()
    });
    let seconds = start.elapsed().as_secs_f64();
    let all: Vec<Times> = all.into_iter().collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect();
    Ok(json!({
        "tokens": all.iter().map(|t| t.tokens).sum::<u64>(),
        "seconds": seconds,
        "first": all.iter().map(|t| t.first).collect::<Vec<_>>(),
        "next": all.iter().flat_map(|t| t.next.iter().copied()).collect::<Vec<_>>(),
    }))
}

/// Requests one answer.
fn one(address: &str, load: Load, nth: u64) -> Result<Times, String> {
    let failed = |e: std::io::Error| e.to_string();
    let mut body = json!({
        "prompt": prompt(load, nth),
        "max_tokens": load.tokens,
        "ignore_eos": true,
        "stream": true,
        "stream_options": {"include_usage": true},
        // llama.cpp's: no prompt is requested twice.
        "cache_prompt": false,
    });
    load.sampling.set(&mut body);
    let start = Instant::now();
    let mut incoming = post(address, "/v1/completions", &body).send().map_err(failed)?;
    if incoming.status != 200 {
        return Err(format!("{:?}", incoming.whole()));
    }
    let (mut times, mut last) = (Times { tokens: 0, first: 0.0, next: Vec::new() }, start);
    let mut first = true;
    while let Some(event) = incoming.event().map_err(failed)? {
        let now = Instant::now();
        let event: Value = serde_json::from_str(&event).map_err(|e| format!("{e}: {event}"))?;
        if let Some(n) = event["usage"]["completion_tokens"].as_u64() {
            times.tokens = n;
        }
        if event["choices"][0]["text"].as_str().is_some_and(|text| !text.is_empty()) {
            let took = (now - last).as_secs_f64();
            last = now;
            if std::mem::take(&mut first) {
                times.first = took;
            } else {
                times.next.push(took);
            }
        }
    }
    if times.tokens == load.tokens { Ok(times) } else { Err(format!("{} tokens came", times.tokens)) }
}

/// The ids of a prompt, unlike any other's (SplitMix64).
fn prompt(load: Load, nth: u64) -> Vec<u64> {
    let mut x = load.seed.wrapping_mul(1 << 20).wrapping_add(nth).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let ids = std::iter::repeat_with(|| {
        x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = x;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % load.vocab
    });
    ids.take(load.prompt as usize).collect()
}
