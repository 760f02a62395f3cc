//! Experts by neurons, for few rows: gates first, then only what is read of the neurons that these activate
//! (PowerInfer-2, §4.1.2).
//!
//! Decoding waits for memory, so the bytes read decide its speed. [`NeuronUp`] reads the gates of a block of
//! neurons, lists those that any row activates, and reads only their up rows. [`NeuronDown`] reads their
//! columns. If bundles have gate bounds, a gate is read only if its bound does not prove it to be 0: the
//! result has the same bits. If a predictor ([`NeuronPredict`]) ran before, only the gates of neurons that it
//! listed are read. Active neurons that it misses are lost, and nothing else differs.
//!
//! Sums over neurons are taken in their order, and a neuron that a row does not activate adds an exact 0. So
//! a row's bits depend neither on the other rows nor on the split of the work.

mod addresses;
mod bytes;
mod clusters;
mod down;
mod gate_bound;
mod numbers;
pub(crate) mod panels;
mod predict;
mod up;

pub(super) use addresses::{NeuronAddresses, UpDownRows};
pub use clusters::NeuronClusters;
pub use down::NeuronDown;
pub use predict::NeuronPredict;
pub use up::NeuronUp;

use super::routed::Expert;
use crate::dsl::{F, I, Kb, LINE, P};
use crate::machine::Isa;
use crate::spec::ComputeType;
use bytes::Steps;
use moec_ir::bundle::{Bundle, Part};
use moec_ir::op::{Activation, Glu};
use moec_ir::types::Format;
use numbers::{Row, dot};

/// Neurons of a work item over gates and up.
const NEURONS: usize = moec_ir::bundle::BLOCK;

/// Bytes by which gates are prefetched ahead.
const AHEAD: usize = 2048;

/// Bytes of scratch for the neurons of a block whose gate bounds prove nothing.
const MAYBE: usize = ((NEURONS + 1) * 4).next_multiple_of(LINE);

/// Whether gate and up of neurons multiply rows of `hidden` numbers in a compute type: f32 always, bytes if
/// codes are read from memory by whole vectors.
pub fn neurons_multiply(isa: &Isa, format: Format, hidden: usize, compute: ComputeType) -> bool {
    match compute {
        ComputeType::F32 => true,
        ComputeType::I8 => Steps::new(isa, format, hidden).is_some(),
        ComputeType::Bf16 => false,
    }
}

/// Words of the list of a block: the number of neurons, then their indices.
const LIST: usize = NEURONS + 1;

/// Rows of an expert, in the format that its gates multiply.
struct Rows<'k> {
    k: &'k Kb<'k>,
    x: P<'k>,
    x_ld: usize,
    /// Tokens of the slots.
    tokens: P<'k>,
    /// Place of the first slot's row in scratch, and the order in which it is read, if rows are bytes.
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

    /// Row of a slot, as f32.
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

/// Whether a gate makes a neuron 0; if all lower gates do, too, an upper bound is enough. NaN does not.
fn is_inactive<'k>(k: &'k Kb<'k>, gate: F<'k>, glu: Glu) -> I<'k> {
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

/// Whether a predictor's value for a neuron means that it is inactive. NaN does not.
fn predicted_inactive<'k>(k: &'k Kb<'k>, prediction: F<'k>) -> I<'k> {
    prediction.lt(k.f(0.0)).or(prediction.equals(k.f(0.0)))
}

/// Prefetches the beginning of a row that is read soon. Hardware continues once the row is read; prefetching
/// all of it would wait until enough lines can be requested at once.
fn fetch_row(from: P<'_>) {
    (0..4).for_each(|line| from.beyond(line * LINE).prefetch());
}

/// Goes through neurons, and lists those for which `is_active` is true: their number, then their indices.
/// `neuron_at(i)` is the neuron with number `i`.
fn list<'k>(
    k: &'k Kb<'k>,
    count: I<'k>,
    to: P<'k>,
    neuron_at: impl Fn(I<'k>) -> I<'k>,
    is_active: impl FnOnce(I<'k>, I<'k>) -> I<'k>,
) -> I<'k> {
    let found = k.fold(0, count, 1, &[k.i(0)], |i, found| {
        let neuron = neuron_at(i);
        let is_active = is_active(i, neuron);
        // An inactive neuron is overwritten by the next one.
        to.words(found[0] + 1).store_int(neuron.narrow());
        vec![found[0] + is_active.pick_int(k.i(1), k.i(0))]
    });
    to.store_int(found[0].narrow());
    found[0]
}

/// Parameters of the steps over gate and up: of [`up`], and of [`clusters`].
struct Call<'k> {
    k: &'k Kb<'k>,
    /// Rows, and the tokens of the slots.
    x: [P<'k>; 2],
    x_ld: usize,
    h: P<'k>,
    bundle: Bundle,
    inter: usize,
    glu: Glu,
    /// Order in which rows are read, if they are bytes.
    steps: Option<Steps>,
    /// Whether `h` says which are taken to be active.
    predicted: bool,
}

impl<'k> Call<'k> {
    fn new(k: &'k Kb<'k>, spec: &NeuronUp, h: P<'k>) -> Self {
        let &NeuronUp { layout, hidden, inter, format, compute, gate_bound, predicted, x_ld, glu } = spec;
        let steps = if compute == ComputeType::I8 { Steps::new(&k.isa, format, hidden) } else { None };
        let bundle = Bundle { format, hidden, gate_bound };
        let x = [k.arg(0), k.arg(1).words(layout.token())];
        Self { k, x, x_ld, h, bundle, inter, glu, steps, predicted }
    }

    /// The rows of an expert.
    fn rows(&self, e: &Expert<'k>) -> Rows<'k> {
        Rows::new(self.k, e, self.x, self.x_ld, self.steps)
    }

    fn hidden(&self, slot: I<'k>, neuron: I<'k>) -> P<'k> {
        self.h.words(slot * self.inter).words(neuron)
    }

    /// Whether any row activates a neuron; what the gates give stays where the result will be.
    fn activates(
        &self,
        e: &Expert<'k>,
        addresses: &NeuronAddresses<'k>,
        rows: &Rows<'k>,
        neuron: I<'k>,
        ahead: Option<usize>,
    ) -> I<'k> {
        let k = self.k;
        let gate = addresses.row(Part::Gate, neuron);
        let is_active = k.fold(e.first, e.end, 1, &[k.i(0)], |slot, is_active| {
            let cell = self.hidden(slot, neuron);
            let g = if self.predicted {
                // A gate of minus infinity: a row's result does not depend on what other rows activate.
                let skip = || cell.store(k.f(f32::NEG_INFINITY));
                k.branch(predicted_inactive(k, cell.load()), skip, || {
                    cell.store(rows.dot(&gate, slot, ahead));
                });
                cell.load()
            } else {
                let g = rows.dot(&gate, slot, ahead);
                cell.store(g);
                g
            };
            vec![is_inactive(k, g, self.glu).pick_int(is_active[0], k.i(1))]
        });
        k.i(0).lt(is_active[0])
    }

    /// Shortens a list of neurons that a predictor takes to be active to those that their gates activate.
    fn activated(
        &self,
        e: &Expert<'k>,
        addresses: &NeuronAddresses<'k>,
        rows: &Rows<'k>,
        to: P<'k>,
        at_active: impl FnOnce(I<'k>),
    ) -> I<'k> {
        let k = self.k;
        let count = to.load_int();
        let neuron_at = |i: I<'k>| to.words(i + 1).load_int();
        k.each(0, count, 1, |i| fetch_row(addresses.part(Part::Gate, neuron_at(i))));
        list(k, count, to, neuron_at, |_, neuron| {
            let is_active = self.activates(e, addresses, rows, neuron, None);
            k.when(is_active, || at_active(neuron));
            is_active
        })
    }

    /// Up of the neurons of a list, joined with their gates.
    fn ups(
        &self,
        e: &Expert<'k>,
        addresses: &NeuronAddresses<'k>,
        rows: &Rows<'k>,
        list: P<'k>,
        count: I<'k>,
    ) {
        let k = self.k;
        k.each(0, count, 1, |i| {
            let neuron = list.words(i + 1).load_int();
            let up = addresses.row(Part::Up, neuron);
            k.each(e.first, e.end, 1, |slot| {
                let cell = self.hidden(slot, neuron);
                let g = cell.load();
                k.branch(
                    is_inactive(k, g, self.glu),
                    || cell.store(k.f(0.0)),
                    || cell.store(g.glu(rows.dot(&up, slot, None), self.glu)),
                );
            });
        });
    }
}

/// Whether neurons of a format have gate bounds with an activation. Bounds of formats of a byte or less would
/// be no smaller than the gates. A bound limits a gate from above, which proves nothing where low gates
/// activate.
pub const fn has_gate_bounds(format: Format, glu: Glu) -> bool {
    !format.is_grouped() && glu.skips_below()
}
