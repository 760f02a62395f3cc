//! Super-blocks of the k-quants.

use super::{SMALL, SUPER, blocks, pair, word};
use half::f16;

/// A super-block of groups with scales and, in some types, minima: number `i` of group `g` is `d · scale[g] ·
/// code[i] − dmin · min[g]`, in this order. Products are exact in f32.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SuperBlock {
    /// Unit of the scales, as f16.
    pub d: u16,
    /// Unit of the minima, as f16; 0 without minima.
    pub dmin: u16,
    /// Numbers of a group.
    pub group: usize,
    /// Scales of the groups; those past the last group are 0.
    pub scales: [i8; SUPER / 16],
    /// Minima of the groups.
    pub minima: [u8; SUPER / 16],
    /// Codes: from 0 on with minima, else of either sign.
    pub codes: [i8; SUPER],
}

impl SuperBlock {
    pub(super) fn decode(&self, out: &mut [f32; SUPER]) {
        let [d, dmin] = [self.d, self.dmin].map(|bits| f16::from_bits(bits).to_f32());
        for (g, (out, codes)) in out.chunks_mut(self.group).zip(self.codes.chunks(self.group)).enumerate() {
            let (scale, minimum) = (d * f32::from(self.scales[g]), dmin * f32::from(self.minima[g]));
            for (x, code) in out.iter_mut().zip(codes) {
                *x = scale * f32::from(*code) - minimum;
            }
        }
    }
}

/// 16 bytes with a scale (low) and a minimum (high), 64 bytes of codes of 2 bits, two numbers of 16 bits:
/// `d · scale · code − dmin · min`, by groups of 16.
pub fn q2_k(stored: &[u8], from: usize, out: &mut [f32]) {
    blocks(stored, from, out, |block, out| super_block_of_q2_k(block).decode(out));
}

/// A super-block of Q2_K.
pub fn super_block_of_q2_k(block: &[u8; 84]) -> SuperBlock {
    let (scales, codes) = block.split_at(16);
    SuperBlock {
        d: word(block, 80),
        dmin: word(block, 82),
        group: 16,
        scales: std::array::from_fn(|g| (scales[g] & 15).cast_signed()),
        minima: std::array::from_fn(|g| scales[g] >> 4),
        codes: std::array::from_fn(|i| pair(codes, i).cast_signed()),
    }
}

/// 32 bytes of third bits, 64 of codes of 2 bits, 12 with scales of 6 bits, a number of 16 bits: `d · (scale
/// − 32) · (code − 4)`, by groups of 16. Bit `r` of byte `i` of the third bits is that of number `i` of run
/// `r` of 32. Of the scales, 8 bytes have the low nibbles of the first eight groups in their low nibbles and
/// those of the others in their high ones, and 4 bytes have the high bits of four runs of four.
pub fn q3_k(stored: &[u8], from: usize, out: &mut [f32]) {
    blocks(stored, from, out, |block, out| super_block_of_q3_k(block).decode(out));
}

/// A super-block of Q3_K.
pub fn super_block_of_q3_k(block: &[u8; 110]) -> SuperBlock {
    let (third, rest) = block.split_at(32);
    let (codes, scales) = rest.split_at(64);
    SuperBlock {
        d: word(block, 108),
        dmin: 0,
        group: 16,
        scales: std::array::from_fn(|g| {
            let scale = scales[g % 8] >> (g / 8 * 4) & 15 | (scales[8 + g % 4] >> (g / 4 * 2) & 3) << 4;
            scale.cast_signed() - 32
        }),
        minima: [0; SUPER / 16],
        codes: std::array::from_fn(|i| {
            let code = pair(codes, i) | (third[i % SMALL] >> (i / SMALL) & 1) << 2;
            code.cast_signed() - 4
        }),
    }
}

/// Scale and minimum of group `i` of the eight of a super-block: 6 bits each, in 12 bytes.
const fn scales(packed: &[u8], i: usize) -> (u8, u8) {
    if i < 4 {
        (packed[i] & 63, packed[i + 4] & 63)
    } else {
        let low = packed[i + 4];
        (low & 15 | packed[i - 4] >> 6 << 4, low >> 4 | packed[i] >> 6 << 4)
    }
}

/// Two numbers of 16 bits, 12 bytes of scales and minima, 128 bytes: `d · scale · code − dmin · min`, by
/// groups of 32. A run of 32 bytes has one group in the low nibbles and the next in the high ones.
pub fn q4_k(stored: &[u8], from: usize, out: &mut [f32]) {
    blocks(stored, from, out, |block, out| super_block_of_q4_k(block).decode(out));
}

/// A super-block of Q4_K.
pub fn super_block_of_q4_k(block: &[u8; 144]) -> SuperBlock {
    with_minima(block, &block[16..], |_, _| 0)
}

/// As [`q4_k`], with 32 bytes of fifth bits before the codes: bit `g` of byte `i` is that of number `i` of
/// group `g`.
pub fn q5_k(stored: &[u8], from: usize, out: &mut [f32]) {
    blocks(stored, from, out, |block, out| super_block_of_q5_k(block).decode(out));
}

/// A super-block of Q5_K.
pub fn super_block_of_q5_k(block: &[u8; 176]) -> SuperBlock {
    with_minima(block, &block[48..], |group, i| (block[16 + i] >> group & 1) << 4)
}

fn with_minima(block: &[u8], codes: &[u8], high: impl Fn(usize, usize) -> u8) -> SuperBlock {
    let mut found = SuperBlock {
        d: word(block, 0),
        dmin: word(block, 2),
        group: SMALL,
        scales: [0; SUPER / 16],
        minima: [0; SUPER / 16],
        codes: [0; SUPER],
    };
    for (group, to) in found.codes.chunks_mut(SMALL).enumerate() {
        let (scale, minimum) = scales(&block[4..16], group);
        (found.scales[group], found.minima[group]) = (scale.cast_signed(), minimum);
        let bytes = &codes[group / 2 * SMALL..][..SMALL];
        for (i, (code, byte)) in to.iter_mut().zip(bytes).enumerate() {
            *code = (byte >> (4 * (group % 2)) & 15 | high(group, i)).cast_signed();
        }
    }
    found
}

/// 128 bytes of low nibbles, 64 of pairs of high bits, 16 signed scales, and a number of 16 bits: `d · scale
/// · (code − 32)`, by groups of 16. Of each half of 128 numbers, 64 bytes have the first 64 in their low
/// nibbles and the others in the high ones, and 32 bytes have the high bits of four runs of 32.
pub fn q6_k(stored: &[u8], from: usize, out: &mut [f32]) {
    blocks(stored, from, out, |block, out| super_block_of_q6_k(block).decode(out));
}

/// A super-block of Q6_K.
pub fn super_block_of_q6_k(block: &[u8; 210]) -> SuperBlock {
    let (low, rest) = block.split_at(128);
    let (high, scales) = rest.split_at(64);
    SuperBlock {
        d: word(block, 208),
        dmin: 0,
        group: 16,
        scales: std::array::from_fn(|g| scales[g].cast_signed()),
        minima: [0; SUPER / 16],
        codes: std::array::from_fn(|i| {
            let (part, j) = (i / 128, i % 128);
            let nibble = low[part * 64 + j % 64] >> (j / 64 * 4) & 15;
            (nibble | pair(high, i) << 4).cast_signed() - 32
        }),
    }
}
