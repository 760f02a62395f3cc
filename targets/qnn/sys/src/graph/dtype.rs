//! Types of numbers, and the encoding of real numbers in them.
#![expect(clippy::cast_possible_truncation, reason = "numbers are rounded and clamped to their range before")]

use bincode::{Decode, Encode};

/// Type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum DType {
    /// 32-bit float.
    F32,
    /// 16-bit float.
    F16,
    /// 32-bit integer; also of biases, whose numbers are quantised.
    I32,
    /// 32-bit integer without a sign; of indices, sizes and axes.
    U32,
    /// A truth value in a byte.
    Bool,
    /// Quantised, 8 bits with a sign; also of weights of fewer bits, one in each byte.
    S8,
    /// Quantised, 8 bits without a sign.
    U8,
    /// Quantised, 16 bits with a sign.
    S16,
    /// Quantised, 16 bits without a sign.
    U16,
    /// Quantised, 32 bits with a sign: biases.
    S32,
}

/// A type, its number in `Qnn_DataType_t`, bytes of an element, its name, and the bits of quantised numbers.
type Row = (DType, u32, usize, &'static str, Option<u32>);

const ROWS: [Row; 10] = [
    (DType::F32, 0x0232, 4, "f32", None),
    (DType::F16, 0x0216, 2, "f16", None),
    (DType::I32, 0x0032, 4, "i32", None),
    (DType::U32, 0x0132, 4, "u32", None),
    (DType::Bool, 0x0508, 1, "bool", None),
    (DType::S8, 0x0308, 1, "s8", Some(8)),
    (DType::U8, 0x0408, 1, "u8", Some(8)),
    (DType::S16, 0x0316, 2, "s16", Some(16)),
    (DType::U16, 0x0416, 2, "u16", Some(16)),
    (DType::S32, 0x0332, 4, "s32", Some(32)),
];

impl DType {
    fn row(self) -> &'static Row {
        // Rows are in the order of the variants; a test checks this.
        &ROWS[self as usize]
    }

    /// Its number in `Qnn_DataType_t`.
    pub fn code(self) -> u32 {
        self.row().1
    }

    /// The type of that number.
    pub fn of_code(code: u32) -> Option<Self> {
        ROWS.iter().find(|row| row.1 == code).map(|row| row.0)
    }

    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        self.row().2
    }

    /// A short name.
    pub fn name(self) -> &'static str {
        self.row().3
    }

    /// Bits of a quantised number; none for types that are what they are.
    pub fn bits(self) -> Option<u32> {
        self.row().4
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Values of stored numbers: `real = (stored + offset) · scale`.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
pub enum Quant {
    /// Stored numbers are the values.
    #[default]
    None,
    /// One scale and one offset. The offset is QNN's: the negated zero point, at most 0 for types without a
    /// sign.
    Tensor {
        /// Real distance of two neighbouring numbers, above zero.
        scale: f32,
        /// Added before scaling.
        offset: i32,
    },
    /// A scale for each index of an axis, offsets zero: weights and their biases.
    Channels {
        /// The axis.
        axis: u32,
        /// Bits of a number: 4 or 8, of biases 32. Numbers of 4 bits are one in each byte, `stored & 0xF`.
        bits: u32,
        /// Scales, as many as the axis is long.
        scales: Vec<f32>,
    },
}

impl Quant {
    /// The scale and offset with which an unsigned type of this many bits covers `low ..= high` and zero.
    pub fn covering(low: f32, high: f32, bits: u32) -> Self {
        let (low, high) = (low.min(0.0), high.max(0.0));
        let steps = ((1u64 << bits.min(32)) - 1) as f32;
        let scale = ((high - low) / steps).max(f32::MIN_POSITIVE);
        Self::Tensor { scale, offset: (low / scale).round() as i32 }
    }

    /// The scale and offset with which an unsigned type of this many bits covers `-reach .. reach`, with zero
    /// in its middle, as some operators require with 16 bits. The largest number is one step below `reach`,
    /// since half of all are negative.
    pub fn symmetric(reach: f32, bits: u32) -> Self {
        let half = 1i32 << (bits.clamp(1, 31) - 1);
        Self::Tensor { scale: (reach.abs() / half as f32).max(f32::MIN_POSITIVE), offset: -half }
    }
}

/// Value of a stored number: `(stored + offset) · scale`.
pub fn real(stored: i64, scale: f32, offset: i32) -> f64 {
    (stored + i64::from(offset)) as f64 * f64::from(scale)
}

/// The stored number for a real one, from `least` to `most`, and whether it is saturated: more than half a
/// step outside of the range. Ties go to the even number; NaN becomes the stored number of zero, and is
/// saturated.
pub fn stored(real: f64, scale: f32, offset: i32, (least, most): (i64, i64)) -> (i64, bool) {
    let exact = real / f64::from(scale) - f64::from(offset);
    if exact.is_nan() {
        return ((-i64::from(offset)).clamp(least, most), true);
    }
    let saturated = exact < least as f64 - 0.5 || exact > most as f64 + 0.5;
    (exact.round_ties_even().clamp(least as f64, most as f64) as i64, saturated)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dtype_rows_follow_the_variant_order() {
        for (index, row) in ROWS.iter().enumerate() {
            assert_eq!(row.0 as usize, index);
            assert_eq!(DType::of_code(row.0.code()), Some(row.0));
        }
        assert_eq!(DType::of_code(0x0116), None);
    }

    #[test]
    fn symmetric_scale_is_centred_on_zero() {
        for (reach, bits) in [(1.0, 16), (-3.0, 8)] {
            let Quant::Tensor { scale, offset } = Quant::symmetric(reach, bits) else { unreachable!() };
            let real = |stored: i64| (stored + i64::from(offset)) as f32 * scale;
            let reach = f32::abs(reach);
            assert_eq!((real(0), real(1 << (bits - 1)), real((1 << bits) - 1)), (-reach, 0.0, reach - scale));
        }
    }

    #[test]
    fn covering_scale_represents_both_ends_and_zero() {
        for (low, high) in [(-1.0, 3.0), (0.5, 2.0), (-4.0, -1.0), (0.0, 0.0)] {
            let Quant::Tensor { scale, offset } = Quant::covering(low, high, 16) else { unreachable!() };
            let real = |stored: i64| (stored + i64::from(offset)) as f32 * scale;
            assert!(real(0) <= low.min(0.0) + scale && real(65_535) >= high - scale, "{low} {high}");
            assert!((-65_535..=0).contains(&offset), "zero is a stored number: {offset}");
        }
    }
}
