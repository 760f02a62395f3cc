//! Grouped-query attention of llama-like families.
#![expect(clippy::cast_possible_truncation, reason = "models compute with their factors in f32")]

use super::delta::rows_of_heads;
use super::{Mix, StateSize};
use crate::common::Base;
use crate::lower::{LowerResult, Lowering, Rows};
use crate::rope;
use crate::spec::{Projection, Rope};
use crate::tensors::Dim;
use moec_base::error::{Error, Result};
use moec_ir::op::AttentionDesc;
use moec_ir::{Activation, Axis, Graph, Op, Part, RopeStyle, ValueId, WeightClass, WeightExpr};

/// Grouped-query attention; multi-head attention is the case of `kv_heads = heads`.
#[derive(Clone, Debug, PartialEq)]
pub struct Gqa {
    /// Query heads.
    pub heads: usize,
    /// Key-value heads.
    pub kv_heads: usize,
    /// Channels of a query and of a key.
    pub head_dim: usize,
    /// Channels of a value.
    pub v_dim: usize,
    /// Query, `[heads·head_dim, hidden]`.
    pub q: Projection,
    /// Gate of the result, before the output.
    pub gate: Option<OutputGate>,
    /// Key, `[kv_heads·head_dim, hidden]`.
    pub k: Projection,
    /// Value, `[kv_heads·v_dim, hidden]`; `None`: the key before its norm and rotation.
    pub v: Option<Projection>,
    /// Factor on the value.
    pub v_scale: f32,
    /// Root-mean-square norm of each value, without a weight: its epsilon.
    pub v_norm: Option<f32>,
    /// Output, `[hidden, heads·v_dim]`.
    pub o: Projection,
    /// Norms of query and key.
    pub qk_norm: Option<QkNorm>,
    /// Bound of the magnitude of query, key and value.
    pub clip: Option<f32>,
    /// Rotation of the first channels of each head; `None` in layers without position encodings (NoPE).
    pub rope: Option<Rope>,
    /// Pairing of channels.
    pub style: RopeStyle,
    /// Sliding window in tokens.
    pub window: Option<usize>,
    /// Whether the window is a fixed chunk: rows see only their own chunk of so many tokens.
    pub chunked: bool,
    /// Position-dependent factor on queries.
    pub temperature: Option<Temperature>,
    /// Extra softmax column of each head, `[heads]`.
    pub sinks: Option<WeightExpr>,
    /// Factor on the scores.
    pub scale: f32,
}

/// The factor `1 + beta · ln(1 + ⌊(position + offset) / every⌋)` on queries.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Temperature {
    /// Coefficient of the logarithm.
    pub beta: f32,
    /// Number of consecutive positions with the same factor.
    pub every: usize,
    /// Added to the position.
    pub offset: usize,
}

impl Temperature {
    /// Multiplies the queries `q` by the factors of their rows.
    ///
    /// # Errors
    /// Fails if parts do not fit each other.
    pub(super) fn lower(self, l: &mut Lowering<'_, '_>, q: ValueId) -> LowerResult {
        let Self { beta, every, offset } = self;
        l.g.one(Op::ScaleByPosition { beta, every, offset }, &[q.into(), Graph::POS.into()])
    }
}

/// Gate on attention's result.
#[derive(Clone, Debug, PartialEq)]
pub struct OutputGate {
    /// `[heads·v_dim, hidden]`, or `[heads, hidden]` for one number a head.
    pub of: Projection,
    /// Whether there is one number per head.
    pub per_head: bool,
    /// Function of the projection.
    pub by: Gating,
}

/// Function of a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gating {
    /// `1 / (1 + e^-x)`
    Sigmoid,
    /// `ln(1 + e^x)`
    Softplus,
}

impl OutputGate {
    /// Multiplies the rows `y` of `heads` heads by the gate of the rows `x`.
    ///
    /// # Errors
    /// Fails if parts do not fit each other.
    pub(super) fn lower<'a>(
        &'a self,
        l: &mut Lowering<'a, '_>,
        at: &str,
        heads: usize,
        [x, y]: [ValueId; 2],
    ) -> LowerResult {
        let gate = l.linear(&format!("{at}.attn.gate"), WeightClass::Attention, &self.of, x)?;
        let by = match self.by {
            Gating::Sigmoid => Op::Act(Activation::Sigmoid),
            Gating::Softplus => Op::Softplus,
        };
        let gate = l.g.one(by, &[gate.into()])?;
        let join = if self.per_head { Op::MulHeads { heads } } else { Op::Mul };
        l.g.one(join, &[y.into(), gate.into()])
    }
}

/// Norms of query and key.
#[derive(Clone, Debug, PartialEq)]
pub struct QkNorm {
    /// Whether each head is normalised separately (weights `[head_dim]`), or all channels together.
    pub per_head: bool,
    /// Added to the mean square.
    pub eps: f32,
    /// Whether they are applied after the rotation.
    pub rotated: bool,
    /// Weights for query and key; `None`: all are 1.
    pub weights: Option<[WeightExpr; 2]>,
}

impl Mix for Gqa {
    fn part(&self) -> Part {
        Part::ATTN
    }

    fn weights(&self) -> Vec<(WeightClass, &WeightExpr)> {
        let gate = self.gate.iter().map(|gate| &gate.of);
        let matrices = [&self.q, &self.k, &self.o].into_iter().chain(&self.v).chain(gate);
        let exact = self.qk_norm.iter().flat_map(|n| n.weights.iter().flatten()).chain(&self.sinks);
        super::projections(matrices).chain(super::exact(exact)).collect()
    }

    fn state_size(&self) -> StateSize {
        StateSize {
            per_token: (self.kv_heads * (self.head_dim + self.v_dim)) as u64,
            window: self.window,
            folded: 0,
        }
    }

    fn rope(&self) -> Option<&Rope> {
        self.rope.as_ref()
    }

    fn lower<'a>(&'a self, l: &mut Lowering<'a, '_>, at: &str, rows: Rows) -> LowerResult {
        let x = rows.normed;
        let mut q = l.linear(&format!("{at}.attn.q"), WeightClass::Attention, &self.q, x)?;
        let mut k = l.linear(&format!("{at}.attn.k"), WeightClass::Attention, &self.k, x)?;
        let mut v = match &self.v {
            Some(v) => l.linear(&format!("{at}.attn.v"), WeightClass::Attention, v, x)?,
            None => k,
        };
        if let Some(eps) = self.v_norm {
            let norm = Op::RmsNorm { eps, groups: self.kv_heads, weight: false };
            v = l.g.one(norm, &[v.into()])?;
        }
        v = l.scaled(self.v_scale, v)?;
        let norms = |l: &mut Lowering<'a, '_>,
                     [q, k]: [ValueId; 2],
                     rotated: bool|
         -> LowerResult<[ValueId; 2]> {
            let Some(n) = self.qk_norm.as_ref().filter(|n| n.rotated == rotated) else { return Ok([q, k]) };
            let groups = |heads: usize| if n.per_head { heads } else { 1 };
            let [of_q, of_k] = n.weights.as_ref().map_or([None; 2], |w| w.each_ref().map(Some));
            Ok([
                l.rms(&format!("{at}.attn.q_norm"), n.eps, groups(self.heads), of_q, q)?,
                l.rms(&format!("{at}.attn.k_norm"), n.eps, groups(self.kv_heads), of_k, k)?,
            ])
        };
        [q, k] = norms(l, [q, k], false)?;
        if let Some(c) = self.clip {
            for x in [&mut q, &mut k, &mut v] {
                *x = l.g.one(Op::Clamp { lo: -c, hi: c }, &[(*x).into()])?;
            }
        }
        if let Some(rope) = &self.rope {
            let angles = l.rope(rope)?;
            let rotate = |heads| Op::Rope { heads, offset: 0, style: self.style };
            q = l.g.one(rotate(self.heads), &[q.into(), angles.into()])?;
            k = l.g.one(rotate(self.kv_heads), &[k.into(), angles.into()])?;
        }
        [q, k] = norms(l, [q, k], true)?;
        if let Some(temperature) = self.temperature {
            q = temperature.lower(l, q)?;
        }
        // A window as long as the context has no effect.
        let window = self.window.filter(|&w| w < l.shapes.max_context);
        let keys = l.cache(&format!("{at}.k"), [self.kv_heads, self.head_dim], window, k)?;
        let values = l.cache(&format!("{at}.v"), [self.kv_heads, self.v_dim], window, v)?;
        let desc = AttentionDesc {
            heads: self.heads,
            kv_heads: self.kv_heads,
            qk_dim: self.head_dim,
            v_dim: self.v_dim,
            scale: self.scale,
            window,
            chunked: self.chunked && window.is_some(),
            sinks: self.sinks.is_some(),
            v_from_k: false,
        };
        let mut inputs = vec![q.into(), keys, values, Graph::POS.into(), Graph::SLOT.into()];
        if let Some(sinks) = &self.sinks {
            inputs.push(l.weight(&format!("{at}.attn.sinks"), WeightClass::Exact, sinks)?.into());
        }
        let mut y = l.g.one(Op::Attention(desc), &inputs)?;
        if let Some(gate) = &self.gate {
            y = gate.lower(l, at, self.heads, [x, y])?;
        }
        l.linear(&format!("{at}.attn.o"), WeightClass::Attention, &self.o, y)
    }
}

/// Extent of the norms of query and key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNormKind {
    /// Each head separately.
    PerHead,
    /// All channels together.
    Full,
    /// Each head separately, without weights.
    Plain,
}

/// Gate on attention's result, by family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gated {
    /// The sigmoid of the rows after each head in the query's matrix.
    InQuery,
    /// A function of a projection.
    Projected {
        /// Name of the matrix.
        name: &'static str,
        /// Whether there is one number per head.
        per_head: bool,
        /// Function of the projection.
        by: Gating,
    },
}

/// Options of the attention of llama-like families.
#[derive(Clone, Copy, Debug)]
pub struct GqaOptions {
    /// Prefix of the names of its tensors, below the layer.
    pub at: &'static str,
    /// Names of the norms of query and key.
    pub norms: [&'static str; 2],
    /// Name of the output's matrix.
    pub out: &'static str,
    /// Query heads; `None`: the model's.
    pub heads: Option<usize>,
    /// Key-value heads; `None`: the model's.
    pub kv_heads: Option<usize>,
    /// Channels of a head; `None`: the model's.
    pub head_dim: Option<usize>,
    /// Channels of a value; `None`: those of a head.
    pub v_dim: Option<usize>,
    /// Whether values are the keys before norm and rotation.
    pub k_is_v: bool,
    /// Whether values are normalised, without a weight.
    pub v_norm: bool,
    /// Factor on values.
    pub v_scale: f32,
    /// Biases on query, key and value.
    pub qkv_bias: bool,
    /// Bias on the output.
    pub o_bias: bool,
    /// Gate of the result.
    pub gate: Option<Gated>,
    /// Norms of query and key.
    pub qk_norm: Option<QkNormKind>,
    /// Whether these norms are applied after the rotation.
    pub norm_rotated: bool,
    /// Bound of the magnitude of query, key and value.
    pub clip: Option<f32>,
    /// Sliding window in tokens.
    pub window: Option<usize>,
    /// Whether the window is a fixed chunk: rows see only their own chunk of so many tokens.
    pub chunked: bool,
    /// Position-dependent factor on queries.
    pub temperature: Option<Temperature>,
    /// Name of the extra softmax column of each head.
    pub sinks: Option<&'static str>,
    /// Default rotation; `None` where query and key are not rotated.
    pub rope: Option<rope::Defaults>,
    /// Pairing of channels.
    pub style: RopeStyle,
    /// Factor on the scores; `None`: one over the square root of a head's channels.
    pub scale: Option<f32>,
}

impl Default for GqaOptions {
    fn default() -> Self {
        Self {
            at: "self_attn",
            norms: ["q_norm", "k_norm"],
            out: "o_proj",
            heads: None,
            kv_heads: None,
            head_dim: None,
            v_dim: None,
            k_is_v: false,
            v_norm: false,
            v_scale: 1.0,
            qkv_bias: false,
            o_bias: false,
            gate: None,
            qk_norm: None,
            norm_rotated: false,
            clip: None,
            window: None,
            chunked: false,
            temperature: None,
            sinks: None,
            rope: Some(rope::Defaults::default()),
            style: RopeStyle::Half,
            scale: None,
        }
    }
}

impl Base<'_> {
    /// Reads llama-like attention of a layer.
    ///
    /// # Errors
    /// Fails if tensors do not fit the config.
    pub fn gqa(&self, layer: usize, options: GqaOptions) -> Result<Gqa> {
        let at = format!("{}.{}", self.layer(layer), options.at);
        let (t, hidden) = (&self.tensors, &self.hidden);
        let of_layer = |n: Option<usize>, of_model: Dim| match n {
            Some(n) => Dim::new(n, "what the config says of the layer"),
            None => of_model,
        };
        let heads = of_layer(options.heads, self.heads.into());
        let kv_heads = of_layer(options.kv_heads, self.kv_heads.into());
        if !heads.n.is_multiple_of(kv_heads.n.max(1)) {
            return Err(Error::input(format!(
                "layer {layer} has {} query heads over {} key-value heads",
                heads.n, kv_heads.n
            )));
        }
        let head_dim = match options.head_dim {
            Some(n) => Dim::new(n, "what the config says of the layer"),
            None => self.head_dim()?,
        };
        let v_dim = of_layer(options.v_dim, head_dim.clone());
        let (wide, narrow) = (heads.times(&head_dim), kv_heads.times(&head_dim));
        let norm = |name: &str, width: &Dim| self.norm_weight(&format!("{at}.{name}.weight"), width);
        let norms = |[q, k]: [&Dim; 2]| -> Result<_> {
            Ok(Some([norm(options.norms[0], q)?, norm(options.norms[1], k)?]))
        };
        let qk_norm = match options.qk_norm {
            None => None,
            Some(kind) => Some(QkNorm {
                per_head: kind != QkNormKind::Full,
                eps: self.eps,
                rotated: options.norm_rotated,
                weights: match kind {
                    QkNormKind::PerHead => norms([&head_dim; 2])?,
                    QkNormKind::Full => norms([&wide, &narrow])?,
                    QkNormKind::Plain => None,
                },
            }),
        };
        let in_query = options.gate == Some(Gated::InQuery);
        let rows = if in_query { wide.doubled() } else { wide };
        let q = t.projection(&format!("{at}.q_proj"), &rows, hidden, options.qkv_bias)?;
        let half = |from: usize| Projection {
            weight: rows_of_heads(&q.weight, heads.n, from, head_dim.n),
            bias: q.bias.as_ref().map(|bias| columns_of_heads(bias, heads.n, from, head_dim.n)),
        };
        let by = |of, per_head, by| Some(OutputGate { of, per_head, by });
        let gate = match options.gate {
            None => None,
            Some(Gated::InQuery) => by(half(head_dim.n), false, Gating::Sigmoid),
            Some(Gated::Projected { name, per_head, by: gating }) => {
                let rows = if per_head { heads.clone() } else { heads.times(&v_dim) };
                by(t.projection(&format!("{at}.{name}"), &rows, hidden, false)?, per_head, gating)
            }
        };
        let q = if in_query { half(0) } else { q };
        let v = format!("{at}.v_proj");
        let sinks = options.sinks.map(|name| t.take(&format!("{at}.{name}"), &[&heads])).transpose()?;
        Ok(Gqa {
            heads: heads.n,
            kv_heads: kv_heads.n,
            head_dim: head_dim.n,
            v_dim: v_dim.n,
            q,
            gate,
            k: t.projection(&format!("{at}.k_proj"), &narrow, hidden, options.qkv_bias)?,
            v: if options.k_is_v {
                None
            } else {
                Some(t.projection(&v, &kv_heads.times(&v_dim), hidden, options.qkv_bias)?)
            },
            v_scale: options.v_scale,
            v_norm: options.v_norm.then_some(self.eps),
            o: t.projection(&format!("{at}.{}", options.out), hidden, &heads.times(&v_dim), options.o_bias)?,
            qk_norm,
            clip: options.clip,
            rope: options.rope.map(|defaults| rope::read(self.config, head_dim.n, defaults)).transpose()?,
            style: options.style,
            window: options.window,
            chunked: options.chunked,
            temperature: options.temperature,
            sinks,
            scale: options.scale.unwrap_or_else(|| (head_dim.n as f64).powf(-0.5) as f32),
        })
    }
}

/// Numbers `start .. start + len` of each head of a vector with `2 · len` numbers per head, concatenated.
fn columns_of_heads(of: &WeightExpr, heads: usize, start: usize, len: usize) -> WeightExpr {
    let part = |head: usize| WeightExpr::Slice {
        axis: Axis::Cols,
        start: 2 * head * len + start,
        step: 1,
        len,
        of: Box::new(of.clone()),
    };
    WeightExpr::Concat { axis: Axis::Cols, of: (0..heads).map(part).collect() }
}
