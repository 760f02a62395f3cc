//! Operators that compute each element by itself.

use super::super::call::Call;
use super::super::error::Fault;
use super::super::table::{Results, one};
use super::super::tensor::{Data, Tensor, View, checked_elements};
use crate::package::Dtype;

/// An operator of one argument `x`.
pub(in super::super) fn unary(call: &Call<'_>, f: impl Fn(f32) -> f32) -> Results {
    let mut x = call.floats("x")?;
    x.values.iter_mut().for_each(|x| *x = f(*x));
    one(Tensor::rounded(x.dtype, x.shape, x.values))
}

/// The shape to which two shapes broadcast.
pub(in super::super) fn common(a: &[usize], b: &[usize]) -> Option<Vec<usize>> {
    let rank = a.len().max(b.len());
    let at = |shape: &[usize], i: usize| (i + shape.len()).checked_sub(rank).map_or(1, |i| shape[i]);
    let shape = (0..rank)
        .map(|i| match (at(a, i), at(b, i)) {
            (m, n) if m == n || n == 1 => Some(m),
            (1, n) => Some(n),
            _ => None,
        })
        .collect::<Option<Vec<_>>>()?;
    checked_elements(&shape).map(|_| shape)
}

/// An operator of two arguments `x` and `y`, which broadcast.
pub(in super::super) fn binary(call: &Call<'_>, f: impl Fn(f32, f32) -> f32) -> Results {
    let (x, y) = (call.floats("x")?, call.floats("y")?);
    if x.dtype != y.dtype {
        return Err(Fault::argument("y", format!("{} where `x` is {}", y.dtype, x.dtype)));
    }
    let shape = common(&x.shape, &y.shape).ok_or_else(|| {
        Fault::argument("y", format!("{:?} does not broadcast with {:?}", y.shape, x.shape))
    })?;
    let spread = |own: &[usize], values: Vec<f32>| {
        if own == shape {
            return Some(values);
        }
        View::whole(own).broadcast(&shape).map(|view| view.take(&values))
    };
    let (Some(mut values), Some(other)) = (spread(&x.shape, x.values), spread(&y.shape, y.values)) else {
        return Err(Fault::argument("y", "does not broadcast"));
    };
    values.iter_mut().zip(&other).for_each(|(x, &y)| *x = f(*x, y));
    one(Tensor::rounded(x.dtype, shape, values))
}

/// `1 / (1 + e⁻ˣ)`.
pub(in super::super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// The error function, to f64's precision: its series near 0, the continued fraction of its complement else.
fn erf(x: f64) -> f64 {
    let a = x.abs();
    if a < 2.5 {
        let (mut term, mut sum) = (a, a);
        for n in 1..80 {
            term *= -a * a / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        return (sum * std::f64::consts::FRAC_2_SQRT_PI).copysign(x);
    }
    let fraction = (1..80).rev().fold(a, |tail, n| a + f64::from(n) / 2.0 / tail);
    (1.0 - (-a * a).exp() * std::f64::consts::FRAC_2_SQRT_PI / 2.0 / fraction).copysign(x)
}

/// `gelu`: exact, or by tanh or sigmoid, as `mode` says.
pub(in super::super) fn gelu(call: &Call<'_>) -> Results {
    let mode = call.text("mode")?;
    match mode.as_deref().unwrap_or("EXACT") {
        "EXACT" => unary(call, |x| {
            let x = f64::from(x);
            (0.5 * x * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2))) as f32
        }),
        "TANH_APPROXIMATION" => unary(call, |x| {
            let inner = (2.0 / std::f32::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
            0.5 * x * (1.0 + inner.tanh())
        }),
        "SIGMOID_APPROXIMATION" => unary(call, |x| x * sigmoid(1.702 * x)),
        other => Err(Fault::argument("mode", format!("`{other}` is not known"))),
    }
}

/// `clip`: `min(max(x, alpha), beta)`.
pub(in super::super) fn clip(call: &Call<'_>) -> Results {
    let low = call.scalar("alpha")?.ok_or(Fault::Missing("alpha"))?;
    let high = call.scalar("beta")?.ok_or(Fault::Missing("beta"))?;
    unary(call, |x| x.max(low).min(high))
}

/// `rsqrt`: `1 / √(x + epsilon)`.
pub(in super::super) fn rsqrt(call: &Call<'_>) -> Results {
    let epsilon = call.scalar("epsilon")?.unwrap_or(1e-12);
    unary(call, |x| 1.0 / (x + epsilon).sqrt())
}

/// `cast`: to the type that `dtype` names. To integers it rounds toward zero.
pub(in super::super) fn cast(call: &Call<'_>) -> Results {
    let name = call.text("dtype")?.ok_or(Fault::Missing("dtype"))?;
    let x = call.tensor("x")?;
    let shape = x.shape().to_vec();
    let data = match Dtype::from_name(&name) {
        Some(dtype @ (Dtype::F16 | Dtype::F32)) => return one(Tensor::rounded(dtype, shape, x.to_f32())),
        Some(Dtype::I32) => match x.data() {
            Data::I32(v) => Data::I32(v.clone()),
            _ => Data::I32(x.to_f32().iter().map(|&x| x as i32).collect()),
        },
        Some(Dtype::Bool) => Data::Bool(x.to_f32().iter().map(|&x| x != 0.0).collect()),
        _ => return Err(Fault::argument("dtype", format!("`{name}` is not fp16, fp32, int32 or bool"))),
    };
    one(Tensor::new(&shape, data).ok_or(Fault::Missing("x")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn erf_is_right_to_ten_digits() {
        // Abramowitz and Stegun, table 7.1.
        for (x, y) in [
            (0.0, 0.0),
            (0.1, 0.112_462_916_0),
            (1.0, 0.842_700_792_9),
            (2.0, 0.995_322_265_0),
            (2.6, 0.999_763_965_6),
        ] {
            assert!((erf(x) - y).abs() < 1e-10 && (erf(-x) + y).abs() < 1e-10, "{x}: {}", erf(x));
        }
    }

    #[test]
    fn shapes_broadcast_from_the_right() {
        assert_eq!(common(&[2, 1, 3], &[4, 1]), Some(vec![2, 4, 3]));
        assert_eq!(common(&[], &[4, 1]), Some(vec![4, 1]));
        assert_eq!(common(&[2], &[3]), None);
    }
}
