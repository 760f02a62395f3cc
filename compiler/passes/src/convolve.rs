//! Pass `convolve`: what lives on another unit takes the form that the unit computes (NPUMoE, Figure 4 and §3.2).
//!
//! A Neural Engine runs `nn.Linear` as a 1×1 convolution over channels-first rows. Every part that the placement gives to
//! it is an e-graph of its own under the rules of [`layouts`](super::rewrite::rules::layouts), and what operators cost
//! there picks the form: the device's table says which ones it runs as they are, and in which form the others
//! (`[[unit.legality]]`, `form`). No operator of a graph is launched on its own, so that a change of form costs the
//! numbers that it moves, and stands at the ends of a part only.
//!
//! The processor's nodes go through the same rules with the processor's costs, and stay what they are. Experts stay one
//! operator: a group of them becomes convolutions where its graph is written.

use super::parts;
use super::reside::row_of;
use super::rewrite::{self, Applied, Costs, Island, Options, rules};
use moec_base::error::{Error, Result};
use moec_costs::units::Units;
use moec_family::StaticPart;
use moec_ir::placement::{OpPlace, Placement};
use moec_ir::scope::AnyLayer;
use moec_ir::{EntryKind, Module, Scope};

/// Rewrites what lives on the neural processing unit; `processor` is what operators cost everywhere else. The placement
/// then lists the operators that have come.
///
/// # Errors
/// Only our bugs: a rule that makes an ill-typed node.
pub fn convolve(
    module: &mut Module,
    placement: &mut Placement,
    units: &Units<'_>,
    processor: Costs<'_>,
) -> Result<Applied> {
    let npu = units.npu;
    let runs = |op: &str| npu.runs(op);
    let costs = Costs { legal: &runs, launch: 0.0 };
    let parts = parts::placed(module, placement, units);
    let cuts = parts.iter().flat_map(|part| parts::cuts(part, placement, units));
    let islands: Vec<_> = cuts.map(|cut| Island { entry: cut.entry, nodes: &cut.nodes, costs }).collect();
    let options = Options { rules: rules::layouts, keep: None, costs: processor, islands: &islands };
    let applied = rewrite::rewrite(module, &options)?;
    // What becomes graphs must still be what it was.
    let found = parts.iter().map(|old| {
        let wrong = |why| Error::bug(format!("`{}` is no graph any more: {why}", old.name));
        units.graphs.part(module, &old.scope, npu).map_err(wrong)
    });
    let found = found.collect::<Result<Vec<_>>>()?;
    relist(module, placement, units, &found);
    Ok(applied)
}

/// Lists the operators of parts anew, in the place of those that they were.
fn relist(module: &Module, placement: &mut Placement, units: &Units<'_>, parts: &[StaticPart]) {
    let unit = units.npu_index();
    let mut rows: Vec<OpPlace> = Vec::new();
    for part in parts {
        let scope = part.scope.any_layer();
        for cut in parts::cuts(part, placement, units) {
            let Some(graph) = module.entries.iter().find(|g| g.kind == cut.entry) else { continue };
            for op in cut.nodes.iter().filter_map(|n| Some(graph.nodes.get(n.0 as usize)?.op.name())) {
                let entry = cut.entry;
                if let Some(row) =
                    rows.iter_mut().find(|r| r.entry == entry && r.scope == scope && r.op == op)
                {
                    row.nodes += 1;
                    continue;
                }
                let (op, why) = (op.to_owned(), row_of(units, op));
                rows.push(OpPlace { entry, scope: scope.clone(), op, unit, nodes: 1, why });
            }
        }
    }
    // Groups of experts are no part.
    let gone = |o: &OpPlace, entry: EntryKind, scope: &Scope<AnyLayer>| {
        o.entry == entry && o.scope == *scope && o.unit == unit && o.op != "expert_ffn"
    };
    while let Some(first) = rows.first() {
        let (entry, scope) = (first.entry, first.scope.clone());
        let at = placement.ops.iter().position(|o| gone(o, entry, &scope)).unwrap_or(placement.ops.len());
        placement.ops.retain(|o| !gone(o, entry, &scope));
        let (of_scope, rest) = rows.into_iter().partition(|r| r.entry == entry && r.scope == scope);
        let of_scope: Vec<OpPlace> = of_scope;
        placement.ops.splice(at..at, of_scope);
        rows = rest;
    }
}
