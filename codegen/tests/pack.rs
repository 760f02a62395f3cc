//! Packing and its inverse.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used)] // this is a test, though not all of it a test function

use half::{bf16, f16};
use moec_codegen::pack::quantise::{Group, LARGEST};
use moec_codegen::pack::{
    Geometry, Rows, Scratch, Weighting, first_overflow, groups, is_representable, outliers, pack, pack_block,
    pack_slice, packed_bytes, round_as_packed, round_rows, unpack_rows,
};
use moec_ir::plan::{Layout, Segment};
use moec_ir::types::{E2M1, Format, GROUP};
use proptest::prelude::*;
use std::io;
use std::ops::Range;

fn geometries() -> impl Strategy<Value = Geometry> {
    let layout = prop_oneof![
        Just(Layout::Rows),
        prop::sample::select(vec![8, 16, 32]).prop_map(|nr| Layout::Panels { nr }),
        prop::sample::select(vec![8, 16, 32]).prop_map(|nr| Layout::GluPanels { nr }),
        any::<bool>().prop_map(|gate_bound| Layout::Neurons { gate_bound }),
        Just(Layout::Gates),
        Just(Layout::UpDown),
        Just(Layout::Bundles),
    ];
    let format = prop::sample::select(Format::ALL.to_vec());
    let extent = || prop_oneof![1..70_usize, prop::sample::select(vec![1, 15, 17, 24, 56, 80])];
    (layout, format, 1..4_usize, extent(), extent()).prop_map(|(layout, format, matrices, rows, cols)| {
        let rows = if matches!(layout, Layout::GluPanels { .. }) { rows * 2 } else { rows };
        // The layout `Rows` supports neither formats with a scale per row nor formats in bit planes.
        let by_rows = layout.is_by_rows() && !format.holds_rows();
        let layout = if by_rows { Layout::Panels { nr: 16 } } else { layout };
        Geometry { layout, format, matrices, rows, cols: cols * layout.parts() }
    })
}

proptest! {
    #[test]
    fn unpacking_gives_the_rounded_numbers(
        g in geometries(),
        values in prop::collection::vec(-1e5_f32..1e5, 1000),
    ) {
        // The period of the values is odd, so that all rows differ.
        let values: Vec<f32> = values[..997].iter().copied().cycle().take(g.matrices * g.rows * g.cols).collect();
        let packed = pack_slice(&g, &values).unwrap();
        prop_assert_eq!(packed.len() as u64, packed_bytes(g.layout, g.format, g.matrices, g.rows, g.cols));
        let segment = Segment {
            name: String::new(),
            file: 0,
            offset: 0,
            bytes: 0,
            pitch: 0,
            shape: vec![g.matrices as u32, g.rows as u32, g.cols as u32],
            format: g.format,
            layout: g.layout,
        };
        prop_assert_eq!(segment.packed_bytes(), Some(packed.len() as u64));
        for matrix in 0..g.matrices {
            let mut want = values[matrix * g.rows * g.cols..][..g.rows * g.cols].to_vec();
            let mut as_packed = want.clone();
            let mut out = vec![f32::NAN; g.rows * g.cols];
            unpack_rows(&g, &packed, matrix, 0..g.rows, &mut out).unwrap();
            // Groups end at the parts of a bundle.
            round_rows(g.format, g.cols / g.layout.parts(), &mut want);
            prop_assert_eq!(&out, &want);
            // Scales of two levels are not rounded to in a build.
            if !g.format.has_fine_scales() {
                round_as_packed(&g, &packed, matrix, 0..g.rows, false, &mut as_packed).unwrap();
                prop_assert_eq!(&as_packed, &want);
            }
        }
    }
}

/// Two groups that share a scale, of which the last has one number.
#[test]
fn groups_without_a_scale_are_what_is_stored() {
    let g =
        Geometry { layout: Layout::Panels { nr: 16 }, format: Format::Q2s, matrices: 1, rows: 1, cols: 33 };
    let mut values = vec![0.0; g.cols];
    values[31..].copy_from_slice(&[22903.6, 354.5]);
    let packed = pack_slice(&g, &values).unwrap();
    let mut stored = vec![f32::NAN; g.cols];
    unpack_rows(&g, &packed, 0, 0..1, &mut stored).unwrap();
    assert_eq!(stored, [0.0; 33], "the other numbers matter more");
    round_as_packed(&g, &packed, 0, 0..1, false, &mut values).unwrap();
    assert_eq!(values, stored);
}

/// A weight that is read as numbers, and sometimes in the format in which it is packed.
struct Numbers<'a> {
    g: Geometry,
    values: &'a [f32],
    /// Every how many reads return the stored format; 0: none.
    stored: usize,
    reads: usize,
}

impl Rows<io::Error> for Numbers<'_> {
    fn read(&mut self, matrix: usize, rows: Range<usize>, out: &mut [f32]) -> io::Result<()> {
        out.copy_from_slice(&self.values[(matrix * self.g.rows + rows.start) * self.g.cols..][..out.len()]);
        Ok(())
    }

    fn stored(&mut self, matrix: usize, rows: Range<usize>, out: &mut [u8]) -> io::Result<bool> {
        self.reads += 1;
        if self.stored == 0 || !self.reads.is_multiple_of(self.stored) || self.g.format.has_fine_scales() {
            out.fill(0xa5);
            return Ok(false);
        }
        let mut values = vec![0.0; rows.len() * self.g.cols];
        self.read(matrix, rows, &mut values)?;
        let size = out.len() / values.len().max(1);
        if self.g.format.is_published() {
            coded(self.g.format, self.g.cols / self.g.layout.parts(), &values, out);
            return Ok(true);
        }
        for (cell, x) in out.chunks_exact_mut(size.max(1)).zip(values) {
            match self.g.format {
                Format::F32 => cell.copy_from_slice(&x.to_le_bytes()),
                Format::F16 => cell.copy_from_slice(&f16::from_f32(x).to_le_bytes()),
                _ => cell.copy_from_slice(&bf16::from_f32(x).to_le_bytes()),
            }
        }
        Ok(true)
    }
}

/// Rows of `cols` numbers in a checkpoint's form: each number as a code with the scale of its group.
fn coded(format: Format, cols: usize, values: &[f32], out: &mut [u8]) {
    let groups = groups(format, values, cols, Weighting::default());
    let per_row = cols.div_ceil(GROUP);
    for (i, cell) in out.chunks_exact_mut(3).enumerate() {
        let group = &groups[i / cols * per_row + i % cols / GROUP];
        cell.copy_from_slice(&stored_as(format, group.codes[i % cols % GROUP], group.scale));
    }
}

/// A number in a checkpoint's form: its code and its scale.
fn stored_as(format: Format, code: i8, scale: f32) -> [u8; 3] {
    let bits = match format.scales() {
        Format::F16 => f16::from_f32(scale).to_le_bytes(),
        _ => bf16::from_f32(scale).to_le_bytes(),
    };
    [code.cast_unsigned(), bits[0], bits[1]]
}

/// Packs a weight block by block, and reuses the buffer.
fn by_blocks(g: &Geometry, values: &[f32], stored: usize) -> Vec<u8> {
    let (mut scratch, mut block_bytes, mut all) = (Scratch::default(), Vec::new(), Vec::new());
    for block in g.blocks() {
        block_bytes.clear();
        block_bytes.extend([7; 5]);
        let mut rows = Numbers { g: *g, values, stored, reads: 0 };
        let wide = outliers(g, block.matrix, Weighting::default(), &mut rows).unwrap();
        let weighting = Weighting { outliers: Some(&wide), ..Weighting::default() };
        rows.reads = 0;
        pack_block(g, &block, weighting, &mut rows, &mut scratch, &mut block_bytes).unwrap();
        assert_eq!((block_bytes.len(), &block_bytes[..5]), (5 + block.bytes, &[7; 5][..]));
        all.extend(&block_bytes[5..]);
    }
    all
}

/// A source of codes and scales, including ones that rounding never gives.
struct ExactCodes<'a> {
    format: Format,
    cols: usize,
    codes: &'a dyn Fn(usize) -> i8,
    /// Scale of a row and a column.
    scale: &'a dyn Fn(usize, usize) -> f32,
}

impl Rows<io::Error> for &ExactCodes<'_> {
    fn read(&mut self, _: usize, rows: Range<usize>, out: &mut [f32]) -> io::Result<()> {
        let first = rows.start * self.cols;
        for (i, x) in out.iter_mut().enumerate() {
            let at = first + i;
            *x = f32::from((self.codes)(at)) * (self.scale)(at / self.cols, at % self.cols);
        }
        Ok(())
    }

    fn stored(&mut self, _: usize, rows: Range<usize>, out: &mut [u8]) -> io::Result<bool> {
        let first = rows.start * self.cols;
        for (i, cell) in out.chunks_exact_mut(3).enumerate() {
            let at = first + i;
            let scale = (self.scale)(at / self.cols, at % self.cols);
            cell.copy_from_slice(&stored_as(self.format, (self.codes)(at), scale));
        }
        Ok(true)
    }
}

/// Packs and unpacks; returns the unpacked numbers, and the numbers that `read` gives.
fn there_and_back(codes: &ExactCodes<'_>, layout: Layout, rows: usize) -> [Vec<f32>; 2] {
    let mut source = codes;
    let g = Geometry { layout, format: codes.format, matrices: 1, rows, cols: codes.cols };
    let (mut scratch, mut packed) = (Scratch::default(), Vec::new());
    for block in g.blocks() {
        pack_block(&g, &block, Weighting::default(), &mut source, &mut scratch, &mut packed).unwrap();
    }
    let [mut back, mut want] = [(); 2].map(|()| vec![0.0; rows * codes.cols]);
    unpack_rows(&g, &packed, 0, 0..rows, &mut back).unwrap();
    source.read(0, 0..rows, &mut want).unwrap();
    // The verifier of bundles also accepts the packed numbers.
    let mut again = want.clone();
    round_as_packed(&g, &packed, 0, 0..rows, false, &mut again).unwrap();
    assert_eq!(again, back, "{g:?}");
    [back, want]
}

#[test]
fn checkpoint_codes_are_packed_unchanged() {
    // Includes groups with small codes only, for which rounding would choose another scale.
    let all = |at: usize| (at * 7 + at / 300) as i8;
    let small = |at: usize| (at % 5) as i8 - 2;
    let nibbles = |at: usize| (at * 11 % 16) as i8 - 8;
    let e2m1 = |at: usize| E2M1[(at * 11 + at / 64) % 16];
    let cases: [(Format, &dyn Fn(usize) -> i8); 5] = [
        (Format::Q8h, &all),
        (Format::Q8h, &small),
        (Format::Q4h, &nibbles),
        (Format::Q4h, &small),
        (Format::Mxfp4, &e2m1),
    ];
    for (format, codes) in cases {
        let scale = |row: usize, column: usize| match format {
            Format::Mxfp4 => 2.0_f64.powi((row * 9 + column / GROUP * 5) as i32 % 250 - 128) as f32,
            // Includes subnormal scales of both signs.
            _ => {
                f16::from_bits((row * 700 + column / GROUP * 31 + 1) as u16 | (row as u16 % 2) << 15).to_f32()
            }
        };
        for cols in [64, 96 + 8] {
            let codes = ExactCodes { format, cols, codes, scale: &scale };
            for layout in [Layout::Rows, Layout::Panels { nr: 16 }, Layout::GluPanels { nr: 32 }] {
                let [back, want] = there_and_back(&codes, layout, 38);
                assert_eq!(back, want, "{format} in {layout:?}");
            }
        }
    }
}

#[test]
fn numbers_that_share_no_scale_are_rounded() {
    for format in [Format::Q8h, Format::Q4h, Format::Mxfp4] {
        let scale = |_, column: usize| if column < 40 { 0.25 } else { 0.5 };
        let codes = ExactCodes { format, cols: 64, codes: &|at| [1, 2, 3, -4][at % 4], scale: &scale };
        let [back, want] = there_and_back(&codes, Layout::Panels { nr: 16 }, 3);
        let mut rounded = want.clone();
        round_rows(format, 64, &mut rounded);
        assert_eq!(back, rounded, "{format}");
    }
}

proptest! {
    #[test]
    fn rows_available_as_stored_pack_to_the_same_bytes(
        mut g in geometries(),
        values in prop::collection::vec(-6e4_f32..6e4, 997),
        wide in 1..40_usize,
    ) {
        g.cols *= wide;
        let values: Vec<f32> = values.into_iter().cycle().take(g.matrices * g.rows * g.cols).collect();
        let packed = pack_slice(&g, &values).unwrap();
        prop_assert_eq!(packed.len() as u64, g.bytes());
        for stored in 0..4 {
            prop_assert!(by_blocks(&g, &values, stored) == packed, "every {stored} of {g:?}");
        }
    }

    #[test]
    fn any_bits_are_rounded_as_one_by_one(
        mut g in geometries(),
        format in prop::sample::select(vec![Format::F32, Format::Bf16, Format::F16]),
        bits in prop::collection::vec(any::<u32>(), 997),
    ) {
        (g.format, g.layout) = (format, Layout::Rows);
        let values: Vec<f32> =
            bits.into_iter().map(f32::from_bits).cycle().take(g.matrices * g.rows * g.cols).collect();
        let each: Vec<u8> = values
            .iter()
            .flat_map(|&x| match g.format {
                Format::F32 => x.to_le_bytes().to_vec(),
                Format::F16 => f16::from_f32(x).to_le_bytes().to_vec(),
                _ => bf16::from_f32(x).to_le_bytes().to_vec(),
            })
            .collect();
        prop_assert_eq!(pack_slice(&g, &values).unwrap(), each);
        for format in Format::ALL {
            let first = values.iter().copied().find(|&x| !is_representable(format, x));
            prop_assert_eq!(first_overflow(format, &values).map(f32::to_bits), first.map(f32::to_bits));
        }
    }
}

/// Packed bytes of the numbers `0, 1, 2, …` in row order, which small groups represent exactly.
fn counted(
    layout: Layout,
    format: Format,
    rows: usize,
    cols: usize,
    number: impl Fn(usize, usize) -> f32,
) -> Vec<u8> {
    let g = Geometry { layout, format, matrices: 1, rows, cols };
    let values: Vec<f32> = (0..rows * cols).map(|i| number(i / cols, i % cols)).collect();
    pack_slice(&g, &values).unwrap()
}

#[test]
fn panels_hold_columns_of_consecutive_rows_and_zeros() {
    // Row r holds 10 r + 1 and 10 r + 2.
    let bytes = counted(Layout::Panels { nr: 4 }, Format::F32, 5, 2, |r, c| (10 * r + c + 1) as f32);
    let want = [1., 11., 21., 31., 2., 12., 22., 32., 41., 0., 0., 0., 42., 0., 0., 0.];
    let want: Vec<u8> = want.iter().flat_map(|x: &f32| x.to_le_bytes()).collect();
    assert_eq!(bytes, want);
}

#[test]
fn gated_panels_hold_gate_then_up() {
    let bytes = counted(Layout::GluPanels { nr: 4 }, Format::F32, 6, 1, |r, _| r as f32);
    let want = [0., 1., 3., 4., 2., 0., 5., 0.];
    let want: Vec<u8> = want.iter().flat_map(|x: &f32| x.to_le_bytes()).collect();
    assert_eq!(bytes, want);
}

#[test]
fn panels_of_bf16_hold_pairs() {
    // Three input channels are two pairs, the second of which is padded.
    let bytes = counted(Layout::Panels { nr: 2 }, Format::Bf16, 3, 3, |r, c| (10 * r + c + 1) as f32);
    let want = [1., 2., 11., 12., 3., 0., 13., 0., 21., 22., 0., 0., 23., 0., 0., 0.];
    let want: Vec<u8> = want.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect();
    assert_eq!(bytes, want);
    let bytes = counted(Layout::Rows, Format::Bf16, 2, 3, |r, c| (10 * r + c + 1) as f32);
    let want: Vec<u8> =
        [1., 2., 3., 11., 12., 13.].iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect();
    assert_eq!(bytes, want);
}

#[test]
fn panels_of_q8_hold_quads_then_scales() {
    // Every group of 32 contains 127, so that the codes are the numbers themselves at scale 1. Row 1 has
    // scale 2.
    let number = |r: usize, c: usize| (r + 1) as f32 * if c.is_multiple_of(GROUP) { 127.0 } else { c as f32 };
    let (nr, cols) = (2, 34);
    let bytes = counted(Layout::Panels { nr: nr as u32 }, Format::Q8, 3, cols, number);
    assert_eq!(bytes.len(), 2 * 2 * nr * 34);
    for row in 0..4 {
        for c in 0..2 * GROUP {
            let at = row / nr * 2 * nr * 34 + c / GROUP * nr * 34;
            let code = bytes[at + (c % GROUP / 4 * nr + row % nr) * 4 + c % 4];
            let want = if row < 3 && c < cols { number(0, c) as u8 } else { 0 };
            assert_eq!(code, want, "row {row}, column {c}");
            let scale = bytes[at + nr * 32 + row % nr * 2..][..2].try_into().unwrap();
            let want = if row < 3 { (row + 1) as f32 } else { 0.0 };
            assert_eq!(bf16::from_le_bytes(scale).to_f32(), want, "row {row}, column {c}");
        }
    }
    let rows = counted(Layout::Rows, Format::Q8, 2, cols, number);
    assert_eq!(rows.len(), 2 * (64 + 4));
    let codes: Vec<u8> = (0..64).map(|c| if c < cols { number(0, c) as u8 } else { 0 }).collect();
    assert_eq!((&rows[..64], &rows[68..132]), (&codes[..], &codes[..]));
    assert_eq!(rows[132..], [bf16::from_f32(2.0).to_le_bytes(); 2].concat());
}

#[test]
fn panels_of_q4_hold_nibbles_then_scales() {
    // Every group contains −8, so that the codes are the numbers themselves at scale 1. Row 1 has scale −2.
    let code = |c: usize| if c.is_multiple_of(GROUP) { -8 } else { (c * 5 % 16) as i32 - 8 };
    let scale = |r: usize| [1.0, -2.0, 4.0][r];
    let number = |r: usize, c: usize| scale(r) * code(c) as f32;
    let (nr, cols) = (2, 34);
    let bytes = counted(Layout::Panels { nr: nr as u32 }, Format::Q4, 3, cols, number);
    assert_eq!(bytes.len(), 2 * 2 * nr * 18);
    let nibble = |row: usize, c: usize| if row < 3 && c < cols { (code(c) + 8) as u8 } else { 8 };
    for row in 0..4 {
        for group in 0..2 {
            let at = row / nr * 2 * nr * 18 + group * nr * 18;
            for c in 0..16 {
                let byte = bytes[at + (c / 4 * nr + row % nr) * 4 + c % 4];
                let (low, high) = (nibble(row, group * GROUP + c), nibble(row, group * GROUP + 16 + c));
                assert_eq!(byte, low | high << 4, "row {row}, column {c} of group {group}");
            }
            let stored = bytes[at + nr * 16 + row % nr * 2..][..2].try_into().unwrap();
            let want = if row < 3 { scale(row) } else { 0.0 };
            assert_eq!(bf16::from_le_bytes(stored).to_f32(), want, "row {row}, group {group}");
        }
    }
    let rows = counted(Layout::Rows, Format::Q4, 2, cols, number);
    assert_eq!(rows.len(), 2 * (32 + 4));
    let row: Vec<u8> =
        (0..32).map(|j| j / 16 * 32 + j % 16).map(|c| nibble(0, c) | nibble(0, c + 16) << 4).collect();
    assert_eq!((&rows[..32], &rows[36..68]), (&row[..], &row[..]));
    assert_eq!(rows[68..], [bf16::from_f32(-2.0).to_le_bytes(); 2].concat());
}

#[test]
fn rounding_is_to_nearest_even() {
    let rounded = |format, mut x: [f32; 2]| {
        round_rows(format, 2, &mut x);
        x
    };
    // 1 + 2^-8 is between 1 and 1 + 2^-7; 1 + 3 · 2^-8 is between that and 1 + 2^-6.
    assert_eq!(rounded(Format::Bf16, [1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0]), [1.0, 1.0 + 4.0 / 256.0]);
    assert_eq!(rounded(Format::F16, [2049.0, 2051.0]), [2048.0, 2052.0]);
    assert_eq!(rounded(Format::F32, [0.1, 0.2]), [0.1, 0.2]);
}

#[test]
fn packing_reads_at_most_one_panel_at_a_time() {
    let g = Geometry {
        layout: Layout::GluPanels { nr: 16 },
        format: Format::Bf16,
        matrices: 2,
        rows: 100,
        cols: 3,
    };
    let mut largest = 0;
    let read = |_: usize, rows: Range<usize>, out: &mut [f32]| {
        largest = largest.max(rows.len());
        out.fill(1.0);
        Ok::<(), io::Error>(())
    };
    let written = pack(&g, &|_| Weighting::default(), read, &mut io::sink()).unwrap();
    assert_eq!((written, largest), (g.bytes(), 8));
}

#[test]
fn panels_are_written_in_order() {
    let (rows, cols) = (1024, 4096);
    for (format, layout) in [(Format::F32, Layout::Rows), (Format::Q4, Layout::Panels { nr: 32 })] {
        let g = Geometry { layout, format, matrices: 1, rows, cols };
        let read = |_: usize, rows: Range<usize>, out: &mut [f32]| {
            for (row, out) in rows.zip(out.chunks_exact_mut(cols)) {
                out.fill((row + 1) as f32);
            }
            Ok::<(), io::Error>(())
        };
        let mut packed = Vec::new();
        pack(&g, &|_| Weighting::default(), read, &mut packed).unwrap();
        let mut row = vec![0.0; cols];
        for r in [0, 1, 31, 32, 511, 1023] {
            unpack_rows(&g, &packed, 0, r..r + 1, &mut row).unwrap();
            assert!(row.iter().all(|&x| (x / (r + 1) as f32 - 1.0).abs() < 4e-3), "row {r} is {}", row[0]);
        }
    }
}

#[test]
fn packing_returns_errors_of_the_source() {
    let g = Geometry { layout: Layout::Rows, format: Format::F32, matrices: 1, rows: 2, cols: 2 };
    let failed = pack(
        &g,
        &|_| Weighting::default(),
        |_, _, _: &mut [f32]| Err(io::Error::other("unreadable")),
        &mut io::sink(),
    );
    assert_eq!(failed.unwrap_err().to_string(), "unreadable");
    let mut out = [0.0; 4];
    assert!(unpack_rows(&g, &[0; 15], 0, 0..2, &mut out).is_err());
    assert!(unpack_rows(&g, &[0; 16], 1, 0..2, &mut out).is_err());
    assert!(unpack_rows(&g, &[0; 16], 0, 1..3, &mut out).is_err());
    let g = Geometry { layout: Layout::Panels { nr: 2 }, format: Format::Q4, ..g };
    assert!(unpack_rows(&g, &[0; 36], 0, 0..2, &mut out).is_ok());
    assert!(unpack_rows(&g, &[0; 35], 0, 0..2, &mut out).is_err());
}

const GROUPED: [Format; 8] =
    [Format::Q8, Format::Q6, Format::Q5, Format::Q4n, Format::Q4, Format::Q3, Format::Q8h, Format::Q4h];

/// Rounding by the largest magnitude alone: `q8` maps it to code 127, `q4` to −8, and codes of a grid to the lowest.
fn plain(format: Format, x: &[f32; GROUP]) -> [f32; GROUP] {
    let extreme = x.iter().fold(0.0_f32, |a, &x| if x.abs() > a.abs() { x } else { a });
    let codes = format.spec().codes.unwrap();
    let [low, high] = [codes.lowest, codes.highest].map(f32::from);
    let scale = if format.spec().bits > 4 { extreme.abs() / high } else { extreme / low };
    let scale = match format.scales() {
        Format::F16 => f16::from_f32(scale).to_f32(),
        _ => bf16::from_f32(scale).to_f32(),
    };
    let nearest = |x: f32| {
        let near = codes.grid.iter().map(|&code| f32::from(code));
        let near = near.min_by(|a, b| (a - x).abs().total_cmp(&(b - x).abs()));
        near.unwrap_or(x.clamp(low, high).round_ties_even())
    };
    x.map(|x| if scale == 0.0 { 0.0 } else { nearest(x / scale) * scale })
}

fn error(x: &[f32; GROUP], got: &[f32; GROUP], w: &[f32; GROUP]) -> f64 {
    let each = x.iter().zip(got).zip(w).map(|((&a, &b), &w)| f64::from(w) * f64::from(a - b).powi(2));
    each.sum()
}

fn group(numbers: impl Strategy<Value = f32>) -> impl Strategy<Value = [f32; GROUP]> {
    prop::collection::vec(numbers, GROUP).prop_map(|x| x.try_into().unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn scales_err_no_more_than_those_of_the_largest_magnitude(
        x in prop_oneof![
            group(-1.0_f32..1.0),
            group((-1.0_f32..1.0).prop_map(|x| x * x * x)),
            group(prop_oneof![9 => Just(0.0), 1 => -1.0_f32..1.0]),
            group(0.0_f32..1.0),
        ],
        w in prop_oneof![
            Just([1.0; GROUP]),
            group(0.0_f32..1.0),
            group((0.0_f32..1.0).prop_map(|x| x.powi(8) * 1e4)),
        ],
        exponent in -25..30_i32,
    ) {
        for format in GROUPED {
            // f16 scales have a smaller exponent range, and lose digits below the smallest normal number.
            let f16s = format.scales() == Format::F16;
            let x = x.map(|x| x * 10.0_f32.powi(if f16s { exponent.max(0) / 8 } else { exponent }));
            if f16s && x.iter().all(|x| x.abs() < 127.0 * f16::MIN_POSITIVE.to_f32()) {
                continue;
            }
            let found = Group::nearest(format, &x, &w);
            let (ours, theirs) = (error(&x, &found.values(), &w), error(&x, &plain(format, &x), &w));
            prop_assert!(ours <= theirs * (1.0 + 1e-4), "{format}: {ours} against {theirs} of {x:?}");
            // The scale determines the codes.
            prop_assert_eq!(Group::with_scale(format, &x, found.scale), found);
        }
    }

    #[test]
    fn any_bits_give_finite_numbers(bits in prop::collection::vec(any::<u32>(), 2 * GROUP)) {
        let (x, w) = bits.split_at(GROUP);
        let floats = |bits: &[u32]| -> [f32; GROUP] {
            bits.iter().map(|&b| f32::from_bits(b)).collect::<Vec<_>>().try_into().unwrap()
        };
        for format in GROUPED.into_iter().chain([Format::Mxfp4]) {
            let g = Group::nearest(format, &floats(x), &floats(w));
            prop_assert!(g.values().iter().all(|x| x.is_finite()), "{g:?}");
        }
    }
}

#[test]
fn group_without_a_scale_has_no_codes() {
    // What matters is zero.
    let (mut x, mut w) = ([0.0; GROUP], [0.0; GROUP]);
    x[29] = -1.645e-24;
    w[29] = 1.192e-20;
    w[30] = 642.0;
    for format in GROUPED {
        let found = Group::nearest(format, &x, &w);
        assert_eq!(Group::with_scale(format, &x, found.scale), found, "{format}");
    }
}

#[test]
fn important_numbers_round_with_less_error() {
    // One large number among small ones determines the scale, unless its weight is low.
    let mut x: [f32; GROUP] = std::array::from_fn(|i| ((i * 7 % 32) as f32 - 15.5) / 16.0);
    x[5] = 2.0;
    let mut w = [1.0; GROUP];
    w[5] = 1e-4;
    {
        let format = Format::Q4;
        let even = Group::nearest(format, &x, &[1.0; GROUP]).values();
        let uneven = Group::nearest(format, &x, &w).values();
        assert!(error(&x, &uneven, &w) < 0.7 * error(&x, &even, &w), "{format}");
        assert!((uneven[5] - 2.0).abs() > (even[5] - 2.0).abs(), "{format}");
    }
}

#[test]
fn zeros_and_the_ends_of_the_range() {
    for format in GROUPED {
        let one = [1.0; GROUP];
        assert_eq!(Group::nearest(format, &[0.0; GROUP], &one), Group::ZERO);
        assert_eq!(Group::nearest(format, &[-0.0; GROUP], &one), Group::ZERO);
        assert_eq!(Group::nearest(format, &[f32::from_bits(1); GROUP], &one), Group::ZERO);
        let largest = match format {
            Format::Q8h => 8e6,
            Format::Q4h => 3.9e5,
            _ => LARGEST,
        };
        let ends = std::array::from_fn(|i| if i % 2 == 0 { largest } else { -largest });
        let stored = Group::nearest(format, &ends, &one).values();
        // Of a grid that is not symmetric both ends are missed.
        assert!(stored.iter().zip(ends).all(|(s, x)| (s / x - 1.0).abs() < 0.12), "{format}: {stored:?}");
        // Weights that are all 0 count as equal weights.
        let x = std::array::from_fn(|i| i as f32);
        assert_eq!(Group::nearest(format, &x, &[0.0; GROUP]), Group::nearest(format, &x, &one));
        assert!(
            is_representable(format, largest)
                && !is_representable(format, largest * 1.1)
                && is_representable(format, 0.0)
        );
        assert!(
            !is_representable(format, f32::MAX)
                && !is_representable(format, f32::INFINITY)
                && !is_representable(format, f32::NAN)
        );
    }
    assert!(
        is_representable(Format::Bf16, f32::INFINITY)
            && !is_representable(Format::F16, 1e5)
            && !is_representable(Format::Bf16, f32::MAX)
    );
}

#[test]
fn importance_is_taken_by_matrix_and_column() {
    let (matrices, rows, cols) = (2, 3, 40);
    let values: Vec<f32> =
        (0..matrices * rows * cols).map(|i| ((i * 37 % 101) as f32 - 50.0).powi(3)).collect();
    let w: Vec<f32> = (0..matrices * cols).map(|i| (i * 13 % 29) as f32).collect();
    for layout in [Layout::Rows, Layout::Panels { nr: 8 }] {
        let g = Geometry { layout, format: Format::Q4, matrices, rows, cols };
        let read = |l: usize, r: Range<usize>, out: &mut [f32]| {
            out.copy_from_slice(&values[(l * rows + r.start) * cols..][..out.len()]);
            Ok::<(), io::Error>(())
        };
        let mut packed = Vec::new();
        pack(&g, &|l| Weighting::of(w.chunks(cols).nth(l)), read, &mut packed).unwrap();
        let mut out = vec![0.0; rows * cols];
        for l in 0..matrices {
            unpack_rows(&g, &packed, l, 0..rows, &mut out).unwrap();
            for (i, got) in out.chunks(cols).enumerate() {
                let from = &values[(l * rows + i) * cols..][..cols];
                let (mut x, mut by) = ([0.0; GROUP], [0.0; GROUP]);
                x[..8].copy_from_slice(&from[GROUP..]);
                by[..8].copy_from_slice(&w[l * cols + GROUP..][..8]);
                let first = Group::nearest(
                    g.format,
                    from.first_chunk().unwrap(),
                    w[l * cols..].first_chunk().unwrap(),
                );
                assert_eq!(got[..GROUP], first.values());
                assert_eq!(got[GROUP..], Group::nearest(g.format, &x, &by).values()[..8]);
            }
        }
    }
}
