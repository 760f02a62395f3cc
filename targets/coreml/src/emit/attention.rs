//! Attention over a chunk of a prompt, with the KV cache as the graph's state.
//!
//! Keys and values are in one state, `kv[2, kv_heads, context, width]`: keys, then values; the module `cache`
//! defines how rows are written to it.
//!
//! **Inputs.** `x[T, H, 1, 1]`; `angles[T, R, 1, 1]` if there is a rotation; `mask[1, 1, T, W]`, 0 at the
//! positions that a row attends to and [`MASKED`](super::MASKED) elsewhere; `write`. `W` is the context, or
//! `start + T`; the mask also defines a sliding window. The norm before it and the residual stay outside
//! (NPUMoE, §3), unless [`Attention::norm`] is given.
#![expect(clippy::cast_possible_truncation, reason = "bytes of one element")]

use super::cache::{self, Chunk, fill};
use super::layout::Layout;
use super::write::{Attend, Writer};
use super::{EmitError, Limits, Norm, Raw, Result, Rope, checked, legal, within};
use crate::legalise::language::{Attr, Form};
use crate::legalise::{Legal, Term};
use crate::program::{ELEMENT, Function, FunctionBuilder, OpKind, Program, ValueId, WeightRef};
use egg::Id;

/// A linear layer.
#[derive(Clone, Debug)]
pub struct Projection {
    /// `[out, in]`.
    pub weight: Raw,
    /// `[out]`.
    pub bias: Option<Raw>,
}

impl Projection {
    pub(super) fn check(&self, graph: &str, name: &str, out: usize, channels: usize) -> Result<()> {
        self.weight.expect(graph, name, &[out, channels])?;
        self.bias.as_ref().map_or(Ok(()), |bias| bias.expect(graph, &format!("{name}_bias"), &[out]))
    }

    pub(super) fn apply(&self, b: &mut FunctionBuilder, x: ValueId, name: &str) -> Result<ValueId> {
        let bias = self.bias.as_ref().map(|raw| raw.weight(&format!("{name}_bias"), raw.shape.clone()));
        Ok(b.conv(x, &self.weight.conv(name), bias.as_ref())?)
    }
}

/// Attention of one layer.
#[derive(Clone, Debug)]
pub struct Attention {
    /// Name of the graph.
    pub name: String,
    /// Channels `H` of a token.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key-value heads; divides `heads`.
    pub kv_heads: usize,
    /// Channels of a query and of a key.
    pub qk_dim: usize,
    /// Channels of a value.
    pub v_dim: usize,
    /// Factor on the scores.
    pub scale: f32,
    /// Positions that the cache holds.
    pub context: usize,
    /// `[heads·qk_dim, H]`.
    pub q: Projection,
    /// `[kv_heads·qk_dim, H]`.
    pub k: Projection,
    /// `[kv_heads·v_dim, H]`.
    pub v: Projection,
    /// `[H, heads·v_dim]`.
    pub o: Projection,
    /// Bound on the magnitude of queries, keys and values, after their norms.
    pub clip_qkv: Option<f32>,
    /// Norm of queries: per head if its weight has `qk_dim` channels, else over all.
    pub q_norm: Option<Norm>,
    /// Norm of keys.
    pub k_norm: Option<Norm>,
    /// Rotation.
    pub rope: Option<Rope>,
    /// Logit per head that takes part in the softmax and is dropped, `[heads]` (gpt-oss).
    pub sinks: Option<Raw>,
    /// Norm of the input, if it is part of the graph.
    pub norm: Option<Norm>,
    /// Chunks; each becomes a function.
    pub chunks: Vec<Chunk>,
}

impl Attention {
    /// Writes the program: a function `chunk{T}` or `chunk{T}_at{P}` for each chunk.
    ///
    /// # Errors
    /// Weights of other shapes, chunks that the unit does not take or that end past the context, or more
    /// bytes than a graph may have.
    pub fn emit(&self, limits: &Limits) -> Result<Program> {
        self.check(limits)?;
        let mut weights = Vec::new();
        let legal = self.legal()?;
        let functions = self.chunks.iter().map(|chunk| self.function(*chunk, &legal, limits, &mut weights));
        let functions = functions.collect::<Result<_>>()?;
        let description = format!(
            "Attention of `{}`: {} heads over {} of keys and values, cached as state `kv` of {} positions; {}",
            self.name,
            self.heads,
            self.kv_heads,
            self.context,
            Chunk::written(&self.chunks)
        );
        let program = Program { name: self.name.clone(), description, weights, functions };
        let bytes = program.counted_bytes(limits.counted);
        within(&self.name, limits, 1, "layers", |layers| if layers == 0 { 0 } else { bytes })?;
        checked(program, limits)
    }

    /// Width of a row of the state: elements of a key or value, with what fills it up.
    pub fn state_width(&self, limits: &Limits) -> usize {
        self.qk_dim.max(self.v_dim).next_multiple_of(limits.rules.state_multiple)
    }

    fn projections(&self) -> [(&'static str, &Projection, usize, usize); 4] {
        [
            ("q", &self.q, self.heads * self.qk_dim, self.hidden),
            ("k", &self.k, self.kv_heads * self.qk_dim, self.hidden),
            ("v", &self.v, self.kv_heads * self.v_dim, self.hidden),
            ("o", &self.o, self.hidden, self.heads * self.v_dim),
        ]
    }

    fn check(&self, limits: &Limits) -> Result<()> {
        let fault = |what| EmitError::Description { graph: self.name.clone(), what };
        if self.kv_heads == 0 || !self.heads.is_multiple_of(self.kv_heads) {
            return Err(fault(format!("{} query heads share {} of keys", self.heads, self.kv_heads)));
        }
        for (name, projection, out, channels) in self.projections() {
            projection.check(&self.name, name, out, channels)?;
        }
        for (name, norm, heads) in
            [("q_norm", &self.q_norm, self.heads), ("k_norm", &self.k_norm, self.kv_heads)]
        {
            if let Some(norm) = norm {
                norm.check(&self.name, name, self.qk_dim * self.groups(norm, heads).1)?;
            }
        }
        if let Some(norm) = &self.norm {
            norm.check(&self.name, "norm", self.hidden)?;
        }
        if let Some(sinks) = &self.sinks {
            sinks.expect(&self.name, "sinks", &[self.heads])?;
        }
        if let Some(rope) = self.rope
            && (!rope.channels.is_multiple_of(2) || rope.offset.saturating_add(rope.channels) > self.qk_dim)
        {
            return Err(fault(format!("{rope:?} in heads of {} channels", self.qk_dim)));
        }
        Chunk::check(&self.name, &self.chunks, self.context, limits)
    }

    /// Groups of a norm of `heads` heads, and heads in each.
    fn groups(&self, norm: &Norm, heads: usize) -> (usize, usize) {
        let channels = norm.weight.as_ref().and_then(|w| w.shape.first()).copied();
        if channels.is_none_or(|c| c == self.qk_dim) { (heads, 1) } else { (1, heads) }
    }

    fn function(
        &self,
        chunk: Chunk,
        legal: &Legal,
        limits: &Limits,
        weights: &mut Vec<WeightRef>,
    ) -> Result<Function> {
        let rows = chunk.rows;
        let mut builder = FunctionBuilder::new(chunk.function(), weights);
        let b = &mut builder;
        let window = chunk.window(self.context);
        let x = b.input("x", &[rows, self.hidden, 1, 1]);
        let angles = self.rope.map(|rope| rope.input(b, rows)).transpose()?;
        let mask = b.input("mask", &[1, 1, rows, window]);

        let attend = Attended { of: self, chunk, limits, mask };
        let writer = Writer::new(legal, b, (Layout::Columns, limits), (rows, x)).attending(&attend, angles);
        let outputs: Vec<_> = writer.results()?.into_iter().map(|y| ("y", y)).collect();
        Ok(builder.finish(&outputs))
    }

    /// Its computation on the unit.
    ///
    /// # Errors
    /// No form of it is one that the unit runs.
    pub fn legal(&self) -> Result<Legal> {
        let mut t = Term::new();
        let mut x = t.input(self.hidden);
        let angles = self.rope.map(|rope| t.input(rope.channels));
        if let Some(norm) = &self.norm {
            let attr = t.attr(Attr::Norm("norm", norm.clone(), None));
            x = t.add(Form::Norm([attr, x]));
        }
        let q = (("q", &self.q), self.q_norm.as_ref().map(|norm| ("q_norm", norm)), self.heads);
        let k = (("k", &self.k), self.k_norm.as_ref().map(|norm| ("k_norm", norm)), self.kv_heads);
        let [q, k] =
            [q, k].map(|(projection, norm, heads)| self.rows(&mut t, (x, angles), projection, norm, heads));
        let v = projected(&mut t, x, ("v", &self.v), self.kv_heads);
        let v = self.clip(&mut t, v);
        let channels = t.attr(Attr::Channels(self.heads * self.v_dim));
        let y = t.add(Form::Attention([channels, q, k, v].into()));
        let y = t.linear(y, "o", &self.o.weight, self.o.bias.as_ref());
        t.result(y);
        legal(&self.name, &t, Layout::Columns)
    }

    fn clip(&self, t: &mut Term, x: Id) -> Id {
        let Some(bound) = self.clip_qkv else { return x };
        let bound = t.attr(Attr::Bound(bound));
        t.add(Form::Clamp([bound, x]))
    }

    /// Queries or keys with norm and rotation.
    fn rows(
        &self,
        t: &mut Term,
        (x, angles): (Id, Option<Id>),
        projection: (&str, &Projection),
        norm: Option<(&'static str, &Norm)>,
        heads: usize,
    ) -> Id {
        let mut y = projected(t, x, projection, heads);
        if let Some((name, norm)) = norm {
            let groups = self.groups(norm, heads).0;
            let attr = t.attr(Attr::Norm(name, norm.clone(), Some(groups)));
            y = t.add(Form::Norm([attr, y]));
        }
        y = self.clip(t, y);
        if let (Some(rope), Some(angles)) = (self.rope, angles) {
            let attr = t.attr(Attr::Rope(rope, heads));
            y = t.add(Form::Rope([attr, y, angles]));
        }
        y
    }
}

/// A projection whose channels are those of heads.
fn projected(t: &mut Term, x: Id, (name, of): (&str, &Projection), heads: usize) -> Id {
    let y = t.linear(x, name, &of.weight, of.bias.as_ref());
    let heads = t.attr(Attr::Heads(heads));
    t.add(Form::ByHead([heads, y]))
}

/// Attention of a chunk, ahead of its output projection.
struct Attended<'a> {
    of: &'a Attention,
    chunk: Chunk,
    limits: &'a Limits,
    mask: ValueId,
}

impl Attend for Attended<'_> {
    fn attend(&self, w: &mut Writer<'_, '_, '_>, operands: &[Id]) -> Result<ValueId> {
        let (a, rows) = (self.of, self.chunk.rows);
        let (window, width) = (self.chunk.window(a.context), a.state_width(self.limits));
        let &[q, k, v] = operands else { return Err(EmitError::Form("attention".into())) };
        let (q, k, v) = (w.heads(q)?, w.heads(k)?, w.heads(v)?);
        let b = &mut *w.b;
        // Scaled before the product, which is thus as small as it can be.
        let q = b.scalar(OpKind::Mul, q, a.scale)?;
        let (q, k, v) = (fill(b, q, width)?, fill(b, k, width)?, fill(b, v, width)?);

        let kv = b.concat(&[k, v], 0)?;
        let kv = cache::store(b, kv, self.chunk, a.context)?;
        let (k, v) = (b.slice(kv, 0, 0, 1)?, b.slice(kv, 0, 1, 1)?);

        // Query heads that share keys are rows of one product.
        let shared = a.heads / a.kv_heads * rows;
        let q = b.reshape(q, &[1, a.kv_heads, shared, width])?;
        let scores = b.matmul(q, k, true)?;
        let scores = b.reshape(scores, &[1, a.heads, rows, window])?;
        let scores = b.binary(OpKind::Add, scores, self.mask)?;
        let shares = self.softmax(b, scores, [rows, window])?;
        let shares = b.reshape(shares, &[1, a.kv_heads, shared, window])?;
        let y = b.matmul(shares, v, false)?;

        let y = b.reshape(y, &[1, a.heads, rows, width])?;
        Ok(b.slice(y, 3, 0, a.v_dim)?)
    }
}

impl Attended<'_> {
    /// Over the last axis of `scores[1, heads, T, W]`, sinks taking their share.
    fn softmax(
        &self,
        b: &mut FunctionBuilder,
        scores: ValueId,
        [rows, window]: [usize; 2],
    ) -> Result<ValueId> {
        let Some(sinks) = &self.of.sinks else { return Ok(b.softmax(scores, 3)?) };
        // As many equal columns as the minimum width of the last axis, each with its part of the sink's
        // share: a single column would be a last axis of 1.
        let columns = self.limits.rules.last_axis_bytes / ELEMENT as usize;
        let sinks = b.weight(&sinks.weight("sinks", [1, self.of.heads, 1, 1]))?;
        let sinks = b.tile(sinks, &[1, 1, rows, columns])?;
        let sinks = if columns > 1 { b.scalar(OpKind::Sub, sinks, (columns as f32).ln())? } else { sinks };
        let all = b.concat(&[scores, sinks], 3)?;
        let shares = b.softmax(all, 3)?;
        Ok(b.slice(shares, 3, 0, window)?)
    }
}
