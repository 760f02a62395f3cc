//! Grouped-query attention, as llama-like families have it.
#![expect(clippy::cast_possible_truncation, reason = "models compute with their factors in f32")]

use super::delta::rows_of_heads;
use super::{Kept, Mix};
use crate::common::Base;
use crate::lower::{Built, Lowering, Rows};
use crate::rope;
use crate::spec::{Projection, Rope};
use crate::tensors::Dim;
use moec_base::error::Result;
use moec_ir::op::AttentionDesc;
use moec_ir::{Activation, Axis, Graph, Op, Part, RopeStyle, WeightClass, WeightExpr};

/// Grouped-query attention; multi-head attention is the case of `kv_heads = heads`.
#[derive(Clone, Debug, PartialEq)]
pub struct Gqa {
    /// Query heads.
    pub heads: usize,
    /// Key-value heads.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Query, `[heads·head_dim, hidden]`.
    pub q: Projection,
    /// Gate of the result: its sigmoid multiplies that in front of the output, `[heads·head_dim, hidden]`.
    pub gate: Option<Projection>,
    /// Key, `[kv_heads·head_dim, hidden]`.
    pub k: Projection,
    /// Value, `[kv_heads·head_dim, hidden]`.
    pub v: Projection,
    /// Output, `[hidden, heads·head_dim]`.
    pub o: Projection,
    /// Norms of query and key before the rotation.
    pub qk_norm: Option<QkNorm>,
    /// Bound of the magnitude of query, key and value.
    pub clip: Option<f32>,
    /// Rotation of the first channels of each head; none in layers that see no positions but by the mask (NoPE).
    pub rope: Option<Rope>,
    /// Sliding window in tokens.
    pub window: Option<usize>,
    /// Extra softmax column of each head, `[heads]`.
    pub sinks: Option<WeightExpr>,
    /// Factor on the scores.
    pub scale: f32,
}

/// Norms of query and key.
#[derive(Clone, Debug, PartialEq)]
pub struct QkNorm {
    /// Whether each head is normalised apart (weights `[head_dim]`), or all channels together.
    pub per_head: bool,
    /// Added to the mean square.
    pub eps: f32,
    /// Weight for the query.
    pub q: WeightExpr,
    /// Weight for the key.
    pub k: WeightExpr,
}

impl Mix for Gqa {
    fn part(&self) -> Part {
        Part::ATTN
    }

    fn weights(&self) -> Vec<(WeightClass, &WeightExpr)> {
        let matrices = [&self.q, &self.k, &self.v, &self.o].into_iter().chain(&self.gate);
        let exact = self.qk_norm.iter().flat_map(|n| [&n.q, &n.k]).chain(&self.sinks);
        super::projections(matrices).chain(super::exact(exact)).collect()
    }

    fn kept(&self) -> Kept {
        Kept { each: 2 * (self.kv_heads * self.head_dim) as u64, window: self.window, folded: 0 }
    }

    fn rope(&self) -> Option<&Rope> {
        self.rope.as_ref()
    }

    fn lower<'a>(&'a self, l: &mut Lowering<'a, '_>, at: &str, rows: Rows) -> Built {
        let x = rows.normed;
        let mut q = l.linear(&format!("{at}.attn.q"), WeightClass::Attention, &self.q, x)?;
        let mut k = l.linear(&format!("{at}.attn.k"), WeightClass::Attention, &self.k, x)?;
        let mut v = l.linear(&format!("{at}.attn.v"), WeightClass::Attention, &self.v, x)?;
        if let Some(n) = &self.qk_norm {
            let groups = |heads: usize| if n.per_head { heads } else { 1 };
            q = l.rms(&format!("{at}.attn.q_norm"), n.eps, groups(self.heads), &n.q, q)?;
            k = l.rms(&format!("{at}.attn.k_norm"), n.eps, groups(self.kv_heads), &n.k, k)?;
        }
        if let Some(c) = self.clip {
            for x in [&mut q, &mut k, &mut v] {
                *x = l.g.one(Op::Clamp { lo: -c, hi: c }, &[(*x).into()])?;
            }
        }
        if let Some(rope) = &self.rope {
            let angles = l.rope(rope)?;
            let rotate = |heads| Op::Rope { heads, offset: 0, style: RopeStyle::Half };
            q = l.g.one(rotate(self.heads), &[q.into(), angles.into()])?;
            k = l.g.one(rotate(self.kv_heads), &[k.into(), angles.into()])?;
        }
        // A window as long as the context hides nothing.
        let window = self.window.filter(|&w| w < l.shapes.max_context);
        let keys = l.cache(&format!("{at}.k"), [self.kv_heads, self.head_dim], window, k)?;
        let values = l.cache(&format!("{at}.v"), [self.kv_heads, self.head_dim], window, v)?;
        let desc = AttentionDesc {
            heads: self.heads,
            kv_heads: self.kv_heads,
            qk_dim: self.head_dim,
            v_dim: self.head_dim,
            scale: self.scale,
            window,
            sinks: self.sinks.is_some(),
            v_from_k: false,
        };
        let mut inputs = vec![q.into(), keys, values, Graph::POS.into(), Graph::SLOT.into()];
        if let Some(sinks) = &self.sinks {
            inputs.push(l.weight(&format!("{at}.attn.sinks"), WeightClass::Exact, sinks)?.into());
        }
        let mut y = l.g.one(Op::Attention(desc), &inputs)?;
        if let Some(gate) = &self.gate {
            let gate = l.linear(&format!("{at}.attn.gate"), WeightClass::Attention, gate, x)?;
            let gate = l.g.one(Op::Act(Activation::Sigmoid), &[gate.into()])?;
            y = l.g.one(Op::Mul, &[y.into(), gate.into()])?;
        }
        l.linear(&format!("{at}.attn.o"), WeightClass::Attention, &self.o, y)
    }
}

/// Which channels the norms of query and key cover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNormKind {
    /// Each head apart.
    PerHead,
    /// All channels together.
    Full,
}

/// What sets the attention of llama-like families apart.
#[derive(Clone, Copy, Debug)]
pub struct GqaOptions {
    /// Biases on query, key and value.
    pub qkv_bias: bool,
    /// Bias on the output.
    pub o_bias: bool,
    /// Whether the query's matrix has a gate behind each head.
    pub gated: bool,
    /// Norms of query and key.
    pub qk_norm: Option<QkNormKind>,
    /// Bound of the magnitude of query, key and value.
    pub clip: Option<f32>,
    /// Sliding window in tokens.
    pub window: Option<usize>,
    /// One extra softmax column per head.
    pub sinks: bool,
    /// What holds of the rotation where the config is silent; `None` where query and key are not rotated.
    pub rope: Option<rope::Defaults>,
}

impl Default for GqaOptions {
    fn default() -> Self {
        Self {
            qkv_bias: false,
            o_bias: false,
            gated: false,
            qk_norm: None,
            clip: None,
            window: None,
            sinks: false,
            rope: Some(rope::Defaults::default()),
        }
    }
}

impl Base<'_> {
    /// Llama-like attention of a layer.
    ///
    /// # Errors
    /// Tensors that do not fit the config.
    pub fn gqa(&self, layer: usize, options: GqaOptions) -> Result<Gqa> {
        let at = format!("{}.self_attn", self.layer(layer));
        let (t, hidden) = (&self.tensors, &self.hidden);
        let head_dim = self.head_dim()?;
        let wide = Dim::from(self.heads).times(&head_dim);
        let narrow = Dim::from(self.kv_heads).times(&head_dim);
        let norm = |name: &str, full: &Dim, kind: QkNormKind| {
            let width = if kind == QkNormKind::PerHead { &head_dim } else { full };
            self.norm_weight(&format!("{at}.{name}.weight"), width)
        };
        let qk_norm = match options.qk_norm {
            None => None,
            Some(kind) => Some(QkNorm {
                per_head: kind == QkNormKind::PerHead,
                eps: self.eps,
                q: norm("q_norm", &wide, kind)?,
                k: norm("k_norm", &narrow, kind)?,
            }),
        };
        let wide_q = if options.gated { wide.twice() } else { wide.clone() };
        let q = t.projection(&format!("{at}.q_proj"), &wide_q, hidden, options.qkv_bias)?;
        let half = |from: usize| Projection {
            weight: rows_of_heads(&q.weight, self.heads.n, from, head_dim.n),
            bias: q.bias.as_ref().map(|bias| columns_of_heads(bias, self.heads.n, from, head_dim.n)),
        };
        let (q, gate) = if options.gated { (half(0), Some(half(head_dim.n))) } else { (q, None) };
        Ok(Gqa {
            heads: self.heads.n,
            kv_heads: self.kv_heads.n,
            head_dim: head_dim.n,
            q,
            gate,
            k: t.projection(&format!("{at}.k_proj"), &narrow, hidden, options.qkv_bias)?,
            v: t.projection(&format!("{at}.v_proj"), &narrow, hidden, options.qkv_bias)?,
            o: t.projection(&format!("{at}.o_proj"), hidden, &wide, options.o_bias)?,
            qk_norm,
            clip: options.clip,
            rope: options.rope.map(|defaults| rope::read(self.config, head_dim.n, defaults)).transpose()?,
            window: options.window,
            sinks: t.take_if(options.sinks, &format!("{at}.sinks"), &[&self.heads.into()])?,
            scale: (head_dim.n as f64).powf(-0.5) as f32,
        })
    }
}

/// Numbers `start .. start + len` of each of the heads that a vector is cut into, two times `len` each, one behind the other.
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
