//! Encodings: how checkpoints store numbers, one row each, and what decodes them to `f32`.

pub mod coded;
pub mod fp8;
pub mod mxfp4;
pub mod plain;

use moec_ir::{Encoding as Stored, Format};
use std::mem::discriminant;

/// A way to store the numbers of a tensor, row by row, in blocks of a fixed size.
#[derive(Clone, Copy, Debug)]
pub struct Encoding {
    /// Name for people.
    pub title: &'static str,
    /// What the Graph calls it, given the name of the tensor of its scales.
    pub leaf: fn(String) -> Stored,
    /// The stored type, as containers name it.
    pub dtype: &'static str,
    /// What a tensor's name ends with, behind the name of the weight.
    pub suffix: &'static str,
    /// Numbers of a row in a block. Rows hold whole blocks.
    pub block: usize,
    /// Bytes of a block.
    pub bytes: usize,
    /// Whether the stored shape ends with the blocks of a row and the bytes of a block, in place of a row's numbers.
    pub by_block: bool,
    /// Scales in a tensor of their own.
    pub scales: Option<Scales>,
    /// The format of weights that holds the numbers as they are stored.
    pub same: Option<Same>,
    /// Decodes.
    pub decode: Decode,
}

/// Decodes consecutive numbers of a row, the first being column `from`, as `decode(stored, scales, from, out)`. `stored` are the
/// row's blocks and `scales` its scales, both from the one of column `from` on. What lies past the end of either stays as it was.
pub type Decode = fn(&[u8], &[f32], usize, &mut [f32]);

/// Scales that lie in a tensor of their own.
#[derive(Clone, Copy, Debug)]
pub struct Scales {
    /// What the tensor's name ends with, in place of the suffix of the numbers.
    pub suffix: &'static str,
    /// Rows and columns that share a scale; blocks at the edges are smaller.
    pub block: [usize; 2],
    /// How they may be stored, in blocks of one.
    pub of: &'static [&'static Encoding],
    /// Whose checkpoints have them, as a message ends.
    pub known: &'static str,
}

/// A format of weights that holds numbers as a checkpoint stores them.
#[derive(Clone, Copy, Debug)]
pub struct Same {
    /// The format.
    pub format: Format,
    /// How they become its numbers.
    pub taken: Taken,
}

/// How stored numbers are taken over.
#[derive(Clone, Copy, Debug)]
pub enum Taken {
    /// As they are, if this says of their bytes that all are finite.
    Whole(fn(&[u8]) -> bool),
    /// As codes and scales.
    Coded(coded::Take),
}

/// Every encoding that is read.
pub const ENCODINGS: [&Encoding; 5] = [&plain::F32, &plain::BF16, &plain::F16, &mxfp4::MXFP4, &fp8::FP8];

/// The row of a leaf whose tensor has this type.
pub fn of(table: &[&'static Encoding], leaf: &Stored, dtype: &str) -> Option<&'static Encoding> {
    let is = |row: &&Encoding| {
        row.dtype == dtype && discriminant(&(row.leaf)(String::new())) == discriminant(leaf)
    };
    table.iter().copied().find(is)
}

impl Encoding {
    /// Bytes of a row of so many numbers, if they are whole blocks.
    pub fn row_bytes(&self, cols: usize) -> Option<usize> {
        cols.is_multiple_of(self.block).then(|| (cols / self.block).checked_mul(self.bytes))?
    }

    /// Whether a tensor of the stored shape holds numbers of this one.
    pub fn holds(&self, stored: &[usize], shape: &[usize]) -> bool {
        match (self.by_block, stored, shape) {
            (true, [stored @ .., blocks, bytes], [shape @ .., cols]) => {
                stored == shape && *bytes == self.bytes && blocks.checked_mul(self.block) == Some(*cols)
            }
            _ => squeezed(stored).eq(squeezed(shape)),
        }
    }

    /// Whether tensors of so many axes have scales.
    pub fn takes(&self, axes: usize) -> bool {
        self.scales.is_none_or(|scales| scales.block[0] == 1 || axes >= 2)
    }
}

/// The element that could not be decoded to a finite number: its index among those asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NonFinite {
    /// Position in the output.
    pub at: usize,
}

/// The first number that is infinite or not a number.
pub fn first_non_finite(numbers: &[f32]) -> Option<NonFinite> {
    // The largest magnitude, as an integer: a loop that vectorises.
    let largest = |m: i32, x: &f32| m.max(x.to_bits().cast_signed() & i32::MAX);
    let suspicious = numbers
        .chunks(256)
        .position(|c| c.iter().fold(0, largest) >= f32::INFINITY.to_bits().cast_signed())?;
    let from = suspicious * 256;
    numbers[from..].iter().position(|x| !x.is_finite()).map(|i| NonFinite { at: from + i })
}

/// A shape without its axes of 1, which change no number's place.
pub fn squeezed(shape: &[usize]) -> impl Iterator<Item = &usize> {
    shape.iter().filter(|&&n| n != 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_differ_and_fill_their_blocks() {
        for (i, row) in ENCODINGS.iter().enumerate() {
            let leaf = (row.leaf)("s".to_owned());
            assert_eq!(leaf.scales(), row.scales.map(|_| "s"), "{}", row.title);
            let found = of(&ENCODINGS, &leaf, row.dtype).unwrap();
            assert_eq!(found.title, row.title, "row {i} is behind another of its leaf and type");
            // Every number of two blocks is written, from any column on, and nothing is read behind the blocks.
            let cols = 2 * row.block;
            let stored = vec![0x31; row.row_bytes(cols).unwrap()];
            let scales = vec![2.0; cols];
            let mut whole = vec![f32::NAN; cols];
            (row.decode)(&stored, &scales, 0, &mut whole);
            assert!(whole.iter().all(|x| x.is_finite()), "{}", row.title);
            assert!(row.same.is_none_or(|same| same.format.stored_bytes() > 0), "{}", row.title);
            for from in 0..cols {
                let mut part = vec![f32::NAN; cols - from];
                (row.decode)(&stored[from / row.block * row.bytes..], &scales, from, &mut part);
                assert_eq!(part, whole[from..], "{} from {from}", row.title);
                (row.decode)(&[], &[], from, &mut part);
            }
            if let Some(scales) = row.scales {
                assert!(scales.of.iter().all(|of| of.block == 1 && of.scales.is_none()));
            }
        }
    }

    #[test]
    fn shapes_by_block_and_by_number() {
        assert!(plain::F32.holds(&[2, 3], &[2, 3]) && !plain::F32.holds(&[3, 2], &[2, 3]));
        let holds = |stored: &[usize]| mxfp4::MXFP4.holds(stored, &[3, 96]);
        assert!(holds(&[3, 3, 16]));
        assert!(
            !holds(&[3, 96]) && !holds(&[3, 2, 16]) && !holds(&[3, 3, 8]) && !holds(&[3, usize::MAX, 16])
        );
    }

    #[test]
    fn finds_the_first_non_finite_number() {
        let mut x = vec![1.0; 1000];
        assert_eq!(first_non_finite(&x), None);
        x[700] = f32::NAN;
        x[900] = f32::INFINITY;
        assert_eq!(first_non_finite(&x), Some(NonFinite { at: 700 }));
    }

    #[test]
    fn the_largest_numbers_are_finite() {
        let mut x = vec![f32::MAX; 600];
        assert_eq!(first_non_finite(&x), None);
        x[599] = f32::NEG_INFINITY;
        assert_eq!(first_non_finite(&x), Some(NonFinite { at: 599 }));
    }
}
