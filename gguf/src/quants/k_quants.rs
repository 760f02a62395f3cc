//! Super-blocks of the k-quants.

use super::{SMALL, SUPER, blocks, half, pair};

/// 16 bytes with a scale (low) and a minimum (high), 64 bytes of codes of 2 bits, two numbers of 16 bits:
/// `d · scale · code − dmin · min`, by groups of 16.
pub fn q2_k(stored: &[u8], from: usize, out: &mut [f32]) {
    blocks(stored, from, out, |block: &[u8; 84], out: &mut [f32; SUPER]| {
        let (scales, codes) = block.split_at(16);
        let (d, dmin) = (half(block, 80), half(block, 82));
        for (i, x) in out.iter_mut().enumerate() {
            let scale = scales[i / 16];
            let (d, m) = (d * f32::from(scale & 15), dmin * f32::from(scale >> 4));
            *x = d * f32::from(pair(codes, i)) - m;
        }
    });
}

/// 32 bytes of third bits, 64 of codes of 2 bits, 12 with scales of 6 bits, a number of 16 bits: `d · (scale
/// − 32) · (code − 4)`, by groups of 16. Bit `r` of byte `i` of the third bits is that of number `i` of run
/// `r` of 32. Of the scales, 8 bytes have the low nibbles of the first eight groups in their low nibbles and
/// those of the others in their high ones, and 4 bytes have the high bits of four runs of four.
pub fn q3_k(stored: &[u8], from: usize, out: &mut [f32]) {
    blocks(stored, from, out, |block: &[u8; 110], out: &mut [f32; SUPER]| {
        let (third, rest) = block.split_at(32);
        let (codes, scales) = rest.split_at(64);
        let d = half(block, 108);
        for (i, x) in out.iter_mut().enumerate() {
            let g = i / 16;
            let scale = scales[g % 8] >> (g / 8 * 4) & 15 | (scales[8 + g % 4] >> (g / 4 * 2) & 3) << 4;
            let code = pair(codes, i) | (third[i % SMALL] >> (i / SMALL) & 1) << 2;
            *x = d * (f32::from(scale) - 32.0) * (f32::from(code) - 4.0);
        }
    });
}

/// Scales and minima of the eight groups of a super-block: 6 bits each, in 12 bytes.
fn scales(packed: &[u8]) -> [(f32, f32); 8] {
    std::array::from_fn(|i| {
        let (scale, min) = if i < 4 {
            (packed[i] & 63, packed[i + 4] & 63)
        } else {
            let low = packed[i + 4];
            (low & 15 | packed[i - 4] >> 6 << 4, low >> 4 | packed[i] >> 6 << 4)
        };
        (f32::from(scale), f32::from(min))
    })
}

/// Two numbers of 16 bits, 12 bytes of scales and minima, 128 bytes: `d · scale · code − dmin · min`, by
/// groups of 32. A run of 32 bytes has one group in the low nibbles and the next in the high ones.
pub fn q4_k(stored: &[u8], from: usize, out: &mut [f32]) {
    blocks(stored, from, out, |block: &[u8; 144], out| {
        with_minima(block, &block[16..], out, |_, _| 0);
    });
}

/// As [`q4_k`], with 32 bytes of fifth bits before the codes: bit `g` of byte `i` is that of number `i` of
/// group `g`.
pub fn q5_k(stored: &[u8], from: usize, out: &mut [f32]) {
    blocks(stored, from, out, |block: &[u8; 176], out| {
        with_minima(block, &block[48..], out, |group, i| (block[16 + i] >> group & 1) << 4);
    });
}

fn with_minima(block: &[u8], codes: &[u8], out: &mut [f32; SUPER], high: impl Fn(usize, usize) -> u8) {
    let (d, dmin) = (half(block, 0), half(block, 2));
    for (group, (scale, min)) in scales(&block[4..16]).into_iter().enumerate() {
        let (d, m) = (d * scale, dmin * min);
        let bytes = &codes[group / 2 * SMALL..][..SMALL];
        for (i, (x, byte)) in out[group * SMALL..][..SMALL].iter_mut().zip(bytes).enumerate() {
            let code = byte >> (4 * (group % 2)) & 15 | high(group, i);
            *x = d * f32::from(code) - m;
        }
    }
}

/// 128 bytes of low nibbles, 64 of pairs of high bits, 16 signed scales, and a number of 16 bits: `d · scale
/// · (code − 32)`, by groups of 16. Of each half of 128 numbers, 64 bytes have the first 64 in their low
/// nibbles and the others in the high ones, and 32 bytes have the high bits of four runs of 32.
pub fn q6_k(stored: &[u8], from: usize, out: &mut [f32]) {
    blocks(stored, from, out, |block: &[u8; 210], out: &mut [f32; SUPER]| {
        let (low, rest) = block.split_at(128);
        let (high, scales) = rest.split_at(64);
        let d = half(block, 208);
        for (i, x) in out.iter_mut().enumerate() {
            let (part, j) = (i / 128, i % 128);
            let nibble = low[part * 64 + j % 64] >> (j / 64 * 4) & 15;
            let code = f32::from(nibble | pair(high, i) << 4) - 32.0;
            *x = d * f32::from(scales[i / 16].cast_signed()) * code;
        }
    });
}
