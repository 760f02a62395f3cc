//! Linear attention by the gated delta rule, as in Qwen3-Next (Yang, Kautz and Hatamizadeh, *Gated Delta
//! Networks*). It has a short convolution, a state that decays and is corrected token by token, and a gate on
//! the state's output.

use super::{Mix, StateSize};
use crate::common::Base;
use crate::lower::{LowerResult, Lowering, Rows};
use crate::spec::Projection;
use crate::tensors::{Dim, by_channel, taps};
use moec_base::error::Result;
use moec_ir::{Activation, Axis, Elementwise, Graph, Op, Part, StateKind, ValueId, WeightClass, WeightExpr};

/// Epsilon, which is added to the sum of squares of a query and of a key.
const EPS: f32 = 1e-6;

/// The mixer. `K` and `V` are [`key`](Self::key) and [`value`](Self::value).
#[derive(Clone, Debug, PartialEq)]
pub struct GatedDelta {
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values, a multiple of those of keys.
    pub heads: usize,
    /// Channels of a query and of a key.
    pub key: usize,
    /// Channels of a value.
    pub value: usize,
    /// Rows that the convolution reads, with the current one.
    pub taps: usize,
    /// Query, key, value one after the other, `[2·key_heads·K + heads·V, hidden]`.
    pub qkv: Projection,
    /// Convolution of their channels, `[taps, 2·key_heads·K + heads·V]`.
    pub conv: WeightExpr,
    /// Gate of the result, `[heads·V, hidden]`, as one matrix or as the product of two.
    pub gate: Vec<Projection>,
    /// Function of the gate.
    pub gate_by: Activation,
    /// Projection to the decay's input: `[heads, hidden]`, or `[heads·K, hidden]` with one number for each
    /// channel of a key. It has a bias, and is one matrix or the product of two.
    pub decay: Vec<Projection>,
    /// Function from that input to the logarithm of a factor below 1.
    pub decay_by: Decay,
    /// Rate of that function, with the decay's length.
    pub rate: WeightExpr,
    /// Projection to the share of the state's value that is replaced, `[heads, hidden]`.
    pub beta: Projection,
    /// Norm of each head's result: epsilon, and weight `[V]`.
    pub norm: (f32, WeightExpr),
    /// Output, `[hidden, heads·V]`.
    pub out: Projection,
}

/// Function from the decay's input to the logarithm of a factor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Decay {
    /// `rate · ln(1 + e^x)`, for a rate below 0.
    Softplus,
    /// `bound / (1 + e^−(rate · x))`, for a bound below 0.
    Sigmoid {
        /// The bound.
        bound: f32,
    },
}

impl GatedDelta {
    /// Channels of all queries; all keys have the same number.
    fn keys(&self) -> usize {
        self.key_heads * self.key
    }

    /// Channels of the convolution.
    fn channels(&self) -> usize {
        2 * self.keys() + self.heads * self.value
    }
}

impl Mix for GatedDelta {
    fn part(&self) -> Part {
        Part::MIXER
    }

    fn weights(&self) -> Vec<(WeightClass, &WeightExpr)> {
        let small =
            self.decay.iter().chain([&self.beta]).flat_map(|p| [&p.weight].into_iter().chain(&p.bias));
        let small = small.chain([&self.conv, &self.rate, &self.norm.1]);
        super::projections([&self.qkv, &self.out].into_iter().chain(&self.gate))
            .chain(super::exact(small))
            .collect()
    }

    fn state_size(&self) -> StateSize {
        let state = self.heads * self.key * self.value;
        StateSize { folded: (state + (self.taps - 1) * self.channels()) as u64, ..StateSize::default() }
    }

    fn lower<'a>(&'a self, l: &mut Lowering<'a, '_>, at: &str, rows: Rows) -> LowerResult {
        let (x, at) = (rows.normed, format!("{at}.mixer"));
        let pos_and_slot = [Graph::POS.into(), Graph::SLOT.into()];
        let mixed = l.linear(&format!("{at}.qkv"), WeightClass::Attention, &self.qkv, x)?;
        let conv_state =
            l.state(&format!("{at}.conv"), StateKind::Convolution, [1, self.taps - 1, self.channels()]);
        let conv = l.weight(&format!("{at}.conv"), WeightClass::Exact, &self.conv)?;
        let op = Op::CausalConv { act: Some(Activation::Silu), bias: false };
        let mixed =
            l.g.one(op, &[conv_state.into(), mixed.into(), conv.into(), pos_and_slot[0], pos_and_slot[1]])?;
        let keys = self.keys();
        let slice = |start, len| Op::Slice { heads: 1, start, len };
        let [q, k, v] = [(0, keys), (keys, keys), (2 * keys, self.heads * self.value)];
        // x / √(Σ x² + ε) is x / √(mean x² + ε / K) / √K; the query is divided by √K once more.
        let width = self.key as f32;
        let eps = EPS / width;
        let mut unit = |(start, len): (usize, usize), factor: f32| -> LowerResult {
            let part = l.g.one(slice(start, len), &[mixed.into()])?;
            let part = l.g.one(Op::RmsNorm { eps, groups: self.key_heads, weight: false }, &[part.into()])?;
            l.g.one(Op::Scale { factor }, &[part.into()])
        };
        let (q, k) = (unit(q, 1.0 / width)?, unit(k, 1.0 / width.sqrt())?);
        let v = l.g.one(slice(v.0, v.1), &[mixed.into()])?;
        let decay = path(l, &format!("{at}.decay"), WeightClass::Exact, &self.decay, x)?;
        let rate = l.weight(&format!("{at}.rate"), WeightClass::Exact, &self.rate)?;
        let decay = match self.decay_by {
            Decay::Softplus => {
                let decay = l.g.one(Op::Softplus, &[decay.into()])?;
                l.g.one(Op::ScaleCols, &[decay.into(), rate.into()])?
            }
            Decay::Sigmoid { bound } => {
                let decay = l.g.one(Op::ScaleCols, &[decay.into(), rate.into()])?;
                let decay = l.g.one(Op::Act(Activation::Sigmoid), &[decay.into()])?;
                l.scaled(bound, decay)?
            }
        };
        let beta = l.linear(&format!("{at}.beta"), WeightClass::Exact, &self.beta, x)?;
        let beta = l.g.one(Op::Act(Activation::Sigmoid), &[beta.into()])?;
        let state = l.state(&format!("{at}.s"), StateKind::Recurrent, [self.heads, self.key, self.value]);
        let op = Op::DeltaRule { key_heads: self.key_heads, heads: self.heads };
        let [pos, slot] = pos_and_slot;
        let operands = [state.into(), q.into(), k.into(), v.into(), decay.into(), beta.into(), pos, slot];
        let y = l.g.one(op, &operands)?;
        let y = l.rms(&format!("{at}.o_norm"), self.norm.0, self.heads, Some(&self.norm.1), y)?;
        let gate = path(l, &format!("{at}.gate"), WeightClass::Attention, &self.gate, x)?;
        let gate = l.g.one(Op::Act(self.gate_by), &[gate.into()])?;
        let y = l.g.one(Op::Mul, &[y.into(), gate.into()])?;
        l.linear(&format!("{at}.out"), WeightClass::Attention, &self.out, y)
    }
}

/// Applies one linear map to rows, or two.
fn path<'a>(
    l: &mut Lowering<'a, '_>,
    name: &str,
    class: WeightClass,
    maps: &'a [Projection],
    x: ValueId,
) -> LowerResult {
    maps.iter().enumerate().try_fold(x, |x, (i, map)| {
        let last = i + 1 == maps.len();
        l.linear(&if last { name.to_owned() } else { format!("{name}.low") }, class, map, x)
    })
}

impl Base<'_> {
    /// Reads the gated delta rule of a layer, below `linear_attn`. It has one matrix for each of `qkv`, `z`,
    /// `b` and `a`, or two matrices with rows that are grouped by key heads.
    ///
    /// # Errors
    /// Fails if keys or tensors do not fit.
    pub fn gated_delta(&self, layer: usize) -> Result<GatedDelta> {
        let (c, t, hidden) = (self.config, &self.tensors, &self.hidden);
        let at = format!("{}.linear_attn", self.layer(layer));
        let (key_heads, heads) = (c.size(&["linear_num_key_heads"])?, c.size(&["linear_num_value_heads"])?);
        if !heads.n.is_multiple_of(key_heads.n) {
            return Err(moec_base::error::Error::input(format!(
                "{} is {}, not a multiple of `{}`, which is {}",
                c.name(heads.key),
                heads.n,
                key_heads.key,
                key_heads.n
            )));
        }
        let [key_heads, heads] = [key_heads, heads].map(Dim::from);
        let [key, value] =
            [c.size(&["linear_key_head_dim"])?, c.size(&["linear_value_head_dim"])?].map(Dim::from);
        let taps = taps(c, &["linear_conv_kernel_dim"])?;
        let (keys, values) = (key_heads.times(&key), heads.times(&value));
        let channels = keys.doubled().plus(&values);
        let weight = |name: &str| format!("{at}.{name}.weight");
        let plain = |weight| Projection { weight, bias: None };
        // Each of these pairs may be one tensor, in which the rows of a key head are together.
        let (all, both) = (weight("in_proj_qkvz"), weight("in_proj_ba"));
        let (n, each) = (key_heads.n, heads.n / key_heads.n);
        let part = |of: &WeightExpr, start, len| rows_of_heads(of, n, start, len);
        let [qkv, gate] = if t.has(&all) {
            let all = t.take(&all, &[&channels.plus(&values), hidden])?;
            let wide = each * value.n;
            let of = [part(&all, 0, key.n), part(&all, key.n, key.n), part(&all, 2 * key.n, wide)];
            let qkv = WeightExpr::Concat { axis: Axis::Rows, of: of.into() };
            [qkv, part(&all, 2 * key.n + wide, wide)]
        } else {
            [
                t.take(&weight("in_proj_qkv"), &[&channels, hidden])?,
                t.take(&weight("in_proj_z"), &[&values, hidden])?,
            ]
        };
        let [beta, decay] = if t.has(&both) || t.has(&all) {
            let both = t.take(&both, &[&heads.doubled(), hidden])?;
            [part(&both, 0, each), part(&both, each, each)]
        } else {
            [
                t.take(&weight("in_proj_b"), &[&heads, hidden])?,
                t.take(&weight("in_proj_a"), &[&heads, hidden])?,
            ]
        };
        let conv = by_channel(t, &weight("conv1d"), &channels, &taps)?;
        let rate = t.take_mapped(&format!("{at}.A_log"), &[&heads], Elementwise::NegExp)?;
        let bias = Some(t.take(&format!("{at}.dt_bias"), &[&heads])?);
        Ok(GatedDelta {
            key_heads: key_heads.n,
            heads: heads.n,
            key: key.n,
            value: value.n,
            taps: taps.n,
            qkv: plain(qkv),
            conv,
            gate: vec![plain(gate)],
            gate_by: Activation::Silu,
            decay: vec![Projection { weight: decay, bias }],
            decay_by: Decay::Softplus,
            rate,
            beta: plain(beta),
            norm: (self.eps, t.take(&weight("norm"), &[&value])?),
            out: t.projection(&format!("{at}.out_proj"), hidden, &values, false)?,
        })
    }
}

/// Sizes of Kimi Delta Attention.
#[derive(Clone, Debug)]
pub struct KdaSizes {
    /// Heads.
    pub heads: Dim,
    /// Channels of a head.
    pub dim: Dim,
    /// Taps of the convolutions.
    pub taps: Dim,
}

impl Base<'_> {
    /// Reads Kimi Delta Attention of a layer (Kimi Team, *Kimi Linear*, section 3). It is the gated delta
    /// rule with a decay for each channel of a key, and separate convolutions of query, key and value.
    /// `bound` is the bound of a safe gate.
    ///
    /// # Errors
    /// Fails if tensors do not fit the config.
    pub fn kda(&self, at: &str, sizes: &KdaSizes, bound: Option<f32>, out: &str) -> Result<GatedDelta> {
        let (t, hidden) = (&self.tensors, &self.hidden);
        let KdaSizes { heads, dim, taps } = sizes;
        let wide = heads.times(dim);
        let name = |name: &str| format!("{at}.{name}");
        let each = |suffix: &str, take: &dyn Fn(&str) -> Result<WeightExpr>| -> Result<Vec<WeightExpr>> {
            ["q", "k", "v"].iter().map(|part| take(&name(&format!("{part}_{suffix}.weight")))).collect()
        };
        let qkv = each("proj", &|name| t.take(name, &[&wide, hidden]))?;
        let conv = each("conv1d", &|name| by_channel(t, name, &wide, taps))?;
        // One matrix, or the product of two, the first of which is narrow.
        let path = |part: &str, bias: Option<WeightExpr>| -> Result<Vec<Projection>> {
            let narrow = name(&format!("{part}_a_proj"));
            if !t.has(&format!("{narrow}.weight")) {
                let weight = t.take(&name(&format!("{part}_proj.weight")), &[&wide, hidden])?;
                return Ok(vec![Projection { weight, bias }]);
            }
            let weight = t.take(&name(&format!("{part}_b_proj.weight")), &[&wide, dim])?;
            Ok(vec![t.projection(&narrow, dim, hidden, false)?, Projection { weight, bias }])
        };
        let (map, decay_by) = match bound {
            Some(bound) => (Elementwise::Exp, Decay::Sigmoid { bound }),
            None => (Elementwise::NegExp, Decay::Softplus),
        };
        let rate = t.take_mapped_squeezed(&name("A_log"), &[heads], map)?;
        Ok(GatedDelta {
            key_heads: heads.n,
            heads: heads.n,
            key: dim.n,
            value: dim.n,
            taps: taps.n,
            qkv: Projection { weight: WeightExpr::Concat { axis: Axis::Rows, of: qkv }, bias: None },
            conv: WeightExpr::Concat { axis: Axis::Cols, of: conv },
            gate: path("g", None)?,
            gate_by: Activation::Sigmoid,
            decay: path("f", Some(t.take_squeezed(&name("dt_bias"), &[&wide])?))?,
            decay_by,
            rate: WeightExpr::Repeat { each: dim.n, of: Box::new(rate) },
            beta: t.projection(&name("b_proj"), heads, hidden, false)?,
            norm: (self.eps, t.take(&name("o_norm.weight"), &[dim])?),
            out: t.projection(&name(out), hidden, &wide, false)?,
        })
    }
}

/// Rows `start .. start + len` of each head of a matrix, concatenated.
pub(super) fn rows_of_heads(of: &WeightExpr, heads: usize, start: usize, len: usize) -> WeightExpr {
    let split = WeightExpr::Split { heads, of: Box::new(of.clone()) };
    let rows = WeightExpr::Slice { axis: Axis::Rows, start, step: 1, len, of: Box::new(split) };
    WeightExpr::Join(Box::new(rows))
}
