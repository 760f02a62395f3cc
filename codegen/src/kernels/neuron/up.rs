//! Gates of neurons, and up of those that these activate.

use super::gate_bound::GateBounds;
use super::{
    AHEAD, Call, LIST, MAYBE, NEURONS, NeuronAddresses, Rows, Steps, fetch_row, has_gate_bounds, is_inactive,
    list, neurons_multiply,
};
use crate::dsl::{I, Kb};
use crate::kernels::routed::{Expert, expert};
use crate::kernels::{Kernel, NO_GATE_BOUND, NO_NEURONS, Rule};
use crate::machine::Isa;
use crate::spec::{ComputeType, Symbol, packed_words};
use moec_ir::bundle::{Bundle, Part};
use moec_ir::op::{DispatchLayout, Glu};
use moec_ir::plan::{Grid, Layout, Results};
use moec_ir::types::Format;

/// `[x, dispatch i32, w (addresses [E] of Neurons), h out f32 [slots, I], active lists out i32]`: the neurons
/// that the rows of each active expert activate, in lists of `active_list_words`, and their values; for the
/// others `h` is undefined. For few rows: they are not cut.
#[derive(Clone, Debug, PartialEq)]
pub struct NeuronUp {
    /// Layout of the dispatch table.
    pub layout: DispatchLayout,
    /// Input channels.
    pub hidden: usize,
    /// Neurons `I`.
    pub inter: usize,
    /// Format of the weight.
    pub format: Format,
    /// Format of `x`: f32, or bytes if [`crate::neurons_multiply`] returns true.
    pub compute: ComputeType,
    /// Whether there are gate bounds, which are read first.
    pub gate_bound: bool,
    /// Whether `h` and the lists hold the result of [`NeuronPredict`](crate::spec::NeuronPredict): neurons that
    /// it takes to be inactive are passed over, row by row. Gate bounds are not read then.
    pub predicted: bool,
    /// Row distance of `x`, in words.
    pub x_ld: usize,
    /// Activation that joins gate and up.
    pub glu: Glu,
}

impl NeuronUp {
    /// Adds all but what it does to its symbol.
    pub(super) fn parameters(&self, s: &mut Symbol) {
        s.layout(self.layout).num("h", self.hidden).num("i", self.inter).word(self.format.name());
        s.compute(self.compute).flag("bounded", self.gate_bound).flag("predicted", self.predicted);
        s.num("x", self.x_ld).glu(self.glu);
    }
}

impl Kernel for NeuronUp {
    fn kind(&self) -> &'static str {
        "neuron_up"
    }

    fn name(&self, s: &mut Symbol, _isa: &Isa) {
        self.parameters(s.word("neuron_up"));
    }

    fn grid(&self, _isa: &Isa) -> Grid {
        Grid::Experts { table: 1, tiles: self.inter.div_ceil(NEURONS) as u32 }
    }

    fn args(&self) -> usize {
        5
    }

    fn results(&self) -> Results {
        Results::last(2, self.args())
    }

    /// Neurons, then every row in the format of gate bounds, or as bytes.
    fn scratch_bytes(&self, isa: &Isa) -> usize {
        let &Self { hidden, format, gate_bound, .. } = self;
        let row = match self.compute {
            _ if gate_bound && !self.predicted => {
                GateBounds::new(isa, Bundle { format, hidden, gate_bound }).row_bytes()
            }
            ComputeType::I8 => Steps::new(isa, format, hidden).map_or(0, Steps::row_bytes),
            _ => 0,
        };
        MAYBE + self.layout.rows * row
    }

    fn layout(&self, _isa: &Isa) -> Option<Layout> {
        Some(Layout::Neurons { gate_bound: self.gate_bound })
    }

    fn rules(&self, isa: &Isa) -> Vec<Rule> {
        let &Self { hidden, inter, format, compute, gate_bound, x_ld, glu, .. } = self;
        vec![
            (hidden > 0 && inter > 0, "an extent is zero"),
            (x_ld >= packed_words(hidden, compute), "rows overlap"),
            (neurons_multiply(isa, format, hidden, compute), "neurons without kernels for that compute type"),
            (glu.skips(), "a gate that makes no neuron 0"),
            (!gate_bound || has_gate_bounds(format, glu), NO_GATE_BOUND),
            (format.holds_neurons(), NO_NEURONS),
        ]
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let &Self { layout, inter, gate_bound, glu, .. } = self;
        let call = Call::new(k, self, k.arg(3));
        let (weights, active_lists) = (k.arg(2), k.arg(4));
        let (bundle, blocks) = (call.bundle, inter.div_ceil(NEURONS));
        k.tiles_by_expert(blocks, |active, [from, end]| {
            let e = expert(k.arg(1), layout, active);
            let addresses =
                NeuronAddresses { k, bundle, inter, matrix: weights.load_address(e.id), up_down: None };
            let rows = call.rows(&e);
            let gate_bounds = (gate_bound && !call.predicted).then(|| GateBounds::new(&k.isa, bundle));
            if let Some(gate_bounds) = gate_bounds {
                k.each(e.first, e.end, 1, |slot| gate_bounds.prepare(k, rows.of(slot), slot - e.first));
            }
            k.each(from, end, 1, |block| {
                let first = block * NEURONS;
                let count = (k.i(inter as i64) - first).min(k.i(NEURONS as i64));
                let wakes = |neuron: I<'k>, ahead: Option<usize>| {
                    let is_active = call.activates(&e, &addresses, &rows, neuron, ahead);
                    k.when(is_active, || fetch_row(addresses.part(Part::Up, neuron)));
                    is_active
                };
                let to = active_lists.words((active * blocks + block) * LIST);
                let maybe = k.scratch();
                let found = match gate_bounds {
                    _ if call.predicted => {
                        let fetch_up = |neuron| fetch_row(addresses.part(Part::Up, neuron));
                        call.activated(&e, &addresses, &rows, to, fetch_up)
                    }
                    Some(gate_bounds) => {
                        let unsure = unproven(&e, &addresses, [first, count], glu, &rows, gate_bounds);
                        // The lines of these gates were prefetched when they were listed.
                        let neuron_at = |i: I<'k>| maybe.words(i + 1).load_int();
                        list(k, unsure, to, neuron_at, |_, neuron| wakes(neuron, None))
                    }
                    None => list(k, count, to, |i| first + i, |_, neuron| wakes(neuron, Some(AHEAD))),
                };
                call.ups(&e, &addresses, &rows, to, found);
            });
        });
    }
}

/// Lists the neurons of a block whose gate bounds do not prove that every row leaves them 0.
fn unproven<'k>(
    e: &Expert<'k>,
    addresses: &NeuronAddresses<'k>,
    [first, count]: [I<'k>; 2],
    glu: Glu,
    rows: &Rows<'k>,
    gate_bounds: GateBounds,
) -> I<'k> {
    let k = addresses.k;
    list(
        k,
        count,
        k.scratch(),
        |i| first + i,
        |_, neuron| {
            let gate_bound = addresses.part(Part::GateBound, neuron);
            let unsure = k.fold(e.first, e.end, 1, &[k.i(0)], |slot, unsure| {
                let most = gate_bounds.upper_bound(k, gate_bound, rows.of(slot), slot - e.first);
                vec![is_inactive(k, most, glu).pick_int(unsure[0], k.i(1))]
            });
            let unsure = k.i(0).lt(unsure[0]);
            k.when(unsure, || fetch_row(addresses.part(Part::Gate, neuron)));
            unsure
        },
    )
}
