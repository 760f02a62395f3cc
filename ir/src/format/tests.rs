//! Sizes and facts of formats.

use super::*;

#[test]
fn every_format_has_the_row_of_its_variant() {
    assert_eq!(ROWS.len(), Format::ALL.len());
    for (i, row) in ROWS.iter().enumerate() {
        assert_eq!(row.format as usize, i, "{}", row.name);
        assert!(Format::ALL.contains(&row.format) && Format::parse(row.name) == Some(row.format));
        assert!(
            !row.scale.is_quantised() && row.codes.is_some() == (row.scale != row.format),
            "{}",
            row.name
        );
    }
}

/// Every bit of every quad has a position of its own, in as many words as a code has bits.
#[test]
fn planes_hold_each_bit_once() {
    for bits in 1..=8 {
        let mut taken = vec![0_u32; bits];
        for plane in Codes::planes(bits) {
            for quad in 0..GROUP / 4 {
                let (word, shift) = plane.of_quad(quad);
                let mask = ((1 << plane.width) - 1) << shift;
                assert_eq!(taken[word] & mask, 0, "{bits} bits, quad {quad}");
                taken[word] |= mask;
            }
        }
        assert!(taken.iter().all(|word| *word == 0xff), "{bits} bits");
        let shifts: Vec<_> = Codes::planes(bits).map(|p| (p.shift, p.width)).collect();
        assert_eq!(shifts.iter().map(|s| s.1).sum::<usize>(), bits);
        assert!(shifts.windows(2).all(|s| s[0].0 + s[0].1 == s[1].0), "{shifts:?}");
    }
    let three: Vec<Plane> = Codes::planes(3).collect();
    assert_eq!(three, [Plane { width: 2, shift: 0, first: 0 }, Plane { width: 1, shift: 2, first: 2 }]);
}

/// A grid has a code for every index, and is within the range of codes; those that codes are rounded to ascend.
#[test]
fn grids_have_a_code_for_every_index() {
    for format in Format::ALL.into_iter().filter(|format| !format.grid().is_empty()) {
        let (spec, grid) = (format.spec(), format.grid());
        let codes = spec.codes.unwrap();
        assert_eq!(grid.len(), 1 << spec.bits, "{format}");
        assert_eq!(
            [grid.iter().min(), grid.iter().max()],
            [Some(&codes.lowest), Some(&codes.highest)],
            "{format}"
        );
        assert!(format.is_published() || grid.is_sorted_by(|a, b| a < b), "{format}");
    }
}

/// Indices of patterns have four bits, and a fifth where a byte beside the scale has it. No magnitude is
/// zero: signs would be lost.
#[test]
fn patterns_fit_their_indices() {
    for format in Format::ALL {
        let Some(codes) = format.spec().codes else { continue };
        assert_eq!(codes.patterns.is_empty(), !format.is_by_patterns(), "{format}");
        if format.is_by_patterns() {
            assert_eq!(codes.patterns.len(), 8 << format.scale_bytes(), "{format}");
            assert!(codes.patterns.iter().flatten().all(|m| (1..=TOP).contains(m)), "{format}");
            let mut known = codes.patterns.to_vec();
            known.sort_unstable();
            known.dedup();
            assert_eq!(known.len(), codes.patterns.len(), "{format}");
        }
    }
}

/// Bytes and errors of formats, by their definitions.
#[test]
fn format_sizes_and_errors_match_their_definitions() {
    let sizes = |f: Format| (f.row_bytes(33), f.group_bytes(), f.bits(), f.stored_bytes());
    assert_eq!(sizes(Format::F32), (132, None, 32.0, 4));
    assert_eq!(sizes(Format::Bf16), (66, None, 16.0, 2));
    assert_eq!(sizes(Format::Q8), (68, Some(34), 8.5, 0));
    assert_eq!(sizes(Format::Q8h), (68, Some(34), 8.5, 3));
    assert_eq!(sizes(Format::Q4), (36, Some(18), 4.5, 0));
    assert_eq!(sizes(Format::Mxfp4), (36, Some(18), 4.5, 3));
    assert_eq!(sizes(Format::Q6), (52, Some(26), 6.5, 0));
    assert_eq!(sizes(Format::Q5), (44, Some(22), 5.5, 0));
    assert_eq!(sizes(Format::Q4n), (36, Some(18), 4.5, 0));
    assert_eq!(sizes(Format::Q3), (28, Some(14), 3.5, 0));
    assert_eq!(sizes(Format::Q2), (20, Some(10), 2.5, 0));
    assert_eq!(sizes(Format::Q2s), (17, None, 2.125, 0));
    assert_eq!(Format::Q2s.row_bytes(65), 26);
    assert_eq!(sizes(Format::Q4k), (40, None, 4.625, 7));
    assert_eq!(sizes(Format::Q5k), (48, None, 5.625, 7));
    assert_eq!(sizes(Format::Q6k), (54, None, 6.5625, 7));
    assert_eq!(sizes(Format::Q3k), (30, None, 3.5625, 7));
    assert_eq!(sizes(Format::Q2k), (24, None, 2.625, 7));
    assert_eq!(sizes(Format::Iq4xs), (38, None, 4.5625, 7));
    assert_eq!(sizes(Format::Q4o), (41, None, 4.25, 0));
    assert_eq!(sizes(Format::Q4c), (36, None, 4.0, 0));
    assert_eq!([Format::Q4o, Format::Q4c].map(|f| f.outliers(65)), [2, 0]);
    let root = 32.0_f64.sqrt();
    assert_eq!(Format::Q8h.distance(), 0.5 / 127.0 * root);
    assert_eq!(Format::Q4c.distance(), 0.5 / 7.0 * root);
    // Half of the widest step, between 4 and 6.
    assert_eq!(Format::Mxfp4.distance(), 1.0 / 6.0 * root);
    // Between 34 and 57.
    assert_eq!(Format::Q3.distance(), 11.5 / 57.0 * root);
    assert_eq!([Format::F32, Format::Bf16].map(Format::distance), [0.0, 2.0_f64.powi(-9)]);
    let published: [(usize, &[i8]); 4] = [(8, &[]), (4, &[]), (4, &E2M1), (8, &E2M1)];
    let found = published.map(|(bits, grid)| Format::published(bits, grid));
    assert_eq!(found, [Some(Format::Q8h), Some(Format::Q4h), Some(Format::Mxfp4), None]);
}
