//! Time to choose a token of a large vocabulary, by options: `cargo run --release -p moec-runtime --example sampler_cost`.
#![allow(clippy::print_stdout, reason = "a program for people")]

use moec_runtime::{Sampler, Sampling};
use std::time::Instant;

/// Tokens, as of Qwen3.
const VOCAB: u32 = 151_936;
const REPEATS: usize = 200;

/// Logits like those of a model: few large ones, many that are small (sums of uniform numbers of xorshift).
fn logits() -> Vec<f32> {
    let mut x = 0x9e37_79b9_u32;
    let mut unit = || {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        f32::from(u16::try_from(x >> 16).unwrap_or(0)) / 65536.0
    };
    (0..VOCAB).map(|_| 3.0 * ((0..6).map(|_| unit()).sum::<f32>() - 3.0)).collect()
}

fn main() {
    let logits = logits();
    let hot = Sampling { temperature: 0.7, ..Sampling::GREEDY };
    println!("| options | ms a token, median of {REPEATS} |\n| --- | --- |");
    for (name, sampling) in [
        ("temperature 0", Sampling::GREEDY),
        ("temperature 0.7", hot.clone()),
        ("temperature 0.7, top-k 40", Sampling { top_k: 40, ..hot.clone() }),
        ("temperature 0.7, top-p 0.95", Sampling { top_p: 0.95, ..hot.clone() }),
        ("temperature 0.7, min-p 0.05", Sampling { min_p: 0.05, ..hot.clone() }),
        (
            "temperature 0.7, top-k 20, top-p 0.8, repetition 1.05",
            Sampling { top_k: 20, top_p: 0.8, repetition_penalty: 1.05, ..hot },
        ),
    ] {
        let mut sampler = Sampler::new(sampling);
        let mut times: Vec<f64> = (0..REPEATS)
            .map(|_| {
                let start = Instant::now();
                std::hint::black_box(sampler.sample(&logits)).ok();
                start.elapsed().as_secs_f64() * 1e3
            })
            .collect();
        times.sort_by(f64::total_cmp);
        println!("| {name} | {:.3} |", times[REPEATS / 2]);
    }
}
