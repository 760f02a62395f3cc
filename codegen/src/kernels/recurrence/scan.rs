//! [`Op::SelectiveScan`](moec_ir::Op::SelectiveScan): a selective state space, row by row (Gu and Dao,
//! *Mamba*, algorithm 2).
//!
//! A work item has a panel of channels, whose part of the state stays in the first-level cache from row to
//! row. Of each row it goes over it once: the state decays, takes what the row adds, and is read.

use super::delta::{Panel, VECTORS, columns};
use super::in_order;
use crate::dsl::{F, Kb, Span};
use crate::gpu::GpuKernel;
use crate::kernels::{Kernel, Rule};
use crate::machine::Isa;
use crate::spec::Symbol;
use moec_ir::plan::{Grid, Results};

/// `[state, c, b, x, dt, rate f32 [state, channels], pos i32, slot i32, out]`. The state is f32, ordered as
/// [`delta_order`](super::delta_order) says.
#[derive(Clone, Debug, PartialEq)]
pub struct SelectiveScan {
    /// Rows of a call, at most.
    pub rows: usize,
    /// Channels.
    pub channels: usize,
    /// Numbers that a channel keeps, even.
    pub state: usize,
    /// Row distances of `c`, `b`, `x` and `dt`.
    pub ld: [usize; 4],
    /// Row distance of `out`.
    pub out_ld: usize,
}

impl Kernel for SelectiveScan {
    fn kind(&self) -> &'static str {
        "selective_scan"
    }

    fn name(&self, s: &mut Symbol, _isa: &Isa) {
        s.word(self.kind()).num("t", self.rows).num("n", self.channels).num("s", self.state);
        for (tag, ld) in ["c", "b", "x", "d"].into_iter().zip(self.ld) {
            s.num(tag, ld);
        }
        s.num("o", self.out_ld);
    }

    fn grid(&self, isa: &Isa) -> Grid {
        Grid::Tiles { rows: self.rows as u32, tiles: self.channels.div_ceil(columns(isa)) as u32 }
    }

    fn args(&self) -> usize {
        9
    }

    fn results(&self) -> Results {
        Results::new([0, 8]).unwrap_or_default()
    }

    fn rules(&self, _isa: &Isa) -> Vec<Rule> {
        let [c, b, x, dt] = self.ld;
        vec![
            (self.rows > 0 && self.channels > 0 && self.state > 0, "an extent is zero"),
            (self.state.is_multiple_of(2), "a state of an odd number of rows"),
            (c >= self.state && b >= self.state && x >= self.channels && dt >= self.channels, "rows overlap"),
            (self.out_ld >= self.channels, "rows of the output overlap"),
        ]
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let &Self { rows, channels, state, ld: [c_ld, b_ld, x_ld, dt_ld], out_ld } = self;
        let width = columns(&k.isa);
        let panels = channels.div_ceil(width);
        in_order(k, rows, [k.arg(6), k.arg(7)], |panel, row, slot| {
            let first = panel * width;
            let at = k.arg(0).words(slot * (panels * width * state) + panel * (width * state));
            let s = Panel { k, at, width, key: state };
            let span = |v: usize| k.span_before(k.i(channels as i64) - first - v * k.lanes());
            let part = |arg: usize, ld: usize| -> Vec<F<'k>> {
                let from = k.arg(arg).words(row * ld + first);
                (0..VECTORS).map(|v| from.words(v * k.lanes()).load_vec(span(v))).collect()
            };
            let (x, dt) = (part(3, x_ld), part(4, dt_ld));
            let added: Vec<F<'k>> = x.iter().zip(&dt).map(|(&x, &dt)| x * dt).collect();
            let (c, b) = (k.arg(1).words(row * c_ld), k.arg(2).words(row * b_ld));
            let y = s.sums(|i, v, sum| {
                let rate = k.arg(5).words(i * channels + first).words(v * k.lanes()).load_vec(span(v));
                let old = s.row(i, v) * (rate * dt[v]).exp();
                let new = b.words(i).load().splat().fma(added[v], old);
                s.address(i, v).store_vec(new, Span::Full);
                new.fma(c.words(i).load().splat(), sum)
            });
            let out = k.arg(8).words(row * out_ld + first);
            for (v, y) in y.into_iter().enumerate() {
                out.words(v * k.lanes()).store_vec(y, span(v));
            }
        });
    }

    fn on_gpu(&self) -> Option<&dyn GpuKernel> {
        Some(self)
    }
}
