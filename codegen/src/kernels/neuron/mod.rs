//! Experts by neurons, for few rows: gates first, then only what is read of the neurons that these wake (PowerInfer-2, §4.1.2).
//!
//! Decoding waits for memory, so what counts is which bytes are read. [`up`] reads the gates of a block of neurons, writes
//! down whom any row wakes, and reads the up rows of these alone. [`down`] reads their columns. Where bundles have sketches,
//! a gate is read only where its sketch does not prove it to be 0: the same bits come out. Where a predictor has spoken
//! ([`predict`]), a gate is read only where it takes the neuron to be awake: whom it misses is lost, and nothing else differs.
//!
//! Sums over neurons are taken in their order, and a neuron that a row does not wake adds an exact 0 to it: a row's bits
//! depend neither on the other rows nor on how work is split.

pub(super) mod apart;
mod bytes;
mod numbers;
pub(crate) mod panels;
mod places;
pub(super) mod predict;
mod sketch;

pub(super) use places::{Places, Rests};

use super::routed::{Expert, expert};
use crate::dsl::{F, I, Kb, LINE, P};
use crate::machine::Isa;
use crate::spec::{Compute, KernelSpec, NEURON_COLUMNS, NEURONS};
use bytes::Steps;
use moec_ir::bundle::{Bundle, Part};
use moec_ir::op::{Activation, Glu};
use moec_ir::types::{Format, GROUP};
use numbers::{Row, dot};
use sketch::Sketches;

/// Bytes by which gates are asked for ahead.
const AHEAD: usize = 2048;

/// Neurons whose down columns are added together.
const TOGETHER: usize = 4;

/// Bytes of scratch for the neurons of a block whose sketches prove nothing.
const MAYBE: usize = ((NEURONS + 1) * 4).next_multiple_of(LINE);

/// Bytes of scratch of [`up`], and of its halves: neurons, then every row as it meets sketches, or as bytes.
pub(crate) fn up_scratch(isa: &Isa, spec: &KernelSpec) -> usize {
    let (layout, hidden, format, compute, sketch) = match *spec {
        KernelSpec::NeuronUp { layout, hidden, format, compute, sketch, predicted, .. } => {
            (layout, hidden, format, compute, sketch && !predicted)
        }
        KernelSpec::NeuronGate { layout, hidden, format, compute, .. }
        | KernelSpec::NeuronUpAt { layout, hidden, format, compute, .. } => {
            (layout, hidden, format, compute, false)
        }
        _ => return 0,
    };
    let row = match compute {
        _ if sketch => Sketches::new(isa, Bundle { format, hidden, sketch }).row_bytes(),
        Compute::I8 => Steps::new(isa, format, hidden).map_or(0, Steps::row_bytes),
        _ => 0,
    };
    MAYBE + layout.rows * row
}

/// Whether gate and up of neurons meet rows of `hidden` numbers in a form: f32 they always meet, bytes where codes come out of
/// memory by whole vectors.
pub fn neurons_meet(isa: &Isa, format: Format, hidden: usize, compute: Compute) -> bool {
    match compute {
        Compute::F32 => true,
        Compute::I8 => Steps::new(isa, format, hidden).is_some(),
        Compute::Bf16 => false,
    }
}

/// Bytes of scratch of [`down`]: the sums of a work item, and the neurons of an expert that are awake.
pub(crate) const fn down_scratch(inter: usize) -> usize {
    NEURON_COLUMNS * 4 + (inter + 2 * TOGETHER + 1) * 4
}

/// Words of the list of a block: how many, then who.
pub(crate) const LIST: usize = NEURONS + 1;

/// Rows of an expert, in the form that meets its gates.
struct Rows<'k> {
    k: &'k Kb<'k>,
    x: P<'k>,
    x_ld: usize,
    /// Tokens of the slots.
    tokens: P<'k>,
    /// Where the first slot's row lies in scratch, and how it is read, if rows are bytes.
    bytes: Option<(Steps, P<'k>, I<'k>)>,
}

impl<'k> Rows<'k> {
    fn new(
        k: &'k Kb<'k>,
        e: &Expert<'k>,
        [x, tokens]: [P<'k>; 2],
        x_ld: usize,
        steps: Option<Steps>,
    ) -> Self {
        let of = |slot: I<'k>| x.words(tokens.words(slot).load_int() * x_ld);
        let bytes = steps.map(|steps| {
            let to = k.scratch().bytes(MAYBE);
            k.each(e.first, e.end, 1, |slot| {
                steps.arrange(k, of(slot), to.bytes((slot - e.first) * steps.row_bytes()));
            });
            (steps, to, e.first)
        });
        Self { k, x, x_ld, tokens, bytes }
    }

    /// That of a slot, as f32.
    fn of(&self, slot: I<'k>) -> P<'k> {
        self.x.words(self.tokens.words(slot).load_int() * self.x_ld)
    }

    /// A part of a neuron times that of a slot.
    fn dot(&self, part: &Row<'k>, slot: I<'k>, ahead: Option<usize>) -> F<'k> {
        match self.bytes {
            Some((steps, rows, first)) => {
                steps.dot(self.k, part, rows.bytes((slot - first) * steps.row_bytes()), ahead)
            }
            None => dot(self.k, part, self.of(slot), ahead),
        }
    }
}

/// Whether a gate makes a neuron 0; where that is so of all lower ones, too, a bound of the gate will do. NaN does not.
fn silent<'k>(k: &'k Kb<'k>, gate: F<'k>, glu: Glu) -> I<'k> {
    match glu {
        Glu::Gated(Activation::Relu) | Glu::DRelu => gate.lt(k.f(0.0)).or(gate.equals(k.f(0.0))),
        Glu::FatRelu { threshold } => gate.lt(k.f(threshold)),
        // As it joins up, to the bit.
        Glu::Cats { threshold } => gate.activate(Activation::Silu).abs().lt(k.f(threshold)),
        Glu::Gated(_) | Glu::Limited { .. } | Glu::Clamped { .. } | Glu::Ungated(_) => {
            k.fail("a gate that makes no neuron 0");
            k.f(0.0).lt(k.f(0.0))
        }
    }
}

/// Whether a predictor takes a neuron to be asleep of which it says so much. NaN does not.
fn asleep<'k>(k: &'k Kb<'k>, said: F<'k>) -> I<'k> {
    said.lt(k.f(0.0)).or(said.equals(k.f(0.0)))
}

/// Asks for the beginning of a row that is read soon: memory goes on by itself once it is read, and whoever asks for all of
/// it waits until so many lines can be asked for at once.
fn fetch_row(from: P<'_>) {
    (0..4).for_each(|line| from.beyond(line * LINE).prefetch());
}

/// Goes through neurons, and lists those of whom `awake` is true: how many, in front of who. `who(i)` is the neuron of number
/// `i`.
fn list<'k>(
    k: &'k Kb<'k>,
    count: I<'k>,
    to: P<'k>,
    who: impl Fn(I<'k>) -> I<'k>,
    awake: impl FnOnce(I<'k>, I<'k>) -> I<'k>,
) -> I<'k> {
    let found = k.fold(0, count, 1, &[k.i(0)], |i, found| {
        let neuron = who(i);
        let awake = awake(i, neuron);
        // Who is not awake is overwritten by who comes next.
        to.words(found[0] + 1).store_int(neuron.narrow());
        vec![found[0] + awake.pick_int(k.i(1), k.i(0))]
    });
    to.store_int(found[0].narrow());
    found[0]
}

/// What steps over gate and up know: [`up`], and where these lie apart its halves.
struct Call<'k> {
    k: &'k Kb<'k>,
    /// Rows, and the tokens of the slots.
    x: [P<'k>; 2],
    x_ld: usize,
    h: P<'k>,
    bundle: Bundle,
    inter: usize,
    glu: Glu,
    /// How rows are read, if they are bytes.
    steps: Option<Steps>,
    /// Whether `h` says who is taken to be awake.
    predicted: bool,
}

impl<'k> Call<'k> {
    fn of(k: &'k Kb<'k>, spec: &KernelSpec) -> Option<Self> {
        let predicted = matches!(spec, KernelSpec::NeuronUp { predicted: true, .. });
        let (layout, hidden, inter, format, compute, sketch, x_ld, glu) = match *spec {
            KernelSpec::NeuronUp { layout, hidden, inter, format, compute, sketch, x_ld, glu, .. } => {
                (layout, hidden, inter, format, compute, sketch, x_ld, glu)
            }
            KernelSpec::NeuronGate { layout, hidden, inter, format, compute, x_ld, glu }
            | KernelSpec::NeuronUpAt { layout, hidden, inter, format, compute, x_ld, glu } => {
                (layout, hidden, inter, format, compute, false, x_ld, glu)
            }
            _ => return None,
        };
        let steps = if compute == Compute::I8 { Steps::new(&k.isa, format, hidden) } else { None };
        let bundle = Bundle { format, hidden, sketch };
        let x = [k.arg(0), k.arg(1).words(layout.token())];
        Some(Self { k, x, x_ld, h: k.arg(3), bundle, inter, glu, steps, predicted })
    }

    /// The rows of an expert.
    fn rows(&self, e: &Expert<'k>) -> Rows<'k> {
        Rows::new(self.k, e, self.x, self.x_ld, self.steps)
    }

    fn hidden(&self, slot: I<'k>, neuron: I<'k>) -> P<'k> {
        self.h.words(slot * self.inter).words(neuron)
    }

    /// Whether any row wakes a neuron; what the gates give stays where the result will be.
    fn wakes(
        &self,
        e: &Expert<'k>,
        places: &Places<'k>,
        rows: &Rows<'k>,
        neuron: I<'k>,
        ahead: Option<usize>,
    ) -> I<'k> {
        let k = self.k;
        let gate = places.row(Part::Gate, neuron);
        let awake = k.fold(e.first, e.end, 1, &[k.i(0)], |slot, awake| {
            let cell = self.hidden(slot, neuron);
            let g = if self.predicted {
                // A gate of minus infinity: a row's result does not depend on whom others wake.
                let sleep = || cell.store(k.f(f32::NEG_INFINITY));
                k.branch(asleep(k, cell.load()), sleep, || cell.store(rows.dot(&gate, slot, ahead)));
                cell.load()
            } else {
                let g = rows.dot(&gate, slot, ahead);
                cell.store(g);
                g
            };
            vec![silent(k, g, self.glu).pick_int(awake[0], k.i(1))]
        });
        k.i(0).lt(awake[0])
    }

    /// Lists the neurons of a block that are taken to be awake for any row.
    fn expected(&self, e: &Expert<'k>, places: &Places<'k>, [first, count]: [I<'k>; 2]) -> I<'k> {
        let k = self.k;
        let awake = |_, neuron| {
            let awake = k.fold(e.first, e.end, 1, &[k.i(0)], |slot, awake| {
                vec![asleep(k, self.hidden(slot, neuron).load()).pick_int(awake[0], k.i(1))]
            });
            let awake = k.i(0).lt(awake[0]);
            k.when(awake, || fetch_row(places.part(Part::Gate, neuron)));
            awake
        };
        list(k, count, k.scratch(), |i| first + i, awake)
    }

    /// Up of the neurons of a list, joined with their gates.
    fn ups(&self, e: &Expert<'k>, places: &Places<'k>, rows: &Rows<'k>, list: P<'k>, count: I<'k>) {
        let k = self.k;
        k.each(0, count, 1, |i| {
            let neuron = list.words(i + 1).load_int();
            let up = places.row(Part::Up, neuron);
            k.each(e.first, e.end, 1, |slot| {
                let cell = self.hidden(slot, neuron);
                let g = cell.load();
                k.branch(
                    silent(k, g, self.glu),
                    || cell.store(k.f(0.0)),
                    || cell.store(g.glu(rows.dot(&up, slot, None), self.glu)),
                );
            });
        });
    }
}

pub(super) fn up<'k>(k: &'k Kb<'k>, spec: &KernelSpec) {
    let (KernelSpec::NeuronUp { layout, inter, sketch, glu, .. }, Some(call)) = (spec, Call::of(k, spec))
    else {
        return k.fail("not the gates of neurons");
    };
    let (weights, awake) = (k.arg(2), k.arg(4));
    let (bundle, blocks) = (call.bundle, inter.div_ceil(NEURONS));
    k.tiles_by_expert(blocks, |active, [from, end]| {
        let e = expert(k.arg(1), *layout, active);
        let places = Places { k, bundle, inter: *inter, matrix: weights.load_address(e.id), rests: None };
        let rows = call.rows(&e);
        let sketches = (*sketch && !call.predicted).then(|| Sketches::new(&k.isa, bundle));
        if let Some(sketches) = sketches {
            k.each(e.first, e.end, 1, |slot| sketches.prepare(k, rows.of(slot), slot - e.first));
        }
        k.each(from, end, 1, |block| {
            let first = block * NEURONS;
            let count = (k.i(*inter as i64) - first).min(k.i(NEURONS as i64));
            let wakes = |neuron: I<'k>, ahead: Option<usize>| {
                let awake = call.wakes(&e, &places, &rows, neuron, ahead);
                k.when(awake, || fetch_row(places.part(Part::Up, neuron)));
                awake
            };
            let to = awake.words((active * blocks + block) * LIST);
            let block = [first, count];
            let unsure = match sketches {
                _ if call.predicted => Some(call.expected(&e, &places, block)),
                Some(sketches) => Some(unproven(&e, &places, block, *glu, &rows, sketches)),
                None => None,
            };
            let maybe = k.scratch();
            let found = match unsure {
                // The lines of these gates were asked for when they were listed.
                Some(unsure) => {
                    list(k, unsure, to, |i| maybe.words(i + 1).load_int(), |_, neuron| wakes(neuron, None))
                }
                None => list(k, count, to, |i| first + i, |_, neuron| wakes(neuron, Some(AHEAD))),
            };
            call.ups(&e, &places, &rows, to, found);
        });
    });
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

/// Columns of neurons that are awake, wherever they lie.
pub(super) fn down<'k>(k: &'k Kb<'k>, spec: &KernelSpec) {
    let (layout, hidden, inter, format, sketch, apart) = match *spec {
        KernelSpec::NeuronDown { layout, hidden, inter, format, sketch } => {
            (layout, hidden, inter, format, sketch, false)
        }
        KernelSpec::NeuronDownAt { layout, hidden, inter, format } => {
            (layout, hidden, inter, format, false, true)
        }
        _ => return k.fail("not the columns of neurons"),
    };
    let [h, dispatch, weights, awake, out] = [0, 1, 2, 3, 4].map(|i| k.arg(i));
    let bundle = Bundle { format, hidden, sketch };
    let (blocks, width) = (inter.div_ceil(NEURONS), NEURON_COLUMNS);
    let (whole, rest) = (hidden / width, hidden % width);
    k.expert_tiles(hidden.div_ceil(width), |active, tile| {
        let e = expert(dispatch, layout, active);
        let rests = apart.then(|| Rests { at: weights, first: e.id * inter });
        let matrix = if apart { weights } else { weights.load_address(e.id) };
        let places = Places { k, bundle, inter, matrix, rests };
        let (sums, ids) = (k.scratch(), k.scratch().words(width));
        let count = gather(k, awake.words(active * (blocks * LIST)), blocks, ids);
        let first = tile * (width / GROUP);
        let part = |columns: usize| {
            k.each(e.first, e.end, 1, |slot| {
                let h = h.words(slot * inter);
                k.zero(sums, columns.next_multiple_of(GROUP));
                k.each(0, count, TOGETHER, |i| {
                    let who = |j: usize| ids.words(i + j).load_int();
                    let rows: Vec<Row<'k>> = (0..TOGETHER).map(|j| places.row(Part::Down, who(j))).collect();
                    let later: Vec<Row<'k>> =
                        (0..TOGETHER).map(|j| places.row(Part::Down, who(TOGETHER + j))).collect();
                    // Behind the last the list goes on with neurons that add 0.
                    let by: Vec<F<'k>> = (0..TOGETHER)
                        .map(|j| (i + j).lt(count).pick(h.words(who(j)).load(), k.f(0.0)))
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
                k.copy(sums, out.words(slot * hidden).words(tile * width), columns);
            });
        };
        match (whole, rest) {
            (0, rest) => part(rest),
            (_, 0) => part(width),
            _ => k.branch(tile.lt(k.i(whole as i64)), || part(width), || part(rest)),
        }
    });
}

/// Joins the lists of an expert's blocks; behind the last comes that one again, as often as somebody looks ahead.
fn gather<'k>(k: &'k Kb<'k>, lists: P<'k>, blocks: usize, to: P<'k>) -> I<'k> {
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

/// Whether neurons of a format have sketches under a gate: those of bytes and less would be no smaller, and a sketch bounds
/// gates from above, which says nothing where low ones wake.
pub const fn neurons_sketched(format: Format, glu: Glu) -> bool {
    !format.is_grouped() && glu.skips_below()
}
