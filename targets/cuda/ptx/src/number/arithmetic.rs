//! Arithmetic in f64 that rounds to odd: rounding its result once more, to fewer bits, is rounding the exact one.
//!
//! Where a result is not exact, its last bit is made 1 with the magnitude cut towards zero. As f64 has more than two bits
//! more than twice those of f32, no tie of the narrower format can arise by it (Boldo and Melquiond, 2008).

/// A sum whose error is known, to odd. `error` has the sign of what the exact sum is larger by.
fn to_odd(value: f64, error: f64) -> f64 {
    if error == 0.0 || !value.is_finite() || value.to_bits() & 1 == 1 {
        return value;
    }
    let grows = (error > 0.0) == (value > 0.0);
    f64::from_bits(if grows { value.to_bits() | 1 } else { value.to_bits() - 1 })
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
