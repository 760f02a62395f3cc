//! Formats of quads by patterns: packing and its inverse, and the choice of scales and codes.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used)] // this is a test, though not all of it a test function

use moec_codegen::pack::quantise::Group;
use moec_codegen::pack::{Geometry, Weighting, groups, pack, pack_slice, round_as_packed, unpack_rows};
use moec_ir::plan::Layout;
use moec_ir::types::{E5M3_UNIT, Format, GROUP};
use proptest::prelude::*;
use std::io;
use std::ops::Range;

const FORMATS: [Format; 2] = [Format::Q2, Format::Q2s];

/// All scales but zero, the smallest first.
fn scales() -> impl Iterator<Item = f32> {
    (8..=255_u32).map(|byte| f32::from_bits(byte << 20) * E5M3_UNIT)
}

/// Weighted error of the nearest pattern with the nearest signs, quad by quad, at a scale.
fn least(format: Format, x: &[f32], w: &[f32], scale: f32) -> f64 {
    let known = format.spec().codes.unwrap().patterns;
    let of = |(x, w): (&[f32], &[f32])| {
        let missed = |pattern: &[u8; 4]| -> f64 {
            let each = x.iter().zip(w).zip(pattern);
            each.map(|((x, w), m)| f64::from(*w) * f64::from(x.abs() - f32::from(*m) * scale).powi(2)).sum()
        };
        known.iter().map(missed).fold(f64::INFINITY, f64::min)
    };
    x.chunks(4).zip(w.chunks(4)).map(of).sum()
}

fn error(x: &[f32], found: &[f32], w: &[f32]) -> f64 {
    x.iter().zip(found).zip(w).map(|((x, y), w)| f64::from(*w) * f64::from(x - y).powi(2)).sum()
}

fn numbers(count: usize) -> impl Strategy<Value = Vec<f32>> {
    let sum = prop::collection::vec(-1.0_f32..1.0, 4).prop_map(|x| x.iter().sum::<f32>());
    prop_oneof![
        prop::collection::vec(sum, count),
        prop::collection::vec(-1.0_f32..1.0, count),
        prop::collection::vec(prop_oneof![9 => Just(0.0), 1 => -1.0_f32..1.0], count),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The codes are the nearest ones to the scale, and the scales next to it are not much better: of some numbers
    /// they are not among those that are tried.
    #[test]
    fn codes_and_scales_are_the_best(
        x in numbers(2 * GROUP),
        w in prop_oneof![
            Just(vec![1.0; 2 * GROUP]),
            prop::collection::vec(0.01_f32..1.0, 2 * GROUP),
        ],
        exponent in -3..3_i32,
    ) {
        for format in FORMATS {
            let size = format.group();
            let x: Vec<f32> = x[..size].iter().map(|x| x * 10.0_f32.powi(exponent)).collect();
            let w = &w[..size];
            let found = groups(format, &x, size, Weighting::of(Some(w)));
            prop_assert_eq!(found.len(), size / GROUP);
            let scale = found[0].scale;
            prop_assert!(found.iter().all(|group| group.scale == scale));
            let values: Vec<f32> = found.iter().flat_map(Group::values).collect();
            let ours = error(&x, &values, w);
            if scale == 0.0 {
                prop_assert!(x.iter().all(|x| x.abs() < 1e-4), "{x:?}");
                continue;
            }
            let same = least(format, &x, w, scale);
            prop_assert!(ours <= same * 1.0001 + 1e-12, "{format}: {ours}, not {same}, at {scale}");
            let at = scales().position(|s| s == scale).unwrap();
            for other in [at.wrapping_sub(1), at + 1].into_iter().filter_map(|at| scales().nth(at)) {
                let theirs = least(format, &x, w, other);
                // Of numbers that are mostly zeros the best scale is seldom tried.
                if x.iter().all(|x| *x != 0.0) {
                    prop_assert!(ours <= theirs * 1.3 + 1e-12, "{format}: {theirs} at {other} for {ours}");
                }
            }
        }
    }

    /// Packed numbers come back, in every layout, and are packed to the same bytes again.
    #[test]
    fn bytes_are_those_of_the_numbers(
        values in numbers(997),
        [rows, quads] in [1..40_usize, 1..50_usize],
        nr in prop::sample::select(vec![0, 8, 16, 32]),
    ) {
        let cols = 4 * quads;
        for format in FORMATS {
            let layout = if nr == 0 { Layout::Rows } else { Layout::Panels { nr } };
            let g = Geometry { layout, format, matrices: 1, rows, cols };
            let values: Vec<f32> = values.iter().copied().cycle().take(rows * cols).collect();
            let packed = pack_slice(&g, &values).unwrap();
            let (mut read, mut want) = (vec![0.0; rows * cols], Vec::new());
            unpack_rows(&g, &packed, 0, 0..rows, &mut read).unwrap();
            for row in values.chunks(cols) {
                let all = groups(format, row, cols, Weighting::default());
                want.extend(all.iter().flat_map(Group::values).take(cols));
            }
            prop_assert_eq!(&read, &want);
            let again = |_: usize, at: Range<usize>, out: &mut [f32]| {
                out.copy_from_slice(&read[at.start * cols..at.end * cols]);
                Ok::<(), io::Error>(())
            };
            let stored = Weighting { stored: true, ..Weighting::default() };
            let mut bytes = Vec::new();
            pack(&g, &|_| stored, again, &mut bytes).unwrap();
            let mut same = vec![0.0; rows * cols];
            unpack_rows(&g, &bytes, 0, 0..rows, &mut same).unwrap();
            prop_assert_eq!(&same, &read);
            let mut rounded = values.clone();
            round_as_packed(&g, &packed, 0, 0..rows, false, &mut rounded).unwrap();
            prop_assert_eq!(rounded, read);
        }
    }
}

#[test]
fn numbers_beyond_the_scales() {
    let even = Weighting::default();
    for format in FORMATS {
        for tiny in [0.0, 1e-12, f32::NAN, f32::INFINITY, 1e9] {
            let found = groups(format, &[tiny; 2 * GROUP], 2 * GROUP, even);
            assert!(found.iter().all(|group| *group == Group::ZERO), "{format} of {tiny}");
        }
        let found = groups(format, &[1900.0; 2 * GROUP], 2 * GROUP, even);
        let near = |x: &f32| (x / 1900.0 - 1.0).abs() < 0.7;
        assert!(found.iter().flat_map(Group::values).all(|x| near(&x)), "{found:?}");
    }
}
