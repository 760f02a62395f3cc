//! Rings go back as far as they hold the positions that are seen.

use crate::common;
use crate::toy::{fill, full, message_of, ring, sequence, windowed};
use moec_runtime::{Decoder, Engine, Error, Fallbacks, LogitRows};
use std::sync::Mutex;

#[test]
fn ring_rewinds_within_its_retained_window() {
    let (dir, program) = (common::bundle(), ring());
    let engine = &mut common::open(&program, dir.path(), 2);
    let seq = full(&sequence(60, 5));
    let ids: Vec<u32> = seq.iter().map(|t| t.0).collect();
    let check = |engine: &mut Engine<'_>, slot: u32, from: usize, to: usize| {
        let sink = &mut |pos: usize, l: &[f32]| {
            assert_eq!(l, windowed(&seq[..=pos]), "position {pos}");
            Ok(())
        };
        engine.prefill(slot, from, &ids[from..to], LogitRows::All, sink)
    };
    check(engine, 0, 0, 18).unwrap();
    // Nothing is overwritten yet.
    check(engine, 0, 2, 18).unwrap();
    for at in 18..40 {
        let sink = &mut |_: usize, l: &[f32]| {
            assert_eq!(l, windowed(&seq[..=at]), "position {at}");
            Ok(())
        };
        engine.decode(&[(0, at, ids[at])], sink).unwrap();
    }
    // Positions up to 17 are overwritten, and no row from 22 on sees them.
    let refused = "state `layers.0.k` (ring) cannot rewind slot 0 from 40 tokens to 21: it has overwritten what is seen from \
                   there, 22 is the least | give the sequence again from its beginning";
    assert_eq!(message_of(&engine.rewind(0, 21).unwrap_err()), refused);
    assert_eq!(message_of(&check(engine, 0, 21, 30).unwrap_err()), refused);
    engine.fork(0, 1, 40).unwrap();
    engine.rewind(0, 30).unwrap();
    // Overwritten positions do not come back with a shorter sequence, nor in a copy.
    for slot in [0, 1] {
        assert!(matches!(engine.rewind(slot, 21), Err(Error::State { .. })));
        engine.rewind(slot, 22).unwrap();
        check(engine, slot, 22, 60).unwrap();
    }
    // An empty copy has overwritten nothing.
    engine.fork(0, 2, 0).unwrap();
    check(engine, 2, 0, 18).unwrap();
    check(engine, 2, 2, 18).unwrap();
    engine.rewind(0, 0).unwrap();
    check(engine, 0, 0, 3).unwrap();
    check(engine, 0, 1, 21).unwrap();
}

/// A token that is decoded again is one step back, which every ring supports.
#[test]
fn ring_accepts_the_same_token_twice() {
    let (dir, program) = (common::bundle(), ring());
    let engine = &mut common::open(&program, dir.path(), 2);
    let mut decoder = Decoder::of(&program).unwrap();
    let mut seq = full(&[4]);
    fill(engine, 2, 0, &[4]).unwrap();
    for (pos, id) in sequence(50, 2).into_iter().enumerate() {
        let before = decoder.fallbacks().unwrap().full;
        let seen = Mutex::new(Vec::new());
        decoder.decode(engine, &[(2, pos + 1, id)], &|_, l| *seen.lock().unwrap() = l.to_vec()).unwrap();
        seq.push((id, decoder.fallbacks().unwrap().full == before));
        assert_eq!(seen.into_inner().unwrap(), windowed(&seq), "position {pos}");
    }
    let Fallbacks { tokens, full } = decoder.fallbacks().unwrap();
    assert!((1..tokens).contains(&full), "both happen: {full}");
}
