//! The activation unit, number by number: functions in f64, rounded once to f32, products in f32.

use moec_ndp_isa::{Activation, Glu};
use std::f64::consts;

/// `1 / (1 + e^-x)`
fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The series of erf, for `z` in −1 .. 1.
fn near_zero(z: f64) -> f64 {
    let (mut term, mut sum) = (z, z);
    for n in 1..40 {
        term *= -z * z / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    sum * consts::FRAC_2_SQRT_PI
}

/// `1 − erf(z)` for `z` from 1 on, by its continued fraction: to about 1e-15 of itself.
fn erfc(z: f64) -> f64 {
    let fraction = (1..=200).rev().fold(z, |below, n| z + f64::from(n) / 2.0 / below);
    (-z * z).exp() / (fraction * consts::PI.sqrt())
}

/// Error function, away from zero by its complement, so that it is rounded correctly close to one.
fn erf(z: f64) -> f64 {
    if z.abs() < 1.0 { near_zero(z) } else { (1.0 - erfc(z.abs())).copysign(z) }
}

/// Hyperbolic tangent, computed like [`erf`]; near zero by the standard library.
fn tanh(y: f64) -> f64 {
    if y.abs() < 0.5 { y.tanh() } else { (1.0 - 2.0 / ((2.0 * y.abs()).exp() + 1.0)).copysign(y) }
}

fn relu(x: f32) -> f32 {
    if x > 0.0 { x } else { 0.0 }
}

/// Value of one of the unit's functions.
pub(super) fn activate(kind: Activation, x: f32) -> f32 {
    let wide = f64::from(x);
    let y = match kind {
        Activation::Silu => wide * sigmoid(wide),
        Activation::Gelu => 0.5 * wide * (1.0 + erf(wide * consts::FRAC_1_SQRT_2)),
        Activation::GeluTanh => {
            let inner = (2.0 / consts::PI).sqrt() * (wide + 0.044_715 * wide * wide * wide);
            0.5 * wide * (1.0 + tanh(inner))
        }
        Activation::Relu => return relu(x),
        Activation::Sigmoid => sigmoid(wide),
    };
    y as f32
}

/// Joins a gate and an up projection.
pub(super) fn glu(kind: Glu, gate: f32, up: f32) -> f32 {
    match kind {
        Glu::Gated(function) => activate(function, gate) * up,
        Glu::DRelu => relu(gate) * relu(up),
        Glu::Clamped { alpha, limit } => {
            let gate = f64::from(if gate > limit { limit } else { gate });
            let up = if up > limit { limit } else { up };
            let up = if up < -limit { -limit } else { up };
            let swish = (gate * sigmoid(f64::from(alpha) * gate)) as f32;
            swish * (up + 1.0)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{erf, erfc};

    /// Values of both functions (NIST's Digital Library of Mathematical Functions, §7.2), to 15 digits.
    const VALUES: [(f64, f64, f64); 5] = [
        (0.5, 0.520_499_877_813_047, 0.479_500_122_186_953),
        (1.0, 0.842_700_792_949_715, 0.157_299_207_050_285),
        (2.0, 0.995_322_265_018_953, 0.004_677_734_981_047_27),
        (3.0, 0.999_977_909_503_001, 2.209_049_699_858_54e-5),
        (5.0, 0.999_999_999_998_463, 1.537_459_794_428_03e-12),
    ];

    #[test]
    fn the_error_function_is_exact() {
        for (z, value, complement) in VALUES {
            for z in [z, -z] {
                assert!((erf(z) / value.copysign(z) - 1.0).abs() < 2e-15, "erf({z}) = {}", erf(z));
            }
            assert!(z < 1.0 || (erfc(z) / complement - 1.0).abs() < 1e-13, "erfc({z}) = {}", erfc(z));
        }
        assert_eq!((erf(0.0), erf(30.0), erf(-30.0)), (0.0, 1.0, -1.0));
    }
}
