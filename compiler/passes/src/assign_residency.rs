//! Pass `assign_residency`: the unit of every group of experts and every operator, CPU or NPU (NPUMoE, §3.2
//! and §4.3).
//!
//! **Groups of experts.** A launch on the NPU must pay off by the tokens that it computes. A group stays
//! there if launching, waiting and computing, padding included, cost less than its expected load costs on the
//! CPU. Otherwise it is cold: its experts run on the CPU, where they take any number of tokens, have no
//! capacity and drop nothing.
//!
//! Each entry point that decodes has a unit for every group, too, by the same rule ([`decoding`]).
//!
//! **Operators.** An operator that the device's table does not list as legal never goes to the NPU. Of the
//! others, a graph contains everything from its first matrix to its last. Operators before the first or after
//! the last would only widen its inputs and outputs, and single element-wise operators would not pay for a
//! launch. Matrices that must stay exact (those of routers, which decide ties) stay on the CPU, since the NPU
//! computes in f16. In each entry point the table of costs decides.
//!
//! **Attention** has one unit in all entry points, that of the KV cache. If a unit's graphs keep no state,
//! attention goes there only on request. Otherwise `auto` simulates a whole request, a prompt and an answer
//! of given lengths, with attention on either unit. It takes the unit where the request ends first, or at
//! equal times the one with less energy.
//!
//! A scope that the emitter cannot write as a graph, or that is too large for one, stays on the CPU with that
//! reason. If the user requests the NPU for it, that is an error. Mixers other than attention always stay on
//! the CPU: graphs cannot hold recurrent states.

pub mod decoding;

use super::parts;
use super::tier::predict;
use crate::decisions::Decision;
use decoding::{Decoding, assign_layer_decoding};
use moec_backend::StaticSubgraph;
use moec_base::error::{Error, Result};
use moec_config::Mix;
use moec_costs::request::Request;
use moec_costs::units::{UnitPreference, Units, expert_sizes_on};
use moec_ir::placement::{ExpertGroup, ExpertRow, ExpertTable, OpAssignment, Placement};
use moec_ir::scope::AnyLayer;
use moec_ir::{EntryKind, Graph, Module, Node, Op, Operand, Role, Scope, WeightClass};
use moec_profile::loads::{LayerLoads, Loads};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Options.
#[derive(Clone, Copy, Debug)]
pub struct ResidencyOptions {
    /// Attention, dense networks and the head.
    pub attention: UnitPreference,
    /// Groups of experts.
    pub experts: UnitPreference,
    /// The same in decoding.
    pub decode: UnitPreference,
    /// The request whose cost decides the unit of attention.
    pub mix: Mix,
    /// True if hot neurons of experts have networks of their own in decoding.
    pub hot: bool,
    /// Largest number of sizes that a graph has functions for.
    pub sizes: usize,
}

/// Gives every group and every operator its unit. Returns the costs that decided the unit of attention, if
/// they decided it.
///
/// # Errors
/// Fails if a scope requested on the NPU cannot be a graph. A bug of the compiler: a layer of experts without
/// sizes or loads.
pub fn assign_residency(
    placement: &mut Placement,
    loads: &Loads,
    module: &Module,
    units: &Units<'_>,
    options: ResidencyOptions,
) -> Result<Option<Decision>> {
    let sizes = expert_sizes_on(module, units)?;
    let decoded = module.entries.iter().map(|g| g.kind).filter(|kind| !kind.is_prefill());
    let batches: Vec<u32> =
        decoded.map(|kind| kind.rows() as u32).collect::<BTreeSet<_>>().into_iter().collect();
    for (table, layer) in placement.experts.iter_mut().zip(&loads.layers) {
        assign_layer_residency(table, layer, units, options.experts);
        let size = sizes.get(&table.layer).copied();
        let size = size.ok_or_else(|| Error::bug(format!("layer {} has no experts", table.layer)))?;
        let (preference, hot) = (options.decode, options.hot);
        let decoding = Decoding { batches: &batches, preference, hot, sizes: options.sizes, size };
        assign_layer_decoding(table, layer, units, decoding);
        // Decoding may have added a size.
        table.expected = Some(predict(layer, table));
    }
    if options.experts == UnitPreference::Auto && options.decode != UnitPreference::Graphs {
        limit_loaded_graphs(placement, loads, units, units.npu.most_contexts());
    }
    let preference = options.attention;
    let ops = |placement: &Placement, attention| operators(module, placement, units, preference, attention);
    let default_unit = if units.graphs.attends_by_default() { units.npu_index() } else { units.cpu_index() };
    placement.ops = ops(placement, default_unit)?;
    let attention_on_npu = placement.ops.iter().any(|o| o.op == "attention" && o.unit == units.npu_index());
    if preference != UnitPreference::Auto || !attention_on_npu {
        return Ok(None);
    }
    let mut cpu_placement = placement.clone();
    cpu_placement.ops = ops(placement, units.cpu_index())?;
    let context = context(module);
    let context = u32::try_from(context).unwrap_or(u32::MAX);
    let request = Request::new(module, units, loads, options.mix, context)?;
    let cost = |placement: &Placement, unit: &str| {
        let outcome = request.run(placement);
        (unit.to_owned(), outcome.timeline.wall_us * 1e-3, outcome.joules_per_token() * 1e3)
    };
    let mut assigned = vec![cost(placement, &units.npu.name), cost(&cpu_placement, &units.cpu.name)];
    assigned.sort_by(|a, b| a.1.total_cmp(&b.1).then(a.2.total_cmp(&b.2)));
    let chosen = assigned.first().map_or_else(String::new, |h| h.0.clone());
    if chosen == units.cpu.name {
        placement.ops = cpu_placement.ops;
    }
    let Mix { prompt, generate } = request.mix;
    let why = format!("a request of {prompt} tokens with {generate} generated, simulated");
    let decision = Decision::new("assign_residency", "attention and its KV cache", chosen, why);
    let or =
        |d: Decision, (unit, ms, mj): (String, f64, f64)| d.or(unit, &[("request_ms", ms), ("token_mj", mj)]);
    Ok(Some(assigned.into_iter().fold(decision, or)))
}

/// Checks that everything that `attention` of `[placement]` requests on the unit can be graphs there. This is
/// known before loads are.
///
/// # Errors
/// Fails if a scope cannot be a graph, with the reason.
pub fn check(module: &Module, units: &Units<'_>, attention: UnitPreference) -> Result<()> {
    if attention != UnitPreference::Graphs {
        return Ok(());
    }
    let mut writable = Writable { module, units, of: HashMap::new() };
    let mut entries = 0..module.entries.len();
    entries.try_for_each(|entry| partition(entry, &mut writable, attention, units.npu_index()).map(drop))
}

/// Assigns every group of a layer to a unit.
pub fn assign_layer_residency(
    table: &mut ExpertTable,
    layer: &LayerLoads,
    units: &Units<'_>,
    preference: UnitPreference,
) {
    let (cpu, npu) = (units.cpu_index(), units.npu_index());
    for group in &mut table.groups {
        let cost = |unit: u32| group.cost_us.get(unit as usize).copied().unwrap_or(0.0);
        let (on_cpu, on_npu) = (cost(cpu), cost(npu));
        let hot = match preference {
            UnitPreference::Auto => on_npu < on_cpu,
            UnitPreference::Graphs => true,
            UnitPreference::Cpu => false,
        };
        let load: f32 = group.experts.iter().filter_map(|&e| table.experts.get(e as usize)?.load).sum();
        let costs =
            format!("{load:.1} tokens per call; {on_npu:.1} µs on the NPU, {on_cpu:.1} µs on the CPU");
        group.why = match preference {
            UnitPreference::Auto if hot => format!("hot: {costs}"),
            UnitPreference::Auto => format!("cold: {costs}"),
            UnitPreference::Graphs | UnitPreference::Cpu => {
                format!("requested by `placement.experts`: {costs}")
            }
        };
        group.unit = if hot { npu } else { cpu };
        settle(&mut table.experts, group, hot);
    }
    table.expected = Some(predict(layer, table));
}

/// Records the unit of a group's experts. On the CPU they take any number of tokens.
fn settle(experts: &mut [ExpertRow], group: &ExpertGroup, hot: bool) {
    for &e in &group.experts {
        if let Some(row) = experts.get_mut(e as usize) {
            row.unit = group.unit;
            if !hot {
                (row.capacity, row.fallback) = (0, None);
            }
        }
    }
}

/// Leaves at most `most` groups of experts on the NPU, those that gain most there: each is a graph that is
/// loaded at the start.
pub(super) fn limit_loaded_graphs(placement: &mut Placement, loads: &Loads, units: &Units<'_>, most: usize) {
    let (cpu, npu) = (units.cpu_index(), units.npu_index());
    let mut there: Vec<(f32, usize, usize)> = Vec::new();
    for (t, table) in placement.experts.iter().enumerate() {
        for (g, group) in table.groups.iter().enumerate().filter(|(_, g)| g.is_on(npu)) {
            let gain = |costs: &[f32]| {
                let cost = |unit: u32| costs.get(unit as usize).copied().unwrap_or(0.0);
                cost(cpu) - cost(npu)
            };
            // Of the calls that launch it, the one that gains most.
            let decode = group.decode.iter().filter(|d| d.unit == npu).map(|d| gain(&d.cost_us));
            let all = decode.chain((group.unit == npu).then(|| gain(&group.cost_us)));
            there.push((all.fold(f32::NEG_INFINITY, f32::max), t, g));
        }
    }
    there.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
    for &(gain, t, g) in there.iter().skip(most) {
        let table = &mut placement.experts[t];
        let group = &mut table.groups[g];
        let why = format!(
            "at most {most} graphs are loaded at the start, and {} groups save more than this one ({gain:.1} µs per call)",
            most.min(there.len())
        );
        for decode in group.decode.iter_mut().filter(|d| d.unit == npu) {
            (decode.unit, decode.why) = (cpu, why.clone());
        }
        if group.unit == npu {
            (group.unit, group.why) = (cpu, why);
        }
        settle(&mut table.experts, group, false);
    }
    for (table, layer) in placement.experts.iter_mut().zip(&loads.layers) {
        table.expected = Some(predict(layer, table));
    }
}

/// Unit of every operator of every entry point; equal operators of all layers share a row. If attention may
/// go to either unit, it goes to unit `attention`.
fn operators(
    module: &Module,
    placement: &Placement,
    units: &Units<'_>,
    preference: UnitPreference,
    attention: u32,
) -> Result<Vec<OpAssignment>> {
    let mut found: Vec<OpAssignment> = Vec::new();
    let mut seen: HashMap<(EntryKind, Scope<AnyLayer>, &'static str, u32, String), usize> = HashMap::new();
    let mut add = |entry: EntryKind, node: &Node, unit: u32, why: String| {
        let (scope, op) = (node.scope.any_layer(), node.op.name());
        let key = (entry, scope.clone(), op, unit, why.clone());
        let next = found.len();
        let at = *seen.entry(key).or_insert(next);
        if at == next {
            found.push(OpAssignment { entry, scope, op: op.to_owned(), unit, nodes: 0, why });
        }
        found[at].nodes += 1;
    };
    let mut writable = Writable { module, units, of: HashMap::new() };
    for entry in 0..module.entries.len() {
        let graph = &module.entries[entry];
        let assigned = partition(entry, &mut writable, preference, attention)?;
        for (node, place) in graph.nodes.iter().zip(assigned) {
            if let Op::ExpertFfn { .. } = node.op {
                let layer = node.scope.layer;
                let table = placement.experts.iter().find(|t| Some(t.layer) == layer);
                let table = table.ok_or_else(|| Error::bug(format!("`{}` has no table", node.scope)))?;
                for (unit, why) in experts(graph.kind, table, units) {
                    add(graph.kind, node, unit, why);
                }
            } else {
                let (on_npu, why) = place;
                add(graph.kind, node, if on_npu { units.npu_index() } else { units.cpu_index() }, why);
            }
        }
    }
    Ok(found)
}

/// Units that run experts of a layer in an entry point, with the reason.
fn experts(kind: EntryKind, table: &ExpertTable, units: &Units<'_>) -> Vec<(u32, String)> {
    let (cpu, npu) = (units.cpu_index(), units.npu_index());
    let batch = (!kind.is_prefill()).then(|| kind.rows() as u32);
    let hot = table.groups.iter().filter(|g| g.unit_in(batch) == npu).count();
    let on_npu = (npu, format!("hot groups: {}", row_of(units, "expert_ffn")));
    let on_cpu = (cpu, "cold groups: their load does not pay for a launch".to_owned());
    if !units.npu.is_legal("expert_ffn") {
        vec![(cpu, row_of(units, "expert_ffn"))]
    } else if hot == table.groups.len() {
        vec![on_npu]
    } else if hot > 0 {
        vec![on_npu, on_cpu]
    } else if batch.is_none() || table.groups.iter().all(|g| g.unit != npu) {
        vec![on_cpu]
    } else {
        vec![(cpu, "decode: a launch costs more than the few rows on the CPU".to_owned())]
    }
}

/// Row of an operator in the device's table.
pub(super) fn row_of(units: &Units<'_>, op: &str) -> String {
    match units.npu.row(op) {
        Some(row) if row.legal => row.operation.clone(),
        Some(row) => format!("the NPU has no {}", row.operation),
        None => "the NPU's table of operations does not name it".to_owned(),
    }
}

/// Tokens of a sequence: rows of the longest state.
fn context(module: &Module) -> usize {
    module.states.iter().filter_map(|s| s.ty.shape.get(2)).copied().max().unwrap_or(1)
}

/// For each node of a graph: true if it runs on the NPU, and the reason.
///
/// # Errors
/// Fails if a scope requested there cannot be a graph.
fn partition(
    entry: usize,
    writable: &mut Writable<'_>,
    preference: UnitPreference,
    attention: u32,
) -> Result<Vec<(bool, String)>> {
    let (module, units) = (writable.module, writable.units);
    let graph = &module.entries[entry];
    let ctx = context(module);
    let refused: Vec<Option<String>> = graph.nodes.iter().map(|n| refusal(module, n, units)).collect();
    let mut out: Vec<(bool, String)> =
        refused.iter().map(|p| (false, p.clone().unwrap_or_default())).collect();
    for region in regions(graph, &refused) {
        let inner = between_matrices(graph, &region);
        let [cpu_us, npu_us] = costs(module, graph, units, &inner, ctx);
        let is_recurrent = region.first().is_some_and(|&i| graph.nodes[i].scope.role() == Role::Mixer);
        let (mut on_npu, mut cpu_reason) = match preference {
            _ if is_recurrent => (false, "graphs cannot hold recurrent states".to_owned()),
            UnitPreference::Cpu => (false, "requested by `placement.attention`".to_owned()),
            UnitPreference::Graphs => (true, String::new()),
            // The cache is in the memory of attention's unit in every entry point.
            UnitPreference::Auto if attends(graph, &inner) && !units.graphs.attends_by_default() => {
                let why = "a graph of the unit keeps no state: attention runs there only if `attention` requests it";
                (false, why.to_owned())
            }
            UnitPreference::Auto if attends(graph, &inner) => {
                let why = "a whole request ends earlier with it, and the KV cache is on one unit";
                (attention == units.npu_index(), why.to_owned())
            }
            UnitPreference::Auto => {
                (npu_us < cpu_us, "a launch costs more than these rows on the CPU".to_owned())
            }
        };
        if preference != UnitPreference::Cpu
            && !is_recurrent
            && let Some(&first) = inner.first()
            && let Err(why) = writable.region(entry, &graph.nodes[first].scope, &inner)
        {
            if preference == UnitPreference::Graphs {
                let scope = &graph.nodes[first].scope;
                return Err(Error::limit(format!("`{scope}` cannot be a graph of `{}`", units.npu.name))
                    .because(why)
                    .hint("set `attention = \"auto\"` under `[placement]`: then it stays on the CPU"));
            }
            (on_npu, cpu_reason) = (false, format!("cannot be a graph: {why}"));
        }
        for &i in &region {
            let node = &graph.nodes[i];
            let inside = inner.contains(&i);
            out[i] = match (inside, on_npu) {
                (true, true) => (true, row_of(units, node.op.name())),
                (true, false) => (false, cpu_reason.clone()),
                (false, _) => (
                    false,
                    "no matrix product before and after it: a launch for it alone does not pay".to_owned(),
                ),
            };
        }
    }
    Ok(out)
}

/// Microseconds of these nodes on CPU and NPU, launch and waiting included.
fn costs(module: &Module, graph: &Graph, units: &Units<'_>, nodes: &[usize], ctx: usize) -> [f64; 2] {
    let rows = graph.kind.rows() as f64;
    let us = |unit: &moec_device::DeviceUnit| -> f64 {
        let us = |&i: &usize| unit.matmul_us(rows, weights(module, &graph.nodes[i], ctx)).unwrap_or(0.0);
        nodes.iter().map(us).sum()
    };
    [us(units.cpu), us(units.npu) + units.npu.launch_us()]
}

/// True if attention is among these nodes.
fn attends(graph: &Graph, nodes: &[usize]) -> bool {
    nodes.iter().any(|&i| matches!(graph.nodes[i].op, Op::Attention(_)))
}

/// Operators that the unit's backend can make graphs of, scope by scope.
struct Writable<'a> {
    module: &'a Module,
    units: &'a Units<'a>,
    of: HashMap<Scope, std::result::Result<StaticSubgraph, String>>,
}

impl Writable<'_> {
    /// Checks that these connected nodes of a scope become graphs.
    ///
    /// # Errors
    /// The reason why they do not, as a message for users.
    fn region(&mut self, entry: usize, scope: &Scope, nodes: &[usize]) -> std::result::Result<(), String> {
        let (module, units) = (self.module, self.units);
        let found = || units.graphs.subgraph(module, scope, units.npu);
        let part = self.of.entry(scope.clone()).or_insert_with(found);
        parts::region(part, entry, nodes)
    }
}

/// Reason why a node cannot run on the NPU at any cost.
fn refusal(module: &Module, node: &Node, units: &Units<'_>) -> Option<String> {
    if !units.npu.is_legal(node.op.name()) {
        return Some(row_of(units, node.op.name()));
    }
    let exact = |input: &Operand| match input {
        Operand::Weight(id) => module.weight(*id).class == WeightClass::Exact,
        _ => false,
    };
    let routes = matches!(node.op, Op::Linear { .. }) && node.inputs.get(1).is_some_and(exact);
    routes.then(|| "its weights are exact, since routing depends on them; the NPU computes in f16".to_owned())
}

/// True for matrix products and for attention: the operators that graphs are made for.
fn is_matrix(op: &Op) -> bool {
    matches!(op, Op::Linear { .. } | Op::LinearGlu { .. } | Op::HeadLinear { .. } | Op::Attention(_))
}

/// Numbers of the matrices that a node multiplies with; keys and values are matrices of the whole context.
fn weights(module: &Module, node: &Node, ctx: usize) -> f64 {
    match &node.op {
        Op::Attention(a) => (a.heads * (a.qk_dim + a.v_dim)) as f64 * ctx as f64,
        op if is_matrix(op) => match node.inputs.get(1) {
            Some(Operand::Weight(id)) => module.weight(*id).shape.iter().map(|&d| d as f64).product(),
            _ => 0.0,
        },
        _ => 0.0,
    }
}

/// Indices of connected nodes within one scope that are not refused, in ascending order.
fn regions(graph: &Graph, refused: &[Option<String>]) -> Vec<Vec<usize>> {
    let candidate = |i: usize| refused[i].is_none() && !matches!(graph.nodes[i].op, Op::ExpertFfn { .. });
    let mut region: Vec<usize> = (0..graph.nodes.len()).collect();
    for (i, node) in graph.nodes.iter().enumerate().filter(|(i, _)| candidate(*i)) {
        for before in sources(graph, node) {
            if candidate(before) && graph.nodes[before].scope == node.scope {
                let (old, new) = (region[before].max(region[i]), region[before].min(region[i]));
                region.iter_mut().filter(|r| **r == old).for_each(|r| *r = new);
            }
        }
    }
    let mut all: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for i in (0..graph.nodes.len()).filter(|&i| candidate(i)) {
        all.entry(region[i]).or_default().push(i);
    }
    all.into_values().collect()
}

/// Nodes whose results a node reads.
fn sources(graph: &Graph, node: &Node) -> Vec<usize> {
    let of = |input: &Operand| match input {
        Operand::Value(v) => graph.def(*v).map(|id| id.0 as usize),
        _ => None,
    };
    node.inputs.iter().filter_map(of).collect()
}

/// The nodes of a region that are matrices, or have one upstream and one downstream in it.
fn between_matrices(graph: &Graph, region: &[usize]) -> Vec<usize> {
    let place: HashMap<usize, usize> = region.iter().enumerate().map(|(at, &i)| (i, at)).collect();
    let inside: Vec<Vec<usize>> = region
        .iter()
        .map(|&i| sources(graph, &graph.nodes[i]).iter().filter_map(|s| place.get(s).copied()).collect())
        .collect();
    let matrix: Vec<bool> = region.iter().map(|&i| is_matrix(&graph.nodes[i].op)).collect();
    let mut above = matrix.clone();
    for at in 0..region.len() {
        above[at] |= inside[at].iter().any(|&s| above[s]);
    }
    let mut below = matrix.clone();
    for at in (0..region.len()).rev() {
        if below[at] {
            inside[at].iter().for_each(|&s| below[s] = true);
        }
    }
    region.iter().enumerate().filter(|(at, _)| above[*at] && below[*at]).map(|(_, &i)| i).collect()
}
