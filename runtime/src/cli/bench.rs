//! `bench`: tokens per second and memory.

use super::args::Bench;
use super::{Context, Failure, Io, interrupt, size};
use crate::engine::{Engine, Want};
use crate::error::Result;
use crate::generate::{check_room, rate};
use serde_json::json;
use std::time::{Duration, Instant};

pub(super) fn run(context: &Context<'_, '_>, args: &Bench, io: &mut Io<'_>) -> Result<(), Failure> {
    let model = &context.program.model;
    let max = model.max_context as usize;
    let prompt = args.prompt.unwrap_or_else(|| 512.min(max / 2).max(1));
    let n = args.r#gen.unwrap_or_else(|| 64.min(max.saturating_sub(prompt)).max(1));
    check_room(prompt, n, max)?;
    let mut engine = context.open(&args.common)?;
    let _interrupt = interrupt::guard();
    let ids = prompt_ids(prompt, model.vocab);
    once(&mut engine, &ids, n.min(4))?; // a warm-up: pages come from disk, threads start
    let mut prefill = Vec::new();
    let mut decode = Vec::new();
    for _ in 0..args.repeat {
        let (p, d) = once(&mut engine, &ids, n)?;
        prefill.push(p);
        decode.push(d);
    }
    let (prefill, decode) = (rate(prompt, median(prefill)), rate(n, median(decode)));
    let memory = engine.memory();
    let peak = crate::cpu::peak_memory();
    // What a token cannot avoid: its share of the weights, and the cache of the tokens before it.
    let active = model.active_parameters as f64 / model.parameters.max(1) as f64;
    let cached = (prompt + n / 2) as f64 / (f64::from(model.slots) * f64::from(model.max_context));
    let weights_per_token = (memory.weights as f64 * active.min(1.0)) as u64;
    let kv_per_token = (memory.kv as f64 * cached.min(1.0)) as u64;
    if args.json {
        let report = json!({
            "prompt": prompt,
            "gen": n,
            "repeat": args.repeat,
            "threads": engine.threads(),
            "prefill_tokens_per_s": prefill,
            "decode_tokens_per_s": decode,
            "peak_memory_bytes": peak,
            "arena_bytes": memory.arena,
            "scratch_bytes": memory.scratch,
            "weight_bytes": memory.weights,
            "kv_bytes": memory.kv,
            "bytes_per_decoded_token": weights_per_token + kv_per_token,
        });
        io.say(&format!("{report}\n"))?;
        return Ok(());
    }
    let rate = |r: Option<f64>| r.map_or("–".to_owned(), |r| format!("{r:.1} tokens/s"));
    let bandwidth = decode.map_or(0.0, |d| d * (weights_per_token + kv_per_token) as f64 / 1e9);
    let lines = [
        ("prefill", format!("{} ({prompt} tokens)", rate(prefill))),
        ("decode", format!("{} ({n} tokens)", rate(decode))),
        ("threads", engine.threads().to_string()),
        ("peak memory", peak.map_or("unknown".to_owned(), size)),
        ("weights", size(memory.weights)),
        ("KV cache", format!("{} when full", size(memory.kv))),
        ("arena", format!("{}, and {} of scratch", size(memory.arena), size(memory.scratch))),
        (
            "read per token",
            format!("about {} (decode: {bandwidth:.1} GB/s)", size(weights_per_token + kv_per_token)),
        ),
    ];
    io.say(&lines.map(|(what, value)| format!("{what:15} {value}\n")).concat())?;
    Ok(())
}

/// Ids that are spread over the vocabulary, the same on every machine.
fn prompt_ids(n: usize, vocab: u32) -> Vec<u32> {
    (0..n as u64).map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as u32 % vocab).collect()
}

/// Times of one prefill and of `n` decode calls after it.
fn once(engine: &mut Engine<'_>, ids: &[u32], n: usize) -> Result<(Duration, Duration)> {
    engine.reset(0)?;
    let start = Instant::now();
    engine.prefill(0, 0, ids, Want::Last, &mut |_, _| Ok(()))?;
    let prefill = start.elapsed();
    let start = Instant::now();
    for i in 0..n {
        engine.decode(&[(0, ids.len() + i, ids[i % ids.len()])], &mut |_, _| Ok(()))?;
    }
    Ok((prefill, start.elapsed()))
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}
