//! Speculative decoding: tokens are those of plain decoding, for every draft.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "what fails here fails the test")]

mod common;

use common::*;
use moec_ir::EntryKind::{Decode, Prefill};
use moec_runtime::serving::big_little::Decoder;
use moec_runtime::serving::generate::{GenerateOptions, generate_by};
use moec_runtime::serving::speculate::DraftCounters;
use moec_runtime::{Generation, Request, Sampler, Sampling};
use proptest::prelude::*;

fn speculated(
    entries: &[(moec_ir::EntryKind, u32)],
    request: &Request<'_>,
    most: usize,
) -> (Generation, DraftCounters) {
    let mut done = None;
    with_engine(entries, 2, |engine| {
        let (mut decoder, mut sampler) = (Decoder::full(), Sampler::new(Sampling::default()));
        let mut tokens_received = Vec::new();
        let options = GenerateOptions { draft_tokens: most, ..GenerateOptions::default() };
        let made = generate_by(engine, request, options, (&mut decoder, &mut sampler), &mut |id| {
            tokens_received.push(id);
            Ok(())
        });
        let made = made.unwrap();
        assert_eq!(made.0.ids, tokens_received);
        // All tokens but the last have been computed.
        assert_eq!(engine.len(request.slot), request.prompt.len() + tokens_received.len() - 1);
        done = Some(made);
    });
    done.unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn speculative_tokens_match_plain_decoding(
        words in prop::collection::vec(prop::collection::vec(0_u32..256, 1..4), 1..4),
        order in prop::collection::vec(0_usize..4, 1..9),
        n in 1_usize..24,
        most in 1_usize..9,
        wide in any::<bool>(),
        end in prop::option::of(0_u32..256),
    ) {
        let prompt: Vec<u32> = order.iter().flat_map(|&w| words[w % words.len()].clone()).collect();
        let entries: &[_] = if wide { &[(Prefill(8), 8), (Decode(1), 1), (Decode(4), 4)] } else { &ENTRIES };
        let end: Vec<u32> = end.into_iter().collect();
        let plain = continuation(&prompt, n);
        let stop = plain.iter().position(|id| end.contains(id)).map_or(n, |at| at + 1);
        let request = Request { slot: 1, prompt: &prompt, n, end: &end };
        let (made, did) = speculated(entries, &request, most);
        prop_assert_eq!(&made.ids, &plain[..stop]);
        prop_assert!(did.accepted <= did.draft_tokens && did.close_choices <= did.calls);
        // Every id but the first comes from a call; accepted draft tokens need no call of their own.
        prop_assert!(made.ids.len() <= 1 + did.calls + did.single_token_calls + did.accepted);
    }
}

#[test]
fn repeated_text_drafts_are_accepted() {
    // `l f g l`, which the model continues by `f g`: the second token is drafted from the earlier `l f`.
    let all = (0..80).flat_map(|l| (0..80).map(move |g| (l, g)));
    let mut prompts = all.flat_map(|(l, g)| (0..256).map(move |f| [l, f, g, l]));
    let prompt = prompts.find(|p| continuation(p, 1) == p[1..2] && continuation(p, 2) == p[1..3]);
    let prompt = prompt.expect("a prompt that the toy goes on with as it began");
    let request = Request { slot: 0, prompt: &prompt, n: 8, end: &[] };
    let (made, did) = speculated(&ENTRIES, &request, 1);
    assert_eq!(made.ids, continuation(&prompt, 8));
    assert!(did.accepted + did.close_choices > 0 && did.acceptance().is_some(), "{did:?}");
}

/// Kernels for more rows may treat inputs otherwise than those for one row: sizes above eight verify no
/// draft.
#[test]
fn sizes_above_eight_verify_no_drafts() {
    let prompt = [1, 2, 3, 1, 2, 3, 1, 2, 3];
    let request = Request { slot: 0, prompt: &prompt, n: 8, end: &[] };
    for (rows, checks) in [(8, true), (9, false), (16, false)] {
        let entries = [(Prefill(8), 8), (Decode(1), 1), (Decode(rows), rows)];
        let (made, did) = speculated(&entries, &request, 4);
        assert_eq!((made.ids, did.calls > 0), (continuation(&prompt, 8), checks), "{rows}");
    }
}
