//! Functions of attention, dense networks and the head, against the Graph's own nodes.
//!
//! An attention reads a sequence in several calls, so that its state is read and written: a prompt with
//! padding after it, the next chunk, a single row, and rows at the end of the context, where windows have
//! moved on. The function of a decode entry point continues from the state that the prompt's function has
//! stored.

use super::{Failed, Opened, WeylNumbers};
use crate::emit::Limits;
use crate::exec::{Data, Executor, States, Tensor as Half};
use crate::subgraphs::{CoreMlSubgraph, GraphTensor, StaticGraph};
use half::f16;
use moec_backend::Distance;
use moec_ir::eval::{Arg, Evaluator, Tensor, op};
use moec_ir::{Graph, Module, Node, Op, Operand, StateId, ValueId, WeightId};
use moec_runtime::exec::chunk;
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

type Result<T> = std::result::Result<T, Failed>;

/// Multiply-adds that the evaluator may spend on a call; it has a few million of them per second for each
/// row.
const WORK: usize = 1 << 31;
/// Rows that a call has in any case.
const LEAST_ROWS: usize = 4;

/// A part, with the data for its evaluation.
pub(super) struct Trial<'a> {
    module: &'a Module,
    part: &'a CoreMlSubgraph,
    graph: &'a Graph,
    nodes: Vec<&'a Node>,
    /// The node that gives the angles.
    angles: Option<&'a Node>,
    weights: HashMap<WeightId, Rc<Tensor>>,
    /// Positions of the state, padding included.
    context: Option<usize>,
    /// Most rows of a call.
    most: usize,
}

/// Caches of one sequence.
type Caches = HashMap<StateId, Tensor>;

impl<'a> Trial<'a> {
    pub(super) fn new(
        module: &'a Module,
        part: &'a CoreMlSubgraph,
        evaluator: &mut Evaluator<'_>,
        limits: &Limits,
    ) -> Result<Self> {
        let (graph, boundary) =
            module.entries.first().zip(part.boundaries.first()).ok_or("there is no entry point")?;
        let nodes: Vec<&Node> =
            boundary.nodes.iter().filter_map(|id| graph.nodes.get(id.0 as usize)).collect();
        let angles = boundary.angles.and_then(|v| graph.def(v)).and_then(|id| graph.nodes.get(id.0 as usize));
        let mut weights = HashMap::new();
        for operand in nodes.iter().chain(&angles).flat_map(|n| &n.inputs) {
            if let Operand::Weight(id) = *operand {
                weights.insert(id, evaluator.weight(id)?);
            }
        }
        let of_row: usize =
            part.matrices().iter().map(|id| module.weight(*id).shape.iter().product::<usize>()).sum();
        let most = (WORK / of_row.max(1)).max(LEAST_ROWS);
        Ok(Self { module, part, graph, nodes, angles, weights, context: part.context(limits), most })
    }

    /// Executes every function, in all packages of the part; gives its name and how far it is off.
    pub(super) fn run(
        &self,
        graphs: &[StaticGraph],
        packages: &[(&str, Opened)],
    ) -> Result<Vec<(String, Distance)>> {
        let mut done: Vec<(String, Distance)> = Vec::new();
        for graph in graphs {
            if done.iter().all(|(name, _)| *name != graph.function) {
                let error = self.function(graph, graphs, packages)?;
                done.push((graph.function.clone(), error));
            }
        }
        Ok(done)
    }

    fn function(
        &self,
        graph: &StaticGraph,
        graphs: &[StaticGraph],
        packages: &[(&str, Opened)],
    ) -> Result<Distance> {
        let first = graphs.first().ok_or("it has no functions")?;
        let mut caches = Caches::new();
        let mut states = vec![States::default(); packages.len()];
        let mut random = WeylNumbers::default();
        let (mut got, mut want) = (Vec::new(), Vec::new());
        for (function, start, n) in self.calls(first, graph) {
            let positions: Vec<u32> = (start..start + n).map(|p| p as u32).collect();
            let hidden = self.columns(self.part.boundaries[0].x);
            let x: Vec<f32> = (0..n * hidden).map(|_| random.number()).collect();
            want.extend(self.evaluate(&x, &positions, &mut caches)?);
            // Packages of a head side by side, row by row.
            let mut results = Vec::new();
            for ((name, opened), states) in packages.iter().zip(&mut states) {
                let own = graphs.iter().find(|g| g.package == *name && g.function == function.function);
                let own = own.ok_or("a package has another function")?;
                results.extend(self.execute(own, opened, &x, &positions, states)?);
            }
            for row in 0..n {
                for (width, result) in &results {
                    got.extend(result.get(row * width..(row + 1) * width).unwrap_or_default());
                }
            }
        }
        let len = want.len();
        Ok(Distance::of(&Tensor::f32([got.len()], got), &Tensor::f32([len], want), len))
    }

    /// Calls: a function, the position of the first row, and the rows.
    fn calls<'g>(
        &self,
        first: &'g StaticGraph,
        graph: &'g StaticGraph,
    ) -> Vec<(&'g StaticGraph, usize, usize)> {
        let padded = |rows: usize| (rows * 3 / 4).clamp(1, self.most);
        if let Some(start) = graph.fixed_start() {
            return self.calls_up_to(first, graph, start);
        }
        let Some(context) = self.part.positions() else { return vec![(graph, 0, padded(graph.rows))] };
        let mut calls = Vec::new();
        let mut next = 0;
        for (function, rows) in [(first, padded(first.rows)), (graph, graph.rows.min(self.most)), (graph, 1)]
        {
            let rows = rows.min(context - next);
            if rows > 0 {
                calls.push((function, next, rows));
                next += rows;
            }
        }
        let tail = graph.rows.min(3).min(context - next);
        if tail > 0 {
            calls.push((graph, context - tail, tail));
        }
        calls
    }

    /// Calls before a function of a fixed place: of the function of any place, up to there.
    fn calls_up_to<'g>(
        &self,
        first: &'g StaticGraph,
        graph: &'g StaticGraph,
        start: usize,
    ) -> Vec<(&'g StaticGraph, usize, usize)> {
        let step = first.rows.min(self.most).max(1);
        let before = (0..start).step_by(step).map(|at| (first, at, step.min(start - at)));
        before.chain([(graph, start, (graph.rows * 3 / 4).clamp(1, self.most))]).collect()
    }

    fn columns(&self, value: ValueId) -> usize {
        self.graph.ty(value).cols()
    }

    /// Runs a function of a package; gives each of its results with the length of a row.
    fn execute(
        &self,
        graph: &StaticGraph,
        opened: &Opened,
        x: &[f32],
        positions: &[u32],
        states: &mut States,
    ) -> Result<Vec<(usize, Vec<f32>)>> {
        let executor = Executor::new(&opened.package, Some(&graph.function))?;
        let function = executor.function();
        let ids = function.inputs.iter().zip(&graph.inputs);
        let alike = |(id, declared): (&crate::package::ValueId, &GraphTensor)| {
            function.value(*id).is_some_and(|v| v.name == declared.name && v.ty.shape == declared.shape)
        };
        if function.inputs.len() != graph.inputs.len() || !ids.into_iter().all(alike) {
            return Err(format!("`{}` has other inputs than the model requires", graph.function).into());
        }
        let mut inputs = BTreeMap::new();
        for declared in &graph.inputs {
            let mut numbers = vec![f16::NAN; declared.shape.iter().product()];
            match (&*declared.name, self.context) {
                ("x", _) => chunk::pad(&mut numbers, self.columns(self.part.boundaries[0].x), x)?,
                ("angles", _) => {
                    let angles = self.angles(positions)?;
                    chunk::pad(&mut numbers, angles.ty.cols(), angles.as_f32())?;
                }
                ("mask", Some(_)) => {
                    let seen = declared.shape.last().copied().unwrap_or(0);
                    chunk::mask(&mut numbers, seen, positions, self.part.window())?;
                }
                ("write", Some(context)) => chunk::write(&mut numbers, context, positions)?,
                (name, _) => return Err(format!("nothing fills the input `{name}`").into()),
            }
            let tensor = Half::new(&declared.shape, Data::F16(numbers)).ok_or("an input of another size")?;
            inputs.insert(declared.name.clone(), tensor);
        }
        let results = executor.run(&inputs, states)?;
        let result = |declared: &GraphTensor| -> Result<(usize, Vec<f32>)> {
            let found =
                results.get(&declared.name).ok_or_else(|| format!("it has no result `{}`", declared.name))?;
            Ok((found.shape().iter().skip(1).product(), found.to_f32()))
        };
        graph.outputs.iter().map(result).collect()
    }

    fn angles(&self, positions: &[u32]) -> Result<Tensor> {
        let node = self.angles.ok_or("no operator computes angles")?;
        let pos = pos(positions);
        let weights = self.weights_of(node)?;
        let args = [&pos].into_iter().chain(weights.iter().map(|w| &***w)).map(Arg::Tensor).collect();
        op(&node.op, args)?.pop().ok_or_else(|| "the angles have no value".into())
    }

    fn weights_of(&self, node: &Node) -> Result<Vec<&Rc<Tensor>>> {
        let ids = node.inputs.iter().filter_map(|o| match o {
            Operand::Weight(id) => Some(id),
            _ => None,
        });
        ids.map(|id| self.weights.get(id).ok_or_else(|| "a weight is missing".into())).collect()
    }

    /// Evaluates the part's nodes on rows at positions of the one sequence whose caches are given.
    fn evaluate(&self, x: &[f32], positions: &[u32], caches: &mut Caches) -> Result<Vec<f32>> {
        let boundary = &self.part.boundaries[0];
        let n = positions.len();
        let mut values = HashMap::from([
            (Graph::POS, pos(positions)),
            (Graph::SLOT, Tensor::i32([n], vec![0; n])),
            (boundary.x, Tensor::f32([n, self.columns(boundary.x)], x.to_vec())),
        ]);
        if let Some(angles) = boundary.angles {
            values.insert(angles, self.angles(positions)?);
        }
        // Values that are a cache.
        let mut cached: HashMap<ValueId, StateId> = HashMap::new();
        for node in &self.nodes {
            let mut written = None;
            if let (Op::CacheWrite, Some(Operand::State(id))) = (&node.op, node.inputs.first()) {
                // The state of one sequence has one slot.
                let mut ty = self.module.state(*id).ty.clone();
                if let Some(slots) = ty.shape.first_mut() {
                    *slots = 1;
                }
                written = Some((*id, caches.remove(id).unwrap_or_else(|| Tensor::zeros(ty))));
            }
            let mut args = Vec::new();
            for operand in &node.inputs {
                let tensor = match operand {
                    Operand::State(_) => None,
                    Operand::Weight(id) => self.weights.get(id).map(Rc::as_ref),
                    Operand::Value(v) => match cached.get(v) {
                        Some(state) => caches.get(state),
                        None => values.get(v),
                    },
                };
                match (tensor, operand) {
                    (Some(tensor), _) => args.push(Arg::Tensor(tensor)),
                    (None, Operand::State(_)) => {}
                    (None, _) => {
                        return Err(format!("`{}` reads a value that does not exist", node.op.name()).into());
                    }
                }
            }
            if let Some((_, state)) = &mut written {
                args.insert(0, Arg::State(state));
            }
            let results = op(&node.op, args)?;
            if let Some((id, state)) = written {
                caches.insert(id, state);
                cached.extend(node.outputs.iter().map(|v| (*v, id)));
            }
            values.extend(node.outputs.iter().copied().zip(results));
        }
        let y = values.get(&boundary.y).ok_or("the part has no result")?;
        Ok(y.as_f32().to_vec())
    }
}

fn pos(positions: &[u32]) -> Tensor {
    Tensor::i32([positions.len()], positions.iter().map(|&p| p as i32).collect())
}
