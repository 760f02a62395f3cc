//! Magnitudes of the inputs of a matrix, channel by channel.
#![expect(clippy::cast_possible_truncation, reason = "statistics: floats are clamped and rounded")]

use super::{MOST, MOST_TOKENS, ProfileFault};
use bincode::de::{Decoder, read::Reader};
use bincode::enc::Encoder;
use bincode::error::{DecodeError, EncodeError};
use bincode::{Decode, Encode};

/// Mean squares of the input channels of a weight `[matrices, rows, cols]`: one row of channels for each of
/// its `matrices` matrices (experts, heads), over the tokens that this matrix saw.
#[derive(Clone, Debug, PartialEq)]
pub struct Moments {
    /// Input channels.
    pub cols: usize,
    /// Tokens that each matrix saw.
    pub tokens: Vec<u64>,
    /// `[matrices, cols]`: mean of x², rounded to eleven bits; 0 if no token was seen.
    mean_square: Vec<f32>,
}

/// Rounds a number to eleven significant bits, ties away from zero. An error of 2⁻¹² in the weight of a sum
/// is negligible, and cleared bits compress well.
fn round_significant(x: f64) -> f32 {
    let x = x.clamp(0.0, f64::from(f32::MAX)) as f32;
    let rounded = f32::from_bits(x.to_bits().saturating_add(1 << 12) & !0x1fff);
    if rounded.is_finite() { rounded } else { f32::from_bits(x.to_bits() & !0x1fff) }
}

impl Moments {
    /// Computes means from sums of squares `[matrices, cols]` over `tokens` tokens per matrix. `None` if the
    /// lengths disagree or a sum is not finite.
    pub fn from_sums(cols: usize, tokens: Vec<u64>, sums: &[f32]) -> Option<Self> {
        if cols == 0 || tokens.len().checked_mul(cols)? != sums.len() || sums.iter().any(|s| !s.is_finite()) {
            return None;
        }
        let mean =
            |(sum, n): (&f32, u64)| if n == 0 { 0.0 } else { round_significant(f64::from(*sum) / n as f64) };
        let counts = tokens.iter().flat_map(|&n| std::iter::repeat_n(n, cols));
        let mean_square = sums.iter().zip(counts).map(mean).collect();
        Some(Self { cols, tokens, mean_square })
    }

    /// Matrices.
    pub fn matrices(&self) -> usize {
        self.tokens.len()
    }

    /// Mean squares of the input channels of one matrix.
    pub fn of(&self, matrix: usize) -> &[f32] {
        self.mean_square.get(matrix * self.cols..(matrix + 1) * self.cols).unwrap_or_default()
    }

    /// Mean squares over all matrices, each weighted with its tokens. 0 if no token was seen.
    pub fn mean(&self) -> Vec<f32> {
        let mut sums = vec![0.0_f64; self.cols];
        let mut count = 0.0;
        for (row, &n) in self.mean_square.chunks_exact(self.cols.max(1)).zip(&self.tokens) {
            count += n as f64;
            sums.iter_mut().zip(row).for_each(|(s, &x)| *s += f64::from(x) * n as f64);
        }
        sums.into_iter().map(|s| if count > 0.0 { (s / count) as f32 } else { 0.0 }).collect()
    }

    /// Merges two. `None` if shapes differ.
    pub fn merge(&self, other: &Self) -> Option<Self> {
        if self.cols != other.cols || self.matrices() != other.matrices() {
            return None;
        }
        let mut mean_square = Vec::with_capacity(self.mean_square.len());
        for matrix in 0..self.matrices() {
            let (n, m) = (self.tokens[matrix] as f64, other.tokens[matrix] as f64);
            let mean = |(&a, &b): (&f32, &f32)| {
                if n + m == 0.0 {
                    0.0
                } else {
                    round_significant((f64::from(a) * n + f64::from(b) * m) / (n + m))
                }
            };
            mean_square.extend(self.of(matrix).iter().zip(other.of(matrix)).map(mean));
        }
        let tokens = self.tokens.iter().zip(&other.tokens).map(|(a, b)| a.saturating_add(*b)).collect();
        Some(Self { cols: self.cols, tokens, mean_square })
    }

    pub(super) fn check(&self) -> Result<(), ProfileFault> {
        let matrices = self.matrices();
        if !(1..=MOST).contains(&matrices) || !(1..=MOST).contains(&self.cols) {
            return Err(format!("{matrices} matrices of {} channels", self.cols));
        }
        if matrices.checked_mul(self.cols) != Some(self.mean_square.len()) {
            return Err(format!(
                "{} numbers for {matrices} × {} channels",
                self.mean_square.len(),
                self.cols
            ));
        }
        if self.tokens.iter().any(|&n| n > MOST_TOKENS) {
            return Err("more tokens than anyone can read".to_owned());
        }
        let fits = |matrix: usize, x: f32| x.is_finite() && x >= 0.0 && (self.tokens[matrix] > 0 || x == 0.0);
        if self.mean_square.iter().enumerate().all(|(i, &x)| fits(i / self.cols, x)) {
            Ok(())
        } else {
            Err("a mean square that cannot be one".to_owned())
        }
    }
}

/// Encodes the four bytes of all numbers as planes, the most significant first: neighbours are then similar,
/// and the last plane is zero.
impl Encode for Moments {
    fn encode<E: Encoder>(&self, encoder: &mut E) -> Result<(), EncodeError> {
        self.cols.encode(encoder)?;
        self.tokens.encode(encoder)?;
        let planes: Vec<u8> =
            (0..4).flat_map(|p| self.mean_square.iter().map(move |x| x.to_be_bytes()[p])).collect();
        planes.encode(encoder)
    }
}

impl<C> Decode<C> for Moments {
    fn decode<D: Decoder<Context = C>>(decoder: &mut D) -> Result<Self, DecodeError> {
        let cols = usize::decode(decoder)?;
        let tokens = Vec::<u64>::decode(decoder)?;
        let n = u64::decode(decoder)?;
        let n = usize::try_from(n).map_err(|_| DecodeError::LimitExceeded)?;
        decoder.claim_bytes_read(n)?;
        if n % 4 != 0 {
            return Err(DecodeError::Other("numbers of less than four bytes"));
        }
        let mut planes = vec![0; n];
        decoder.reader().read(&mut planes)?;
        let (n, byte) = (n / 4, |i: usize| planes[i]);
        let mean_square = (0..n).map(|i| f32::from_be_bytes([0, 1, 2, 3].map(|p| byte(p * n + i)))).collect();
        Ok(Self { cols, tokens, mean_square })
    }
}

bincode::impl_borrow_decode!(Moments);
