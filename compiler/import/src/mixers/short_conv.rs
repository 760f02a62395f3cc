//! A short convolution between two gates, as in LFM2: `out(c · conv(b · x))` with `[b | c | x] = in(rows)`.

use super::{Mix, StateSize};
use crate::common::Base;
use crate::lower::{LowerResult, Lowering, Rows};
use crate::spec::Projection;
use crate::tensors::{Dim, by_channel, taps};
use moec_base::error::Result;
use moec_ir::{Graph, Op, Operand, Part, StateKind, WeightClass, WeightExpr};

/// The mixer.
#[derive(Clone, Debug, PartialEq)]
pub struct ShortConv {
    /// Channels.
    pub channels: usize,
    /// Rows that the convolution reads, with the current one.
    pub taps: usize,
    /// Projection to both gates and the convolution's input, `[3·channels, hidden]`.
    pub input: Projection,
    /// `[taps, channels]`
    pub conv: WeightExpr,
    /// Its bias, `[channels]`.
    pub conv_bias: Option<WeightExpr>,
    /// Output, `[hidden, channels]`.
    pub out: Projection,
}

impl Mix for ShortConv {
    fn part(&self) -> Part {
        Part::MIXER
    }

    fn weights(&self) -> Vec<(WeightClass, &WeightExpr)> {
        let exact = [&self.conv].into_iter().chain(&self.conv_bias);
        super::projections([&self.input, &self.out]).chain(super::exact(exact)).collect()
    }

    fn state_size(&self) -> StateSize {
        StateSize { folded: ((self.taps - 1) * self.channels) as u64, ..StateSize::default() }
    }

    fn lower<'a>(&'a self, l: &mut Lowering<'a, '_>, at: &str, rows: Rows) -> LowerResult {
        let (at, n) = (format!("{at}.mixer"), self.channels);
        let all = l.linear(&format!("{at}.in"), WeightClass::Attention, &self.input, rows.normed)?;
        let mut part = |start| l.g.one(Op::Slice { heads: 1, start, len: n }, &[all.into()]);
        let (input_gate, output_gate, x) = (part(0)?, part(n)?, part(2 * n)?);
        let x = l.g.one(Op::Mul, &[input_gate.into(), x.into()])?;
        let conv_state = l.state(&format!("{at}.conv"), StateKind::Convolution, [1, self.taps - 1, n]);
        let mut operands = vec![
            conv_state.into(),
            x.into(),
            l.weight(&format!("{at}.conv"), WeightClass::Exact, &self.conv)?.into(),
        ];
        if let Some(bias) = &self.conv_bias {
            operands.push(l.weight(&format!("{at}.conv.bias"), WeightClass::Exact, bias)?.into());
        }
        operands.extend([Graph::POS, Graph::SLOT].map(Operand::from));
        let y = l.g.one(Op::CausalConv { act: None, bias: self.conv_bias.is_some() }, &operands)?;
        let y = l.g.one(Op::Mul, &[output_gate.into(), y.into()])?;
        l.linear(&format!("{at}.out"), WeightClass::Attention, &self.out, y)
    }
}

impl Base<'_> {
    /// Reads the short convolution of a layer, below `conv`.
    ///
    /// # Errors
    /// Fails if keys or tensors do not fit.
    pub fn short_conv(&self, layer: usize, bias: bool) -> Result<ShortConv> {
        let (t, hidden) = (&self.tensors, &self.hidden);
        let at = format!("{}.conv", self.layer(layer));
        let taps = taps(self.config, &["conv_L_cache"])?;
        let wide = hidden.times(&Dim::new(3, "two gates and what is convolved"));
        Ok(ShortConv {
            channels: hidden.n,
            taps: taps.n,
            input: t.projection(&format!("{at}.in_proj"), &wide, hidden, bias)?,
            conv: by_channel(t, &format!("{at}.conv.weight"), hidden, &taps)?,
            conv_bias: t.take_if(bias, &format!("{at}.conv.bias"), &[hidden])?,
            out: t.projection(&format!("{at}.out_proj"), hidden, hidden, bias)?,
        })
    }
}
