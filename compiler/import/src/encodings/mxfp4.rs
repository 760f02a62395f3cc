//! MXFP4 (OCP Microscaling Formats 1.0): blocks of 32 E2M1 numbers that share an E8M0 scale.

use super::coded::{Block, e2m1, half_power, take};
use super::plain::PLAIN;
use super::{Encoding, Same, Scales, Taken};
use moec_ir::{Encoding as Stored, Format};

/// Numbers in a block (section 5.2 of the specification).
pub const BLOCK: usize = 32;
/// Bytes that hold them.
pub const BYTES: usize = BLOCK / 2;

/// The row of the table: blocks and scales in tensors of their own, as gpt-oss stores them.
pub const MXFP4: Encoding = Encoding {
    title: "MXFP4",
    leaf: |scales| Stored::Mxfp4 { scales },
    dtype: "U8",
    suffix: "_blocks",
    block: BLOCK,
    bytes: BYTES,
    by_block: true,
    scales: Some(Scales {
        suffix: "_scales",
        block: [1, BLOCK],
        of: &[&E8M0],
        known: "as gpt-oss stores it",
    }),
    same: Some(Same { format: Format::Mxfp4, taken: Taken::Coded(take_row) }),
    decode: decode_row,
};

/// Its scales.
const E8M0: Encoding = Encoding {
    title: "E8M0",
    dtype: "U8",
    decode: |stored, _, _, out| {
        for (x, &s) in out.iter_mut().zip(stored) {
            *x = scale(s);
        }
    },
    ..PLAIN
};

/// The sixteen E2M1 numbers: sign, two bits of exponent with bias 1, one bit of mantissa.
pub const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// An E8M0 scale, `2^(s − 127)`; 255 is not a number.
pub fn scale(s: u8) -> f32 {
    match s {
        255 => f32::NAN,
        // 2^−127 is subnormal in f32.
        0 => f32::from_bits(1 << 22),
        s => f32::from_bits(u32::from(s) << 23),
    }
}

/// The low nibble is the even column.
fn decode_row(blocks: &[u8], scales: &[f32], from: usize, out: &mut [f32]) {
    let mut col = from % BLOCK;
    let mut out = out;
    while !out.is_empty() {
        let block = col / BLOCK;
        let n = (BLOCK - col % BLOCK).min(out.len());
        let (Some(bytes), Some(&s)) = (blocks.get(block * BYTES..(block + 1) * BYTES), scales.get(block))
        else {
            return;
        };
        let (now, rest) = std::mem::take(&mut out).split_at_mut(n);
        for (x, c) in now.iter_mut().zip(col % BLOCK..) {
            let nibble = (bytes[c / 2] >> (4 * (c % 2))) & 15;
            *x = E2M1[usize::from(nibble)] * s;
        }
        out = rest;
        col += n;
    }
}

fn take_row(blocks: &[u8], scales: &[u8], from: usize, out: &mut [[u8; 3]]) -> bool {
    let block = |i: usize| {
        let bytes = blocks.get(i * BYTES..(i + 1) * BYTES)?;
        // 255 is not a number.
        let (bits, scale) = half_power(*scales.get(i).filter(|&&s| s < 255)?);
        Some(Block { codes: std::array::from_fn(|c| e2m1(bytes[c / 2] >> (4 * (c % 2)))), bits, scale })
    };
    take(block, from, out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_scales_are_what_is_decoded() {
        // Six times the powers of 253 and 254 is past f32.
        let blocks: Vec<u8> = (0..253 * BYTES).map(|i| (i * 37 % 256) as u8).collect();
        let stored: Vec<u8> = (0..253).collect();
        let scales: Vec<f32> = stored.iter().map(|&s| scale(s)).collect();
        let (mut numbers, mut taken) = (vec![0.0; 253 * BLOCK], vec![[0; 3]; 253 * BLOCK]);
        decode_row(&blocks, &scales, 0, &mut numbers);
        assert!(take_row(&blocks, &stored, 0, &mut taken));
        for (x, [code, low, high]) in numbers.into_iter().zip(taken) {
            let scale = half::bf16::from_le_bytes([low, high]).to_f32();
            assert_eq!(f32::from(code.cast_signed()) * scale, x);
        }
        assert!(!take_row(&[7; BYTES], &[253], 0, &mut [[0; 3]; 1]));
        assert!(!take_row(&blocks, &[255], 0, &mut [[0; 3]; 1]));
    }

    #[test]
    fn the_table_is_that_of_the_specification() {
        // Table 5 of OCP MX 1.0: (−1)^s · 2^(e−1) · (1 + m/2), and m/2 where e = 0.
        for (bits, &value) in E2M1.iter().enumerate() {
            let (s, e, m) = (bits >> 3, (bits >> 1) & 3, (bits & 1) as f32 / 2.0);
            let magnitude = if e == 0 { m } else { (1 << (e - 1)) as f32 * (1.0 + m) };
            let expect = if s == 1 { -magnitude } else { magnitude };
            assert_eq!(value.to_bits(), expect.to_bits());
        }
    }

    #[test]
    fn scales_are_powers_of_two() {
        for s in 0..=254_u8 {
            assert_eq!(f64::from(scale(s)), 2.0_f64.powi(i32::from(s) - 127));
        }
        assert!(scale(255).is_nan());
    }

    #[test]
    fn low_nibble_first() {
        // Two blocks: bytes 0x21 are 0.5 then 1.0; scales 2^0 and 2^3.
        let blocks = [0x21_u8; 2 * BYTES];
        let mut out = [0.0; 64];
        decode_row(&blocks, &[1.0, 8.0], 0, &mut out);
        assert_eq!(out[..4], [0.5, 1.0, 0.5, 1.0]);
        assert_eq!(out[32..36], [4.0, 8.0, 4.0, 8.0]);
    }

    #[test]
    fn any_range_of_columns() {
        let blocks: Vec<u8> = (0..3 * BYTES).map(|i| (i * 37 % 256) as u8).collect();
        let scales = [0.25, 1.0, 2.0];
        let mut whole = [0.0; 96];
        decode_row(&blocks, &scales, 0, &mut whole);
        for (from, to) in [(0, 1), (31, 33), (5, 90), (33, 64), (95, 96)] {
            let mut part = vec![0.0; to - from];
            let block = from / BLOCK;
            decode_row(&blocks[block * BYTES..], &scales[block..], from, &mut part);
            assert_eq!(part, whole[from..to]);
        }
    }

    #[test]
    fn short_input_does_not_panic() {
        let mut out = [7.0; 64];
        decode_row(&[0; 20], &[1.0], 0, &mut out);
        assert_eq!(out[40], 7.0);
    }
}
