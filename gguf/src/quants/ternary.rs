//! Super-blocks whose codes are 0, 1 and 2: `d · (code − 1)`.

use super::{SUPER, blocks, half, pair};

/// Bytes of five codes each, as fractions of 256 in base 3: the highest digit of 3ⁿ times the byte is code
/// `n`. 32 bytes have five runs of 32 numbers, 16 bytes five runs of 16, and 4 bytes four runs of 4. Then a
/// number of 16 bits.
pub fn tq1_0(stored: &[u8], from: usize, out: &mut [f32]) {
    const POWERS: [u8; 5] = [1, 3, 9, 27, 81];
    blocks(stored, from, out, |block: &[u8; 54], out: &mut [f32; SUPER]| {
        let d = half(block, 52);
        for (i, x) in out.iter_mut().enumerate() {
            let (first, run, j) = match i {
                0..160 => (0, 32, i),
                160..240 => (32, 16, i - 160),
                _ => (48, 4, i - 240),
            };
            let fraction = block[first + j % run].wrapping_mul(POWERS[j / run]);
            *x = d * (f32::from((u16::from(fraction) * 3) >> 8) - 1.0);
        }
    });
}

/// 64 bytes of codes of 2 bits and a number of 16 bits. Codes may be 3.
pub fn tq2_0(stored: &[u8], from: usize, out: &mut [f32]) {
    blocks(stored, from, out, |block: &[u8; 66], out: &mut [f32; SUPER]| {
        let d = half(block, 64);
        for (i, x) in out.iter_mut().enumerate() {
            *x = d * (f32::from(pair(block, i)) - 1.0);
        }
    });
}
