//! Decoding of blocks to `f32`, in the order of operations of ggml's own `dequantize_row` functions, so that results are equal
//! to the bit.
//!
//! A block of a simple type is a scale of 16 bits, in some types a minimum, and codes of 4, 5 or 8 bits; those of 4 bits have
//! the first half of the block in the low nibbles and the second in the high ones. A super-block of a k-quant has 256 numbers
//! in groups with small integer scales, which are themselves scaled by one or two numbers of 16 bits.

use half::f16 as Half;

/// Numbers of a simple block.
const SMALL: usize = 32;
/// Numbers of a super-block.
const SUPER: usize = 256;

/// IEEE binary32.
pub fn f32(stored: &[u8], _from: usize, out: &mut [f32]) {
    for (x, b) in out.iter_mut().zip(stored.as_chunks().0) {
        *x = f32::from_le_bytes(*b);
    }
}

/// IEEE binary16.
pub fn f16(stored: &[u8], _from: usize, out: &mut [f32]) {
    for (x, b) in out.iter_mut().zip(stored.as_chunks().0) {
        *x = Half::from_le_bytes(*b).to_f32();
    }
}

/// The upper half of binary32.
pub fn bf16(stored: &[u8], _from: usize, out: &mut [f32]) {
    for (x, b) in out.iter_mut().zip(stored.as_chunks().0) {
        *x = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
    }
}

/// Decodes blocks one by one; whole ones where they lie, those at the ends through memory of its own.
fn blocks<const BYTES: usize, const N: usize>(
    stored: &[u8],
    from: usize,
    mut out: &mut [f32],
    decode: impl Fn(&[u8; BYTES], &mut [f32; N]),
) {
    let mut skip = from % N;
    for block in stored.as_chunks::<BYTES>().0 {
        if out.is_empty() {
            return;
        }
        let n = (N - skip).min(out.len());
        let (now, rest) = std::mem::take(&mut out).split_at_mut(n);
        if let Ok(whole) = <&mut [f32; N]>::try_from(&mut *now) {
            decode(block, whole);
        } else {
            let mut whole = [0.0; N];
            decode(block, &mut whole);
            now.copy_from_slice(&whole[skip..skip + n]);
        }
        (out, skip) = (rest, 0);
    }
}

/// A number of 16 bits at a place of a block.
fn half(block: &[u8], at: usize) -> f32 {
    Half::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Codes of 4 bits, and what becomes of them.
fn nibbles(codes: &[u8], out: &mut [f32; SMALL], number: impl Fn(usize, u8) -> f32) {
    for (i, byte) in codes.iter().take(SMALL / 2).enumerate() {
        out[i] = number(i, byte & 15);
        out[i + SMALL / 2] = number(i + SMALL / 2, byte >> 4);
    }
}

/// The fifth bits of a block's codes, at a place of it.
fn fifth(block: &[u8], at: usize) -> impl Fn(usize) -> u8 + use<> {
    let bits = u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]);
    move |i| ((bits >> i & 1) as u8) << 4
}

/// Scale, 16 bytes: `d · (code − 8)`.
pub fn q4_0(stored: &[u8], from: usize, out: &mut [f32]) {
    blocks(stored, from, out, |block: &[u8; 18], out| {
        let d = half(block, 0);
        nibbles(&block[2..], out, |_, code| d * (f32::from(code) - 8.0));
    });
}

/// Scale, minimum, 16 bytes: `d · code + m`.
pub fn q4_1(stored: &[u8], from: usize, out: &mut [f32]) {
    blocks(stored, from, out, |block: &[u8; 20], out| {
        let (d, m) = (half(block, 0), half(block, 2));
        nibbles(&block[4..], out, |_, code| d * f32::from(code) + m);
    });
}

/// Scale, 32 fifth bits, 16 bytes: `d · (code − 16)`.
pub fn q5_0(stored: &[u8], from: usize, out: &mut [f32]) {
    blocks(stored, from, out, |block: &[u8; 22], out| {
        let (d, high) = (half(block, 0), fifth(block, 2));
        nibbles(&block[6..], out, |i, code| d * (f32::from(code | high(i)) - 16.0));
    });
}

/// Scale, minimum, 32 fifth bits, 16 bytes: `d · code + m`.
pub fn q5_1(stored: &[u8], from: usize, out: &mut [f32]) {
    blocks(stored, from, out, |block: &[u8; 24], out| {
        let (d, m, high) = (half(block, 0), half(block, 2), fifth(block, 4));
        nibbles(&block[8..], out, |i, code| d * f32::from(code | high(i)) + m);
    });
}

/// Scale, 32 signed bytes: `d · code`.
pub fn q8_0(stored: &[u8], from: usize, out: &mut [f32]) {
    blocks(stored, from, out, |block: &[u8; 34], out: &mut [f32; SMALL]| {
        let d = half(block, 0);
        for (x, code) in out.iter_mut().zip(&block[2..]) {
            *x = f32::from(code.cast_signed()) * d;
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

/// Two numbers of 16 bits, 12 bytes of scales and minima, 128 bytes: `d · scale · code − dmin · min`, by groups of 32. A run of
/// 32 bytes has one group in the low nibbles and the next in the high ones.
pub fn q4_k(stored: &[u8], from: usize, out: &mut [f32]) {
    blocks(stored, from, out, |block: &[u8; 144], out| {
        with_minima(block, &block[16..], out, |_, _| 0);
    });
}

/// As [`q4_k`], with 32 bytes of fifth bits before the codes: bit `g` of byte `i` is that of number `i` of group `g`.
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

/// 128 bytes of low nibbles, 64 of pairs of high bits, 16 signed scales, and a number of 16 bits: `d · scale · (code − 32)`, by
/// groups of 16. Of each half of 128 numbers, 64 bytes have the first 64 in their low nibbles and the others in the high ones,
/// and 32 bytes have the high bits of four runs of 32.
pub fn q6_k(stored: &[u8], from: usize, out: &mut [f32]) {
    blocks(stored, from, out, |block: &[u8; 210], out: &mut [f32; SUPER]| {
        let (low, rest) = block.split_at(128);
        let (high, scales) = rest.split_at(64);
        let d = half(block, 208);
        for (i, x) in out.iter_mut().enumerate() {
            let (part, j) = (i / 128, i % 128);
            let nibble = low[part * 64 + j % 64] >> (j / 64 * 4) & 15;
            let pair = high[part * 32 + j % 32] >> (j / 32 * 2) & 3;
            let code = f32::from(nibble | pair << 4) - 32.0;
            *x = d * f32::from(scales[i / 16].cast_signed()) * code;
        }
    });
}

/// An E8M0 scale and 16 bytes of E2M1 numbers (OCP Microscaling Formats 1.0), taken twice as large by ggml, and the scale half
/// as large. A scale of 255, which the specification calls not a number, is 2^127 here as it is there, and there is no −0.
pub fn mxfp4(stored: &[u8], from: usize, out: &mut [f32]) {
    const TWICE: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];
    blocks(stored, from, out, |block: &[u8; 17], out| {
        let d = match block[0] {
            small @ 0..=1 => f32::from_bits(0x0020_0000 << small),
            e => f32::from_bits(u32::from(e - 1) << 23),
        };
        nibbles(&block[1..], out, |_, code| d * f32::from(TWICE[usize::from(code)]));
    });
}
