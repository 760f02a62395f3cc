//! Observes a traced run of one entry point, node by node.

use super::Distance;
use super::allowed::Arithmetic;
use super::{EntryReport, NodeReport};
use moec_base::error::{Error, Result};
use moec_ir::eval::{self, Arg, Data, Evaluator, Tensor};
use moec_ir::graph::INPUTS;
use moec_ir::op::{DispatchLayout, Effect};
use moec_ir::plan::{Builtin, Code, Entry, Plan, RowSpace, StateBuf, Step};
use moec_ir::{Graph, Module, Node, NodeId, Op, Operand, StateId, Type, ValueId};
use moec_runtime::{Moment, StepView};
use std::collections::HashMap;

/// Observer of one traced run.
///
/// Steps of a node need not be adjacent, and buffers are reused. So the results of a node are kept until
/// every node that reads them has been measured.
pub(super) struct Probe<'a> {
    module: &'a Module,
    graph: &'a Graph,
    entry: &'a Entry,
    /// KV cache.
    states: &'a [StateBuf],
    arithmetic: &'a Arithmetic,
    own: &'a HashMap<NodeId, Vec<Tensor>>,
    /// Tokens of the prompt that the rows belong to; 0 in decoding.
    sequence: usize,
    spaces: Vec<RowSpace>,
    /// Steps of each node that have not run yet.
    pending: Vec<usize>,
    /// Values that each node with steps reads, directly or through nodes without steps.
    reads: HashMap<NodeId, Vec<ValueId>>,
    /// Number of nodes that have not read each value yet.
    readers: HashMap<ValueId, usize>,
    /// Results of compiled steps.
    recorded: HashMap<ValueId, Tensor>,
    /// Evaluator's results of an operator that changes its state, computed before that change.
    written: HashMap<NodeId, Vec<Tensor>>,
    reports: Vec<NodeReport>,
    /// Rows of tokens that a router sent to other experts than the evaluator did.
    rerouted: Vec<usize>,
    /// Computed logits.
    logits: Option<Tensor>,
}

impl<'a> Probe<'a> {
    pub(super) fn new(
        module: &'a Module,
        graph: &'a Graph,
        (entry, states): (&'a Entry, &'a [StateBuf]),
        arithmetic: &'a Arithmetic,
        own: &'a HashMap<NodeId, Vec<Tensor>>,
        sequence: usize,
    ) -> Self {
        let mut pending = vec![0; graph.nodes.len()];
        for step in &entry.steps {
            pending[step.node as usize] += 1;
        }
        let mut probe = Self {
            module,
            graph,
            entry,
            states,
            arithmetic,
            own,
            sequence,
            spaces: graph.row_spaces(module),
            pending,
            reads: HashMap::new(),
            readers: HashMap::new(),
            recorded: HashMap::new(),
            written: HashMap::new(),
            reports: Vec::new(),
            rerouted: Vec::new(),
            logits: None,
        };
        for id in
            (0..graph.nodes.len()).map(|i| NodeId(i as u32)).filter(|id| probe.pending[id.0 as usize] > 0)
        {
            let mut reads = Vec::new();
            probe.collect_reads(id, &mut reads);
            reads.sort_unstable();
            reads.dedup();
            for &v in &reads {
                *probe.readers.entry(v).or_default() += 1;
            }
            probe.reads.insert(id, reads);
        }
        probe
    }

    fn collect_reads(&self, id: NodeId, reads: &mut Vec<ValueId>) {
        for input in &self.node(id).inputs {
            if let Operand::Value(v) = *input
                && let Some(def) = self.graph.def(v)
            {
                if self.has_steps(def) && self.is_readable(v) {
                    reads.push(v);
                } else {
                    self.collect_reads(def, reads);
                }
            }
        }
    }

    /// Whether a value can be read after its steps: not if it exists only in a format for matrix
    /// multiplication.
    fn is_readable(&self, v: ValueId) -> bool {
        self.entry.locations[v.0 as usize].is_some() || self.state_of(Operand::Value(v)).is_some()
    }

    fn has_steps(&self, id: NodeId) -> bool {
        self.entry.steps.iter().any(|s| s.node == id.0)
    }

    /// Called before and after every step. Returns whether a node has just been measured.
    pub(super) fn observe(
        &mut self,
        evaluator: &mut Evaluator<'_>,
        moment: Moment,
        view: &StepView<'_>,
    ) -> Result<bool> {
        let id = NodeId(self.entry.steps[view.index()].node);
        if moment == Moment::Before {
            // Copies of what a node reads may come long before it.
            let copies = matches!(self.entry.steps[view.index()].code, Code::Builtin(Builtin::Copy { .. }));
            if self.node(id).op.effect() != Effect::None && !copies {
                let expected = self.reference(evaluator, view, id)?;
                self.written.insert(id, expected);
            }
            return Ok(false);
        }
        self.pending[id.0 as usize] -= 1;
        if self.pending[id.0 as usize] > 0 {
            return Ok(false);
        }
        let expected = match self.written.remove(&id) {
            Some(expected) => expected,
            None => self.reference(evaluator, view, id)?,
        };
        self.measure(view, id, &expected)?;
        for v in self.reads.remove(&id).unwrap_or_default() {
            let left = self.readers.entry(v).or_default();
            *left = left.saturating_sub(1);
            if *left == 0 {
                self.recorded.remove(&v);
            }
        }
        Ok(true)
    }

    /// Returns the report; the rows of logits are those of the tokens in `outputs`.
    pub(super) fn finish(self, plan: &Plan, outputs: &[usize]) -> EntryReport {
        let (logits, rows) = self.logits(outputs);
        let mut nodes = self.reports;
        for report in &mut nodes {
            let steps = self.entry.steps.iter().filter(|s| s.node == report.node);
            report.kernels = steps
                .map(|s| match s.code {
                    Code::Kernel(k) => plan.kernels[k as usize].symbol.clone(),
                    Code::Builtin(Builtin::Launch { kernel }) => {
                        plan.launches[kernel as usize].symbol.clone()
                    }
                    Code::Builtin(_) => "runtime".to_owned(),
                })
                .collect();
        }
        let all_rows = outputs.len();
        EntryReport { entry: self.graph.kind.to_string(), nodes, logits, rows, all_rows }
    }

    /// Distance of the logits, and the number of compared rows. Rounding may send a token to another expert,
    /// and its row is then no longer comparable.
    fn logits(&self, outputs: &[usize]) -> (Distance, usize) {
        let rounds = self.reports.iter().any(|r| r.rounding > 0.0);
        let own = self.graph.def(self.graph.output).and_then(|id| self.own.get(&id)?.first());
        let (Some(got), Some(own)) = (&self.logits, own) else { return (Distance::exact(false), 0) };
        let cols = got.ty.cols();
        let compared =
            outputs.iter().enumerate().filter(|(_, token)| !rounds || !self.rerouted.contains(token));
        let rows: Vec<usize> = compared.map(|(row, _)| row).collect();
        let pick = |t: &Tensor| {
            let numbers =
                rows.iter().flat_map(|&r| t.as_f32().chunks(cols).nth(r).unwrap_or_default().to_vec());
            Tensor::f32([rows.len(), cols], numbers.collect())
        };
        (Distance::of(&pick(got), &pick(own), rows.len() * cols), rows.len())
    }

    /// Records the rows of a router's choices that differ from the evaluator's; `len` rows are valid.
    fn reroute(&mut self, got: &Tensor, own: &Tensor, len: usize) {
        let k = got.ty.cols().max(1);
        let chosen = |ids: &[i32]| {
            let mut ids = ids.to_vec();
            ids.sort_unstable();
            ids
        };
        let rows = got.as_i32()[..len].chunks(k).zip(own.as_i32().chunks(k)).enumerate();
        self.rerouted.extend(rows.filter(|(_, (a, b))| chosen(a) != chosen(b)).map(|(row, _)| row));
    }

    fn steps_of(&self, id: NodeId) -> impl Iterator<Item = &'a Step> + use<'a> {
        self.entry.steps.iter().filter(move |s| s.node == id.0)
    }

    fn node(&self, id: NodeId) -> &'a Node {
        &self.graph.nodes[id.0 as usize]
    }

    /// The state of an operand, directly or through a cache write.
    fn state_of(&self, operand: Operand) -> Option<StateId> {
        match operand {
            Operand::State(s) => Some(s),
            Operand::Value(v) => {
                let node = self.node(self.graph.def(v)?);
                (node.op.effect() == Effect::Writes).then(|| self.state_of(node.inputs[0])).flatten()
            }
            Operand::Weight(_) => None,
        }
    }

    /// Evaluates a node on the operands of the compiled steps.
    fn reference(
        &self,
        evaluator: &mut Evaluator<'_>,
        view: &StepView<'_>,
        id: NodeId,
    ) -> Result<Vec<Tensor>> {
        let node = self.node(id);
        let failed = |e: eval::EvalError| {
            Error::bug(format!("the evaluator failed at `{}` in `{}`", node.op.name(), node.scope)).because(e)
        };
        if let Op::Dispatch { experts, partial } = node.op {
            return self.dispatch(view, node, experts, partial).map(|t| vec![t]);
        }
        let mut operands = Vec::new();
        for &input in &node.inputs {
            operands.push(match (self.state_of(input), input) {
                (Some(s), _) => self.state(view, s)?,
                (None, Operand::Value(v)) => self.value(evaluator, view, v)?,
                (None, Operand::Weight(w)) => (*evaluator.weight(w).map_err(failed)?).clone(),
                (None, Operand::State(_)) => return Err(Error::bug("a state without itself")),
            });
        }
        let effect = node.op.effect();
        if effect != Effect::None {
            let (state, rest) =
                operands.split_first_mut().ok_or_else(|| Error::bug("a change of no state"))?;
            let mut args = vec![Arg::State(state)];
            args.extend(rest.iter().map(Arg::Tensor));
            let results = eval::op(&node.op, args).map_err(failed)?;
            operands.truncate(1);
            return Ok(if effect == Effect::Writes { operands } else { results });
        }
        eval::op_in(&node.op, operands.iter().map(Arg::Tensor).collect(), self.sequence).map_err(failed)
    }

    /// Evaluates the table for the valid rows alone, since padding rows are not dispatched.
    fn dispatch(&self, view: &StepView<'_>, node: &Node, experts: usize, partial: bool) -> Result<Tensor> {
        let Some(&Operand::Value(ids)) = node.inputs.first() else {
            return Err(Error::bug("a dispatch of nothing"));
        };
        let all = self.recorded.get(&ids).ok_or_else(|| Error::bug("choices without a place"))?;
        let k = all.ty.cols();
        let valid = all.as_i32()[..view.n() * k].to_vec();
        let ids = Tensor::i32([view.n(), k], valid);
        let mut results = eval::op(&Op::Dispatch { experts, partial }, vec![Arg::Tensor(&ids)])
            .map_err(|e| Error::input("a router made up an expert").because(e))?;
        results.pop().ok_or_else(|| Error::bug("a dispatch without table"))
    }

    /// A value as the compiled steps left it. A value without steps of its own (a view, or one fused into an
    /// epilogue) is evaluated from its operands.
    fn value(&self, evaluator: &mut Evaluator<'_>, view: &StepView<'_>, v: ValueId) -> Result<Tensor> {
        if let Some(tensor) = self.recorded.get(&v) {
            return Ok(tensor.clone());
        }
        let missing = || Error::bug(format!("%{} has no place", v.0));
        let Some(def) = self.graph.def(v) else { return self.read_value(view, v)?.ok_or_else(missing) };
        let which = self.node(def).outputs.iter().position(|&o| o == v).unwrap_or(0);
        let mut results = self.reference(evaluator, view, def)?;
        Ok(results.swap_remove(which))
    }

    /// Reads a value from its location. Invalid rows are zero.
    fn read_value(&self, view: &StepView<'_>, v: ValueId) -> Result<Option<Tensor>> {
        let Some(place) = self.entry.locations[v.0 as usize] else { return Ok(None) };
        let ty = self.graph.ty(v);
        let out = || Error::bug(format!("the place of %{} is outside of its buffer", v.0));
        let bytes = view.buffer(place.buffer).ok_or_else(out)?;
        let words: Vec<[u8; 4]> = bytes.chunks_exact(4).map(|b| [b[0], b[1], b[2], b[3]]).collect();
        let stride = self.entry.buffers[place.buffer as usize].stride as usize;
        let cols = place.cols as usize;
        let rows = ty.elements() / cols.max(1);
        let valid = if (v.0 as usize) < INPUTS { rows } else { self.valid_rows(view, v, ty) };
        let mut picked = Vec::with_capacity(ty.elements());
        for r in 0..rows {
            let from = place.column as usize + r * stride;
            match words.get(from..from + cols) {
                _ if r >= valid => picked.extend(std::iter::repeat_n([0; 4], cols)),
                Some(row) => picked.extend_from_slice(row),
                None => return Err(out()),
            }
        }
        Ok(Some(tensor(ty, &picked)))
    }

    /// Number of valid rows of a value: a share of `n` or `m`, and all rows of a table.
    fn valid_rows(&self, view: &StepView<'_>, v: ValueId, ty: &Type) -> usize {
        if ty.shape.len() < 2 {
            return ty.elements();
        }
        let (all, valid) = match self.spaces[v.0 as usize] {
            RowSpace::Tokens => (self.graph.kind.rows(), view.n()),
            RowSpace::Outputs => (self.graph.ty(Graph::ROWS).rows(), view.m()),
        };
        let rows = ty.rows() / all.max(1) * valid;
        self.slots(v).map_or(rows, |used| used.min(rows))
    }

    /// Number of slots that experts compute, where a value is their results: choices of no expert have none.
    fn slots(&self, v: ValueId) -> Option<usize> {
        let node = self.node(self.graph.def(v)?);
        let (Op::ExpertFfn { .. }, Some(&Operand::Value(table))) = (&node.op, node.inputs.get(1)) else {
            return None;
        };
        let Op::Dispatch { experts, .. } = self.node(self.graph.def(table)?).op else { return None };
        let words = self.recorded.get(&table)?.as_i32();
        let active = usize::try_from(*words.first()?).ok()?;
        let end = words.get(DispatchLayout { rows: 0, k: 0, experts }.start() + active)?;
        usize::try_from(*end).ok()
    }

    fn state(&self, view: &StepView<'_>, s: StateId) -> Result<Tensor> {
        let wrong = || Error::bug(format!("state {} has not the memory of its order", s.0));
        let state = self.states.get(s.0 as usize).ok_or_else(wrong)?;
        let numbers = view.state(s.0).and_then(|bytes| state.read(&bytes)).ok_or_else(wrong)?;
        Ok(Tensor { ty: self.module.state(s).ty.clone(), data: Data::F32(numbers) })
    }

    /// Compares the results of a node's steps.
    fn measure(&mut self, view: &StepView<'_>, id: NodeId, expected: &[Tensor]) -> Result<()> {
        let node = self.node(id);
        let (mut local, mut chained) = (Distance::default(), None::<Distance>);
        let comparable = !matches!(node.op, Op::ExpertFfn { .. } | Op::NeuronFfn { .. } | Op::CacheWrite);
        for (i, &v) in node.outputs.iter().enumerate() {
            let got = match self.state_of(Operand::Value(v)) {
                Some(s) => self.state(view, s)?,
                None => match self.read_value(view, v)? {
                    Some(got) => got,
                    None => continue,
                },
            };
            let Some(want) = expected.get(i) else { continue };
            if let Op::Dispatch { experts, .. } = node.op {
                // The evaluator's own table has padding rows, so there is no chained error.
                let divided = self
                    .steps_of(id)
                    .any(|s| matches!(s.code, Code::Builtin(Builtin::Dispatch { candidates: Some(_), .. })));
                let compared = same_dispatch(self.graph, node, experts, (&got, want), view.n(), divided);
                local = local.max(compared);
                self.recorded.insert(v, got);
                continue;
            }
            let len = match node.op {
                Op::CacheWrite => got.ty.elements(),
                _ => self.valid_rows(view, v, &got.ty) * (got.ty.elements() / got.ty.rows().max(1)),
            };
            local = local.max(Distance::of(&got, want, len));
            if let Some(own) = self.own.get(&id).and_then(|own| own.get(i)).filter(|_| comparable) {
                let d = Distance::of(&got, own, len);
                chained = Some(chained.unwrap_or_default().max(d));
                if matches!(node.op, Op::Router(_)) && i == 0 {
                    self.reroute(&got, own, len);
                }
                if v == self.graph.output {
                    self.logits = Some(got.clone());
                }
            }
            if !matches!(node.op, Op::CacheWrite) {
                self.recorded.insert(v, got);
            }
        }
        let streams = self.steps_of(id).any(|s| matches!(s.code, Code::Builtin(Builtin::Streams { .. })));
        let codes: Vec<Code> = self.steps_of(id).map(|s| s.code).collect();
        self.reports.push(NodeReport {
            node: id.0,
            scope: node.scope.to_string(),
            op: node.op.name(),
            kernels: Vec::new(),
            local,
            rounding: self.arithmetic.rounding(&node.op, &codes, streams),
            chained,
        });
        Ok(())
    }
}

fn tensor(ty: &Type, words: &[[u8; 4]]) -> Tensor {
    let data = match ty.dtype {
        moec_ir::DType::F32 => Data::F32(words.iter().map(|&w| f32::from_le_bytes(w)).collect()),
        moec_ir::DType::I32 => Data::I32(words.iter().map(|&w| i32::from_le_bytes(w)).collect()),
    };
    Tensor { ty: ty.clone(), data }
}

/// Compares a table for `T` rows with one for the `n` valid ones, which has the same content at other
/// offsets. If experts are on several units, the first table has the experts unit by unit, so their order is
/// not compared.
fn same_dispatch(
    graph: &Graph,
    node: &Node,
    experts: usize,
    (got, want): (&Tensor, &Tensor),
    n: usize,
    divided: bool,
) -> Distance {
    let Some(&Operand::Value(ids)) = node.inputs.first() else { return Distance::exact(false) };
    let k = graph.ty(ids).cols();
    let (a, b) =
        (DispatchLayout { rows: graph.kind.rows(), k, experts }, DispatchLayout { rows: n, k, experts });
    let tables =
        [(a, got.as_i32()), (b, want.as_i32())].map(|(layout, table)| DispatchEntries::of(layout, table, n));
    Distance::exact(match tables {
        [Some(mut a), Some(mut b)] => {
            if divided {
                a.experts.sort();
                b.experts.sort();
            }
            a == b
        }
        _ => false,
    })
}

/// A dispatch table without its offsets.
#[derive(PartialEq)]
struct DispatchEntries {
    pairs: i32,
    /// Each active expert, and its (token, choice) pairs in the order of its slots.
    experts: Vec<(i32, Vec<usize>)>,
}

impl DispatchEntries {
    /// Contents of a table for `n` rows; `None` if it contradicts itself.
    fn of(layout: DispatchLayout, table: &[i32], n: usize) -> Option<Self> {
        let word = |at: usize| table.get(at).copied();
        let index = |at: usize| word(at).and_then(|w| usize::try_from(w).ok());
        let active = index(0).filter(|&active| active <= layout.experts)?;
        // The pair of each slot, which must name that slot.
        let mut pair_of = HashMap::new();
        for pair in 0..n * layout.k {
            if let Some(slot) = index(layout.slot() + pair) {
                let other = pair_of.insert(slot, pair);
                if other.is_some() || index(layout.token() + slot) != Some(pair / layout.k) {
                    return None;
                }
            }
        }
        let mut experts = Vec::new();
        for rank in 0..active {
            let (first, end) = (index(layout.start() + rank)?, index(layout.start() + rank + 1)?);
            let pairs = (first..end).map(|slot| pair_of.remove(&slot)).collect::<Option<_>>()?;
            experts.push((word(layout.expert() + rank)?, pairs));
        }
        pair_of.is_empty().then_some(Self { pairs: word(1)?, experts })
    }
}
