//! Pass `slice_experts`: every expert as several slices of its inner channels, each with a sum of its own.
//!
//! Slices are for hosts: each has one slice of all experts, so that their work is even whatever the router
//! chooses. A layer costs one copy of its rows to each host and one sum back (Narayanan et al., *Efficient
//! Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*, section 2.3).
//!
//! ```text
//! y = expert_ffn(x, table, gate_up, down)        y_i = combine(expert_ffn(x, table, gate_up_i, down_i), table, weights)
//! out = combine(y, table, weights)          →    out = (y_0 + y_1) + y_2 …
//! ```
//!
//! Sums are in the order of the slices, on whichever unit each is. A program with as many slices on one host
//! computes the same bits. Slices begin at blocks of quantised weights where the experts are wide enough.

use moec_base::error::{Error, Result};
use moec_ir::op::Op;
use moec_ir::types::GROUP;
use moec_ir::{
    Axis, Graph, Module, Node, NodeId, Operand, Part, Patch, Scope, ValueId, Weight, WeightExpr, WeightId,
};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;

/// Weights of an expert's slices, by the weight of gate and up.
type Slices = BTreeMap<WeightId, Vec<Vec<WeightId>>>;

/// Cuts the experts of every layer into as many slices of about equal width as `slices` says of it.
///
/// # Errors
/// Experts with fewer inner channels than slices.
pub fn slice_experts(module: &mut Module, slices: &dyn Fn(u32) -> usize) -> Result<()> {
    let mut known = Slices::new();
    for index in 0..module.entries.len() {
        let graph = module.entries[index].clone();
        let of = |n: &Node| n.scope.layer.map_or(1, slices);
        let own = |n: &Node| matches!(n.op, Op::ExpertFfn { fixed: false, .. }) && of(n) > 1;
        for ffn in graph.nodes.iter().filter(|n| own(n)) {
            let weights = ffn.inputs.iter().filter_map(|input| match input {
                Operand::Weight(id) => Some(*id),
                Operand::Value(_) | Operand::State(_) => None,
            });
            let weights: Vec<WeightId> = weights.collect();
            let first = *weights.first().ok_or_else(|| Error::bug("experts without weights"))?;
            if let Entry::Vacant(entry) = known.entry(first) {
                entry.insert(declare(module, &ffn.op, &weights, of(ffn))?);
            }
        }
        loop {
            let graph = &module.entries[index];
            let next = graph.nodes.iter().position(|n| own(n) && n.scope.part.slice().is_none());
            let Some(at) = next else { break };
            let patch = split(graph, at, &known).ok_or_else(|| Error::bug("experts of another form"))?;
            patch.apply(&mut module.entries[index]).map_err(|e| Error::bug(e.to_string()))?;
        }
    }
    Ok(())
}

/// Ranges of `channels` channels: whole blocks of as many as quantised weights share a scale for, or smaller
/// ones where there are too few.
fn ranges(channels: usize, slices: usize) -> Result<Vec<Range<usize>>> {
    let block = [GROUP, 16, 8, 4, 2, 1].into_iter().find(|block| channels / block >= slices);
    let block = block.filter(|_| slices > 0).ok_or_else(|| {
        Error::limit(format!("experts of {channels} inner channels cannot be cut into {slices} slices"))
            .hint("reduce `slices` under `[placement]`, or use fewer hosts")
    })?;
    let blocks = channels.div_ceil(block);
    let at = |i: usize| (blocks * i / slices * block).min(channels);
    Ok((0..slices).map(|i| at(i)..at(i + 1)).collect())
}

/// Declares the weights of all slices of an operator's experts.
fn declare(module: &mut Module, op: &Op, weights: &[WeightId], slices: usize) -> Result<Vec<Vec<WeightId>>> {
    let projections = op.expert_ffn().map_or(1, moec_ir::Glu::projections);
    let of: Vec<Weight> = weights.iter().map(|&id| module.weight(id).clone()).collect();
    let inter = of.get(1).map_or(0, Weight::cols);
    let mut all = Vec::with_capacity(slices);
    for (i, range) in ranges(inter, slices)?.into_iter().enumerate() {
        let mut own = Vec::with_capacity(of.len());
        for (which, weight) in of.iter().enumerate() {
            // Gate and up follow each other along the axis that is cut.
            let cut = |axis: Axis, parts: usize| {
                let part = |p: usize| WeightExpr::Slice {
                    axis,
                    start: p * inter + range.start,
                    step: 1,
                    len: range.len(),
                    of: Box::new(weight.expr.clone()),
                };
                match parts {
                    1 => part(0),
                    _ => WeightExpr::Concat { axis, of: (0..parts).map(part).collect() },
                }
            };
            let mut shape = weight.shape.clone();
            let expr = match which {
                0 => {
                    shape[1] = projections * range.len();
                    cut(Axis::Rows, projections)
                }
                1 => {
                    shape[2] = range.len();
                    cut(Axis::Cols, 1)
                }
                2 => {
                    shape[1] = projections * range.len();
                    cut(Axis::Cols, projections)
                }
                // One slice adds the biases of the results.
                _ if i == 0 => weight.expr.clone(),
                _ => WeightExpr::ScaleCols {
                    of: Box::new(weight.expr.clone()),
                    by: Box::new(WeightExpr::Const(vec![0.0; shape[1]])),
                },
            };
            let id = u32::try_from(module.weights.len()).map_err(|_| Error::limit("too many weights"))?;
            let name = format!("{}.{}", weight.name, Part::of_slice(i as u32));
            module.weights.push(Weight { name, shape, expr, ..weight.clone() });
            own.push(WeightId(id));
        }
        all.push(own);
    }
    Ok(all)
}

/// Cuts the experts of node `at`.
fn split(graph: &Graph, at: usize, known: &Slices) -> Option<Patch> {
    let ffn = graph.nodes.get(at)?;
    let (&[x, table, Operand::Weight(first), ..], &[slots]) = (ffn.inputs.as_slice(), ffn.outputs.as_slice())
    else {
        return None;
    };
    let reads = |n: &Node| matches!(n.op, Op::Combine { .. }) && n.inputs.first() == Some(&slots.into());
    let end = graph.nodes.iter().position(reads)?;
    let combine = &graph.nodes[end];
    let &[out] = combine.outputs.as_slice() else { return None };
    let mut patch = Patch::new(format!("cut the experts of {}", ffn.scope), graph);
    let before = NodeId(end as u32);
    patch.remove(NodeId(at as u32));
    patch.remove(before);
    let slices = known.get(&first)?;
    let mut sum: Option<ValueId> = None;
    for (i, weights) in slices.iter().enumerate() {
        let scope = Scope { part: Part::of_slice(i as u32), ..ffn.scope.clone() };
        let y = if i == 0 { slots } else { patch.value(graph.ty(slots).clone()) };
        let inputs = [x, table].into_iter().chain(weights.iter().map(|&w| Operand::Weight(w))).collect();
        patch.add(before, Node { op: ffn.op.clone(), inputs, outputs: vec![y], scope: scope.clone() });
        let own = patch.value(graph.ty(out).clone());
        let mut inputs = combine.inputs.clone();
        inputs[0] = y.into();
        patch.add(before, Node { op: combine.op.clone(), inputs, outputs: vec![own], scope });
        let last = i + 1 == slices.len();
        sum = Some(match sum {
            None => own,
            Some(before_it) => {
                let to = if last { out } else { patch.value(graph.ty(out).clone()) };
                let inputs = vec![before_it.into(), own.into()];
                patch.add(
                    before,
                    Node { op: Op::Add, inputs, outputs: vec![to], scope: combine.scope.clone() },
                );
                to
            }
        });
    }
    (slices.len() > 1).then_some(patch)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_begin_at_blocks_and_cover_all_channels() {
        assert_eq!(ranges(1024, 2).unwrap(), [0..512, 512..1024]);
        assert_eq!(ranges(768, 5).unwrap(), [0..128, 128..288, 288..448, 448..608, 608..768]);
        assert_eq!(ranges(48, 2).unwrap(), [0..16, 16..48]);
        assert_eq!(ranges(48, 3).unwrap(), [0..16, 16..32, 32..48]);
        assert!(ranges(2, 3).unwrap_err().to_string().contains("cannot be cut into 3 slices"));
    }
}
