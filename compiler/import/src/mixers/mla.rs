//! Multi-head latent attention of DeepSeek (arXiv 2405.04434, section 2.1), in its absorbed form.
#![expect(clippy::cast_possible_truncation, reason = "models compute with their factors in f32")]

use super::{Gating, Mix, OutputGate, StateSize, Temperature};
use crate::common::Base;
use crate::lower::{LowerResult, Lowering, Rows};
use crate::rope;
use crate::spec::{Norm, Projection, Rope};
use crate::tensors::Dim;
use moec_base::error::{Error, Result};
use moec_ir::op::AttentionDesc;
use moec_ir::{Axis, Graph, Op, Part, RopeStyle, ValueId, WeightClass, WeightExpr};

/// Epsilon of the norms of latents, which the config does not set.
const LATENT_EPS: f32 = 1e-6;

/// Latent attention in its absorbed form. All query heads share one cached head of `latent + rope` channels.
/// Keys are all of its channels, values its first `latent` channels.
#[derive(Clone, Debug, PartialEq)]
pub struct Mla {
    /// Query heads.
    pub heads: usize,
    /// Channels of a query that are not rotated.
    pub nope: usize,
    /// Channels of a query that are rotated.
    pub rotated: usize,
    /// Channels of a head's output.
    pub v_dim: usize,
    /// Channels of the latent.
    pub latent: usize,
    /// Low-rank part of the query: projection and norm.
    pub q_down: Option<(Projection, Norm)>,
    /// Query, `[heads·(nope + rotated), hidden or rank]`.
    pub q: Projection,
    /// Latent and rotated key, `[latent + rotated, hidden]`.
    pub kv_down: Projection,
    /// Norm of the latent.
    pub kv_norm: Norm,
    /// `[heads, latent, nope]`: maps the query's unrotated channels to the latent.
    pub k_up: WeightExpr,
    /// `[heads, v_dim, latent]`: maps the attended latent to the head's output.
    pub v_up: WeightExpr,
    /// Output, `[hidden, heads·v_dim]`.
    pub o: Projection,
    /// Rotation; `None` in layers without position encodings.
    pub rope: Option<Rope>,
    /// Gate of the result, before the output.
    pub gate: Option<OutputGate>,
    /// Pairing of channels.
    pub style: RopeStyle,
    /// Factor on the scores.
    pub scale: f32,
    /// Position-dependent factor on queries.
    pub temperature: Option<Temperature>,
    /// Factors on queries and on the latent.
    pub factors: [f32; 2],
}

impl Mix for Mla {
    fn part(&self) -> Part {
        Part::ATTN
    }

    fn weights(&self) -> Vec<(WeightClass, &WeightExpr)> {
        let down = self.q_down.iter().map(|(down, _)| down);
        let ups = [&self.k_up, &self.v_up].map(|w| (WeightClass::Attention, w));
        let norms = self.q_down.iter().map(|(_, norm)| norm).chain([&self.kv_norm]);
        let gate = self.gate.iter().map(|gate| &gate.of);
        let matrices =
            super::projections([&self.q, &self.kv_down, &self.o].into_iter().chain(down).chain(gate));
        matrices.chain(ups).chain(super::exact(norms.flat_map(Norm::weights))).collect()
    }

    fn state_size(&self) -> StateSize {
        StateSize { per_token: (self.latent + self.rotated) as u64, ..StateSize::default() }
    }

    fn rope(&self) -> Option<&Rope> {
        self.rope.as_ref()
    }

    fn lower<'a>(&'a self, l: &mut Lowering<'a, '_>, at: &str, rows: Rows) -> LowerResult {
        let x = rows.normed;
        const CLASS: WeightClass = WeightClass::Attention;
        let angles = self.rope.as_ref().map(|rope| l.rope(rope)).transpose()?;
        let rank = match &self.q_down {
            None => x,
            Some((down, norm)) => {
                let rank = l.linear(&format!("{at}.attn.q_down"), CLASS, down, x)?;
                l.norm(&format!("{at}.attn.q_norm"), norm, rank)?
            }
        };
        let q = l.linear(&format!("{at}.attn.q"), CLASS, &self.q, rank)?;
        let q = l.scaled(self.factors[0], q)?;
        let slice = |heads, start, len| Op::Slice { heads, start, len };
        let plain = l.g.one(slice(self.heads, 0, self.nope), &[q.into()])?;
        let rotated = l.g.one(slice(self.heads, self.nope, self.rotated), &[q.into()])?;
        let k_up = l.weight(&format!("{at}.attn.k_up"), CLASS, &self.k_up)?;
        let plain = l.g.one(Op::HeadLinear { heads: self.heads }, &[plain.into(), k_up.into()])?;
        let rotate = |l: &mut Lowering<'a, '_>, heads, x: ValueId| match angles {
            Some(angles) => {
                l.g.one(Op::Rope { heads, offset: 0, style: self.style }, &[x.into(), angles.into()])
            }
            None => Ok(x),
        };
        let rotated = rotate(l, self.heads, rotated)?;
        let mut q = l.g.one(Op::Concat { heads: self.heads }, &[plain.into(), rotated.into()])?;
        if let Some(temperature) = self.temperature {
            q = temperature.lower(l, q)?;
        }

        let kv = l.linear(&format!("{at}.attn.kv_down"), CLASS, &self.kv_down, x)?;
        let latent = l.g.one(slice(1, 0, self.latent), &[kv.into()])?;
        let latent = l.norm(&format!("{at}.attn.kv_norm"), &self.kv_norm, latent)?;
        let latent = l.scaled(self.factors[1], latent)?;
        let rotated = l.g.one(slice(1, self.latent, self.rotated), &[kv.into()])?;
        let rotated = rotate(l, 1, rotated)?;
        let k = l.g.one(Op::Concat { heads: 1 }, &[latent.into(), rotated.into()])?;
        let dim = self.latent + self.rotated;
        let keys = l.cache(&format!("{at}.k"), [1, dim], None, k)?;
        let desc = AttentionDesc {
            heads: self.heads,
            kv_heads: 1,
            qk_dim: dim,
            v_dim: self.latent,
            scale: self.scale,
            window: None,
            chunked: false,
            sinks: false,
            v_from_k: true,
        };
        let y = l.g.one(Op::Attention(desc), &[q.into(), keys, Graph::POS.into(), Graph::SLOT.into()])?;
        let v_up = l.weight(&format!("{at}.attn.v_up"), CLASS, &self.v_up)?;
        let y = l.g.one(Op::HeadLinear { heads: self.heads }, &[y.into(), v_up.into()])?;
        let y = match &self.gate {
            Some(gate) => gate.lower(l, at, self.heads, [x, y])?,
            None => y,
        };
        l.linear(&format!("{at}.attn.o"), CLASS, &self.o, y)
    }
}

/// Options of a family's latent attention.
#[derive(Clone, Copy, Debug)]
pub struct MlaOptions {
    /// Prefix of the names of its tensors, below the layer.
    pub at: &'static str,
    /// Name of the output's matrix.
    pub out: &'static str,
    /// Name of a matrix whose sigmoid gates each head.
    pub gate: Option<&'static str>,
    /// Whether query and key are rotated.
    pub rotated: bool,
    /// Pairing of the rotation's channels.
    pub style: RopeStyle,
    /// Whether `partial_rotary_factor` is the rotated share of a whole head.
    pub partial_of_head: bool,
    /// Position-dependent factor on queries.
    pub temperature: Option<Temperature>,
    /// Factors on queries and on the latent.
    pub factors: [f32; 2],
}

impl MlaOptions {
    /// DeepSeek's options, with this pairing of channels.
    pub fn of(style: RopeStyle) -> Self {
        Self {
            at: "self_attn",
            out: "o_proj",
            gate: None,
            rotated: true,
            style,
            partial_of_head: false,
            temperature: None,
            factors: [1.0; 2],
        }
    }
}

impl Base<'_> {
    /// Reads latent attention of a layer.
    ///
    /// `kv_b_proj` has, for each head, `nope` rows that expand the latent to a key and `v` rows that expand
    /// it to a value. Cached latents are not expanded. Instead the transpose of the first rows maps the query
    /// to the latent, and the second rows map the attended latent to the output.
    ///
    /// # Errors
    /// Fails if keys or tensors do not fit.
    pub fn mla(&self, layer: usize, options: MlaOptions) -> Result<Mla> {
        let (c, t, hidden) = (self.config, &self.tensors, &self.hidden);
        let at = format!("{}.{}", self.layer(layer), options.at);
        let heads = Dim::from(self.heads);
        let nope = Dim::from(c.size(&["qk_nope_head_dim"])?);
        let rotated = Dim::from(c.size(&["qk_rope_head_dim"])?);
        let value = Dim::from(c.size(&["v_head_dim"])?);
        let latent = Dim::from(c.size(&["kv_lora_rank"])?);
        let wide = heads.times(&nope.plus(&rotated));
        let bias = c.flag_or("attention_bias", false)?;
        let norm = |name: &str, width: &Dim| -> Result<Norm> {
            t.rms_norm(&format!("{at}.{name}"), width, LATENT_EPS)
        };
        let (q_down, q) = match c.opt_size(&["q_lora_rank"])? {
            None => (None, t.projection(&format!("{at}.q_proj"), &wide, hidden, false)?),
            Some(rank) => {
                let rank = Dim::from(rank);
                let down = t.projection(&format!("{at}.q_a_proj"), &rank, hidden, bias)?;
                let q = t.projection(&format!("{at}.q_b_proj"), &wide, &rank, false)?;
                (Some((down, norm("q_a_layernorm", &rank)?)), q)
            }
        };
        let (k_up, v_up) = self.expansions(&at, [&heads, &nope, &value, &latent])?;
        let scale = ((nope.n + rotated.n) as f64).powf(-0.5);
        let defaults = rope::Defaults::default();
        let (head, partial) = match nope.n + rotated.n {
            head if options.partial_of_head => (head, rotated.n as f64 / head as f64),
            _ => (rotated.n, 1.0),
        };
        let rope = options.rotated.then(|| rope::read(c, head, rope::Defaults { partial, ..defaults }));
        let rope = rope.transpose()?;
        if let Some(channels) = rope.as_ref().map(|r| 2 * r.inv_freq.len()).filter(|&n| n != rotated.n) {
            return Err(Error::input(format!(
                "`partial_rotary_factor` in `config.json` rotates {channels} channels of {head}, but {} is {}",
                rotated.why, rotated.n
            )));
        }
        let gate = match options.gate {
            None => None,
            Some(name) => Some(OutputGate {
                of: t.projection(&format!("{at}.{name}"), &heads, hidden, false)?,
                per_head: true,
                by: Gating::Sigmoid,
            }),
        };
        Ok(Mla {
            heads: heads.n,
            nope: nope.n,
            rotated: rotated.n,
            v_dim: value.n,
            latent: latent.n,
            q_down,
            q,
            kv_down: t.projection(
                &format!("{at}.kv_a_proj_with_mqa"),
                &latent.plus(&rotated),
                hidden,
                bias,
            )?,
            kv_norm: norm("kv_a_layernorm", &latent)?,
            k_up,
            v_up,
            o: t.projection(&format!("{at}.{}", options.out), hidden, &heads.times(&value), bias)?,
            rope,
            gate,
            style: options.style,
            scale: (scale * rope::softmax_factor(c, defaults)?) as f32,
            temperature: options.temperature,
            factors: options.factors,
        })
    }

    /// Expansions of latents: `[heads, latent, nope]` to keys, in the form that multiplies queries, and
    /// `[heads, value, latent]` to values. Checkpoints have both in one matrix, or two separate ones in this
    /// form.
    fn expansions(
        &self,
        at: &str,
        [heads, nope, value, latent]: [&Dim; 4],
    ) -> Result<(WeightExpr, WeightExpr)> {
        let t = &self.tensors;
        let separate = ["k_b_proj", "v_b_proj"].map(|name| format!("{at}.{name}.weight"));
        if t.has(&separate[0]) {
            return Ok((
                t.take(&separate[0], &[heads, latent, nope])?,
                t.take(&separate[1], &[heads, value, latent])?,
            ));
        }
        let up = t.take(&format!("{at}.kv_b_proj.weight"), &[&heads.times(&nope.plus(value)), latent])?;
        let up = WeightExpr::Split { heads: heads.n, of: Box::new(up) };
        let rows = |start, len| WeightExpr::Slice {
            axis: Axis::Rows,
            start,
            step: 1,
            len,
            of: Box::new(up.clone()),
        };
        Ok((WeightExpr::Transpose(Box::new(rows(0, nope.n))), rows(nope.n, value.n)))
    }
}
