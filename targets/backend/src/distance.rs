//! Distances between computed and expected results.

use moec_ir::Glu;
use moec_ir::eval::{Data, Tensor};
use serde::Serialize;

/// Thresholds of gates, relative to the root mean square of the gates above them. This is the change of a
/// gate that rounding carries over its threshold. Thresholds that leave half of ferris's neurons active are a
/// tenth to a fifth of it.
const JUMP: f64 = 0.25;

/// Relative error of a gated network whose products have a relative error. If the error of gates is small,
/// about the same share of them is that near the threshold. The root mean square of their jumps grows with the
/// root of that share.
pub fn joined(products: f64, glu: Glu) -> f64 {
    match glu {
        Glu::Cats { .. } => products.hypot(JUMP * products.sqrt()),
        _ => products,
    }
}

/// Distance of a tensor from its reference.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Distance {
    /// Root mean square of the difference over that of the reference; 1 for integers that differ.
    pub relative: f64,
    /// Largest absolute difference.
    pub max_abs: f64,
}

impl Distance {
    /// Whether the relative error is a number and at most `bound`.
    pub fn within(&self, bound: f64) -> bool {
        self.relative <= bound
    }

    /// The larger of two, field by field.
    pub fn max(self, other: Self) -> Self {
        let larger = |a: f64, b: f64| if a.is_nan() || a > b { a } else { b };
        Self { relative: larger(self.relative, other.relative), max_abs: larger(self.max_abs, other.max_abs) }
    }

    /// Distance of the first `len` elements.
    pub fn of(got: &Tensor, want: &Tensor, len: usize) -> Self {
        match (&got.data, &want.data) {
            (Data::F32(a), Data::F32(b)) => floats(a, b, len),
            (Data::I32(a), Data::I32(b)) => {
                Self::exact(a.get(..len).is_some() && a.get(..len) == b.get(..len))
            }
            _ => Self::exact(false),
        }
    }

    /// 0 if equal, else 1.
    pub fn exact(equal: bool) -> Self {
        let d = if equal { 0.0 } else { 1.0 };
        Self { relative: d, max_abs: d }
    }
}

fn floats(got: &[f32], want: &[f32], len: usize) -> Distance {
    let (Some(got), Some(want)) = (got.get(..len), want.get(..len)) else {
        return Distance::exact(false);
    };
    let (mut error, mut norm, mut max_abs) = (0.0_f64, 0.0_f64, 0.0_f64);
    for (&a, &b) in got.iter().zip(want) {
        let d = f64::from(a) - f64::from(b);
        error += d * d;
        norm += f64::from(b) * f64::from(b);
        max_abs = if d.is_nan() { f64::NAN } else { max_abs.max(d.abs()) };
    }
    let relative = if norm > 0.0 { (error / norm).sqrt() } else { error.sqrt() };
    Distance { relative, max_abs }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        let t = |x: &[f32]| Tensor::f32([x.len()], x.to_vec());
        let d = Distance::of(&t(&[3.0, 4.0]), &t(&[3.0, 4.0]), 2);
        assert_eq!(d, Distance::default());
        let d = Distance::of(&t(&[3.0, 5.0]), &t(&[3.0, 4.0]), 2);
        assert!((d.relative - 0.2).abs() < 1e-12 && (d.max_abs - 1.0).abs() < 1e-12);
        assert!(!Distance::of(&t(&[f32::NAN]), &t(&[1.0]), 1).within(1.0));
        assert!(!Distance::of(&t(&[1.0]), &t(&[1.0]), 2).within(0.5));
    }
}
