//! Core ML packages: written at build time, read back and executed by `moec verify`. Weights are the checkpoint's, cast
//! to f16.
//!
//! A group of experts lies at `artifacts/layers.L.group.G.mlpackage`. Its functions `cap{C}` take the packed rows of
//! the group's experts (NPUMoE, §4.2), each with room for C of every expert. Attention, dense networks and the head are [`parts`].

mod attention;
mod dense;
pub mod emit;
pub mod emulate;
mod head;
pub mod parts;
pub mod verify;
mod walk;
mod weights;

use moec_ir::plan::{ExpertTable, Placement};
use moec_ir::{Glu, Graph, Module, Node, Op, Operand, WeightId};

/// Where the package of a group lies in a bundle.
pub(crate) fn path(table: &ExpertTable, group: usize) -> String {
    parts::path(&table.group_name(group))
}

/// Name of the function that takes so many rows of each expert.
pub(crate) fn function(capacity: u32) -> String {
    format!("cap{capacity}")
}

/// Rows per expert of a group's functions, ascending: those of the placement, or the capacity of its tier.
pub(crate) fn sizes(table: &ExpertTable, group: usize) -> Vec<u32> {
    let Some(group) = table.groups.get(group) else { return Vec::new() };
    match group.sizes.as_slice() {
        [] => table.tiers.get(group.tier as usize).copied().into_iter().collect(),
        sizes => sizes.to_vec(),
    }
}

/// Groups that a placement gives to the unit of that name: layer tables with indices of groups.
fn groups<'a>(placement: &'a Placement, unit: &'a str) -> impl Iterator<Item = (&'a ExpertTable, usize)> {
    placement.experts.iter().flat_map(move |table| {
        let on_unit = move |&(_, g): &(usize, &moec_ir::plan::ExpertGroup)| placement.unit(g.unit) == unit;
        table.groups.iter().enumerate().filter(on_unit).map(move |(i, _)| (table, i))
    })
}

/// The experts of a layer, as the Graph has them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Experts {
    /// How gate and up join.
    glu: Glu,
    /// `[E, 2I, H]`
    pub(crate) gate_up: WeightId,
    /// `[E, H, I]`
    down: WeightId,
    /// `[E, 2I]` and `[E, H]`
    biases: Option<[WeightId; 2]>,
}

impl Experts {
    /// Those of a layer.
    pub(crate) fn of(module: &Module, layer: u32) -> Option<Self> {
        let graph: &Graph = module.entries.first()?;
        let in_layer = |n: &&Node| n.scope.layer == Some(layer);
        graph.nodes.iter().filter(in_layer).find_map(|node| {
            let Op::ExpertFfn { glu, .. } = node.op else { return None };
            let weights = node.inputs.iter().filter_map(|o| match o {
                Operand::Weight(id) => Some(*id),
                _ => None,
            });
            match *weights.collect::<Vec<_>>().as_slice() {
                [gate_up, down] => Some(Self { glu, gate_up, down, biases: None }),
                [gate_up, down, a, b] => Some(Self { glu, gate_up, down, biases: Some([a, b]) }),
                _ => None,
            }
        })
    }
}
