//! Blocks of 32 codes and a scale in the form of a weight format, copied without rounding.

use moec_ir::types::{E2M1, FINE_STORED, GROUP};

/// Writes consecutive numbers of a row, beginning with column `from`, in the form of
/// [`moec_ir::Source::stored`]: `take(stored, from, out)`. `stored` is the row's blocks from the one of
/// column `from` on. Returns `false` if a number is not finite or blocks are missing.
pub type DecodeCodes = fn(&[u8], usize, &mut [[u8; 3]]) -> bool;

/// As [`DecodeCodes`], of numbers with scales of two levels.
pub type DecodeFine = fn(&[u8], usize, &mut [[u8; FINE_STORED]]) -> bool;

/// A block: codes, and the scale as 16 bits and as a number.
pub struct Block {
    /// Codes in multiples of the scale.
    pub codes: [i8; GROUP],
    /// The scale in the format's 16 bits.
    pub bits: u16,
    /// The scale as a number.
    pub scale: f32,
}

/// Copies numbers of blocks; `block(0)` is the block of column `from`.
pub fn take(block: impl Fn(usize) -> Option<Block>, from: usize, mut out: &mut [[u8; 3]]) -> bool {
    let mut first = from % GROUP;
    for i in 0.. {
        if out.is_empty() {
            break;
        }
        let Some(Block { codes, bits, scale }) = block(i) else { return false };
        if !codes.iter().all(|&code| (f32::from(code) * scale).is_finite()) {
            return false;
        }
        let count = (GROUP - first).min(out.len());
        let now = out.split_off_mut(..count).unwrap_or_default();
        let [low, high] = bits.to_le_bytes();
        for (to, code) in now.iter_mut().zip(&codes[first..]) {
            *to = [code.cast_unsigned(), low, high];
        }
        first = 0;
    }
    true
}

/// Half of `2^(s − 127)`, as bf16 and as f32; bf16 can represent every value.
pub fn half_power(s: u8) -> (u16, f32) {
    let bits = match s {
        // Subnormal.
        small @ 0..=1 => 0x0020_0000 << small,
        s => u32::from(s - 1) << 23,
    };
    ((bits >> 16) as u16, f32::from_bits(bits))
}

/// Nibbles as integer codes of E2M1. Zeros lose their sign, which does not affect sums.
pub fn e2m1(nibble: u8) -> i8 {
    E2M1[usize::from(nibble & 15)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_powers_are_exact() {
        for s in 0..=255_u8 {
            let (bits, scale) = half_power(s);
            assert_eq!(f64::from(scale), 2.0_f64.powi(i32::from(s) - 128));
            assert_eq!(half::bf16::from_bits(bits).to_f32(), scale);
        }
    }

    #[test]
    fn any_range_of_columns() {
        let block = |i: usize| {
            let codes = std::array::from_fn(|c| (i * GROUP + c) as i8);
            (i < 3).then_some(Block { codes, bits: 0x0100 + i as u16, scale: 1.0 })
        };
        let mut whole = [[0; 3]; 3 * GROUP];
        assert!(take(block, 0, &mut whole));
        assert_eq!(whole[70], [70, 2, 1]);
        for (from, to) in [(0, 1), (31, 33), (5, 90), (95, 96)] {
            let mut part = vec![[0; 3]; to - from];
            assert!(take(|i| block(i + from / GROUP), from, &mut part));
            assert_eq!(part, whole[from..to]);
        }
        assert!(!take(block, 0, &mut [[0; 3]; 3 * GROUP + 1]), "a block is missing");
    }

    #[test]
    fn codes_with_non_finite_values_are_not_converted() {
        let of =
            |code, scale| take(|_| Some(Block { codes: [code; GROUP], bits: 0, scale }), 0, &mut [[0; 3]; 5]);
        assert!(of(1, f32::MAX) && of(-128, 1.0) && of(0, 1.0));
        assert!(!of(2, f32::MAX) && !of(0, f32::NAN) && !of(0, f32::INFINITY) && !of(1, f32::NEG_INFINITY));
    }
}
