//! Activations, and the combinations of gate and up, in plain arithmetic.

use moec_ir::op::{Activation, Glu};

fn erf(x: f64) -> f64 {
    // Series for small arguments, continued fraction for the tail.
    if x.abs() < 2.5 {
        let (mut term, mut sum) = (x, x);
        for n in 1..60 {
            term *= -x * x / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        sum * 2.0 / std::f64::consts::PI.sqrt()
    } else {
        let t = x.abs();
        let fraction = (1..=60).rev().fold(t, |f, n| t + f64::from(n) / 2.0 / f);
        let tail = (-t * t).exp() / (fraction * std::f64::consts::PI.sqrt());
        (1.0 - tail).copysign(x)
    }
}

pub(crate) fn activation(act: Activation, x: f32) -> f32 {
    let x = f64::from(x);
    let y = match act {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::Gelu => x / 2.0 * (1.0 + erf(x / 2.0_f64.sqrt())),
        Activation::GeluTanh => {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
            x / 2.0 * (1.0 + u.tanh())
        }
        Activation::Relu => x.max(0.0),
        Activation::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Activation::Relu2 => x.max(0.0) * x.max(0.0),
    };
    y as f32
}

pub(crate) fn glu(g: Glu, gate: f32, up: f32) -> f32 {
    match g {
        Glu::Gated(act) => activation(act, gate) * up,
        Glu::DRelu => gate.max(0.0) * up.max(0.0),
        Glu::FatRelu { threshold } => (if gate < threshold { 0.0 } else { gate }) * up,
        Glu::Cats { threshold } => {
            let gate = activation(Activation::Silu, gate);
            (if gate.abs() < threshold { 0.0 } else { gate }) * up
        }
        Glu::Limited { limit } => activation(Activation::Silu, gate).min(limit) * up.clamp(-limit, limit),
        Glu::Clamped { alpha, limit } => {
            let (gate, up) = (gate.min(limit), up.clamp(-limit, limit));
            (up + 1.0) * gate * activation(Activation::Sigmoid, alpha * gate)
        }
        Glu::Ungated(act) => activation(act, up),
    }
}
