//! The IEEE formats: f32, f16, and bf16.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use moec_ir::Format;

/// A stored floating-point format that holds one number per element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Float {
    /// IEEE binary32.
    F32,
    /// The upper half of binary32.
    Bf16,
    /// IEEE binary16.
    F16,
}

impl Float {
    /// Bytes of a number.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// The format of weights whose numbers these are.
    pub const fn format(self) -> Format {
        match self {
            Self::F32 => Format::F32,
            Self::Bf16 => Format::Bf16,
            Self::F16 => Format::F16,
        }
    }

    /// Whether little-endian numbers are all finite.
    pub fn all_finite(self, stored: &[u8]) -> bool {
        // The largest magnitude, as an integer: a loop that vectorises. Signed, which SSE2 can compare.
        let largest = |m: i16, b: &[u8; 2]| m.max(i16::from_le_bytes(*b) & i16::MAX);
        let halves = |infinity: i16| stored.as_chunks().0.iter().fold(0, largest) < infinity;
        match self {
            Self::F32 => {
                let largest = |m: i32, b: &[u8; 4]| m.max(i32::from_le_bytes(*b) & i32::MAX);
                stored.as_chunks().0.iter().fold(0, largest) < f32::INFINITY.to_bits().cast_signed()
            }
            Self::Bf16 => halves(bf16::INFINITY.to_bits().cast_signed()),
            Self::F16 => halves(f16::INFINITY.to_bits().cast_signed()),
        }
    }

    /// Decodes little-endian numbers, as many as both sides hold.
    pub fn decode(self, stored: &[u8], out: &mut [f32]) {
        match self {
            Self::F32 => {
                for (x, b) in out.iter_mut().zip(stored.as_chunks().0) {
                    *x = f32::from_le_bytes(*b);
                }
            }
            Self::Bf16 => {
                for (x, b) in out.iter_mut().zip(stored.as_chunks().0) {
                    *x = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
                }
            }
            Self::F16 => {
                let mut block = [f16::ZERO; 128];
                for (out, stored) in out.chunks_mut(128).zip(stored.chunks(256)) {
                    let n = out.len().min(stored.len() / 2);
                    for (h, b) in block.iter_mut().zip(stored.as_chunks().0) {
                        *h = f16::from_le_bytes(*b);
                    }
                    block[..n].convert_to_f32_slice(&mut out[..n]);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(float: Float, stored: &[u8], expect: &[f32]) {
        let mut out = vec![0.0; expect.len()];
        float.decode(stored, &mut out);
        assert_eq!(out, expect);
    }

    #[test]
    fn decodes_little_endian() {
        check(Float::F32, &[0, 0, 0x80, 0x3f, 0, 0, 0x20, 0xc0], &[1.0, -2.5]);
        check(Float::Bf16, &[0x80, 0x3f, 0x20, 0xc0], &[1.0, -2.5]);
        // 1.0, −2.5, the smallest subnormal.
        check(Float::F16, &[0x00, 0x3c, 0x00, 0xc1, 0x01, 0x00], &[1.0, -2.5, 1.0 / 16_777_216.0]);
    }

    #[test]
    fn finite_is_neither_infinite_nor_nan() {
        type Bytes<'a> = &'a dyn Fn(f32) -> Vec<u8>;
        let f32s = |x: f32| x.to_le_bytes().to_vec();
        let bf16s = |x: f32| bf16::from_f32(x).to_le_bytes().to_vec();
        let f16s = |x: f32| f16::from_f32(x).to_le_bytes().to_vec();
        let cases: [(Float, Bytes<'_>, f32); 3] = [
            (Float::F32, &f32s, f32::MAX),
            (Float::Bf16, &bf16s, bf16::MAX.to_f32()),
            (Float::F16, &f16s, f16::MAX.to_f32()),
        ];
        for (float, to, largest) in cases {
            let all = |x: f32| [to(1.0).repeat(70), to(x), to(-2.0).repeat(3)].concat();
            assert!([0.0, -0.0, largest, -largest].iter().all(|&x| float.all_finite(&all(x))));
            let bad = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN];
            assert!(!bad.iter().any(|&x| float.all_finite(&all(x))));
        }
    }

    #[test]
    fn f16_crosses_the_block_boundary() {
        let stored: Vec<u8> = (0..300).flat_map(|i| f16::from_f32(i as f32).to_le_bytes()).collect();
        let expect: Vec<f32> = (0..300).map(|i| i as f32).collect();
        check(Float::F16, &stored, &expect);
    }
}
