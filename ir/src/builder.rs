//! Building graphs node by node, each node typed as it is added.

use crate::graph::{
    EntryKind, Graph, INPUTS, Module, Node, NodeId, Operand, StateDecl, StateId, ValueId, WeightId,
};
use crate::infer::TypeError;
use crate::op::{Effect, Kind, Op};
use crate::plan::RowSpace;
use crate::scope::Scope;
use crate::state::StateKind;
use crate::types::Type;
use crate::weights::Weight;

impl From<ValueId> for Operand {
    fn from(v: ValueId) -> Self {
        Self::Value(v)
    }
}
impl From<WeightId> for Operand {
    fn from(w: WeightId) -> Self {
        Self::Weight(w)
    }
}
impl From<StateId> for Operand {
    fn from(s: StateId) -> Self {
        Self::State(s)
    }
}

impl Module {
    /// Declares a weight. An equal weight of the same name is the same weight.
    ///
    /// # Errors
    /// The expression has no shape or another one than declared, or the name is taken.
    pub fn add_weight(&mut self, w: Weight) -> Result<WeightId, TypeError> {
        if let Some(i) = self.weights.iter().position(|have| have.name == w.name) {
            if self.weights[i] == w {
                return Ok(WeightId(i as u32));
            }
            return Err(TypeError::new(format!("weight {}", w.name), "declared twice, differently"));
        }
        w.check()?;
        self.weights.push(w);
        Ok(WeightId(self.weights.len() as u32 - 1))
    }

    /// Declares a state. An equal state of the same name is the same state; a different one of the same
    /// name is kept apart, and the verifier refuses it.
    pub fn add_state(&mut self, s: StateDecl) -> StateId {
        let at = self.states.iter().position(|have| *have == s).unwrap_or_else(|| {
            self.states.push(s);
            self.states.len() - 1
        });
        StateId(at as u32)
    }

    /// The type of an operand outside of any graph: weights as `f32`, states as declared.
    fn outer_type(&self, operand: Operand) -> Option<Type> {
        match operand {
            Operand::Value(_) => None,
            Operand::Weight(w) => self.weights.get(w.0 as usize).map(|w| Type::f32(w.shape.clone())),
            Operand::State(s) => self.states.get(s.0 as usize).map(|s| s.ty.clone()),
        }
    }
}

/// Checks one node's operands and infers its result types. `value` gives the type of a value that is
/// defined before the node, and whether a cache write defines it.
fn infer_node(
    module: &Module,
    op: &Op,
    inputs: &[Operand],
    value: impl Fn(ValueId) -> Option<(Type, bool)>,
) -> Result<Vec<Type>, TypeError> {
    let error = |message: String| TypeError::new(op.name(), message);
    if !op.accepts_operands(inputs.len()) {
        return Err(error(format!("{} operands, expected {}", inputs.len(), op.signature().len())));
    }
    let signature = op.signature();
    let mut types = Vec::with_capacity(inputs.len());
    for (i, &input) in inputs.iter().enumerate() {
        // Only `concat` takes more operands than its signature lists, and they are values.
        let kind = signature.get(i).copied().unwrap_or(Kind::Value);
        let (ty, from_cache) = match input {
            Operand::Value(v) => value(v)
                .ok_or_else(|| error(format!("operand {i} (%{}) is not defined before it is used", v.0)))?,
            _ => match module.outer_type(input) {
                Some(ty) => (ty, false),
                None => {
                    return Err(error(format!("operand {i} ({input:?}) is not in the module")));
                }
            },
        };
        let fits = match (kind, input) {
            (Kind::Value, Operand::Value(_)) => !from_cache,
            (Kind::Weight, Operand::Weight(_)) | (Kind::State, Operand::State(_)) => true,
            // A second write of the same state has no order against the readers of the first.
            (Kind::State, Operand::Value(_)) => from_cache && op.effect() == Effect::None,
            _ => false,
        };
        if !fits {
            return Err(error(format!("operand {i} is {input:?}, expected a {}", kind.name())));
        }
        if let Operand::State(s) = input
            && let Some(state) = module.states.get(s.0 as usize).filter(|s| !op.takes_state(s.kind))
        {
            let (name, kind) = (&state.name, state.kind.name());
            let kinds = [
                StateKind::Cache,
                StateKind::Ring { window: 1 },
                StateKind::Recurrent,
                StateKind::Convolution,
            ];
            let taken: Vec<_> =
                kinds.into_iter().filter(|&k| op.takes_state(k)).map(StateKind::name).collect();
            let taken = taken.join(" or ");
            return Err(error(format!(
                "operand {i} is the state {name:?}, which is {kind}, expected {taken}"
            )));
        }
        types.push(ty);
    }
    op.infer(&types.iter().collect::<Vec<_>>())
}

impl Graph {
    /// The type of every value, inferred again from the graph inputs.
    ///
    /// # Errors
    /// A value used before its definition, defined twice or never; an operand of the wrong kind; operands
    /// that do not fit their operator. The error names entry and node.
    pub fn infer_all(&self, module: &Module) -> Result<Vec<Type>, TypeError> {
        let mut known: Vec<Option<(Type, bool)>> = vec![None; self.values.len()];
        if self.values.len() < INPUTS {
            return Err(TypeError::new(self.kind.to_string(), "fewer values than graph inputs"));
        }
        for (slot, ty) in known.iter_mut().zip(&self.values).take(INPUTS) {
            *slot = Some((ty.clone(), false));
        }
        for (i, node) in self.nodes.iter().enumerate() {
            let place = || format!("{} node {i}", self.kind);
            let lookup = |v: ValueId| known.get(v.0 as usize).cloned().flatten();
            let types = infer_node(module, &node.op, &node.inputs, lookup).map_err(|e| e.within(&place()))?;
            if types.len() != node.outputs.len() {
                return Err(TypeError::new(
                    place(),
                    format!("{} has {} results, not {}", node.op.name(), types.len(), node.outputs.len()),
                ));
            }
            let is_cache = node.op.effect() == Effect::Writes;
            for (ty, v) in types.into_iter().zip(&node.outputs) {
                let slot = known.get_mut(v.0 as usize).ok_or_else(|| {
                    TypeError::new(place(), format!("%{} is not a value of the graph", v.0))
                })?;
                if slot.is_some() {
                    return Err(TypeError::new(place(), format!("%{} is defined twice", v.0)));
                }
                *slot = Some((ty, is_cache));
            }
        }
        let missing = |v: usize| TypeError::new(self.kind.to_string(), format!("%{v} is never defined"));
        known.into_iter().enumerate().map(|(v, ty)| Ok(ty.ok_or_else(|| missing(v))?.0)).collect()
    }

    /// The row space of every value. Results of [`Op::GatherRows`], and `%3` itself, have one row per
    /// requested row of logits. Everything else has token rows (or, for a cache, neither).
    ///
    /// Meant for verified graphs; values out of range are ignored.
    pub fn row_spaces(&self, _module: &Module) -> Vec<RowSpace> {
        let mut spaces = vec![RowSpace::Tokens; self.values.len()];
        if let Some(rows) = spaces.get_mut(Self::ROWS.0 as usize) {
            *rows = RowSpace::Outputs;
        }
        for node in &self.nodes {
            let outputs = |o: &Operand| match o {
                Operand::Value(v) => spaces.get(v.0 as usize) == Some(&RowSpace::Outputs),
                _ => false,
            };
            if matches!(node.op, Op::GatherRows) || node.inputs.iter().any(outputs) {
                for v in &node.outputs {
                    if let Some(space) = spaces.get_mut(v.0 as usize) {
                        *space = RowSpace::Outputs;
                    }
                }
            }
        }
        spaces
    }
}

/// Builds one entry point of a module.
///
/// Every node is typed as it is added, so that a mistake is reported where it is made.
#[derive(Debug)]
pub struct GraphBuilder<'m> {
    module: &'m mut Module,
    graph: Graph,
    scope: Scope,
    /// Whether each value is the result of a cache write.
    from_cache: Vec<bool>,
}

impl<'m> GraphBuilder<'m> {
    /// Starts an entry point with the four inputs of [`Graph`]; `out_rows` is `R`.
    pub fn new(module: &'m mut Module, kind: EntryKind, out_rows: usize) -> Self {
        let tokens = Type::i32([kind.rows()]);
        let values = vec![tokens.clone(), tokens.clone(), tokens, Type::i32([out_rows])];
        let graph = Graph { kind, values, nodes: Vec::new(), output: Graph::IDS };
        Self { module, graph, scope: Scope::default(), from_cache: vec![false; INPUTS] }
    }

    /// Scope of the nodes added from here on.
    pub fn scope(&mut self, scope: impl Into<Scope>) {
        self.scope = scope.into();
    }

    /// The module, for declaring weights and states.
    pub fn module(&mut self) -> &mut Module {
        self.module
    }

    /// Declares a weight, as [`Module::add_weight`] does.
    ///
    /// # Errors
    /// Errors of [`Module::add_weight`].
    pub fn weight(&mut self, w: Weight) -> Result<WeightId, TypeError> {
        self.module.add_weight(w)
    }

    /// Type of a value added so far.
    ///
    /// # Errors
    /// The value is not of this graph.
    pub fn ty(&self, v: ValueId) -> Result<&Type, TypeError> {
        let unknown = || TypeError::new(self.graph.kind.to_string(), format!("%{} is not a value", v.0));
        self.graph.values.get(v.0 as usize).ok_or_else(unknown)
    }

    /// Adds a node and returns its results.
    ///
    /// # Errors
    /// Operands of the wrong number, kind or type; attributes out of range.
    pub fn push(&mut self, op: Op, inputs: &[Operand]) -> Result<Vec<ValueId>, TypeError> {
        let lookup = |v: ValueId| {
            let at = v.0 as usize;
            Some((self.graph.values.get(at)?.clone(), self.from_cache[at]))
        };
        let types = infer_node(self.module, &op, inputs, lookup).map_err(|e| {
            let space = if self.scope == Scope::default() { "" } else { " " };
            e.within(&format!("{}{space}{} node {}", self.graph.kind, self.scope, self.graph.nodes.len()))
        })?;
        let first = self.graph.values.len() as u32;
        let outputs: Vec<_> = (first..first + types.len() as u32).map(ValueId).collect();
        self.from_cache.extend(types.iter().map(|_| op.effect() == Effect::Writes));
        self.graph.values.extend(types);
        self.graph.nodes.push(Node {
            op,
            inputs: inputs.to_vec(),
            outputs: outputs.clone(),
            scope: self.scope.clone(),
        });
        Ok(outputs)
    }

    /// Adds a node that has a single result.
    ///
    /// # Errors
    /// As [`Self::push`]; also an operator with two results.
    pub fn one(&mut self, op: Op, inputs: &[Operand]) -> Result<ValueId, TypeError> {
        let name = op.name();
        match self.push(op, inputs)?.as_slice() {
            [v] => Ok(*v),
            several => Err(TypeError::new(name, format!("{} results, expected one", several.len()))),
        }
    }

    /// The node added last.
    pub fn last(&self) -> Option<NodeId> {
        self.graph.nodes.len().checked_sub(1).map(|i| NodeId(i as u32))
    }

    /// Ends the entry point and appends it to the module.
    ///
    /// # Errors
    /// The logits are not `f32[R, _]`.
    pub fn finish(mut self, logits: ValueId) -> Result<(), TypeError> {
        let rows = self.graph.ty(Graph::ROWS).rows();
        let ty = self.ty(logits)?;
        if *ty != Type::f32([rows, ty.cols()]) {
            let message = format!("logits %{} are {ty}, expected f32[{rows}, _]", logits.0);
            return Err(TypeError::new(self.graph.kind.to_string(), message));
        }
        self.graph.output = logits;
        self.module.entries.push(self.graph);
        Ok(())
    }
}
