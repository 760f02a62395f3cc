//! Saved prompts with states and snapshots.

use crate::common;
use crate::toy::{check_decode, fill, ring, sequence, toy};
use moec_runtime::Error;
use moec_runtime::kv::saved::{Saved, save};

/// Every kind of state is restored from a file as it was. A state that cannot go back continues at the file's
/// end.
#[test]
fn saved_states_of_every_kind_continue() {
    let dir = common::bundle();
    let path = dir.path().join("saved");
    for (program, snapshots) in [(toy(0), false), (toy(2), true), (ring(), false)] {
        let seq = sequence(33, 6);
        let mut engine = common::open(&program, dir.path(), 2);
        for end in [10, 20, 30] {
            fill(&mut engine, 1, end - 10, &seq[end - 10..end]).unwrap();
            if snapshots {
                engine.snapshot(1).unwrap();
            }
        }
        save(&engine, 1, &seq[..30], &path).unwrap();
        let mut want = Vec::new();
        for (at, &id) in seq.iter().enumerate().skip(30) {
            engine
                .decode(&[(1, at, id)], &mut |_, l| {
                    want.push(l.to_vec());
                    Ok(())
                })
                .unwrap();
        }
        let mut engine = common::open(&program, dir.path(), 1);
        fill(&mut engine, 2, 0, &sequence(9, 1)).unwrap();
        Saved::open(&path, &program).unwrap().restore(&mut engine, 2).unwrap();
        let mut got = Vec::new();
        for (at, &id) in seq.iter().enumerate().skip(30) {
            engine
                .decode(&[(2, at, id)], &mut |_, l| {
                    got.push(l.to_vec());
                    Ok(())
                })
                .unwrap();
        }
        assert!(got == want && got.len() == 3);
        // Positions that a ring has overwritten are not in the file either; a recurrence goes back to its
        // snapshots.
        assert!(matches!(engine.rewind(2, 3), Err(Error::State { .. })));
        if snapshots {
            assert_eq!([9, 15, 25].map(|most| engine.resumes(2, most)), [0, 10, 20]);
            for to in [20, 10] {
                engine.rewind(2, to).unwrap();
                check_decode(&mut engine, 2, &seq[..=to]);
            }
        }
    }
}

/// A file with impossible positions of snapshots.
#[test]
fn saved_snapshots_are_checked() {
    let (dir, program) = (common::bundle(), toy(2));
    let path = dir.path().join("saved");
    let mut engine = common::open(&program, dir.path(), 1);
    fill(&mut engine, 0, 0, &sequence(4, 1)).unwrap();
    engine.snapshot(0).unwrap();
    fill(&mut engine, 0, 4, &sequence(4, 2)).unwrap();
    save(&engine, 0, &sequence(8, 1), &path).unwrap();
    let whole = std::fs::read(&path).unwrap();
    for (at, to, why) in [
        (60, 8, "number of snapshots"),
        (60, 2, "ascending positions"),
        (60, 0, "bytes in place of"),
        (100, 0, "ascending positions"),
        (100, 8, "ascending positions"),
        (100, 5, "not what was saved"),
    ] {
        let mut changed = whole.clone();
        changed[at] = to;
        std::fs::write(&path, changed).unwrap();
        let e = Saved::open(&path, &program).and_then(|s| s.restore(&mut engine, 1)).unwrap_err();
        assert!(matches!(e, Error::BadFile { .. }) && e.to_string().contains(why), "{e}, not {why}");
        assert!(engine.is_empty(1) && engine.resumes(1, 9) == 0);
    }
}
