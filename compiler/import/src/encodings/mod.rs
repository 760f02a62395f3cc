//! Encodings: the ways in which checkpoints store numbers, one row each, and their decoders to `f32`.

pub mod coded;
pub mod fp8;
pub mod mxfp4;
pub mod plain;

use moec_ir::Format;

/// A storage format of a tensor's numbers, row by row, in blocks of a fixed size.
#[derive(Clone, Copy, Debug)]
pub struct Encoding {
    /// Name for people.
    pub title: &'static str,
    /// The stored type, by its name in containers.
    pub dtype: &'static str,
    /// Numbers in a block. Rows have whole blocks.
    pub block: usize,
    /// Bytes of a block.
    pub bytes: usize,
    /// The format of weights that can hold the numbers exactly as stored.
    pub native_format: Option<ExactFormat>,
    /// Decodes numbers.
    pub decode: Decode,
}

/// Decodes consecutive numbers of a row, beginning with column `from`: `decode(stored, from, out)`. `stored`
/// is the row's blocks from the one of column `from` on. Elements of `out` after the end of the blocks are
/// unchanged.
pub type Decode = fn(&[u8], usize, &mut [f32]);

/// A format of weights that holds numbers exactly as a checkpoint stores them.
#[derive(Clone, Copy, Debug)]
pub struct ExactFormat {
    /// The format.
    pub format: Format,
    /// Conversion to the format's numbers.
    pub conversion: Conversion,
}

/// Conversion of stored numbers.
#[derive(Clone, Copy, Debug)]
pub enum Conversion {
    /// Bytes are copied, if this function finds all numbers in them finite.
    Whole(fn(&[u8]) -> bool),
    /// Codes and scales.
    Coded(coded::DecodeCodes),
    /// Codes and scales of two levels.
    Fine(coded::DecodeFine),
}

/// Every supported encoding.
pub const ENCODINGS: [&Encoding; 3] = [&plain::F32, &plain::BF16, &plain::F16];

/// Returns the row of a type.
pub fn of(table: &[&'static Encoding], dtype: &str) -> Option<&'static Encoding> {
    table.iter().copied().find(|row| row.dtype == dtype)
}

impl Encoding {
    /// Bytes of a row of `cols` numbers, if these are whole blocks.
    pub fn row_bytes(&self, cols: usize) -> Option<usize> {
        cols.is_multiple_of(self.block).then(|| (cols / self.block).checked_mul(self.bytes))?
    }
}

/// The element that could not be decoded to a finite number, by its index among the requested ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NonFinite {
    /// Position in the output.
    pub at: usize,
}

/// The first number that is infinite or NaN.
pub fn first_non_finite(numbers: &[f32]) -> Option<NonFinite> {
    // The largest magnitude, as an integer, so that the loop is vectorised.
    let largest = |m: i32, x: &f32| m.max(x.to_bits().cast_signed() & i32::MAX);
    let suspicious = numbers
        .chunks(256)
        .position(|c| c.iter().fold(0, largest) >= f32::INFINITY.to_bits().cast_signed())?;
    let from = suspicious * 256;
    numbers[from..].iter().position(|x| !x.is_finite()).map(|i| NonFinite { at: from + i })
}

/// A shape without its axes of 1, which do not change the position of any number.
pub fn squeezed(shape: &[usize]) -> impl Iterator<Item = &usize> {
    shape.iter().filter(|&&n| n != 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encodings_are_unique_and_decode_whole_blocks() {
        for row in ENCODINGS.into_iter().chain([&fp8::E4M3, &mxfp4::E8M0]) {
            let found = of(&ENCODINGS, row.dtype);
            assert!(found.is_none_or(|found| found.title == row.title), "{} is after another", row.title);
            // Every number of two blocks is written, from any column on, and no byte after the blocks is
            // read.
            let cols = 2 * row.block;
            let stored = vec![0x31; row.row_bytes(cols).unwrap()];
            let mut whole = vec![f32::NAN; cols];
            (row.decode)(&stored, 0, &mut whole);
            assert!(whole.iter().all(|x| x.is_finite()), "{}", row.title);
            assert!(row.native_format.is_none_or(|native| native.format.stored_bytes() > 0), "{}", row.title);
            for from in 0..cols {
                let mut part = vec![f32::NAN; cols - from];
                (row.decode)(&stored[from / row.block * row.bytes..], from, &mut part);
                assert_eq!(part, whole[from..], "{} from {from}", row.title);
                (row.decode)(&[], from, &mut part);
            }
        }
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
