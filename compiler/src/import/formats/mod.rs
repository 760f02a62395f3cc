//! Number formats of checkpoints: rows of stored bytes to rows of `f32`.

pub mod fp8;
pub mod mxfp4;
pub mod plain;

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

#[cfg(test)]
mod tests {
    use super::*;

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
