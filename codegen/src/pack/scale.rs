//! Scales of groups as formats hold them: 16 bits of f32, or of f16, or eight bits.

use half::{bf16, f16};
use moec_ir::types::{E5M3, E5M3_UNIT, Format};

/// Scale as a format stores it. Of E2M1 it is a power of two, the nearest one.
#[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
#[inline(always)]
pub(super) fn nearest(format: Format, scale: f32) -> f32 {
    if matches!(format.spec().codes, Some(codes) if codes.powers) {
        return power(scale);
    }
    of_bits(format, bits(format, scale))
}

/// A scale in the bits of a format's scales.
#[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
#[inline(always)]
pub(super) fn bits(format: Format, scale: f32) -> u16 {
    match format.scales() {
        _ if format.is_by_patterns() => e5m3(round_scale(format, scale)),
        Format::F16 => f16::from_f32(scale).to_bits(),
        _ => bf16::from_f32(scale).to_bits(),
    }
}

/// The scale of these bits.
#[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
#[inline(always)]
pub(super) fn of_bits(format: Format, bits: u16) -> f32 {
    match format.scales() {
        _ if format.is_by_patterns() => f32::from_bits(u32::from(bits) << (23 - E5M3)) * E5M3_UNIT,
        Format::F16 => f16::from_bits(bits).to_f32(),
        _ => bf16::from_bits(bits).to_f32(),
    }
}

/// Bits of f32 that a scale does without.
#[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
#[inline(always)]
pub(super) const fn dropped_bits(format: Format) -> u32 {
    if format.is_by_patterns() {
        23 - E5M3
    } else if matches!(format.scales(), Format::F16) {
        13
    } else {
        16
    }
}

/// A number with as many digits as a format's scales, in a range of exponents that they all have.
#[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
#[inline(always)]
pub(super) fn round_scale(format: Format, scale: f32) -> f32 {
    // To the nearest, ties to even.
    let (bits, cut) = (scale.to_bits(), dropped_bits(format));
    let half = (1 << (cut - 1)) - 1 + (bits >> cut & 1);
    f32::from_bits(bits.wrapping_add(half) >> cut << cut)
}

/// The byte of a number of [`E5M3`]: 0 below the smallest normal number, the last one above the largest.
fn e5m3(scale: f32) -> u16 {
    // The byte of 1 without its unit.
    const NONE: u32 = ((E5M3_UNIT.to_bits() >> 23) - 127) << E5M3;
    let byte = (scale.to_bits() >> (23 - E5M3)).saturating_sub(NONE) as u16;
    if scale <= 0.0 || byte < 1 << E5M3 { 0 } else { byte.min(255) }
}

/// The nearest power of two, halfway the larger one, as bf16 has it; 0 below.
fn power(scale: f32) -> f32 {
    // Subnormal numbers are made normal first.
    let (x, by) = if scale.abs() < f32::MIN_POSITIVE {
        (scale * 16_777_216.0, 1.0 / 16_777_216.0)
    } else {
        (scale, 1.0)
    };
    let power = f32::from_bits((x.abs().to_bits() + 0x0040_0000) & 0x7f80_0000) * by;
    if power < LEAST { 0.0 } else { power }
}

/// The smallest scale that MXFP4 has: half of 2⁻¹²⁷.
pub(super) const LEAST: f32 = f32::from_bits(1 << 21);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_scale_equals_the_stored_scale() {
        for x in (0..100_000_u32).map(|i| f32::from_bits(0x3f00_0000 + i * 613)) {
            for format in [Format::Q8, Format::Q4, Format::Q8h, Format::Q4h] {
                assert_eq!(round_scale(format, x), nearest(format, x), "{format} {x}");
                assert_eq!(round_scale(format, -x), nearest(format, -x), "{format} {x}");
            }
        }
    }

    #[test]
    fn scales_of_eight_bits_come_back() {
        for format in [Format::Q2, Format::Q2s] {
            let mut last = 0.0;
            for byte in [0].into_iter().chain(8..=255_u16) {
                let scale = of_bits(format, byte);
                assert_eq!(bits(format, scale), byte, "{scale}");
                assert_eq!(round_scale(format, scale), scale);
                assert!(scale > last || byte == 0, "{byte}");
                last = scale;
            }
            assert_eq!([of_bits(format, 8), last], [2.0_f32.powi(-24), 120.0]);
            for (x, stored) in [(-1.0, 0.0), (1e-30, 0.0), (1e30, 120.0), (1.07, 1.125), (1.06, 1.0)] {
                assert_eq!(nearest(format, x), stored, "{x}");
            }
        }
    }

    #[test]
    fn powers_of_two_down_to_the_smallest() {
        for e in -128..=126 {
            let x = 2.0_f64.powi(e) as f32;
            for near in [0.76, 1.0, 1.49] {
                assert_eq!(nearest(Format::Mxfp4, x * near), x, "{e} {near}");
            }
            // bf16 represents it exactly.
            assert_eq!(of_bits(Format::Mxfp4, bits(Format::Mxfp4, x)), x);
        }
        assert_eq!(nearest(Format::Mxfp4, 0.0), 0.0);
        assert_eq!(nearest(Format::Mxfp4, LEAST / 4.0), 0.0);
    }
}
