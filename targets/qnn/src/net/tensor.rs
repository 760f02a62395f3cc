//! Tensors of a network: shape, type of the numbers, what codes mean, and where static numbers lie.

use moec_qnn_sys::graph;
use std::sync::Arc;

/// Type of the numbers of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Dtype {
    /// 32-bit floating point.
    F32,
    /// 16-bit floating point.
    F16,
    /// Codes of 16 bits without sign: activations.
    U16,
    /// Codes of 8 bits without sign: activations.
    U8,
    /// Codes of 8 bits: weights.
    I8,
    /// Codes of 4 bits: weights. Two are in a byte, the first in its lower half.
    I4,
    /// Codes of 32 bits: biases; or indices.
    I32,
}

impl Dtype {
    /// Name in text, bits, least and largest code.
    const TABLE: [(Self, &'static str, u64, i64, i64); 7] = [
        (Self::F32, "f32", 32, 0, 0),
        (Self::F16, "f16", 16, 0, 0),
        (Self::U16, "u16", 16, 0, u16::MAX as i64),
        (Self::U8, "u8", 8, 0, u8::MAX as i64),
        (Self::I8, "i8", 8, i8::MIN as i64, i8::MAX as i64),
        (Self::I4, "i4", 4, -8, 7),
        (Self::I32, "i32", 32, i32::MIN as i64, i32::MAX as i64),
    ];

    /// Name in text.
    pub const fn name(self) -> &'static str {
        Self::TABLE[self as usize].1
    }

    /// Bits of a number.
    pub const fn bits(self) -> u64 {
        Self::TABLE[self as usize].2
    }

    /// Least and largest code.
    pub const fn codes(self) -> (i64, i64) {
        let row = Self::TABLE[self as usize];
        (row.3, row.4)
    }

    /// Whether values are stored directly, not as codes.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F16)
    }

    /// Bytes of this many numbers, saturating.
    pub const fn bytes(self, count: u64) -> u64 {
        count.saturating_mul(self.bits()).div_ceil(8)
    }
}

/// Values of one tensor's codes: `real = (code + offset) · scale`, as QNN has it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    /// Distance of two codes.
    pub scale: f32,
    /// Added to a code; the code of zero is `−offset`.
    pub offset: i32,
}

impl Scale {
    /// Value of a code.
    pub fn real(self, code: i64) -> f64 {
        graph::real(code, self.scale, self.offset)
    }

    /// The code of a number and whether it is saturated: more than half a step outside of what codes of the
    /// type reach. Halves go to the even code, as ONNX's `QuantizeLinear` has them; NaN becomes the code of
    /// zero, and is saturated.
    pub fn code(self, real: f64, ty: Dtype) -> (i64, bool) {
        graph::stored(real, self.scale, self.offset, ty.codes())
    }
}

/// Values of a tensor's numbers.
#[derive(Clone, Debug, PartialEq)]
pub enum Quant {
    /// Stored numbers are the values.
    None,
    /// Codes with one scale and offset.
    Tensor(Scale),
    /// Codes with a scale for each entry of the first axis, and no offset: `real = code · scale`.
    Channels(Arc<[f32]>),
}

/// Place of a static tensor's numbers: little-endian, row-major, without gaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Data {
    /// Here.
    Here(Arc<[u8]>),
    /// In a file beside the artifact, from this byte on.
    File {
        /// Name of the file, without a folder.
        file: Arc<str>,
        /// First byte.
        offset: u64,
    },
}

/// A tensor of a network.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Name, unique in the network.
    pub name: String,
    /// Extents; empty for a single number.
    pub shape: Vec<usize>,
    /// Type of the numbers.
    pub ty: Dtype,
    /// Their values.
    pub quant: Quant,
    /// Place of the numbers, if they are known at build time.
    pub data: Option<Data>,
}

impl Tensor {
    /// An activation in f32.
    pub fn activation(name: impl Into<String>, shape: impl Into<Vec<usize>>) -> Self {
        Self { name: name.into(), shape: shape.into(), ty: Dtype::F32, quant: Quant::None, data: None }
    }

    /// Numbers that are known, in f32.
    pub fn floats(name: impl Into<String>, shape: impl Into<Vec<usize>>, numbers: &[f32]) -> Self {
        let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
        Self { data: Some(Data::Here(bytes.into())), ..Self::activation(name, shape) }
    }

    /// Whole numbers that are known: indices.
    pub fn indices(name: impl Into<String>, shape: impl Into<Vec<usize>>, numbers: &[i32]) -> Self {
        let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
        let data = Some(Data::Here(bytes.into()));
        Self { ty: Dtype::I32, data, ..Self::activation(name, shape) }
    }

    /// Its elements, saturating.
    pub fn elements(&self) -> u64 {
        elements(&self.shape)
    }

    /// Bytes of its numbers.
    pub fn bytes(&self) -> u64 {
        self.ty.bytes(self.elements())
    }

    /// Whether its numbers are known at build time.
    pub const fn is_static(&self) -> bool {
        self.data.is_some()
    }
}

/// Product of extents, saturating.
pub fn elements(shape: &[usize]) -> u64 {
    shape.iter().fold(1, |n, &d| n.saturating_mul(d as u64))
}

/// Codes of 4 bits, two in a byte, the first in its lower half.
pub fn pack_nibbles(codes: impl IntoIterator<Item = i8>) -> Vec<u8> {
    let mut codes = codes.into_iter();
    let mut out = Vec::new();
    while let Some(low) = codes.next() {
        let high = codes.next().unwrap_or(0);
        out.push((low.cast_unsigned() & 15) | (high.cast_unsigned() << 4));
    }
    out
}

/// The first `count` codes of 4 bits.
pub fn unpack_nibbles(bytes: &[u8], count: usize) -> impl Iterator<Item = i8> + '_ {
    let both = |b: &u8| [(b.cast_signed() << 4) >> 4, b.cast_signed() >> 4];
    bytes.iter().flat_map(both).take(count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_table_is_in_the_order_of_the_enum() {
        for (i, row) in Dtype::TABLE.iter().enumerate() {
            assert_eq!(row.0 as usize, i, "{}", row.1);
        }
    }

    #[test]
    fn codes_round_to_even_and_saturate_beyond_half_a_step() {
        let scale = Scale { scale: 0.5, offset: -10 };
        assert_eq!(scale.code(0.0, Dtype::U8), (10, false));
        assert_eq!([0.25, 0.75, -0.25].map(|x| scale.code(x, Dtype::U8).0), [10, 12, 10]);
        assert_eq!(scale.code(-5.25, Dtype::U8), (0, false));
        assert_eq!(scale.code(-5.26, Dtype::U8), (0, true));
        assert_eq!(scale.code(1e9, Dtype::U8), (255, true));
        assert_eq!(scale.code(f64::NAN, Dtype::U8), (10, true));
    }

    proptest! {
        #[test]
        fn nibbles_round_trip(codes in proptest::collection::vec(-8_i8..8, 0..40)) {
            let packed = pack_nibbles(codes.iter().copied());
            prop_assert_eq!(packed.len() as u64, Dtype::I4.bytes(codes.len() as u64));
            prop_assert_eq!(unpack_nibbles(&packed, codes.len()).collect::<Vec<_>>(), codes);
        }

        #[test]
        fn codes_round_trip(code in 0_i64..65536, offset in -65535_i32..=0, scale in 1e-6_f32..1.0) {
            let scale = Scale { scale, offset };
            prop_assert_eq!(scale.code(scale.real(code), Dtype::U16), (code, false));
        }
    }
}
