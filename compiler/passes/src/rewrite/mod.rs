//! Pass `rewrite`: equality saturation over each block of the model (egg, Willsey et al., POPL 2021).
//!
//! Every region gets its own e-graph, and all rules of a table run to saturation. The costs of operators on
//! the CPU then select one form of each value. Limits are counts, never times, so that a build is
//! reproducible.

pub mod language;
mod region;
mod row;
pub mod rules;

use egg::{Extractor, Runner, SimpleScheduler};
use moec_base::error::{Error, Result};
use moec_ir::{Graph, GraphBuilder, Module, Node, Operand, ValueId, WeightId};
use region::{Rebuild, Region, Traffic};
use row::Rule;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

/// Limit of the iterations of saturation per region; blocks of real models need four or five.
const ITERATIONS: usize = 16;
/// Limit of the e-nodes per region.
const NODES: usize = 20_000;

/// Number of times that each rule changed a region.
pub type Applied = BTreeMap<String, usize>;

/// Costs of operators on a unit.
#[derive(Clone, Copy)]
pub struct Costs<'a> {
    /// True if the unit runs an operator, by its name in the Graph.
    pub legal: &'a dyn Fn(&str) -> bool,
    /// Cost of an operator's launch in element moves.
    pub launch: f64,
}

/// Rules to run, and costs of operators.
pub struct Options<'a> {
    /// Filter of rules; `None` keeps all. Tests bisect with it.
    pub keep: Option<&'a dyn Fn(&str) -> bool>,
    /// Costs of operators on the CPU.
    pub costs: Costs<'a>,
}

/// Rewrites every entry point of `module`.
///
/// # Errors
/// A bug of the compiler: a rule that makes an ill-typed node.
pub fn rewrite(module: &mut Module, options: &Options<'_>) -> Result<Applied> {
    let rules: Vec<_> = rules::all()
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

    let regions = regions(graph);
    let last = last_regions(graph, &regions);
    for (at, members) in regions.iter().enumerate() {
        let nodes: Vec<&Node> = graph.nodes[members.clone()].iter().collect();
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
        let extractor =
            Extractor::new(&region.egraph, Traffic { egraph: &region.egraph, costs: options.costs });
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

/// The regions of a graph: runs of nodes of one scope, in order.
fn regions(graph: &Graph) -> Vec<Range<usize>> {
    let mut start = 0;
    let runs = graph.nodes.chunk_by(|a, b| a.scope == b.scope).map(|run| {
        let region = start..start + run.len();
        start = region.end;
        region
    });
    runs.collect()
}

/// Index of the last region that reads each value.
fn last_regions(graph: &Graph, regions: &[Range<usize>]) -> HashMap<ValueId, usize> {
    let mut last = HashMap::new();
    for (at, members) in regions.iter().enumerate() {
        for input in graph.nodes[members.clone()].iter().flat_map(|n| &n.inputs) {
            if let Operand::Value(v) = input {
                last.insert(*v, at);
            }
        }
    }
    last
}

/// Drops weights that no node reads and renumbers the others.
pub(super) fn drop_unused_weights(module: &mut Module) {
    drop_weights(module, |_| true);
}

/// Drops those weights that no node reads whose names `drops` accepts, and renumbers the others.
pub(super) fn drop_weights(module: &mut Module, drops: impl Fn(&str) -> bool) {
    let mut used: Vec<bool> = module.weights.iter().map(|w| !drops(&w.name)).collect();
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
