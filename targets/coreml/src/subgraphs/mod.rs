//! Parts of a model, other than experts, that are static graphs: attention, dense networks, the head.
//!
//! | part | package below `artifacts/` | functions |
//! |---|---|---|
//! | attention of layer L | `layers.L.attn.mlpackage` | `chunk{T}`: `x`, `angles` if it rotates, `mask`, `write` → `y`; a state per sequence. Where the device file has `cache_write = "slice_update"`, `chunk{T}_at{P}` for every place `P` of a prompt's chunk, without `write` |
//! | dense layer L | `layers.L.ffn.mlpackage` | `rows{T}`: `x` → `y` |
//! | shared experts of layer L | `layers.L.shared.mlpackage` | the same |
//! | head | `head.mlpackage`, or `head.0.mlpackage`, … | `rows{T}`: `x` → `logits0`, `logits1`, … |
//!
//! A package has a function for each entry point, that of its rows up to the unit's multiple; all share the
//! weights. A package is written where the placement gives a part to the unit in any entry point: the
//! functions of the others cost nothing. Embeddings are no part: the Neural Engine does not index (NPUMoE,
//! Figure 4).
//!
//! [`CoreMlSubgraph::boundaries`] says which nodes of each entry point a part replaces,
//! [`CoreMlSubgraph::graphs`] which inputs and outputs its functions have. `moec_runtime::exec::chunk` fills
//! `mask` and `write`.

mod attention;
mod dense;
mod head;

use crate::emit::{self, Chunk, EmitError, Limits, Raw};
use crate::legalise::{Counts, Legal};
use crate::program::{Blocks, Counted, Function, Program, Rules};
use attention::{Attention, AttentionRequest};
use moec_backend::SubgraphBoundary;
use moec_backend::error::{Error, Result};
use moec_backend::find::{self, Linear, Walk};
use moec_device::{CacheWrite, DeviceUnit, StoredFormat};
use moec_ir::types::GROUP;
use moec_ir::{EntryKind, Module, Part, Role, Scope, Weight, WeightId};
use std::collections::BTreeSet;

/// Most places of an attention that have a function of their own: a package may have 256 functions.
const FIXED_PLACES: usize = 128;

/// Gives the raw numbers of weights, joined along their first axis.
pub(crate) type Source<'s> = dyn FnMut(&[WeightId]) -> Result<Raw> + 's;

/// A part of a model.
#[derive(Clone, Debug)]
pub struct CoreMlSubgraph {
    /// `layers.3.attn`, `layers.0.ffn`, `layers.2.shared`, `head`.
    pub name: String,
    /// Its scope in the Graph.
    pub scope: Scope,
    /// Place in each entry point, in the order of the module's.
    pub boundaries: Vec<SubgraphBoundary>,
    kind: Kind,
}

#[derive(Clone, Debug, PartialEq)]
enum Kind {
    Attention(Attention),
    Dense(find::Dense),
    Head(Linear),
}

/// A part as the emitter takes it.
enum Description {
    Grouped(emit::Attention),
    Latent(emit::LatentAttention),
    Dense(emit::Dense),
    Head(emit::Head),
}

impl Description {
    fn programs(&self, limits: &Limits) -> std::result::Result<Vec<Program>, EmitError> {
        match self {
            Self::Grouped(a) => a.emit(limits).map(|p| vec![p]),
            Self::Latent(a) => a.emit(limits).map(|p| vec![p]),
            Self::Dense(d) => d.emit(limits).map(|p| vec![p]),
            Self::Head(h) => head::programs(h, limits),
        }
    }

    fn legal(&self, limits: &Limits) -> std::result::Result<Legal, EmitError> {
        match self {
            Self::Grouped(a) => a.legal(),
            Self::Latent(a) => a.legal(),
            Self::Dense(d) => d.legal(limits),
            Self::Head(h) => h.legal(limits),
        }
    }
}

/// A tensor at the boundary of a function: f16, dense.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraphTensor {
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
    /// Inputs, in order.
    pub inputs: Vec<GraphTensor>,
    /// Results, in order. Logits of a head's packages and results follow each other in the vocabulary.
    pub outputs: Vec<GraphTensor>,
    /// Whether the package keeps a state, one for each sequence.
    pub stateful: bool,
}

impl StaticGraph {
    /// Place of its rows, if that is fixed, see [`moec_ir::plan::GraphDecl::fixed_start`].
    pub fn fixed_start(&self) -> Option<usize> {
        let tensor = |name: &str| self.inputs.iter().find(|p| p.name == name);
        match (tensor("mask").map(|p| &*p.shape), tensor("write")) {
            (Some(&[_, _, rows, seen]), None) => seen.checked_sub(rows),
            _ => None,
        }
    }
}

/// Limits of a neural processing unit.
pub fn limits(npu: &DeviceUnit) -> Limits {
    let rules = Rules { last_axis_bytes: npu.graph.last_axis(), ..Rules::ANE };
    Limits { rules, graph_bytes: npu.graph_limit().unwrap_or(u64::MAX), counted: counted(npu) }
}

/// Bytes that a unit's limit on graphs counts.
pub(crate) fn counted(npu: &DeviceUnit) -> Counted {
    match npu.graph.counted() {
        moec_device::Counted::Stored => Counted::Stored,
        moec_device::Counted::Dense => Counted::Dense,
    }
}

/// Storage of a weight in a package: the bits of its codes, if the unit takes its format and its rows are
/// whole groups; else f16.
pub fn code_bits(npu: &DeviceUnit, weight: &Weight) -> Option<u8> {
    let (spec, block) = (weight.format.spec(), weight.format.block());
    let format =
        StoredFormat::of_bits(spec.bits).filter(|_| weight.format.is_grouped() && !spec.published)?;
    let whole = weight.shape.len() > 1 && weight.cols().is_multiple_of(block);
    u8::try_from(spec.bits).ok().filter(|_| whole && npu.graph.stores(format))
}

/// Bytes that `numbers` numbers of a weight take of the limit on a graph.
pub fn graph_bytes(npu: &DeviceUnit, weight: &Weight, numbers: u64) -> u64 {
    match code_bits(npu, weight).filter(|_| counted(npu) == Counted::Stored) {
        Some(bits) => numbers * u64::from(bits) / 8 + numbers / weight.format.block() as u64 * 2,
        None => numbers * 2,
    }
}

/// Entries that several weights joined along their first axis have, and the bits of their codes if they all
/// have as many.
pub(crate) fn joined(npu: &DeviceUnit, weights: &[&Weight]) -> (Vec<usize>, Option<u8>) {
    let mut shape = weights.first().map(|w| w.shape.clone()).unwrap_or_default();
    if let Some(first) = shape.first_mut() {
        *first = weights.iter().filter_map(|w| w.shape.first()).sum();
    }
    let mut bits = weights.iter().map(|w| code_bits(npu, w));
    let first = bits.next().flatten();
    (shape, first.filter(|_| bits.all(|b| b == first)))
}

/// Path of a package in a bundle.
pub(crate) fn path(program: &str) -> String {
    format!("artifacts/{program}.mlpackage")
}

impl CoreMlSubgraph {
    /// The part of a scope.
    ///
    /// # Errors
    /// The reason that there is no part, for people.
    pub fn find(module: &Module, scope: &Scope) -> std::result::Result<Self, String> {
        let multiple = Rules::ANE.rows_multiple;
        let (mut part, mut name): (Option<Kind>, _) = (None, scope.clone());
        let mut boundaries = Vec::new();
        for graph in &module.entries {
            let mut walk = Walk::new(graph, scope);
            let (kind, x, angles, y) = match scope.role() {
                Role::Attention => {
                    let (found, ends) = attention::find(module, &mut walk)?;
                    (Kind::Attention(found), ends.x, ends.angles, ends.y)
                }
                // A network between norms of its own has none of the supported forms.
                Role::Network if scope.part != Part::SHARED => {
                    if walk.nodes().any(|n| n.op.expert_ffn().is_some()) {
                        name.part = Part::SHARED;
                    }
                    let (found, x, y) = dense::find(module, &mut walk)?;
                    (Kind::Dense(found), x, None, y)
                }
                Role::Head => {
                    let (found, x, y) = find::head(module, &mut walk)?;
                    (Kind::Head(found), x, None, y)
                }
                Role::Mixer => return Err("graphs cannot hold recurrent states".into()),
                Role::Network | Role::Other => {
                    return Err("no graph exists for this part of the model".into());
                }
            };
            let rows = match (&kind, graph.kind) {
                (Kind::Attention(_), EntryKind::Decode(_) | EntryKind::Little(_)) => 1,
                _ => graph.ty(x).rows(),
            };
            let rows = rows.next_multiple_of(multiple);
            boundaries.push(SubgraphBoundary {
                entry: graph.kind,
                nodes: walk.close(y)?,
                x,
                angles,
                y,
                rows,
            });
            if part.get_or_insert_with(|| kind.clone()) != &kind {
                return Err("entry points have it in different forms".into());
            }
        }
        let kind = part.ok_or("there is no entry point")?;
        Ok(Self { name: name.to_string(), scope: scope.clone(), boundaries, kind })
    }

    /// Whether it becomes graphs that the unit takes.
    ///
    /// # Errors
    /// The reason against it, for people.
    pub fn check(&self, module: &Module, npu: &DeviceUnit) -> std::result::Result<(), String> {
        let programs = self.outline(module, npu);
        programs.map(|_| ()).map_err(|e| e.to_string().lines().next().unwrap_or_default().to_owned())
    }

    /// Its programs with their weights; `raw` gives these.
    ///
    /// # Errors
    /// Errors of `raw`, or a graph that the unit does not take.
    pub(crate) fn programs(
        &self,
        module: &Module,
        npu: &DeviceUnit,
        raw: &mut Source<'_>,
    ) -> Result<Vec<Program>> {
        let made = self.describe(module, npu, raw)?.programs(&limits(npu));
        made.map_err(|e| Error::limit(format!("`{}` cannot be a graph", self.name)).because(e))
    }

    fn describe(&self, module: &Module, npu: &DeviceUnit, raw: &mut Source<'_>) -> Result<Description> {
        let (name, rows, chunks) = (&*self.name, &*self.rows(), &*self.chunks(npu));
        let context = self.context(&limits(npu)).unwrap_or(0);
        let request = AttentionRequest { name, context, chunks };
        Ok(match &self.kind {
            Kind::Attention(Attention::Grouped(a)) => Description::Grouped(request.grouped(module, a, raw)?),
            Kind::Attention(Attention::Latent(a)) => Description::Latent(request.latent(module, a, raw)?),
            Kind::Dense(d) => Description::Dense(dense::describe(d, module, name, rows, raw)?),
            Kind::Head(h) => Description::Head(head::describe(module, *h, name, rows, raw)?),
        })
    }

    /// Its programs, with names in the place of numbers.
    fn outline(&self, module: &Module, npu: &DeviceUnit) -> std::result::Result<Vec<Program>, EmitError> {
        self.described(module, npu)?.programs(&limits(npu))
    }

    /// Result of its legalisation.
    ///
    /// # Errors
    /// The reason that it cannot be a graph, for people.
    pub fn legalised(&self, module: &Module, npu: &DeviceUnit) -> std::result::Result<Counts, String> {
        let legal = self.described(module, npu).and_then(|part| part.legal(&limits(npu)));
        legal.map(|legal| legal.counts()).map_err(|e| e.to_string())
    }

    /// Description that the emitter writes for it, with names in the place of numbers.
    fn described(&self, module: &Module, npu: &DeviceUnit) -> std::result::Result<Description, EmitError> {
        let mut raw = |ids: &[WeightId]| {
            let weights: Vec<_> = ids.iter().map(|id| module.weight(*id)).collect();
            let (shape, bits) = joined(npu, &weights);
            let blocks = bits.map(|bits| Blocks { bits, size: GROUP, scales: 0 });
            Ok(Raw { blocks, ..Raw::new(weights.first().map_or("", |w| &w.name), shape) })
        };
        let bug = |e: Error| EmitError::Description { graph: self.name.clone(), what: e.to_string() };
        self.describe(module, npu, &mut raw).map_err(bug)
    }

    /// Chunks of an attention: one at any position for every number of rows. If the unit writes the cache by
    /// `slice_update`, then also one for every position where a whole chunk of a prompt can begin.
    fn chunks(&self, npu: &DeviceUnit) -> Vec<Chunk> {
        let mut chunks: Vec<_> = self.rows().iter().map(|&rows| Chunk { rows, start: None }).collect();
        if npu.graph.cache_write() == CacheWrite::SliceUpdate {
            let context = self.context(&limits(npu)).unwrap_or(0);
            for boundary in &self.boundaries {
                let EntryKind::Prefill(step) = boundary.entry else { continue };
                let starts = (0..context).step_by((step as usize).max(1));
                let starts = starts.take_while(|start| start + boundary.rows <= context).take(FIXED_PLACES);
                chunks.extend(starts.map(|start| Chunk { rows: boundary.rows, start: Some(start) }));
            }
        }
        chunks
    }

    /// Numbers of rows of its functions, those of the first entry point first.
    fn rows(&self) -> Vec<usize> {
        let mut seen = BTreeSet::new();
        self.boundaries.iter().map(|c| c.rows).filter(|r| seen.insert(*r)).collect()
    }

    /// Its functions, entry point by entry point; a head of several packages has several for each.
    ///
    /// # Errors
    /// The reason that it cannot be a graph, for people.
    pub fn graphs(&self, module: &Module, npu: &DeviceUnit) -> std::result::Result<Vec<StaticGraph>, String> {
        let programs = self.outline(module, npu).map_err(|e| e.to_string())?;
        let chunks = self.chunks(npu);
        let of = |boundary: &SubgraphBoundary, program: &Program| -> Vec<StaticGraph> {
            let any = self.rows().iter().position(|r| *r == boundary.rows);
            // Places of their own are for the chunks of prompts.
            let fixed =
                chunks.iter().enumerate().filter(|(_, c)| c.start.is_some() && c.rows == boundary.rows);
            let fixed = fixed.map(|(i, _)| i).filter(|_| self.is_attention() && boundary.entry.is_prefill());
            let functions = any.into_iter().chain(fixed).filter_map(|at| program.functions.get(at));
            let graph = |function: &Function| StaticGraph {
                entry: boundary.entry,
                package: path(&program.name),
                function: function.name.clone(),
                rows: boundary.rows,
                inputs: tensors(function, &function.inputs),
                outputs: tensors(function, &function.outputs),
                stateful: !function.states.is_empty(),
            };
            functions.map(graph).collect()
        };
        Ok(self
            .boundaries
            .iter()
            .flat_map(|boundary| programs.iter().flat_map(|p| of(boundary, p)).collect::<Vec<_>>())
            .collect())
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
    pub(crate) fn positions(&self) -> Option<usize> {
        match &self.kind {
            Kind::Attention(a) => Some(a.context()),
            _ => None,
        }
    }

    /// Its matrices.
    pub(crate) fn matrices(&self) -> Vec<WeightId> {
        match &self.kind {
            Kind::Attention(a) => a.matrices(),
            Kind::Dense(d) => d.matrices(),
            Kind::Head(h) => vec![h.weight],
        }
    }
}

fn tensors(function: &Function, ids: &[crate::program::ValueId]) -> Vec<GraphTensor> {
    let values = ids.iter().filter_map(|id| function.values.get(id.index()));
    values.map(|v| GraphTensor { name: v.name.clone(), shape: v.shape.clone() }).collect()
}
