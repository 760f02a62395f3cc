//! Matrices as the HTP has them: a scale for each output channel, codes of 8 or 4 bits, no offset.
//!
//! QNN has no scales for groups of channels, so that one outlier coarsens a whole row (PowerInfer-2, §7.6).
//! The rows with 8 bits, and the codes, are decided once for all units
//! ([`moec_backend::Rounding::channels`]).

use crate::net::{Data, Dtype, Quant, Tensor, pack_nibbles};
use moec_backend::Channels;
use std::ops::Range;

/// Bits of the codes of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bits {
    /// 8: −127 to 127.
    Eight,
    /// 4: −8 to 7.
    Four,
}

impl Bits {
    /// Type of the codes.
    pub const fn dtype(self) -> Dtype {
        match self {
            Self::Eight => Dtype::I8,
            Self::Four => Dtype::I4,
        }
    }
}

/// A rounded matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    /// Rows and columns: output and input channels.
    pub shape: [usize; 2],
    /// Bits of the codes.
    pub bits: Bits,
    /// Codes, row by row.
    pub codes: Vec<i8>,
    /// A scale for each row.
    pub scales: Vec<f32>,
}

impl Matrix {
    /// The matrix as a static tensor with its bytes in memory.
    pub fn tensor(&self, name: impl Into<String>) -> Tensor {
        Tensor {
            name: name.into(),
            shape: self.shape.to_vec(),
            ty: self.bits.dtype(),
            quant: Quant::Channels(self.scales.as_slice().into()),
            data: Some(Data::Here(self.bytes().into())),
        }
    }

    /// Codes as a file has them: two of 4 bits in a byte.
    pub fn bytes(&self) -> Vec<u8> {
        match self.bits {
            Bits::Eight => self.codes.iter().map(|c| c.cast_unsigned()).collect(),
            Bits::Four => pack_nibbles(self.codes.iter().copied()),
        }
    }

    /// The matrix with other columns: column `i` is the column `of(i)` of this one; their number stays the
    /// same.
    #[must_use]
    pub fn columns(&self, of: impl Fn(usize) -> usize) -> Self {
        let cols = self.shape[1];
        let row = |codes: &[i8]| -> Vec<i8> { (0..cols).map(|i| codes[of(i)]).collect() };
        Self { codes: self.codes.chunks_exact(cols.max(1)).flat_map(row).collect(), ..self.clone() }
    }
}

/// Some rows of a matrix of `cols` columns: those of 4 bits, those of 8, and the indices of the rows of each.
pub fn widths(channels: &Channels, rows: Range<usize>, cols: usize) -> ([Matrix; 2], Vec<u32>) {
    let matrix = |bits| Matrix { shape: [0, cols], bits, codes: Vec::new(), scales: Vec::new() };
    let [mut four, mut eight] = [Bits::Four, Bits::Eight].map(matrix);
    let (mut order, mut outliers) = (Vec::new(), Vec::new());
    let (mut fours, mut eights) =
        (channels.four.chunks_exact(cols.max(1)), channels.eight.chunks_exact(cols.max(1)));
    let mut later_outliers = channels.outliers.iter().copied().peekable();
    for (row, scale) in channels.scales.iter().enumerate() {
        let outlier = later_outliers.next_if(|o| *o as usize == row).is_some();
        let (codes, of, list) = if outlier {
            (eights.next(), &mut eight, &mut outliers)
        } else {
            (fours.next(), &mut four, &mut order)
        };
        if rows.contains(&row) {
            of.codes.extend_from_slice(codes.unwrap_or_default());
            of.scales.push(*scale);
            of.shape[0] += 1;
            list.push((row - rows.start) as u32);
        }
    }
    order.append(&mut outliers);
    ([four, eight], order)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_split_by_bit_width_in_order() {
        let channels = Channels {
            scales: vec![0.5, 1.0, 2.0, 4.0],
            outliers: vec![1],
            four: vec![1, 2, 3, 4, 5, 6],
            eight: vec![100, -100],
        };
        let ([four, eight], order) = widths(&channels, 1..4, 2);
        assert_eq!((four.shape, &*four.codes, &*four.scales), ([2, 2], &[3, 4, 5, 6][..], &[2.0, 4.0][..]));
        assert_eq!((eight.shape, &*eight.codes, &*eight.scales), ([1, 2], &[100, -100][..], &[1.0][..]));
        assert_eq!(order, [1, 2, 0]);
        assert_eq!(four.columns(|i| 1 - i).codes, [4, 3, 6, 5]);
        let ([four, eight], order) = widths(&channels, 2..3, 2);
        assert_eq!((four.shape[0], eight.shape[0], order), (1, 0, vec![0]));
    }
}
