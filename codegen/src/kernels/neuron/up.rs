//! Gates of neurons, and up of those that these activate.

use super::sketch::Sketches;
use super::{
    AHEAD, Call, LIST, MAYBE, NEURONS, Places, Rows, Steps, fetch_row, list, neurons_meet, neurons_sketched,
    silent,
};
use crate::dsl::{I, Kb};
use crate::kernels::routed::{Expert, expert};
use crate::kernels::{Kernel, NO_NEURONS, NO_SKETCH, Rule};
use crate::machine::Isa;
use crate::spec::{Compute, Symbol, packed_words};
use moec_ir::bundle::{Bundle, Part};
use moec_ir::op::{DispatchLayout, Glu};
use moec_ir::plan::{Grid, Layout, Results};
use moec_ir::types::Format;

/// `[x, dispatch i32, w (addresses [E] of Neurons), h out f32 [slots, I], awake out i32]`: the neurons that the rows of
/// each active expert activate, in lists of `awake_words`, and what these give; of the others `h` holds anything. For few
/// rows: they are not cut.
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
    /// Form of `x`: f32, or bytes where [`crate::neurons_meet`] says so.
    pub compute: Compute,
    /// Whether there are sketches, which are read first.
    pub sketch: bool,
    /// Whether `h` holds what [`NeuronPredict`](crate::spec::NeuronPredict) says: neurons that it takes to be inactive are passed over, row by
    /// row. Sketches are not read then.
    pub predicted: bool,
    /// Row distance of `x`, in words.
    pub x_ld: usize,
    /// How gate and up join.
    pub glu: Glu,
}

impl NeuronUp {
    /// Adds all but what it does to its symbol.
    pub(super) fn parameters(&self, s: &mut Symbol) {
        s.layout(self.layout).num("h", self.hidden).num("i", self.inter).word(self.format.name());
        s.compute(self.compute).flag("sketched", self.sketch).flag("predicted", self.predicted);
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

    /// Neurons, then every row as it meets sketches, or as bytes.
    fn scratch_bytes(&self, isa: &Isa) -> usize {
        let &Self { hidden, format, sketch, .. } = self;
        let row = match self.compute {
            _ if sketch && !self.predicted => {
                Sketches::new(isa, Bundle { format, hidden, sketch }).row_bytes()
            }
            Compute::I8 => Steps::new(isa, format, hidden).map_or(0, Steps::row_bytes),
            _ => 0,
        };
        MAYBE + self.layout.rows * row
    }

    fn layout(&self, _isa: &Isa) -> Option<Layout> {
        Some(Layout::Neurons { sketch: self.sketch })
    }

    fn rules(&self, isa: &Isa) -> Vec<Rule> {
        let &Self { hidden, inter, format, compute, sketch, x_ld, glu, .. } = self;
        vec![
            (hidden > 0 && inter > 0, "an extent is zero"),
            (x_ld >= packed_words(hidden, compute), "rows overlap"),
            (neurons_meet(isa, format, hidden, compute), "neurons that meet no rows in that form"),
            (glu.skips(), "a gate that makes no neuron 0"),
            (!sketch || neurons_sketched(format, glu), NO_SKETCH),
            (format.holds_neurons(), NO_NEURONS),
        ]
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let &Self { layout, inter, sketch, glu, .. } = self;
        let call = Call::new(k, self);
        let (weights, awake) = (k.arg(2), k.arg(4));
        let (bundle, blocks) = (call.bundle, inter.div_ceil(NEURONS));
        k.tiles_by_expert(blocks, |active, [from, end]| {
            let e = expert(k.arg(1), layout, active);
            let places = Places { k, bundle, inter, matrix: weights.load_address(e.id), rests: None };
            let rows = call.rows(&e);
            let sketches = (sketch && !call.predicted).then(|| Sketches::new(&k.isa, bundle));
            if let Some(sketches) = sketches {
                k.each(e.first, e.end, 1, |slot| sketches.prepare(k, rows.of(slot), slot - e.first));
            }
            k.each(from, end, 1, |block| {
                let first = block * NEURONS;
                let count = (k.i(inter as i64) - first).min(k.i(NEURONS as i64));
                let wakes = |neuron: I<'k>, ahead: Option<usize>| {
                    let awake = call.wakes(&e, &places, &rows, neuron, ahead);
                    k.when(awake, || fetch_row(places.part(Part::Up, neuron)));
                    awake
                };
                let to = awake.words((active * blocks + block) * LIST);
                let block = [first, count];
                let unsure = match sketches {
                    _ if call.predicted => Some(call.expected(&e, &places, block)),
                    Some(sketches) => Some(unproven(&e, &places, block, glu, &rows, sketches)),
                    None => None,
                };
                let maybe = k.scratch();
                let found = match unsure {
                    // The lines of these gates were asked for when they were listed.
                    Some(unsure) => list(
                        k,
                        unsure,
                        to,
                        |i| maybe.words(i + 1).load_int(),
                        |_, neuron| wakes(neuron, None),
                    ),
                    None => list(k, count, to, |i| first + i, |_, neuron| wakes(neuron, Some(AHEAD))),
                };
                call.ups(&e, &places, &rows, to, found);
            });
        });
    }
}

/// Lists the neurons of a block whose sketches do not prove that every row leaves them 0.
fn unproven<'k>(
    e: &Expert<'k>,
    places: &Places<'k>,
    [first, count]: [I<'k>; 2],
    glu: Glu,
    rows: &Rows<'k>,
    sketches: Sketches,
) -> I<'k> {
    let k = places.k;
    list(
        k,
        count,
        k.scratch(),
        |i| first + i,
        |_, neuron| {
            let sketch = places.part(Part::Sketch, neuron);
            let unsure = k.fold(e.first, e.end, 1, &[k.i(0)], |slot, unsure| {
                let most = sketches.most(k, sketch, rows.of(slot), slot - e.first);
                vec![silent(k, most, glu).pick_int(unsure[0], k.i(1))]
            });
            let unsure = k.i(0).lt(unsure[0]);
            k.when(unsure, || fetch_row(places.part(Part::Gate, neuron)));
            unsure
        },
    )
}
