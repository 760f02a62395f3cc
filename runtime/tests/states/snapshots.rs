//! Snapshots: a sequence goes back to them exactly, also in another slot.

use crate::common;
use crate::toy::{GO_BACK, check_decode, fill, message_of, resolve, sequence, toy, with_toy};
use moec_runtime::{Decoder, Error, Program};

#[test]
fn snapshots_restore_a_sequence_exactly() {
    with_toy(2, |engine| {
        let seq = sequence(20, 3);
        fill(engine, 0, 0, &seq[..3]).unwrap();
        assert_eq!(engine.snapshot(0).unwrap(), 3);
        fill(engine, 0, 3, &seq[3..6]).unwrap();
        assert_eq!(engine.snapshot(0).unwrap(), 6);
        // Other slots have snapshots of their own.
        fill(engine, 2, 0, &sequence(6, 9)).unwrap();
        assert_eq!(engine.snapshot(2).unwrap(), 6);
        check_decode(engine, 0, &seq[..7]);
        fill(engine, 0, 7, &seq[7..9]).unwrap();
        engine.rewind(0, 6).unwrap();
        let other = [&seq[..6], &[200, 100]].concat();
        check_decode(engine, 0, &other[..7]);
        check_decode(engine, 0, &other);
        // A snapshot can be used again, and a prompt goes back to it as `rewind` does.
        fill(engine, 0, 6, &seq[6..9]).unwrap();
        check_decode(engine, 0, &seq[..10]);
        engine.rewind(0, 3).unwrap();
        // Snapshots of later positions belong to the old sequence now.
        let third = [&seq[..3], &sequence(8, 5)].concat();
        fill(engine, 0, 3, &third[3..10]).unwrap();
        let e = engine.rewind(0, 6).unwrap_err();
        assert_eq!(
            message_of(&e),
            format!(
                "state `layers.0.s` (recurrent) cannot rewind slot 0 from 10 tokens to 6: the snapshot is at 3 | {GO_BACK}"
            )
        );
        check_decode(engine, 0, &third);
        engine.rewind(2, 6).unwrap();
        check_decode(engine, 2, &[&sequence(6, 9)[..], &[4]].concat());
    });
}

#[test]
fn earliest_equal_snapshot_is_evicted_first() {
    // Room for three snapshots, of any slots.
    with_toy(1, |engine| {
        let seq = sequence(12, 4);
        for to in [2, 4, 6, 8] {
            fill(engine, 0, to - 2, &seq[to - 2..to]).unwrap();
            // The same position twice takes no room.
            assert_eq!((engine.snapshot(0).unwrap(), engine.snapshot(0).unwrap()), (to, to));
        }
        check_decode(engine, 0, &seq[..9]);
        let e = engine.rewind(0, 2).unwrap_err();
        let expected = "state `layers.0.s` (recurrent) cannot rewind slot 0 from 9 tokens to 2: snapshots are at [4, 6, 8]";
        assert_eq!(e.to_string(), expected);
        for to in [6, 4] {
            assert_eq!((engine.resumes(0, to + 1), engine.resumes(0, 3)), (to, 0));
            engine.rewind(0, to).unwrap();
            check_decode(engine, 0, &seq[..=to]);
        }
        assert!(
            matches!(engine.rewind(0, 9), Err(Error::State { what, .. }) if what.ends_with("slot 0 holds 5 tokens"))
        );
        for e in [engine.rewind(3, 0), engine.snapshot(3).map(|_| ())] {
            assert!(
                matches!(e, Err(Error::Request { what, .. }) if what.starts_with("slot 3 does not exist"))
            );
        }
    });
}

#[test]
fn forked_state_diverges_independently() {
    with_toy(1, |engine| {
        let seq = sequence(8, 6);
        fill(engine, 0, 0, &seq).unwrap();
        fill(engine, 1, 0, &sequence(8, 7)).unwrap();
        engine.snapshot(1).unwrap();
        engine.fork(0, 1, 8).unwrap();
        engine.fork(0, 0, 8).unwrap();
        let [a, b] = [5, 250].map(|id| [&seq[..], &[id]].concat());
        check_decode(engine, 0, &a);
        check_decode(engine, 1, &b);
        // The snapshot was of the slot's earlier sequence.
        let e = engine.rewind(1, 8).unwrap_err();
        assert!(e.to_string().ends_with("from 9 tokens to 8: there is no snapshot"), "{e}");
        // A fork of a prefix, while the original sequence continues. Both share the snapshot until neither
        // uses it.
        engine.snapshot(0).unwrap();
        let long = [&a[..], &[77, 78]].concat();
        fill(engine, 0, 9, &[77, 78]).unwrap();
        engine.fork(0, 1, 9).unwrap();
        engine.fork(1, 2, 9).unwrap();
        for (slot, id) in [(0, 3), (1, 4), (2, 5)] {
            let own = if slot == 0 { &long } else { &a };
            check_decode(engine, slot, &[&own[..], &[id]].concat());
        }
        engine.reset(0).unwrap();
        for slot in [1, 2] {
            engine.rewind(slot, 9).unwrap();
            check_decode(engine, slot, &[&a[..], &[6]].concat());
        }
        assert!(matches!(engine.fork(1, 0, 5), Err(Error::State { .. })));
        assert!(
            matches!(engine.fork(1, 0, 11), Err(Error::State { what, .. }) if what.contains("leaves a hole"))
        );
    });
}

/// A snapshot of caches is only a length.
#[test]
fn caches_rewind_by_truncation() {
    common::with_engine(&common::BIG_LITTLE, 2, |engine| {
        let seq = sequence(12, 1);
        fill(engine, 0, 0, &seq).unwrap();
        assert_eq!(engine.snapshot(0).unwrap(), 12);
        for to in [7, 3, 0] {
            engine.rewind(0, to).unwrap();
            assert_eq!(engine.len(0), to);
            let sink = &mut |_: usize, l: &[f32]| {
                assert_eq!(l, common::reference(&seq[..=to]));
                Ok(())
            };
            engine.decode(&[(0, to, seq[to])], sink).unwrap();
        }
        assert!(
            matches!(engine.rewind(0, 2), Err(Error::State { what, .. }) if what.ends_with("slot 0 holds 1 tokens"))
        );
    });
}

/// States with different room for snapshots go back as far as the one with the least; the error names it.
#[test]
fn state_with_the_least_snapshot_room_is_named() {
    let dir = common::bundle();
    let mut plan = (*toy(2)).clone();
    plan.states[1].snapshots = 0;
    assert_eq!((plan.snapshots_of_slot(), plan.snapshot_distance()), (0, None));
    let program = Program::new(plan, &resolve).unwrap();
    let e = Decoder::of(&program).unwrap_err();
    assert_eq!(
        e.to_string(),
        "state `layers.0.conv` (convolution) cannot keep a snapshot: the plan has no room for one"
    );
    let mut plan = (*toy(2)).clone();
    plan.states[1].snapshots = 1;
    let program = Program::new(plan, &resolve).unwrap();
    let mut engine = common::open(&program, dir.path(), 1);
    let seq = sequence(6, 3);
    for to in [2, 4] {
        fill(&mut engine, 0, to - 2, &seq[to - 2..to]).unwrap();
        engine.snapshot(0).unwrap();
    }
    check_decode(&mut engine, 0, &seq[..5]);
    let e = engine.rewind(0, 3).unwrap_err();
    assert!(
        e.to_string().starts_with("state `layers.0.conv` (convolution) cannot rewind slot 0 from 5"),
        "{e}"
    );
    engine.rewind(0, 4).unwrap();
    check_decode(&mut engine, 0, &seq[..5]);
}
