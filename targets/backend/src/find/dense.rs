//! Networks that every token passes: dense layers, and shared experts.
//!
//! A dense network reaches from gate and up projection to the down projection. The scalar gate of a shared
//! expert (Qwen2-MoE) stays on the CPU, with the norm before it and the residual: its weights are exact.

use super::{MatchResult, Walk, input, result, rounds, value, weight};
use moec_ir::{Glu, Module, Node, Op, Operand, ValueId, WeightId};

/// A gated network.
#[derive(Clone, Debug, PartialEq)]
pub struct Dense {
    /// Function that joins gate and up.
    pub glu: Glu,
    /// `[2I, H]`, or gate and up apart.
    pub gate_up: Vec<WeightId>,
    /// Empty, or as `gate_up`.
    pub gate_up_bias: Vec<WeightId>,
    /// `[H, I]`
    pub down: WeightId,
    /// `[H]`
    pub down_bias: Option<WeightId>,
}

/// Finds the network of a scope; gives it, its rows and its result.
///
/// # Errors
/// The reason against it, for people.
pub fn dense(module: &Module, walk: &mut Walk<'_>) -> MatchResult<(Dense, ValueId, ValueId)> {
    let joins = |o: Operand| {
        let op = walk.peek(o).map(|n| &n.op);
        matches!(op, Some(Op::LinearGlu { .. } | Op::Glu(_) | Op::Mul))
    };
    let down = |n: &&Node| rounds(module, n) && n.inputs.first().is_some_and(|o| joins(*o));
    let found: Vec<_> = walk.nodes().filter(down).collect();
    let [node] = *found.as_slice() else {
        return Err(format!("{} gated networks where one is expected", found.len()));
    };
    let y = result(node)?;
    let (down, at) = walk.linear(Operand::Value(y))?;
    let join = walk.node(at)?;
    let (glu, gate_up, gate_up_bias, x) = match join.op {
        Op::LinearGlu { glu, bias } => {
            let bias = bias.then(|| weight(join, 2)).transpose()?;
            (glu, vec![weight(join, 1)?], bias.into_iter().collect(), input(join, 0)?)
        }
        Op::Glu(glu) => split_gate_up(walk, glu, input(join, 0)?, input(join, 1)?)?,
        _ => {
            let (a, b) = (input(join, 0)?, input(join, 1)?);
            let act = |o| match walk.peek(o).map(|n| &n.op) {
                Some(Op::Act(act)) => Some(*act),
                _ => None,
            };
            let (act, gate, up) = match (act(a), act(b)) {
                (Some(act), _) => (act, a, b),
                (_, Some(act)) => (act, b, a),
                _ => return Err("gate and up join without an activation".into()),
            };
            let gate = input(walk.node(gate)?, 0)?;
            split_gate_up(walk, Glu::Gated(act), gate, up)?
        }
    };
    let dense = Dense { glu, gate_up, gate_up_bias, down: down.weight, down_bias: down.bias };
    Ok((dense, value(x)?, y))
}

type Joined = (Glu, Vec<WeightId>, Vec<WeightId>, Operand);

/// Gate and up as projections of their own.
fn split_gate_up(walk: &mut Walk<'_>, glu: Glu, gate: Operand, up: Operand) -> MatchResult<Joined> {
    let ((gate, x), (up, up_x)) = (walk.linear(gate)?, walk.linear(up)?);
    if x != up_x || gate.bias.is_some() != up.bias.is_some() {
        return Err("gate and up are projected differently".into());
    }
    let biases = [gate.bias, up.bias].into_iter().flatten().collect();
    Ok((glu, vec![gate.weight, up.weight], biases, x))
}

impl Dense {
    /// Matrices, for the rounding of their formats.
    pub fn matrices(&self) -> Vec<WeightId> {
        self.gate_up.iter().copied().chain([self.down]).collect()
    }
}
