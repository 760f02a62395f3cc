//! Decoder of rectangles of quantised weights.
#![expect(clippy::cast_possible_truncation, reason = "codes are bytes, and their places those of 32 bits")]

use super::{Layout, Packing, of};
use crate::checkpoint::Checkpoint;
use crate::encodings::Encoding;
use half::{bf16, f16};
use moec_base::error::{Error, Result};
use moec_ir::{Coded, Format, Leaf};
use std::ops::Range;

/// A quantised leaf whose tensors have the required sizes.
pub(crate) struct Decoder<'a> {
    layout: &'static Layout,
    /// Rows and columns that share a scale.
    block: [usize; 2],
    codes: Words<'a>,
    scales: Table<'a>,
    zeros: Option<Words<'a>>,
    /// Factors on scales: one for all matrices, or one for each.
    factors: Vec<f32>,
    /// The group of every input channel, which is a row or a column.
    groups: Option<Vec<usize>>,
    /// The number of each code.
    numbers: [f32; 256],
}

/// Codes in words, `[matrices, high, wide]`.
struct Words<'a> {
    bytes: &'a [u8],
    packing: &'static Packing,
    bits: u32,
    high: usize,
    wide: usize,
}

/// Scales, `[matrices, high, wide]`.
struct Table<'a> {
    bytes: &'a [u8],
    of: &'static Encoding,
    high: usize,
    wide: usize,
}

/// Factors of neighbouring codes of a row: zero points and scales, from a first group of columns on.
#[derive(Default)]
struct Shared {
    /// Matrix, and group of rows.
    of: Option<(usize, usize)>,
    scales: Vec<f32>,
    zeros: Vec<f32>,
    codes: Vec<u8>,
}

impl Words<'_> {
    /// A range of codes in a row.
    fn row(&self, matrix: usize, row: usize, cols: Range<usize>, out: &mut Vec<u8>) -> Option<()> {
        let (word, codes) = (self.packing.word(), self.packing.codes(self.bits));
        let along = !self.packing.by_rows();
        let first = (matrix * self.high + if along { row } else { row / codes }) * self.wide;
        let mask = u32::MAX >> (32 - self.bits);
        let one = if self.packing.less_one { u32::MAX / mask } else { 0 };
        out.clear();
        for col in cols {
            let (at, code) = if along { (col / codes, col % codes) } else { (col, row % codes) };
            let at = (first + at) * word;
            let mut bytes = [0; 4];
            bytes[..word].copy_from_slice(self.bytes.get(at..at + word)?);
            let place = self.packing.order.get(code).map_or(code, |&place| usize::from(place)) as u32;
            out.push((u32::from_le_bytes(bytes).wrapping_add(one) >> (place * self.bits) & mask) as u8);
        }
        Some(())
    }
}

impl<'a> Decoder<'a> {
    /// Finds the tensors of a leaf.
    ///
    /// # Errors
    /// Fails if they are missing or have the wrong size.
    pub(crate) fn of(checkpoint: &'a Checkpoint, leaf: &Leaf, coded: &Coded) -> Result<Self> {
        let wrong = |tensor: &str| {
            Error::bug(format!(
                "weight {:?} as `{}` of {} bits does not fit tensor `{tensor}` in `{}`",
                leaf.shape,
                coded.layout,
                coded.bits,
                checkpoint.file_of(tensor)
            ))
        };
        let &[ref matrices @ .., rows, cols] = leaf.shape.as_slice() else { return Err(wrong(&leaf.tensor)) };
        let layout = of(&coded.layout).ok_or_else(|| wrong(&leaf.tensor))?;
        let Coded { bits, block, .. } = *coded;
        if ![1, 2, 4, 8].contains(&bits) || block.contains(&0) {
            return Err(wrong(&leaf.tensor));
        }
        let matrices: usize = matrices.iter().product();
        let blocks = [rows.div_ceil(block[0]), cols.div_ceil(block[1])];
        let sized = |tensor: &str, [high, wide]: [usize; 2], bytes: usize| {
            let (stored, data) = checkpoint.data(tensor)?;
            let size = [matrices, high, wide].iter().try_fold(bytes, |n, &d| n.checked_mul(d));
            if size == Some(data.len()) { Ok((stored, data)) } else { Err(wrong(tensor)) }
        };
        let words = |tensor: &str, packing: &'static Packing, shape| {
            let [high, wide] = packing.words(bits, shape);
            let (stored, bytes) = sized(tensor, [high, wide], packing.word())?;
            // An order has one place for each code of a word.
            let placed = packing.order.is_empty() || packing.order.len() == packing.codes(bits);
            if stored.dtype != packing.dtype || !placed {
                return Err(wrong(tensor));
            }
            Ok(Words { bytes, packing, bits, high, wide })
        };
        let codes = words(&leaf.tensor, &layout.codes, [rows, cols])?;
        let (stored, _) = checkpoint.data(&coded.scales)?;
        let of = layout.scales.1.iter().find(|of| of.dtype == stored.dtype);
        let of = of.copied().ok_or_else(|| wrong(&coded.scales))?;
        let (_, bytes) = sized(&coded.scales, blocks, of.bytes)?;
        let zeros = match (&coded.zeros, &layout.zeros) {
            (Some(tensor), Some(packing)) => Some(words(tensor, packing, blocks)?),
            _ => None,
        };
        let mut factors = vec![1.0];
        if let Some(tensor) = &coded.factor {
            let (stored, bytes) = checkpoint.data(tensor)?;
            factors = bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
            if stored.dtype != "F32" || ![1, matrices].contains(&factors.len()) {
                return Err(wrong(tensor));
            }
        }
        let groups = coded.groups.as_ref().map(|tensor| {
            let groups = groups(checkpoint, tensor)?;
            let fits = groups.len() == if layout.transposed { rows } else { cols };
            if fits && matrices == 1 { Ok(groups) } else { Err(wrong(tensor)) }
        });
        Ok(Self {
            layout,
            block,
            codes,
            scales: Table { bytes, of, high: blocks[0], wide: blocks[1] },
            zeros,
            factors,
            groups: groups.transpose()?,
            numbers: std::array::from_fn(|code| (layout.number)(code as u8, bits)),
        })
    }

    /// Byte range of the rows' codes in their tensor.
    pub(crate) fn bytes(&self, matrix: usize, rows: &Range<usize>) -> Range<usize> {
        let Words { packing, bits, high, wide, .. } = self.codes;
        let codes = if packing.by_rows() { packing.codes(bits) } else { 1 };
        let at = |row: usize| (matrix * high + row) * wide * packing.word();
        at(rows.start / codes)..at(rows.end.div_ceil(codes))
    }

    /// Decodes a rectangle; returns `false` if a tensor ends before it.
    pub(crate) fn decode(
        &self,
        matrix: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut [f32],
    ) -> bool {
        let wide = cols.len().max(1);
        self.each(matrix, rows, cols, out.chunks_exact_mut(wide), |out, number, scale| {
            *out = number * scale;
            true
        })
    }

    /// Writes the numbers of a rectangle as codes and scales of a format; returns `false` if the format
    /// cannot hold them.
    pub(crate) fn take(
        &self,
        format: Format,
        matrix: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut [[u8; 3]],
    ) -> bool {
        let wide = cols.len().max(1);
        self.each(matrix, rows, cols, out.chunks_exact_mut(wide), |out, number, scale| {
            exact_code(format, number, scale).map(|taken| *out = taken).is_some()
        })
    }

    /// Calls `put` for every code minus its zero point, and its scale.
    fn each<'o, T: 'o>(
        &self,
        matrix: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        out: impl Iterator<Item = &'o mut [T]>,
        put: impl Fn(&mut T, f32, f32) -> bool,
    ) -> bool {
        let by_row = self.groups.as_ref().filter(|_| self.layout.transposed);
        let by_col = self.groups.as_ref().filter(|_| !self.layout.transposed);
        // If groups are in any order, a row may need all of them.
        let first = if by_col.is_some() { 0 } else { cols.start / self.block[1] };
        let last = if by_col.is_some() { self.scales.wide } else { cols.end.div_ceil(self.block[1]) };
        let mut shared = Shared::default();
        let mut codes = Vec::with_capacity(cols.len());
        for (row, out) in rows.zip(out) {
            let group = by_row.map_or(Some(row / self.block[0]), |groups| groups.get(row).copied());
            let read = group.and_then(|group| self.shared(matrix, group, first..last, &mut shared));
            if read.and_then(|()| self.codes.row(matrix, row, cols.clone(), &mut codes)).is_none() {
                return false;
            }
            for ((out, &code), col) in out.iter_mut().zip(&codes).zip(cols.clone()) {
                let group =
                    by_col.map_or(Some(col / self.block[1] - first), |groups| groups.get(col).copied());
                let shared = group.and_then(|g| Some((*shared.zeros.get(g)?, *shared.scales.get(g)?)));
                let Some((zero, scale)) = shared else { return false };
                if !put(out, self.numbers[usize::from(code)] - zero, scale) {
                    return false;
                }
            }
        }
        true
    }

    /// Reads zero points and scales of a group of rows, unless they are those of the last call.
    fn shared(&self, matrix: usize, group: usize, cols: Range<usize>, shared: &mut Shared) -> Option<()> {
        if shared.of == Some((matrix, group)) {
            return Some(());
        }
        let Table { bytes, of, high, wide } = self.scales;
        if group >= high {
            return None;
        }
        let first = (matrix * high + group) * wide;
        shared.scales.resize(cols.len(), 0.0);
        let stored = bytes.get((first + cols.start) * of.bytes..(first + cols.end) * of.bytes)?;
        (of.decode)(stored, 0, &mut shared.scales);
        if let Some(factor) = &self.layout.factor {
            let by = *self.factors.get(matrix).or(self.factors.first())?;
            let all = shared.scales.iter_mut();
            all.for_each(|scale| *scale = if factor.divides { *scale / by } else { *scale * by });
        }
        shared.zeros.clear();
        shared.zeros.resize(cols.len(), 0.0);
        if let Some(zeros) = &self.zeros {
            zeros.row(matrix, group, cols, &mut shared.codes)?;
            let numbers = shared.codes.iter().map(|&code| self.numbers[usize::from(code)]);
            shared.zeros.iter_mut().zip(numbers).for_each(|(to, number)| *to = number);
        }
        shared.of = Some((matrix, group));
        Some(())
    }
}

/// Returns the group of each input channel.
///
/// # Errors
/// Fails for a type other than I32, and for a negative number.
pub(super) fn groups(checkpoint: &Checkpoint, tensor: &str) -> Result<Vec<usize>> {
    let (stored, bytes) = checkpoint.data(tensor)?;
    let words = bytes.as_chunks().0.iter().map(|b| usize::try_from(i32::from_le_bytes(*b)).ok());
    let groups = if stored.dtype == "I32" { words.collect::<Option<_>>() } else { None };
    groups.ok_or_else(|| {
        let file = checkpoint.file_of(tensor);
        Error::input(format!(
            "tensor `{tensor}` in `{file}` does not hold groups: whole numbers from 0 on, as I32"
        ))
    })
}

/// A number and its scale as a format stores them, if it can: [`moec_ir::Source::stored`].
fn exact_code(format: Format, number: f32, scale: f32) -> Option<[u8; 3]> {
    let codes = format.spec().codes.filter(|_| format.is_published())?;
    let unit = f32::from(codes.unit);
    let (code, by) = (unit * number, scale / unit);
    let (bits, held) = match format.scales() {
        Format::F16 => (f16::from_f32(by).to_bits(), f16::from_f32(by).to_f32()),
        _ => (bf16::from_f32(by).to_bits(), bf16::from_f32(by).to_f32()),
    };
    // A power of two has only exponent bits; if it is subnormal, it has a single mantissa bit.
    if codes.powers && bits.count_ones() != 1 && bits & 0x7f != 0 {
        return None;
    }
    let whole = (f32::from(codes.lowest)..=f32::from(codes.highest)).contains(&code) && code.fract() == 0.0;
    let there = codes.grid.is_empty() || codes.grid.iter().any(|&known| f32::from(known) == code);
    let exact = held * unit == scale && (number * scale).is_finite();
    let [low, high] = bits.to_le_bytes();
    (whole && there && exact).then_some([(code as i8).cast_unsigned(), low, high])
}
