//! Formats with scales of two levels: codes and scales of a checkpoint are packed as they are.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used)] // this is a test, though not all of it a test function

use half::f16;
use moec_codegen::pack::{
    Geometry, Rows, Scratch, Weighting, are_fine_groups, pack_block, pack_slice, round_as_packed, round_rows,
    unpack_rows, unpack_stored,
};
use moec_ir::plan::Layout;
use moec_ir::types::{FINE_GROUP, FINE_STORED, Format};
use proptest::prelude::*;
use std::io;
use std::ops::Range;

const FORMATS: [Format; 6] = [Format::Q2k, Format::Q3k, Format::Q4k, Format::Q5k, Format::Q6k, Format::Iq4xs];

/// Rows of a checkpoint with any codes and scales: those of group `g` of row `r` depend on `seed`.
struct Stored {
    format: Format,
    cols: usize,
    seed: usize,
}

impl Stored {
    /// A number's code, the scale and the minimum of its run, and the group's scales as f16.
    fn parts(&self, row: usize, col: usize) -> (i8, i8, u8, [u16; 2]) {
        let codes = self.format.spec().codes.unwrap();
        let fine = codes.fine.unwrap();
        let mix = |a: usize, b: usize| (a * 2_654_435_761 + b * 40_503 + self.seed * 97) >> 7;
        let values = (i32::from(codes.highest) - i32::from(codes.lowest) + 1) as usize;
        let code = match codes.grid {
            [] => codes.lowest as i32 + (mix(row, col) % values) as i32,
            grid => i32::from(grid[mix(row, col) % grid.len()]),
        };
        let (run, group) = (mix(row + 1, col / fine.run), mix(row + 2, col / FINE_GROUP));
        // Of either sign, subnormal ones too.
        let bits = |x: usize| (x & 0xbbff) as u16;
        if fine.minima {
            let many = usize::from(self.format.fine_most()) + 1;
            (code as i8, (run % many) as i8, (run / many % many) as u8, [bits(group), bits(group >> 3)])
        } else {
            (code as i8, run as i8, 0, [bits(group), 0])
        }
    }

    /// As llama.cpp decodes it.
    fn number(&self, row: usize, col: usize) -> f32 {
        let codes = self.format.spec().codes.unwrap();
        let (code, scale, minimum, units) = self.parts(row, col);
        let [unit, least] = units.map(|bits| f16::from_bits(bits).to_f32());
        let lowest = if codes.fine.unwrap().minima { codes.lowest } else { 0 };
        let (scale, minimum) = (unit * f32::from(scale), least * f32::from(minimum));
        scale * (f32::from(code) - f32::from(lowest)) - minimum
    }
}

impl Rows<io::Error> for &Stored {
    fn read(&mut self, _: usize, rows: Range<usize>, out: &mut [f32]) -> io::Result<()> {
        let first = rows.start * self.cols;
        out.iter_mut().zip(first..).for_each(|(x, i)| *x = self.number(i / self.cols, i % self.cols));
        Ok(())
    }

    fn stored(&mut self, _: usize, rows: Range<usize>, out: &mut [u8]) -> io::Result<bool> {
        for (cell, i) in out.as_chunks_mut::<FINE_STORED>().0.iter_mut().zip(rows.start * self.cols..) {
            let (code, scale, minimum, [unit, least]) = self.parts(i / self.cols, i % self.cols);
            let ([a, b], [c, d]) = (unit.to_le_bytes(), least.to_le_bytes());
            *cell = [code.cast_unsigned(), scale.cast_unsigned(), minimum, a, b, c, d];
        }
        Ok(true)
    }
}

proptest! {
    #[test]
    fn codes_and_scales_of_a_checkpoint_come_back(
        format in prop::sample::select(FORMATS.to_vec()),
        layout in prop::sample::select(vec![
            Layout::Panels { nr: 8 }, Layout::Panels { nr: 32 }, Layout::GluPanels { nr: 16 },
        ]),
        rows in 1..30_usize,
        groups in 1..4_usize,
        seed in 0..10_000_usize,
    ) {
        let (rows, cols) = (2 * rows, groups * FINE_GROUP);
        let source = Stored { format, cols, seed };
        let g = Geometry { layout, format, matrices: 1, rows, cols };
        let (mut scratch, mut packed) = (Scratch::default(), Vec::new());
        for block in g.blocks() {
            pack_block(&g, &block, Weighting::default(), &mut &source, &mut scratch, &mut packed).unwrap();
        }
        prop_assert_eq!(packed.len() as u64, g.bytes());
        let [mut back, mut want] = [(); 2].map(|()| vec![f32::NAN; rows * cols]);
        unpack_rows(&g, &packed, 0, 0..rows, &mut back).unwrap();
        (&source).read(0, 0..rows, &mut want).unwrap();
        prop_assert_eq!(&back, &want);
        let mut again = want.clone();
        round_as_packed(&g, &packed, 0, 0..rows, false, &mut again).unwrap();
        prop_assert_eq!(again, want);
        let [mut stored, mut first] = [(); 2].map(|()| vec![0; rows * cols * FINE_STORED]);
        unpack_stored(&g, &packed, 0, 0..rows, &mut stored).unwrap();
        (&source).stored(0, 0..rows, &mut first).unwrap();
        prop_assert!(stored == first);
        prop_assert!(unpack_stored(&g, &packed, 0, 0..rows + 2, &mut stored).is_err());
    }
}

/// Columns that are cut elsewhere than between groups are noticed, and so are numbers of other groups.
#[test]
fn numbers_that_share_no_scale_are_no_groups() {
    for format in FORMATS {
        let source = Stored { format, cols: 2 * FINE_GROUP, seed: 3 };
        let mut all = vec![0; 2 * FINE_GROUP * FINE_STORED];
        (&source).stored(0, 0..1, &mut all).unwrap();
        assert!(are_fine_groups(format, 2 * FINE_GROUP, &all));
        assert!(are_fine_groups(format, FINE_GROUP, &all));
        let half = FINE_GROUP / 2 * FINE_STORED;
        assert!(!are_fine_groups(format, FINE_GROUP, &all[half..3 * half]), "{format}");
        for at in [1, 2, 3, 6] {
            let mut other = all.clone();
            other[5 * FINE_STORED + at] ^= 1;
            assert!(!are_fine_groups(format, 2 * FINE_GROUP, &other), "{format}: {at}");
        }
    }
}

/// Rounding, for rows without groups of their own, errs by no more than half a step of the largest run.
#[test]
fn rounded_numbers_are_near() {
    let x: Vec<f32> = (0..700_u32).map(|i| ((i * 7919 % 1000) as f32 / 500.0 - 1.0).powi(3)).collect();
    for (format, step) in [
        (Format::Q4k, 2.0 / 15.0),
        (Format::Q5k, 2.0 / 31.0),
        (Format::Q6k, 1.0 / 31.0),
        (Format::Q3k, 1.0 / 3.0),
        (Format::Q2k, 2.0 / 3.0),
        (Format::Iq4xs, 24.0 / 113.0),
    ] {
        let mut near = x.clone();
        round_rows(format, x.len(), &mut near);
        let most = x.iter().zip(&near).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(most < 0.6 * step + 0.02, "{format}: {most}");
        let g = Geometry { layout: Layout::Panels { nr: 8 }, format, matrices: 1, rows: 1, cols: x.len() };
        let mut back = vec![0.0; x.len()];
        unpack_rows(&g, &pack_slice(&g, &x).unwrap(), 0, 0..1, &mut back).unwrap();
        assert_eq!(back, near, "{format}");
    }
}
