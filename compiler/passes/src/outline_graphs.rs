//! Pass `outline_graphs`: experts of the prefill that a placement has on another unit leave the CPU's path
//! (NPUMoE, §3.2).
//!
//! Routing stays where it is. The router's choices are split in two parts. The first are rows that an
//! expert's static graph has room for. The second is computed here: experts without a graph and, under
//! `spill`, rows past a capacity. Each part has its own dispatch, experts and combine, and their sums are
//! added:
//!
//! ```text
//! ids, weights = router(logits)          ids, weights = router(logits)
//! table = dispatch(ids)                  stay, rest = limit_capacity(ids, attention's output)
//! y = expert_ffn(x, table)        →      there = dispatch(stay);  y1 = expert_ffn(x, there) {fixed}
//! out = combine(y, table, weights)       here = dispatch(rest);   y2 = expert_ffn(x, here)
//!                                        out = combine(y1, there, weights) + combine(y2, here, weights)
//! ```
//!
//! The graphs come before the experts that are computed here, so that an accelerator begins first. Experts of
//! decoding are not changed: their rows are too few for a static graph (§4.3). Only their hot neurons may
//! become graphs ([`super::divide`]).
//!
//! Attention, dense networks and the head stay as they are in the Graph. If the placement has them on the
//! unit, `layout` makes one step of all their nodes.

use super::decisions::Decision;
use super::parts;
use moec_backend::{GroupGraph, StaticSubgraph, SubgraphBoundary};
use moec_base::error::{Error, Result};
use moec_costs::units::Units;
use moec_ir::op::LimitCapacityDesc;
use moec_ir::placement::{Overflow, Placement};
use moec_ir::plan::{ExpertSet, ExpertTable, GraphDecl, GraphGroup, HotNeurons, Subgraph, SubgraphAttention};
use moec_ir::{EntryKind, Graph, Module, Node, NodeId, Op, Operand, Patch, Scope, ValueId, Weight, WeightId};
use std::collections::{BTreeMap, BTreeSet};

/// Static graphs of a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Statics {
    /// Graphs.
    pub graphs: Vec<GraphDecl>,
    /// Expert sets that they compute.
    pub sets: Vec<ExpertSet>,
    /// Subgraphs that they compute.
    pub parts: Vec<Subgraph>,
    /// Calls of the subgraphs: nodes that become one step.
    pub calls: Vec<SubgraphCall>,
    /// Index of the unit that executes them.
    pub unit: u32,
}

/// Decisions of legalisation on the subgraphs that a placement gives to the unit, if its graphs are written
/// in operators of its own.
pub fn legalised(module: &Module, placement: &Placement, units: &Units<'_>) -> Vec<Decision> {
    let decision = |part: StaticSubgraph| {
        let made = part.legalised.iter().map(|(name, count)| format!("{count} {}", name.replace('_', " ")));
        let made: Vec<_> = made.collect();
        let figures: Vec<_> = part.legalised.iter().map(|(name, count)| (*name, *count as f64)).collect();
        let subject = match part.scope.layer {
            Some(layer) => part.name.replacen(&layer.to_string(), "*", 1),
            None => part.name,
        };
        let reason =
            "linear layers run as convolutions there, and rows change their layout around chains of these";
        let decision = Decision::new("legalise", &format!("graph `{subject}`"), made.join(", "), reason);
        let decision = decision.with(&figures);
        match part.scope.layer {
            Some(layer) => decision.in_layer(layer),
            None => decision,
        }
    };
    let parts = parts::placed(module, placement, units).into_iter();
    parts.filter(|part| !part.legalised.is_empty()).map(decision).collect()
}

/// Call of a subgraph in an entry point.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubgraphCall {
    /// Index into [`Statics::parts`].
    pub part: u32,
    /// Its nodes.
    pub boundary: SubgraphBoundary,
}

impl Statics {
    /// Graphs, expert sets and subgraphs that a placement has on the unit with static graphs.
    ///
    /// # Errors
    /// A bug of the compiler: a subgraph that is in no entry point.
    pub fn of(module: &Module, placement: &Placement, units: &Units<'_>) -> Result<Self> {
        let mut statics = Self { unit: units.npu_index(), ..Self::default() };
        statics.experts(module, placement, units);
        for part in parts::placed(module, placement, units) {
            statics.part(module, &part, placement, units)?;
        }
        statics.hot(module, units);
        Ok(statics)
    }

    /// Adds the hot neurons of experts, if the Graph has them in separate nodes.
    fn hot(&mut self, module: &Module, units: &Units<'_>) {
        for graph in &module.entries {
            let EntryKind::Decode(batch) = graph.kind else { continue };
            for node in &graph.nodes {
                let (Op::ExpertFfn { fixed: true, .. }, Some(layer), Some(&Operand::Weight(down))) =
                    (&node.op, node.scope.layer, node.inputs.get(3))
                else {
                    continue;
                };
                let hot = Some(HotNeurons { batch, neurons: module.weight(down).cols() as u32 });
                let graphs = units.graphs.hot_graphs(module, layer, batch);
                let (first, capacities) = (self.graphs.len() as u32, vec![batch; graphs.len()]);
                let group = |e| GraphGroup { graph: first + e, capacity: batch, experts: vec![e] };
                let groups = (0..graphs.len() as u32).map(group).collect();
                self.sets.push(ExpertSet { layer, overflow: Overflow::default(), capacities, groups, hot });
                self.graphs.extend(graphs);
            }
        }
    }

    fn experts(&mut self, module: &Module, placement: &Placement, units: &Units<'_>) {
        for table in &placement.experts {
            let mut capacities = vec![0; table.experts.len()];
            let mut groups = Vec::new();
            for (i, group) in table.groups.iter().enumerate().filter(|(_, g)| g.unit == self.unit) {
                for GroupGraph { capacity, graph } in units.graphs.group(module, table, i) {
                    for &e in &group.experts {
                        capacities[e as usize] = capacity;
                    }
                    let index = self.graphs.len() as u32;
                    groups.push(GraphGroup { graph: index, capacity, experts: group.experts.clone() });
                    self.graphs.push(graph);
                }
            }
            if !groups.is_empty() {
                let (layer, overflow) = (table.layer, placement.overflow);
                self.sets.push(ExpertSet { layer, overflow, capacities, groups, hot: None });
            }
        }
    }

    /// Adds a subgraph in the entry points where the placement has it on the unit. Attention has one state,
    /// so it is there in all entry points or in none.
    fn part(
        &mut self,
        module: &Module,
        part: &StaticSubgraph,
        placement: &Placement,
        units: &Units<'_>,
    ) -> Result<()> {
        for boundary in parts::boundaries(part, placement, units) {
            let graph = module.entries.iter().find(|g| g.kind == boundary.entry);
            let graph =
                graph.ok_or_else(|| Error::bug(format!("`{}` is not in {}", part.name, boundary.entry)))?;
            let mut indices = Vec::new();
            for decl in part.graphs.iter().filter(|g| g.entry == boundary.entry).map(|g| &g.graph) {
                // Entry points of equally many rows share a function.
                let known = self.graphs.iter().position(|d| d == decl);
                indices.push(known.unwrap_or(self.graphs.len()) as u32);
                if known.is_none() {
                    self.graphs.push(decl.clone());
                }
            }
            let cols = |v| graph.ty(v).cols() as u32;
            let attention = part.attention.map(|a| SubgraphAttention {
                angles: boundary.angles.map_or(0, cols),
                context: a.context as u32,
                window: a.window.map(|w| w as u32),
                one_call_per_row: !boundary.entry.is_prefill(),
            });
            self.calls.push(SubgraphCall { part: self.parts.len() as u32, boundary: boundary.clone() });
            self.parts.push(Subgraph {
                graphs: indices,
                inputs: cols(boundary.x),
                outputs: cols(boundary.y),
                attention,
            });
        }
        Ok(())
    }

    /// Index of a layer's expert set: of whole experts, or of hot neurons for calls that decode `decoded`
    /// rows.
    pub fn set(&self, layer: u32, decoded: Option<u32>) -> Option<usize> {
        self.sets.iter().position(|s| s.layer == layer && s.hot.map(|h| h.batch) == decoded)
    }

    /// Bytes of the weights that graphs hold, in the formats of the Graph: experts of groups, hot neurons of
    /// the batch that has most (others share them), and matrices of subgraphs.
    pub fn weight_bytes(&self, module: &Module) -> u64 {
        let weight = |input: &Operand| match input {
            Operand::Weight(id) => Some(*id),
            Operand::Value(_) | Operand::State(_) => None,
        };
        let bytes = |weights: BTreeSet<WeightId>| -> f64 {
            let of = |w: &Weight| w.shape.iter().product::<usize>() as f64 * w.format.bits() / 8.0;
            weights.into_iter().map(|id| of(module.weight(id))).sum()
        };
        let fixed = |layer: u32, hot: bool| {
            let entries = module.entries.iter().filter(move |g| g.kind.is_prefill() != hot);
            let nodes = entries.flat_map(|g| &g.nodes).filter(move |n| n.scope.layer == Some(layer));
            nodes.filter(|n| matches!(n.op, Op::ExpertFfn { fixed: true, .. }))
        };
        let of_nodes = |n: &Node| bytes(n.inputs.iter().filter_map(weight).collect());
        let most = |layer, hot| fixed(layer, hot).map(of_nodes).fold(0.0, f64::max);
        let layers: BTreeSet<u32> = self.sets.iter().filter(|s| s.hot.is_some()).map(|s| s.layer).collect();
        let hot: f64 = layers.into_iter().map(|layer| most(layer, true)).sum();
        let whole = self.sets.iter().filter(|s| s.hot.is_none()).map(|set| {
            let inside = set.capacities.iter().filter(|&&capacity| capacity > 0).count();
            most(set.layer, false) * inside as f64 / set.capacities.len().max(1) as f64
        });
        let called = self.calls.iter().flat_map(|call| {
            let graph = module.entries.iter().find(|g| g.kind == call.boundary.entry);
            let node = move |id: &NodeId| graph.and_then(|g| g.nodes.get(id.0 as usize));
            call.boundary.nodes.iter().filter_map(node).flat_map(|n| n.inputs.iter().filter_map(weight))
        });
        (hot + whole.sum::<f64>() + bytes(called.collect())).ceil() as u64
    }

    /// The capacities of a placement without graphs: experts have limits, and are computed with all others.
    pub fn bounds(placement: &Placement) -> Self {
        let set = |t: &ExpertTable| ExpertSet {
            layer: t.layer,
            overflow: placement.overflow,
            capacities: t.experts.iter().map(|e| e.capacity).collect(),
            groups: Vec::new(),
            hot: None,
        };
        Self { sets: placement.experts.iter().map(set).collect(), ..Self::default() }
    }
}

/// Rewrites the prefill of every layer that has an expert set. With `fixed`, static graphs compute the rows
/// within capacities, else the CPU does.
///
/// # Errors
/// A bug of the compiler: a layer without attention before its experts, or not of the form that `lower`
/// makes.
pub fn outline_graphs(module: &mut Module, statics: &Statics, fixed: bool) -> Result<()> {
    let sets: BTreeMap<u32, &ExpertSet> = statics.sets.iter().map(|s| (s.layer, s)).collect();
    for graph in module.entries.iter_mut().filter(|g| g.kind.is_prefill()) {
        for (&layer, set) in &sets {
            let other_form = || Error::bug(format!("the experts of layer {layer} have another form"));
            let routed = Routed::find(graph, layer).ok_or_else(other_form)?;
            let salient = attended(graph, layer, routed.dispatch).ok_or_else(|| {
                Error::limit(format!("layer {layer} has no attention before its experts"))
                    .because("the attention's result decides which rows an expert's graph takes")
                    .hint("set `experts = \"cpu\"` under `[placement]`: the CPU has no limit of rows")
            })?;
            if let Op::Dispatch { partial: true, .. } = graph.nodes[routed.dispatch].op {
                return Err(Error::limit(format!("layer {} has zero-computation experts", set.layer))
                    .hint("keep all of its experts on the CPU: `experts = \"cpu\"` under `[placement]`"));
            }
            let patch = split(graph, &routed, salient, set, fixed).ok_or_else(other_form)?;
            patch.apply(graph).map_err(|e| Error::bug(e.to_string()))?;
        }
    }
    Ok(())
}

/// Nodes of a layer's experts.
pub(super) struct Routed {
    dispatch: usize,
    pub(super) ffn: usize,
    pub(super) combine: usize,
}

impl Routed {
    pub(super) fn find(graph: &Graph, layer: u32) -> Option<Self> {
        let scope = Scope::in_layer(layer, moec_ir::Part::FFN);
        let find = |is: fn(&Op) -> bool| graph.nodes.iter().position(|n| n.scope == scope && is(&n.op));
        Some(Self {
            dispatch: find(|op| matches!(op, Op::Dispatch { .. }))?,
            ffn: find(|op| matches!(op, Op::ExpertFfn { .. }))?,
            combine: find(|op| matches!(op, Op::Combine { .. }))?,
        })
    }
}

/// Result of a layer's attention, or of the mixer in its place, before it is added to anything, if that is
/// known before node `end`. Attention may come before the experts or run in parallel to them.
fn attended(graph: &Graph, layer: u32, end: usize) -> Option<Operand> {
    let own = |n: &&Node| n.scope.layer == Some(layer) && n.scope.role().mixes_tokens();
    let mut last = graph.nodes.get(..end)?.iter().rev().find(own)?;
    // Its own nodes are followed by the sums with other mixers and with the residual stream.
    while let (Op::Add, Some(&Operand::Value(given))) = (&last.op, last.inputs.get(1)) {
        match graph.def(given).and_then(|n| graph.nodes.get(n.0 as usize)).filter(own) {
            Some(node) => last = node,
            None => return Some(given.into()),
        }
    }
    last.outputs.first().map(|&v| v.into())
}

/// Splits the experts of one layer; `salient` is the result of attention.
fn split(graph: &Graph, routed: &Routed, salient: Operand, set: &ExpertSet, fixed: bool) -> Option<Patch> {
    let nodes = [routed.dispatch, routed.ffn, routed.combine];
    let [dispatch, ffn, combine] = nodes.map(|i| &graph.nodes[i]);
    let (&Op::Dispatch { experts, .. }, &[ids]) = (&dispatch.op, dispatch.inputs.as_slice()) else {
        return None;
    };
    let (&Op::ExpertFfn { glu, bias, .. }, &[out]) = (&ffn.op, combine.outputs.as_slice()) else {
        return None;
    };
    let Operand::Value(chosen) = ids else { return None };
    let types = [chosen, dispatch.outputs[0], ffn.outputs[0], out].map(|v| graph.ty(v).clone());
    let [of_ids, of_table, of_slots, of_rows] = types;

    let mut patch = Patch::new(format!("split the experts of layer {}", set.layer), graph);
    for i in nodes {
        patch.remove(NodeId(i as u32));
    }
    // The first part gets new values; the second keeps those of the unsplit experts.
    let ids_of = [patch.value(of_ids.clone()), patch.value(of_ids)];
    let tables = [patch.value(of_table), dispatch.outputs[0]];
    let slots = [patch.value(of_slots), ffn.outputs[0]];
    let sums = [patch.value(of_rows.clone()), patch.value(of_rows)];
    // Nodes between the three stay before them: they depend on none of them.
    let reads = |n: &Node| n.inputs.contains(&Operand::Value(out));
    let reader = graph.nodes.iter().position(reads).unwrap_or(graph.nodes.len());
    let before = NodeId(reader as u32);
    let mut push = |op: Op, inputs: Vec<Operand>, outputs: Vec<ValueId>| {
        patch.add(before, Node { op, inputs, outputs, scope: dispatch.scope.clone() });
    };
    let desc =
        LimitCapacityDesc { capacities: set.capacities.clone(), spill: set.overflow == Overflow::Spill };
    push(Op::LimitCapacity(desc), vec![ids, salient, Graph::POS.into()], ids_of.to_vec());
    // All tables first, so that readers of one need not wait for another.
    for (ids, table) in ids_of.into_iter().zip(tables) {
        push(Op::Dispatch { experts, partial: true }, vec![ids.into()], vec![table]);
    }
    for ((table, y), fixed) in tables.into_iter().zip(slots).zip([fixed, false]) {
        let mut inputs = ffn.inputs.clone();
        *inputs.get_mut(1)? = table.into();
        push(Op::ExpertFfn { glu, bias, fixed }, inputs, vec![y]);
    }
    for ((table, y), sum) in tables.into_iter().zip(slots).zip(sums) {
        let mut inputs = combine.inputs.clone();
        *inputs.get_mut(0)? = y.into();
        *inputs.get_mut(1)? = table.into();
        push(Op::Combine { partial: true }, inputs, vec![sum]);
    }
    push(Op::Add, sums.map(Operand::Value).to_vec(), vec![out]);
    Some(patch)
}
