//! A selective state space with a decay for each element: Mamba (Gu and Dao, *Mamba*, section 3.4), with
//! Jamba's norms.

use super::state_space::cut;
use super::{Mix, StateSize};
use crate::common::Base;
use crate::lower::{LowerResult, Lowering, Rows};
use crate::spec::Projection;
use crate::tensors::{Dim, by_channel};
use moec_base::error::Result;
use moec_ir::{Activation, Axis, Elementwise, Graph, Op, Operand, Part, StateKind, WeightClass, WeightExpr};

/// The mixer. `C` and `N` are [`channels`](Self::channels) and [`state`](Self::state).
#[derive(Clone, Debug, PartialEq)]
pub struct SelectiveScan {
    /// Channels.
    pub channels: usize,
    /// Elements of the state per channel.
    pub state: usize,
    /// Channels of the low-rank input of the step.
    pub rank: usize,
    /// Rows that the convolution reads, with the current one.
    pub taps: usize,
    /// Projection to the convolved channels, `[C, hidden]`.
    pub input: Projection,
    /// Gate, `[C, hidden]`.
    pub gate: Projection,
    /// `[taps, C]`
    pub conv: WeightExpr,
    /// Its bias.
    pub conv_bias: Option<WeightExpr>,
    /// Step, b and c, `[rank + 2·N, C]`.
    pub select: Projection,
    /// Norms of these three: epsilon and weights.
    pub norms: (f32, [WeightExpr; 3]),
    /// Step, `[C, rank]`, with a bias.
    pub step: Projection,
    /// Factor from the step to the logarithm of decay, below 0, `[N, C]`.
    pub rate: WeightExpr,
    /// Factor on x, which is added to the result, `[C]`.
    pub skip: WeightExpr,
    /// Output, `[hidden, C]`.
    pub out: Projection,
}

impl Mix for SelectiveScan {
    fn part(&self) -> Part {
        Part::MIXER
    }

    fn weights(&self) -> Vec<(WeightClass, &WeightExpr)> {
        let small = [&self.conv, &self.rate, &self.skip].into_iter().chain(&self.conv_bias);
        let matrices = [&self.input, &self.gate, &self.select, &self.step, &self.out];
        super::projections(matrices).chain(super::exact(small.chain(&self.norms.1))).collect()
    }

    fn state_size(&self) -> StateSize {
        StateSize { folded: ((self.state + self.taps - 1) * self.channels) as u64, ..StateSize::default() }
    }

    fn lower<'a>(&'a self, l: &mut Lowering<'a, '_>, at: &str, rows: Rows) -> LowerResult {
        const CLASS: WeightClass = WeightClass::Attention;
        let (x, at) = (rows.normed, format!("{at}.mixer"));
        let [pos, slot] = [Graph::POS, Graph::SLOT].map(Operand::from);
        let gate = l.linear(&format!("{at}.gate"), CLASS, &self.gate, x)?;
        let u = l.linear(&format!("{at}.in"), CLASS, &self.input, x)?;
        let conv_state =
            l.state(&format!("{at}.conv"), StateKind::Convolution, [1, self.taps - 1, self.channels]);
        let conv = l.weight(&format!("{at}.conv"), WeightClass::Exact, &self.conv)?;
        let mut operands: Vec<Operand> = vec![conv_state.into(), u.into(), conv.into()];
        if let Some(bias) = &self.conv_bias {
            operands.push(l.weight(&format!("{at}.conv.bias"), WeightClass::Exact, bias)?.into());
        }
        operands.extend([pos, slot]);
        let bias = self.conv_bias.is_some();
        let u = l.g.one(Op::CausalConv { act: Some(Activation::Silu), bias }, &operands)?;
        let all = l.linear(&format!("{at}.select"), CLASS, &self.select, u)?;
        let (eps, norms) = &self.norms;
        let mut part = |name: &str, weight, start, len| {
            let part = l.g.one(Op::Slice { heads: 1, start, len }, &[all.into()])?;
            l.rms(&format!("{at}.{name}_norm"), *eps, 1, weight, part)
        };
        let [step, b, c] = norms;
        let step = part("step", Some(step), 0, self.rank)?;
        let b = part("b", Some(b), self.rank, self.state)?;
        let c = part("c", Some(c), self.rank + self.state, self.state)?;
        let step = l.linear(&format!("{at}.step"), CLASS, &self.step, step)?;
        let step = l.g.one(Op::Softplus, &[step.into()])?;
        let rate = l.weight(&format!("{at}.rate"), WeightClass::Exact, &self.rate)?;
        let state = l.state(&format!("{at}.s"), StateKind::Recurrent, [1, self.state, self.channels]);
        let operands = [state.into(), c.into(), b.into(), u.into(), step.into(), rate.into(), pos, slot];
        let y = l.g.one(Op::SelectiveScan, &operands)?;
        let skip = l.weight(&format!("{at}.skip"), WeightClass::Exact, &self.skip)?;
        let skipped = l.g.one(Op::ScaleCols, &[u.into(), skip.into()])?;
        let y = l.g.one(Op::Add, &[y.into(), skipped.into()])?;
        let gate = l.g.one(Op::Act(Activation::Silu), &[gate.into()])?;
        let y = l.g.one(Op::Mul, &[y.into(), gate.into()])?;
        l.linear(&format!("{at}.out"), CLASS, &self.out, y)
    }
}

/// Sizes of Mamba's mixers, and flags of biases.
#[derive(Clone, Debug)]
pub struct ScanSizes {
    /// Channels.
    pub channels: Dim,
    /// Elements of the state per channel.
    pub state: Dim,
    /// Channels of the low-rank input of the step.
    pub rank: Dim,
    /// Taps.
    pub taps: Dim,
    /// Whether the convolution has a bias.
    pub conv_bias: bool,
    /// Whether the input and output matrices have biases.
    pub bias: bool,
}

impl Base<'_> {
    /// Reads Mamba of a layer, below `at`.
    ///
    /// # Errors
    /// Fails if tensors do not fit the config.
    pub fn selective_scan(&self, at: &str, sizes: &ScanSizes) -> Result<SelectiveScan> {
        let (t, hidden) = (&self.tensors, &self.hidden);
        let ScanSizes { channels, state, rank, taps, conv_bias, bias } = sizes;
        let name = |name: &str| format!("{at}.{name}");
        let input = t.projection(&name("in_proj"), &channels.doubled(), hidden, *bias)?;
        let half = |start| Projection {
            weight: cut(&input.weight, Axis::Rows, start, channels.n),
            bias: input.bias.as_ref().map(|bias| cut(bias, Axis::Cols, start, channels.n)),
        };
        let norm = |part: &str, width| t.take(&name(&format!("{part}_layernorm.weight")), &[width]);
        let rate = t.take_mapped(&name("A_log"), &[channels, state], Elementwise::NegExp)?;
        Ok(SelectiveScan {
            channels: channels.n,
            state: state.n,
            rank: rank.n,
            taps: taps.n,
            input: half(0),
            gate: half(channels.n),
            conv: by_channel(t, &name("conv1d.weight"), channels, taps)?,
            conv_bias: t.take_if(*conv_bias, &name("conv1d.bias"), &[channels])?,
            select: t.projection(&name("x_proj"), &rank.plus(&state.doubled()), channels, false)?,
            norms: (self.eps, [norm("dt", rank)?, norm("b", state)?, norm("c", state)?]),
            step: t.projection(&name("dt_proj"), channels, rank, true)?,
            rate: WeightExpr::Transpose(Box::new(rate)),
            skip: t.take(&name("D"), &[channels])?,
            out: t.projection(&name("out_proj"), hidden, channels, *bias)?,
        })
    }
}
