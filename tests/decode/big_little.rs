//! The little model, and decoding that falls back to the full one.

use super::{BIG_LITTLE, caches, compiled, full, little, read};
use crate::support::{checkpoint, configured, distance, expected, ferris, mixtures, with_engine};
use moec_base::progress::Progress;
use moec_measure::verify::verify;
use moec_runtime::{Decoder, Engine, Fallbacks, LogitRows, Sampler, Sampling, generate};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Mutex;

/// Keys of a config with the number of experts per token.
const TOP_K_KEYS: [&str; 6] = [
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_num_active_primary_experts",
    "moe_topk",
    "top_k_experts",
    "moe_k",
];

/// The number of experts per token in a config, or in that of a multimodal model's text part.
fn top_k(config: &mut Value) -> &mut Value {
    let config = if config["text_config"].is_object() { &mut config["text_config"] } else { config };
    let key = TOP_K_KEYS.into_iter().find(|key| config[key].is_u64()).unwrap();
    &mut config[key]
}

/// Experts per token in a checkpoint's config.
pub(super) fn experts_per_token(source: &Path) -> u64 {
    let text = std::fs::read_to_string(source.join("config.json")).unwrap();
    top_k(&mut serde_json::from_str(&text).unwrap()).as_u64().unwrap()
}

/// A copy of the checkpoint with another number of experts per token.
fn with_experts(source: &Path, experts: u64, folder: &Path) {
    configured(source, folder, |config| *top_k(config) = json!(experts));
}

/// Models with more than one expert per token, so that a little model has fewer.
fn with_fewer() -> impl DoubleEndedIterator<Item = &'static str> {
    mixtures().filter(|family| experts_per_token(&checkpoint(family)) > 1)
}

/// The little entry point computes the model that `config.json` with fewer experts per token describes,
/// including renormalised weights, groups, biases and shared experts. Every step gives the reference
/// evaluator's result.
#[test]
fn the_little_model_is_the_one_with_fewer_experts() {
    for family in with_fewer() {
        let folder = tempfile::tempdir().unwrap();
        let source = checkpoint(family);
        let bundle = compiled(&source, "f32", BIG_LITTLE, folder.path());
        let report = verify(&bundle, None, None, &Progress::silent()).unwrap();
        assert_eq!(report.failures(), Vec::<String>::new(), "{family}");
        let entries: Vec<&str> = report.entries.iter().map(|e| &*e.entry).collect();
        let names =
            ["prefill[20]", "decode[1]", "decode[2]", "decode[4]", "little[1]", "little[2]", "little[4]"];
        assert_eq!(entries, names, "{family}");

        let experts = experts_per_token(&source).div_ceil(2);
        assert_eq!(bundle.plan.model.big_little.unwrap().experts, experts as u32, "{family}");
        if family == "phimoe" {
            continue; // The config of this family must say 2.
        }
        let (fewer, of_fewer) = (folder.path().join("fewer"), folder.path().join("of_fewer"));
        with_experts(&source, experts, &fewer);
        std::fs::create_dir(&of_fewer).unwrap();
        let reference = compiled(&fewer, "f32", "", &of_fewer);
        let ids = &expected(&source).ids[..24];
        let got = with_engine(&bundle, |engine| read(engine, ids, &mut little));
        let want = with_engine(&reference, |engine| read(engine, ids, &mut full));
        assert!(got == want, "{family}: the little model is another one");
        let all = with_engine(&bundle, |engine| read(engine, ids, &mut full));
        assert!(distance(&all[23], &got[23]) > 1e-4, "{family}: it is the whole model");
    }
}

/// In every cache format, the full pass replaces the little pass's keys and values at a position bit for bit.
#[test]
fn full_pass_replaces_the_kv_cache_of_the_little_pass() {
    for (family, caches) in with_fewer().map(|f| (f, caches(f))) {
        for cache in caches {
            let folder = tempfile::tempdir().unwrap();
            let source = checkpoint(family);
            let more = format!("{BIG_LITTLE}[memory]\nkv_cache = \"{cache}\"\n");
            let bundle = compiled(&source, "f32", &more, folder.path());
            let ids = &expected(&source).ids[..40];
            with_engine(&bundle, |engine| {
                let want = read(engine, ids, &mut full);
                let got = read(engine, ids, &mut |engine, batch| {
                    little(engine, batch);
                    full(engine, batch)
                });
                assert!(got == want, "{family}, {cache}: something of the little pass is left");
                // Another order: first the little pass for several positions.
                engine.reset(0).unwrap();
                for (pos, &id) in ids.iter().enumerate() {
                    little(engine, &[(0, pos, id)]);
                }
                let got: Vec<_> =
                    ids.iter().enumerate().map(|(pos, &id)| full(engine, &[(0, pos, id)])).collect();
                assert!(got == want, "{family}, {cache}: something of the little passes is left");
            });
        }
    }
}

/// For every family, γ = 1 is the full model and γ = 0 the little one; values in between fall back sometimes.
#[test]
fn gamma_ranges_from_the_little_to_the_full_model() {
    // In another order than the other test that builds these bundles, so that neither waits for the other.
    for family in with_fewer().rev() {
        let folder = tempfile::tempdir().unwrap();
        let source = checkpoint(family);
        let bundle = compiled(&source, "f32", BIG_LITTLE, folder.path());
        let want = expected(&source);
        let (prompt, after) = want.greedy.split_at(want.greedy.len() - 24);
        with_engine(&bundle, |engine| {
            let run = |engine: &mut Engine<'_>, mut decoder: Decoder, sampling: Sampling| {
                let request = moec_runtime::Request { slot: 0, prompt, n: 24, end: &[] };
                let done =
                    generate(engine, &request, &mut decoder, &mut Sampler::new(sampling), &mut |_| Ok(()));
                let done = done.unwrap();
                (done.ids, done.fallbacks)
            };
            let hot = Sampling { temperature: 1.0, seed: 3, ..Sampling::GREEDY };
            for sampling in [Sampling::GREEDY, hot] {
                let at = |engine: &mut Engine<'_>, gamma: f32| {
                    let decoder = Decoder::big_little(engine.program(), gamma).unwrap();
                    run(engine, decoder, sampling.clone())
                };
                let all = run(engine, Decoder::full(), sampling.clone());
                assert_eq!(all.1, None);
                let (one, none) = (at(engine, 1.0), at(engine, 0.0));
                assert_eq!(one, (all.0.clone(), Some(Fallbacks { tokens: 23, full: 23 })), "{family}");
                assert_eq!(none.1, Some(Fallbacks { tokens: 23, full: 0 }), "{family}");
                // If γ is so high that no probability exceeds it, every token falls back to the full model.
                let high = at(engine, 1.0 - f32::EPSILON);
                assert_eq!(high, (all.0, Some(Fallbacks { tokens: 23, full: 23 })), "{family}");
            }
            assert_eq!(run(engine, Decoder::full(), Sampling::GREEDY).0, after, "{family}");
        });
    }
}

/// The trained model is certain of some tokens and uncertain of others.
#[test]
fn ferris_falls_back_on_uncertain_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let source = ferris();
    let bundle = compiled(&source, "bf16", "[decode]\nbig_little = true\ngamma = 0.5\n", folder.path());
    let ids = &expected(&source).ids[..48];
    with_engine(&bundle, |engine| {
        let mut decoder = Decoder::of(engine.program()).unwrap();
        let mut step = |engine: &mut Engine<'_>, batch: &[(u32, usize, u32)]| {
            let (kept, logits) = (decoder.fallbacks().unwrap().full, Mutex::new(Vec::new()));
            decoder.decode(engine, batch, &|_, l| logits.lock().unwrap().extend_from_slice(l)).unwrap();
            let logits = logits.into_inner().unwrap();
            // The logits of a kept token exceed γ.
            let max = logits.iter().copied().fold(f32::MIN, f32::max);
            let p = 1.0 / logits.iter().map(|&z| f64::from(z - max).exp()).sum::<f64>();
            assert!(decoder.fallbacks().unwrap().full > kept || p > 0.5);
            logits
        };
        read(engine, ids, &mut step);
        let found = decoder.fallbacks().unwrap();
        assert!(found.tokens == 48 && found.full > 4 && found.full < 44, "{found:?}");
        // Rows of a batch are decoded as if each were alone.
        for many in [2, 3, 4] {
            let mut alone = Vec::new();
            for slot in 0..many {
                engine.reset(slot).unwrap();
                let n = 8 + 5 * slot as usize;
                engine.prefill(slot, 0, &ids[..n], LogitRows::None, &mut |_, _| Ok(())).unwrap();
                let mut decoder = Decoder::of(engine.program()).unwrap();
                let row = [(slot, n, ids[n])];
                let of_row = Mutex::new(Vec::new());
                decoder.decode(engine, &row, &|_, l| of_row.lock().unwrap().extend_from_slice(l)).unwrap();
                alone.push((row[0], of_row.into_inner().unwrap(), decoder.fallbacks().unwrap().full));
            }
            let rows: Vec<_> = alone.iter().map(|a| a.0).collect();
            let mut decoder = Decoder::of(engine.program()).unwrap();
            let distances = Mutex::new(Vec::new());
            let sink = |i: usize, l: &[f32]| distances.lock().unwrap().push(distance(l, &alone[i].1));
            decoder.decode(engine, &rows, &sink).unwrap();
            let worst = distances.into_inner().unwrap().into_iter().fold(0f32, f32::max);
            assert_eq!(decoder.fallbacks().unwrap().full, alone.iter().map(|a| a.2).sum::<usize>());
            assert!(worst < 1e-4, "{many} rows: {worst}");
        }
    });
}
