//! INT4 with a scale per output channel, and its outliers.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used)] // this is a test, though not all of it a test function

use moec_codegen::pack::channel::{Channel, Width};
use moec_codegen::pack::quantise::LARGEST;
use moec_codegen::pack::{
    Feedback, Geometry, Q4o, Weighting, pack, pack_slice, quantise_q4o, round_as_packed, unpack_rows,
};
use moec_ir::plan::Layout;
use moec_ir::types::{Format, OUTLIERS};
use proptest::prelude::*;
use std::convert::Infallible;
use std::io;
use std::ops::Range;

const FORMATS: [Format; 2] = [Format::Q4o, Format::Q4c];

/// Pseudorandom numbers between −1 and 1.
fn noise(n: usize, seed: u32) -> Vec<f32> {
    let number =
        |i: u32| (i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 8) as f32 / (1 << 23) as f32 - 1.0;
    (0..n as u32).map(|i| number(i.wrapping_mul(i | 1) ^ seed.rotate_left(i % 32))).collect()
}

fn quantised(format: Format, rows: usize, cols: usize, values: &[f32], weighting: Weighting<'_>) -> Q4o {
    let read = |range: Range<usize>, out: &mut [f32]| {
        out.copy_from_slice(&values[range.start * cols..range.end * cols]);
        Ok::<(), Infallible>(())
    };
    let Ok(found) = quantise_q4o([rows, cols], format.outliers(cols), weighting, read);
    found
}

/// Packs one matrix with this weighting.
fn packed(g: &Geometry, values: &[f32], weighting: Weighting<'_>) -> Vec<u8> {
    let read = |_: usize, rows: Range<usize>, out: &mut [f32]| {
        out.copy_from_slice(&values[rows.start * g.cols..rows.end * g.cols]);
        Ok::<(), io::Error>(())
    };
    let mut bytes = Vec::new();
    pack(g, &|_| weighting, read, &mut bytes).unwrap();
    bytes
}

fn unpacked(g: &Geometry, bytes: &[u8]) -> Vec<f32> {
    let mut out = vec![f32::NAN; g.rows * g.cols];
    unpack_rows(g, bytes, 0, 0..g.rows, &mut out).unwrap();
    out
}

/// Second moments of correlated inputs, as one block.
fn correlated(cols: usize) -> Feedback {
    let lower = |i: usize| (0..=i).map(move |j| if i == j { 1.0 } else { 0.7_f64.powi((i - j) as i32) });
    Feedback::new([(0..cols, (0..cols).flat_map(lower).collect())]).unwrap()
}

fn layouts() -> impl Strategy<Value = Layout> {
    prop::sample::select(vec![8_u32, 16, 32])
        .prop_flat_map(|nr| prop_oneof![Just(Layout::Panels { nr }), Just(Layout::GluPanels { nr })])
}

fn missed(exact: &[f32], stored: &[f32]) -> f64 {
    exact.iter().zip(stored).map(|(x, y)| f64::from(x - y).powi(2)).sum()
}

proptest! {
    /// The CPU's panels represent the same numbers as plain rows, with any weighting of errors.
    #[test]
    fn panels_hold_the_same_q4o_numbers_as_plain_rows(
        layout in layouts(),
        format in prop::sample::select(FORMATS.to_vec()),
        rows in 1..60_usize,
        cols in 1..150_usize,
        seed in any::<u32>(),
        weighted in 0..3,
    ) {
        let rows = rows * 2;
        let values = noise(rows * cols, seed);
        let (importance, feedback) = (noise(cols, !seed), correlated(cols));
        let importance: Vec<f32> = importance.iter().map(|x| x.abs()).collect();
        let weighting = Weighting {
            feedback: (weighted == 2).then_some(&feedback),
            ..Weighting::of((weighted > 0).then_some(importance.as_slice()))
        };
        let g = Geometry { layout, format, matrices: 1, rows, cols };
        let bytes = packed(&g, &values, weighting);
        let one = quantised(format, rows, cols, &values, weighting);
        prop_assert_eq!(unpacked(&g, &bytes), one.dequantise());
        let wide = one.outliers.len();
        prop_assert_eq!(wide, format.outliers(cols));
        prop_assert_eq!([one.int4.len(), one.int8.len()], [rows * cols, rows * wide]);
        prop_assert!(one.outliers.iter().all(|&c| one.int4.iter().skip(c as usize).step_by(cols).all(|q| *q == 0)));
        prop_assert!(one.int4.iter().all(|q| (-8..=7).contains(q)));
        prop_assert!(one.int8.iter().all(|q| *q >= -127));
        let scales = one.scale.iter().chain(&one.int8_scale);
        prop_assert!(scales.copied().all(|s| s > 0.0 && s.to_bits().trailing_zeros() >= 8));
        // Rounding the checkpoint's numbers to the packed codes gives the same numbers.
        let mut again = values.clone();
        round_as_packed(&g, &bytes, 0, 0..rows, weighted == 2, &mut again).unwrap();
        prop_assert_eq!(again, one.dequantise());
    }

    /// A host build repacks weights from a bundle into panels of another width.
    #[test]
    fn repacking_unpacked_numbers_keeps_them(
        layouts in [layouts(), layouts()],
        rows in 1..40_usize,
        cols in 1..150_usize,
        seed in any::<u32>(),
    ) {
        let [from, to] = layouts.map(|layout| Geometry { layout, format: Format::Q4o, matrices: 1, rows: 2 * rows, cols });
        let first = unpacked(&from, &pack_slice(&from, &noise(2 * rows * cols, seed)).unwrap());
        let stored = Weighting { stored: true, ..Weighting::default() };
        prop_assert_eq!(unpacked(&to, &packed(&to, &first, stored)), first);
    }

    /// Any bytes in a bundle: no panic.
    #[test]
    fn unpacking_damaged_q4o_bytes_does_not_panic(
        layout in layouts(),
        bytes in prop::collection::vec(any::<u8>(), 0..6000),
        fed in any::<bool>(),
    ) {
        let g = Geometry { layout, format: Format::Q4o, matrices: 1, rows: 24, cols: 80 };
        let mut out = vec![1.0; g.rows * g.cols];
        let whole = bytes.len() as u64 >= g.bytes();
        let read = unpack_rows(&g, &bytes, 0, 0..g.rows, &mut out);
        prop_assert!(read.is_ok() || !whole);
        let _ = round_as_packed(&g, &bytes, 0, 0..g.rows, fed, &mut out);
    }
}

#[test]
fn outliers_are_the_columns_that_contribute_most() {
    let (rows, cols) = (24, 4 * OUTLIERS);
    let mut values = noise(rows * cols, 3);
    // Each of these columns has one number that is far from all others.
    let far = [7, 8, 30, 63];
    for c in far {
        values[c % rows * cols + c] = 40.0;
    }
    let [with, without] = FORMATS.map(|format| quantised(format, rows, cols, &values, Weighting::default()));
    assert_eq!(with.outliers, far.map(|c| c as u32));
    assert!(without.outliers.is_empty() && without.int8.is_empty());
    assert!(missed(&values, &with.dequantise()) < 0.5 * missed(&values, &without.dequantise()));
    assert!(with.bits() > without.bits() && with.bits() < 5.0);
    // Among equal columns, those with the largest inputs.
    let importance: Vec<f32> = (0..cols).map(|c| if c % 40 == 2 { 100.0 } else { 1.0 }).collect();
    let by = quantised(Format::Q4o, rows, cols, &noise(rows * cols, 3), Weighting::of(Some(&importance)));
    assert_eq!(by.outliers, [2, 42, 82, 122]);
}

#[test]
fn largest_number_is_clipped_if_the_error_falls() {
    let mut row = noise(512, 9);
    row[17] = 3.0;
    let plain = Channel::with_scale(Width::Int4, &row, 3.0 / 7.0);
    let found = Channel::nearest(Width::Int4, &row, None);
    assert!(found.scale < plain.scale && found.error(&row, None) < 0.7 * plain.error(&row, None));
    // If that number is important, it is not clipped.
    let importance: Vec<f32> = (0..512).map(|i| if i == 17 { 1e6 } else { 1.0 }).collect();
    let found = Channel::nearest(Width::Int4, &row, Some(&importance));
    assert!((f32::from(found.codes[17]) * found.scale - 3.0).abs() < 0.01);
}

#[test]
fn feedback_loses_less_of_the_outputs() {
    let (rows, cols) = (32, 64);
    let (values, feedback) = (noise(rows * cols, 5), correlated(64));
    let lost = |weighting| {
        let stored = quantised(Format::Q4o, rows, cols, &values, weighting).dequantise();
        feedback.energy(&values.iter().zip(stored).map(|(x, y)| x - y).collect::<Vec<_>>())
    };
    let fed = Weighting { feedback: Some(&feedback), ..Weighting::default() };
    assert!(lost(fed) < 0.7 * lost(Weighting::default()), "{} {}", lost(fed), lost(Weighting::default()));
}

#[test]
fn zeros_and_the_ends_of_the_range() {
    for width in [Width::Int4, Width::Int8] {
        let zeros = Channel::nearest(width, &[0.0, -0.0, f32::from_bits(1)], None);
        assert_eq!((zeros.scale, zeros.codes), (1.0, vec![0; 3]));
        let ends = [LARGEST, -LARGEST, LARGEST];
        let stored = Channel::nearest(width, &ends, None);
        assert!(stored.values().zip(ends).all(|(s, x)| (s / x - 1.0).abs() < 0.1), "{stored:?}");
        // Weights that are all 0 count as equal weights.
        let x = noise(40, 1);
        assert_eq!(Channel::nearest(width, &x, Some(&[0.0; 40])), Channel::nearest(width, &x, None));
        assert_eq!(Channel::recover(width, &x), None);
    }
    let empty = quantised(Format::Q4o, 0, 4, &[], Weighting::default());
    assert!(empty.dequantise().is_empty() && empty.bits() == 0.0);
}
