//! Functions of one element.

use super::math::{map, sigmoid};
use super::*;

words! {
    /// Element-wise activation functions.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum Activation, "an activation" {
        /// `x · sigmoid(x)`
        Silu = "silu",
        /// `x/2 · (1 + erf(x/√2))`
        Gelu = "gelu",
        /// `x/2 · (1 + tanh(√(2/π)(x + 0.044715 x³)))`
        GeluTanh = "gelu_tanh",
        /// `max(x, 0)`
        Relu = "relu",
        /// `1 / (1 + e^-x)`
        Sigmoid = "sigmoid",
        /// `max(x, 0)²` (Primer, arXiv 2109.08668, section 4.2).
        Relu2 = "relu2",
    }
}

impl Activation {
    /// The function, computed in f64.
    pub(super) fn at(self, x: f32) -> f32 {
        let x = f64::from(x);
        let y = match self {
            Self::Silu => x * sigmoid(x),
            Self::Gelu => 0.5 * x * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2)),
            Self::GeluTanh => {
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
                0.5 * x * (1.0 + inner.tanh())
            }
            Self::Relu => x.max(0.0),
            Self::Sigmoid => sigmoid(x),
            Self::Relu2 => x.max(0.0) * x.max(0.0),
        };
        y as f32
    }
}

/// The error function, by its series near zero and by a continued fraction of its complement beyond;
/// exact to about 1e-15.
fn erf(x: f64) -> f64 {
    let z = x.abs();
    let value = if z < 2.5 {
        let (mut term, mut sum, mut n) = (z, z, 0.0);
        while term.abs() > 1e-17 * sum {
            n += 1.0;
            term *= -z * z / n;
            sum += term / (2.0 * n + 1.0);
            if term == 0.0 {
                break;
            }
        }
        sum * std::f64::consts::FRAC_2_SQRT_PI
    } else {
        let fraction = (1..=80).rev().fold(z, |below, n| z + f64::from(n) / 2.0 / below);
        1.0 - (-z * z).exp() / (fraction * std::f64::consts::PI.sqrt())
    };
    value.copysign(x)
}

/// Its name in the text form is the operator's.
impl Attributes for Activation {
    fn write(&self, _: &mut Writer) {}
    fn read(name: &str, r: &mut Reader<'_, '_>) -> Parsed<Option<Self>> {
        Self::of(name, r)
    }
}

impl Operator for Activation {
    const NAMES: &'static [&'static str] = &Self::WORDS;

    fn name(&self) -> &'static str {
        Self::name(*self)
    }
    const OPERANDS: &'static [Kind] = &[V];

    fn infer(&self, o: &Operands<'_>) -> Inferred {
        Ok(vec![o.rows(0, "x")?.ty()])
    }

    fn eval(&self, a: &Args<'_>) -> Evaluated {
        map(a, |x| self.at(x))
    }
}
