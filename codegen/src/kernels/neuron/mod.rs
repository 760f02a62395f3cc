//! Experts by neurons, for few rows: gates first, then only what is read of the neurons that these wake (PowerInfer-2, §4.1.2).
//!
//! Decoding waits for memory, so what counts is which bytes are read. [`up`] reads the gates of a block of neurons, writes
//! down whom any row wakes, and reads the up rows of these alone. [`down`] reads their columns. Where bundles have sketches,
//! a gate is read only where its sketch does not prove it to be 0: the same bits come out.
//!
//! Sums over neurons are taken in their order, and a neuron that a row does not wake adds an exact 0 to it: a row's bits
//! depend neither on the other rows nor on how work is split.

mod bytes;
mod numbers;
pub(crate) mod panels;
mod sketch;

use super::routed::{Expert, expert};
use crate::dsl::{F, I, Kb, LINE, P};
use crate::machine::Isa;
use crate::spec::{Compute, KernelSpec, NEURON_COLUMNS, NEURONS};
use bytes::Steps;
use moec_ir::bundle::{BLOCK, Bundle, Part, Place};
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

/// Bytes of scratch of [`up`]: neurons, then every row as it meets sketches, or as bytes.
pub(crate) fn up_scratch(isa: &Isa, spec: &KernelSpec) -> usize {
    let &KernelSpec::NeuronUp { layout, hidden, format, compute, sketch, .. } = spec else { return 0 };
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

/// The neurons of an expert.
#[derive(Clone, Copy)]
struct Matrix<'k> {
    k: &'k Kb<'k>,
    bundle: Bundle,
    inter: usize,
    at: P<'k>,
}

impl<'k> Matrix<'k> {
    /// Where a part of a neuron lies.
    fn part(&self, part: Part, neuron: I<'k>) -> P<'k> {
        let k = self.k;
        let i = neuron & k.i(BLOCK as i64 - 1);
        let first = neuron - i;
        let Place { each, first: offset, pitch } = self.bundle.place(part);
        let there = match self.inter % BLOCK {
            0 => k.i(BLOCK as i64),
            _ => (k.i(self.inter as i64) - first).min(k.i(BLOCK as i64)),
        };
        self.at.bytes(first * self.bundle.bytes() + there * each + i * pitch).bytes(offset)
    }

    /// That part, as numbers.
    fn row(&self, part: Part, neuron: I<'k>) -> Row<'k> {
        let at = self.part(part, neuron);
        Row::part(self.k, self.bundle.format, self.bundle.hidden, at)
    }
}

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
                steps.dot(self.k, part.at, rows.bytes((slot - first) * steps.row_bytes()), ahead)
            }
            None => dot(self.k, part, self.of(slot), ahead),
        }
    }
}

/// Whether a gate that is at most `most` makes a neuron 0. NaN does not.
fn silent<'k>(k: &'k Kb<'k>, most: F<'k>, glu: Glu) -> I<'k> {
    match glu {
        Glu::Gated(Activation::Relu) | Glu::DRelu => most.lt(k.f(0.0)).or(most.equals(k.f(0.0))),
        Glu::FatRelu { threshold } => most.lt(k.f(threshold)),
        Glu::Gated(_) | Glu::Clamped { .. } => {
            k.fail("a gate that makes no neuron 0");
            k.f(0.0).lt(k.f(0.0))
        }
    }
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

pub(super) fn up<'k>(k: &'k Kb<'k>, spec: &KernelSpec) {
    let KernelSpec::NeuronUp { layout, hidden, inter, format, compute, sketch, x_ld, glu } = *spec else {
        return k.fail("not the gates of neurons");
    };
    let [x, dispatch, weights, h, awake] = [0, 1, 2, 3, 4].map(|i| k.arg(i));
    let bundle = Bundle { format, hidden, sketch };
    let blocks = inter.div_ceil(NEURONS);
    let tokens = dispatch.words(layout.token());
    let steps = if compute == Compute::I8 { Steps::new(&k.isa, format, hidden) } else { None };
    k.tiles_by_expert(blocks, |active, [from, end]| {
        let e = expert(dispatch, layout, active);
        let matrix = Matrix { k, bundle, inter, at: weights.load_address(e.id) };
        let rows = Rows::new(k, &e, [x, tokens], x_ld, steps);
        let sketches = sketch.then(|| Sketches::new(&k.isa, bundle));
        if let Some(sketches) = sketches {
            k.each(e.first, e.end, 1, |slot| sketches.prepare(k, rows.of(slot), slot - e.first));
        }
        k.each(from, end, 1, |block| {
            let first = block * NEURONS;
            let count = (k.i(inter as i64) - first).min(k.i(NEURONS as i64));
            let hidden_at = |slot: I<'k>, neuron: I<'k>| h.words(slot * inter).words(neuron);
            // Whether any row wakes a neuron; what the gates give stays where the result will be.
            let wakes = |neuron: I<'k>, ahead: Option<usize>| {
                let gate = matrix.row(Part::Gate, neuron);
                let awake = k.fold(e.first, e.end, 1, &[k.i(0)], |slot, awake| {
                    let g = rows.dot(&gate, slot, ahead);
                    hidden_at(slot, neuron).store(g);
                    vec![silent(k, g, glu).pick_int(awake[0], k.i(1))]
                });
                let awake = k.i(0).lt(awake[0]);
                k.when(awake, || fetch_row(matrix.part(Part::Up, neuron)));
                awake
            };
            let to = awake.words((active * blocks + block) * LIST);
            let found = if let Some(sketches) = sketches {
                let maybe = k.scratch();
                let unsure = unproven(&e, &matrix, [first, count], glu, &rows, sketches);
                // The lines of gates were asked for when their sketches proved nothing.
                list(k, unsure, to, |i| maybe.words(i + 1).load_int(), |_, neuron| wakes(neuron, None))
            } else {
                list(k, count, to, |i| first + i, |_, neuron| wakes(neuron, Some(AHEAD)))
            };
            k.each(0, found, 1, |i| {
                let neuron = to.words(i + 1).load_int();
                let up = matrix.row(Part::Up, neuron);
                k.each(e.first, e.end, 1, |slot| {
                    let cell = hidden_at(slot, neuron);
                    let g = cell.load();
                    k.branch(
                        silent(k, g, glu),
                        || cell.store(k.f(0.0)),
                        || cell.store(g.glu(rows.dot(&up, slot, None), glu)),
                    );
                });
            });
        });
    });
}

/// Lists the neurons of a block whose sketches do not prove that every row leaves them 0.
fn unproven<'k>(
    e: &Expert<'k>,
    matrix: &Matrix<'k>,
    [first, count]: [I<'k>; 2],
    glu: Glu,
    rows: &Rows<'k>,
    sketches: Sketches,
) -> I<'k> {
    let k = matrix.k;
    list(
        k,
        count,
        k.scratch(),
        |i| first + i,
        |_, neuron| {
            let sketch = matrix.part(Part::Sketch, neuron);
            let unsure = k.fold(e.first, e.end, 1, &[k.i(0)], |slot, unsure| {
                let most = sketches.most(k, sketch, rows.of(slot), slot - e.first);
                vec![silent(k, most, glu).pick_int(unsure[0], k.i(1))]
            });
            let unsure = k.i(0).lt(unsure[0]);
            k.when(unsure, || fetch_row(matrix.part(Part::Gate, neuron)));
            unsure
        },
    )
}

pub(super) fn down<'k>(k: &'k Kb<'k>, spec: &KernelSpec) {
    let KernelSpec::NeuronDown { layout, hidden, inter, format, sketch } = *spec else {
        return k.fail("not the columns of neurons");
    };
    let [h, dispatch, weights, awake, out] = [0, 1, 2, 3, 4].map(|i| k.arg(i));
    let bundle = Bundle { format, hidden, sketch };
    let (blocks, width) = (inter.div_ceil(NEURONS), NEURON_COLUMNS);
    let (whole, rest) = (hidden / width, hidden % width);
    k.expert_tiles(hidden.div_ceil(width), |active, tile| {
        let e = expert(dispatch, layout, active);
        let matrix = Matrix { k, bundle, inter, at: weights.load_address(e.id) };
        let (sums, ids) = (k.scratch(), k.scratch().words(width));
        let count = gather(k, awake.words(active * (blocks * LIST)), blocks, ids);
        let first = tile * (width / GROUP);
        let part = |columns: usize| {
            k.each(e.first, e.end, 1, |slot| {
                let h = h.words(slot * inter);
                k.zero(sums, columns.next_multiple_of(GROUP));
                k.each(0, count, TOGETHER, |i| {
                    let who = |j: usize| ids.words(i + j).load_int();
                    let rows: Vec<Row<'k>> = (0..TOGETHER).map(|j| matrix.row(Part::Down, who(j))).collect();
                    let later: Vec<Row<'k>> =
                        (0..TOGETHER).map(|j| matrix.row(Part::Down, who(TOGETHER + j))).collect();
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

/// Whether neurons of a format have sketches: those of bytes and less would be no smaller.
pub const fn neurons_sketched(format: Format) -> bool {
    !format.is_grouped()
}
