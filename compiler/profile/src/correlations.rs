//! Correlations of a matrix's input channels, by pairs of channels.
//!
//! The second moments `H = E[x xᵀ]` of an input follow from its [`Moments`] and the correlations of its
//! channels: `H[i, j] = r[i, j] · √(H[i, i] · H[j, j])`. A profile keeps `r` in 16 bits, for pairs of
//! channels in one block of the diagonal. Whole matrices would grow with the square of the width.
#![expect(clippy::cast_possible_truncation, reason = "statistics: floats are clamped and rounded")]

use super::{MOST, MOST_TOKENS, Moments, ProfileFault};
use bincode::de::{Decoder, read::Reader};
use bincode::enc::Encoder;
use bincode::error::{DecodeError, EncodeError};
use bincode::{Decode, Encode};
use moec_ir::types::GROUP;
use std::ops::Range;

/// Channels of the widest block. Wider blocks help more: for a model of 192 channels, blocks of a third of
/// them gain half as much as whole matrices.
pub const WIDEST: usize = 512;
/// Limit of the bytes of all correlations of experts; their blocks are as wide as it allows.
pub const MOST_BYTES: u64 = 320 << 20;
/// Stored number of a correlation of 1.
const ONE: f64 = i16::MAX as f64;

/// Correlations of the channels of one input: one matrix, or one for each expert or head.
#[derive(Clone, Debug, PartialEq)]
pub struct Correlations {
    /// Weights that read the input, by their names in [`super::Profile::weights`]; the first in the model's
    /// order comes first.
    pub readers: Vec<String>,
    /// Input channels.
    pub cols: usize,
    /// Channels of a block; the last one may have fewer.
    pub block: usize,
    /// Tokens that each matrix saw.
    pub tokens: Vec<u64>,
    /// `[matrices, pairs]`: below the diagonal, block by block and row by row.
    pub(super) below: Vec<i16>,
}

/// Pairs of `n` channels.
const fn pairs(n: usize) -> usize {
    n * n.saturating_sub(1) / 2
}

/// The blocks of `cols` channels.
pub fn blocks(cols: usize, block: usize) -> impl Iterator<Item = Range<usize>> {
    (0..cols).step_by(block.max(1)).map(move |start| start..(start + block).min(cols))
}

/// Pairs of channels in one block. Neither argument exceeds [`MOST`].
const fn pairs_in(cols: usize, block: usize) -> usize {
    cols / block * pairs(block) + pairs(cols % block)
}

/// Channels of a block for inputs of `cols` channels of `matrices` experts in total: the widest that keeps
/// them within [`MOST_BYTES`], and at least a group.
pub fn block_for(cols: usize, matrices: usize) -> usize {
    let fits = |block: usize| matrices as u128 * pairs_in(cols, block) as u128 * 2 <= u128::from(MOST_BYTES);
    let mut block = WIDEST;
    while block > GROUP && !fits(block) {
        block /= 2;
    }
    block
}

impl Correlations {
    /// Computes correlations from sums of products `[matrices, pairs and squares]`: of each block row by row,
    /// up to the diagonal. `None` if the lengths disagree.
    pub fn from_sums(
        readers: Vec<String>,
        cols: usize,
        block: usize,
        tokens: Vec<u64>,
        sums: &[f32],
    ) -> Option<Self> {
        let mut below = Vec::with_capacity(tokens.len() * pairs_in(cols, block));
        let mut rest = sums;
        for _ in 0..tokens.len() {
            for range in blocks(cols, block) {
                let (own, tail) = rest.split_at_checked(pairs(range.len()) + range.len())?;
                rest = tail;
                let squares: Vec<f64> = (0..range.len()).map(|i| f64::from(own[pairs(i + 1) + i])).collect();
                for (i, square) in squares.iter().enumerate() {
                    let row = own.get(pairs(i) + i..)?.iter().zip(&squares);
                    below.extend(
                        row.take(i).map(|(&x, other)| stored_correlation(f64::from(x), square * other)),
                    );
                }
            }
        }
        rest.is_empty().then_some(Self { readers, cols, block, tokens, below })
    }

    /// Matrices.
    pub fn matrices(&self) -> usize {
        self.tokens.len()
    }

    /// Pairs of channels, of all matrices.
    pub fn pairs(&self) -> u64 {
        self.below.len() as u64
    }

    /// Correlations of a matrix, block by block: below the diagonal, row by row, from −1 to 1.
    pub fn of(&self, matrix: usize) -> impl Iterator<Item = (Range<usize>, impl Iterator<Item = f64>)> {
        let mut rest = self.stored(matrix);
        blocks(self.cols, self.block).map(move |range| {
            let (own, tail) = rest.split_at_checked(pairs(range.len())).unwrap_or_default();
            rest = tail;
            (range, own.iter().map(|&r| f64::from(r) / ONE))
        })
    }

    fn stored(&self, matrix: usize) -> &[i16] {
        let pairs = pairs_in(self.cols, self.block);
        self.below.get(matrix * pairs..(matrix + 1) * pairs).unwrap_or_default()
    }

    /// Merges two; `own` and `others` are the moments of the first reader. `None` if shapes differ.
    pub(super) fn merge(&self, own: &Moments, other: &Self, others: &Moments) -> Option<Self> {
        let alike = self.readers == other.readers && (self.cols, self.block) == (other.cols, other.block);
        if !alike || self.matrices() != other.matrices() || own.cols != self.cols || others.cols != self.cols
        {
            return None;
        }
        let mut below = Vec::with_capacity(self.below.len());
        for matrix in 0..self.matrices() {
            let squares = |c: &Self, m: &Moments| {
                let mean = if m.matrices() == c.matrices() { m.of(matrix).to_vec() } else { m.mean() };
                let n = c.tokens[matrix] as f64;
                mean.iter().map(|&x| n * f64::from(x)).collect::<Vec<_>>()
            };
            let (a, b) = (squares(self, own), squares(other, others));
            for ((range, mine), (_, theirs)) in self.of(matrix).zip(other.of(matrix)) {
                let (a, b) = (a.get(range.clone())?, b.get(range.clone())?);
                let at = (0..range.len()).flat_map(|i| (0..i).map(move |j| (i, j)));
                below.extend(at.zip(mine.zip(theirs)).map(|((i, j), (r, s))| {
                    let sum = r * (a[i] * a[j]).sqrt() + s * (b[i] * b[j]).sqrt();
                    stored_correlation(sum, (a[i] + b[i]) * (a[j] + b[j]))
                }));
            }
        }
        let tokens = self.tokens.iter().zip(&other.tokens).map(|(a, b)| a.saturating_add(*b)).collect();
        Some(Self { readers: self.readers.clone(), tokens, below, ..*self })
    }

    pub(super) fn check(&self, moments: impl Fn(&str) -> Option<(usize, usize)>) -> Result<(), ProfileFault> {
        let matrices = self.matrices();
        if !(1..=MOST).contains(&matrices)
            || !(1..=MOST).contains(&self.cols)
            || !(1..=WIDEST).contains(&self.block)
        {
            return Err(format!("{matrices} matrices of {} channels in blocks of {}", self.cols, self.block));
        }
        if matrices.checked_mul(pairs_in(self.cols, self.block)) != Some(self.below.len()) {
            return Err(format!("{} correlations of {matrices} × {} channels", self.below.len(), self.cols));
        }
        if self.tokens.iter().any(|&n| n > MOST_TOKENS) {
            return Err("more tokens than anyone can read".to_owned());
        }
        // The input of a layer can be that of all of its experts.
        let fits = |name: &String| {
            moments(name).is_some_and(|(l, c)| c == self.cols && (l == matrices || matrices == 1))
        };
        if self.readers.is_empty() || !self.readers.iter().all(fits) {
            return Err("correlations of another input than the moments".to_owned());
        }
        if self.below.contains(&i16::MIN) { Err("a correlation below −1".to_owned()) } else { Ok(()) }
    }
}

/// The correlation of two channels, from the sum of their products and the product of their sums of squares.
fn stored_correlation(sum: f64, squares: f64) -> i16 {
    let r = sum / squares.sqrt();
    if r.is_finite() { (r.clamp(-1.0, 1.0) * ONE).round() as i16 } else { 0 }
}

/// Encodes first the high bytes of all numbers, which are similar, then the low bytes.
impl Encode for Correlations {
    fn encode<E: Encoder>(&self, encoder: &mut E) -> Result<(), EncodeError> {
        self.readers.encode(encoder)?;
        self.cols.encode(encoder)?;
        self.block.encode(encoder)?;
        self.tokens.encode(encoder)?;
        let planes: Vec<u8> =
            (0..2).flat_map(|p| self.below.iter().map(move |x| x.to_be_bytes()[p])).collect();
        planes.encode(encoder)
    }
}

impl<C> Decode<C> for Correlations {
    fn decode<D: Decoder<Context = C>>(decoder: &mut D) -> Result<Self, DecodeError> {
        let readers = Vec::decode(decoder)?;
        let (cols, block) = (usize::decode(decoder)?, usize::decode(decoder)?);
        let tokens = Vec::<u64>::decode(decoder)?;
        let n = usize::try_from(u64::decode(decoder)?).map_err(|_| DecodeError::LimitExceeded)?;
        decoder.claim_bytes_read(n)?;
        if n % 2 != 0 {
            return Err(DecodeError::Other("numbers of less than two bytes"));
        }
        let mut planes = vec![0; n];
        decoder.reader().read(&mut planes)?;
        let (high, low) = planes.split_at(n / 2);
        let below = high.iter().zip(low).map(|(&h, &l)| i16::from_be_bytes([h, l])).collect();
        Ok(Self { readers, cols, block, tokens, below })
    }
}

bincode::impl_borrow_decode!(Correlations);
