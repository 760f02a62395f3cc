//! Linear attention by the gated delta rule, as Qwen3-Next has it (Yang, Kautz and Hatamizadeh, *Gated Delta Networks*): a short
//! convolution, a state that decays and is corrected token by token, and a gate on what it says.
#![expect(clippy::cast_possible_truncation, reason = "models compute with their factors in f32")]

use super::{Kept, Mix};
use crate::common::Base;
use crate::lower::{Built, Lowering, Rows};
use crate::spec::Projection;
use crate::tensors::{Dim, by_channel};
use moec_base::error::Result;
use moec_ir::{Activation, Axis, Elementwise, Graph, Op, Part, StateKind, WeightClass, WeightExpr};

/// Added to the sum of squares of a query and of a key.
const EPS: f32 = 1e-6;

/// The mixer. `K` and `V` are [`key`](Self::key) and [`value`](Self::value).
#[derive(Clone, Debug, PartialEq)]
pub struct GatedDelta {
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values, a multiple.
    pub heads: usize,
    /// Channels of a query and of a key.
    pub key: usize,
    /// Channels of a value.
    pub value: usize,
    /// Rows that the convolution reads, its own included.
    pub taps: usize,
    /// Query, key, value one behind the other, `[2·key_heads·K + heads·V, hidden]`.
    pub qkv: Projection,
    /// Convolution of their channels, `[taps, 2·key_heads·K + heads·V]`.
    pub conv: WeightExpr,
    /// Gate of the result, `[heads·V, hidden]`.
    pub gate: Projection,
    /// What decay comes from, `[heads, hidden]`, with a bias.
    pub decay: Projection,
    /// Factor on it, below 0, `[heads]`.
    pub rate: WeightExpr,
    /// How much a value replaces what the state says, `[heads, hidden]`.
    pub beta: Projection,
    /// Norm of each head's result: what is added to the mean square, and its weight `[V]`.
    pub norm: (f32, WeightExpr),
    /// Output, `[hidden, heads·V]`.
    pub out: Projection,
}

impl GatedDelta {
    /// Channels of all queries, which are as many as those of all keys.
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
        let small = [&self.decay, &self.beta].into_iter().flat_map(|p| [&p.weight].into_iter().chain(&p.bias));
        let small = small.chain([&self.conv, &self.rate, &self.norm.1]);
        super::projections([&self.qkv, &self.gate, &self.out]).chain(super::exact(small)).collect()
    }

    fn kept(&self) -> Kept {
        let state = self.heads * self.key * self.value;
        Kept { folded: (state + (self.taps - 1) * self.channels()) as u64, ..Kept::default() }
    }

    fn lower<'a>(&'a self, l: &mut Lowering<'a, '_>, at: &str, rows: Rows) -> Built {
        let (x, at) = (rows.normed, format!("{at}.mixer"));
        let places = [Graph::POS.into(), Graph::SLOT.into()];
        let mixed = l.linear(&format!("{at}.qkv"), WeightClass::Attention, &self.qkv, x)?;
        let held = l.state(&format!("{at}.conv"), StateKind::Convolution, [1, self.taps - 1, self.channels()]);
        let conv = l.weight(&format!("{at}.conv"), WeightClass::Exact, &self.conv)?;
        let op = Op::CausalConv { act: Some(Activation::Silu), bias: false };
        let mixed = l.g.one(op, &[held.into(), mixed.into(), conv.into(), places[0], places[1]])?;
        let keys = self.keys();
        let slice = |start, len| Op::Slice { heads: 1, start, len };
        let [q, k, v] = [(0, keys), (keys, keys), (2 * keys, self.heads * self.value)];
        // x / √(Σ x² + ε) is x / √(mean x² + ε / K) / √K; the query is divided by √K once more.
        let width = self.key as f32;
        let eps = EPS / width;
        let mut unit = |(start, len): (usize, usize), factor: f32| -> Built {
            let part = l.g.one(slice(start, len), &[mixed.into()])?;
            let part = l.g.one(Op::RmsNorm { eps, groups: self.key_heads, weight: false }, &[part.into()])?;
            l.g.one(Op::Scale { factor }, &[part.into()])
        };
        let (q, k) = (unit(q, 1.0 / width)?, unit(k, 1.0 / width.sqrt())?);
        let v = l.g.one(slice(v.0, v.1), &[mixed.into()])?;
        let decay = l.linear(&format!("{at}.decay"), WeightClass::Exact, &self.decay, x)?;
        let decay = l.g.one(Op::Softplus, &[decay.into()])?;
        let rate = l.weight(&format!("{at}.rate"), WeightClass::Exact, &self.rate)?;
        let decay = l.g.one(Op::ScaleCols, &[decay.into(), rate.into()])?;
        let beta = l.linear(&format!("{at}.beta"), WeightClass::Exact, &self.beta, x)?;
        let beta = l.g.one(Op::Act(Activation::Sigmoid), &[beta.into()])?;
        let state = l.state(&format!("{at}.s"), StateKind::Recurrent, [self.heads, self.key, self.value]);
        let op = Op::DeltaRule { key_heads: self.key_heads, heads: self.heads };
        let [pos, slot] = places;
        let operands = [state.into(), q.into(), k.into(), v.into(), decay.into(), beta.into(), pos, slot];
        let y = l.g.one(op, &operands)?;
        let y = l.rms(&format!("{at}.o_norm"), self.norm.0, self.heads, &self.norm.1, y)?;
        let gate = l.linear(&format!("{at}.gate"), WeightClass::Attention, &self.gate, x)?;
        let gate = l.g.one(Op::Act(Activation::Silu), &[gate.into()])?;
        let y = l.g.one(Op::Mul, &[y.into(), gate.into()])?;
        l.linear(&format!("{at}.out"), WeightClass::Attention, &self.out, y)
    }
}

impl Base<'_> {
    /// The gated delta rule of a layer, below `linear_attn`: with one matrix for what each of `qkv`, `z`, `b` and `a` names, or with
    /// two, whose rows are grouped by heads of keys.
    ///
    /// # Errors
    /// Keys or tensors that do not fit.
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
        let [key, value] = [c.size(&["linear_key_head_dim"])?, c.size(&["linear_value_head_dim"])?].map(Dim::from);
        let taps = Dim::from(c.size(&["linear_conv_kernel_dim"])?);
        let (keys, values) = (key_heads.times(&key), heads.times(&value));
        let channels = keys.twice().plus(&values);
        let weight = |name: &str| format!("{at}.{name}.weight");
        let plain = |weight| Projection { weight, bias: None };
        let grouped = weight("in_proj_qkvz");
        let [qkv, gate, beta, decay] = if t.has(&grouped) {
            let all = t.take(&grouped, &[&channels.plus(&values), hidden])?;
            let both = t.take(&weight("in_proj_ba"), &[&heads.twice(), hidden])?;
            let (n, each) = (key_heads.n, heads.n / key_heads.n);
            let wide = each * value.n;
            let part = |of: &WeightExpr, start, len| rows_of_heads(of, n, start, len);
            let of = [
                part(&all, 0, key.n),
                part(&all, key.n, key.n),
                part(&all, 2 * key.n, wide),
            ];
            let qkv = WeightExpr::Concat { axis: Axis::Rows, of: of.into() };
            [qkv, part(&all, 2 * key.n + wide, wide), part(&both, 0, each), part(&both, each, each)]
        } else {
            [
                t.take(&weight("in_proj_qkv"), &[&channels, hidden])?,
                t.take(&weight("in_proj_z"), &[&values, hidden])?,
                t.take(&weight("in_proj_b"), &[&heads, hidden])?,
                t.take(&weight("in_proj_a"), &[&heads, hidden])?,
            ]
        };
        let conv = by_channel(t, &weight("conv1d"), &channels, &taps)?;
        let rate = t.take(&format!("{at}.A_log"), &[&heads])?;
        let bias = Some(t.take(&format!("{at}.dt_bias"), &[&heads])?);
        Ok(GatedDelta {
            key_heads: key_heads.n,
            heads: heads.n,
            key: key.n,
            value: value.n,
            taps: taps.n,
            qkv: plain(qkv),
            conv,
            gate: plain(gate),
            decay: Projection { weight: decay, bias },
            rate: WeightExpr::Map { map: Elementwise::NegExp, of: Box::new(rate) },
            beta: plain(beta),
            norm: (self.eps, t.take(&weight("norm"), &[&value])?),
            out: t.projection(&format!("{at}.out_proj"), hidden, &values, false)?,
        })
    }
}

/// Rows `start .. start + len` of each of the heads that a matrix is cut into, one behind the other.
pub(super) fn rows_of_heads(of: &WeightExpr, heads: usize, start: usize, len: usize) -> WeightExpr {
    let split = WeightExpr::Split { heads, of: Box::new(of.clone()) };
    let rows = WeightExpr::Slice { axis: Axis::Rows, start, step: 1, len, of: Box::new(split) };
    WeightExpr::Join(Box::new(rows))
}
