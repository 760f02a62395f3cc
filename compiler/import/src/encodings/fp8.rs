//! FP8 E4M3, for weights and for the scales of NVFP4.
#![expect(clippy::cast_possible_truncation, reason = "a table of all bytes")]

use super::Encoding;
use super::plain::PLAIN;

/// The encoding.
pub const E4M3: Encoding = Encoding {
    title: "FP8 E4M3",
    dtype: "F8_E4M3",
    decode: |stored, _, out| {
        for (x, &b) in out.iter_mut().zip(stored) {
            *x = TABLE[usize::from(b)];
        }
    },
    ..PLAIN
};

/// A number of E4M3 in the `fn` variant: bias 7, no infinity; 0x7F and 0xFF are NaN.
pub const fn e4m3(bits: u8) -> f32 {
    let magnitude = bits & 0x7f;
    let (exponent, mantissa) = (magnitude >> 3, magnitude & 7);
    let value = if magnitude == 0x7f {
        f32::NAN
    } else if exponent == 0 {
        // Subnormal: mantissa · 2^−9.
        mantissa as f32 / 512.0
    } else {
        f32::from_bits(((exponent as u32 + 120) << 23) | ((mantissa as u32) << 20))
    };
    if bits & 0x80 == 0 { value } else { -value }
}

/// Every E4M3 number, indexed by its bits.
static TABLE: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut i = 0;
    while i < 256 {
        table[i] = e4m3(i as u8);
        i += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e4m3_extremes_match_the_paper() {
        // Table 1 of "FP8 Formats for Deep Learning" (arXiv 2209.05433).
        assert_eq!(e4m3(0b0111_1110), 448.0);
        assert_eq!(e4m3(0b0000_1000), 2.0_f32.powi(-6));
        assert_eq!(e4m3(0b0000_0111), 0.875 * 2.0_f32.powi(-6));
        assert_eq!(e4m3(0b0000_0001), 2.0_f32.powi(-9));
        assert_eq!(e4m3(0), 0.0);
        assert_eq!(e4m3(0x80).to_bits(), (-0.0_f32).to_bits());
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
        assert_eq!(e4m3(0b1011_1100), -1.5);
    }

    #[test]
    fn every_e4m3_code_decodes_by_the_formula() {
        for bits in (0..=255_u8).filter(|b| b & 0x7f != 0x7f) {
            let (s, e, m) = (bits >> 7, i32::from(bits >> 3 & 15), f32::from(bits & 7));
            let v = if e == 0 { m / 8.0 * 2.0_f32.powi(-6) } else { (1.0 + m / 8.0) * 2.0_f32.powi(e - 7) };
            assert_eq!(e4m3(bits), if s == 1 { -v } else { v });
        }
    }
}
