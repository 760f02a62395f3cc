//! A state space with scalar decay: Mamba-2 (Dao and Gu, *Transformers are SSMs*, section 7.1).

use super::{Mix, StateSize};
use crate::common::Base;
use crate::lower::{LowerResult, Lowering, Rows};
use crate::spec::Projection;
use crate::tensors::{Dim, by_channel};
use moec_base::error::Result;
use moec_ir::{Activation, Axis, Elementwise, Graph, Op, Operand, Part, StateKind, WeightClass, WeightExpr};

/// The mixer. `P` and `N` are [`dim`](Self::dim) and [`state`](Self::state).
#[derive(Clone, Debug, PartialEq)]
pub struct StateSpace {
    /// Heads.
    pub heads: usize,
    /// Channels of a head.
    pub dim: usize,
    /// Groups of heads that share `b` and `c`.
    pub groups: usize,
    /// Channels of `b` and of `c`.
    pub state: usize,
    /// Rows that the convolution reads, with the current one.
    pub taps: usize,
    /// Gate, `[heads·P, hidden]`.
    pub gate: Projection,
    /// Projection to the convolved channels: x, b, c, `[heads·P + 2·groups·N, hidden]`.
    pub xbc: Projection,
    /// Step, `[heads, hidden]`, with a bias.
    pub step: Projection,
    /// `[taps, heads·P + 2·groups·N]`
    pub conv: WeightExpr,
    /// Its bias.
    pub conv_bias: Option<WeightExpr>,
    /// Factor from the step to the logarithm of decay, below 0, `[heads]`.
    pub rate: WeightExpr,
    /// Factor on x, which is added to the result, `[heads·P]`.
    pub skip: WeightExpr,
    /// Norm of the gated result, group by group: epsilon, and weight `[heads·P]`.
    pub norm: (f32, WeightExpr),
    /// Output, `[hidden, heads·P]`.
    pub out: Projection,
}

impl StateSpace {
    /// Channels of the convolution.
    fn channels(&self) -> usize {
        self.heads * self.dim + 2 * self.groups * self.state
    }
}

impl Mix for StateSpace {
    fn part(&self) -> Part {
        Part::MIXER
    }

    fn weights(&self) -> Vec<(WeightClass, &WeightExpr)> {
        let small = [&self.step.weight, &self.conv, &self.rate, &self.skip, &self.norm.1];
        let small = small.into_iter().chain(&self.step.bias).chain(&self.conv_bias);
        super::projections([&self.gate, &self.xbc, &self.out]).chain(super::exact(small)).collect()
    }

    fn state_size(&self) -> StateSize {
        let state = self.heads * self.state * self.dim;
        StateSize { folded: (state + (self.taps - 1) * self.channels()) as u64, ..StateSize::default() }
    }

    fn lower<'a>(&'a self, l: &mut Lowering<'a, '_>, at: &str, rows: Rows) -> LowerResult {
        const CLASS: WeightClass = WeightClass::Exact;
        let (x, at) = (rows.normed, format!("{at}.mixer"));
        let pos_and_slot = [Graph::POS, Graph::SLOT].map(Operand::from);
        let gate = l.linear(&format!("{at}.gate"), WeightClass::Attention, &self.gate, x)?;
        let xbc = l.linear(&format!("{at}.xbc"), WeightClass::Attention, &self.xbc, x)?;
        let conv_state =
            l.state(&format!("{at}.conv"), StateKind::Convolution, [1, self.taps - 1, self.channels()]);
        let mut operands: Vec<Operand> =
            vec![conv_state.into(), xbc.into(), l.weight(&format!("{at}.conv"), CLASS, &self.conv)?.into()];
        if let Some(bias) = &self.conv_bias {
            operands.push(l.weight(&format!("{at}.conv.bias"), CLASS, bias)?.into());
        }
        operands.extend(pos_and_slot);
        let bias = self.conv_bias.is_some();
        let xbc = l.g.one(Op::CausalConv { act: Some(Activation::Silu), bias }, &operands)?;
        let (wide, narrow) = (self.heads * self.dim, self.groups * self.state);
        let mut part = |start, len| l.g.one(Op::Slice { heads: 1, start, len }, &[xbc.into()]);
        let (u, b, c) = (part(0, wide)?, part(wide, narrow)?, part(wide + narrow, narrow)?);
        let step = l.linear(&format!("{at}.step"), CLASS, &self.step, x)?;
        let step = l.g.one(Op::Softplus, &[step.into()])?;
        let rate = l.weight(&format!("{at}.rate"), CLASS, &self.rate)?;
        let decay = l.g.one(Op::ScaleCols, &[step.into(), rate.into()])?;
        let state = l.state(&format!("{at}.s"), StateKind::Recurrent, [self.heads, self.state, self.dim]);
        let op = Op::Ssd { groups: self.groups, heads: self.heads };
        let [pos, slot] = pos_and_slot;
        let y =
            l.g.one(op, &[state.into(), c.into(), b.into(), u.into(), decay.into(), step.into(), pos, slot])?;
        let skip = l.weight(&format!("{at}.skip"), CLASS, &self.skip)?;
        let skipped = l.g.one(Op::ScaleCols, &[u.into(), skip.into()])?;
        let y = l.g.one(Op::Add, &[y.into(), skipped.into()])?;
        let gate = l.g.one(Op::Act(Activation::Silu), &[gate.into()])?;
        let y = l.g.one(Op::Mul, &[y.into(), gate.into()])?;
        // The norm's weight differs by channel; groups do not share it.
        let y = l.g.one(Op::RmsNorm { eps: self.norm.0, groups: self.groups, weight: false }, &[y.into()])?;
        let weight = l.weight(&format!("{at}.o_norm"), CLASS, &self.norm.1)?;
        let y = l.g.one(Op::ScaleCols, &[y.into(), weight.into()])?;
        l.linear(&format!("{at}.out"), WeightClass::Attention, &self.out, y)
    }
}

/// Sizes of Mamba-2's mixers, and flags of biases.
#[derive(Clone, Debug)]
pub struct StateSpaceSizes {
    /// Heads.
    pub heads: Dim,
    /// Channels of a head.
    pub dim: Dim,
    /// Groups.
    pub groups: Dim,
    /// Channels of `b` and of `c`.
    pub state: Dim,
    /// Taps.
    pub taps: Dim,
    /// Whether the convolution has a bias.
    pub conv_bias: bool,
    /// Whether both matrices have biases.
    pub bias: bool,
}

impl Base<'_> {
    /// Reads Mamba-2 of a layer, below `at`.
    ///
    /// # Errors
    /// Fails if tensors do not fit the config.
    pub fn state_space(&self, at: &str, sizes: &StateSpaceSizes) -> Result<StateSpace> {
        const LIMIT: &str = "time_step_limit";
        if let Some(limit) = self.config.value(LIMIT) {
            // JSON has no infinities.
            let bounds = limit.as_array().map(Vec::as_slice);
            if !matches!(bounds, Some([low, high]) if low.as_f64() == Some(0.0) && !high.is_number()) {
                return Err(self.config.unsupported(LIMIT, limit.to_string(), &["from 0 to infinity"]));
            }
        }
        let (t, hidden) = (&self.tensors, &self.hidden);
        let StateSpaceSizes { heads, dim, groups, state, taps, conv_bias, bias } = sizes;
        let name = |name: &str| format!("{at}.{name}");
        let wide = heads.times(dim);
        let channels = wide.plus(&groups.times(state).doubled());
        let all = wide.plus(&channels).plus(heads);
        let input = t.projection(&name("in_proj"), &all, hidden, *bias)?;
        let part = |start, len| Projection {
            weight: cut(&input.weight, Axis::Rows, start, len),
            bias: input.bias.as_ref().map(|bias| cut(bias, Axis::Cols, start, len)),
        };
        let mut step = part(wide.n + channels.n, heads.n);
        if step.bias.is_some() {
            return Err(moec_base::error::Error::limit(format!(
                "`{at}.in_proj` has a bias, which is not supported"
            )));
        }
        step.bias = Some(t.take(&name("dt_bias"), &[heads])?);
        let rate = t.take_mapped(&name("A_log"), &[heads], Elementwise::NegExp)?;
        let skip = WeightExpr::Repeat { each: dim.n, of: Box::new(t.take(&name("D"), &[heads])?) };
        Ok(StateSpace {
            heads: heads.n,
            dim: dim.n,
            groups: groups.n,
            state: state.n,
            taps: taps.n,
            gate: part(0, wide.n),
            xbc: part(wide.n, channels.n),
            step,
            conv: by_channel(t, &name("conv1d.weight"), &channels, taps)?,
            conv_bias: t.take_if(*conv_bias, &name("conv1d.bias"), &[&channels])?,
            rate,
            skip,
            norm: (self.eps, t.take(&name("norm.weight"), &[&wide])?),
            out: t.projection(&name("out_proj"), hidden, &wide, *bias)?,
        })
    }
}

/// A range of an axis.
pub(super) fn cut(of: &WeightExpr, axis: Axis, start: usize, len: usize) -> WeightExpr {
    WeightExpr::Slice { axis, start, step: 1, len, of: Box::new(of.clone()) }
}
