//! The two halves of an expert's feed-forward network, over the rows that the dispatch table gives it.
//! Matrices are found by a table of addresses: an expert may be anywhere, and move between two steps.

mod down;
mod gate_up;

pub use down::ExpertDown;
pub use gate_up::ExpertGateUp;

use super::multiply::{self, on_tiles, panel_bytes};
use super::panel::Panel;
use super::routed::{Expert, expert};
use super::{NO_GATE_BOUND, NO_NEURONS, Rule, amx, can_multiply, unpack};
use crate::dsl::{I, Kb, LINE, P};
use crate::machine::Isa;
use crate::schedule::Schedule;
use crate::spec::{ComputeType, packed_words};
use moec_ir::op::DispatchLayout;
use moec_ir::types::Format;

/// Order of the matrices of experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum WeightOrder {
    /// In panels, gate and up apart from down.
    #[default]
    Panels,
    /// Neuron by neuron ([`Layout::Neurons`](moec_ir::plan::Layout)): panels are written to scratch.
    Neurons {
        /// Whether bundles begin with a gate bound.
        gate_bound: bool,
    },
    /// Gates in rows ([`Layout::Gates`](moec_ir::plan::Layout)), up and down of every neuron anywhere: panels
    /// are written to scratch.
    Split,
    /// Neurons anywhere, gates with up and down ([`Layout::Bundles`](moec_ir::plan::Layout)): panels are written
    /// to scratch.
    Bundles,
}

impl WeightOrder {
    /// Whether bundles begin with a gate bound.
    pub(crate) const fn gate_bound(self) -> bool {
        matches!(self, Self::Neurons { gate_bound: true })
    }

    /// Whether neurons are at any address, and if so, whether gates are there, too.
    pub(crate) const fn anywhere(self) -> Option<bool> {
        match self {
            Self::Panels | Self::Neurons { .. } => None,
            Self::Split => Some(false),
            Self::Bundles => Some(true),
        }
    }
}

/// The order of a kernel on tile registers: experts, of an expert blocks of rows that the second-level cache
/// holds, of a block all panels.
struct Path<'k> {
    k: &'k Kb<'k>,
    dispatch: P<'k>,
    layout: DispatchLayout,
    /// Addresses of matrices.
    weights: P<'k>,
    /// Panels of a matrix, and bytes of each.
    tiles: usize,
    bytes: usize,
    /// Rows of a block, at most.
    rows: usize,
}

impl<'k> Path<'k> {
    /// `begin(rows)` at every block; `body(expert, panel, rows, the panel that follows)`.
    fn walk(&self, begin: impl FnOnce([I<'k>; 2]), body: impl FnOnce(&Expert<'k>, I<'k>, [I<'k>; 2], P<'k>)) {
        let k = self.k;
        k.tiles_by_expert(self.tiles, |active, [first, stop]| {
            let e = expert(self.dispatch, self.layout, active);
            let matrix = self.weights.load_address(e.id);
            // After the last panel of this expert's comes the first of the next one, if there is one for this
            // call.
            let more = k.more_items((active + 1) * self.tiles);
            let other = expert(self.dispatch, self.layout, more.pick_int(active + 1, active));
            let after = self.weights.load_address(other.id);
            k.even_parts([e.first, e.end], self.rows, amx::BLOCK, |[row, end]| {
                begin([row, end]);
                let first_again = matrix.bytes(first * self.bytes);
                let last = end.ge(e.end).pick_address(after, first_again);
                k.each(first, stop, 1, |p| {
                    let next = (p + 1).lt(stop).pick_address(matrix.bytes((p + 1) * self.bytes), last);
                    body(&e, p, [row, end], next);
                });
            });
        });
    }
}

/// Bytes of scratch of products, and of a panel that is written after them out of neurons.
pub(crate) fn scratch_bytes(
    isa: &Isa,
    depth: usize,
    format: Format,
    compute: ComputeType,
    order: WeightOrder,
    schedule: Schedule,
) -> (usize, usize) {
    match order {
        WeightOrder::Panels => (multiply::scratch_bytes(isa, depth, format, compute, schedule), 0),
        WeightOrder::Neurons { .. } | WeightOrder::Split | WeightOrder::Bundles => {
            let format = unpack::format(compute);
            let products = multiply::scratch_bytes(isa, depth, format, compute, schedule);
            (products.next_multiple_of(LINE), panel_bytes(isa, unpack::depth(depth), format))
        }
    }
}

/// The panel that is multiplied: the stored one, or one that `write(whether bundles have gate bounds, its
/// format)` writes.
fn by_panels<'k>(
    panel: Panel<'k>,
    order: WeightOrder,
    written: P<'k>,
    write: impl FnOnce(bool, Format),
) -> Panel<'k> {
    match order {
        WeightOrder::Panels => panel,
        WeightOrder::Neurons { .. } | WeightOrder::Split | WeightOrder::Bundles => {
            let format = unpack::format(panel.compute);
            write(order.gate_bound(), format);
            // Data that was just written need not be prefetched.
            Panel { weights: written, format, schedule: Schedule { ahead: 0, ..panel.schedule }, ..panel }
        }
    }
}

/// Words from one gathered row to the next: an odd number of cache lines, so that the rows of a tile do
/// not share the ways of one set.
fn gathered_ld(words: usize) -> usize {
    (words.div_ceil(16) | 1) * 16
}

/// Bytes of scratch of gathered rows, after those of products.
pub(crate) fn gathered_bytes(isa: &Isa, rows: usize, hidden: usize, compute: ComputeType) -> usize {
    if on_tiles(isa, compute) { rows * gathered_ld(packed_words(hidden, compute)) * 4 } else { 0 }
}

/// Whether a machine multiplies the matrices of experts so.
fn multiplies(isa: &Isa, format: Format, compute: ComputeType, order: WeightOrder, bias: bool) -> Vec<Rule> {
    match order {
        WeightOrder::Panels => vec![can_multiply(isa, format, compute)],
        WeightOrder::Neurons { .. } | WeightOrder::Split | WeightOrder::Bundles => vec![
            can_multiply(isa, unpack::format(compute), compute),
            (compute != ComputeType::I8, "panels of bytes out of neurons"),
            (!bias, "neurons with biases"),
            (!order.gate_bound() || !format.is_grouped(), NO_GATE_BOUND),
            (format.holds_neurons(), NO_NEURONS),
        ],
    }
}
