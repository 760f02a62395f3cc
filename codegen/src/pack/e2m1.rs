//! Groups of E2M1: numbers of four bits times a power of two (OCP Microscaling Formats 1.0).
//!
//! Codes are twice the numbers, whole, and scales half of the power.

use super::group::Group;
use moec_ir::types::GROUP;

/// The largest code.
const TOP: f32 = 12.0;

/// The nearest code, ties to even mantissas: steps are 1 below 4, 2 below 8, then 4.
#[allow(clippy::inline_always, reason = "the caller vectorises it only inline")]
#[inline(always)]
pub(super) fn nearest_code(x: f32) -> f32 {
    let size = x.abs();
    let size = if size > TOP { TOP } else { size };
    let step = if size < 4.0 {
        1.0
    } else if size < 8.0 {
        2.0
    } else {
        4.0
    };
    ((size / step).round_ties_even() * step).copysign(x)
}

/// The group that represents `x` with the smaller weighted error; `largest` is its largest magnitude, not
/// zero. The scale is that of the specification (section 6.3), which cuts this number off if it is more than
/// six times the power, or twice that.
pub(super) fn nearest(x: &[f32; GROUP], largest: f32, weights: &[f32; GROUP]) -> Group {
    // The power of two in the largest number by that in the largest of E2M1, which is 4; and half of it.
    let power = f32::from_bits(largest.to_bits() & 0x7f80_0000) / 8.0;
    let [plain, wider] = [power, power * 2.0].map(|scale| at(x, scale));
    let error = |group: &Group| -> f64 {
        let missed = x.iter().zip(group.values()).map(|(x, y)| f64::from(x - y));
        missed.zip(weights).map(|(d, &w)| f64::from(w) * d * d).sum()
    };
    if error(&wider) < error(&plain) { wider } else { plain }
}

/// The nearest codes to a scale.
pub(super) fn at(x: &[f32; GROUP], scale: f32) -> Group {
    // A quotient by a power of two is exact where a product by its inverse may have none.
    Group { scale, codes: x.map(|x| nearest_code(x / scale) as i8) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moec_ir::types::E2M1;

    #[test]
    fn e2m1_codes_are_the_nearest() {
        for i in -3000..=3000 {
            let x = i as f32 / 200.0;
            let code = nearest_code(x) as i8;
            let off = |code: i8| (f32::from(code) - x).abs();
            let least = E2M1.iter().map(|&c| off(c)).fold(f32::INFINITY, f32::min);
            assert_eq!(off(code), least, "{x}");
            assert!(E2M1.contains(&code));
        }
        // A number halfway between two codes is rounded to the even mantissa.
        let ties = [(0.5, 0.0), (1.5, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0), (7.0, 8.0), (10.0, 8.0)];
        for (x, code) in ties {
            assert_eq!((nearest_code(x), nearest_code(-x)), (code, -code));
        }
    }

    #[test]
    fn scales_follow_the_specification_unless_doubling_errs_less() {
        let of = |rest: f32, large: f32| {
            let mut x = [rest; GROUP];
            x[3] = large;
            nearest(&x, large, &[1.0; GROUP])
        };
        assert_eq!(of(0.0, 4.0).scale, 0.5);
        // With exponent 1, 7.5 is clipped to 6; with exponent 2 it becomes 8.
        assert_eq!((of(0.0, 7.5).scale, of(0.0, 7.5).codes[3]), (1.0, 8));
        // If a larger scale would lose more on many small numbers, the largest number is clipped.
        assert_eq!(of(0.5, 7.5).scale, 0.5);
    }
}
