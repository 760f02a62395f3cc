//! Clusters of neurons whose up and down come from disk, at any address (PowerInfer-2, §4.3 and §4.4). Gates
//! are in memory, or come from disk, too: those of the neurons that a predictor listed.
//!
//! Work items are gates, up and down of single blocks. The store of neurons orders them as reads end: when the
//! gates of a block are known, it reads up and down of the active neurons, and meanwhile threads compute other
//! items of any matrix. Sums and their order are those of [`NeuronUp`] and [`NeuronDown`], so the bits are the
//! same.

use super::down::Columns;
use super::{AHEAD, Call, LIST, NEURONS, NeuronAddresses, NeuronDown, NeuronUp, UpDownRows, list};
use crate::dsl::{I, Kb};
use crate::kernels::routed::expert;
use crate::kernels::{Kernel, Rule};
use crate::machine::Isa;
use crate::spec::{ComputeType, Symbol};
use moec_ir::op::{DispatchLayout, Glu};
use moec_ir::plan::{Grid, Layout, Results};
use moec_ir::types::Format;

/// `[x, dispatch i32, gates (addresses [E] of Gates, or [E·I] of Bundles), w (addresses [E·I] of UpDown or
/// Bundles), h f32 [slots, I], active lists i32, y out f32 [slots, H]]`: experts by neurons in items of
/// [`Grid::Clusters`]. `h` and the lists are written, too: they hold gates, and then what down multiplies, of the
/// active neurons. Bundles are those of neurons that a predictor listed: then `h` holds predictions before, and
/// the lists theirs.
#[derive(Clone, Debug, PartialEq)]
pub struct NeuronClusters {
    /// Layout of the dispatch table.
    pub layout: DispatchLayout,
    /// Input and output channels.
    pub hidden: usize,
    /// Neurons `I`.
    pub inter: usize,
    /// Format of the weights.
    pub format: Format,
    /// Format of `x`, as of [`NeuronUp`].
    pub compute: ComputeType,
    /// Row distance of `x`, in words.
    pub x_ld: usize,
    /// Activation that joins gate and up.
    pub glu: Glu,
    /// Number of hot neurons, the first ones of each expert, which another unit computes: they are not
    /// listed.
    pub hot: Option<usize>,
    /// Whether gates are stored with up and down, at any address, and a predictor listed those that are read.
    pub bundled: bool,
}

impl NeuronClusters {
    /// Gates and up as one kernel, of neurons that are stored block by block.
    fn up(&self) -> NeuronUp {
        let &Self { layout, hidden, inter, format, compute, x_ld, glu, bundled: predicted, .. } = self;
        NeuronUp { layout, hidden, inter, format, compute, gate_bound: false, predicted, x_ld, glu }
    }

    /// Down of such neurons.
    fn down(&self) -> NeuronDown {
        let &Self { layout, hidden, inter, format, .. } = self;
        NeuronDown { layout, hidden, inter, format, gate_bound: false }
    }

    /// Blocks of an expert.
    const fn blocks(&self) -> usize {
        self.inter.div_ceil(NEURONS)
    }
}

impl Kernel for NeuronClusters {
    fn kind(&self) -> &'static str {
        "neuron_clusters"
    }

    fn name(&self, s: &mut Symbol, _isa: &Isa) {
        self.up().parameters(s.word("neuron_clusters"));
        s.option("hot", self.hot);
    }

    fn grid(&self, _isa: &Isa) -> Grid {
        Grid::Clusters { table: 1, blocks: self.blocks() as u32, columns: self.down().tiles() as u32 }
    }

    fn args(&self) -> usize {
        7
    }

    fn results(&self) -> Results {
        Results::last(3, self.args())
    }

    fn scratch_bytes(&self, isa: &Isa) -> usize {
        self.up().scratch_bytes(isa).max(self.down().scratch_bytes(isa))
    }

    /// Layout of the gates.
    fn layout(&self, _isa: &Isa) -> Option<Layout> {
        Some(if self.bundled { Layout::Bundles } else { Layout::Gates })
    }

    fn rules(&self, isa: &Isa) -> Vec<Rule> {
        let mut rules = self.up().rules(isa);
        rules.push((
            self.hot.is_none_or(|hot| (1..self.inter).contains(&hot)),
            "no neuron is hot, or none is cold",
        ));
        rules.push((!self.bundled || self.hot.is_none(), "a predictor lists no hot neurons"));
        rules
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let &Self { layout, hidden, inter, bundled, .. } = self;
        let [dispatch, gates, up_down, h, lists, out] = [1, 2, 3, 4, 5, 6].map(|i| k.arg(i));
        let call = Call::new(k, &self.up(), h);
        let (blocks, columns) = (self.blocks(), self.down().tiles());
        k.tiles_by_expert(blocks * (2 + columns), |active, [from, end]| {
            let e = expert(dispatch, layout, active);
            let lists = lists.words(active * (blocks * LIST));
            let rows = UpDownRows { at: up_down, first: e.id * inter, gates: bundled };
            let matrix = if bundled { up_down } else { gates.load_address(e.id) };
            let addresses = NeuronAddresses { k, bundle: call.bundle, inter, matrix, up_down: Some(rows) };
            // The blocks of this call whose items of a kind begin at `first`.
            let own =
                |first: I<'k>| [from, end].map(|item| (item - first).max(k.i(0)).min(k.i(blocks as i64)));
            k.when(from.lt(k.i(2 * blocks as i64)), || {
                let rows = call.rows(&e);
                let [first, last] = own(k.i(0));
                k.each(first, last, 1, |block| {
                    let to = lists.words(block * LIST);
                    if bundled {
                        call.activated(&e, &addresses, &rows, to, |_| {});
                        return;
                    }
                    let end = (block * NEURONS + NEURONS).min(k.i(inter as i64));
                    let first = (block * NEURONS).max(k.i(self.hot.unwrap_or(0) as i64)).min(end);
                    let is_active = |_, neuron| call.activates(&e, &addresses, &rows, neuron, Some(AHEAD));
                    list(k, end - first, to, |i| first + i, is_active);
                });
                let [first, last] = own(k.i(blocks as i64));
                k.each(first, last, 1, |block| {
                    let list = lists.words(block * LIST);
                    call.ups(&e, &addresses, &rows, list, list.load_int());
                });
            });
            let sums = Columns { k, hidden, inter, h, out };
            k.each(0, columns, 1, |tile| {
                let [first, last] = own((tile + 2) * blocks);
                k.when(first.lt(last), || sums.add(&e, &addresses, lists, [first, last], tile));
            });
        });
    }
}
