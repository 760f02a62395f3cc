//! The parts of MXFP4 (OCP Microscaling Formats 1.0): E2M1 numbers and E8M0 scales.

use super::Encoding;
use super::plain::PLAIN;

/// E8M0 under its own type name.
pub const E8M0: Encoding = Encoding {
    title: "E8M0",
    dtype: "F8_E8M0",
    decode: |stored, _, out| {
        for (x, &s) in out.iter_mut().zip(stored) {
            *x = scale(s);
        }
    },
    ..PLAIN
};

/// E8M0 in tensors of type byte.
pub const E8M0_BYTES: Encoding = Encoding { dtype: "U8", ..E8M0 };

/// The sixteen E2M1 numbers: sign, two exponent bits with bias 1, one mantissa bit.
pub const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// An E8M0 scale, `2^(s − 127)`; 255 is NaN.
pub fn scale(s: u8) -> f32 {
    match s {
        255 => f32::NAN,
        // 2^−127 is subnormal in f32.
        0 => f32::from_bits(1 << 22),
        s => f32::from_bits(u32::from(s) << 23),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_that_of_the_specification() {
        // Table 5 of OCP MX 1.0: (−1)^s · 2^(e−1) · (1 + m/2), and m/2 where e = 0.
        for (bits, &value) in E2M1.iter().enumerate() {
            let (s, e, m) = (bits >> 3, (bits >> 1) & 3, (bits & 1) as f32 / 2.0);
            let magnitude = if e == 0 { m } else { (1 << (e - 1)) as f32 * (1.0 + m) };
            let expect = if s == 1 { -magnitude } else { magnitude };
            assert_eq!(value.to_bits(), expect.to_bits());
        }
    }

    #[test]
    fn scales_are_powers_of_two() {
        for s in 0..=254_u8 {
            assert_eq!(f64::from(scale(s)), 2.0_f64.powi(i32::from(s) - 127));
        }
        assert!(scale(255).is_nan());
    }
}
