//! Parts of a model that are static graphs beside the experts: attention, dense networks, the head.
//!
//! | part | package below `artifacts/` | functions |
//! |---|---|---|
//! | attention of layer L | `layers.L.attn.mlpackage` | `chunk{T}`: `x`, `angles` if it rotates, `mask`, `write` → `y`; a state per sequence |
//! | dense layer L | `layers.L.ffn.mlpackage` | `rows{T}`: `x` → `y` |
//! | shared experts of layer L | `layers.L.shared.mlpackage` | the same |
//! | head | `head.mlpackage`, or `head.0.mlpackage`, … | `rows{T}`: `x` → `logits0`, `logits1`, … |
//!
//! A package has a function for each entry point, that of its rows up to the unit's multiple; all share the weights. A
//! package is written where the placement gives a part to the unit in any entry point: the functions of the others cost
//! nothing. Embeddings are no part: the Neural Engine does not index (NPUMoE, Figure 4).
//!
//! [`Part::cuts`] says which nodes of each entry point a part replaces, [`Part::graphs`] what its functions take and
//! give. What fills `mask` and `write` is `moec_runtime::chunk`.

use super::attention::{self, Attention, Wanted};
use super::walk::{Found, Linear, Walk};
use super::{dense, head};
use crate::error::{Error, Result};
use moec_coreml::emit::{EmitError, Limits, Raw};
use moec_coreml::program::{Function, Program, Rules};
use moec_device::Unit;
use moec_ir::placement::Placement;
use moec_ir::{EntryKind, Module, NodeId, Op, ValueId, WeightId};
use std::collections::BTreeSet;

/// Gives the raw f16 numbers of weights, joined along their first axis.
pub(super) type Source<'s> = dyn FnMut(&[WeightId]) -> Result<Raw> + 's;

/// A part of a model.
#[derive(Clone, Debug)]
pub struct Part {
    /// `layers.3.attn`, `layers.0.ffn`, `layers.2.shared`, `head`.
    pub name: String,
    /// Its scope in the Graph.
    pub scope: String,
    /// Where it stands in each entry point, in the order of the module's.
    pub cuts: Vec<Cut>,
    kind: Kind,
}

/// Where a part stands in an entry point.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Entry point.
    pub entry: EntryKind,
    /// The nodes that it replaces, ascending.
    pub nodes: Vec<NodeId>,
    /// Rows that it reads, `[T, H]`.
    pub x: ValueId,
    /// Angles of the rows, `[T, R]`, where an attention rotates.
    pub angles: Option<ValueId>,
    /// What it gives, `[T, H]` or `[T, V]`.
    pub y: ValueId,
    /// Rows of its function. Attention in a decode entry point takes one sequence at a time, whose row is the first.
    pub rows: usize,
}

#[derive(Clone, Debug, PartialEq)]
enum Kind {
    Attention(Attention),
    Dense(dense::Dense),
    Head(Linear),
}

/// A tensor at the boundary of a function: f16, dense.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// `x`, `angles`, `mask`, `write`; `y`, `logits0`, …
    pub name: String,
    /// Extents.
    pub shape: Vec<usize>,
}

/// A function of a package, as one entry point calls it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StaticGraph {
    /// Entry point.
    pub entry: EntryKind,
    /// Path of the package in the bundle.
    pub package: String,
    /// Name of the function.
    pub function: String,
    /// Rows `T`.
    pub rows: usize,
    /// What it takes, in order.
    pub inputs: Vec<Port>,
    /// What it gives, in order. Logits of a head's packages and results follow each other in the vocabulary.
    pub outputs: Vec<Port>,
    /// Whether the package keeps a state, one for each sequence.
    pub stateful: bool,
}

/// What a neural processing unit takes.
pub fn limits(npu: &Unit) -> Limits {
    Limits { rules: Rules::ANE, graph_bytes: npu.graph_limit().unwrap_or(u64::MAX) }
}

/// Where a package lies in a bundle.
pub(super) fn path(program: &str) -> String {
    format!("artifacts/{program}.mlpackage")
}

/// Parts that a placement gives to a unit in any entry point, in the order of the model. The placement tells layers apart
/// by nothing but this: those that cannot be a graph are on the processor.
pub fn placed(module: &Module, placement: &Placement, npu: &Unit) -> Vec<Part> {
    let Some(graph) = module.entries.first() else { return Vec::new() };
    let on_npu = |scope: &str| module.entries.iter().any(|g| placed_in(placement, npu, scope, g.kind));
    let mut scopes: Vec<&str> = graph.nodes.iter().map(|n| &*n.scope).collect();
    scopes.dedup();
    let found = scopes.into_iter().filter(|s| on_npu(s)).filter_map(|s| Part::find(module, s).ok());
    let limits = limits(npu);
    found.filter(|part| part.check(module, &limits).is_ok()).collect()
}

/// Whether a placement gives the matrices of a scope to a unit in one entry point.
pub fn placed_in(placement: &Placement, npu: &Unit, scope: &str, entry: EntryKind) -> bool {
    let any = crate::passes::reside::any_layer(scope);
    let matrix = |op: &str| ["attention", "linear", "linear_glu", "conv1x1"].contains(&op);
    let of_scope = placement.ops.iter().filter(|o| o.entry == entry && o.scope == any);
    of_scope.into_iter().any(|o| matrix(&o.op) && placement.unit(o.unit) == npu.name)
}

impl Part {
    /// The part of a scope.
    ///
    /// # Errors
    /// Why there is none, for people.
    pub fn find(module: &Module, scope: &str) -> std::result::Result<Self, String> {
        let words: Vec<&str> = scope.split('.').collect();
        let multiple = Rules::ANE.rows_multiple;
        let (mut part, mut name): (Option<Kind>, _) = (None, scope.to_owned());
        let mut cuts = Vec::new();
        for graph in &module.entries {
            let mut walk = Walk::new(graph, scope);
            let (kind, x, angles, y) = match *words.as_slice() {
                ["layers", _, "attn"] => {
                    let (found, ends) = attention::find(module, &mut walk)?;
                    (Kind::Attention(found), ends.x, ends.angles, ends.y)
                }
                ["layers", layer, "ffn"] => {
                    if walk.nodes().any(|n| matches!(n.op, Op::ExpertFfn { .. })) {
                        name = format!("layers.{layer}.shared");
                    }
                    let (found, x, y) = dense::find(module, &mut walk)?;
                    (Kind::Dense(found), x, None, y)
                }
                ["head"] => {
                    let (found, x, y) = head::find(module, &mut walk)?;
                    (Kind::Head(found), x, None, y)
                }
                _ => return Err("no graph is made for what stands here".into()),
            };
            let rows = match (&kind, graph.kind) {
                (Kind::Attention(_), EntryKind::Decode(_) | EntryKind::Little(_)) => 1,
                _ => graph.ty(x).rows(),
            };
            let rows = rows.next_multiple_of(multiple);
            cuts.push(Cut { entry: graph.kind, nodes: walk.close(y)?, x, angles, y, rows });
            if part.get_or_insert_with(|| kind.clone()) != &kind {
                return Err("entry points have it in different forms".into());
            }
        }
        let kind = part.ok_or("there is no entry point")?;
        Ok(Self { name, scope: scope.to_owned(), cuts, kind })
    }

    /// Whether it becomes graphs that the unit takes.
    ///
    /// # Errors
    /// Why not, for people.
    pub fn check(&self, module: &Module, limits: &Limits) -> std::result::Result<(), String> {
        let programs = self.outline(module, limits);
        programs.map(|_| ()).map_err(|e| e.to_string().lines().next().unwrap_or_default().to_owned())
    }

    /// Its programs with their weights; `raw` gives these.
    ///
    /// # Errors
    /// Those of `raw`, or a graph that the unit does not take.
    pub(super) fn programs(
        &self,
        module: &Module,
        limits: &Limits,
        raw: &mut Source<'_>,
    ) -> Result<Vec<Program>> {
        let made = self.describe(module, limits, raw)?;
        made.map_err(|e| Error::limit(format!("`{}` cannot be a graph", self.name)).because(e))
    }

    fn describe(
        &self,
        module: &Module,
        limits: &Limits,
        raw: &mut Source<'_>,
    ) -> Result<std::result::Result<Vec<Program>, EmitError>> {
        let (name, rows) = (&*self.name, &*self.rows());
        let context = self.context(limits).unwrap_or(0);
        let wanted = Wanted { name, context, rows };
        let one = |program: std::result::Result<Program, EmitError>| program.map(|p| vec![p]);
        Ok(match &self.kind {
            Kind::Attention(Attention::Grouped(a)) => one(wanted.grouped(module, a, raw)?.emit(limits)),
            Kind::Attention(Attention::Latent(a)) => one(wanted.latent(module, a, raw)?.emit(limits)),
            Kind::Dense(d) => one(d.describe(module, name, rows, raw)?.emit(limits)),
            Kind::Head(h) => head::programs(&head::describe(module, *h, name, rows, raw)?, limits),
        })
    }

    /// Its programs, with names in the place of numbers.
    fn outline(&self, module: &Module, limits: &Limits) -> std::result::Result<Vec<Program>, EmitError> {
        let mut raw = |ids: &[WeightId]| {
            let weights: Vec<_> = ids.iter().map(|id| module.weight(*id)).collect();
            let mut shape = weights.first().map(|w| w.shape.clone()).unwrap_or_default();
            if let Some(first) = shape.first_mut() {
                *first = weights.iter().filter_map(|w| w.shape.first()).sum();
            }
            Ok(Raw::new(weights.first().map_or("", |w| &w.name), shape))
        };
        let bug = |e: Error| EmitError::Description { graph: self.name.clone(), what: e.to_string() };
        self.describe(module, limits, &mut raw).unwrap_or_else(|e| Err(bug(e)))
    }

    /// Numbers of rows of its functions, those of the first entry point first.
    fn rows(&self) -> Vec<usize> {
        let mut seen = BTreeSet::new();
        self.cuts.iter().map(|c| c.rows).filter(|r| seen.insert(*r)).collect()
    }

    /// Its functions, entry point by entry point; a head of several packages has several for each.
    ///
    /// # Errors
    /// Why it is no graph, for people.
    pub fn graphs(&self, module: &Module, limits: &Limits) -> std::result::Result<Vec<StaticGraph>, String> {
        let programs = self.outline(module, limits).map_err(|e| e.to_string())?;
        let of = |cut: &Cut, program: &Program| {
            let at = self.rows().iter().position(|r| *r == cut.rows)?;
            let function = program.functions.get(at)?;
            Some(StaticGraph {
                entry: cut.entry,
                package: path(&program.name),
                function: function.name.clone(),
                rows: cut.rows,
                inputs: ports(function, &function.inputs),
                outputs: ports(function, &function.outputs),
                stateful: !function.states.is_empty(),
            })
        };
        Ok(self.cuts.iter().flat_map(|cut| programs.iter().filter_map(move |p| of(cut, p))).collect())
    }

    /// Where it stands in the entry points in which a placement gives it to a unit. Attention has one state, so that is in
    /// all of them or in none.
    pub fn cuts_in<'a>(&'a self, placement: &'a Placement, npu: &'a Unit) -> impl Iterator<Item = &'a Cut> {
        let there = |cut: &&Cut| self.is_attention() || placed_in(placement, npu, &self.scope, cut.entry);
        self.cuts.iter().filter(there)
    }

    /// Whether all that a placement gives to a unit is in a form that the unit runs.
    ///
    /// # Errors
    /// Our bug: a node that was not rewritten.
    pub fn check_forms(&self, module: &Module, placement: &Placement, npu: &Unit) -> Result<()> {
        for cut in self.cuts_in(placement, npu) {
            let Some(graph) = module.entries.iter().find(|g| g.kind == cut.entry) else { continue };
            let mut ops = cut.nodes.iter().filter_map(|n| Some(graph.nodes.get(n.0 as usize)?.op.name()));
            if let Some((op, form)) = ops.find_map(|op| Some((op, npu.form(op)?))) {
                let (part, unit) = (&self.name, &npu.name);
                let what =
                    format!("`{op}` of `{part}` is placed on `{unit}`, which runs it as `{form}` alone");
                return Err(Error::bug(what));
            }
        }
        Ok(())
    }

    /// Whether it is an attention.
    pub fn is_attention(&self) -> bool {
        matches!(self.kind, Kind::Attention(_))
    }

    /// Tokens that a row of an attention sees, its own included, where not all.
    pub fn window(&self) -> Option<usize> {
        match &self.kind {
            Kind::Attention(a) => a.window(),
            _ => None,
        }
    }

    /// Positions of an attention's state: those of the Graph's cache, up to the unit's multiple.
    pub fn context(&self, limits: &Limits) -> Option<usize> {
        match &self.kind {
            Kind::Attention(a) => Some(a.context().next_multiple_of(limits.rules.state_multiple)),
            _ => None,
        }
    }

    /// Positions that the Graph's cache has.
    pub(super) fn positions(&self) -> Option<usize> {
        match &self.kind {
            Kind::Attention(a) => Some(a.context()),
            _ => None,
        }
    }

    /// Its matrices.
    pub(super) fn matrices(&self) -> Vec<WeightId> {
        match &self.kind {
            Kind::Attention(a) => a.matrices(),
            Kind::Dense(d) => d.matrices(),
            Kind::Head(h) => vec![h.weight],
        }
    }
}

fn ports(function: &Function, ids: &[moec_coreml::program::ValueId]) -> Vec<Port> {
    let values = ids.iter().filter_map(|id| function.values.get(id.index()));
    values.map(|v| Port { name: v.name.clone(), shape: v.shape.clone() }).collect()
}

/// Why a region of the placement cannot be graphs: `nodes` of a scope in one entry point.
///
/// # Errors
/// The reason, for people.
pub fn region(part: &Found<Part>, entry: usize, nodes: &[usize]) -> Found<()> {
    let part = part.as_ref().map_err(Clone::clone)?;
    let own = part.cuts.get(entry).map(|c| &*c.nodes).unwrap_or_default();
    if own.iter().map(|n| n.0 as usize).eq(nodes.iter().copied()) {
        Ok(())
    } else {
        Err("a graph is made for all of it, and some of it cannot be in one".into())
    }
}
