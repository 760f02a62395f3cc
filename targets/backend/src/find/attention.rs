//! Attention of a layer: from the projections of the normed rows to the output projection.
//!
//! The norm before it and the residual stay on the CPU. This module finds attention with grouped queries;
//! each backend finds latent attention by the same steps.

use super::{Linear, MatchResult, Rms, Walk, input, value};
use moec_ir::op::AttentionDesc;
use moec_ir::{Module, Op, Operand, RopeStyle, StateId, ValueId, WeightId};

/// A rotation of channels by position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rope {
    /// First rotated channel in a head.
    pub offset: usize,
    /// Rotated channels.
    pub channels: usize,
    /// Pairing of channels.
    pub style: RopeStyle,
}

/// A projection and what follows it: norm, clipping, rotation.
#[derive(Clone, Debug, PartialEq)]
pub struct Chain {
    /// The projection.
    pub linear: Linear,
    /// Its norm, over each head or over all.
    pub norm: Option<Rms>,
    /// Its results are clipped to plus or minus that.
    pub clip: Option<f32>,
    /// Its rotation.
    pub rope: Option<Rope>,
}

/// Attention with grouped queries.
#[derive(Clone, Debug, PartialEq)]
pub struct Grouped {
    /// Heads and their channels.
    pub desc: AttentionDesc,
    /// Positions that the Graph's cache has.
    pub context: usize,
    /// Queries.
    pub q: Chain,
    /// Keys.
    pub k: Chain,
    /// Values.
    pub v: Chain,
    /// Projection that joins the heads.
    pub o: Linear,
    /// Weight of an additional column of the softmax for each head (attention sink).
    pub sinks: Option<WeightId>,
}

/// Place of an attention in an entry point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionBoundary {
    /// Normed rows.
    pub x: ValueId,
    /// Angles, if there is a rotation.
    pub angles: Option<ValueId>,
    /// Result of the output projection.
    pub y: ValueId,
}

/// Steps to the attention of a scope; gives the operator, its operands and its result.
///
/// # Errors
/// Fails if there is none, or several.
pub fn attention<'a>(walk: &mut Walk<'a>) -> MatchResult<(&'a AttentionDesc, &'a [Operand], ValueId)> {
    let mut all = walk.nodes().filter(|n| matches!(n.op, Op::Attention(_)));
    let (Some(node), None) = (all.next(), all.next()) else {
        return Err("it has no attention of its own".into());
    };
    let Op::Attention(desc) = &node.op else { return Err("it has no attention of its own".into()) };
    if desc.chunked {
        return Err("its window is cut into chunks: that of a graph slides".into());
    }
    let y = *node.outputs.first().ok_or("attention has no result")?;
    walk.node(Operand::Value(y))?;
    Ok((desc, &node.inputs, y))
}

/// Operand `i` of an attention.
///
/// # Errors
/// Fails if there is no such operand.
pub fn operand(inputs: &[Operand], i: usize) -> MatchResult<Operand> {
    inputs.get(i).copied().ok_or_else(|| format!("attention has no operand {i}"))
}

/// Steps over a cache write; gives the positions of its state and the written value.
///
/// # Errors
/// Fails if another operator is there.
pub fn cache(module: &Module, walk: &mut Walk<'_>, state: Operand) -> MatchResult<(usize, Operand)> {
    let node = walk.node(state)?;
    let (Op::CacheWrite, Operand::State(StateId(id))) = (&node.op, input(node, 0)?) else {
        return Err(format!("expected a cache write, found `{}`", node.op.name()));
    };
    let context = module.states.get(id as usize).and_then(|s| s.ty.shape.get(2)).copied();
    Ok((context.ok_or("the cache has no positions")?, input(node, 1)?))
}

/// Steps over a rotation; gives it, its angles and its input.
///
/// # Errors
/// Fails if another operator is there.
pub fn rope(walk: &mut Walk<'_>, at: Operand) -> MatchResult<(Rope, ValueId, Operand)> {
    let node = walk.node(at)?;
    let Op::Rope { offset, style, .. } = node.op else {
        return Err(format!("expected a rotation, found `{}`", node.op.name()));
    };
    let angles = value(input(node, 1)?)?;
    let channels = walk.graph.ty(angles).cols();
    Ok((Rope { offset, channels, style }, angles, input(node, 0)?))
}

/// Steps up from queries, keys or values to the rows that they are projected from.
fn chain(walk: &mut Walk<'_>, mut at: Operand) -> MatchResult<(Chain, Option<ValueId>, ValueId)> {
    let (mut rotation, mut angles, mut clip, mut norm) = (None, None, None, None);
    if matches!(walk.peek(at).map(|n| &n.op), Some(Op::Rope { .. })) {
        let (found, with, next) = rope(walk, at)?;
        (rotation, angles, at) = (Some(found), Some(with), next);
    }
    if let Some(Op::Clamp { lo, hi }) = walk.peek(at).map(|n| &n.op) {
        if *lo != -*hi {
            return Err(format!("it is clipped to {lo} … {hi}, which is not symmetric"));
        }
        clip = Some(*hi);
        at = input(walk.node(at)?, 0)?;
    }
    if matches!(walk.peek(at).map(|n| &n.op), Some(Op::RmsNorm { .. })) {
        let (found, next) = walk.rms(at)?;
        (norm, at) = (Some(found), next);
    }
    let (linear, x) = walk.linear(at)?;
    Ok((Chain { linear, norm, clip, rope: rotation }, angles, value(x)?))
}

/// Finds attention with grouped queries, of an [`attention`] that was stepped to: `y` is its result.
///
/// # Errors
/// The reason against it, for people.
pub fn grouped(
    module: &Module,
    walk: &mut Walk<'_>,
    desc: &AttentionDesc,
    inputs: &[Operand],
    y: ValueId,
) -> MatchResult<(Grouped, AttentionBoundary)> {
    let (q, angles, x) = chain(walk, operand(inputs, 0)?)?;
    let (context, k) = cache(module, walk, operand(inputs, 1)?)?;
    let (k, k_angles, k_x) = chain(walk, k)?;
    let (_, v) = cache(module, walk, operand(inputs, 2)?)?;
    let (v, v_angles, v_x) = chain(walk, v)?;
    if x != k_x || x != v_x {
        return Err("queries, keys and values are projected from different rows".into());
    }
    if angles != k_angles || q.rope != k.rope || v_angles.is_some() || v.norm.is_some() {
        return Err("queries and keys are rotated differently, or values are rotated".into());
    }
    if q.clip != k.clip || q.clip != v.clip {
        return Err("queries, keys and values are clipped differently".into());
    }
    for (what, chain, heads) in [("queries", &q, desc.heads), ("keys", &k, desc.kv_heads)] {
        let joined = |n: &Rms| n.groups != heads && (n.groups != 1 || n.weight.is_none());
        if chain.norm.as_ref().is_some_and(joined) {
            return Err(format!("the norm of {what} is neither over a head nor over all"));
        }
    }
    let sinks = if desc.sinks {
        match operand(inputs, 5)? {
            Operand::Weight(id) => Some(id),
            _ => return Err("sinks are not a weight".into()),
        }
    } else {
        None
    };
    let (o, y) = walk.reader(y)?;
    let found = Grouped { desc: desc.clone(), context, q, k, v, o, sinks };
    Ok((found, AttentionBoundary { x, angles, y }))
}

impl Grouped {
    /// Matrices, for the rounding of their formats.
    pub fn matrices(&self) -> Vec<WeightId> {
        [&self.q, &self.k, &self.v].map(|c| c.linear.weight).into_iter().chain([self.o.weight]).collect()
    }
}
