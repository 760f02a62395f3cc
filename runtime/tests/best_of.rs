//! Best-of-N: the sequences equal those of single runs, although batches shrink as sequences end.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "what fails here fails the test")]

mod common;

use common::*;
use moec_ir::EntryKind::{Decode, Prefill};
use moec_runtime::{
    BestOf, Decoder, Engine, Error, LogitRows, Request, Sampler, Sampling, best_of, generate,
};

/// Sampling with a temperature at which sequences differ.
fn hot() -> Sampling {
    Sampling { temperature: 40.0, top_p: 0.9, top_k: 60, seed: 5, ..Sampling::GREEDY }
}

const PROMPT: [u32; 5] = [9, 8, 70, 6, 5];

fn sample_best_of(engine: &mut Engine<'_>, many: usize, n: usize, end: &[u32]) -> BestOf {
    let request = Request { slot: 0, prompt: &PROMPT, n, end };
    best_of(engine, &request, many, &mut Decoder::full(), &hot()).unwrap()
}

#[test]
fn best_of_sequences_match_single_runs() {
    with_engine(&ENTRIES, 2, |engine| {
        for many in 1..=SLOTS {
            let done = sample_best_of(engine, many, 30, &[]);
            assert_eq!(done.calls, [many; 29]);
            for (i, c) in done.candidates.iter().enumerate() {
                assert_eq!((c.seed, c.ids.len()), (5 + i as u64, 30));
                let mut sampler = Sampler::new(Sampling { seed: c.seed, ..hot() });
                let request = Request { slot: 2, prompt: &PROMPT, n: 30, end: &[] };
                let alone = generate(engine, &request, &mut Decoder::full(), &mut sampler, &mut |_| Ok(()));
                assert_eq!(c.ids, alone.unwrap().ids);
                // The score, from the definition.
                let mut seq = PROMPT.to_vec();
                let mut sum = 0.0;
                for &id in &c.ids {
                    let logits = reference(&seq);
                    let total: f64 = logits.iter().map(|&z| f64::from(z).exp()).sum();
                    sum += f64::from(logits[id as usize]) - total.ln();
                    seq.push(id);
                }
                assert!((c.score() - sum / 30.0).abs() < 1e-4, "{} {}", c.score(), sum / 30.0);
            }
        }
    });
}

#[test]
fn batches_shrink_as_sequences_end() {
    with_engine(&[(Prefill(4), 4), (Decode(1), 1), (Decode(2), 2), (Decode(3), 3)], 2, |engine| {
        let free = sample_best_of(engine, 3, 40, &[]);
        // An id that occurs in two of the sequences at different positions, and not in the third.
        let at = |i: usize, id: u32| free.candidates[i].ids.iter().position(|&x| x == id);
        let id = (0..V as u32).find(|&id| {
            let found: Vec<_> = (0..3).filter_map(|i| at(i, id)).collect();
            found.len() == 2 && found[0] != found[1] && found.iter().all(|&p| p < 38)
        });
        let id = id.expect("an id that ends two sequences");
        let done = sample_best_of(engine, 3, 40, &[id]);
        let lengths: Vec<usize> = (0..3).map(|i| at(i, id).map_or(40, |p| p + 1)).collect();
        for (i, c) in done.candidates.iter().enumerate() {
            assert_eq!(c.ids, free.candidates[i].ids[..lengths[i]], "sequence {i}");
        }
        let calls: Vec<usize> = (1..40).map(|made| lengths.iter().filter(|&&l| l > made).count()).collect();
        assert_eq!(done.calls, calls);
        assert!([3, 2, 1].iter().all(|n| calls.contains(n)), "{calls:?}");
    });
}

#[test]
fn forked_slot_diverges_independently() {
    with_engine(&ENTRIES, 2, |engine| {
        engine.prefill(1, 0, &[3, 1, 4, 1, 5], LogitRows::None, &mut |_, _| Ok(())).unwrap();
        engine.prefill(2, 0, &[9; 20], LogitRows::None, &mut |_, _| Ok(())).unwrap();
        engine.fork(1, 2, 5).unwrap();
        assert_eq!((engine.len(1), engine.len(2)), (5, 5));
        let sink = &mut |i: usize, logits: &[f32]| {
            let next: u32 = [92, 65][i];
            assert_eq!(logits, reference(&[3, 1, 4, 1, 5, next]));
            Ok(())
        };
        engine.decode(&[(1, 5, 92), (2, 5, 65)], sink).unwrap();
        // A fork of a slot to itself, and a fork of no tokens.
        engine.fork(2, 2, 5).unwrap();
        engine
            .decode(&[(2, 5, 65)], &mut |_, l| {
                assert_eq!(l, reference(&[3, 1, 4, 1, 5, 65]));
                Ok(())
            })
            .unwrap();
        engine.fork(0, 1, 0).unwrap();
        assert_eq!(engine.len(1), 0);
        for (from, to) in [(0, 3), (3, 0)] {
            assert!(
                matches!(engine.fork(from, to, 0), Err(Error::Request { what, .. }) if what.starts_with("slot 3 does not exist"))
            );
        }
    });
}

#[test]
fn invalid_best_of_requests_are_rejected() {
    with_engine(&ENTRIES, 1, |engine| {
        let request = Request { slot: 0, prompt: &PROMPT, n: 4, end: &[] };
        let mut of = |request: &Request<'_>, many, sampling: Sampling| {
            let e = best_of(engine, request, many, &mut Decoder::full(), &sampling).expect_err("no sense");
            format!("{e} | {}", e.hint().unwrap_or_default())
        };
        assert_eq!(
            of(&request, 5, hot()),
            "5 sequences were requested, but the KV cache holds 3 | name 5 in `decode_batch` under `[shapes]` in \
             `model.toml`, as in `decode_batch = [1, 2, 4, 5]`, and build again"
        );
        assert!(of(&Request { slot: 2, ..request }, 2, hot()).contains("[1, 2, 4]"));
        assert!(of(&request, 2, Sampling::GREEDY).starts_with("temperature must be above 0"));
        assert!(of(&Request { n: 60, ..request }, 2, hot()).contains("60 more are requested"));
        assert!(of(&Request { prompt: &[], ..request }, 2, hot()).starts_with("the prompt is empty"));
    });
}
