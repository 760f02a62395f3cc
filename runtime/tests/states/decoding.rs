//! Draft tokens, big-little decoding and best-of-N with tokens that are taken back.

use crate::common::{self, SLOTS, V};
use crate::toy::{GAMMA, ToyToken, fill, full, message_of, reference, sequence, toy, toy_with, with_toy};
use moec_runtime::serving::generate::{GenerateOptions, generate_by};
use moec_runtime::{Decoder, Engine, Fallbacks, Request, Sampler, Sampling, best_of, generate};

/// Rejected draft tokens are taken back: the state goes back to the first draft token, and reads the accepted
/// ones again.
#[test]
fn speculation_with_folded_states_matches_plain_decoding() {
    let (dir, program) = (common::bundle(), toy_with("head_of_few", 2));
    let mut engine = common::open(&program, dir.path(), 2);
    let (mut kept, mut drafted) = (0, 0);
    for seed in 0..20 {
        let prompt = sequence(12, seed);
        let request = Request { slot: seed as u32 % 3, prompt: &prompt, n: 40, end: &[] };
        let [plain, by_draft_tokens] = [0, 1].map(|draft_tokens| {
            let mut sampler = Sampler::new(Sampling::default());
            let by = (&mut Decoder::full(), &mut sampler);
            let options = GenerateOptions { draft_tokens, ..GenerateOptions::default() };
            generate_by(&mut engine, &request, options, by, &mut |_| Ok(())).unwrap()
        });
        assert_eq!(by_draft_tokens.0.ids, plain.0.ids);
        (kept, drafted) = (kept + by_draft_tokens.1.accepted, drafted + by_draft_tokens.1.draft_tokens);
    }
    // Enough of both that chance does not decide.
    assert!(kept >= 20 && drafted - kept >= 20, "{kept} of {drafted}");
}

#[test]
fn speculation_is_rejected_if_states_cannot_rewind() {
    let dir = common::bundle();
    let program = toy(0);
    let mut engine = common::open(&program, dir.path(), 1);
    let request = Request { slot: 0, prompt: &[1, 2, 1, 2], n: 3, end: &[] };
    let mut sampler = Sampler::new(Sampling::default());
    let by = (&mut Decoder::full(), &mut sampler);
    let options = GenerateOptions { draft_tokens: 4, ..GenerateOptions::default() };
    let e = generate_by(&mut engine, &request, options, by, &mut |_| Ok(())).unwrap_err();
    assert_eq!(
        message_of(&e),
        "state `layers.0.s` (recurrent) cannot take back draft tokens | leave out `--speculate`"
    );
}

/// Result of decoding a sequence by the rule: the tokens with the model that read each, and the number of
/// calls of the full model.
fn continuation(prompt: &[u32], n: usize, gamma: f32) -> (Vec<ToyToken>, usize) {
    let (mut seq, mut fallbacks) = (full(prompt), 0);
    let mut after = reference(&seq);
    for i in 0..n {
        let id = (0..V).fold(0, |b, v| if after[v] > after[b] { v } else { b }) as u32;
        if i + 1 == n {
            seq.push((id, false));
            break;
        }
        let little = [&seq[..], &[(id, true)]].concat();
        after = reference(&little);
        let max = after.iter().copied().fold(f32::MIN, f32::max);
        let p = 1.0 / after.iter().map(|&z| f64::from(z - max).exp()).sum::<f64>();
        if p > f64::from(gamma) {
            seq = little;
        } else {
            fallbacks += 1;
            seq.push((id, false));
            after = reference(&seq);
        }
    }
    (seq.split_off(prompt.len()), fallbacks)
}

#[test]
fn redecoded_token_uses_the_previous_state() {
    with_toy(1, |engine| {
        for (seed, prompt) in [[7, 77, 3], [1, 2, 30], [90, 91, 5]].into_iter().enumerate() {
            for gamma in [0.0, 0.2, GAMMA, 0.9, 1.0] {
                let mut decoder = Decoder::big_little(engine.program(), gamma).unwrap();
                let request = Request { slot: (seed % SLOTS) as u32, prompt: &prompt, n: 30, end: &[] };
                let mut sampler = Sampler::new(Sampling::default());
                let done = generate(engine, &request, &mut decoder, &mut sampler, &mut |_| Ok(())).unwrap();
                let (taken, full) = continuation(&prompt, 30, gamma);
                let ids: Vec<u32> = taken.iter().map(|t| t.0).collect();
                assert_eq!(
                    (done.ids, done.fallbacks),
                    (ids, Some(Fallbacks { tokens: 29, full })),
                    "{gamma}"
                );
                if gamma == GAMMA {
                    assert!((1..29).contains(&full), "both happen: {prompt:?} {full}");
                }
            }
        }
    });
}

#[test]
fn best_of_n_with_folded_states_matches_single_runs() {
    let hot = Sampling { temperature: 2.0, top_p: 0.9, top_k: 60, seed: 5, ..Sampling::GREEDY };
    let prompt = [9, 8, 70, 6, 5];
    with_toy(1, |engine| {
        for gamma in [GAMMA, 1.0] {
            let decoder = |e: &Engine<'_>| Decoder::big_little(e.program(), gamma).unwrap();
            // Earlier content of slots does not matter.
            for slot in 0..SLOTS as u32 {
                fill(engine, slot, 0, &sequence(11, slot as usize)).unwrap();
                engine.snapshot(slot).unwrap();
            }
            let request = Request { slot: 0, prompt: &prompt, n: 30, end: &[] };
            let mut own = decoder(engine);
            let done = best_of(engine, &request, SLOTS, &mut own, &hot).unwrap();
            let of_all = done.fallbacks.unwrap();
            let mut single = Fallbacks::default();
            for c in &done.candidates {
                let mut sampler = Sampler::new(Sampling { seed: c.seed, ..hot.clone() });
                let (mut own, request) = (decoder(engine), Request { slot: 1, ..request });
                let alone = generate(engine, &request, &mut own, &mut sampler, &mut |_| Ok(())).unwrap();
                assert_eq!(c.ids, alone.ids);
                let Fallbacks { tokens, full } = alone.fallbacks.unwrap();
                single = Fallbacks { tokens: single.tokens + tokens, full: single.full + full };
            }
            assert_eq!(of_all, single);
            let some = (1..of_all.tokens).contains(&of_all.full);
            assert!(if gamma < 1.0 { some } else { of_all.full == of_all.tokens }, "{of_all:?}");
            assert!(done.candidates.windows(2).all(|c| c[0].ids != c[1].ids));
        }
    });
}
