//! Functions that join gate and up, in the HTP's operators.

use crate::net::{NetworkBuilder, NetworkError, Op, TensorId};
use moec_ir::{Activation, Glu};

type Result<T> = std::result::Result<T, NetworkError>;

/// √(8/π): twice the factor of the approximation of GELU by a hyperbolic tangent, `x/2 · (1 + tanh(z)) = x ·
/// sigmoid(2z)`.
const GELU_SLOPE: f32 = 1.595_769;
/// Weight of the cube there.
const GELU_CUBE: f32 = 0.044_715;

/// `glu(gate, up)`; names begin with `name`.
///
/// # Errors
/// Operands of different shapes; a network without a gate.
pub(super) fn join(
    b: &mut NetworkBuilder,
    name: &str,
    glu: Glu,
    gate: TensorId,
    up: TensorId,
) -> Result<TensorId> {
    let at = |what: &str| format!("{name}.{what}");
    match glu {
        Glu::Gated(act) => {
            let g = activate(b, &at("act"), act, gate)?;
            b.op(&at("h"), Op::Multiply, &[g, up])
        }
        Glu::DRelu => {
            let g = b.op(&at("act"), Op::Relu, &[gate])?;
            let u = b.op(&at("act_up"), Op::Relu, &[up])?;
            b.op(&at("h"), Op::Multiply, &[g, u])
        }
        Glu::FatRelu { threshold } => {
            let least = b.number("least", 0.0)?;
            let most = b.number(&at("threshold"), threshold)?;
            let g = outside(b, name, gate, [least, most])?;
            let g = b.op(&at("act"), Op::Relu, &[g])?;
            b.op(&at("h"), Op::Multiply, &[g, up])
        }
        Glu::Cats { threshold } => {
            let g = activate(b, &at("act"), Activation::Silu, gate)?;
            let [least, most] =
                [("floor", -threshold), ("threshold", threshold)].map(|(what, x)| b.number(&at(what), x));
            let g = outside(b, name, g, [least?, most?])?;
            b.op(&at("h"), Op::Multiply, &[g, up])
        }
        Glu::Ungated(_) => Err(NetworkError::whole(
            name,
            "networks without a gate are not supported: its experts stay on the CPU",
        )),
        Glu::Limited { limit } => {
            let [most, least] = [("limit", limit), ("floor", -limit)].map(|(what, x)| b.number(what, x));
            let (most, least) = (most?, least?);
            let g = activate(b, &at("act"), Activation::Silu, gate)?;
            let g = b.op(&at("low"), Op::Minimum, &[g, most])?;
            let u = b.op(&at("up_low"), Op::Minimum, &[up, most])?;
            let u = b.op(&at("up_in"), Op::Maximum, &[u, least])?;
            b.op(&at("h"), Op::Multiply, &[g, u])
        }
        Glu::Clamped { alpha, limit } => {
            let [most, least, one, slope] =
                [("limit", limit), ("floor", -limit), ("one", 1.0), ("alpha", alpha)]
                    .map(|(what, x)| b.number(what, x));
            let (most, least, one, slope) = (most?, least?, one?, slope?);
            let g = b.op(&at("low"), Op::Minimum, &[gate, most])?;
            let u = b.op(&at("up_low"), Op::Minimum, &[up, most])?;
            let u = b.op(&at("up_in"), Op::Maximum, &[u, least])?;
            let u = b.op(&at("up_one"), Op::Add, &[u, one])?;
            let s = b.op(&at("slope"), Op::Multiply, &[g, slope])?;
            let s = b.op(&at("share"), Op::Sigmoid, &[s])?;
            let g = b.op(&at("act"), Op::Multiply, &[g, s])?;
            b.op(&at("h"), Op::Multiply, &[g, u])
        }
    }
}

/// `x` where it is outside of a range, and 0 inside: the sign of its distance from the range, squared, is a mask.
fn outside(
    b: &mut NetworkBuilder,
    name: &str,
    x: TensorId,
    [least, most]: [TensorId; 2],
) -> Result<TensorId> {
    let at = |what: &str| format!("{name}.{what}");
    let near = b.op(&at("near_low"), Op::Maximum, &[x, least])?;
    let near = b.op(&at("near"), Op::Minimum, &[near, most])?;
    let beyond = b.op(&at("beyond"), Op::Subtract, &[x, near])?;
    let sign = b.op(&at("sign"), Op::Sign, &[beyond])?;
    let mask = b.op(&at("mask"), Op::Multiply, &[sign, sign])?;
    b.op(&at("cut"), Op::Multiply, &[x, mask])
}

fn activate(b: &mut NetworkBuilder, name: &str, act: Activation, x: TensorId) -> Result<TensorId> {
    let at = |what: &str| format!("{name}.{what}");
    match act {
        Activation::Relu => b.op(name, Op::Relu, &[x]),
        Activation::Sigmoid => b.op(name, Op::Sigmoid, &[x]),
        Activation::Relu2 => {
            let x = b.op(&at("relu"), Op::Relu, &[x])?;
            b.op(name, Op::Multiply, &[x, x])
        }
        Activation::Gelu => b.op(name, Op::Gelu, &[x]),
        Activation::Silu => {
            let share = b.op(&at("share"), Op::Sigmoid, &[x])?;
            b.op(name, Op::Multiply, &[x, share])
        }
        Activation::GeluTanh => {
            let (cube, one, slope) = (
                b.number("gelu_cube", GELU_CUBE)?,
                b.number("gelu_one", 1.0)?,
                b.number("gelu_slope", GELU_SLOPE)?,
            );
            let square = b.op(&at("square"), Op::Multiply, &[x, x])?;
            let bent = b.op(&at("bent"), Op::Multiply, &[square, cube])?;
            let bent = b.op(&at("bent_one"), Op::Add, &[bent, one])?;
            let z = b.op(&at("steep"), Op::Multiply, &[x, slope])?;
            let z = b.op(&at("z"), Op::Multiply, &[z, bent])?;
            let share = b.op(&at("share"), Op::Sigmoid, &[z])?;
            b.op(name, Op::Multiply, &[x, share])
        }
    }
}
