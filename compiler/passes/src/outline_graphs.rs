//! Pass `outline_graphs`: experts that a placement has on another unit leave the CPU's path (NPUMoE, §3.2).
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
//! The graphs come before the experts that are computed here, so that an accelerator begins first. Entry
//! points that decode are rewritten alike, for the groups that the placement has on the unit for their batch
//! (§5.8). They share the graphs of prompts, and there every expert has room for all rows. Hot neurons become
//! graphs in [`super::divide`].
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
use moec_ir::plan::{
    ArtifactBytes, ExpertSet, ExpertTable, GraphDecl, GraphGroup, Subgraph, SubgraphAttention,
};
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
                // Whole experts are in a set already.
                if self.set(layer, Some(batch)).is_some() {
                    continue;
                }
                let hot = Some(module.weight(down).cols() as u32);
                let (mut capacities, mut groups) = (Vec::new(), Vec::new());
                for graphs in units.graphs.hot_graphs(module, layer, batch) {
                    let first = self.graphs.len() as u32;
                    let group = |e| GraphGroup { graph: first + e, capacity: batch, experts: vec![e] };
                    groups.extend((0..graphs.len() as u32).map(group));
                    capacities = vec![batch; graphs.len()];
                    self.graphs.extend(graphs);
                }
                let (overflow, batch) = (Overflow::default(), Some(batch));
                self.sets.push(ExpertSet { layer, overflow, capacities, groups, batch, hot });
            }
        }
    }

    /// Adds the expert sets of every layer: that of prompts, and one for each batch that is decoded.
    fn experts(&mut self, module: &Module, placement: &Placement, units: &Units<'_>) {
        for table in &placement.experts {
            let decoded: BTreeSet<u32> =
                table.groups.iter().flat_map(|g| &g.decode).map(|d| d.batch).collect();
            for batch in [None].into_iter().chain(decoded.into_iter().map(Some)) {
                self.experts_of(module, placement, table, batch, units);
            }
        }
    }

    /// Adds the expert set of a layer in prompts, or in entry points that decode a batch.
    fn experts_of(
        &mut self,
        module: &Module,
        placement: &Placement,
        table: &ExpertTable,
        batch: Option<u32>,
        units: &Units<'_>,
    ) {
        let mut capacities = vec![0; table.experts.len()];
        let mut groups = Vec::new();
        let unit = self.unit;
        for (i, group) in table.groups.iter().enumerate().filter(|(_, g)| g.unit_in(batch) == unit) {
            for GroupGraph { capacity, graph } in units.graphs.group(module, table, i) {
                for &e in &group.experts {
                    capacities[e as usize] = capacity;
                }
                let graph = self.declare(graph);
                groups.push(GraphGroup { graph, capacity, experts: group.experts.clone() });
                // Larger sizes are for prompts.
                if batch.is_some_and(|rows| rows <= capacity) {
                    break;
                }
            }
        }
        if !groups.is_empty() {
            let (layer, overflow) = (table.layer, placement.overflow);
            self.sets.push(ExpertSet { layer, overflow, capacities, groups, batch, hot: None });
        }
    }

    /// Index of a graph, which is added if it is new: entry points share functions.
    fn declare(&mut self, graph: GraphDecl) -> u32 {
        let known = self.graphs.iter().position(|known| *known == graph);
        let index = known.unwrap_or(self.graphs.len());
        if known.is_none() {
            self.graphs.push(graph);
        }
        index as u32
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
                indices.push(self.declare(decl.clone()));
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

    /// Index of a layer's expert set: of prompts, or of calls that decode `batch` rows.
    pub fn set(&self, layer: u32, batch: Option<u32>) -> Option<usize> {
        self.sets.iter().position(|s| s.layer == layer && s.batch == batch)
    }

    /// Artifacts of the graphs, with the bytes of the weights that they hold, in the formats of the Graph:
    /// experts of groups, hot neurons of the batch that has most (others share them) or those that a cluster
    /// adds, and matrices of subgraphs.
    pub fn artifacts(&self, module: &Module) -> Vec<ArtifactBytes> {
        let weight = |input: &Operand| match input {
            Operand::Weight(id) => Some(*id),
            Operand::Value(_) | Operand::State(_) => None,
        };
        let bytes = |weights: BTreeSet<WeightId>| -> f64 {
            let of = |w: &Weight| w.shape.iter().product::<usize>() as f64 * w.format.bits() / 8.0;
            weights.into_iter().map(|id| of(module.weight(id))).sum()
        };
        let package = |graph: u32| self.graphs.get(graph as usize).map(|graph| graph.package.clone());
        // Bytes of the experts of graphs in an entry point.
        let experts = |layer: u32, graph: &Graph| {
            let mut own = graph.nodes.iter().filter(|n| n.scope.layer == Some(layer));
            let node = own.find(|n| matches!(n.op, Op::ExpertFfn { fixed: true, .. }));
            node.map_or(0.0, |n| bytes(n.inputs.iter().filter_map(weight).collect()))
        };
        let mut found: BTreeMap<String, f64> = BTreeMap::new();
        let mut most = |package: Option<String>, bytes: f64| {
            let own = found.entry(package.unwrap_or_default()).or_default();
            *own = own.max(bytes);
        };
        // By layer and number of clusters.
        let mut hot: BTreeMap<(u32, usize), f64> = BTreeMap::new();
        let hot_sets = || self.sets.iter().filter_map(|s| Some((s, s.hot.and(s.batch)?, s.addends().len())));
        for (set, batch, clusters) in hot_sets() {
            let graph = module.entries.iter().find(|g| g.kind == EntryKind::Decode(batch));
            let all = hot.entry((set.layer, clusters)).or_default();
            *all = graph.map_or(0.0, |graph| experts(set.layer, graph)).max(*all);
        }
        for (set, _, clusters) in hot_sets() {
            let of = |clusters| hot.get(&(set.layer, clusters)).copied().unwrap_or(0.0);
            let last = set.addends().last().and_then(|groups| groups.first());
            most(last.and_then(|group| package(group.graph)), of(clusters) - of(clusters - 1));
        }
        for set in self.sets.iter().filter(|s| s.hot.is_none()) {
            // Decoding launches whole experts as prompts do, unless it launches hot neurons.
            let is_hot = hot.keys().any(|(layer, _)| *layer == set.layer);
            let entries = module.entries.iter().filter(|g| g.kind.is_prefill() || !is_hot);
            let all = entries.map(|graph| experts(set.layer, graph)).fold(0.0, f64::max);
            for group in &set.groups {
                let share = group.experts.len() as f64 / set.capacities.len().max(1) as f64;
                most(package(group.graph), all * share);
            }
        }
        // A subgraph of several artifacts divides its channels among them.
        let mut called: BTreeMap<&[u32], BTreeSet<WeightId>> = BTreeMap::new();
        for call in &self.calls {
            let Some(part) = self.parts.get(call.part as usize) else { continue };
            let graph = module.entries.iter().find(|g| g.kind == call.boundary.entry);
            let node = move |id: &NodeId| graph.and_then(|g| g.nodes.get(id.0 as usize));
            let weights =
                call.boundary.nodes.iter().filter_map(node).flat_map(|n| n.inputs.iter().filter_map(weight));
            called.entry(&part.graphs).or_default().extend(weights);
        }
        for (graphs, weights) in called {
            let names: BTreeSet<String> = graphs.iter().filter_map(|&graph| package(graph)).collect();
            let each = bytes(weights) / names.len().max(1) as f64;
            for name in names {
                most(Some(name), each);
            }
        }
        let artifact =
            |(package, bytes): (String, f64)| ArtifactBytes { package, bytes: bytes.ceil() as u64 };
        found.into_iter().map(artifact).collect()
    }

    /// The capacities of a placement without graphs: experts have limits, and are computed with all others.
    pub fn bounds(placement: &Placement) -> Self {
        let set = |t: &ExpertTable| ExpertSet {
            layer: t.layer,
            overflow: placement.overflow,
            capacities: t.experts.iter().map(|e| e.capacity).collect(),
            groups: Vec::new(),
            batch: None,
            hot: None,
        };
        Self { sets: placement.experts.iter().map(set).collect(), ..Self::default() }
    }
}

/// Rewrites every layer of an entry point that has an expert set of whole experts. With `fixed`, static graphs compute the rows
/// within capacities, else the CPU does.
///
/// # Errors
/// A bug of the compiler: a layer without attention before its experts, or not of the form that `lower`
/// makes.
pub fn outline_graphs(module: &mut Module, statics: &Statics, fixed: bool) -> Result<()> {
    for graph in &mut module.entries {
        let batch = (!graph.kind.is_prefill()).then(|| graph.kind.rows() as u32);
        for set in statics.sets.iter().filter(|s| s.hot.is_none() && s.batch == batch) {
            let layer = set.layer;
            let other_form = || Error::bug(format!("the experts of layer {layer} have another form"));
            let routed = Routed::find(graph, layer).ok_or_else(other_form)?;
            let salient = attended(graph, layer, routed.dispatch).ok_or_else(|| {
                Error::limit(format!("layer {layer} has no attention before its experts"))
                    .because("the attention's result decides which rows an expert's graph takes")
                    .hint("set `experts = \"cpu\"` under `[placement]`: the CPU has no limit of rows")
            })?;
            if let Op::Dispatch { partial: true, .. } = graph.nodes[routed.dispatch].op {
                return Err(Error::limit(format!("layer {layer} has zero-computation experts"))
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
