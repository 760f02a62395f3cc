//! Where the parts of an expert's neurons lie.

use super::numbers::Row;
use crate::dsl::{I, Kb, P};
use moec_ir::bundle::{Bundle, Part};

/// Parts of the neurons of an expert: bundle after bundle, or gates one after the other and the rest of each anywhere.
#[derive(Clone, Copy)]
pub(crate) struct Places<'k> {
    pub(crate) k: &'k Kb<'k>,
    pub(crate) bundle: Bundle,
    /// The first bundle, or the first gate.
    pub(crate) matrix: P<'k>,
    /// Addresses of up and down of all neurons of all experts, where they lie apart.
    pub(crate) rests: Option<P<'k>>,
    /// Number of the expert's first neuron among these.
    pub(crate) first: I<'k>,
}

impl<'k> Places<'k> {
    /// A part of a neuron.
    pub(super) fn row(&self, part: Part, neuron: I<'k>) -> Row<'k> {
        let Self { k, bundle, matrix, rests, first } = *self;
        let bundle_at = match (rests, part) {
            (None, _) => matrix.bytes(neuron * bundle.bytes()),
            (Some(_), Part::Gate) => matrix.bytes(neuron * bundle.part_bytes()),
            // Where the bundle would begin.
            (Some(rests), Part::Up | Part::Down) => {
                rests.load_address(first + neuron).bytes(k.i(-(bundle.part(Part::Up) as i64)))
            }
        };
        Row::part(k, bundle, part).of(bundle_at)
    }
}
