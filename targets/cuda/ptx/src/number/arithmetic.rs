//! Arithmetic in f64 that rounds to odd: rounding its result again, to fewer bits, equals rounding the exact
//! result.
//!
//! If a result is not exact, it is truncated towards zero and its last bit is set to 1. f64 has at least two
//! more bits than twice those of f32. So this never causes a tie in the narrower format (Boldo and Melquiond,
//! 2008).

/// A sum whose error is known, to odd. `error` has the sign of what the exact sum is larger by.
fn to_odd(value: f64, error: f64) -> f64 {
    // Without branches, so that lanes share an instruction. The error of what is not finite is NaN, which is
    // neither.
    let bits = value.to_bits();
    let (above, below) = (u64::from(error > 0.0), u64::from(error < 0.0));
    let (grows, shrinks) = if value > 0.0 { (above, below) } else { (below, above) };
    let even = !bits & 1;
    f64::from_bits(bits.wrapping_add(grows & even).wrapping_sub(shrinks & even))
}

/// `a + b`, to odd.
pub(crate) fn add_odd(a: f64, b: f64) -> f64 {
    let sum = a + b;
    // Knuth's two-sum: exact, whichever is larger.
    let of_b = sum - a;
    let error = (a - (sum - of_b)) + (b - of_b);
    to_odd(sum, error)
}

/// `a * b + c`, to odd, where `a` and `b` have at most 26 bits: their product is exact.
pub(crate) fn fma_odd(a: f64, b: f64, c: f64) -> f64 {
    add_odd(a * b, c)
}

/// `a / b`, to odd, of numbers with the exponents of f32.
pub(crate) fn div_odd(a: f64, b: f64) -> f64 {
    let quotient = a / b;
    if !quotient.is_finite() || quotient == 0.0 {
        return quotient;
    }
    let rest = (-quotient).mul_add(b, a);
    to_odd(quotient, if b > 0.0 { rest } else { -rest })
}

/// The square root of a number with the exponents of f32, to odd.
pub(crate) fn sqrt_odd(a: f64) -> f64 {
    let root = a.sqrt();
    if !root.is_finite() || root == 0.0 {
        return root;
    }
    to_odd(root, (-root).mul_add(root, a))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rounding twice gives the same sums and products as the CPU's single rounding, for near and far
    /// exponents.
    #[test]
    fn double_rounding_equals_single_rounding() {
        let mut state = 7u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let bits = (state >> 32) as u32;
            // Half of the numbers are near 1, the others have any exponent.
            f32::from_bits(if state >> 20 & 1 == 0 { bits } else { bits & 0x83ff_ffff | 0x3c00_0000 })
        };
        for _ in 0..200_000 {
            let (a, b, c) = (next(), next(), next());
            let [x, y, z] = [a, b, c].map(f64::from);
            let same = |found: f64, expected: f32, what: &str| {
                let found = found as f32;
                let equal = found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan();
                assert!(equal, "{what} of {a:e}, {b:e}, {c:e}: {found:e}, {expected:e}");
            };
            same(fma_odd(x, y, z), a.mul_add(b, c), "fma");
            same(add_odd(x, y), a + b, "sum");
            same(div_odd(x, y), a / b, "quotient");
            same(sqrt_odd(x), a.sqrt(), "root");
        }
    }
}
