//! Rounding of matrices: a scale for each output channel, codes of 8 or 4 bits, no offset.
//!
//! QNN has no scales for groups of channels, so that one outlier coarsens a whole row (PowerInfer-2, §7.6). The scale of a
//! row is the one of a few that leaves the smallest square error: less than what its largest weight needs may cut that
//! weight and serve the others better.

use crate::net::{Data, Dtype, Quant, Tensor, pack_nibbles};

/// Bits of the codes of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bits {
    /// 8: −127 to 127.
    Eight,
    /// 4: −7 to 7, so that a row and its negative round alike.
    Four,
}

impl Bits {
    /// Largest code.
    pub const fn most(self) -> i8 {
        match self {
            Self::Eight => 127,
            Self::Four => 7,
        }
    }

    /// Type of the codes.
    pub const fn dtype(self) -> Dtype {
        match self {
            Self::Eight => Dtype::I8,
            Self::Four => Dtype::I4,
        }
    }

    /// Scales that are tried, as shares of the one that cuts nothing. Eight bits have codes to spare.
    const fn shares(self) -> &'static [f32] {
        match self {
            Self::Eight => &[1.0],
            Self::Four => &[1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6],
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

/// Rounds a matrix of `cols` columns. A row of zeros has a scale of 1.
///
/// # Errors
/// A number that is none, or that is infinite.
pub fn matrix(numbers: &[f32], cols: usize, bits: Bits) -> Result<Matrix, f32> {
    let cols = cols.max(1);
    if let Some(x) = numbers.iter().find(|x| !x.is_finite()) {
        return Err(*x);
    }
    let mut out = Matrix {
        shape: [numbers.len() / cols, cols],
        bits,
        codes: Vec::with_capacity(numbers.len()),
        scales: Vec::with_capacity(numbers.len() / cols),
    };
    for row in numbers.chunks_exact(cols) {
        let scale = scale(row, bits);
        out.scales.push(scale);
        out.codes.extend(row.iter().map(|x| code(*x, scale, bits)));
    }
    Ok(out)
}

fn code(x: f32, scale: f32, bits: Bits) -> i8 {
    let most = f32::from(bits.most());
    (x / scale).round_ties_even().clamp(-most, most) as i8
}

/// The scale that leaves the smallest square error.
fn scale(row: &[f32], bits: Bits) -> f32 {
    let largest = row.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
    let whole = largest / f32::from(bits.most());
    if !whole.is_normal() {
        return 1.0;
    }
    let error = |scale: f32| -> f64 {
        row.iter().map(|x| f64::from(x - f32::from(code(*x, scale, bits)) * scale).powi(2)).sum()
    };
    let tried = bits.shares().iter().map(|share| (whole * share, error(whole * share)));
    tried.reduce(|best, next| if next.1 < best.1 { next } else { best }).map_or(1.0, |best| best.0)
}

impl Matrix {
    /// As a static tensor whose bytes are here.
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

    /// What the codes mean, row by row.
    pub fn reals(&self) -> Vec<f32> {
        let cols = self.shape[1].max(1);
        let row = |(codes, scale): (&[i8], &f32)| -> Vec<f32> {
            codes.iter().map(|c| f32::from(*c) * scale).collect()
        };
        self.codes.chunks_exact(cols).zip(&self.scales).flat_map(row).collect()
    }
}

/// Rounds a matrix to 4 bits, but for the rows that lose most by it, which have 8: one in `share`, at least one where there
/// are as many. Gives the rows of 4 bits, those of 8, and which row each of both, one behind the other, is.
///
/// # Errors
/// As [`matrix`].
pub fn mixed(numbers: &[f32], cols: usize, share: usize) -> Result<(Matrix, Matrix, Vec<u32>), f32> {
    let cols = cols.max(1);
    let narrow = matrix(numbers, cols, Bits::Four)?;
    let count = narrow.scales.len();
    let reals = narrow.reals();
    let error = |row: usize| -> f64 {
        let both = numbers[row * cols..].iter().zip(&reals[row * cols..]).take(cols);
        both.map(|(a, b)| f64::from(a - b).powi(2)).sum()
    };
    let mut worst: Vec<(f64, usize)> = (0..count).map(|row| (error(row), row)).collect();
    worst.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    let mut outliers: Vec<usize> = worst.iter().take(count.div_ceil(share.max(1))).map(|w| w.1).collect();
    outliers.sort_unstable();
    let rest: Vec<usize> = (0..count).filter(|row| outliers.binary_search(row).is_err()).collect();
    let some = |rows: &[usize], bits| {
        let picked: Vec<f32> =
            rows.iter().flat_map(|r| &numbers[r * cols..(r + 1) * cols]).copied().collect();
        matrix(&picked, cols, bits)
    };
    let order = rest.iter().chain(&outliers).map(|r| *r as u32).collect();
    Ok((some(&rest, Bits::Four)?, some(&outliers, Bits::Eight)?, order))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn eight_bits_are_off_by_half_a_step_at_most(row in proptest::collection::vec(-8.0_f32..8.0, 1..40)) {
            let m = matrix(&row, row.len(), Bits::Eight).unwrap();
            for (a, b) in m.reals().iter().zip(&row) {
                prop_assert!((a - b).abs() <= m.scales[0] * 0.5001);
            }
        }

        #[test]
        fn four_bits_are_no_worse_than_with_the_scale_that_cuts_nothing(row in proptest::collection::vec(-8.0_f32..8.0, 1..40)) {
            let m = matrix(&row, row.len(), Bits::Four).unwrap();
            let whole = row.iter().fold(0.0_f32, |a, x| a.max(x.abs())) / 7.0;
            let error = |of: &dyn Fn(f32) -> f32| row.iter().map(|x| f64::from(x - of(*x)).powi(2)).sum::<f64>();
            let chosen = error(&|x| f32::from(code(x, m.scales[0], Bits::Four)) * m.scales[0]);
            let plain = error(&|x| if whole > 0.0 { (x / whole).round_ties_even() * whole } else { 0.0 });
            prop_assert!(chosen <= plain * 1.000_01 + 1e-12);
        }
    }

    #[test]
    fn rows_of_zeros_and_of_what_is_no_number() {
        let m = matrix(&[0.0; 4], 2, Bits::Four).unwrap();
        assert_eq!((m.scales, m.codes), (vec![1.0; 2], vec![0; 4]));
        assert!(matrix(&[1.0, f32::NAN], 2, Bits::Eight).is_err());
    }
}
