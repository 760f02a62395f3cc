//! Attention of a layer, found in the Graph and described for the emitter.
//!
//! An attention reaches from the projections of the normed rows to the output projection. The norm before it
//! and the residual stay on the CPU (NPUMoE, §3.2): the Neural Engine has no layer norm, and a graph that
//! begins with its first matrix takes no more than one row per token.
//!
//! A package holds a function for the chunk of a prompt and one for decoding, `chunk{T}`, with `T` up to the
//! unit's multiple. Both keep one state, that of one sequence. A decode entry point of several sequences
//! calls its function once for each, with one row and its own state.

use super::Source;
use crate::emit;
use moec_backend::error::Result;
use moec_backend::find::{
    self, AttentionBoundary, Grouped, Linear, MatchResult, Rms, Walk, cache, input, operand, projects,
    projects_heads, rope, value, weight,
};
use moec_ir::op::AttentionDesc;
use moec_ir::{Module, Op, Operand, RopeStyle, ValueId, WeightId};

/// Attention over heads of keys and values, or over a latent.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Attention {
    /// Grouped queries.
    Grouped(Box<Grouped>),
    /// Latent attention, absorbed.
    Latent(Box<Latent>),
}

/// Latent attention.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Latent {
    desc: AttentionDesc,
    context: usize,
    q_down: Option<(Linear, Rms)>,
    q: Linear,
    /// Channels that are not rotated, and that are.
    nope: usize,
    rotated: usize,
    style: RopeStyle,
    k_up: WeightId,
    kv_down: Linear,
    kv_norm: Rms,
    v_up: WeightId,
    o: Linear,
}

/// Finds the attention of a scope.
///
/// # Errors
/// The reason against it, for people.
pub(super) fn find(module: &Module, walk: &mut Walk<'_>) -> MatchResult<(Attention, AttentionBoundary)> {
    let (desc, inputs, y) = find::attention(walk)?;
    if desc.v_from_k {
        latent(module, walk, desc, inputs, y)
    } else {
        let (found, ends) = find::grouped(module, walk, desc, inputs, y)?;
        Ok((Attention::Grouped(Box::new(found)), ends))
    }
}

fn latent(
    module: &Module,
    walk: &mut Walk<'_>,
    desc: &AttentionDesc,
    inputs: &[Operand],
    y: ValueId,
) -> MatchResult<(Attention, AttentionBoundary)> {
    let wrong = |what: &str| format!("{what} of the latent attention differ from those of DeepSeek-V2");
    let heads = desc.heads;
    if desc.window.is_some() || desc.sinks || desc.kv_heads != 1 {
        return Err("a latent attention with a window, sinks or several heads of keys".into());
    }
    // Queries: a part without position through the keys' up projection, and a rotated one.
    let joined = walk.node(operand(inputs, 0)?)?;
    if joined.op != (Op::Concat { heads }) || joined.inputs.len() != 2 {
        return Err(wrong("queries"));
    }
    let up = walk.node(input(joined, 0)?)?;
    if !projects_heads(&up.op, heads) {
        return Err(wrong("queries"));
    }
    let k_up = weight(up, 1)?;
    let plain = walk.node(input(up, 0)?)?;
    let (rotation, angles, rotary) = rope(walk, input(joined, 1)?)?;
    let rotary = walk.node(rotary)?;
    let (Op::Slice { start: 0, len: nope, .. }, Op::Slice { start, len: rotated, .. }) =
        (&plain.op, &rotary.op)
    else {
        return Err(wrong("queries"));
    };
    let [cut, also] = [plain, rotary].map(|n| input(n, 0));
    if start != nope || cut != also || rotation.offset != 0 || rotation.channels != *rotated {
        return Err(wrong("queries"));
    }
    let (q, from) = walk.linear(input(plain, 0)?)?;
    let (q_down, x) = if matches!(walk.peek(from).map(|n| &n.op), Some(Op::RmsNorm { .. }))
        && walk.peek(from).and_then(|n| walk.peek(n.inputs[0])).is_some_and(|n| projects(&n.op))
    {
        let (norm, from) = walk.rms(from)?;
        let (down, x) = walk.linear(from)?;
        (Some((down, norm)), x)
    } else {
        (None, from)
    };

    // Keys: the latent's norm and the rotated key, side by side in the cache.
    let (context, k) = cache(module, walk, operand(inputs, 1)?)?;
    let joined = walk.node(k)?;
    if joined.op != (Op::Concat { heads: 1 }) || joined.inputs.len() != 2 {
        return Err(wrong("keys"));
    }
    let (kv_norm, plain) = walk.rms(input(joined, 0)?)?;
    let plain = walk.node(plain)?;
    let (k_rotation, k_angles, rotary) = rope(walk, input(joined, 1)?)?;
    let rotary = walk.node(rotary)?;
    let [first, second] = [plain, rotary].map(|n| input(n, 0));
    let cut = |start, len| Op::Slice { heads: 1, start, len };
    let fits = plain.op == cut(0, desc.v_dim)
        && rotary.op == cut(desc.v_dim, *rotated)
        && desc.qk_dim == desc.v_dim + rotated
        && first == second
        && (k_rotation, k_angles, kv_norm.groups) == (rotation, angles, 1);
    if !fits {
        return Err(wrong("keys"));
    }
    let (kv_down, k_x) = walk.linear(input(plain, 0)?)?;
    if k_x != x {
        return Err("queries and keys are projected from different rows".into());
    }

    let up = walk.readers(y).into_iter().next().filter(|n| projects_heads(&n.op, heads));
    let up = up.ok_or_else(|| wrong("values"))?;
    let v_up = weight(up, 1)?;
    let values = *up.outputs.first().ok_or_else(|| wrong("values"))?;
    walk.node(Operand::Value(values))?;
    let (o, y) = walk.reader(values)?;
    let found = Latent {
        desc: desc.clone(),
        context,
        q_down,
        q,
        nope: *nope,
        rotated: *rotated,
        style: rotation.style,
        k_up,
        kv_down,
        kv_norm,
        v_up,
        o,
    };
    Ok((Attention::Latent(Box::new(found)), AttentionBoundary { x: value(x)?, angles: Some(angles), y }))
}

impl Attention {
    fn desc(&self) -> &AttentionDesc {
        match self {
            Self::Grouped(a) => &a.desc,
            Self::Latent(a) => &a.desc,
        }
    }

    /// Tokens that a row sees, its own included, where not all.
    pub(super) fn window(&self) -> Option<usize> {
        self.desc().window
    }

    /// Positions that the Graph's cache holds.
    pub(super) fn context(&self) -> usize {
        match self {
            Self::Grouped(a) => a.context,
            Self::Latent(a) => a.context,
        }
    }

    /// Matrices, for what their formats round.
    pub(super) fn matrices(&self) -> Vec<WeightId> {
        match self {
            Self::Grouped(a) => a.matrices(),
            Self::Latent(a) => {
                let down = a.q_down.iter().map(|(down, _)| down.weight);
                down.chain([a.q.weight, a.k_up, a.kv_down.weight, a.v_up, a.o.weight]).collect()
            }
        }
    }
}

/// Request to the emitter for it: a name, positions of the state, chunks.
pub(super) struct AttentionRequest<'a> {
    pub(super) name: &'a str,
    pub(super) context: usize,
    pub(super) chunks: &'a [emit::Chunk],
}

fn projection(raw: &mut Source<'_>, linear: Linear) -> Result<emit::Projection> {
    let bias = linear.bias.map(|id| raw(&[id])).transpose()?;
    Ok(emit::Projection { weight: raw(&[linear.weight])?, bias })
}

fn norm(raw: &mut Source<'_>, rms: Rms) -> Result<emit::Norm> {
    let weight = rms.weight.map(|id| raw(&[id])).transpose()?;
    Ok(emit::Norm { weight, bias: None, eps: rms.eps, center: false })
}

impl AttentionRequest<'_> {
    /// Describes grouped attention.
    pub(super) fn grouped(
        &self,
        module: &Module,
        a: &Grouped,
        raw: &mut Source<'_>,
    ) -> Result<emit::Attention> {
        let optional = |raw: &mut Source<'_>, n: Option<Rms>| n.map(|n| norm(raw, n)).transpose();
        Ok(emit::Attention {
            name: self.name.to_owned(),
            hidden: module.weight(a.q.linear.weight).cols(),
            heads: a.desc.heads,
            kv_heads: a.desc.kv_heads,
            qk_dim: a.desc.qk_dim,
            v_dim: a.desc.v_dim,
            scale: a.desc.scale,
            context: self.context,
            q: projection(raw, a.q.linear)?,
            k: projection(raw, a.k.linear)?,
            v: projection(raw, a.v.linear)?,
            o: projection(raw, a.o)?,
            clip_qkv: a.q.clip,
            q_norm: optional(raw, a.q.norm)?,
            k_norm: optional(raw, a.k.norm)?,
            rope: a.q.rope.map(|r| emit::Rope { offset: r.offset, channels: r.channels, style: r.style }),
            sinks: a.sinks.map(|id| raw(&[id])).transpose()?,
            norm: None,
            chunks: self.chunks.to_vec(),
        })
    }

    /// Describes latent attention.
    pub(super) fn latent(
        &self,
        module: &Module,
        a: &Latent,
        raw: &mut Source<'_>,
    ) -> Result<emit::LatentAttention> {
        let q_down = match a.q_down {
            Some((down, rms)) => Some((projection(raw, down)?, norm(raw, rms)?)),
            None => None,
        };
        Ok(emit::LatentAttention {
            name: self.name.to_owned(),
            hidden: module.weight(a.kv_down.weight).cols(),
            heads: a.desc.heads,
            nope: a.nope,
            rotated: a.rotated,
            latent: a.desc.v_dim,
            v_dim: module.weight(a.v_up).rows(),
            scale: a.desc.scale,
            context: self.context,
            q_down,
            q: projection(raw, a.q)?,
            k_up: raw(&[a.k_up])?,
            kv_down: projection(raw, a.kv_down)?,
            kv_norm: norm(raw, a.kv_norm)?,
            v_up: raw(&[a.v_up])?,
            o: projection(raw, a.o)?,
            style: a.style,
            chunks: self.chunks.to_vec(),
        })
    }
}
