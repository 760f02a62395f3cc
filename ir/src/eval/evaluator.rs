//! Running whole entry points, with the KV cache kept from call to call.

use super::tensor::Tensor;
use super::{Arg, EvalError, op_in};
use crate::graph::{EntryKind, Graph, Module, NodeId, Operand, StateId, WeightId};
use crate::op::{Effect, Op};
use crate::state::StateKind;
use crate::types::Type;
use crate::weights::{Source, Weight};
use std::collections::HashMap;
use std::rc::Rc;

/// Sees the results of every node as it is evaluated. The result of a cache write is the whole state.
pub type Observer<'o> = dyn FnMut(NodeId, &[&Tensor]) + 'o;

/// Changes the numbers of a weight after it is read, say to round them to the format of a bundle.
pub type WeightMap<'a> = dyn Fn(&Weight, &mut [f32]) + 'a;

/// Evaluates the entry points of one module.
pub struct Evaluator<'a> {
    module: &'a Module,
    source: &'a dyn Source,
    map: Option<Box<WeightMap<'a>>>,
    keep: bool,
    weights: HashMap<WeightId, Rc<Tensor>>,
    states: Vec<Option<Tensor>>,
    /// Tokens of the prompt that a run of calls reads, 0 for a single call.
    prompt: usize,
    /// Context that [`op_in`] gets.
    sequence: usize,
}

impl<'a> Evaluator<'a> {
    /// An evaluator with empty states. The module should be verified: faults are reported, but late.
    /// Weights are read when first used and kept.
    pub fn new(module: &'a Module, source: &'a dyn Source) -> Self {
        let states = module.states.iter().map(|_| None).collect();
        Self {
            module,
            source,
            map: None,
            keep: true,
            weights: HashMap::new(),
            states,
            prompt: 0,
            sequence: 0,
        }
    }

    /// Whether weights stay in memory between uses (the default).
    pub fn keep_weights(&mut self, keep: bool) {
        self.keep = keep;
        if !keep {
            self.weights.clear();
        }
    }

    /// Applies a function to every weight read from here on.
    pub fn map_weights(&mut self, map: impl Fn(&Weight, &mut [f32]) + 'a) {
        self.map = Some(Box::new(map));
        self.weights.clear();
    }

    /// Forgets all sequences.
    pub fn reset(&mut self) {
        self.states.fill(None);
    }

    /// A state, zero before it is first written.
    ///
    /// # Errors
    /// No state of the module has this id.
    pub fn state(&mut self, id: StateId) -> Result<&Tensor, EvalError> {
        let (module, slot) = (self.module, self.states.get_mut(id.0 as usize));
        let slot = slot.ok_or_else(|| EvalError::Call(format!("no state {}", id.0)))?;
        Ok(slot.get_or_insert_with(|| Tensor::zeros(module.state(id).ty.clone())))
    }

    /// Copies of the recurrent states.
    fn folded(&self) -> Vec<(usize, Option<Tensor>)> {
        let all = self.module.states.iter().zip(&self.states).enumerate();
        all.filter(|(_, (decl, _))| decl.kind.needs_snapshots()).map(|(s, (_, t))| (s, t.clone())).collect()
    }

    /// Zeros for a sequence that begins in a slot, if its states are recurrent.
    fn begin(&mut self, slot: i32) {
        for (decl, state) in self.module.states.iter().zip(&mut self.states) {
            let (Some(Tensor { data: super::Data::F32(data), .. }), true) =
                (state, decl.kind.needs_snapshots())
            else {
                continue;
            };
            let each = data.len() / decl.ty.shape[0].max(1);
            let slots = data.chunks_mut(each.max(1));
            if let Some(own) = usize::try_from(slot).ok().and_then(|slot| slots.into_iter().nth(slot)) {
                own.fill(0.0);
            }
        }
    }

    /// A weight as an f32 tensor.
    ///
    /// # Errors
    /// Whatever keeps it from being read.
    pub fn weight(&mut self, id: WeightId) -> Result<Rc<Tensor>, EvalError> {
        if let Some(w) = self.weights.get(&id) {
            return Ok(Rc::clone(w));
        }
        let known = self.module.weights.get(id.0 as usize);
        let weight = known.ok_or_else(|| EvalError::Call(format!("no weight {}", id.0)))?;
        weight.check()?;
        let mut tensor = Tensor::zeros(Type::f32(weight.shape.clone()));
        if let super::Data::F32(data) = &mut tensor.data {
            let (rows, cols) = (weight.rows(), weight.cols());
            for (matrix, out) in data.chunks_exact_mut(rows * cols).enumerate() {
                let read = weight.expr.read(matrix, 0..rows, 0..cols, self.source, out);
                read.map_err(|source| EvalError::Weight { name: weight.name.clone(), source })?;
            }
            if let Some(map) = &self.map {
                map(weight, data);
            }
        }
        let tensor = Rc::new(tensor);
        if self.keep {
            self.weights.insert(id, Rc::clone(&tensor));
        }
        Ok(tensor)
    }

    /// Runs an entry point: `ids`, `pos` and `slot` have `T` numbers each, `rows` has `R`. Returns the logits
    /// `f32[R, vocab]`.
    ///
    /// # Errors
    /// A call of the wrong size, or numbers out of range.
    pub fn run(
        &mut self,
        entry: usize,
        ids: &[i32],
        pos: &[i32],
        slot: &[i32],
        rows: &[i32],
    ) -> Result<Tensor, EvalError> {
        self.run_with(entry, ids, pos, slot, rows, &mut |_, _| {})
    }

    /// As [`Self::run`], with an observer.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn run_with(
        &mut self,
        entry: usize,
        ids: &[i32],
        pos: &[i32],
        slot: &[i32],
        rows: &[i32],
        observer: &mut Observer<'_>,
    ) -> Result<Tensor, EvalError> {
        let module = self.module;
        let unknown = || EvalError::Call(format!("no entry {entry}"));
        let graph = module.entries.get(entry).ok_or_else(unknown)?;
        let longest = pos.iter().copied().max().and_then(|p| usize::try_from(p).ok()).map_or(0, |p| p + 1);
        self.sequence = if graph.kind.is_prefill() { self.prompt.max(longest) } else { 0 };
        let mut run = RunValues::new(graph);
        for (i, given) in [ids, pos, slot, rows].into_iter().enumerate() {
            let want = graph.values.get(i).map_or(0, Type::rows);
            if given.len() != want {
                let message =
                    format!("{}: input %{i} has {} numbers, expected {want}", graph.kind, given.len());
                return Err(EvalError::Call(message));
            }
            run.values[i] = Slot::Tensor(Tensor::i32([want], given.to_vec()));
        }
        // Rings go round, caches end.
        let caches = module.states.iter().filter(|s| s.kind == StateKind::Cache);
        if let Some(context) = caches.map(|s| s.ty.shape[2]).min().filter(|&context| longest > context) {
            let message = format!("position {} is not in 0 .. {context}", longest - 1);
            return Err(EvalError::Value { op: Op::CacheWrite.name(), message });
        }
        for (i, node) in graph.nodes.iter().enumerate() {
            let id = NodeId(i as u32);
            let results = self.node(graph, id, &run)?;
            if let (Effect::Writes, Some(Operand::State(s)), [v]) =
                (node.op.effect(), node.inputs.first(), node.outputs.as_slice())
            {
                observer(id, &[self.state(*s)?]);
                run.set(v.0, Slot::State(*s))?;
            } else {
                observer(id, &results.iter().collect::<Vec<_>>());
                for (v, tensor) in node.outputs.iter().zip(results) {
                    run.set(v.0, Slot::Tensor(tensor))?;
                }
            }
            run.forget(i);
        }
        match run.values.get_mut(graph.output.0 as usize).map(std::mem::take) {
            Some(Slot::Tensor(logits)) => Ok(logits),
            _ => Err(EvalError::Call(format!("{}: the output is not a value", graph.kind))),
        }
    }

    /// Evaluates one node on the values so far.
    fn node(&mut self, graph: &Graph, id: NodeId, run: &RunValues) -> Result<Vec<Tensor>, EvalError> {
        let node = &graph.nodes[id.0 as usize];
        let undefined =
            || EvalError::Call(format!("{} node {}: an operand is not defined", graph.kind, id.0));
        let weights = node.inputs.iter().map(|o| match o {
            Operand::Weight(w) => self.weight(*w).map(Some),
            _ => Ok(None),
        });
        let weights = weights.collect::<Result<Vec<_>, _>>()?;
        // The state of an operand, direct or through a cache write.
        let state_of = |o: &Operand| match o {
            Operand::State(s) => Some(*s),
            Operand::Value(v) => match run.values.get(v.0 as usize) {
                Some(Slot::State(s)) => Some(*s),
                _ => None,
            },
            Operand::Weight(_) => None,
        };
        for s in node.inputs.iter().filter_map(state_of) {
            self.state(s)?;
        }
        // A state that is changed is taken out, so that the others can be read meanwhile.
        let writes =
            if node.op.effect() == Effect::None { None } else { node.inputs.first().and_then(state_of) };
        let mut written = writes.and_then(|s| self.states[s.0 as usize].take().map(|t| (s, t)));
        let mut target = written.as_mut().map(|(_, t)| t);
        let states = &self.states;
        let args = node.inputs.iter().zip(&weights).map(|(o, weight)| {
            if let Some(w) = weight {
                return Ok(Arg::Tensor(w));
            }
            if let Some(s) = state_of(o) {
                return match states[s.0 as usize].as_ref() {
                    Some(state) => Ok(Arg::Tensor(state)),
                    None => target.take().map(Arg::State).ok_or_else(undefined),
                };
            }
            match o {
                Operand::Value(v) => match run.values.get(v.0 as usize) {
                    Some(Slot::Tensor(t)) => Ok(Arg::Tensor(t)),
                    _ => Err(undefined()),
                },
                _ => Err(undefined()),
            }
        });
        let args: Result<Vec<_>, _> = args.collect();
        let results = args.and_then(|args| op_in(&node.op, args, self.sequence));
        if let Some((s, tensor)) = written {
            self.states[s.0 as usize] = Some(tensor);
        }
        results
    }

    /// Logits `f32[len, vocab]` of one sequence in slot 0, starting from an empty cache. Takes the largest
    /// prefill entry chunk by chunk, or, if there is none, the smallest decode entry token by token.
    ///
    /// # Errors
    /// A module without entries, a sequence that is empty or longer than the context, or an id out of range.
    pub fn logits(&mut self, ids: &[u32]) -> Result<Tensor, EvalError> {
        let entries = self.module.entries.iter().enumerate();
        let best = entries.max_by_key(|(_, g)| match g.kind {
            EntryKind::Prefill(n) => i64::from(n),
            EntryKind::Decode(n) => -i64::from(n),
            EntryKind::Little(_) => i64::MIN,
        });
        let (entry, _) = best.ok_or_else(|| EvalError::Call("the module has no entries".into()))?;
        self.reset();
        self.logits_from(entry, 0, 0, ids)
    }

    /// Logits `f32[len, vocab]` of tokens that continue the sequence in `slot` at position `start`, through
    /// one entry point, padded.
    ///
    /// # Errors
    /// As [`Self::logits`].
    pub fn logits_from(
        &mut self,
        entry: usize,
        slot: i32,
        start: usize,
        ids: &[u32],
    ) -> Result<Tensor, EvalError> {
        // All chunks belong to one prompt.
        self.prompt = start.saturating_add(ids.len());
        let logits = self.chunks(entry, slot, start, ids);
        self.prompt = 0;
        logits
    }

    fn chunks(&mut self, entry: usize, slot: i32, start: usize, ids: &[u32]) -> Result<Tensor, EvalError> {
        let unknown = || EvalError::Call(format!("no entry {entry}"));
        let graph = self.module.entries.get(entry).ok_or_else(unknown)?;
        let rows = graph.kind.rows();
        let outputs = graph.values.get(Graph::ROWS.0 as usize).map_or(0, Type::rows);
        if ids.is_empty() || rows == 0 || outputs == 0 {
            return Err(EvalError::Call("an empty sequence or entry".into()));
        }
        if start == 0 {
            self.begin(slot);
        }
        let chunk = if graph.kind.is_prefill() { rows } else { 1 };
        let slots = vec![slot; rows];
        let (mut logits, mut vocab) = (Vec::new(), 0);
        for (c, part) in ids.chunks(chunk).enumerate() {
            let first = start + c * chunk;
            let mut chunk_ids = vec![0; rows];
            let mut pos = vec![-1; rows];
            for (i, &id) in part.iter().enumerate() {
                chunk_ids[i] =
                    i32::try_from(id).map_err(|_| EvalError::Call(format!("id {id} is out of range")))?;
                pos[i] = (first + i) as i32;
            }
            // Fewer output rows than tokens: the chunk runs again, which writes the same cache rows again,
            // from the recurrent states before it.
            let before = (part.len() > outputs).then(|| self.folded());
            for block in (0..part.len()).step_by(outputs) {
                if let Some(before) = before.as_ref().filter(|_| block > 0) {
                    for (s, tensor) in before {
                        self.states[*s].clone_from(tensor);
                    }
                }
                let count = outputs.min(part.len() - block);
                let rows: Vec<i32> =
                    (0..outputs).map(|r| if r < count { (block + r) as i32 } else { -1 }).collect();
                let out = self.run(entry, &chunk_ids, &pos, &slots, &rows)?;
                vocab = out.ty.cols();
                logits.extend_from_slice(out.as_f32().get(..count * vocab).unwrap_or_default());
            }
        }
        Ok(Tensor::f32([ids.len(), vocab], logits))
    }
}

/// Contents of a value during a run.
#[derive(Default)]
enum Slot {
    /// Not computed yet, or dropped already.
    #[default]
    Empty,
    Tensor(Tensor),
    /// The state itself, after a cache write.
    State(StateId),
}

/// The values of one run.
struct RunValues {
    values: Vec<Slot>,
    /// Values that each node is the last to read.
    dying: Vec<Vec<usize>>,
}

impl RunValues {
    fn new(graph: &Graph) -> Self {
        let mut last = vec![None; graph.values.len()];
        for (i, node) in graph.nodes.iter().enumerate() {
            for input in &node.inputs {
                if let Operand::Value(v) = input
                    && let Some(last) = last.get_mut(v.0 as usize)
                {
                    *last = Some(i);
                }
            }
        }
        let mut dying = vec![Vec::new(); graph.nodes.len()];
        for (v, last) in last.into_iter().enumerate() {
            if let (Some(i), true) = (last, v != graph.output.0 as usize) {
                dying[i].push(v);
            }
        }
        let values = (0..graph.values.len().max(4)).map(|_| Slot::Empty).collect();
        Self { values, dying }
    }

    fn set(&mut self, value: u32, slot: Slot) -> Result<(), EvalError> {
        let unknown = || EvalError::Call(format!("%{value} is not a value of the graph"));
        *self.values.get_mut(value as usize).ok_or_else(unknown)? = slot;
        Ok(())
    }

    /// Drops values that no node after `i` reads.
    fn forget(&mut self, i: usize) {
        for &v in &self.dying[i] {
            self.values[v] = Slot::Empty;
        }
    }
}
