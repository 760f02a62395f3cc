//! The IEEE formats: f32, f16, and bf16.

use super::{Conversion, Encoding, ExactFormat};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use moec_ir::Format;

/// IEEE binary32.
pub const F32: Encoding = Encoding {
    title: "F32",
    dtype: "F32",
    bytes: 4,
    native_format: Some(ExactFormat {
        format: Format::F32,
        conversion: Conversion::Whole(|stored| {
            // The largest magnitude, as an integer, so that the loop is vectorised. It is signed, since SSE2
            // can compare that.
            let largest = |m: i32, b: &[u8; 4]| m.max(i32::from_le_bytes(*b) & i32::MAX);
            stored.as_chunks().0.iter().fold(0, largest) < f32::INFINITY.to_bits().cast_signed()
        }),
    }),
    decode: |stored, _, out| {
        for (x, b) in out.iter_mut().zip(stored.as_chunks().0) {
            *x = f32::from_le_bytes(*b);
        }
    },
    ..PLAIN
};

/// The upper half of binary32.
pub const BF16: Encoding = Encoding {
    title: "BF16",
    dtype: "BF16",
    bytes: 2,
    native_format: Some(ExactFormat {
        format: Format::Bf16,
        conversion: Conversion::Whole(|stored| halves_below(bf16::INFINITY.to_bits().cast_signed(), stored)),
    }),
    decode: |stored, _, out| {
        for (x, b) in out.iter_mut().zip(stored.as_chunks().0) {
            *x = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
        }
    },
    ..PLAIN
};

/// IEEE binary16.
pub const F16: Encoding = Encoding {
    title: "F16",
    dtype: "F16",
    bytes: 2,
    native_format: Some(ExactFormat {
        format: Format::F16,
        conversion: Conversion::Whole(|stored| halves_below(f16::INFINITY.to_bits().cast_signed(), stored)),
    }),
    decode: |stored, _, out| {
        let mut block = [f16::ZERO; 128];
        for (out, stored) in out.chunks_mut(128).zip(stored.chunks(256)) {
            let n = out.len().min(stored.len() / 2);
            for (h, b) in block.iter_mut().zip(stored.as_chunks().0) {
                *h = f16::from_le_bytes(*b);
            }
            block[..n].convert_to_f32_slice(&mut out[..n]);
        }
    },
    ..PLAIN
};

/// Common fields of encodings with one number per block.
pub(super) const PLAIN: Encoding =
    Encoding { title: "", dtype: "", block: 1, bytes: 1, native_format: None, decode: |_, _, _| {} };

/// Whether the magnitudes of 16-bit numbers are below infinity.
fn halves_below(infinity: i16, stored: &[u8]) -> bool {
    let largest = |m: i16, b: &[u8; 2]| m.max(i16::from_le_bytes(*b) & i16::MAX);
    stored.as_chunks().0.iter().fold(0, largest) < infinity
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(row: Encoding, stored: &[u8], expect: &[f32]) {
        let mut out = vec![0.0; expect.len()];
        (row.decode)(stored, 0, &mut out);
        assert_eq!(out, expect);
    }

    #[test]
    fn decodes_little_endian() {
        check(F32, &[0, 0, 0x80, 0x3f, 0, 0, 0x20, 0xc0], &[1.0, -2.5]);
        check(BF16, &[0x80, 0x3f, 0x20, 0xc0], &[1.0, -2.5]);
        // 1.0, −2.5, the smallest subnormal.
        check(F16, &[0x00, 0x3c, 0x00, 0xc1, 0x01, 0x00], &[1.0, -2.5, 1.0 / 16_777_216.0]);
    }

    #[test]
    fn finite_is_neither_infinite_nor_nan() {
        type Bytes<'a> = &'a dyn Fn(f32) -> Vec<u8>;
        let f32s = |x: f32| x.to_le_bytes().to_vec();
        let bf16s = |x: f32| bf16::from_f32(x).to_le_bytes().to_vec();
        let f16s = |x: f32| f16::from_f32(x).to_le_bytes().to_vec();
        let cases: [(Encoding, Bytes<'_>, f32); 3] =
            [(F32, &f32s, f32::MAX), (BF16, &bf16s, bf16::MAX.to_f32()), (F16, &f16s, f16::MAX.to_f32())];
        for (row, to, largest) in cases {
            let Conversion::Whole(all_finite) = row.native_format.unwrap().conversion else {
                panic!("{}", row.title)
            };
            let all = |x: f32| [to(1.0).repeat(70), to(x), to(-2.0).repeat(3)].concat();
            assert!([0.0, -0.0, largest, -largest].iter().all(|&x| all_finite(&all(x))));
            let bad = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN];
            assert!(!bad.iter().any(|&x| all_finite(&all(x))));
        }
    }

    #[test]
    fn f16_crosses_the_block_boundary() {
        let stored: Vec<u8> = (0..300).flat_map(|i| f16::from_f32(i as f32).to_le_bytes()).collect();
        let expect: Vec<f32> = (0..300).map(|i| i as f32).collect();
        check(F16, &stored, &expect);
    }
}
