//! Conversion of one region of a graph to an e-graph and back.
//!
//! A region is a run of nodes of one scope (an attention block, a feed-forward block). Values that cross its
//! border are leaves. So an e-graph stays small, and its greedy extraction compares only local costs.

use super::Costs;
use super::language::{Atom, Attr, Fact, Facts, Moe, Opaque, attr_of, op_name};
use super::rules::{activation_of, glu_of};
use egg::{EGraph, Extractor, Id, Language};
use moec_base::error::{Error, Result};
use moec_ir::{
    Axis, Format, Glu, Graph, GraphBuilder, Module, Node, Op, Operand, ValueId, Weight, WeightExpr, WeightId,
};
use std::collections::HashMap;

/// The e-graph of a region.
pub(super) struct Region {
    /// E-graph.
    pub(super) egraph: EGraph<Moe, Facts>,
    /// Class of every value that the region defines and of the leaves it reads.
    classes: HashMap<ValueId, Id>,
}

impl Region {
    /// Loads `nodes` of `graph`, in its order.
    pub(super) fn load(module: &Module, graph: &Graph, nodes: &[&Node]) -> Self {
        let mut region = Self { egraph: EGraph::new(Facts::default()), classes: HashMap::new() };
        for node in nodes {
            region.add(module, graph, nodes, node);
        }
        region.egraph.rebuild();
        region
    }

    /// Class of a value of the region.
    pub(super) fn class(&self, v: ValueId) -> Option<Id> {
        self.classes.get(&v).copied()
    }

    fn leaf(&mut self, atom: Atom, fact: Fact) -> Id {
        self.egraph.analysis.leaves.insert(atom, fact);
        self.egraph.add(Moe::Atom(atom))
    }

    fn attr(&mut self, attr: Attr) -> Id {
        let leaf = self.egraph.analysis.attr(attr);
        self.egraph.add(leaf)
    }

    fn glu(&mut self, glu: Glu) -> Id {
        match glu {
            Glu::Gated(k) => self.egraph.add(Moe::Atom(Atom::Kind(k))),
            other => self.attr(Attr::Glu(other)),
        }
    }

    fn operand(&mut self, module: &Module, graph: &Graph, operand: Operand) -> Id {
        match operand {
            Operand::Value(v) => {
                if let Some(&id) = self.classes.get(&v) {
                    return id;
                }
                let fact = Fact { shape: graph.ty(v).shape.clone(), ..Fact::default() };
                let id = self.leaf(Atom::Value(v.0), fact);
                self.classes.insert(v, id);
                id
            }
            Operand::Weight(w) => {
                let weight = module.weight(w);
                let storage = Some((weight.format, weight.class));
                self.leaf(Atom::Weight(w.0), Fact { shape: weight.shape.clone(), storage, attr: None })
            }
            Operand::State(s) => {
                let shape = module.state(s).ty.shape.clone();
                self.leaf(Atom::State(s.0), Fact { shape, ..Fact::default() })
            }
        }
    }

    fn add(&mut self, module: &Module, graph: &Graph, nodes: &[&Node], node: &Node) {
        let c: Vec<Id> = node.inputs.iter().map(|&o| self.operand(module, graph, o)).collect();
        let enode = match (&node.op, c.as_slice()) {
            (Op::Linear { bias: false }, &[x, w]) => Moe::Linear([x, w]),
            (Op::Linear { bias: true }, &[x, w, b]) => Moe::LinearBias([x, w, b]),
            (Op::LinearGlu { glu, bias: false }, &[x, w]) => Moe::LinearGlu([self.glu(*glu), x, w]),
            (Op::LinearGlu { glu, bias: true }, &[x, w, b]) => Moe::LinearGluBias([self.glu(*glu), x, w, b]),
            (&Op::HeadLinear { heads }, &[x, w]) => Moe::HeadLinear([self.attr(Attr::Heads(heads)), x, w]),
            (Op::ExpertFfn { glu, bias: false, fixed: false }, &[x, d, gu, dn]) => {
                Moe::ExpertFfn([self.glu(*glu), x, d, gu, dn])
            }
            (Op::ExpertFfn { glu, bias: true, fixed: false }, &[x, d, gu, dn, gb, db]) => {
                Moe::ExpertFfnBias([self.glu(*glu), x, d, gu, dn, gb, db])
            }
            (&Op::RmsNorm { eps, groups, weight }, _) => {
                let foldable = groups == 1 && folds(module, graph, nodes, node);
                let attr = self.attr(Attr::Rms { eps, groups, foldable });
                if weight { Moe::RmsNorm([attr, c[0], c[1]]) } else { Moe::RmsUnit([attr, c[0]]) }
            }
            (Op::ScaleCols, &[x, w]) => Moe::ScaleCols([x, w]),
            (Op::Act(kind), &[x]) => {
                let kind = self.egraph.add(Moe::Atom(Atom::Kind(*kind)));
                Moe::Act([kind, x])
            }
            (Op::Glu(glu), &[g, u]) => Moe::Glu([self.glu(*glu), g, u]),
            (Op::Mul, &[a, b]) => Moe::Mul([a, b]),
            (Op::Add, &[a, b]) => Moe::Add([a, b]),
            (&Op::Scale { factor }, &[x]) => Moe::Scale([self.attr(Attr::Factor(factor)), x]),
            (&Op::Clamp { lo, hi }, &[x]) => Moe::Clamp([self.attr(Attr::Bounds(lo, hi)), x]),
            (&Op::Slice { heads, start, len }, &[x]) => {
                Moe::Slice([self.attr(Attr::Slice { heads, start, len }), x])
            }
            (&Op::Concat { heads }, &[first, ref rest @ ..]) => {
                let attr = self.attr(Attr::Heads(heads));
                let joined = rest.iter().fold(first, |a, &b| self.egraph.add(Moe::Concat([attr, a, b])));
                self.classes.insert(node.outputs[0], joined);
                return;
            }
            (op, _) => {
                let shapes = node.outputs.iter().map(|&v| graph.ty(v).shape.clone()).collect();
                let others = &mut self.egraph.analysis.others;
                others.push((op.clone(), shapes));
                Moe::Other(Opaque(others.len() as u32 - 1), c)
            }
        };
        let id = self.egraph.add(enode);
        match node.outputs.as_slice() {
            [one] => {
                self.classes.insert(*one, id);
            }
            [first, second, ..] => {
                let (a, b) = (self.egraph.add(Moe::First(id)), self.egraph.add(Moe::Second(id)));
                self.classes.insert(*first, a);
                self.classes.insert(*second, b);
            }
            [] => {}
        }
    }
}

/// True if every reader of a norm's value is in the region and can take its scale into f32 weights. The
/// embedding table is never scaled: a head with its own scale would need a second table.
fn folds(module: &Module, graph: &Graph, nodes: &[&Node], norm: &Node) -> bool {
    let value = Operand::Value(norm.outputs[0]);
    let is_table =
        |w: Operand| graph.nodes.iter().any(|n| matches!(n.op, Op::Embed) && n.inputs.contains(&w));
    let takes = |weight: Option<&Operand>| match weight {
        Some(&Operand::Weight(w)) => module.weight(w).format == Format::F32 && !is_table(w.into()),
        _ => false,
    };
    let mut readers = nodes.iter().filter(|n| n.inputs.contains(&value)).peekable();
    readers.peek().is_some()
        && readers.all(|n| {
            let weight = match n.op {
                Op::Linear { .. } | Op::LinearGlu { .. } => n.inputs.get(1),
                Op::ExpertFfn { .. } => n.inputs.get(2),
                _ => None,
            };
            n.inputs.iter().filter(|i| **i == value).count() == 1
                && n.inputs.first() == Some(&value)
                && takes(weight)
        })
}

/// Writes the cheapest form of a region's roots back as nodes.
pub(super) struct Rebuild<'r, 'b, 'm, C: egg::CostFunction<Moe>> {
    /// Region.
    pub(super) region: &'r Region,
    /// Extraction of the cheapest form.
    pub(super) extractor: Extractor<'r, C, Moe, Facts>,
    /// Builder of the nodes.
    pub(super) builder: &'b mut GraphBuilder<'m>,
    /// New values of the old ones from outside the region.
    pub(super) outside: &'b HashMap<ValueId, ValueId>,
    /// Operands of the classes that are already rebuilt.
    pub(super) memo: HashMap<Id, Vec<Operand>>,
}

impl<C: egg::CostFunction<Moe>> Rebuild<'_, '_, '_, C> {
    /// The operand of a class.
    pub(super) fn operand(&mut self, id: Id) -> Result<Operand> {
        let all = self.operands(id)?;
        all.first().copied().ok_or_else(|| Error::bug("an operator without result was rewritten"))
    }

    fn operands(&mut self, id: Id) -> Result<Vec<Operand>> {
        let id = self.region.egraph.find(id);
        if let Some(memoized) = self.memo.get(&id) {
            return Ok(memoized.clone());
        }
        let enode = self.extractor.find_best_node(id).clone();
        let made = self.make(&enode)?;
        self.memo.insert(id, made.clone());
        Ok(made)
    }

    fn make(&mut self, enode: &Moe) -> Result<Vec<Operand>> {
        let region = self.region;
        let graph = &region.egraph;
        let missing = || Error::bug(format!("attribute of `{enode}` is missing"));
        let attr = |id: &Id| attr_of(graph, *id).ok_or_else(missing);
        let glu = |id: &Id| glu_of(graph, *id).ok_or_else(missing);
        let heads = |id: &Id| match attr(id)? {
            Attr::Heads(heads) => Ok(heads),
            _ => Err(missing()),
        };
        let (op, children): (Op, &[Id]) = match enode {
            Moe::Atom(Atom::Value(v)) => {
                let new = self.outside.get(&ValueId(*v)).copied();
                return Ok(vec![new.ok_or_else(|| Error::bug(format!("%{v} was lost")))?.into()]);
            }
            Moe::Atom(Atom::Weight(w)) => return Ok(vec![WeightId(*w).into()]),
            Moe::Atom(Atom::State(s)) => return Ok(vec![moec_ir::StateId(*s).into()]),
            Moe::Atom(_) => return Err(Error::bug("expected a value, found an attribute")),
            Moe::First(x) => return Ok(vec![self.operands(*x)?[0]]),
            Moe::Second(x) => {
                let all = self.operands(*x)?;
                return all.get(1).map(|&o| vec![o]).ok_or_else(missing);
            }
            Moe::WRows([a, b]) => return self.joined_weight(*a, *b),
            Moe::WScale([w, s]) => return self.scaled_weight(*w, *s),
            Moe::Linear(c) => (Op::Linear { bias: false }, c),
            Moe::LinearBias(c) => (Op::Linear { bias: true }, c),
            Moe::LinearGlu(c) => (Op::LinearGlu { glu: glu(&c[0])?, bias: false }, &c[1..]),
            Moe::LinearGluBias(c) => (Op::LinearGlu { glu: glu(&c[0])?, bias: true }, &c[1..]),
            Moe::HeadLinear(c) => (Op::HeadLinear { heads: heads(&c[0])? }, &c[1..]),
            Moe::ExpertFfn(c) => (Op::ExpertFfn { glu: glu(&c[0])?, bias: false, fixed: false }, &c[1..]),
            Moe::ExpertFfnBias(c) => (Op::ExpertFfn { glu: glu(&c[0])?, bias: true, fixed: false }, &c[1..]),
            Moe::RmsNorm(c) => match attr(&c[0])? {
                Attr::Rms { eps, groups, .. } => (Op::RmsNorm { eps, groups, weight: true }, &c[1..]),
                _ => return Err(missing()),
            },
            Moe::RmsUnit(c) => match attr(&c[0])? {
                Attr::Rms { eps, groups, .. } => (Op::RmsNorm { eps, groups, weight: false }, &c[1..]),
                _ => return Err(missing()),
            },
            Moe::ScaleCols(c) => (Op::ScaleCols, c),
            Moe::Act(c) => (Op::Act(activation_of(graph, c[0]).ok_or_else(missing)?), &c[1..]),
            Moe::Glu(c) => (Op::Glu(glu(&c[0])?), &c[1..]),
            Moe::Mul(c) => (Op::Mul, c),
            Moe::Add(c) => (Op::Add, c),
            Moe::Scale(c) => match attr(&c[0])? {
                Attr::Factor(factor) => (Op::Scale { factor }, &c[1..]),
                _ => return Err(missing()),
            },
            Moe::Clamp(c) => match attr(&c[0])? {
                Attr::Bounds(lo, hi) => (Op::Clamp { lo, hi }, &c[1..]),
                _ => return Err(missing()),
            },
            Moe::Slice(c) => match attr(&c[0])? {
                Attr::Slice { heads, start, len } => (Op::Slice { heads, start, len }, &c[1..]),
                _ => return Err(missing()),
            },
            Moe::Concat(c) => (Op::Concat { heads: heads(&c[0])? }, &c[1..]),
            Moe::Other(op, c) => (graph.analysis.others[op.0 as usize].0.clone(), c),
        };
        let inputs = children.iter().map(|&id| self.operand(id)).collect::<Result<Vec<_>>>()?;
        let outputs = self
            .builder
            .push(op, &inputs)
            .map_err(|e| Error::bug("a rewrite made an ill-typed node").because(e))?;
        Ok(outputs.into_iter().map(Operand::from).collect())
    }

    fn weight(&mut self, id: Id) -> Result<Weight> {
        match self.operand(id)? {
            Operand::Weight(w) => Ok(self.builder.module().weight(w).clone()),
            _ => Err(Error::bug("a weight expression over something that is not a weight")),
        }
    }

    fn declare(&mut self, weight: Weight) -> Result<Vec<Operand>> {
        let id = self.builder.module().add_weight(weight);
        Ok(vec![id.map_err(|e| Error::bug("a rewritten weight clashes").because(e))?.into()])
    }

    /// Output channels of `a`, then those of `b` (the last axis of a bias).
    fn joined_weight(&mut self, a: Id, b: Id) -> Result<Vec<Operand>> {
        let (a, b) = (self.weight(a)?, self.weight(b)?);
        let axis = if a.shape.len() == 1 { Axis::Cols } else { Axis::Rows };
        let stem = a.name.rsplit_once('.').map_or("", |(stem, _)| stem);
        let last = |n: &str| n.rsplit_once('.').map_or(n, |(_, l)| l).to_owned();
        let name = format!("{stem}.{}_{}", last(&a.name), last(&b.name));
        let mut shape = a.shape.clone();
        let at = shape.len().saturating_sub(2);
        shape[at] += b.shape[at];
        let expr = WeightExpr::Concat { axis, of: vec![a.expr, b.expr] };
        self.declare(Weight { name, shape, class: a.class, format: a.format, expr })
    }

    /// `w` with column `c` multiplied by `s[c]`.
    fn scaled_weight(&mut self, w: Id, s: Id) -> Result<Vec<Operand>> {
        let (w, s) = (self.weight(w)?, self.weight(s)?);
        let expr = WeightExpr::ScaleCols { of: Box::new(w.expr), by: Box::new(s.expr) };
        self.declare(Weight { name: format!("{}_scaled", w.name), expr, ..w })
    }
}

/// Cost of an e-node in element moves: its reads and writes, plus a launch. Weight expressions cost nothing
/// at run time, and operators that the unit does not run have infinite cost.
pub(super) struct Traffic<'a> {
    /// E-graph.
    pub(super) egraph: &'a EGraph<Moe, Facts>,
    /// Costs of operators on the unit.
    pub(super) costs: Costs<'a>,
}

impl egg::CostFunction<Moe> for Traffic<'_> {
    type Cost = f64;

    fn cost<F: FnMut(Id) -> f64>(&mut self, enode: &Moe, mut costs: F) -> f64 {
        let below = enode.fold(0.0, |sum, id| sum + costs(id));
        let own = match enode {
            Moe::Atom(_) | Moe::First(_) | Moe::Second(_) => 0.0,
            // Fewer weight expressions win ties.
            Moe::WRows(_) | Moe::WScale(_) => 1.0,
            _ => {
                let reads = enode.fold(0, |sum, id| sum + self.egraph[id].data.elements());
                let writes =
                    self.egraph.lookup(enode.clone()).map_or(0, |id| self.egraph[id].data.elements());
                if (self.costs.legal)(op_name(self.egraph, enode)) {
                    self.costs.launch + (reads + writes) as f64
                } else {
                    f64::INFINITY
                }
            }
        };
        below + own
    }
}
