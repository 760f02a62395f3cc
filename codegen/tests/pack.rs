//! Packing and its inverse.
#![allow(clippy::unwrap_used)] // this is a test, though not all of it a test function

use moec_codegen::pack::{Geometry, pack, pack_slice, packed_bytes, round, unpack_rows};
use moec_ir::plan::{Layout, Segment};
use moec_ir::types::Format;
use proptest::prelude::*;
use std::io;
use std::ops::Range;

fn geometries() -> impl Strategy<Value = Geometry> {
    let layout = prop_oneof![
        Just(Layout::Rows),
        prop::sample::select(vec![8, 16, 32]).prop_map(|nr| Layout::Panels { nr }),
        prop::sample::select(vec![8, 16, 32]).prop_map(|nr| Layout::GluPanels { nr }),
    ];
    let format = prop::sample::select(Format::ALL.to_vec());
    (layout, format, 1..4_usize, 1..70_usize, 1..40_usize).prop_map(|(layout, format, lead, rows, cols)| {
        let rows = if matches!(layout, Layout::GluPanels { .. }) { rows * 2 } else { rows };
        Geometry { layout, format, lead, rows, cols }
    })
}

proptest! {
    #[test]
    fn unpacking_gives_the_rounded_numbers(
        g in geometries(),
        values in prop::collection::vec(-1e5_f32..1e5, 3 * 140 * 40),
    ) {
        let values = &values[..g.lead * g.rows * g.cols];
        let packed = pack_slice(&g, values).unwrap();
        prop_assert_eq!(packed.len() as u64, packed_bytes(g.layout, g.format, g.lead, g.rows, g.cols));
        let segment = Segment {
            name: String::new(),
            file: 0,
            offset: 0,
            bytes: 0,
            shape: vec![g.lead as u32, g.rows as u32, g.cols as u32],
            format: g.format,
            layout: g.layout,
        };
        prop_assert_eq!(segment.packed_bytes(), Some(packed.len() as u64));
        for lead in 0..g.lead {
            let mut out = vec![f32::NAN; g.rows * g.cols];
            unpack_rows(&g, &packed, lead, 0..g.rows, &mut out).unwrap();
            let want: Vec<f32> = values[lead * g.rows * g.cols..][..g.rows * g.cols]
                .iter()
                .map(|&x| round(g.format, x))
                .collect();
            prop_assert_eq!(out, want);
        }
    }
}

#[test]
fn panels_hold_columns_of_consecutive_rows_and_zeros() {
    let g = Geometry { layout: Layout::Panels { nr: 4 }, format: Format::F32, lead: 1, rows: 5, cols: 2 };
    // Row r holds 10 r + 1 and 10 r + 2.
    let rows: Vec<f32> = (0..5).flat_map(|r| [10.0 * r as f32 + 1.0, 10.0 * r as f32 + 2.0]).collect();
    let want = [1., 11., 21., 31., 2., 12., 22., 32., 41., 0., 0., 0., 42., 0., 0., 0.];
    let bytes: Vec<u8> = want.iter().flat_map(|x: &f32| x.to_le_bytes()).collect();
    assert_eq!(pack_slice(&g, &rows).unwrap(), bytes);
}

#[test]
fn gated_panels_hold_gate_then_up() {
    let g = Geometry { layout: Layout::GluPanels { nr: 4 }, format: Format::F32, lead: 1, rows: 6, cols: 1 };
    let want = [0., 1., 3., 4., 2., 0., 5., 0.];
    let bytes: Vec<u8> = want.iter().flat_map(|x: &f32| x.to_le_bytes()).collect();
    assert_eq!(pack_slice(&g, &[0., 1., 2., 3., 4., 5.]).unwrap(), bytes);
}

#[test]
fn rounding_goes_to_even() {
    // 1 + 2^-8 lies between 1 and 1 + 2^-7; 1 + 3 · 2^-8 between that and 1 + 2^-6.
    assert_eq!(round(Format::Bf16, 1.0 + 1.0 / 256.0), 1.0);
    assert_eq!(round(Format::Bf16, 1.0 + 3.0 / 256.0), 1.0 + 4.0 / 256.0);
    assert_eq!(round(Format::F16, 2049.0), 2048.0);
    assert_eq!(round(Format::F16, 2051.0), 2052.0);
}

#[test]
fn at_most_one_panel_is_asked_for_at_a_time() {
    let g =
        Geometry { layout: Layout::GluPanels { nr: 16 }, format: Format::Bf16, lead: 2, rows: 100, cols: 3 };
    let mut largest = 0;
    let read = |_: usize, rows: Range<usize>, out: &mut [f32]| {
        largest = largest.max(rows.len());
        out.fill(1.0);
        Ok::<(), io::Error>(())
    };
    let written = pack(&g, read, &mut io::sink()).unwrap();
    assert_eq!((written, largest), (g.bytes(), 8));
}

#[test]
fn errors_of_the_source_come_back() {
    let g = Geometry { layout: Layout::Rows, format: Format::F32, lead: 1, rows: 2, cols: 2 };
    let failed = pack(&g, |_, _, _: &mut [f32]| Err(io::Error::other("unreadable")), &mut io::sink());
    assert_eq!(failed.unwrap_err().to_string(), "unreadable");
    let mut out = [0.0; 4];
    assert!(unpack_rows(&g, &[0; 15], 0, 0..2, &mut out).is_err());
    assert!(unpack_rows(&g, &[0; 16], 1, 0..2, &mut out).is_err());
    assert!(unpack_rows(&g, &[0; 16], 0, 1..3, &mut out).is_err());
}
