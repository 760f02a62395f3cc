//! Neurons whose up and down come from disk: gates first, then up and down of the neurons that they activate,
//! at any address (PowerInfer-2, §4.3 and §4.4). Gates are in memory, or come from disk, too: those of the
//! neurons that a predictor listed.
//!
//! Sums and their order are those of [`NeuronUp`], so the bits are the same. Between the two steps the store
//! of neurons gets the lists. Columns are those of [`NeuronDownAt`](super::NeuronDownAt).

use super::{AHEAD, Call, LIST, NEURONS, NeuronAddresses, NeuronUp, UpDownRows, list};
use crate::dsl::Kb;
use crate::kernels::routed::expert;
use crate::kernels::{Kernel, Rule};
use crate::machine::Isa;
use crate::spec::{ComputeType, Symbol};
use moec_ir::op::{DispatchLayout, Glu};
use moec_ir::plan::{Grid, Layout, Results};
use moec_ir::types::Format;

/// `[x, dispatch i32, w (addresses [E] of Gates, or [E·I] of Bundles), h out f32 [slots, I], active lists out
/// i32]`: as [`NeuronUp`], but only up to the gates: `h` holds the gate's value of each active neuron. Bundles
/// are those of neurons that a predictor listed: then `h` holds predictions before, and the lists theirs.
#[derive(Clone, Debug, PartialEq)]
pub struct NeuronGate {
    /// Layout of the dispatch table.
    pub layout: DispatchLayout,
    /// Input channels.
    pub hidden: usize,
    /// Neurons `I`.
    pub inter: usize,
    /// Format of the weight.
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

impl NeuronGate {
    /// The kernel that it is a part of.
    fn whole(&self) -> NeuronUp {
        let &Self { layout, hidden, inter, format, compute, x_ld, glu, bundled: predicted, .. } = self;
        NeuronUp { layout, hidden, inter, format, compute, gate_bound: false, predicted, x_ld, glu }
    }
}

impl Kernel for NeuronGate {
    fn kind(&self) -> &'static str {
        "neuron_gate"
    }

    fn name(&self, s: &mut Symbol, _isa: &Isa) {
        self.whole().parameters(s.word("neuron_gate"));
        s.option("hot", self.hot);
    }

    fn grid(&self, isa: &Isa) -> Grid {
        self.whole().grid(isa)
    }

    fn args(&self) -> usize {
        5
    }

    fn results(&self) -> Results {
        Results::last(2, self.args())
    }

    fn scratch_bytes(&self, isa: &Isa) -> usize {
        self.whole().scratch_bytes(isa)
    }

    fn layout(&self, _isa: &Isa) -> Option<Layout> {
        Some(if self.bundled { Layout::Bundles } else { Layout::Gates })
    }

    fn rules(&self, isa: &Isa) -> Vec<Rule> {
        let mut rules = self.whole().rules(isa);
        rules.push((
            self.hot.is_none_or(|hot| (1..self.inter).contains(&hot)),
            "no neuron is hot, or none is cold",
        ));
        rules.push((!self.bundled || self.hot.is_none(), "a predictor lists no hot neurons"));
        rules
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let &Self { layout, inter, bundled, .. } = self;
        let call = Call::new(k, &self.whole());
        let (gates, active_lists) = (k.arg(2), k.arg(4));
        let blocks = inter.div_ceil(NEURONS);
        k.tiles_by_expert(blocks, |active, [from, end]| {
            let e = expert(k.arg(1), layout, active);
            // Up and down are not read here.
            let up_down = Some(UpDownRows { at: gates, first: e.id * inter, gates: bundled });
            let matrix = if bundled { gates } else { gates.load_address(e.id) };
            let addresses = NeuronAddresses { k, bundle: call.bundle, inter, matrix, up_down };
            let rows = call.rows(&e);
            k.each(from, end, 1, |block| {
                let end = (block * NEURONS + NEURONS).min(k.i(inter as i64));
                let first = (block * NEURONS).max(k.i(self.hot.unwrap_or(0) as i64)).min(end);
                let count = end - first;
                let to = active_lists.words((active * blocks + block) * LIST);
                if bundled {
                    call.activated(&e, &addresses, &rows, to, |_| {});
                    return;
                }
                list(
                    k,
                    count,
                    to,
                    |i| first + i,
                    |_, neuron| call.activates(&e, &addresses, &rows, neuron, Some(AHEAD)),
                );
            });
        });
    }
}

/// `[x, dispatch i32, w (addresses [E·I] of UpDown or Bundles), h in and out f32 [slots, I], active lists
/// i32]`: up of the neurons that [`NeuronGate`] found active, at any address, joined with their gates in `h`.
#[derive(Clone, Debug, PartialEq)]
pub struct NeuronUpAt {
    /// Layout of the dispatch table.
    pub layout: DispatchLayout,
    /// Input channels.
    pub hidden: usize,
    /// Neurons `I`.
    pub inter: usize,
    /// Format of the weight.
    pub format: Format,
    /// Format of `x`, as of [`NeuronUp`].
    pub compute: ComputeType,
    /// Row distance of `x`, in words.
    pub x_ld: usize,
    /// Activation that joins gate and up.
    pub glu: Glu,
    /// Whether gates are stored with up and down.
    pub bundled: bool,
}

impl NeuronUpAt {
    /// The kernel that it is a part of.
    fn whole(&self) -> NeuronUp {
        let &Self { layout, hidden, inter, format, compute, x_ld, glu, .. } = self;
        NeuronUp { layout, hidden, inter, format, compute, gate_bound: false, predicted: false, x_ld, glu }
    }
}

impl Kernel for NeuronUpAt {
    fn kind(&self) -> &'static str {
        "neuron_up_at"
    }

    fn name(&self, s: &mut Symbol, _isa: &Isa) {
        self.whole().parameters(s.word("neuron_up_at"));
        s.flag("bundled", self.bundled);
    }

    fn grid(&self, isa: &Isa) -> Grid {
        self.whole().grid(isa)
    }

    fn args(&self) -> usize {
        5
    }

    fn results(&self) -> Results {
        Results::new([3]).unwrap_or_default()
    }

    fn scratch_bytes(&self, isa: &Isa) -> usize {
        self.whole().scratch_bytes(isa)
    }

    fn layout(&self, _isa: &Isa) -> Option<Layout> {
        Some(if self.bundled { Layout::Bundles } else { Layout::UpDown })
    }

    fn rules(&self, isa: &Isa) -> Vec<Rule> {
        self.whole().rules(isa)
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let &Self { layout, inter, bundled, .. } = self;
        let call = Call::new(k, &self.whole());
        let (up_down, active_lists) = (k.arg(2), k.arg(4));
        let blocks = inter.div_ceil(NEURONS);
        k.tiles_by_expert(blocks, |active, [from, end]| {
            let e = expert(k.arg(1), layout, active);
            // No gates are prefetched here.
            let up_down_rows = UpDownRows { at: up_down, first: e.id * inter, gates: bundled };
            let addresses = NeuronAddresses {
                k,
                bundle: call.bundle,
                inter,
                matrix: up_down,
                up_down: Some(up_down_rows),
            };
            let rows = call.rows(&e);
            k.each(from, end, 1, |block| {
                let list = active_lists.words((active * blocks + block) * LIST);
                call.ups(&e, &addresses, &rows, list, list.load_int());
            });
        });
    }
}
