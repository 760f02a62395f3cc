//! KV caches in 8, 5 and 4 bits: how far results are from those of an exact cache, for every kind of attention,
//! and that slots, positions and chunks do not matter.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::support;

use moec_bundle::read::Bundle;
use moec_runtime::{Engine, LogitRows};
use std::fs;
use std::path::Path;
use support::{Setup, built, checkpoint, distance, fails, json_of, moec, with_engine};

/// Grouped heads, latent attention, a sliding window with sinks.
const FAMILIES: [&str; 3] = ["olmoe", "deepseek_v2", "gpt_oss"];
/// Formats of codes with the largest mean divergence of probabilities from the reference, in nats.
const FORMATS: [(&str, f64); 3] = [("q8", 2e-3), ("q5", 5e-2), ("q4", 2e-1)];

fn bundle(family: &str, cache: &str, folder: &Path) -> Bundle {
    let setup = Setup { format: "f32", chunk: 20, batch: &[1, 3], context: 128 };
    let toml = setup.write(&checkpoint(family), folder);
    let text = fs::read_to_string(&toml).unwrap();
    fs::write(&toml, format!("{text}[memory]\nkv_cache = \"{cache}\"\n")).unwrap();
    built(&toml, &["--target", "native"], &folder.join("b"));
    Bundle::open(&folder.join("b")).unwrap()
}

/// Logits of the tokens from `from` on, read in prompts of `chunk` tokens.
fn read(engine: &mut Engine<'_>, slot: u32, ids: &[u32], from: usize, chunk: usize) -> Vec<f32> {
    let mut all = Vec::new();
    for (i, ids) in ids[from..].chunks(chunk).enumerate() {
        let keep = &mut |_: usize, logits: &[f32]| {
            all.extend_from_slice(logits);
            Ok(())
        };
        engine.prefill(slot, from + i * chunk, ids, LogitRows::All, keep).unwrap();
    }
    all
}

/// Mean Kullback-Leibler divergence of rows of logits.
fn divergence(exact: &[f32], other: &[f32], vocab: usize) -> f64 {
    let log_probabilities = |row: &[f32]| -> Vec<f64> {
        let max = row.iter().copied().fold(f32::MIN, f32::max);
        let total: f64 = row.iter().map(|z| f64::from(z - max).exp()).sum();
        row.iter().map(|z| f64::from(z - max) - total.ln()).collect()
    };
    let rows = exact.chunks_exact(vocab).zip(other.chunks_exact(vocab));
    let of = |(p, q): (&[f32], &[f32])| -> f64 {
        log_probabilities(p).iter().zip(log_probabilities(q)).map(|(p, q)| p.exp() * (p - q)).sum()
    };
    rows.map(of).sum::<f64>() / (exact.len() / vocab) as f64
}

#[test]
fn caches_of_few_bits_are_near_the_exact_one() {
    for family in FAMILIES {
        let ids: Vec<u32> = (0..60).map(|i| (i * 37 + i / 7) % 300).collect();
        let ids = &ids[..];
        let folder = tempfile::tempdir().unwrap();
        let whole = |engine: &mut Engine<'_>| read(engine, 0, ids, 0, 48);
        let of = |cache: &str| {
            let folder = folder.path().join(cache);
            fs::create_dir(&folder).unwrap();
            bundle(family, cache, &folder)
        };
        let exact = with_engine(&of("f32"), whole);
        let vocab = exact.len() / ids.len();
        let mut before = 0.0;
        for (cache, bound) in FORMATS {
            let bundle = of(cache);
            let rotated =
                bundle.plan.states.iter().filter(|s| !s.kind.needs_snapshots()).all(|s| s.rotated > 1);
            assert!(rotated, "{family} in {cache}");
            with_engine(&bundle, |engine| {
                let all = whole(engine);
                let off = divergence(&exact, &all, vocab);
                assert!(off > before && off < bound, "{family} in {cache}: {off} nats, less bits {before}");
                before = off;
                // Other chunks and other slots sum in another order, at most.
                for (slot, chunk) in [(0, 7), (2, 16), (1, 48)] {
                    let again = read(engine, slot, ids, 0, chunk);
                    let same = divergence(&all, &again, vocab);
                    assert!(same < bound / 100.0, "{family} in {cache}: {same} nats in chunks of {chunk}");
                }
                // What slot 2 holds is written again from the middle on, while slot 0 stays as it is.
                let other: Vec<u32> = ids.iter().rev().copied().collect();
                read(engine, 2, &other[..40], 0, 20);
                let vocab_from = |from: usize| &all[from * vocab..];
                read(engine, 1, ids, 0, 20);
                let middle = read(engine, 1, ids, 20, 20);
                assert!(distance(&middle, &read(engine, 1, ids, 20, 20)) == 0.0, "{family} in {cache}");
                let same = divergence(vocab_from(20), &middle, vocab);
                assert!(same < bound / 100.0, "{family} in {cache}: {same} nats from the middle on");
                // Token by token, in two slots at once.
                engine.reset(0).unwrap();
                engine.reset(1).unwrap();
                let mut decoded = [Vec::new(), Vec::new()];
                for (pos, &id) in ids.iter().enumerate() {
                    let rows = [(0, pos, id), (1, pos, other[pos])];
                    let keep = &mut |row: usize, logits: &[f32]| {
                        decoded[row].extend_from_slice(logits);
                        Ok(())
                    };
                    engine.decode(&rows, keep).unwrap();
                }
                let same = divergence(&all, &decoded[0], vocab);
                assert!(same < bound / 100.0, "{family} in {cache}: {same} nats token by token");
                assert!(divergence(&all, &decoded[1], vocab) > bound, "another sequence");
            });
            let folder = folder.path().join(cache).join("b");
            let info = json_of(moec().arg("run").arg(&folder).args(["info", "--json"]));
            assert_eq!(info["memory"]["kv_format"], cache);
            let explained = json_of(moec().arg("explain").arg(&folder).arg("--json"));
            assert_eq!(explained["kv_cache"]["format"], cache);
            assert!(explained["kv_cache"]["rotated"].as_u64().unwrap() > 1, "{family} in {cache}");
        }
    }
}

/// The reference and every kernel of a bundle agree on rotated codes.
#[test]
fn steps_on_caches_of_few_bits_match_the_reference() {
    let folder = tempfile::tempdir().unwrap();
    bundle("deepseek_v2", "q4", folder.path());
    let source = checkpoint("deepseek_v2");
    support::ok(moec().arg("verify").arg(folder.path().join("b")).arg("--source").arg(source));
}

/// GPU kernels read no codes: the build says which operator cannot run there.
#[test]
fn caches_of_few_bits_are_refused_by_a_gpu() {
    let folder = tempfile::tempdir().unwrap();
    let setup = Setup { format: "f32", chunk: 20, batch: &[1], context: 96 };
    let toml = setup.write(&checkpoint("olmoe"), folder.path());
    let text = fs::read_to_string(&toml).unwrap();
    for cache in ["q5", "q4"] {
        let more = format!("[memory]\nkv_cache = \"{cache}\"\n[placement]\nattention = \"gpu\"\n");
        fs::write(&toml, format!("{text}{more}")).unwrap();
        let mut build = moec();
        build.arg("build").arg(&toml).arg("--target").arg(support::root().join("targets/cuda/cuda.toml"));
        build.args(["--quiet", "--no-run", "-o"]).arg(folder.path().join("b"));
        let error = fails(&mut build).1;
        assert!(error.contains("`gpu` cannot run `cache_write`"), "{error}");
    }
}
