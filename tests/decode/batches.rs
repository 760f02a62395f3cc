//! Best-of-N: sequences of one batch.

use super::big_little::experts_per_token;
use super::{BIG_LITTLE, caches, compiled};
use crate::support::{checkpoint, expected, ferris, mixtures, with_engine};
use moec_runtime::{BestOf, Decoder, Engine, LogitRows, Sampler, Sampling, best_of};
use std::sync::Mutex;

/// Samples a sequence again, alone in slot 0, after the given ids. Returns the number of samples that differ,
/// the mean log-probability of the ids, and the fallbacks.
fn replayed(
    engine: &mut Engine<'_>,
    prompt: &[u32],
    ids: &[u32],
    decoder: &mut Decoder,
    sampling: Sampling,
) -> (usize, f64, usize) {
    let mut sampler = Sampler::new(sampling);
    let (mut differ, mut sum) = (0, 0.0);
    let mut held = |i: usize, logits: &[f32]| {
        differ += usize::from(sampler.sample(logits).unwrap() != ids[i]);
        let max = logits.iter().copied().fold(f32::MIN, f32::max);
        let total: f64 = logits.iter().map(|&z| f64::from(z - max).exp()).sum();
        sum += f64::from(logits[ids[i] as usize] - max) - total.ln();
    };
    engine.reset(0).unwrap();
    let last = &mut |_: usize, logits: &[f32]| {
        held(0, logits);
        Ok(())
    };
    engine.prefill(0, 0, prompt, LogitRows::Last, last).unwrap();
    let held = Mutex::new(held);
    for (i, &id) in ids[..ids.len() - 1].iter().enumerate() {
        let row = [(0, prompt.len() + i, id)];
        decoder.decode(engine, &row, &|_, logits| (held.lock().unwrap())(i + 1, logits)).unwrap();
    }
    (differ, sum / ids.len() as f64, decoder.fallbacks().map_or(0, |f| f.full))
}

/// The sequences of a batch are those of single runs with the same seeds, in every cache format. Kernels for
/// several rows sum in another order than those for one. A cache in bf16 or q8 amplifies differences in the
/// last bit. So every token is sampled again after the same ids, and one in a hundred may differ.
#[test]
fn best_of_equals_single_runs_with_its_seeds() {
    // In another order than the other test that builds these bundles, so that neither waits for the other.
    let sources = [("ferris", ferris())].into_iter().chain(mixtures().rev().map(|f| (f, checkpoint(f))));
    for (name, source) in sources {
        for cache in caches(name) {
            let folder = tempfile::tempdir().unwrap();
            // A little model has fewer experts per token, but at least one.
            let little = experts_per_token(&source) > 1;
            let more = format!("{}[memory]\nkv_cache = \"{cache}\"\n", if little { BIG_LITTLE } else { "" });
            let bundle = compiled(&source, "f32", &more, folder.path());
            let prompt = &expected(&source).ids[..37];
            let sampling = Sampling { temperature: 0.9, top_p: 0.95, seed: 11, ..Sampling::default() };
            with_engine(&bundle, |engine| {
                // Contents of the other slots do not affect the result.
                for slot in 1..4 {
                    engine.prefill(slot, 0, &[7; 50], LogitRows::None, &mut |_, _| Ok(())).unwrap();
                }
                let full = |_: &Engine<'_>| Decoder::full();
                let sure = |e: &Engine<'_>| Decoder::big_little(e.program(), 0.4).unwrap();
                let decoders = [&full as &dyn Fn(&Engine<'_>) -> Decoder, &sure];
                for decoder in decoders.into_iter().take(1 + usize::from(little)) {
                    let request = moec_runtime::Request { slot: 0, prompt, n: 32, end: &[] };
                    let mut with = decoder(engine);
                    let done: BestOf = best_of(engine, &request, 4, &mut with, &sampling).unwrap();
                    assert_eq!(done.calls, [4; 31]);
                    let (mut differ, mut fallbacks) = (0, 0);
                    for c in &done.candidates {
                        let mut with = decoder(engine);
                        let sampling = Sampling { seed: c.seed, ..sampling.clone() };
                        let alone = replayed(engine, prompt, &c.ids, &mut with, sampling);
                        differ += alone.0;
                        fallbacks += alone.2;
                        let off = (alone.1 - c.score()).abs();
                        assert!(off < 0.01, "{name}, {cache}, seed {}: a score is off by {off}", c.seed);
                    }
                    assert!(differ <= 1, "{name}, {cache}: {differ} of 128 draws differ");
                    let together = done.fallbacks.map_or(0, |f| f.full);
                    assert!(together.abs_diff(fallbacks) <= 1, "{name}, {cache}: {together} and {fallbacks}");
                    let first = &done.candidates[0].ids;
                    assert!(done.candidates.iter().any(|c| c.ids != *first), "{name}: all are the same");
                }
            });
        }
    }
}

/// As sequences end, smaller entry points are used: each size is called.
#[test]
fn finished_sequences_leave_the_batch() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = compiled(&ferris(), "f32", "", folder.path());
    let prompt = &expected(&ferris()).ids[..20];
    with_engine(&bundle, |engine| {
        let sampling = Sampling { temperature: 1.0, seed: 2, ..Sampling::default() };
        let run = |engine: &mut Engine<'_>, end: &[u32]| {
            let request = moec_runtime::Request { slot: 0, prompt, n: 64, end };
            best_of(engine, &request, 4, &mut Decoder::full(), &sampling).unwrap()
        };
        let free = run(engine, &[]);
        // Ids that end three of the sequences at different times.
        let end: Vec<u32> = (0..3).map(|i| free.candidates[i].ids[10 + 12 * i]).collect();
        let done = run(engine, &end);
        let length =
            |i: usize| free.candidates[i].ids.iter().position(|id| end.contains(id)).map_or(64, |p| p + 1);
        let lengths: Vec<usize> = (0..4).map(length).collect();
        for (i, c) in done.candidates.iter().enumerate() {
            assert_eq!(c.ids, free.candidates[i].ids[..lengths[i]], "sequence {i}");
        }
        let calls = (1..64).map(|made| lengths.iter().filter(|&&l| l > made).count()).filter(|&n| n > 0);
        assert_eq!(done.calls, calls.collect::<Vec<_>>());
        assert!(done.calls.first() > done.calls.last(), "{:?}", done.calls);
    });
}
