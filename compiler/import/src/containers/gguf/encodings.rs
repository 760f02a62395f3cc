//! Encodings of GGUF, one row for each type that is decoded. Plain types are decoded by the rows that other
//! containers use.

use crate::encodings::coded::{Block, DecodeCodes, DecodeFine, e2m1, half_power, take};
use crate::encodings::{Conversion, Encoding, ExactFormat, plain};
use half::f16;
use moec_gguf::quants::i_quants::super_block_of_iq4_xs;
use moec_gguf::quants::k_quants::{
    SuperBlock, super_block_of_q2_k, super_block_of_q3_k, super_block_of_q4_k, super_block_of_q5_k,
    super_block_of_q6_k,
};
use moec_gguf::types::Type;
use moec_ir::Format;
use moec_ir::types::{FINE_GROUP, FINE_STORED};

/// Returns the encoding of a type.
#[expect(clippy::panic, reason = "the compiler evaluates it, and stops there")]
const fn of(name: &str) -> Encoding {
    match Type::named(name) {
        Some(&Type { name, block, bytes, decode: Some(decode), .. }) => {
            Encoding { title: name, dtype: name, block, bytes, decode, native_format: None }
        }
        _ => panic!("a type that is not decoded"),
    }
}

/// Returns the encoding of a type whose codes and scales a format of weights can hold.
const fn coded(name: &str, format: Format, take: DecodeCodes) -> Encoding {
    Encoding { native_format: Some(ExactFormat { format, conversion: Conversion::Coded(take) }), ..of(name) }
}

/// As [`coded`], of super-blocks.
const fn fine(name: &str, format: Format, take: DecodeFine) -> Encoding {
    Encoding { native_format: Some(ExactFormat { format, conversion: Conversion::Fine(take) }), ..of(name) }
}

const Q4_K: Encoding = fine("Q4_K", Format::Q4k, |stored, from, out| {
    take_super_blocks(stored, from, out, |block| with_lowest(super_block_of_q4_k(block), 8))
});
const Q5_K: Encoding = fine("Q5_K", Format::Q5k, |stored, from, out| {
    take_super_blocks(stored, from, out, |block| with_lowest(super_block_of_q5_k(block), 16))
});
const Q6_K: Encoding =
    fine("Q6_K", Format::Q6k, |stored, from, out| take_super_blocks(stored, from, out, super_block_of_q6_k));
const Q3_K: Encoding =
    fine("Q3_K", Format::Q3k, |stored, from, out| take_super_blocks(stored, from, out, super_block_of_q3_k));
const Q2_K: Encoding = fine("Q2_K", Format::Q2k, |stored, from, out| {
    take_super_blocks(stored, from, out, |block| with_lowest(super_block_of_q2_k(block), 2))
});
const IQ4_XS: Encoding = fine("IQ4_XS", Format::Iq4xs, |stored, from, out| {
    take_super_blocks(stored, from, out, super_block_of_iq4_xs)
});

/// The super-block with codes from `-lowest` on, as the format has them, in place of those from 0 on.
fn with_lowest(mut block: SuperBlock, lowest: i8) -> SuperBlock {
    block.codes.iter_mut().for_each(|code| *code -= lowest);
    block
}

/// Writes numbers of super-blocks of `N` bytes. Returns `false` if a scale is not finite or blocks are
/// missing.
fn take_super_blocks<const N: usize>(
    stored: &[u8],
    from: usize,
    mut out: &mut [[u8; FINE_STORED]],
    block: impl Fn(&[u8; N]) -> SuperBlock,
) -> bool {
    let mut first = from % FINE_GROUP;
    for bytes in stored.as_chunks::<N>().0 {
        if out.is_empty() {
            break;
        }
        let SuperBlock { d, dmin, group, scales, minima, codes } = block(bytes);
        if ![d, dmin].iter().all(|bits| f16::from_bits(*bits).is_finite()) {
            return false;
        }
        let count = (FINE_GROUP - first).min(out.len());
        let now = out.split_off_mut(..count).unwrap_or_default();
        let ([d_low, d_high], [min_low, min_high]) = (d.to_le_bytes(), dmin.to_le_bytes());
        for (i, to) in (first..).zip(now) {
            let (scale, minimum) = (scales[i / group].cast_unsigned(), minima[i / group]);
            *to = [codes[i].cast_unsigned(), scale, minimum, d_low, d_high, min_low, min_high];
        }
        first = 0;
    }
    out.is_empty()
}

const Q4_0: Encoding = coded("Q4_0", Format::Q4h, take_q4_0);
const Q8_0: Encoding = coded("Q8_0", Format::Q8h, take_q8_0);
const MXFP4: Encoding = coded("MXFP4", Format::Mxfp4, take_mxfp4);

/// A block at its position in a row, with an f16 scale.
fn with_f16<const N: usize>(stored: &[u8], i: usize) -> Option<(&[u8; N], u16, f32)> {
    let block = stored.as_chunks::<N>().0.get(i)?;
    let bits = u16::from_le_bytes([block[0], block[1]]);
    Some((block, bits, f16::from_bits(bits).to_f32()))
}

/// Nibble of number `i` in a block of sixteen bytes; the low nibbles are the first half.
const fn nibble(bytes: &[u8], i: usize) -> u8 {
    bytes[i % 16] >> (i / 16 * 4) & 15
}

fn take_q8_0(stored: &[u8], from: usize, out: &mut [[u8; 3]]) -> bool {
    let block = |i: usize| {
        let (block, bits, scale) = with_f16::<34>(stored, i)?;
        Some(Block { codes: std::array::from_fn(|c| block[2 + c].cast_signed()), bits, scale })
    };
    take(block, from, out)
}

fn take_q4_0(stored: &[u8], from: usize, out: &mut [[u8; 3]]) -> bool {
    let block = |i: usize| {
        let (block, bits, scale) = with_f16::<18>(stored, i)?;
        let codes = std::array::from_fn(|c| nibble(&block[2..], c).cast_signed() - 8);
        Some(Block { codes, bits, scale })
    };
    take(block, from, out)
}

/// A scale of 255 is 2¹²⁷, as in ggml.
fn take_mxfp4(stored: &[u8], from: usize, out: &mut [[u8; 3]]) -> bool {
    let block = |i: usize| {
        let block = stored.as_chunks::<17>().0.get(i)?;
        let (bits, scale) = half_power(block[0]);
        Some(Block { codes: std::array::from_fn(|c| e2m1(nibble(&block[1..], c))), bits, scale })
    };
    take(block, from, out)
}

/// Every supported type.
pub(super) const ENCODINGS: [&Encoding; 26] = [
    &plain::F32,
    &plain::F16,
    &plain::BF16,
    &Q8_0,
    &Q4_0,
    &of("Q4_1"),
    &of("Q5_0"),
    &of("Q5_1"),
    &Q2_K,
    &Q3_K,
    &Q4_K,
    &Q5_K,
    &Q6_K,
    &of("IQ1_S"),
    &of("IQ1_M"),
    &of("IQ2_XXS"),
    &of("IQ2_XS"),
    &of("IQ2_S"),
    &of("IQ3_XXS"),
    &of("IQ3_S"),
    &of("IQ4_NL"),
    &IQ4_XS,
    &of("TQ1_0"),
    &of("TQ2_0"),
    &MXFP4,
    &of("NVFP4"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use moec_gguf::types::TYPES;

    #[test]
    fn gguf_codes_and_scales_equal_decoded_numbers() {
        for row in [&Q8_0, &Q4_0, &MXFP4] {
            let native = row.native_format.unwrap();
            let Conversion::Coded(take) = native.conversion else { panic!("{}", row.title) };
            // Every code, with every scale that gives finite numbers.
            let (mut finite, mut others) = (0, 0);
            for scale in 0..=u16::MAX {
                let mut block: Vec<u8> =
                    (0..row.bytes).map(|i| (i * 41 + usize::from(scale)) as u8).collect();
                block[..2].copy_from_slice(&scale.to_le_bytes());
                let (mut numbers, mut taken) = ([0.0; 32], [[0; 3]; 32]);
                (row.decode)(&block, 0, &mut numbers);
                if !take(&block, 0, &mut taken) {
                    assert!(numbers.iter().any(|x| !x.is_finite()), "{} {scale}", row.title);
                    others += 1;
                    continue;
                }
                finite += 1;
                for (x, [code, low, high]) in numbers.into_iter().zip(taken) {
                    let bits = u16::from_le_bytes([low, high]);
                    let scale = match native.format.scales() {
                        Format::F16 => f16::from_bits(bits).to_f32(),
                        _ => half::bf16::from_bits(bits).to_f32(),
                    };
                    assert_eq!(f32::from(code.cast_signed()) * scale, x, "{} {block:?}", row.title);
                }
            }
            assert!(finite > 60_000 && others > 0, "{}: {finite}, {others}", row.title);
        }
    }

    #[test]
    fn super_blocks_equal_decoded_numbers() {
        for row in [&Q2_K, &Q3_K, &Q4_K, &Q5_K, &Q6_K, &IQ4_XS] {
            let native = row.native_format.unwrap();
            let Conversion::Fine(take) = native.conversion else { panic!("{}", row.title) };
            let codes = native.format.spec().codes.unwrap();
            let lowest = if codes.fine.unwrap().minima { codes.lowest } else { 0 };
            for seed in 0..400_usize {
                let mut stored: Vec<u8> =
                    (0..2 * row.bytes).map(|i| ((i * 41 + seed * 97) ^ ((i * i) >> 4)) as u8).collect();
                let last = row.bytes - 2;
                let at = match native.format {
                    Format::Q4k | Format::Q5k => [0, 2],
                    Format::Q2k => [80, 82],
                    Format::Iq4xs => [0, 0],
                    _ => [last, last],
                };
                for (i, at) in at.into_iter().enumerate() {
                    let scale = f16::from_bits((seed * 131 + i * 77) as u16 & 0xbbff);
                    stored[at..at + 2].copy_from_slice(&scale.to_le_bytes());
                }
                let from = seed % row.block;
                let mut numbers = vec![0.0; row.block - from];
                (row.decode)(&stored, from, &mut numbers);
                let mut taken = vec![[0; FINE_STORED]; row.block - from];
                assert!(take(&stored, from, &mut taken), "{} {seed}", row.title);
                for (x, [code, scale, minimum, a, b, c, d]) in numbers.into_iter().zip(taken) {
                    let [unit, least] = [[a, b], [c, d]].map(|bits| f16::from_le_bytes(bits).to_f32());
                    let code = f32::from(code.cast_signed()) - f32::from(lowest);
                    let scale = unit * f32::from(scale.cast_signed());
                    assert_eq!(scale * code - least * f32::from(minimum), x, "{} {seed}", row.title);
                    // Products are exact: a fused multiply-add rounds the same number.
                    assert_eq!(scale.mul_add(code, -(least * f32::from(minimum))), x);
                }
                assert!(!take(&stored, from, &mut vec![[0; FINE_STORED]; 3 * row.block]));
            }
        }
    }

    #[test]
    fn every_type_that_is_decoded_has_a_row() {
        let decoded: Vec<_> = TYPES.iter().filter(|t| t.decode.is_some()).collect();
        assert_eq!(decoded.len(), ENCODINGS.len());
        for kind in decoded {
            let row = ENCODINGS.iter().find(|row| row.dtype == kind.name).unwrap();
            assert_eq!((row.block, row.bytes), (kind.block, kind.bytes), "{}", kind.name);
            let stored: Vec<u8> = (0..2 * kind.bytes).map(|i| (i * 29 % 64) as u8).collect();
            let (mut ours, mut theirs) = (vec![0.0; 2 * kind.block], vec![0.0; 2 * kind.block]);
            (row.decode)(&stored, 0, &mut ours);
            kind.decode.unwrap()(&stored, 0, &mut theirs);
            assert_eq!(ours, theirs, "{}", kind.name);
        }
    }
}
