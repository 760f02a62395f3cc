//! Any operations in any order, compared with plain sequences.

use crate::common::{self, CTX, SLOTS};
use crate::toy::{ToyToken, full, reference, ring, sequence, toy, windowed};
use moec_runtime::{Error, LogitRows, Program};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use std::cell::Cell;

/// Operation on a slot: its kind, the slot, a position and a number.
type Act = (u8, usize, usize, usize);

/// Applies operations to an engine and to plain sequences. An accepted operation must give the logits of the
/// plain sequence; a refused one must change nothing. Returns the number of rewinds, and of refused ones.
fn follow(program: &Program, logits: fn(&[ToyToken]) -> Vec<f32>, acts: &[Act]) -> [usize; 2] {
    let dir = common::bundle();
    let engine = &mut common::open(program, dir.path(), 1);
    let mut seqs = vec![Vec::<ToyToken>::new(); SLOTS];
    let mut back = [0; 2];
    for &(act, slot, at, n) in acts {
        let (slot, to) = (slot % SLOTS, at % SLOTS);
        let (len, s) = (seqs[slot].len(), slot as u32);
        // Every second operation is at the end, where most interesting cases are.
        let pos = if act.is_multiple_of(2) { len } else { at % (len + 1) };
        let ids = sequence((1 + n % 19).min(CTX - pos), n);
        let (mut seen, first) = (Vec::new(), *ids.first().unwrap_or(&0));
        let sink = &mut |_: usize, l: &[f32]| -> moec_runtime::Result<()> {
            seen = l.to_vec();
            Ok(())
        };
        let mut next = seqs[slot][..pos].to_vec();
        let done = match act / 2 {
            0 | 1 if !ids.is_empty() => {
                next.extend(full(&ids));
                engine.prefill(s, pos, &ids, LogitRows::Last, sink)
            }
            2 | 3 if !ids.is_empty() => {
                next.push((first, false));
                engine.decode(&[(s, pos, first)], sink)
            }
            4 if !ids.is_empty() => {
                next.push((first, true));
                engine.decode_little(&[(s, pos, first)], sink)
            }
            5 if at.is_multiple_of(2) => engine.rewind(s, pos),
            5 => {
                // An edit: rewinds to the last snapshot before it, which always exists.
                let keep = engine.resumes(s, pos);
                assert!(keep <= pos && (keep == pos || engine.rewind(s, pos).is_err()));
                next.truncate(keep);
                engine.rewind(s, keep).unwrap();
                Ok(())
            }
            6 => {
                next.clone_from(&seqs[slot]);
                engine.snapshot(s).map(|at| assert_eq!(at, len))
            }
            7 => {
                let tokens = if n.is_multiple_of(2) { seqs[to].len() } else { n % (seqs[to].len() + 1) };
                next = seqs[to][..tokens].to_vec();
                engine.fork(to as u32, s, tokens)
            }
            _ => {
                next.clear();
                engine.reset(s)
            }
        };
        let refused = done.is_err();
        match done {
            Ok(()) => seqs[slot] = next,
            // Every state can go back to an empty sequence. Snapshots cover all tokens of a slot, and the
            // little model needs room for them.
            Err(e) => {
                let by_name = matches!(e, Error::State { .. }) && (pos > 0 || matches!(act / 2, 4 | 6 | 7));
                assert!(by_name, "{act} {slot} {pos}: {e}");
            }
        }
        if pos < len {
            back[usize::from(refused)] += 1;
        }
        if !seen.is_empty() {
            assert_eq!(seen, logits(&seqs[slot]));
        }
        for (slot, seq) in seqs.iter().enumerate() {
            assert_eq!(engine.len(slot as u32), seq.len());
        }
    }
    back
}

/// No order of operations gives a wrong result without an error.
#[test]
fn arbitrary_state_actions_are_exact_or_rejected() {
    let acts = prop::collection::vec((0..18_u8, 0..SLOTS, 0..CTX, 0..1000_usize), 1..120);
    let mut runner =
        TestRunner::new(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() });
    let sums = Cell::new([[0; 2]; 2]);
    let done = runner.run(&(0..6_u32, acts), |(room, acts)| {
        let [mut folded, mut windows] = sums.get();
        for (sum, n) in folded.iter_mut().zip(follow(&toy(room), reference, &acts)) {
            *sum += n;
        }
        for (sum, n) in windows.iter_mut().zip(follow(&ring(), windowed, &acts)) {
            *sum += n;
        }
        sums.set([folded, windows]);
        Ok(())
    });
    done.unwrap();
    assert!(sums.get().as_flattened().iter().all(|&n| n > 50), "both happen: {:?}", sums.get());
}
