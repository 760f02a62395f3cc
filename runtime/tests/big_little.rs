//! Big-little decoding: the logits that count, and the content of the KV cache.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "what fails here fails the test")]

mod common;

use common::*;
use moec_runtime::serving::scheduler::{Event, Job, Scheduler, Setting};
use moec_runtime::{Decoder, Engine, Error, Fallbacks, LogitRows, Request, Sampler, Sampling, generate};
use std::sync::Mutex;

/// Largest probability of the softmax.
fn confidence(logits: &[f32]) -> f64 {
    let max = logits.iter().copied().fold(f32::MIN, f32::max);
    1.0 / logits.iter().map(|&z| f64::from(z - max).exp()).sum::<f64>()
}

/// Result of decoding a sequence: the logits that count, and whether they are the full model's. The toy's
/// cache holds only ids, so positions do not depend on how earlier ones were decoded.
fn expected(seq: &[u32], gamma: f32) -> (Vec<f32>, bool) {
    let little = reference_with(seq, LITTLE);
    let full = gamma >= 1.0 || confidence(&little) <= f64::from(gamma);
    (if full { reference(seq) } else { little }, full)
}

/// A sequence after which the little model's confidence exceeds [`GAMMA`], and one after which it does not.
fn sure_and_unsure() -> [Vec<u32>; 2] {
    let find = |full: bool| {
        let all = (1..250u32).flat_map(|a| (1..250).map(move |b| vec![a, b]));
        let differs = |s: &Vec<u32>| reference(s) != reference_with(s, LITTLE);
        all.into_iter().find(|s| expected(s, GAMMA).1 == full && differs(s)).unwrap()
    };
    [find(false), find(true)]
}

#[test]
fn unsure_token_is_decoded_again_by_the_full_model() {
    let [sure, unsure] = sure_and_unsure();
    with_engine(&BIG_LITTLE, 2, |engine| {
        for (seq, full) in [(&sure, 0), (&unsure, 1)] {
            let mut decoder = Decoder::of(engine.program()).unwrap();
            engine.reset(0).unwrap();
            engine.prefill(0, 0, &seq[..1], LogitRows::None, &mut |_, _| Ok(())).unwrap();
            let seen = Mutex::new(Vec::new());
            let sink = |i: usize, logits: &[f32]| seen.lock().unwrap().push((i, logits.to_vec()));
            decoder.decode(engine, &[(0, 1, seq[1])], &sink).unwrap();
            assert_eq!(seen.into_inner().unwrap(), [(0, expected(seq, GAMMA).0)]);
            assert_eq!(engine.len(0), 2);
            assert_eq!(decoder.fallbacks(), Some(Fallbacks { tokens: 1, full }));
        }
    });
}

#[test]
fn batch_rows_fall_back_together_and_individually() {
    let [sure, unsure] = sure_and_unsure();
    for batch in [[&sure, &unsure, &sure], [&unsure, &sure, &unsure], [&unsure; 3], [&sure; 3]] {
        with_engine(&BIG_LITTLE, 2, |engine| {
            let mut decoder = Decoder::of(engine.program()).unwrap();
            for (slot, seq) in batch.iter().enumerate() {
                engine.prefill(slot as u32, 0, &seq[..1], LogitRows::None, &mut |_, _| Ok(())).unwrap();
            }
            let rows: Vec<_> = batch.iter().enumerate().map(|(slot, seq)| (slot as u32, 1, seq[1])).collect();
            let seen = Mutex::new(Vec::new());
            let sink = |i: usize, logits: &[f32]| seen.lock().unwrap().push((i, logits.to_vec()));
            decoder.decode(engine, &rows, &sink).unwrap();
            let mut seen = seen.into_inner().unwrap();
            seen.sort_by_key(|(row, _)| *row);
            let expected_ids: Vec<_> = batch.iter().map(|seq| expected(seq, GAMMA).0).enumerate().collect();
            assert_eq!(seen, expected_ids);
            let full = batch.iter().filter(|s| expected(s, GAMMA).1).count();
            assert_eq!(decoder.fallbacks(), Some(Fallbacks { tokens: 3, full }));
        });
    }
}

/// Continuation by the rule, token by token.
fn continuation_at(prompt: &[u32], n: usize, gamma: f32) -> (Vec<u32>, usize) {
    let (mut seq, mut fallbacks) = (prompt.to_vec(), 0);
    for i in 0..n {
        // The full model reads the prompt.
        let (logits, full) = if i == 0 { (reference(&seq), false) } else { expected(&seq, gamma) };
        fallbacks += usize::from(full);
        seq.push((0..V).fold(0, |b, v| if logits[v] > logits[b] { v } else { b }) as u32);
    }
    (seq.split_off(prompt.len()), fallbacks)
}

fn generated(engine: &mut Engine<'_>, decoder: &mut Decoder) -> (Vec<u32>, Option<Fallbacks>) {
    let request = Request { slot: 0, prompt: &[7, 77, 3], n: 40, end: &[] };
    let mut sampler = Sampler::new(Sampling::default());
    let done = generate(engine, &request, decoder, &mut sampler, &mut |_| Ok(())).unwrap();
    (done.ids, done.fallbacks)
}

#[test]
fn generation_follows_the_rule_for_every_gamma() {
    with_engine(&BIG_LITTLE, 2, |engine| {
        let mut ratios = Vec::new();
        for gamma in [0.0, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0] {
            let mut decoder = Decoder::big_little(engine.program(), gamma).unwrap();
            let (ids, full) = continuation_at(&[7, 77, 3], 40, gamma);
            let expected = Fallbacks { tokens: 39, full };
            assert_eq!(generated(engine, &mut decoder), (ids.clone(), Some(expected)), "{gamma}");
            // A second run counts from zero.
            assert_eq!(generated(engine, &mut decoder), (ids, Some(expected)), "{gamma}");
            ratios.push(expected.ratio().unwrap());
        }
        assert!(ratios[0] == 0.0 && ratios[6] == 1.0 && ratios[3] > 0.0 && ratios[3] < 1.0, "{ratios:?}");
        let full = generated(engine, &mut Decoder::full());
        assert_eq!(full, (continuation(&[7, 77, 3], 40), None));
    });
}

#[test]
fn invalid_big_little_options_are_rejected() {
    with_engine(&BIG_LITTLE, 1, |engine| {
        for gamma in [-0.1, 1.1, f32::NAN, f32::INFINITY] {
            let e = Decoder::big_little(engine.program(), gamma).expect_err("no probability");
            assert!(matches!(e, Error::Usage { .. }), "{e}");
        }
    });
    with_engine(&ENTRIES, 1, |engine| {
        assert!(matches!(Decoder::big_little(engine.program(), 0.5), Err(Error::Usage { .. })));
        assert_eq!(Decoder::of(engine.program()).unwrap().fallbacks(), None);
        engine.prefill(0, 0, &[1], LogitRows::None, &mut |_, _| Ok(())).unwrap();
        let e = engine.decode_little(&[(0, 1, 5)], &mut |_, _| Ok(())).expect_err("no entry point");
        assert!(matches!(&e, Error::Bundle(why) if why.contains("little")), "{e}");
    });
}

/// Continuation of `prompt`: its tokens, and the number of prompt tokens that a slot had already.
fn answer(scheduler: &mut Scheduler<'_, '_, '_>, prompt: &[u32], n: usize) -> (Vec<u32>, usize) {
    let job = Job {
        prompt: prompt.to_vec(),
        samplers: vec![Box::new(Sampler::new(Sampling::default()))],
        n,
        end: vec![],
        limit: None,
        scores: None,
        draft_tokens: 0,
    };
    scheduler.submit(job).unwrap();
    let (mut ids, mut had) = (Vec::new(), 0);
    let mut sink = |_, event| {
        match event {
            Event::Token { id, .. } => ids.push(id),
            Event::Began { shared } => had = shared,
            Event::Scored { .. } | Event::Ended(_) => {}
        }
        true
    };
    scheduler.run(&mut sink, &mut |_| true).unwrap();
    (ids, had)
}

#[test]
fn little_model_answers_are_not_shared_as_prefixes() {
    // A whole chunk of 16 tokens, and two more.
    let prompt: Vec<u32> = (1..19).collect();
    for (reduced, expected) in [(true, 16), (false, 18 + 6 - 1)] {
        with_engine(&BIG_LITTLE, 2, |engine| {
            let mut decoder = if reduced { Decoder::of(engine.program()).unwrap() } else { Decoder::full() };
            let mut scheduler = Scheduler::new(engine, &mut decoder, &Setting::default()).unwrap();
            let (first, had) = answer(&mut scheduler, &prompt, 6);
            assert_eq!((first.len(), had), (6, 0));
            let longer: Vec<u32> = prompt.iter().chain(&first).copied().chain([5]).collect();
            let (_, had) = answer(&mut scheduler, &longer, 1);
            assert_eq!(had, expected, "reduced: {reduced}");
        });
    }
}
