//! Places of the parts of an expert's neurons.

use super::numbers::Row;
use crate::dsl::{I, Kb, P};
use moec_ir::bundle::{BLOCK, Bundle, DiskNeurons, Part, PartLayout};

/// The neurons of an expert: block after block, or gates one after the other and up and down of each
/// anywhere, or all of it anywhere.
#[derive(Clone, Copy)]
pub(crate) struct NeuronAddresses<'k> {
    pub(crate) k: &'k Kb<'k>,
    pub(crate) bundle: Bundle,
    /// Their number.
    pub(crate) inter: usize,
    /// The first block, or the first gate.
    pub(crate) matrix: P<'k>,
    /// Addresses of up and down, where they are stored separately.
    pub(crate) up_down: Option<UpDownRows<'k>>,
}

/// Addresses of the neurons of all experts, [`DiskNeurons::addresses`] of each.
#[derive(Clone, Copy)]
pub(crate) struct UpDownRows<'k> {
    pub(crate) at: P<'k>,
    /// Number of the expert's first neuron among these.
    pub(crate) first: I<'k>,
    /// Whether gates are there, too.
    pub(crate) gates: bool,
}

impl<'k> NeuronAddresses<'k> {
    /// Place of a part of a neuron.
    pub(super) fn part(&self, part: Part, neuron: I<'k>) -> P<'k> {
        match (self.up_down, part) {
            (None, _) => self.in_block(part, neuron),
            (Some(rows), Part::Gate) if rows.gates => rows.of(self.bundle, neuron, 1),
            (Some(_), Part::GateBound | Part::Gate) => self.matrix.bytes(neuron * self.bundle.part_bytes()),
            (Some(up_down), Part::Up) => up_down.of(self.bundle, neuron, 0),
            (Some(up_down), Part::Down) => {
                up_down.of(self.bundle, neuron, 0).bytes(self.bundle.up_down_part_bytes())
            }
        }
    }

    fn in_block(&self, part: Part, neuron: I<'k>) -> P<'k> {
        let k = self.k;
        let i = neuron & k.i(BLOCK as i64 - 1);
        let first = neuron - i;
        let PartLayout { each, first: offset, pitch } = self.bundle.place(part);
        let there = match self.inter % BLOCK {
            0 => k.i(BLOCK as i64),
            _ => (k.i(self.inter as i64) - first).min(k.i(BLOCK as i64)),
        };
        self.matrix.bytes(first * self.bundle.bytes() + there * each + i * pitch).bytes(offset)
    }

    /// A part of a neuron, as numbers.
    pub(super) fn row(&self, part: Part, neuron: I<'k>) -> Row<'k> {
        let row = Row::part(self.k, self.bundle.format, self.bundle.hidden, self.part(part, neuron));
        match (self.up_down, part) {
            (Some(up_down), Part::Up | Part::Down) if self.bundle.has_split_scales() => {
                let scales = up_down.of(self.bundle, neuron, 1);
                let after = if up_down.gates { self.bundle.part_bytes() } else { 0 };
                let skip = if part == Part::Down { self.bundle.up_down_scales_bytes() } else { 0 };
                row.with_scales(scales.bytes(after + skip))
            }
            _ => row,
        }
    }
}

impl<'k> UpDownRows<'k> {
    /// Address `which` of a neuron.
    fn of(&self, bundle: Bundle, neuron: I<'k>, which: usize) -> P<'k> {
        let addresses = DiskNeurons { bundle, gates: self.gates }.addresses();
        self.at.load_address((self.first + neuron) * addresses + which)
    }
}
