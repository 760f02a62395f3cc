//! Subgraphs that a placement gives to a unit with static graphs.

use moec_backend::{StaticSubgraph, SubgraphBoundary};
use moec_costs::units::Units;
use moec_ir::placement::{ExpertTable, Placement};
use moec_ir::{EntryKind, Module, Op, Scope};

/// Subgraphs that a placement gives to the unit in any entry point, in the order of the model. The placement
/// does not distinguish layers, except that those that cannot be a graph are on the CPU.
pub fn placed(module: &Module, placement: &Placement, units: &Units<'_>) -> Vec<StaticSubgraph> {
    let Some(graph) = module.entries.first() else { return Vec::new() };
    let there = |scope: &Scope| module.entries.iter().any(|g| placed_in(placement, units, scope, g.kind));
    let mut scopes: Vec<&Scope> = graph.nodes.iter().map(|n| &n.scope).collect();
    scopes.dedup();
    let here = scopes.into_iter().filter(|s| there(s));
    here.filter_map(|scope| units.graphs.subgraph(module, scope, units.npu).ok()).collect()
}

/// True if a placement gives the matrices of a scope to the unit in one entry point.
fn placed_in(placement: &Placement, units: &Units<'_>, scope: &Scope, entry: EntryKind) -> bool {
    let any = scope.any_layer();
    let mut of_scope = placement.ops.iter().filter(|o| o.entry == entry && o.scope == any);
    of_scope.any(|o| Op::MATRICES.contains(&&*o.op) && o.unit == units.npu_index())
}

/// Nodes of a subgraph in the entry points in which a placement gives it to the unit. Attention has one
/// state, so it is in all of them or in none.
pub fn boundaries<'a>(
    part: &'a StaticSubgraph,
    placement: &'a Placement,
    units: &'a Units<'_>,
) -> impl Iterator<Item = &'a SubgraphBoundary> {
    let there =
        |c: &&SubgraphBoundary| part.attention.is_some() || placed_in(placement, units, &part.scope, c.entry);
    part.boundaries.iter().filter(there)
}

/// Groups of experts that a placement gives to the unit in any entry point: the tables of layers with indices
/// of groups.
pub fn groups<'a>(placement: &'a Placement, units: &Units<'_>) -> Vec<(&'a ExpertTable, usize)> {
    let unit = units.npu_index();
    let of = |table: &'a ExpertTable| {
        let there = table.groups.iter().enumerate().filter(move |(_, g)| g.is_on(unit));
        there.map(move |(i, _)| (table, i))
    };
    placement.experts.iter().flat_map(of).collect()
}

/// Checks that a region of the placement, `nodes` of a scope in one entry point, can be graphs.
///
/// # Errors
/// The reason why it cannot, as a message for users.
pub fn region(part: &Result<StaticSubgraph, String>, entry: usize, nodes: &[usize]) -> Result<(), String> {
    let part = part.as_ref().map_err(Clone::clone)?;
    let own = part.boundaries.get(entry).map(|c| &*c.nodes).unwrap_or_default();
    if own.iter().map(|n| n.0 as usize).eq(nodes.iter().copied()) {
        Ok(())
    } else {
        Err("a graph is made for all of it, and some of it cannot be in one".into())
    }
}
