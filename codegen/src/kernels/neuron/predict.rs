//! Predicted activity of neurons, before their gates (PowerInfer-2, §2.2 and §4.1.2): [`moec_ir::Predictor`].
//!
//! The product of a row with a low-rank matrix stays in scratch until the neurons of a work item have been
//! multiplied by it; without that matrix they multiply the row itself. A margin moves the threshold to 0.

use super::numbers::{Row, dot};
use super::{AHEAD, Bundle, LIST, NEURONS, list, predicted_inactive};
use crate::dsl::{I, Kb, LINE, P};
use crate::kernels::routed::expert;
use crate::kernels::{Kernel, NO_NEURONS, Rule};
use crate::machine::Isa;
use crate::spec::Symbol;
use moec_ir::op::DispatchLayout;
use moec_ir::plan::{Grid, Layout, Results};
use moec_ir::types::Format;

/// Bytes of the product of a row with `right`.
const fn small(rank: usize) -> usize {
    (rank * 4).next_multiple_of(LINE)
}

/// A matrix whose rows are whole cache lines.
struct Matrix<'k> {
    k: &'k Kb<'k>,
    format: Format,
    cols: usize,
    at: P<'k>,
}

impl<'k> Matrix<'k> {
    /// Row `i`.
    fn row(&self, i: I<'k>) -> Row<'k> {
        let pitch = Bundle { format: self.format, hidden: self.cols, gate_bound: false }.part_bytes();
        Row::part(self.k, self.format, self.cols, self.at.bytes(i * pitch))
    }
}

/// `[x f32, dispatch i32, right (addresses [E] of Gates)?, left or codes (addresses [E] of Gates), margin
/// (addresses [E] of Gates), h out f32 [slots, I], lists out i32]`: the result of a predictor
/// ([`moec_ir::Predictor`]) for every neuron of the experts that rows chose: above 0 if it takes the neuron to
/// be active. The lists have the neurons that it takes to be active for any row of their expert.
#[derive(Clone, Debug, PartialEq)]
pub struct NeuronPredict {
    /// Layout of the dispatch table.
    pub layout: DispatchLayout,
    /// Input channels.
    pub hidden: usize,
    /// Neurons `I`.
    pub inter: usize,
    /// Rows of `right`, if there is one.
    pub rank: Option<usize>,
    /// Format of `right`, `left` and codes; margins are f32.
    pub format: Format,
    /// Row distance of `x`, in words.
    pub x_ld: usize,
    /// Number of hot neurons, the first ones of each expert, which another unit computes: they are not
    /// predicted.
    pub hot: Option<usize>,
}

impl Kernel for NeuronPredict {
    fn kind(&self) -> &'static str {
        "neuron_predict"
    }

    fn name(&self, s: &mut Symbol, _isa: &Isa) {
        s.word("neuron_predict").layout(self.layout).num("h", self.hidden).num("i", self.inter);
        s.option("rank", self.rank).word(self.format.name()).num("x", self.x_ld).option("hot", self.hot);
    }

    fn grid(&self, _isa: &Isa) -> Grid {
        Grid::Experts { table: 1, tiles: self.inter.div_ceil(NEURONS) as u32 }
    }

    fn args(&self) -> usize {
        6 + usize::from(self.rank.is_some())
    }

    fn results(&self) -> Results {
        Results::last(2, self.args())
    }

    /// Products of all rows with `right`.
    fn scratch_bytes(&self, _isa: &Isa) -> usize {
        self.rank.map_or(0, |rank| self.layout.rows * small(rank))
    }

    fn layout(&self, _isa: &Isa) -> Option<Layout> {
        Some(Layout::Gates)
    }

    fn rules(&self, _isa: &Isa) -> Vec<Rule> {
        vec![
            (self.hidden > 0 && self.inter > 0 && self.rank != Some(0), "an extent is zero"),
            (self.x_ld >= self.hidden, "rows overlap"),
            (self.format.holds_neurons(), NO_NEURONS),
            (self.hot.is_none_or(|hot| (1..self.inter).contains(&hot)), "no neuron is hot, or none is cold"),
        ]
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let &Self { layout, hidden, inter, rank, format, x_ld, hot } = self;
        let (x, dispatch) = (k.arg(0), k.arg(1));
        let second = if rank.is_some() { 3 } else { 2 };
        let [left, margins, h, lists] = [0, 1, 2, 3].map(|i| k.arg(second + i));
        let (blocks, cold) = (inter.div_ceil(NEURONS), k.i(hot.unwrap_or(0) as i64));
        k.tiles_by_expert(blocks, |active, [from, end]| {
            let e = expert(dispatch, layout, active);
            let of = |slot: I<'k>| {
                let token = dispatch.words(layout.token()).words(slot).load_int();
                x.words(token * x_ld)
            };
            let product = |slot: I<'k>, rank: usize| k.scratch().bytes((slot - e.first) * small(rank));
            if let Some(rank) = rank {
                let right = Matrix { k, format, cols: hidden, at: k.arg(2).load_address(e.id) };
                k.each(0, rank, 1, |i| {
                    let row = right.row(i);
                    k.each(e.first, e.end, 1, |slot| {
                        product(slot, rank).words(i).store(dot(k, &row, of(slot), Some(AHEAD)));
                    });
                });
            }
            let left = Matrix { k, format, cols: rank.unwrap_or(hidden), at: left.load_address(e.id) };
            let margins = margins.load_address(e.id);
            let last = (end * NEURONS).min(k.i(inter as i64));
            k.each((from * NEURONS).max(cold).min(last), last, 1, |neuron| {
                let (row, margin) = (left.row(neuron), margins.words(neuron).load());
                k.each(e.first, e.end, 1, |slot| {
                    let factor = rank.map_or_else(|| of(slot), |rank| product(slot, rank));
                    let prediction = dot(k, &row, factor, Some(AHEAD)) + margin;
                    h.words(slot * inter).words(neuron).store(prediction);
                });
            });
            k.each(from, end, 1, |block| {
                let end = (block * NEURONS + NEURONS).min(k.i(inter as i64));
                let first = (block * NEURONS).max(cold).min(end);
                let is_active = |_, neuron: I<'k>| {
                    let found = k.fold(e.first, e.end, 1, &[k.i(0)], |slot, found| {
                        let prediction = h.words(slot * inter).words(neuron).load();
                        vec![predicted_inactive(k, prediction).pick_int(found[0], k.i(1))]
                    });
                    k.i(0).lt(found[0])
                };
                let to = lists.words((active * blocks + block) * LIST);
                list(k, end - first, to, |i| first + i, is_active);
            });
        });
    }
}
