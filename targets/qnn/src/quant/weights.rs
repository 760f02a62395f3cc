//! Matrices as the HTP has them: a scale for each output channel, codes of 8 or 4 bits, no offset.
//!
//! QNN has no scales for groups of channels, so that one outlier coarsens a whole row (PowerInfer-2, §7.6).
//! The columns with 8 bits, and the codes, are decided once for all units
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
}

/// Some rows of a matrix of `cols` columns: all its columns in 4 bits, unless all have 8, and those in 8, if
/// there are any.
pub fn widths(channels: &Channels, rows: Range<usize>, cols: usize) -> [Option<Matrix>; 2] {
    let matrix = |bits, codes: &[i8], scales: &[f32], cols: usize| Matrix {
        shape: [rows.len(), cols],
        bits,
        codes: codes.get(rows.start * cols..rows.end * cols).unwrap_or_default().to_vec(),
        scales: scales.get(rows.clone()).unwrap_or_default().to_vec(),
    };
    let wide = channels.outliers.len();
    let four = (wide < cols).then(|| matrix(Bits::Four, &channels.four, &channels.scales, cols));
    let eight = (wide > 0).then(|| matrix(Bits::Eight, &channels.eight, &channels.eight_scales, wide));
    [four, eight]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_split_by_bit_width() {
        let channels = Channels {
            outliers: vec![1],
            four: vec![1, 0, 3, 0, 5, 0],
            scales: vec![0.5, 1.0, 2.0],
            eight: vec![100, -100, 7],
            eight_scales: vec![0.1, 0.2, 0.3],
        };
        let [four, eight] = widths(&channels, 1..3, 2).map(Option::unwrap);
        assert_eq!((four.shape, &*four.codes, &*four.scales), ([2, 2], &[3, 0, 5, 0][..], &[1.0, 2.0][..]));
        assert_eq!((eight.shape, &*eight.codes, &*eight.scales), ([2, 1], &[-100, 7][..], &[0.2, 0.3][..]));
        let plain = Channels { outliers: vec![], ..channels.clone() };
        assert!(matches!(widths(&plain, 0..1, 2), [Some(_), None]));
        let all = Channels { outliers: vec![0, 1], eight: vec![1, 2, 3, 4, 5, 6], ..channels };
        assert!(matches!(widths(&all, 0..3, 2), [None, Some(m)] if m.codes == all.eight));
    }
}
