//! Elementary functions as inlined polynomials, and what is made of them. No library is called.

use super::F;
use moec_ir::op::{Activation, Glu};

/// `(e^r − 1 − r) / r²` on `|r| ≤ ln 2 / 2`, minimax; relative error of `e^r` 3e-9.
const EXP: [f32; 5] = [0.499_999_94, 0.166_665_2, 0.041_668_393, 0.008_368_781, 0.001_381_446_7];
/// `(2^r − 1) / r` on `|r| ≤ ½`, minimax; relative error of `2^r` 9e-8.
#[allow(clippy::approx_constant, reason = "a minimax coefficient, not ln 2")]
const EXP2: [f32; 5] = [0.693_147, 0.240_222_42, 0.055_507_336, 0.009_671_513, 0.001_326_472_7];
/// As [`EXP2`], relative error 1e-4.
const EXP2_ROUGH: [f32; 3] = [0.693_282_9, 0.242_210_97, 0.055_008_933];
/// `e^(t²) erfc(t) / u` in powers of `u = 1 / (1 + 0.4 t)`, `0 ≤ t ≤ 10`, minimax; relative error 6e-8.
const ERFC: [f32; 9] = [
    0.225_634_23,
    0.226_443_11,
    0.201_887_56,
    0.193_393_32,
    0.079_756_24,
    0.087_964_72,
    0.083_986_95,
    -0.140_319_06,
    0.041_253_004,
];
const ERFC_SLOPE: f32 = 0.4;

/// `(sin r − r) / r³` in powers of `r²`, `|r| ≤ π/4`, minimax; error of `sin r` 4e-9.
const SIN: [f32; 3] = [-0.166_666_55, 0.008_332_178, -0.000_195_172_41];
/// `(cos r − 1 + r²/2) / r⁴` in powers of `r²`, `|r| ≤ π/4`, minimax; error of `cos r` 1e-10.
const COS: [f32; 3] = [0.041_666_647, -0.001_388_736_7, 2.443_838_3e-5];
/// `π/2` in three parts, each the nearest f32 of what the ones before leave (Cody and Waite).
#[allow(clippy::approx_constant, reason = "its first part is the nearest f32, and that is the point")]
const HALF_PI: [f32; 3] = [1.570_796_4, -4.371_139e-8, -1.715_124_5e-15];

/// `ln 2` in two parts; the first has few bits, so that its products with exponents are exact.
const LN2_HI: f32 = 0.693_115_23;
const LN2_LO: f32 = 3.194_618_3e-5;
/// Adding it rounds to an integer, which is then in the low bits.
const ROUND: f32 = 12_582_912.0;

impl<'k> F<'k> {
    /// A polynomial in `self`, constant term first.
    fn polynomial(self, coefficients: &[f32]) -> F<'k> {
        let mut terms = coefficients.iter().rev().map(|&c| self.k.f(c));
        let first = terms.next().unwrap_or(self);
        terms.fold(first, |sum, c| sum.fma(self, c))
    }

    /// `e^x`, to 2 units in the last place; 0 and ∞ where that under- and overflows.
    pub(crate) fn exp(self) -> F<'k> {
        let k = self.k;
        let x = self.max(k.f(-104.0)).min(k.f(89.0));
        let shifted = x.fma(k.f(std::f32::consts::LOG2_E), k.f(ROUND));
        let n = shifted - ROUND;
        let r = n.fma(k.f(-LN2_LO), n.fma(k.f(-LN2_HI), x));
        let tail = r.polynomial(&EXP);
        let value = (r * r).fma(tail, r) + 1.0;
        // Scaled in two steps, since 2^n alone may be out of range.
        let n = shifted.bits() - k.f(ROUND).bits();
        let half = n.shr(1);
        let power = |e: super::I<'k>| (e + 127).shl(23).as_float();
        value * power(half) * power(n - half)
    }

    /// `2^x` for `x ≤ 0`, exactly 1 at 0; below −126 it is 2^−126. With `rough`, to 1e-4.
    pub(crate) fn exp2_down(self, rough: bool) -> F<'k> {
        let k = self.k;
        let x = self.max(k.f(-126.0));
        let shifted = x + ROUND;
        let r = x - (shifted - ROUND);
        let tail = r.polynomial(if rough { &EXP2_ROUGH } else { &EXP2 });
        // The integer part is in the low bits of `shifted`, and goes to the exponent.
        (r.fma(tail, k.f(1.0)).bits() + shifted.bits().shl(23)).as_float()
    }

    /// `[cos x, sin x]`, to 2e-7, for `|x| < 2²⁰`: there the difference to the nearest multiple of `π/2` is
    /// exact in f32 but for the parts of `π/2` after the first.
    pub(crate) fn cos_sin(self) -> [F<'k>; 2] {
        let k = self.k;
        let shifted = self.fma(k.f(std::f32::consts::FRAC_2_PI), k.f(ROUND));
        let n = shifted - ROUND;
        let r = HALF_PI.iter().fold(self, |r, &part| n.fma(k.f(-part), r));
        let z = r * r;
        let sin = (r * z).fma(z.polynomial(&SIN), r);
        let cos = (z * z).fma(z.polynomial(&COS), z.fma(k.f(-0.5), k.f(1.0)));
        // The quadrant is in the low bits: odd ones exchange the two, and each is negative in two of four.
        let quarter = shifted.bits();
        let is = |bit: i32, q: super::I<'k>| (q & k.i32(bit)).equals(k.i32(0)).not();
        let odd = is(1, quarter);
        let signed = |negative: super::I<'k>, x: F<'k>| negative.pick(-x, x);
        [signed(is(2, quarter + 1), odd.pick(sin, cos)), signed(is(2, quarter), odd.pick(cos, sin))]
    }

    /// `ln(1 + x)` for `0 ≤ x ≤ 1`, to 2 units in the last place.
    fn ln_1p(self) -> F<'k> {
        // 2 artanh(x / (2 + x)), whose argument is at most ⅓.
        let s = self / (self + 2.0);
        let odd = [2.0, 2.0 / 3.0, 2.0 / 5.0, 2.0 / 7.0, 2.0 / 9.0, 2.0 / 11.0, 2.0 / 13.0];
        s * (s * s).polynomial(&odd)
    }

    /// `ln(1 + e^x)`
    pub(crate) fn softplus(self) -> F<'k> {
        self.at_least(0.0) + (-self.abs()).exp().ln_1p()
    }

    /// `ln(x)` for `x ≥ 1`, to 2 units in the last place.
    pub(crate) fn ln_above_one(self) -> F<'k> {
        let bits = self.bits();
        let exponent = (bits.shr(23) - 127).to_float();
        // The rest of x is in 1 .. 2.
        let rest = ((bits & ((1 << 23) - 1)) + (127 << 23)).as_float();
        exponent.fma(self.k.f(LN2_HI), exponent.fma(self.k.f(LN2_LO), (rest - 1.0).ln_1p()))
    }

    /// `1 / (1 + e^-x)`
    pub(crate) fn sigmoid(self) -> F<'k> {
        let k = self.k;
        let e = (-self.abs()).exp();
        let numerator = self.lt(k.f(0.0)).pick(e, k.f(1.0));
        numerator / (e + 1.0)
    }

    /// Probability that a normal variable is below `x`: `(1 + erf(x/√2)) / 2`.
    fn normal_cdf(self) -> F<'k> {
        let k = self.k;
        let t = (self * std::f32::consts::FRAC_1_SQRT_2).abs();
        let t = t.min(k.f(10.0));
        let u = k.f(1.0) / t.fma(k.f(ERFC_SLOPE), k.f(1.0));
        let half_erfc = (-(t * t)).exp() * u * u.polynomial(&ERFC) * 0.5;
        self.lt(k.f(0.0)).pick(half_erfc, k.f(1.0) - half_erfc)
    }

    /// An activation function.
    pub(crate) fn activate(self, act: Activation) -> F<'k> {
        let k = self.k;
        match act {
            Activation::Silu => self * self.sigmoid(),
            Activation::Gelu => self * self.normal_cdf(),
            Activation::GeluTanh => {
                // (1 + tanh(u)) / 2 = sigmoid(2u)
                let cubic = (self * self).fma(k.f(0.044_715), k.f(1.0));
                let u2 = self * cubic * (2.0 * (2.0 / std::f32::consts::PI).sqrt());
                self * u2.sigmoid()
            }
            Activation::Relu => self.max(k.f(0.0)),
            Activation::Sigmoid => self.sigmoid(),
            Activation::Relu2 => {
                let x = self.max(k.f(0.0));
                x * x
            }
        }
    }

    /// Gate `self` and up projection `up` joined.
    pub(crate) fn glu(self, up: F<'k>, glu: Glu) -> F<'k> {
        let k = self.k;
        match glu {
            Glu::Gated(act) => self.activate(act) * up,
            Glu::DRelu => self.max(k.f(0.0)) * up.max(k.f(0.0)),
            // Values that are not below the threshold, NaN included, stay.
            Glu::FatRelu { threshold } => self.lt(k.f(threshold)).pick(k.f(0.0), self) * up,
            Glu::Cats { threshold } => {
                let g = self.activate(Activation::Silu);
                g.abs().lt(k.f(threshold)).pick(k.f(0.0), g) * up
            }
            Glu::Limited { limit } => {
                self.activate(Activation::Silu).at_most(limit) * up.at_least(-limit).at_most(limit)
            }
            Glu::Clamped { alpha, limit } => {
                let g = self.min(k.f(limit));
                let u = up.max(k.f(-limit)).min(k.f(limit));
                (u + 1.0) * g * (g * alpha).sigmoid()
            }
            Glu::Ungated(act) => up.activate(act),
        }
    }
}
