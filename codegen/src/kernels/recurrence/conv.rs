//! [`Op::CausalConv`](moec_ir::Op::CausalConv): each channel's own convolution over the last rows of its
//! sequence.

use super::in_order;
use crate::dsl::Kb;
use crate::gpu::GpuKernel;
use crate::kernels::{Kernel, Rule};
use crate::machine::Isa;
use crate::spec::Symbol;
use moec_ir::op::Activation;
use moec_ir::plan::{Grid, Results};

/// Channels of a work item.
const CHANNELS: usize = 64;

/// `[state, x, w f32 [taps, channels], bias? f32 [channels], pos i32, slot i32, out]`. The state is f32
/// `[slots, taps − 1, channels]`: the rows before, the oldest first.
#[derive(Clone, Debug, PartialEq)]
pub struct CausalConv {
    /// Rows of a call, at most.
    pub rows: usize,
    /// Channels.
    pub channels: usize,
    /// Rows that a result is made of, its own included.
    pub taps: usize,
    /// Function of the result.
    pub act: Option<Activation>,
    /// Whether the bias is there.
    pub bias: bool,
    /// Row distance of `x`.
    pub x_ld: usize,
    /// Row distance of `out`.
    pub out_ld: usize,
}

impl Kernel for CausalConv {
    fn kind(&self) -> &'static str {
        "causal_conv"
    }

    fn name(&self, s: &mut Symbol, _isa: &Isa) {
        s.word(self.kind()).num("t", self.rows).num("c", self.channels).num("k", self.taps);
        s.flag("bias", self.bias).num("x", self.x_ld).num("o", self.out_ld);
        if let Some(act) = self.act {
            s.word(act.name());
        }
    }

    fn grid(&self, _isa: &Isa) -> Grid {
        Grid::Tiles { rows: self.rows as u32, tiles: self.channels.div_ceil(CHANNELS) as u32 }
    }

    fn args(&self) -> usize {
        6 + usize::from(self.bias)
    }

    fn results(&self) -> Results {
        Results::new([0, self.args() - 1]).unwrap_or_default()
    }

    fn rules(&self, _isa: &Isa) -> Vec<Rule> {
        vec![
            (self.rows > 0 && self.channels > 0 && self.taps > 0, "an extent is zero"),
            (self.x_ld >= self.channels && self.out_ld >= self.channels, "rows overlap"),
        ]
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let &Self { rows, channels, taps, act, bias, x_ld, out_ld } = self;
        let (state, x, w) = (k.arg(0), k.arg(1), k.arg(2));
        let bias = bias.then(|| k.arg(3));
        let at = 3 + usize::from(bias.is_some());
        let out = k.arg(at + 2);
        in_order(k, rows, [k.arg(at), k.arg(at + 1)], |tile, row, slot| {
            let conv_state = state.words(slot * ((taps - 1) * channels));
            let (x, out) = (x.words(row * x_ld), out.words(row * out_ld));
            let first = tile * CHANNELS;
            // Whole vectors, but for the last of the last item.
            k.each(first, (first + CHANNELS).min(k.i(channels as i64)), k.lanes(), |c| {
                let span = k.span_before(k.i(channels as i64) - c);
                let mut taken: Vec<_> =
                    (0..taps - 1).map(|j| conv_state.words(c + j * channels).load_vec(span)).collect();
                taken.push(x.words(c).load_vec(span));
                let sum = taken
                    .iter()
                    .enumerate()
                    .fold(k.fv(0.0), |sum, (j, &x)| x.fma(w.words(c + j * channels).load_vec(span), sum));
                let sum = bias.map_or(sum, |b| sum + b.words(c).load_vec(span));
                for (j, &x) in taken.iter().skip(1).enumerate() {
                    conv_state.words(c + j * channels).store_vec(x, span);
                }
                out.words(c).store_vec(act.map_or(sum, |act| sum.activate(act)), span);
            });
        });
    }

    fn on_gpu(&self) -> Option<&dyn GpuKernel> {
        Some(self)
    }
}
