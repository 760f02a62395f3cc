//! Decoding of blocks to `f32`, in the order of operations of ggml's own `dequantize_row` functions, so that
//! results are equal to the bit.
//!
//! A block of a simple type is a scale of 16 bits, in some types a minimum, and codes of 4, 5 or 8 bits;
//! those of 4 bits have the first half of the block in the low nibbles and the second in the high ones. A
//! super-block has 256 numbers in groups with small integer scales, which are themselves scaled by one or two
//! numbers of 16 bits: [`k_quants`], [`i_quants`]. Codes of [`ternary`] types have three values.
//!
//! Numbers of 16 bits are scales as they stand, infinite ones and NaN too.

mod grids;
pub mod i_quants;
pub mod k_quants;
pub mod ternary;

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
    Half::from_bits(word(block, at)).to_f32()
}

/// A whole number of 16 bits at a place of a block.
fn word(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

/// Code `i` of 4 bits, neighbours in a byte.
fn nibble(bytes: &[u8], i: usize) -> u8 {
    bytes[i / 2] >> (i % 2 * 4) & 15
}

/// Code `i` of 2 bits of a super-block: of each half of 128 numbers, 32 bytes have four runs of 32.
fn pair(bytes: &[u8], i: usize) -> u8 {
    bytes[i / 128 * SMALL + i % SMALL] >> (i % 128 / SMALL * 2) & 3
}

/// Decodes codes of 4 bits, the first half in the low nibbles.
fn nibbles<const N: usize>(codes: &[u8], out: &mut [f32; N], number: impl Fn(usize, u8) -> f32) {
    for (i, byte) in codes.iter().take(N / 2).enumerate() {
        out[i] = number(i, byte & 15);
        out[i + N / 2] = number(i + N / 2, byte >> 4);
    }
}

/// The fifth bits of a block's codes, at a place of it.
fn fifth(block: &[u8], at: usize) -> impl Fn(usize) -> u8 + use<> {
    let bits = u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]);
    move |i| ((bits >> i & 1) as u8) << 4
}

/// Scale, 16 bytes: `d · (code − 8)`.
pub fn q4_0(stored: &[u8], from: usize, out: &mut [f32]) {
    blocks(stored, from, out, |block: &[u8; 18], out: &mut [f32; SMALL]| {
        let d = half(block, 0);
        nibbles(&block[2..], out, |_, code| d * (f32::from(code) - 8.0));
    });
}

/// Scale, minimum, 16 bytes: `d · code + m`.
pub fn q4_1(stored: &[u8], from: usize, out: &mut [f32]) {
    blocks(stored, from, out, |block: &[u8; 20], out: &mut [f32; SMALL]| {
        let (d, m) = (half(block, 0), half(block, 2));
        nibbles(&block[4..], out, |_, code| d * f32::from(code) + m);
    });
}

/// Scale, 32 fifth bits, 16 bytes: `d · (code − 16)`.
pub fn q5_0(stored: &[u8], from: usize, out: &mut [f32]) {
    blocks(stored, from, out, |block: &[u8; 22], out: &mut [f32; SMALL]| {
        let (d, high) = (half(block, 0), fifth(block, 2));
        nibbles(&block[6..], out, |i, code| d * (f32::from(code | high(i)) - 16.0));
    });
}

/// Scale, minimum, 32 fifth bits, 16 bytes: `d · code + m`.
pub fn q5_1(stored: &[u8], from: usize, out: &mut [f32]) {
    blocks(stored, from, out, |block: &[u8; 24], out: &mut [f32; SMALL]| {
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

/// Twice the numbers of E2M1 (OCP Microscaling Formats 1.0), by their codes. There is no −0.
const TWICE_E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// An E8M0 scale and 16 bytes of E2M1 numbers, taken twice as large by ggml, and the scale half as large. A
/// scale of 255, which the specification calls not a number, is 2^127 here as it is there.
pub fn mxfp4(stored: &[u8], from: usize, out: &mut [f32]) {
    blocks(stored, from, out, |block: &[u8; 17], out: &mut [f32; SMALL]| {
        let d = match block[0] {
            small @ 0..=1 => f32::from_bits(0x0020_0000 << small),
            e => f32::from_bits(u32::from(e - 1) << 23),
        };
        nibbles(&block[1..], out, |_, code| d * f32::from(TWICE_E2M1[usize::from(code)]));
    });
}

/// Four E4M3 scales and 32 bytes of E2M1 numbers, by groups of 16; twice and half as large as in [`mxfp4`].
pub fn nvfp4(stored: &[u8], from: usize, out: &mut [f32]) {
    blocks(stored, from, out, |block: &[u8; 36], out: &mut [f32; 64]| {
        for (group, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let d = half_e4m3(block[group]);
            let codes = &block[4 + 8 * group..];
            nibbles(codes, out, |_, code| d * f32::from(TWICE_E2M1[usize::from(code)]));
        }
    });
}

/// Half of an E4M3 number, whose sign is not read. As in ggml, 0x7f is 0, and 0xff is a number.
fn half_e4m3(bits: u8) -> f32 {
    let (exponent, fraction) = (bits >> 3 & 15, f32::from(bits & 7));
    let power = |e: u8| f32::from_bits(u32::from(e) << 23);
    match (bits, exponent) {
        (0x7f, _) => 0.0,
        (_, 0) => fraction * power(127 - 10),
        _ => (8.0 + fraction) * power(127 - 11 + exponent),
    }
}
