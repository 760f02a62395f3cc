//! Stages: consecutive layers on each host, with their states. The first host has the first layers, the embedding
//! and the head (Huang et al., *GPipe*, section 2.1).
//!
//! A host sends its rows on once for all of its layers. So stages are for slow links, and for models that one
//! memory does not hold. A stage ends only between layers that share no state.

use super::{UnitAssignment, place, regroup, runs, stored};
use crate::decisions::Decision;
use moec_base::error::{Error, Result};
use moec_costs::units::UnitList;
use moec_ir::placement::Placement;
use moec_ir::{Module, Op, Operand, Role, WeightId};
use std::collections::{BTreeMap, BTreeSet};

/// Bytes of weights that a token reads: of each layer, and of the head.
#[derive(Debug, Default, PartialEq)]
struct Reads {
    layers: Vec<f64>,
    head: f64,
}

/// Puts consecutive layers on each host, in proportion to the hosts' rates of reading weights.
///
/// # Errors
/// Fewer places to divide the layers than hosts; an operator that the unit of a host does not run.
pub(super) fn stages(
    module: &Module,
    placed: &mut Placement,
    list: &UnitList<'_>,
    assignment: &mut UnitAssignment,
) -> Result<Vec<Decision>> {
    let (reads, hosts) = (reads(module), list.hosts());
    let ends = divide(&reads, &inseparable(module), &list.host_shares()).ok_or_else(|| {
        let (layers, hosts) = (reads.layers.len(), hosts.len());
        Error::limit(format!("{layers} layers cannot be divided into stages for {hosts} hosts"))
            .because("each host has a layer, and layers that share a state have one host")
            .hint("use fewer hosts, or `hosts = \"slices\"` under `[placement]`")
    })?;
    let of_layer = |layer: usize| hosts.get(ends.partition_point(|&end| end <= layer)).copied().unwrap_or(0);
    assignment.stages = (0..reads.layers.len()).map(of_layer).collect();
    let nodes = module.entries.iter().flat_map(|g| g.nodes.iter().map(move |n| (g, n)));
    let mut staged: Vec<_> = nodes.filter_map(|(g, n)| Some((assignment.of_host(n)?, g, n))).collect();
    // A row of another unit replaces that of the CPU.
    staged.sort_by_key(|&(unit, ..)| unit == 0);
    for (unit, graph, node) in staged {
        if let Some(accelerator) = list.accelerator(unit) {
            runs(accelerator, node)?;
        }
        place(placed, graph, node, unit, "the stage of its layer");
    }
    for table in &mut placed.experts {
        let unit = of_layer(table.layer as usize);
        table.experts.iter_mut().for_each(|row| row.unit = unit);
        regroup(table);
    }
    let begins = [0].into_iter().chain(ends.iter().copied());
    let stages = hosts.iter().zip(begins.zip(&ends)).map(|(&unit, (begin, &end))| {
        let name = list.device.units.get(unit as usize).map_or("?", |u| &u.name);
        match end - begin {
            1 => format!("layer {begin} on `{name}`"),
            _ => format!("layers {begin} to {} on `{name}`", end - 1),
        }
    });
    let shown = stages.collect::<Vec<_>>().join(", ");
    let why = "each host reads its stage's weights for a token in about the same time";
    Ok(vec![Decision::new("assign_units", "stages", shown, why)])
}

/// Bytes that a token reads; of experts, those of as many as a router chooses.
fn reads(module: &Module) -> Reads {
    let mut reads = Reads::default();
    let Some(graph) = module.entries.first() else { return reads };
    let layers = graph.nodes.iter().filter_map(|n| n.scope.layer).max().map_or(0, |last| last as usize + 1);
    reads.layers = vec![0.0; layers];
    let chosen: BTreeMap<u32, f64> = graph
        .nodes
        .iter()
        .filter_map(|n| Some((n.scope.layer?, n.op.router()?)))
        .map(|(layer, router)| (layer, router.k as f64 / router.experts.max(1) as f64))
        .collect();
    let mut seen: BTreeSet<(Option<u32>, WeightId)> = BTreeSet::new();
    for node in &graph.nodes {
        for input in &node.inputs {
            let Operand::Weight(id) = *input else { continue };
            if !seen.insert((node.scope.layer, id)) {
                continue;
            }
            let all = stored(module.weight(id)) as f64;
            let routed = matches!(node.op, Op::ExpertFfn { .. });
            match node.scope.layer.and_then(|layer| Some((layer, reads.layers.get_mut(layer as usize)?))) {
                Some((layer, sum)) => {
                    *sum += all * chosen.get(&layer).filter(|_| routed).copied().unwrap_or(1.0);
                }
                None if node.scope.role() == Role::Head => reads.head += all,
                None => {}
            }
        }
    }
    reads
}

/// Layers that have the host of the layer before them, because the two share a state.
fn inseparable(module: &Module) -> BTreeSet<usize> {
    let mut extents: BTreeMap<u32, (usize, usize)> = BTreeMap::new();
    for node in module.entries.iter().flat_map(|g| &g.nodes) {
        let Some(layer) = node.scope.layer.map(|layer| layer as usize) else { continue };
        for input in &node.inputs {
            if let Operand::State(s) = input {
                let (first, last) = extents.entry(s.0).or_insert((layer, layer));
                (*first, *last) = ((*first).min(layer), (*last).max(layer));
            }
        }
    }
    extents.into_values().flat_map(|(first, last)| first + 1..=last).collect()
}

/// Ends of the stages, one for each share, such that the slowest stage is as fast as possible; the head is in the
/// first stage. `None` if there are fewer layers to divide.
fn divide(reads: &Reads, inseparable: &BTreeSet<usize>, shares: &[f64]) -> Option<Vec<usize>> {
    let layers = reads.layers.len();
    let mut sums = vec![0.0; layers + 1];
    for (i, bytes) in reads.layers.iter().enumerate() {
        sums[i + 1] = sums[i] + bytes;
    }
    // By end of the stages so far: the slowest of them, and their ends.
    let mut best: Vec<Option<(f64, Vec<usize>)>> = vec![None; layers + 1];
    best[0] = Some((0.0, Vec::new()));
    for (host, share) in shares.iter().enumerate() {
        let mut next = vec![None; layers + 1];
        for end in (1..=layers).filter(|end| !inseparable.contains(end)) {
            for (begin, before) in best.iter().enumerate().take(end) {
                let Some((slowest, ends)) = before else { continue };
                let bytes = sums[end] - sums[begin] + if host == 0 { reads.head } else { 0.0 };
                let slowest = slowest.max(bytes / share);
                let known: &Option<(f64, Vec<usize>)> = &next[end];
                if known.as_ref().is_none_or(|(other, _)| slowest < *other) {
                    next[end] = Some((slowest, [ends.as_slice(), &[end]].concat()));
                }
            }
        }
        best = next;
    }
    best.pop()?.map(|(_, ends)| ends)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends(layers: &[f64], head: f64, inseparable: &[usize], shares: &[f64]) -> Option<Vec<usize>> {
        let reads = Reads { layers: layers.to_vec(), head };
        divide(&reads, &inseparable.iter().copied().collect(), shares)
    }

    #[test]
    fn stages_are_even_and_keep_layers_of_one_state_together() {
        assert_eq!(ends(&[1.0; 6], 0.0, &[], &[1.0; 3]), Some(vec![2, 4, 6]));
        assert_eq!(ends(&[1.0; 5], 1.0, &[], &[1.0; 2]), Some(vec![2, 5]));
        assert_eq!(ends(&[1.0; 6], 0.0, &[], &[2.0, 1.0]), Some(vec![4, 6]));
        assert_eq!(ends(&[1.0; 4], 0.0, &[2], &[1.0; 2]), Some(vec![1, 4]));
        assert_eq!(ends(&[1.0; 4], 0.0, &[1, 2, 3], &[1.0; 2]), None);
        assert_eq!(ends(&[1.0; 2], 0.0, &[], &[1.0; 3]), None);
    }
}
