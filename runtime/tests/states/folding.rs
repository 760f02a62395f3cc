//! Recurrent states: continuations are exact, and errors name the missing state.

use crate::common::SLOTS;
use crate::toy::{BUILD, GO_BACK, check_decode, fill, full, message_of, reference, sequence, with_toy};
use moec_ir::EntryKind::{Decode, Prefill};
use moec_runtime::{Decoder, Engine, Error, LogitRows, Row};

#[test]
fn any_prompt_chunking_matches_the_recurrence() {
    with_toy(0, |engine| {
        let seqs: Vec<Vec<u32>> = (0..SLOTS).map(|s| sequence(40, s)).collect();
        for (slot, seq) in seqs.iter().enumerate() {
            // In chunks of 16 and 4, then a continuation from the end.
            for (from, to) in [(0, 21), (21, 24)] {
                engine
                    .prefill(slot as u32, from, &seq[from..to], LogitRows::All, &mut |pos, l| {
                        assert_eq!(l, reference(&full(&seq[..=pos])), "slot {slot} position {pos}");
                        Ok(())
                    })
                    .unwrap();
            }
        }
        for at in 24..40 {
            let batch: Vec<_> = (0..SLOTS).map(|s| (s as u32, at, seqs[s][at])).collect();
            let sink = &mut |i: usize, l: &[f32]| {
                assert_eq!(l, reference(&full(&seqs[i][..=at])), "slot {i} position {at}");
                Ok(())
            };
            engine.decode(&batch, sink).unwrap();
        }
    });
}

#[test]
fn folded_state_of_a_new_sequence_is_zero() {
    with_toy(0, |engine| {
        let [first, second] = [sequence(9, 1), sequence(7, 2)];
        fill(engine, 1, 0, &first).unwrap();
        engine.reset(1).unwrap();
        assert!(engine.is_empty(1));
        fill(engine, 1, 0, &second[..6]).unwrap();
        check_decode(engine, 1, &second);
        // Without a reset: by a prompt that begins at 0, by a token, and by going back to an empty sequence.
        fill(engine, 1, 0, &first[..8]).unwrap();
        check_decode(engine, 1, &first);
        check_decode(engine, 1, &second[..1]);
        engine.rewind(1, 0).unwrap();
        check_decode(engine, 1, &first[..1]);
    });
}

#[test]
fn state_without_snapshot_room_cannot_rewind() {
    with_toy(0, |engine| {
        let seq = sequence(9, 8);
        fill(engine, 0, 0, &seq[..7]).unwrap();
        let back = "state `layers.0.s` (recurrent) cannot rewind slot 0 from 7 tokens to 5: the plan has no room for a \
                    snapshot";
        for e in [
            engine.rewind(0, 5).unwrap_err(),
            fill(engine, 0, 5, &[1, 2, 3]).unwrap_err(),
            engine.decode(&[(0, 5, 1)], &mut |_, _| Ok(())).unwrap_err(),
        ] {
            assert_eq!(message_of(&e), format!("{back} | {BUILD}"));
            assert_eq!(e.fault(), moec_runtime::Fault::Request);
        }
        let keep = "state `layers.0.s` (recurrent) cannot keep a snapshot: the plan has no room for one";
        for e in [
            engine.snapshot(0).unwrap_err(),
            engine.decode_little(&[(0, 7, 1)], &mut |_, _| Ok(())).unwrap_err(),
            Decoder::of(engine.program()).unwrap_err(),
        ] {
            assert_eq!(message_of(&e), format!("{keep} | {BUILD}"));
        }
        // If the little model does not run, no sequence goes back.
        Decoder::big_little(engine.program(), 1.0).unwrap();
        // A batch is refused as a whole, and a refusal changes nothing.
        fill(engine, 1, 0, &seq[..3]).unwrap();
        let batch = [(1, 3, seq[3]), (0, 5, 1)];
        assert!(matches!(engine.decode(&batch, &mut |_, _| Ok(())), Err(Error::State { .. })));
        check_decode(engine, 0, &seq[..8]);
        check_decode(engine, 1, &seq[..4]);
    });
}

/// A call that ends half way leaves an unknown state: it does not count as that of any position.
#[test]
fn state_changed_by_a_failed_call_is_not_reused() {
    with_toy(1, |engine| {
        let seq = sequence(9, 2);
        let fail = |engine: &mut Engine<'_>, pos: usize| {
            let row = Row { slot: 0, pos, id: seq[pos] };
            let entry = engine.entry(Decode(1)).unwrap();
            let stop = &mut |moment, view: &moec_runtime::StepView<'_>| {
                if (moment, view.index()) == (moec_runtime::Moment::After, 0) {
                    return Err(Error::request("enough"));
                }
                Ok(())
            };
            let e = engine.trace_entry(entry, &[row], &[0], 0, stop).unwrap_err();
            assert!(matches!(e, Error::Request { .. }));
        };
        fill(engine, 0, 0, &seq[..5]).unwrap();
        fail(engine, 5);
        let dirty = "state `layers.0.s` (recurrent) cannot go on in slot 0: a call ended in an error while it changed the state";
        for e in [
            engine.decode(&[(0, 5, seq[5])], &mut |_, _| Ok(())).unwrap_err(),
            engine.snapshot(0).unwrap_err(),
            engine.fork(0, 1, 5).unwrap_err(),
            engine.rewind(0, 5).unwrap_err(),
        ] {
            assert_eq!(message_of(&e), format!("{dirty} | {GO_BACK}"));
        }
        // From the beginning, or from a snapshot at the start of the call.
        fill(engine, 0, 0, &seq[..5]).unwrap();
        engine.snapshot(0).unwrap();
        fail(engine, 5);
        check_decode(engine, 0, &seq[..6]);
        fail(engine, 6);
        engine.reset(0).unwrap();
        fill(engine, 0, 0, &seq[..8]).unwrap();
        check_decode(engine, 0, &seq);
    });
}

#[test]
fn position_gaps_are_rejected_for_folded_states() {
    with_toy(1, |engine| {
        let entry = engine.entry(Decode(1)).unwrap();
        let row = Row { slot: 0, pos: 4, id: 1 };
        let e = engine.trace_entry(entry, &[row], &[0], 0, &mut |_, _| Ok(())).unwrap_err();
        assert!(e.to_string() == "position 4 leaves a hole: slot 0 holds 0 tokens");
        let entry = engine.entry(Prefill(4)).unwrap();
        let rows = [0, 1, 0].map(|pos| Row { slot: 0, pos, id: 1 });
        let e = engine.trace_entry(entry, &rows, &[0], 0, &mut |_, _| Ok(())).unwrap_err();
        assert!(e.to_string().starts_with("slot 0 occurs twice"));
        check_decode(engine, 0, &[9]);
    });
}
