//! Latent attention (DeepSeek-V2, arXiv 2405.04434, §2.1) over a chunk of a prompt, absorbed.
//!
//! The state `kv[1, 1, context, width]` holds the latent and the rotated key of every position, which all heads share.
//! Queries are brought to the latent's channels head by head, and so is what they gather back to values: `k_up` and
//! `v_up` have a matrix per head, each a 1×1 convolution of its own. Up projections thus meet `T` rows and not the whole
//! context, and the cache is as small as on the processor.
//!
//! The product of queries and keys repeats the one head of keys: as rows of one product the queries of 128 heads would
//! be more than the unit's largest extent.
//!
//! **Inputs** are those of [`Attention`](super::Attention).

use super::cache::{self, Chunk, fill};
use super::rope::Angles;
use super::{EmitError, Limits, Norm, Projection, Raw, Result, Rope, checked, within};
use crate::program::{Function, FunctionBuilder, OpKind, Program, ValueId, WeightRef};
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
    /// `[rank, H]` and the norm behind it, where queries have a latent of their own.
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
    /// Weights of other shapes, chunks that the unit does not take or that end past the context, or more bytes than a
    /// graph may have.
    pub fn emit(&self, limits: &Limits) -> Result<Program> {
        self.check(limits)?;
        let mut weights = Vec::new();
        let functions = self.chunks.iter().map(|chunk| self.function(*chunk, limits, &mut weights));
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

    fn function(&self, chunk: Chunk, limits: &Limits, weights: &mut Vec<WeightRef>) -> Result<Function> {
        let (rows, window) = (chunk.rows, chunk.window(self.context));
        let (width, rope) = (self.state_width(limits), self.rope());
        let mut builder = FunctionBuilder::new(chunk.function(), weights);
        let b = &mut builder;
        let x = b.input("x", &[rows, self.hidden, 1, 1]);
        let angles = rope.input(b, rows)?;
        let mask = b.input("mask", &[1, 1, rows, window]);

        let x = b.transpose(x, &[2, 1, 3, 0])?;
        let q = self.queries(b, x, &angles, limits)?;
        // Scaled before the product, which is thus as small as it can be.
        let q = b.scalar(OpKind::Mul, q, self.scale)?;
        let k = self.keys(b, x, &angles)?;
        let (q, k) = (fill(b, q, width)?, fill(b, k, width)?);
        let kv = cache::store(b, k, chunk, self.context)?;

        let scores = b.matmul(q, kv, true)?;
        let scores = b.binary(OpKind::Add, scores, mask)?;
        let shares = b.softmax(scores, 3)?;
        let latent = b.slice(kv, 3, 0, self.latent)?;
        let y = b.matmul(shares, latent, false)?;

        let y = b.transpose(y, &[0, 1, 3, 2])?;
        let values = (0..self.heads).map(|h| {
            let y = b.slice(y, 1, h, 1)?;
            let y = b.reshape(y, &[1, self.latent, 1, rows])?;
            Ok(b.conv(y, &self.v_up.at(h).conv(&format!("v_up{h}")), None)?)
        });
        let values = values.collect::<Result<Vec<_>>>()?;
        let y = b.concat(&values, 1)?;
        let y = self.o.apply(b, y, "o")?;
        let y = b.transpose(y, &[3, 1, 0, 2])?;
        Ok(builder.finish(&[("y", y)]))
    }

    fn rope(&self) -> Rope {
        Rope { offset: 0, channels: self.rotated, style: self.style }
    }

    /// Queries in the channels of the state: `[1, heads, T, latent + rotated]`.
    fn queries(
        &self,
        b: &mut FunctionBuilder,
        mut x: ValueId,
        angles: &Angles,
        limits: &Limits,
    ) -> Result<ValueId> {
        let rows = b.shape(x).last().copied().unwrap_or(0);
        if let Some((down, norm)) = &self.q_down {
            x = down.apply(b, x, "q_down")?;
            x = norm.whole(b, x, "q_norm")?;
        }
        // As many heads at once as the unit's largest extent lets through.
        let dim = self.query();
        let most = (limits.rules.extent / dim).clamp(1, self.heads);
        let mut parts = Vec::new();
        for first in (0..self.heads).step_by(most) {
            let heads = most.min(self.heads - first);
            let cut = |raw: &Raw| raw.rows(first * dim, heads * dim);
            let part = Projection { weight: cut(&self.q.weight), bias: self.q.bias.as_ref().map(cut) };
            let name = if most == self.heads { "q".to_owned() } else { format!("q{first}") };
            let q = part.apply(b, x, &name)?;
            let q = b.reshape(q, &[1, heads, dim, rows])?;
            let turned = b.slice(q, 2, self.nope, self.rotated)?;
            let turned = self.rope().apply(b, turned, angles)?;
            let plain = (0..heads).map(|h| {
                let q = b.slice(q, 1, h, 1)?;
                let q = b.slice(q, 2, 0, self.nope)?;
                let q = b.reshape(q, &[1, self.nope, 1, rows])?;
                let head = first + h;
                let q = b.conv(q, &self.k_up.at(head).conv(&format!("k_up{head}")), None)?;
                Ok(b.reshape(q, &[1, 1, self.latent, rows])?)
            });
            let plain = plain.collect::<Result<Vec<_>>>()?;
            let plain = b.concat(&plain, 1)?;
            parts.push(b.concat(&[plain, turned], 2)?);
        }
        let q = b.concat(&parts, 1)?;
        Ok(b.transpose(q, &[0, 1, 3, 2])?)
    }

    /// What the state holds of the rows: `[1, 1, T, latent + rotated]`.
    fn keys(&self, b: &mut FunctionBuilder, x: ValueId, angles: &Angles) -> Result<ValueId> {
        let rows = b.shape(x).last().copied().unwrap_or(0);
        let kv = self.kv_down.apply(b, x, "kv_down")?;
        let latent = b.slice(kv, 1, 0, self.latent)?;
        let latent = self.kv_norm.whole(b, latent, "kv_norm")?;
        let latent = b.reshape(latent, &[1, 1, self.latent, rows])?;
        let turned = b.slice(kv, 1, self.latent, self.rotated)?;
        let turned = b.reshape(turned, &[1, 1, self.rotated, rows])?;
        let turned = self.rope().apply(b, turned, angles)?;
        let k = b.concat(&[latent, turned], 2)?;
        Ok(b.transpose(k, &[0, 1, 3, 2])?)
    }
}
