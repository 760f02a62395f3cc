//! Results of the engine depend only on the sequence, not on chunks, slots, batches or threads.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "what fails here fails the test")]

mod common;

use common::*;
use moec_ir::EntryKind::{Decode, Prefill};
use moec_runtime::{Engine, Error, Limit, LogitRows, Options, Row};
use std::sync::atomic::{AtomicBool, Ordering};

fn sequence(n: usize, seed: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * i * 7 + i * 31 + seed * 53) % 256) as u32).collect()
}

/// Checks all logits of a prefill against the reference.
fn check_prefill(engine: &mut Engine<'_>, slot: u32, start: usize, whole: &[u32], logit_rows: LogitRows) {
    let mut seen = Vec::new();
    engine
        .prefill(slot, start, &whole[start..], logit_rows, &mut |pos, logits| {
            assert_eq!(logits, reference(&whole[..=pos]), "position {pos}");
            seen.push(pos);
            Ok(())
        })
        .unwrap();
    let expected: Vec<usize> = match logit_rows {
        LogitRows::None => vec![],
        LogitRows::Last => vec![whole.len() - 1],
        LogitRows::All => (start..whole.len()).collect(),
    };
    assert_eq!(seen, expected);
    assert_eq!(engine.len(slot), whole.len());
}

#[test]
fn logits_are_right_for_any_length_and_threads() {
    for threads in [1, 2, 3] {
        with_engine(&ENTRIES, threads, |engine| {
            assert_eq!(engine.threads(), threads);
            for n in [1, 2, 3, 4, 5, 15, 16, 17, 20, 33, 48, CTX] {
                for logit_rows in [LogitRows::None, LogitRows::Last, LogitRows::All] {
                    check_prefill(engine, (n % SLOTS) as u32, 0, &sequence(n, n), logit_rows);
                }
            }
        });
    }
}

#[test]
fn logits_are_right_for_any_entry_points() {
    let sets: [&[_]; 4] = [
        &[(Prefill(1), 1)],
        &[(Prefill(7), 1)],
        &[(Prefill(64), 64)],
        &[(Prefill(2), 2), (Prefill(8), 8), (Prefill(32), 3)],
    ];
    for set in sets {
        with_engine(set, 2, |engine| {
            for n in [1, 7, 8, 9, 30] {
                check_prefill(engine, 0, 0, &sequence(n, 1), LogitRows::All);
                check_prefill(engine, 1, 0, &sequence(n, 2), LogitRows::Last);
            }
        });
    }
}

#[test]
fn sequences_continue_without_mixing() {
    with_engine(&ENTRIES, 2, |engine| {
        let seqs: Vec<Vec<u32>> = (0..SLOTS).map(|s| sequence(40, s)).collect();
        for (slot, seq) in seqs.iter().enumerate() {
            check_prefill(engine, slot as u32, 0, &seq[..9 + slot], LogitRows::Last);
        }
        // A second prefill continues the sequence; then all three are decoded in batches of two and one.
        check_prefill(engine, 1, 10, &seqs[1][..23], LogitRows::All);
        for step in 0..5 {
            let lens: Vec<usize> = (0..SLOTS).map(|s| engine.len(s as u32)).collect();
            let batch: Vec<_> = (0..SLOTS).map(|s| (s as u32, lens[s], seqs[s][lens[s]])).collect();
            let mut seen = Vec::new();
            engine
                .decode(&batch, &mut |i, logits| {
                    assert_eq!(logits, reference(&seqs[i][..=lens[i]]), "step {step} slot {i}");
                    seen.push(i);
                    Ok(())
                })
                .unwrap();
            assert_eq!(seen, [0, 1, 2]);
        }
        // Goes back, and continues from there.
        let other_end = [&seqs[2][..4], &seqs[1][..6]].concat();
        check_prefill(engine, 2, 4, &other_end, LogitRows::All);
        engine.reset(2).unwrap();
        assert!(engine.is_empty(2));
        check_prefill(engine, 2, 0, &seqs[0], LogitRows::Last);
    });
}

#[test]
fn invalid_requests_are_rejected_before_any_work() {
    with_engine(&ENTRIES, 2, |engine| {
        let mut sink = |_: usize, _: &[f32]| -> moec_runtime::Result<()> { panic!("no logits expected") };
        let long = sequence(CTX + 1, 0);
        let e = engine.prefill(0, 0, &long, LogitRows::All, &mut sink).unwrap_err();
        assert_eq!(e.to_string(), "the prompt has 65 tokens, but the context holds 64");
        assert!(e.hint().is_some());
        let e = engine.prefill(0, 0, &[1, 2, V as u32], LogitRows::All, &mut sink).unwrap_err();
        assert_eq!(e.to_string(), "token id 260 is outside of the vocabulary of 260 tokens");
        let e = engine.prefill(SLOTS as u32, 0, &[1], LogitRows::All, &mut sink).unwrap_err();
        assert!(matches!(&e, Error::Request { what, .. } if what.starts_with("slot 3 does not exist")));
        assert!(matches!(engine.prefill(0, 0, &[], LogitRows::All, &mut sink), Err(Error::Usage { .. })));
        assert!(matches!(engine.prefill(0, 1, &[1], LogitRows::All, &mut sink), Err(Error::State { .. })));
        assert!(matches!(engine.decode(&[(0, 5, 1)], &mut sink), Err(Error::State { .. })));
        assert!(matches!(engine.decode(&[(0, 0, 1), (0, 0, 2)], &mut sink), Err(Error::Request { .. })));
        assert!(matches!(engine.decode(&[(1, 0, 999)], &mut sink), Err(Error::Usage { .. })));
        assert!(matches!(
            engine.decode(&[(1, usize::MAX, 9)], &mut sink),
            Err(Error::Limit { limit: Limit::Context, .. })
        ));
        assert!(engine.is_empty(0) && engine.is_empty(1));
        engine.prefill(0, 0, &long[..CTX], LogitRows::None, &mut sink).unwrap();
        let e = engine.decode(&[(0, CTX, 1)], &mut sink).unwrap_err();
        assert_eq!(e.to_string(), "the sequence would have 65 tokens, but the context holds 64");
    });
    with_engine(&[(Prefill(2), 2)], 1, |engine| {
        assert!(
            matches!(engine.decode(&[(0, 0, 1)], &mut |_, _| Ok(())), Err(Error::Bundle(why)) if why.contains("decode"))
        );
    });
}

#[test]
fn logits_sink_can_end_the_call() {
    with_engine(&ENTRIES, 2, |engine| {
        let mut rows = 0;
        let e = engine.prefill(0, 0, &sequence(30, 0), LogitRows::All, &mut |_, _| {
            rows += 1;
            if rows == 3 { Err(Error::request("enough")) } else { Ok(()) }
        });
        assert!(matches!(e, Err(Error::Request { .. })));
        assert_eq!(rows, 3);
    });
}

#[test]
fn a_stop_flag_interrupts() {
    static STOP: AtomicBool = AtomicBool::new(false);
    let dir = bundle();
    let p = &program(&ENTRIES);
    let options = Options { threads: Some(2), stop: Some(&STOP), ..Options::default() };
    let mut engine = Engine::open(p, dir.path(), options).unwrap();
    let result = engine.prefill(0, 0, &sequence(30, 0), LogitRows::All, &mut |_, _| {
        STOP.store(true, Ordering::Relaxed);
        Ok(())
    });
    assert!(matches!(result, Err(Error::Interrupted)));
}

#[test]
fn many_calls_on_more_threads_than_cores() {
    with_engine(&[(Prefill(8), 8), (Decode(3), 3)], 5, |engine| {
        let seq = sequence(CTX, 5);
        for _ in 0..20 {
            engine.reset(0).unwrap();
            check_prefill(engine, 0, 0, &seq[..3], LogitRows::All);
            for pos in 3..30 {
                engine
                    .decode(&[(0, pos, seq[pos])], &mut |_, logits| {
                        assert_eq!(logits, reference(&seq[..=pos]));
                        Ok(())
                    })
                    .unwrap();
            }
        }
    });
}

#[test]
fn timed_steps_compute_the_same_as_a_call() {
    for threads in [1, 3] {
        with_engine(&ENTRIES, threads, |engine| {
            let entry = engine.entry(Prefill(4)).unwrap();
            let rows: Vec<Row> = [(0, 10), (1, 20)].map(|(pos, id)| Row { slot: 1, pos, id }).to_vec();
            let times = engine.time_steps(entry, &rows, &[1], 2).unwrap();
            assert_eq!(times.len(), engine.program().entries[entry].steps.len());
            engine
                .decode(&[(1, 2, 30)], &mut |_, logits| {
                    assert_eq!(logits, reference(&[10, 20, 30]));
                    Ok(())
                })
                .unwrap();
            assert!(engine.time_steps(99, &rows, &[], 2).is_err());
        });
    }
}

#[test]
fn a_trace_shows_every_step() {
    with_engine(&ENTRIES, 2, |engine| {
        let entry = engine.entry(Prefill(4)).unwrap();
        let rows: Vec<Row> = [(0, 10), (1, 20)].map(|(pos, id)| Row { slot: 1, pos, id }).to_vec();
        let mut moments = Vec::new();
        let mut logits = Vec::new();
        engine
            .trace_entry(entry, &rows, &[1], 2, &mut |moment, view| {
                moments.push((view.index(), moment));
                assert_eq!((view.n(), view.m(), view.kind()), (2, 1, Prefill(4)));
                assert_eq!(view.buffer(1).unwrap()[..16], [0i32, 1, -1, -1].map(i32::to_le_bytes).concat());
                assert_eq!(view.segment(1).unwrap().len(), E * 4);
                assert_eq!(view.state(0).unwrap().len(), SLOTS * CTX * 4);
                assert!(view.buffer(99).is_none() && view.state(1).is_none() && view.segment(9).is_none());
                logits = view.buffer(8).unwrap()[..V * 4].to_vec();
                Ok(())
            })
            .unwrap();
        assert_eq!(moments.len(), 14);
        let expected: Vec<u8> = reference(&[10, 20]).iter().flat_map(|x| x.to_le_bytes()).collect();
        assert_eq!(logits, expected);
        // The cache is as after a prefill.
        engine
            .decode(&[(1, 2, 30)], &mut |_, logits| {
                assert_eq!(logits, reference(&[10, 20, 30]));
                Ok(())
            })
            .unwrap();
        let too_many = [Row { slot: 0, pos: 0, id: 0 }; 5];
        assert!(engine.trace_entry(entry, &too_many, &[], 5, &mut |_, _| Ok(())).is_err());
        assert!(engine.trace_entry(99, &rows, &[], 2, &mut |_, _| Ok(())).is_err());
    });
}
