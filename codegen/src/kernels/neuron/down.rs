//! Columns of down of neurons that are active, wherever they lie.

use super::numbers::Row;
use super::{LIST, NEURONS, NeuronAddresses};
use crate::dsl::{F, I, Kb, P};
use crate::kernels::routed::{Expert, expert};
use crate::kernels::{Kernel, NO_GATE_BOUND, NO_NEURONS, Rule};
use crate::machine::Isa;
use crate::spec::Symbol;
use moec_ir::bundle::{Bundle, Part};
use moec_ir::op::DispatchLayout;
use moec_ir::plan::{Grid, Layout};
use moec_ir::types::{Format, GROUP};

/// Columns of a work item: rows so long that memory is read on and on, and yet two items and more for an
/// expert. Their sums stay in the first-level cache.
const COLUMNS: usize = 1024;

/// Neurons whose columns are added together.
const TOGETHER: usize = 4;

/// `[h f32 [slots, I], dispatch i32, w (addresses [E] of Neurons), active lists i32, y out f32 [slots, H]]`:
/// the columns of down of the neurons that [`NeuronUp`](crate::spec::NeuronUp) found active.
#[derive(Clone, Debug, PartialEq)]
pub struct NeuronDown {
    /// Layout of the dispatch table.
    pub layout: DispatchLayout,
    /// Output channels.
    pub hidden: usize,
    /// Neurons `I`.
    pub inter: usize,
    /// Format of the weight.
    pub format: Format,
    /// Whether there are gate bounds.
    pub gate_bound: bool,
}

impl NeuronDown {
    /// Tiles of its columns.
    pub(super) const fn tiles(&self) -> usize {
        self.hidden.div_ceil(COLUMNS)
    }
}

impl Kernel for NeuronDown {
    fn kind(&self) -> &'static str {
        "neuron_down"
    }

    fn name(&self, s: &mut Symbol, _isa: &Isa) {
        s.word("neuron_down").layout(self.layout).num("h", self.hidden).num("i", self.inter);
        s.word(self.format.name()).flag("bounded", self.gate_bound);
    }

    fn grid(&self, _isa: &Isa) -> Grid {
        Grid::Experts { table: 1, tiles: self.tiles() as u32 }
    }

    fn args(&self) -> usize {
        5
    }

    /// The sums of a work item, and the neurons of an expert that are active.
    fn scratch_bytes(&self, _isa: &Isa) -> usize {
        COLUMNS * 4 + (self.inter + 2 * TOGETHER + 1) * 4
    }

    fn layout(&self, _isa: &Isa) -> Option<Layout> {
        Some(Layout::Neurons { gate_bound: self.gate_bound })
    }

    fn rules(&self, _isa: &Isa) -> Vec<Rule> {
        vec![
            (self.hidden > 0 && self.inter > 0, "an extent is zero"),
            (!self.gate_bound || !self.format.is_grouped(), NO_GATE_BOUND),
            (self.format.holds_neurons(), NO_NEURONS),
        ]
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let &Self { layout, hidden, inter, format, gate_bound } = self;
        let [h, dispatch, weights, lists, out] = [0, 1, 2, 3, 4].map(|i| k.arg(i));
        let bundle = Bundle { format, hidden, gate_bound };
        let blocks = inter.div_ceil(NEURONS);
        let sums = Columns { k, hidden, inter, h, out };
        k.expert_tiles(self.tiles(), |active, tile| {
            let e = expert(dispatch, layout, active);
            let matrix = weights.load_address(e.id);
            let addresses = NeuronAddresses { k, bundle, inter, matrix, up_down: None };
            let lists = lists.words(active * (blocks * LIST));
            sums.add(&e, &addresses, lists, [k.i(0), k.i(blocks as i64)], tile);
        });
    }
}

/// Columns of down that are added up.
pub(super) struct Columns<'k> {
    pub(super) k: &'k Kb<'k>,
    /// Output channels.
    pub(super) hidden: usize,
    /// Neurons of an expert.
    pub(super) inter: usize,
    /// Factors of the neurons, `[slots, I]`.
    pub(super) h: P<'k>,
    /// The sums, `[slots, H]`.
    pub(super) out: P<'k>,
}

impl<'k> Columns<'k> {
    /// Adds the listed neurons of some of an expert's blocks, in the columns of a tile; `lists` are those of all
    /// of its blocks. The first block sets the sums.
    pub(super) fn add(
        &self,
        e: &Expert<'k>,
        addresses: &NeuronAddresses<'k>,
        lists: P<'k>,
        blocks: [I<'k>; 2],
        tile: I<'k>,
    ) {
        let &Self { k, hidden, inter, h, out } = self;
        let [from, end] = blocks;
        let (whole, rest) = (hidden / COLUMNS, hidden % COLUMNS);
        let (sums, ids) = (k.scratch(), k.scratch().words(COLUMNS));
        let count = gather(k, lists.words(from * LIST), end - from, ids);
        let first = tile * (COLUMNS / GROUP);
        let part = |columns: usize| {
            k.each(e.first, e.end, 1, |slot| {
                let h = h.words(slot * inter);
                let out = out.words(slot * hidden).words(tile * COLUMNS);
                k.zero(sums, columns.next_multiple_of(GROUP));
                k.when(k.i(0).lt(from), || k.copy(out, sums, columns));
                k.each(0, count, TOGETHER, |i| {
                    let neuron = |j: usize| ids.words(i + j).load_int();
                    let rows: Vec<Row<'k>> =
                        (0..TOGETHER).map(|j| addresses.row(Part::Down, neuron(j))).collect();
                    let later: Vec<Row<'k>> =
                        (0..TOGETHER).map(|j| addresses.row(Part::Down, neuron(TOGETHER + j))).collect();
                    // After the last the list goes on with neurons that add 0.
                    let by: Vec<F<'k>> = (0..TOGETHER)
                        .map(|j| (i + j).lt(count).pick(h.words(neuron(j)).load(), k.f(0.0)))
                        .collect();
                    k.each(0, columns.div_ceil(GROUP), 1, |group| {
                        for row in &later {
                            row.fetch(first + group);
                        }
                        let cells: Vec<P<'k>> = (0..GROUP / k.lanes())
                            .map(|v| sums.words(group * GROUP).words(v * k.lanes()))
                            .collect();
                        let before: Vec<F<'k>> =
                            cells.iter().map(|cell| cell.load_vec(k.span(GROUP))).collect();
                        let after = rows
                            .iter()
                            .zip(&by)
                            .fold(before, |sums, (row, &by)| row.add(by, first + group, &sums));
                        cells.iter().zip(after).for_each(|(cell, sum)| cell.store(sum));
                    });
                });
                k.copy(sums, out, columns);
            });
        };
        match (whole, rest) {
            (0, rest) => part(rest),
            (_, 0) => part(COLUMNS),
            _ => k.branch(tile.lt(k.i(whole as i64)), || part(COLUMNS), || part(rest)),
        }
    }
}

/// Joins the lists of some blocks; the last is repeated as often as a reader looks ahead.
fn gather<'k>(k: &'k Kb<'k>, lists: P<'k>, blocks: I<'k>, to: P<'k>) -> I<'k> {
    to.store_int(k.i32(0));
    let count = k.fold(0, blocks, 1, &[k.i(0)], |block, count| {
        let list = lists.words(block * LIST);
        let more = list.load_int();
        k.each(0, more, 1, |i| to.words(count[0] + i).store_int(list.words(i + 1).load_word()));
        vec![count[0] + more]
    })[0];
    let last = to.words((count - k.i(1)).max(k.i(0))).load_word();
    k.each(0, 2 * TOGETHER, 1, |i| to.words(count + i).store_int(last));
    count
}
