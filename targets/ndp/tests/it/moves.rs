//! Experts that move between DIMMs and layouts.

use crate::common::{Bench, EXPERT, GLUS, Random, Weights, bits, small};
use moec_ndp::allocation::{DimmConfig, DramLayout, Move, RowAllocation};
use moec_ndp::emit::{EmitError, Output, emit, transfer};
use moec_ndp::image::Shape;
use moec_ndp::machine::{LINK_GBS, Program, Report};

const SHAPE: Shape = Shape { hidden: 192, inner: 320, glu: GLUS[0], bias: true };

/// Moves the bench's expert to another layout.
fn go(bench: &mut Bench, layout: DramLayout) -> (Move, Report) {
    let moved = bench.allocator.begin(EXPERT, layout).expect("room");
    let stream = transfer(&SHAPE, bench.allocator.dimm_config(), &moved).expect("a stream");
    let program = Program::new(stream).expect("it is verified");
    let report = bench.dimms.run(&program, 0, 0).expect("no fault");
    bench.allocator.settle(EXPERT).expect("it was on its way");
    (moved, report)
}

fn bytes(bench: &Bench, at: &RowAllocation) -> Vec<u8> {
    let mut bytes = vec![0; bench.image.len()];
    bench.dimms.read(at, 0, &mut bytes).expect("it is there");
    bytes
}

#[test]
fn expert_moved_back_and_forth_is_unchanged() {
    let mut bench = Bench::new(&Weights::random(SHAPE, 3), 8, Output::Slots);
    let x = Random(4).numbers(3 * 192, 1.0);
    let (before, _) = bench.run(1, &x, &[1.0; 3], 0);
    let lines = bench.image.len() as u64 / 64;
    for layout in [
        DramLayout::Striped,
        DramLayout::Localized(1),
        DramLayout::Localized(3),
        DramLayout::Localized(0),
        DramLayout::Striped,
        DramLayout::Localized(2),
    ] {
        let (moved, report) = go(&mut bench, layout);
        assert_eq!(bytes(&bench, &moved.to), bench.image, "{layout:?}");
        assert_eq!((report.read, report.written), (lines, lines));
        // The expert is computed at its new location, with the same results.
        if let DramLayout::Localized(dimm) = layout {
            let boxes = bench.allocator.boxes();
            bench.stream =
                emit(&SHAPE, &small(), dimm, moved.to.rows, boxes, Output::Slots).expect("a stream");
            let (after, _) = bench.run(dimm, &x, &[1.0; 3], 0);
            assert_eq!(bits(&after), bits(&before), "{layout:?}");
        }
    }
}

/// Striped and localized lines have different addresses, so bytes are only found through their own layout.
#[test]
fn layouts_use_different_physical_addresses() {
    let mut bench = Bench::new(&Weights::random(SHAPE, 3), 8, Output::Slots);
    let (moved, _) = go(&mut bench, DramLayout::Striped);
    let shares: Vec<Vec<u8>> = (0..4)
        .map(|dimm| {
            let share = RowAllocation { layout: DramLayout::Localized(dimm), rows: moved.to.rows.clone() };
            let mut bytes = vec![0; 64 * 16];
            // Reading fails at lines that were never written, after the share has been read.
            let _ = bench.dimms.read(&share, 0, &mut bytes);
            bytes
        })
        .collect();
    let line = |number: usize| &bench.image[number * 64..][..64];
    // Channels first, then subchannels, then the DIMMs of a channel: lines 0 and 1 are on DIMMs 0 and 2.
    assert_eq!(&shares[0][..64], line(0));
    assert_eq!(&shares[2][..64], line(1));
    assert_eq!(&shares[0][64..128], line(2));
    assert_eq!(&shares[1][..64], line(4));
}

#[test]
fn migration_time_follows_the_link_bandwidth() {
    let mut bench = Bench::new(&Weights::random(SHAPE, 3), 8, Output::Slots);
    let bytes = bench.image.len() as f64;
    let (_, migrated) = go(&mut bench, DramLayout::Localized(0));
    assert_eq!(migrated.linked, bench.image.len() as u64 / 64);
    let ns = bytes / LINK_GBS;
    assert!(migrated.ns >= ns && migrated.ns < ns * 1.01, "{} for {ns}", migrated.ns);
    // A quarter of an expert that is striped over four DIMMs stays in place.
    let (_, striped) = go(&mut bench, DramLayout::Striped);
    assert!(striped.ns >= ns * 0.75 && striped.ns < ns * 0.76, "{} for {ns}", striped.ns);
}

#[test]
fn move_to_the_same_place_has_no_stream() {
    let at = |layout| RowAllocation { layout, rows: 9..12 };
    for layout in [DramLayout::Localized(1), DramLayout::Striped] {
        let moved = Move { expert: EXPERT, from: at(layout), to: at(layout) };
        assert_eq!(transfer(&SHAPE, &DimmConfig::trimoe(), &moved), Err(EmitError::Stays));
    }
}
