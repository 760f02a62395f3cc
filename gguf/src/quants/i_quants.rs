//! Blocks of the i-quants: codes are indices of a table of numbers (IQ4), or of a grid of points of four or
//! eight numbers.
//!
//! Points of IQ2 and IQ3 are magnitudes; eight numbers have a byte of signs. Some types store seven bits of
//! it, as the number of minus signs is even.

use super::grids::{IQ1, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS};
use super::k_quants::SuperBlock;
use super::{SMALL, SUPER, blocks, half, nibble, nibbles, word};
use half::f16 as Half;

/// The numbers of codes of 4 bits: `kvalues_iq4nl` of ggml.
const IQ4: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Scale, 16 bytes: `d · number`.
pub fn iq4_nl(stored: &[u8], from: usize, out: &mut [f32]) {
    blocks(stored, from, out, |block: &[u8; 18], out: &mut [f32; SMALL]| {
        let d = half(block, 0);
        nibbles(&block[2..], out, |_, code| d * f32::from(IQ4[usize::from(code)]));
    });
}

/// A number of 16 bits, eight pairs of high bits of scales, their eight low nibbles, 128 bytes: `d · (scale
/// − 32) · number`, by groups of 32, each laid out as a block of [`iq4_nl`].
pub fn iq4_xs(stored: &[u8], from: usize, out: &mut [f32]) {
    blocks(stored, from, out, |block, out| super_block_of_iq4_xs(block).decode(out));
}

/// A super-block of IQ4_XS; its codes are the numbers.
pub fn super_block_of_iq4_xs(block: &[u8; 136]) -> SuperBlock {
    let high = word(block, 2);
    let scale = |g: usize| nibble(&block[4..], g) | ((high >> (2 * g) & 3) as u8) << 4;
    let mut found = SuperBlock {
        d: word(block, 0),
        dmin: 0,
        group: SMALL,
        scales: std::array::from_fn(|g| if g < SUPER / SMALL { scale(g).cast_signed() - 32 } else { 0 }),
        minima: [0; SUPER / 16],
        codes: [0; SUPER],
    };
    for (i, code) in found.codes.iter_mut().enumerate() {
        let byte = block[8 + i / SMALL * 16 + i % 16];
        *code = IQ4[usize::from(byte >> (i % SMALL / 16 * 4) & 15)];
    }
    found
}

/// Eight numbers that are decoded together: a scale, signs, and the points that their magnitudes are.
type Eight<const D: usize, const N: usize> = (f32, u8, [[u8; D]; N]);

/// Decodes a super-block by eights: `scale · magnitude · sign`.
fn decode_eights<const D: usize, const N: usize>(
    out: &mut [f32; SUPER],
    eight: impl Fn(usize) -> Eight<D, N>,
) {
    for (e, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let (scale, signs, points) = eight(e);
        for (i, (x, magnitude)) in out.iter_mut().zip(points.as_flattened()).enumerate() {
            let sign = if signs >> i & 1 == 0 { 1.0 } else { -1.0 };
            *x = scale * f32::from(*magnitude) * sign;
        }
    }
}

/// Eight signs of the lowest seven bits: the number of minus signs is even.
fn even_signs(bits: u32) -> u8 {
    let seven = (bits & 127) as u8;
    seven | ((seven.count_ones() & 1) as u8) << 7
}

/// Signs of eight number `e` and the scale of its group of 32, of four bytes at a place: four times seven
/// bits, and four.
fn signs_and_scale(block: &[u8], at: usize, e: usize) -> (u8, f32) {
    let bits = u32::from(word(block, at)) | u32::from(word(block, at + 2)) << 16;
    (even_signs(bits >> (e % 4 * 7)), f32::from((bits >> 28) as u8))
}

/// A number of 16 bits, and for each group of 32 four indices and four bytes of signs and scale: `d · (½ +
/// scale) · ¼`.
pub fn iq2_xxs(stored: &[u8], from: usize, out: &mut [f32]) {
    blocks(stored, from, out, |block: &[u8; 66], out| {
        let d = half(block, 0);
        decode_eights(out, |e| {
            let group = &block[2 + e / 4 * 8..];
            let (signs, scale) = signs_and_scale(group, 4, e);
            (d * (0.5 + scale) * 0.25, signs, [IQ2_XXS[usize::from(group[e % 4])]])
        });
    });
}

/// A number of 16 bits, 32 words of nine bits of index and seven of signs, nibbles of scales, by groups of
/// 16: `d · (½ + scale) · ¼`.
pub fn iq2_xs(stored: &[u8], from: usize, out: &mut [f32]) {
    blocks(stored, from, out, |block: &[u8; 74], out| {
        let d = half(block, 0);
        decode_eights(out, |e| {
            let code = word(block, 2 + 2 * e);
            let scale = d * (0.5 + f32::from(nibble(&block[66..], e / 2))) * 0.25;
            (scale, even_signs(u32::from(code >> 9)), [IQ2_XS[usize::from(code & 511)]])
        });
    });
}

/// A number of 16 bits, 32 low bytes of indices, 32 bytes of signs, 32 pairs of high bits of indices, nibbles
/// of scales as in [`iq2_xs`].
pub fn iq2_s(stored: &[u8], from: usize, out: &mut [f32]) {
    blocks(stored, from, out, |block: &[u8; 82], out| {
        let d = half(block, 0);
        decode_eights(out, |e| {
            let high = block[66 + e / 4] >> (e % 4 * 2) & 3;
            let scale = d * (0.5 + f32::from(nibble(&block[74..], e / 2))) * 0.25;
            (scale, block[34 + e], [IQ2_S[index(block[2 + e], high)]])
        });
    });
}

/// A number of 16 bits, 64 indices, and for each group of 32 four bytes of signs and scale: `d · (½ + scale)
/// · ½`.
pub fn iq3_xxs(stored: &[u8], from: usize, out: &mut [f32]) {
    blocks(stored, from, out, |block: &[u8; 98], out| {
        let d = half(block, 0);
        decode_eights(out, |e| {
            let (signs, scale) = signs_and_scale(block, 66 + e / 4 * 4, e);
            let points = [0, 1].map(|i| IQ3_XXS[usize::from(block[2 + 2 * e + i])]);
            (d * (0.5 + scale) * 0.5, signs, points)
        });
    });
}

/// A number of 16 bits, 64 low bytes of indices, their 64 high bits, 32 bytes of signs, nibbles of scales, by
/// groups of 32: `d · (1 + 2 · scale)`.
pub fn iq3_s(stored: &[u8], from: usize, out: &mut [f32]) {
    blocks(stored, from, out, |block: &[u8; 110], out| {
        let d = half(block, 0);
        decode_eights(out, |e| {
            let scale = d * f32::from(1 + 2 * nibble(&block[106..], e / 4));
            let points =
                [2 * e, 2 * e + 1].map(|i| IQ3_S[index(block[2 + i], block[66 + i / 8] >> (i % 8) & 1)]);
            (scale, block[74 + e], points)
        });
    });
}

/// An index whose high bits are stored apart.
fn index(low: u8, high: u8) -> usize {
    usize::from(low) | usize::from(high) << 8
}

/// Decodes a super-block of IQ1 by eights of a scale, an index, and the sign of a shift: `scale · (number ±
/// ⅛)`.
fn decode_iq1(out: &mut [f32; SUPER], eight: impl Fn(usize) -> (f32, usize, bool)) {
    for (e, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let (scale, index, down) = eight(e);
        let shift = if down { -0.125 } else { 0.125 };
        for (x, number) in out.iter_mut().zip(IQ1[index]) {
            *x = scale * (f32::from(number) - 1.0 + shift);
        }
    }
}

/// A number of 16 bits, 32 low bytes of indices, and for each group of 32 a word: four times three high bits
/// of indices, three of the scale, `d · (2 · scale + 1)`, and the sign of the shift.
pub fn iq1_s(stored: &[u8], from: usize, out: &mut [f32]) {
    blocks(stored, from, out, |block: &[u8; 50], out| {
        let d = half(block, 0);
        decode_iq1(out, |e| {
            let bits = word(block, 34 + e / 4 * 2);
            let high = (bits >> (e % 4 * 3) & 7) as u8;
            (d * f32::from(2 * (bits >> 12 & 7) + 1), index(block[2 + e], high), bits >> 15 == 1)
        });
    });
}

/// 32 low bytes of indices, as many nibbles of three high bits and the sign of the shift, and four words:
/// their highest nibbles are a number of 16 bits, the rest scales of three bits as in [`iq1_s`], by groups
/// of 16.
pub fn iq1_m(stored: &[u8], from: usize, out: &mut [f32]) {
    blocks(stored, from, out, |block: &[u8; 56], out| {
        let words: [u16; 4] = std::array::from_fn(|i| word(block, 48 + 2 * i));
        let bits = words.iter().rev().fold(0, |bits, word| bits << 4 | word >> 12);
        let d = Half::from_bits(bits).to_f32();
        decode_iq1(out, |e| {
            let scale = words[e / 8] >> (e / 2 % 4 * 3) & 7;
            let high = nibble(&block[32..], e);
            (d * f32::from(2 * scale + 1), index(block[e], high & 7), high & 8 != 0)
        });
    });
}
