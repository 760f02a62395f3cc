//! Latent attention (DeepSeek-V2, arXiv 2405.04434, §2.1) over a chunk of a prompt, absorbed.
//!
//! The state `kv[1, 1, context, width]` holds the latent and the rotated key of every position, which all
//! heads share. Queries are projected to the latent's channels head by head, and their results back to
//! values. `k_up` and `v_up` have a matrix per head, each a 1×1 convolution of its own. So up projections
//! process `T` rows and not the whole context, and the cache is as small as on the CPU.
//!
//! The product of queries and keys repeats the single head of keys: as rows of one product, the queries of
//! 128 heads would exceed the unit's largest extent.
//!
//! **Inputs** are those of [`Attention`](super::Attention).

use super::cache::{self, Chunk, fill};
use super::layout::Layout;
use super::write::{Attend, Writer};
use super::{EmitError, Limits, Norm, Projection, Raw, Result, Rope, checked, legal, within};
use crate::legalise::language::{Attr, Form};
use crate::legalise::{Legal, Term};
use crate::program::{Function, FunctionBuilder, OpKind, Program, ValueId, WeightRef};
use egg::Id;
use moec_ir::RopeStyle;

/// Latent attention of one layer.
#[derive(Clone, Debug)]
pub struct LatentAttention {
    /// Name of the graph.
    pub name: String,
    /// Channels `H` of a token.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Channels of a query that are not rotated.
    pub nope: usize,
    /// Channels of a query, and of the key, that are rotated.
    pub rotated: usize,
    /// Channels of the latent.
    pub latent: usize,
    /// Channels of a value.
    pub v_dim: usize,
    /// Factor on the scores.
    pub scale: f32,
    /// Positions that the cache holds.
    pub context: usize,
    /// `[rank, H]` and the norm after it, where queries have a latent of their own.
    pub q_down: Option<(Projection, Norm)>,
    /// `[heads·(nope + rotated), rank or H]`.
    pub q: Projection,
    /// `[heads, latent, nope]`.
    pub k_up: Raw,
    /// `[latent + rotated, H]`.
    pub kv_down: Projection,
    /// Norm of the latent.
    pub kv_norm: Norm,
    /// `[heads, v_dim, latent]`.
    pub v_up: Raw,
    /// `[H, heads·v_dim]`.
    pub o: Projection,
    /// Pairing of the rotation.
    pub style: RopeStyle,
    /// Chunks; each becomes a function.
    pub chunks: Vec<Chunk>,
}

impl LatentAttention {
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
            "Latent attention of `{}`: {} heads over one latent, cached as state `kv` of {} positions; {}",
            self.name,
            self.heads,
            self.context,
            Chunk::written(&self.chunks)
        );
        let program = Program { name: self.name.clone(), description, weights, functions };
        let bytes = program.counted_bytes(limits.counted);
        within(&self.name, limits, 1, "layers", |layers| if layers == 0 { 0 } else { bytes })?;
        checked(program, limits)
    }

    /// Width of a row of the state: latent and rotated key, with what fills them up.
    pub fn state_width(&self, limits: &Limits) -> usize {
        (self.latent + self.rotated).next_multiple_of(limits.rules.state_multiple)
    }

    fn query(&self) -> usize {
        self.nope + self.rotated
    }

    fn check(&self, limits: &Limits) -> Result<()> {
        let name = &self.name;
        let rank = match &self.q_down {
            None => self.hidden,
            Some((down, norm)) => {
                let rank = down.weight.shape.first().copied().unwrap_or(0);
                down.check(name, "q_down", rank, self.hidden)?;
                norm.check(name, "q_norm", rank)?;
                rank
            }
        };
        self.q.check(name, "q", self.heads * self.query(), rank)?;
        self.k_up.expect(name, "k_up", &[self.heads, self.latent, self.nope])?;
        self.kv_down.check(name, "kv_down", self.latent + self.rotated, self.hidden)?;
        self.kv_norm.check(name, "kv_norm", self.latent)?;
        self.v_up.expect(name, "v_up", &[self.heads, self.v_dim, self.latent])?;
        self.o.check(name, "o", self.hidden, self.heads * self.v_dim)?;
        if self.heads == 0 || self.rotated == 0 || !self.rotated.is_multiple_of(2) {
            return Err(EmitError::Description {
                graph: name.clone(),
                what: format!("{} heads with {} rotated channels", self.heads, self.rotated),
            });
        }
        Chunk::check(name, &self.chunks, self.context, limits)
    }

    fn function(
        &self,
        chunk: Chunk,
        legal: &Legal,
        limits: &Limits,
        weights: &mut Vec<WeightRef>,
    ) -> Result<Function> {
        let (rows, window) = (chunk.rows, chunk.window(self.context));
        let rope = self.rope();
        let mut builder = FunctionBuilder::new(chunk.function(), weights);
        let b = &mut builder;
        let x = b.input("x", &[rows, self.hidden, 1, 1]);
        let angles = rope.input(b, rows)?;
        let mask = b.input("mask", &[1, 1, rows, window]);

        let attend = Attended { of: self, chunk, limits, mask };
        let writer = Writer::new(legal, b, (Layout::Columns, limits), (rows, x));
        let results = writer.attending(&attend, Some(angles)).results()?;
        let outputs: Vec<_> = results.into_iter().map(|y| ("y", y)).collect();
        Ok(builder.finish(&outputs))
    }

    fn rope(&self) -> Rope {
        Rope { offset: 0, channels: self.rotated, style: self.style }
    }

    /// Its computation on the unit.
    ///
    /// # Errors
    /// No form of it is one that the unit runs.
    pub fn legal(&self) -> Result<Legal> {
        let mut t = Term::new();
        let (x, angles) = (t.input(self.hidden), t.input(self.rotated));
        let mut rank = x;
        if let Some((down, norm)) = &self.q_down {
            rank = t.linear(x, "q_down", &down.weight, down.bias.as_ref());
            let attr = t.attr(Attr::Norm("q_norm", norm.clone(), None));
            rank = t.add(Form::Norm([attr, rank]));
        }
        let slice = |t: &mut Term, x, heads, start, len| {
            let attr = t.attr(Attr::Slice { heads, start, len });
            t.add(Form::Slice([attr, x]))
        };
        let rotate = |t: &mut Term, x, heads| {
            let attr = t.attr(Attr::Rope(self.rope(), heads));
            t.add(Form::Rope([attr, x, angles]))
        };
        // Queries in the channels of the state.
        let q = t.linear(rank, "q", &self.q.weight, self.q.bias.as_ref());
        let heads = t.attr(Attr::Heads(self.heads));
        let q = t.add(Form::ByHead([heads, q]));
        let plain = slice(&mut t, q, self.heads, 0, self.nope);
        let plain = t.head_linear(self.heads, plain, "k_up", &self.k_up);
        let rotary = slice(&mut t, q, self.heads, self.nope, self.rotated);
        let rotary = rotate(&mut t, rotary, self.heads);
        let q = t.add(Form::Concat([heads, plain, rotary]));
        // The rows' entries of the state.
        let kv = t.linear(x, "kv_down", &self.kv_down.weight, self.kv_down.bias.as_ref());
        let latent = slice(&mut t, kv, 1, 0, self.latent);
        let norm = t.attr(Attr::Norm("kv_norm", self.kv_norm.clone(), None));
        let latent = t.add(Form::Norm([norm, latent]));
        let rotary = slice(&mut t, kv, 1, self.latent, self.rotated);
        let rotary = rotate(&mut t, rotary, 1);
        let one = t.attr(Attr::Heads(1));
        let k = t.add(Form::Concat([one, latent, rotary]));

        let channels = t.attr(Attr::Channels(self.heads * self.latent));
        let y = t.add(Form::Attention([channels, q, k].into()));
        let y = t.head_linear(self.heads, y, "v_up", &self.v_up);
        let y = t.linear(y, "o", &self.o.weight, self.o.bias.as_ref());
        t.result(y);
        legal(&self.name, &t, Layout::Columns)
    }
}

/// Attention of a chunk in the latent's channels.
struct Attended<'a> {
    of: &'a LatentAttention,
    chunk: Chunk,
    limits: &'a Limits,
    mask: ValueId,
}

impl Attend for Attended<'_> {
    fn attend(&self, w: &mut Writer<'_, '_, '_>, operands: &[Id]) -> Result<ValueId> {
        let (a, width) = (self.of, self.of.state_width(self.limits));
        let &[q, k] = operands else { return Err(EmitError::Form("attention".into())) };
        let q = w.heads(q)?;
        // Scaled before the product, which is thus as small as it can be.
        let q = w.b.scalar(OpKind::Mul, q, a.scale)?;
        let k = w.heads(k)?;
        let b = &mut *w.b;
        let (q, k) = (fill(b, q, width)?, fill(b, k, width)?);
        let kv = cache::store(b, k, self.chunk, a.context)?;

        let scores = b.matmul(q, kv, true)?;
        let scores = b.binary(OpKind::Add, scores, self.mask)?;
        let shares = b.softmax(scores, 3)?;
        let latent = b.slice(kv, 3, 0, a.latent)?;
        Ok(b.matmul(shares, latent, false)?)
    }
}
