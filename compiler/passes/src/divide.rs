//! Experts of decoding on two units: hot neurons in static graphs, cold ones in kernels (PowerInfer-2, §4.1.2
//! and §4.1.3).
//!
//! This is part of pass `cluster`, for layers whose hot neurons are networks. Both parts take the rows that
//! the router gave an expert, and the unit of the graphs begins first:
//!
//! ```text
//! y = expert_ffn(x, table, gate_up, down)        a = expert_ffn(x, table, hot gate_up, hot down) {fixed}
//! out = combine(y, table, weights)          →    b = neuron_ffn(x, table, cold)
//!                                                out = combine(a, table, weights) + combine(b, table, weights)
//! ```
//!
//! Each batch size has its own share. Hot weights are not packed, since only the static graph uses them.
//! Prompts take whole experts. A dense network is divided as one expert that every row takes.
//!
//! If experts stay on disk, all entry points share the neurons there, the hottest first, and decoding passes
//! over those that are hot at its batch (§4.2):
//!
//! ```text
//! b = neuron_ffn(x, table, gates, up_down) {paged, hot}
//! ```

use super::cluster::{Activity, experts_to_neurons, networks_to_experts, neuron_format, order, stacked};
use super::outline_graphs::Routed;
use moec_backend::{HotBatch, HotLayer, LayerExperts};
use moec_base::error::{Error, Result};
use moec_config::Skip;
use moec_costs::units::Units;
use moec_ir::placement::{OpAssignment, Placement};
use moec_ir::{
    Axis, EntryKind, Glu, Graph, Module, Node, NodeId, Op, Operand, Part, Patch, Scope, ValueId, Weight,
    WeightExpr, WeightId,
};

/// Divides the experts of layers, for every batch that has hot neurons. Each layer comes with the neurons of
/// its experts, the hottest first. Cold neurons are in memory.
///
/// # Errors
/// A bug of the compiler: a layer that is not of the form that `lower` makes.
pub fn divide(module: &mut Module, layers: &[(HotLayer, Vec<Vec<u32>>)]) -> Result<()> {
    networks_to_experts(module, |_, entry, layer, _| {
        let own = layers.iter().filter(|(l, _)| l.layer == layer).flat_map(|(l, _)| &l.batches);
        !entry.is_prefill() && own.into_iter().any(|b| b.batch as usize == entry.rows())
    })?;
    divide_into(module, layers, true)
}

/// As [`divide`], but all experts stay on disk, by neurons in the order of `activity`, and so do dense
/// networks, except where `fixed` says that a static graph has them. The whole matrices, out of which networks
/// are written, become weights that no node reads.
///
/// # Errors
/// Those of [`divide`] and of [`super::cluster::cluster`].
pub fn divide_on_disk(
    module: &mut Module,
    layers: &[(HotLayer, Vec<Vec<u32>>)],
    activity: &dyn Activity,
    fixed: impl Fn(EntryKind, NodeId) -> bool,
) -> Result<()> {
    networks_to_experts(module, |_, entry, _, network| {
        !entry.is_prefill() || !network.nodes.iter().any(|&node| fixed(entry, node))
    })?;
    divide_into(module, layers, false)?;
    let experts = layers.iter().filter_map(|(layer, _)| LayerExperts::of(module, layer.layer));
    let whole = experts.flat_map(|e| [e.gate_up, e.down]).map(|id| module.weight(id).clone());
    let whole: Vec<Weight> = whole.collect();
    experts_to_neurons(module, Skip::On, &Ordered { layers, others: activity }, true)?;
    for (layer, HotBatch { batch, neurons }) in
        layers.iter().flat_map(|(l, _)| l.batches.iter().map(move |&b| (l.layer, b)))
    {
        let nodes = decoding(module, batch).flat_map(|g| &mut g.nodes);
        for node in nodes.filter(|n| n.scope.layer == Some(layer)) {
            if let Op::NeuronFfn { hot, .. } = &mut node.op {
                *hot = Some(neurons as usize);
            }
        }
    }
    let missing = |w: &Weight| module.weights.iter().all(|other| other.name != w.name);
    let whole: Vec<Weight> = whole.into_iter().filter(missing).collect();
    module.weights.extend(whole);
    Ok(())
}

/// The order of neurons that networks have; of other layers, that of their activity.
struct Ordered<'a> {
    layers: &'a [(HotLayer, Vec<Vec<u32>>)],
    others: &'a dyn Activity,
}

impl Activity for Ordered<'_> {
    fn zeros(&self, layer: u32) -> Option<f64> {
        self.others.zeros(layer)
    }

    fn hottest(&self, layer: u32, expert: usize) -> Option<Vec<usize>> {
        match self.layers.iter().find(|(own, _)| own.layer == layer) {
            Some((_, orders)) => Some(orders.get(expert)?.iter().map(|&n| n as usize).collect()),
            None => self.others.hottest(layer, expert),
        }
    }
}

/// Entry points that decode so many rows.
fn decoding(module: &mut Module, rows: u32) -> impl Iterator<Item = &mut Graph> {
    let decodes = move |k: EntryKind| !k.is_prefill() && k.rows() == rows as usize;
    module.entries.iter_mut().filter(move |g| decodes(g.kind))
}

/// Divides layers; cold neurons are bundles of their own if they are `in_memory`, else the whole experts.
fn divide_into(module: &mut Module, layers: &[(HotLayer, Vec<Vec<u32>>)], in_memory: bool) -> Result<()> {
    for (layer, orders) in layers {
        let other_form = || Error::bug(format!("the experts of layer {} have another form", layer.layer));
        let experts = LayerExperts::of(module, layer.layer).ok_or_else(other_form)?;
        for &batch in &layer.batches {
            let halves = declare_weights(module, &experts, batch, orders, in_memory);
            for graph in decoding(module, batch.batch) {
                let routed = Routed::find(graph, layer.layer).ok_or_else(other_form)?;
                let patch = split(graph, &routed, layer.layer, experts.glu, &halves);
                let patch = patch.ok_or_else(other_form)?;
                patch.apply(graph).map_err(|e| Error::bug(e.to_string()))?;
            }
        }
    }
    Ok(())
}

/// The weights of hot and cold neurons.
struct HotColdWeights {
    /// `[E, 2n, H]` and `[E, H, n]`
    hot: [WeightId; 2],
    /// `[E, I - n, 3H]` if they are in memory, else `[E, 2I, H]` and `[E, H, I]`; empty if all neurons are
    /// hot.
    cold: Vec<WeightId>,
}

/// Declares the weights of a layer for a batch.
fn declare_weights(
    module: &mut Module,
    experts: &LayerExperts,
    HotBatch { batch, neurons }: HotBatch,
    orders: &[Vec<u32>],
    in_memory: bool,
) -> HotColdWeights {
    let (gate_up, down) = (module.weight(experts.gate_up).clone(), module.weight(experts.down).clone());
    let (count, inter, hidden, hot) = (down.matrices(), down.cols(), down.rows(), neurons as usize);
    let of = |e: usize| orders.get(e).map(|order| order.iter().map(|&n| n as usize).collect());
    let order = order(&(0..count).map(of).collect::<Vec<_>>(), inter);
    let rows = |start, len, of| WeightExpr::Slice { axis: Axis::Rows, start, step: 1, len, of: Box::new(of) };
    let arranged = |of| match &order {
        Some(order) => WeightExpr::Arrange { order: order.clone(), of: Box::new(of) },
        None => of,
    };
    let half = |start| stacked(&gate_up, rows(start, inter, gate_up.expr.clone()));
    let columns = || stacked(&down, WeightExpr::Transpose(Box::new(down.expr.clone())));
    let hottest = |of| rows(0, hot, arranged(of));
    let both = WeightExpr::Concat { axis: Axis::Rows, of: vec![hottest(half(0)), hottest(half(inter))] };
    let stem = gate_up.name.strip_suffix("gate_up").unwrap_or(&gate_up.name);
    let mut push = |name: String, [rows, cols]: [usize; 2], format, expr| {
        let (name, shape) = (format!("{stem}{name}"), vec![count, rows, cols]);
        module.weights.push(Weight { name, shape, class: gate_up.class, format, expr });
        WeightId(module.weights.len() as u32 - 1)
    };
    let hot_gate_up = push(format!("hot.{batch}.gate_up"), [2 * hot, hidden], gate_up.format, both);
    let back = WeightExpr::Transpose(Box::new(hottest(columns())));
    let hot_down = push(format!("hot.{batch}.down"), [hidden, hot], down.format, back);
    let bundles = || {
        let parts = vec![half(0), half(inter), columns()];
        rows(hot, inter - hot, arranged(WeightExpr::Concat { axis: Axis::Cols, of: parts }))
    };
    let cold = match (hot < inter, in_memory) {
        (false, _) => Vec::new(),
        (true, true) => {
            let (name, shape) = (format!("cold.{batch}"), [inter - hot, 3 * hidden]);
            vec![push(name, shape, neuron_format(gate_up.format), bundles())]
        }
        (true, false) => vec![experts.gate_up, experts.down],
    };
    HotColdWeights { hot: [hot_gate_up, hot_down], cold }
}

/// Divides the experts of one layer in one entry point.
fn split(graph: &Graph, routed: &Routed, layer: u32, glu: Glu, halves: &HotColdWeights) -> Option<Patch> {
    let [ffn, combine] = [routed.ffn, routed.combine].map(|i| &graph.nodes[i]);
    let (&[x, table, ..], &[slots]) = (ffn.inputs.as_slice(), ffn.outputs.as_slice()) else { return None };
    let &[sum] = combine.outputs.as_slice() else { return None };
    let mut patch = Patch::new(format!("divide the experts of layer {layer}"), graph);
    patch.remove(NodeId(routed.ffn as u32));
    let weights = |ids: &[WeightId]| ids.iter().map(|&w| Operand::Weight(w)).collect::<Vec<_>>();
    let expert = |op: Op, own: &[WeightId], y: ValueId| {
        let inputs = [vec![x, table], weights(own)].concat();
        Node { op, inputs, outputs: vec![y], scope: ffn.scope.clone() }
    };
    let fixed = Op::ExpertFfn { glu, bias: false, fixed: true };
    let at = NodeId(routed.ffn as u32);
    let cold = match halves.cold.as_slice() {
        [] => {
            patch.add(at, expert(fixed, &halves.hot, slots));
            return Some(patch);
        }
        [_] => Op::NeuronFfn { glu, paged: None, gates_on_disk: false, hot: None, predict: None },
        _ => Op::ExpertFfn { glu, bias: false, fixed: false },
    };
    let there = patch.value(graph.ty(slots).clone());
    patch.add(at, expert(fixed, &halves.hot, there));
    patch.add(at, expert(cold, &halves.cold, slots));
    // The CPU weights its part while the unit computes.
    let end = NodeId(routed.combine as u32);
    patch.remove(end);
    let sums = [slots, there].map(|y| {
        let own = patch.value(graph.ty(sum).clone());
        let mut node = Node { outputs: vec![own], ..combine.clone() };
        node.inputs[0] = y.into();
        patch.add(end, node);
        own
    });
    let inputs = sums.map(Operand::Value).to_vec();
    patch.add(end, Node { op: Op::Add, inputs, outputs: vec![sum], scope: combine.scope.clone() });
    Some(patch)
}

/// Records the new units of the experts of decoding in a placement.
pub fn placed(placement: &mut Placement, module: &Module, units: &Units<'_>) {
    for graph in module.entries.iter().filter(|g| !g.kind.is_prefill()) {
        let count = |is: fn(&Op) -> bool| graph.nodes.iter().filter(|n| is(&n.op)).count() as u32;
        let hot = count(|op| matches!(op, Op::ExpertFfn { fixed: true, .. }));
        let cold = count(|op| matches!(op, Op::NeuronFfn { .. }));
        let whole = count(|op| matches!(op, Op::ExpertFfn { fixed: false, .. }));
        let own = |o: &OpAssignment, op: &str| o.entry == graph.kind && o.op == op;
        let layer = Scope::in_layer(0, Part::FFN).any_layer();
        let dense = |o: &OpAssignment| own(o, "linear_glu") && o.scope == layer;
        let at = placement.ops.iter().position(|o| own(o, "expert_ffn"));
        let at = at.or_else(|| placement.ops.iter().position(dense));
        let Some(at) = at.filter(|_| hot > 0) else { continue };
        let row = placement.ops[at].clone();
        let parts = [
            (units.npu_index(), hot, "hot neurons: requested by `placement.hot`"),
            (units.cpu_index(), cold, "cold neurons"),
        ];
        let parts = parts.into_iter().filter(|(_, nodes, _)| *nodes > 0).map(|(unit, nodes, why)| {
            let (op, why) = ("neuron_ffn".to_owned(), why.to_owned());
            OpAssignment { unit, nodes, op, why, ..row.clone() }
        });
        placement.ops.splice(at..at, parts);
        // Rows of layers without hot neurons stay as they were.
        placement.ops.iter_mut().filter(|o| own(o, "expert_ffn")).for_each(|o| o.nodes = o.nodes.min(whole));
        // A dense network that is one expert has lost both of its nodes.
        let networks = count(|op| op.router().is_some_and(|router| router.experts == 1));
        if let Some(joins) = placement.ops.iter().find(|o| dense(o)).cloned() {
            let down = |o: &OpAssignment| {
                own(o, "linear") && (&o.scope, o.unit, o.nodes) == (&joins.scope, joins.unit, joins.nodes)
            };
            let lost = placement.ops.iter_mut().filter(|o| dense(o) || down(o));
            lost.for_each(|o| o.nodes = o.nodes.saturating_sub(networks));
        }
        placement.ops.retain(|o| o.nodes > 0);
    }
}

#[cfg(test)]
mod tests;
