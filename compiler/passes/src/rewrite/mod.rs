//! Pass `rewrite`: equality saturation over each block of the model (egg, Willsey et al., POPL 2021).
//!
//! Every region gets its own e-graph, all rules of a table run to saturation, and what operators cost on the unit that
//! computes the region picks one form of each value. Limits are counts, never times, so that a build is reproducible.

pub mod language;
mod layouts;
mod region;
mod row;
pub mod rules;

use egg::{Extractor, Runner, SimpleScheduler};
use moec_base::error::{Error, Result};
use moec_ir::{EntryKind, Graph, GraphBuilder, Module, Node, NodeId, Operand, ValueId, WeightId};
use region::{Rebuild, Region, Traffic};
use row::Rule;
use std::collections::{BTreeMap, HashMap};

/// Most iterations of saturation per region; blocks of real models need four or five.
const ITERATIONS: usize = 16;
/// Most e-nodes per region.
const NODES: usize = 20_000;

/// What rewriting did: how often each rule changed a region.
pub type Applied = BTreeMap<String, usize>;

/// What operators cost on a unit.
#[derive(Clone, Copy)]
pub struct Costs<'a> {
    /// Whether the unit runs an operator, by its name in the Graph.
    pub legal: &'a dyn Fn(&str) -> bool,
    /// Cost of an operator's launch in element moves.
    pub launch: f64,
}

/// Nodes of an entry point that another unit computes: a region of their own. Only their last node may be read from
/// elsewhere, and they are of one scope.
pub struct Island<'a> {
    /// Entry point.
    pub entry: EntryKind,
    /// Its nodes, ascending.
    pub nodes: &'a [NodeId],
    /// What operators cost there.
    pub costs: Costs<'a>,
}

/// Which rules run and what operators cost.
pub struct Options<'a> {
    /// The table of rules.
    pub rules: fn() -> Vec<rules::Row>,
    /// Keeps a rule; `None` keeps all. Tests bisect with it.
    pub keep: Option<&'a dyn Fn(&str) -> bool>,
    /// What operators cost on the processor.
    pub costs: Costs<'a>,
    /// What other units compute.
    pub islands: &'a [Island<'a>],
}

/// Rewrites every entry point of `module`.
///
/// # Errors
/// Only our bugs: a rule that makes an ill-typed node.
pub fn rewrite(module: &mut Module, options: &Options<'_>) -> Result<Applied> {
    let rules: Vec<_> = (options.rules)()
        .into_iter()
        .map(|row| row.rule)
        .filter(|rule| options.keep.is_none_or(|keep| keep(rule.name.as_str())))
        .collect();
    let mut applied = Applied::new();
    let entries = std::mem::take(&mut module.entries);
    for graph in &entries {
        rewrite_entry(module, graph, &rules, options, &mut applied)?;
    }
    drop_unused_weights(module);
    Ok(applied)
}

fn rewrite_entry(
    module: &mut Module,
    graph: &Graph,
    rules: &[Rule],
    options: &Options<'_>,
    applied: &mut Applied,
) -> Result<()> {
    let out_rows = graph.ty(Graph::ROWS).rows();
    let snapshot = Module { entries: Vec::new(), ..module.clone() };
    let mut builder = GraphBuilder::new(module, graph.kind, out_rows);
    let mut renamed: HashMap<ValueId, ValueId> =
        [Graph::IDS, Graph::POS, Graph::SLOT, Graph::ROWS].map(|v| (v, v)).into();

    let regions = regions(graph, options);
    let last = last_regions(graph, &regions);
    for (at, (members, costs)) in regions.iter().enumerate() {
        let nodes: Vec<&Node> = members.iter().map(|&i| &graph.nodes[i]).collect();
        let mut region = Region::load(&snapshot, graph, &nodes);
        let runner = Runner::<_, _, ()>::new(language::Facts::default())
            .with_egraph(std::mem::take(&mut region.egraph))
            .with_scheduler(SimpleScheduler)
            .with_iter_limit(ITERATIONS)
            .with_node_limit(NODES)
            .with_time_limit(std::time::Duration::MAX)
            .run(rules);
        for (rule, count) in runner.iterations.iter().flat_map(|i| &i.applied) {
            *applied.entry(rule.to_string()).or_default() += count;
        }
        region.egraph = runner.egraph;

        builder.scope(nodes.first().map(|n| n.scope.clone()).unwrap_or_default());
        let extractor = Extractor::new(&region.egraph, Traffic { egraph: &region.egraph, costs: *costs });
        let mut rebuild = Rebuild {
            region: &region,
            extractor,
            builder: &mut builder,
            outside: &renamed,
            memo: HashMap::new(),
        };
        let roots: Vec<ValueId> = nodes
            .iter()
            .flat_map(|n| n.outputs.iter().copied())
            .filter(|v| *v == graph.output || last.get(v).is_some_and(|&reader| reader > at))
            .collect();
        let mut fresh = Vec::new();
        for root in roots {
            let class = region.class(root).ok_or_else(|| Error::bug(format!("%{} was lost", root.0)))?;
            match rebuild.operand(class)? {
                Operand::Value(v) => fresh.push((root, v)),
                _ => return Err(Error::bug("a root became a weight")),
            }
        }
        renamed.extend(fresh);
    }
    let logits = renamed.get(&graph.output).copied().ok_or_else(|| Error::bug("the logits were lost"))?;
    builder.finish(logits).map_err(|e| Error::bug("the rewritten graph is ill-typed").because(e))
}

/// The regions of a graph in an order of execution, each with what operators cost in it: islands, and the runs of nodes
/// of one scope between them. An island stands where its last node does: what it reads is computed by then, and nobody has
/// read what it gives.
fn regions<'a>(graph: &Graph, options: &Options<'a>) -> Vec<(Vec<usize>, Costs<'a>)> {
    let islands: Vec<_> = options.islands.iter().filter(|i| i.entry == graph.kind).collect();
    let home: HashMap<usize, &Island<'a>> =
        islands.iter().flat_map(|i| i.nodes.iter().map(|n| (n.0 as usize, *i))).collect();
    let mut regions = Vec::new();
    let mut run: Vec<usize> = Vec::new();
    for (at, node) in graph.nodes.iter().enumerate() {
        let island = home.get(&at).copied();
        let ends = island.is_some_and(|i| i.nodes.last() == Some(&NodeId(at as u32)));
        let elsewhere = run.first().is_some_and(|&first| graph.nodes[first].scope != node.scope);
        if (ends || elsewhere) && !run.is_empty() {
            regions.push((std::mem::take(&mut run), options.costs));
        }
        match island {
            Some(island) if ends => {
                regions.push((island.nodes.iter().map(|n| n.0 as usize).collect(), island.costs));
            }
            Some(_) => {}
            None => run.push(at),
        }
    }
    if !run.is_empty() {
        regions.push((run, options.costs));
    }
    regions
}

/// Index of the last region that reads each value.
fn last_regions(graph: &Graph, regions: &[(Vec<usize>, Costs<'_>)]) -> HashMap<ValueId, usize> {
    let mut last = HashMap::new();
    for (at, (members, _)) in regions.iter().enumerate() {
        for input in members.iter().flat_map(|&i| &graph.nodes[i].inputs) {
            if let Operand::Value(v) = input {
                last.insert(*v, at);
            }
        }
    }
    last
}

/// Drops weights that no node reads and renumbers the others.
pub(super) fn drop_unused_weights(module: &mut Module) {
    let mut used = vec![false; module.weights.len()];
    let operands = |m: &mut Module, f: &mut dyn FnMut(&mut WeightId)| {
        for input in m.entries.iter_mut().flat_map(|g| &mut g.nodes).flat_map(|n| &mut n.inputs) {
            if let Operand::Weight(w) = input {
                f(w);
            }
        }
    };
    operands(module, &mut |w| used[w.0 as usize] = true);
    let mut next = 0;
    let renumbered: Vec<u32> = used
        .iter()
        .map(|&u| {
            let id = next;
            next += u32::from(u);
            id
        })
        .collect();
    operands(module, &mut |w| *w = WeightId(renumbered[w.0 as usize]));
    let mut keep = used.iter();
    module.weights.retain(|_| keep.next().copied().unwrap_or(false));
}
