//! The IEEE formats: f32, f16, and bf16.

use half::f16;
use half::slice::HalfFloatSliceExt;

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
    fn f16_crosses_the_block_boundary() {
        let stored: Vec<u8> = (0..300).flat_map(|i| f16::from_f32(i as f32).to_le_bytes()).collect();
        let expect: Vec<f32> = (0..300).map(|i| i as f32).collect();
        check(Float::F16, &stored, &expect);
    }
}
