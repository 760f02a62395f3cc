//! Lowering: from the specification of a checkpoint to Graphs, one for each entry point.
//!
//! The Graphs are naive: one operator for each step of the equations. Later passes optimise them, independent
//! of the model's family.
#![expect(clippy::cast_possible_truncation, reason = "shapes are found to fit before they are used")]

use crate::mixers::Mixer;
use crate::spec::{Block, LayerSpec, ModelSpec, Norm, Projection, Rope};
use moec_base::error::{Error, Result};
use moec_ir::infer::TypeError;
use moec_ir::op::LongSwitch;
use moec_ir::{
    EntryKind, Format, Graph, GraphBuilder, Module, Op, Operand, Part, RouterDesc, Scope, StateDecl, StateId,
    StateKind, Type, ValueId, Weight, WeightClass, WeightExpr, WeightId,
};
use std::collections::BTreeSet;

/// Sizes that are fixed when a model is compiled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shapes {
    /// Tokens of a sequence that the KV cache holds.
    pub max_context: usize,
    /// Tokens of a prefill call.
    pub prefill_chunk: usize,
    /// Rows of logits of a prefill call.
    pub prefill_out_rows: usize,
    /// Sequences of each decode entry point.
    pub decode_batch: Vec<usize>,
    /// Sequences that the KV cache holds.
    pub slots: usize,
    /// Block size of the ring caches of layers with a sliding window. `None`: these layers keep all
    /// positions, as required if a static graph of attention has a cache of its own.
    pub rings: Option<usize>,
    /// Experts per token of the little entry points, one for each of decode; `None` if there are none.
    pub little: Option<usize>,
}

impl Shapes {
    /// The entry points, and the rows of logits of each.
    pub fn entries(&self) -> impl Iterator<Item = (EntryKind, usize)> {
        let prefill = (EntryKind::Prefill(self.prefill_chunk as u32), self.prefill_out_rows);
        let decode = self.decode_batch.iter().map(|&b| (EntryKind::Decode(b as u32), b));
        let little = self.decode_batch.iter().map(|&b| (EntryKind::Little(b as u32), b));
        std::iter::once(prefill).chain(decode).chain(little.filter(|_| self.little.is_some()))
    }

    /// Rows and kind of the states of an attention with a window of `window` positions. The state is a ring
    /// if that is shorter than the context. All rows of a call are written before the first one is read back,
    /// and kernels write whole blocks.
    pub fn kv_state(&self, window: Option<usize>) -> (usize, StateKind) {
        let ring = window.zip(self.rings).and_then(|(window, block)| {
            let most = self.entries().map(|(kind, _)| kind.rows()).max().unwrap_or(1);
            let rows = window.checked_add(most - 1)?.checked_next_multiple_of(block)?;
            let window = u32::try_from(window).ok()?;
            (rows < self.max_context).then_some((rows, StateKind::Ring { window }))
        });
        ring.unwrap_or((self.max_context, StateKind::Cache))
    }

    /// Router of an entry point. A little entry point uses the first of the experts that the model would use.
    /// It weighs them by the family's rule, as if the model had been configured with so few experts per token
    /// (MoBiLE, §III-A: "activating fewer than the default number"). Weights that the family divides by their
    /// sum are divided by the sum of those few; others are unchanged. Groups, biases and factors are the
    /// family's.
    pub(crate) fn router(&self, router: &RouterDesc, kind: EntryKind) -> RouterDesc {
        let few = self.little.filter(|_| matches!(kind, EntryKind::Little(_)));
        RouterDesc { k: few.map_or(router.k, |few| few.min(router.k)), ..router.clone() }
    }
}

/// Lowers a model to a module of one graph per entry point. Weights are f32 until a later pass chooses.
///
/// # Errors
/// Fails if shapes are out of range. Inconsistent parts of a specification are bugs of the import.
pub fn lower(spec: &ModelSpec, shapes: &Shapes) -> Result<Module> {
    let sizes = [shapes.max_context, shapes.prefill_chunk, shapes.prefill_out_rows, shapes.slots];
    if sizes.iter().chain(&shapes.decode_batch).any(|&n| n == 0 || n > i32::MAX as usize) {
        return Err(Error::usage(format!("shapes out of range: {shapes:?}")));
    }
    if spec.layers.is_empty() {
        return Err(Error::bug("a model without layers"));
    }
    let mut module = Module::default();
    for (kind, out_rows) in shapes.entries() {
        let mut lowering = Lowering {
            spec,
            shapes,
            kind,
            g: GraphBuilder::new(&mut module, kind, out_rows),
            angles: Vec::new(),
            previous_input: None,
            latest_input: None,
        };
        let logits = lowering.model().map_err(bug)?;
        lowering.g.finish(logits).map_err(bug)?;
    }
    Ok(module)
}

fn bug(e: TypeError) -> Error {
    Error::bug("a model does not lower").because(e)
}

/// Result of adding nodes.
pub type LowerResult<T = ValueId> = std::result::Result<T, TypeError>;

/// Rows that a mixer reads.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// The residual stream after the block's norm.
    pub normed: ValueId,
    /// The residual stream before that norm.
    pub block: ValueId,
    /// The residual stream before the layer.
    pub layer: ValueId,
    /// Operand of the last block of the previous layer; `None` in the first layer.
    pub before: Option<ValueId>,
}

/// Graph of one entry point under construction.
pub struct Lowering<'a, 'm> {
    spec: &'a ModelSpec,
    /// Sizes.
    pub shapes: &'a Shapes,
    /// The entry point.
    pub kind: EntryKind,
    /// Its Graph so far.
    pub g: GraphBuilder<'m>,
    /// Angles of each rotation, shared by layers.
    angles: Vec<(&'a Rope, ValueId)>,
    /// Operand of the last block of the previous layer.
    previous_input: Option<ValueId>,
    /// Operand of the latest block.
    latest_input: Option<ValueId>,
}

impl<'a> Lowering<'a, '_> {
    fn model(&mut self) -> LowerResult {
        let spec = self.spec;
        self.g.scope(Part::EMBED);
        let table = self.weight("embed", WeightClass::Embeddings, &spec.embed)?;
        let x = self.g.one(Op::Embed, &[Graph::IDS.into(), table.into()])?;
        let mut x = self.scaled(spec.multipliers.embed, x)?;
        for rope in spec.layers.iter().flat_map(LayerSpec::mixers).filter_map(|m| m.of().rope()) {
            self.rope(rope)?;
        }
        for (i, layer) in (0..).zip(&spec.layers) {
            x = self.layer(i, layer, x)?;
        }
        self.g.scope(Part::HEAD);
        let x = self.g.one(Op::GatherRows, &[x.into(), Graph::ROWS.into()])?;
        let x = self.norm("norm", &spec.final_norm, x)?;
        let head = match &spec.head {
            Some(head) => self.weight("head", WeightClass::Embeddings, head)?,
            None => table,
        };
        let mut inputs = vec![x.into(), head.into()];
        if let Some(bias) = &spec.head_bias {
            inputs.push(self.weight("head.bias", WeightClass::Exact, bias)?.into());
        }
        let logits = self.g.one(Op::Linear { bias: spec.head_bias.is_some() }, &inputs)?;
        let logits = self.scaled(spec.multipliers.logits, logits)?;
        match spec.logit_cap {
            Some(cap) => self.g.one(Op::SoftCap { cap }, &[logits.into()]),
            None => Ok(logits),
        }
    }

    /// Rows times a factor, unless it is 1.
    ///
    /// # Errors
    /// Those of [`Self::norm`].
    pub fn scaled(&mut self, factor: f32, x: ValueId) -> LowerResult {
        if factor == 1.0 { Ok(x) } else { self.g.one(Op::Scale { factor }, &[x.into()]) }
    }

    fn layer(&mut self, i: u32, layer: &'a LayerSpec, input: ValueId) -> LowerResult {
        let mut parts = BTreeSet::new();
        if let Some(part) = layer.mixers().map(|m| m.of().part()).find(|part| !parts.insert(part.clone())) {
            return Err(TypeError::new(format!("layers.{i}"), format!("two mixers are its `{part}`")));
        }
        self.previous_input = self.latest_input;
        let x = layer.blocks.iter().try_fold(input, |x, block| self.block(i, block, input, x))?;
        let Some(scale) = &layer.scale else { return Ok(x) };
        let scale = self.weight(&format!("layers.{i}.scale"), WeightClass::Exact, scale)?;
        self.g.one(Op::ScaleCols, &[x.into(), scale.into()])
    }

    /// Adds a block of layer `i` on the stream `x`; `input` is the stream before the layer. The scope of the
    /// first mixer contains the norm before the block. The scope of the last mixer contains the nodes that
    /// add the results to the stream.
    fn block(&mut self, i: u32, block: &'a Block, input: ValueId, x: ValueId) -> LowerResult {
        let empty = || TypeError::new(format!("layers.{i}"), "a block without mixers");
        let (first, rest) = block.mixers.split_first().ok_or_else(empty)?;
        let scope = Scope::in_layer(i, first.of().part());
        self.g.scope(scope.clone());
        let h = match &block.norm {
            Some(norm) => self.norm(&format!("{scope}.norm"), norm, x)?,
            None => x,
        };
        let rows = Rows { normed: h, block: x, layer: input, before: self.previous_input };
        self.latest_input = Some(h);
        let mut sum = self.mixer(i, first, rows)?;
        for mixer in rest {
            let y = self.mixer(i, mixer, rows)?;
            sum = self.g.one(Op::Add, &[sum.into(), y.into()])?;
        }
        if let Some(norm) = &block.post_norm {
            sum = self.norm(&format!("{scope}.post_norm"), norm, sum)?;
        }
        let sum = self.scaled(self.spec.multipliers.residual, sum)?;
        self.g.one(Op::Add, &[x.into(), sum.into()])
    }

    /// Adds a mixer of layer `i` on rows.
    fn mixer(&mut self, i: u32, mixer: &'a Mixer, rows: Rows) -> LowerResult {
        let mixer = mixer.of();
        self.g.scope(Scope::in_layer(i, mixer.part()));
        mixer.lower(self, &format!("layers.{i}"), rows)
    }

    /// A norm of rows.
    ///
    /// # Errors
    /// Fails if parts do not fit each other; so do all methods below.
    pub fn norm(&mut self, name: &str, norm: &Norm, x: ValueId) -> LowerResult {
        match norm {
            Norm::Rms { eps, weight } => self.rms(name, *eps, 1, Some(weight), x),
            Norm::Layer { eps, weight, bias } => {
                let weight = self.weight(name, WeightClass::Exact, weight)?;
                let bias = self.weight(&format!("{name}.bias"), WeightClass::Exact, bias)?;
                self.g.one(Op::LayerNorm { eps: *eps }, &[x.into(), weight.into(), bias.into()])
            }
        }
    }

    /// A root mean square norm of `groups` groups of channels.
    ///
    /// # Errors
    /// Those of [`Self::norm`].
    pub fn rms(
        &mut self,
        name: &str,
        eps: f32,
        groups: usize,
        weight: Option<&WeightExpr>,
        x: ValueId,
    ) -> LowerResult {
        let mut inputs = vec![x.into()];
        if let Some(weight) = weight {
            inputs.push(self.weight(name, WeightClass::Exact, weight)?.into());
        }
        self.g.one(Op::RmsNorm { eps, groups, weight: weight.is_some() }, &inputs)
    }

    /// A linear map.
    ///
    /// # Errors
    /// Those of [`Self::norm`].
    pub fn linear(&mut self, name: &str, class: WeightClass, p: &Projection, x: ValueId) -> LowerResult {
        let mut inputs = vec![x.into(), self.weight(name, class, &p.weight)?.into()];
        if let Some(bias) = &p.bias {
            inputs.push(self.weight(&format!("{name}.bias"), WeightClass::Exact, bias)?.into());
        }
        self.g.one(Op::Linear { bias: p.bias.is_some() }, &inputs)
    }

    /// Angles of a rotation, computed once for all layers that share it.
    ///
    /// # Errors
    /// Those of [`Self::norm`].
    pub fn rope(&mut self, rope: &'a Rope) -> LowerResult {
        if let Some((_, angles)) = self.angles.iter().find(|(r, _)| *r == rope) {
            return Ok(*angles);
        }
        let name = match self.angles.len() {
            0 => "rope".to_owned(),
            n => format!("rope{n}"),
        };
        let table = |inv_freq: &[f32]| WeightExpr::Const(inv_freq.to_vec());
        let short = self.weight(&format!("{name}.inv_freq"), WeightClass::Exact, &table(&rope.inv_freq))?;
        let mut inputs = vec![Graph::POS.into(), short.into()];
        // If the context never exceeds the limit of the short frequencies, there is no switch.
        let long = rope.long.as_ref().filter(|l| self.shapes.max_context > l.after);
        if let Some(long) = long {
            let name = format!("{name}.inv_freq_long");
            inputs.push(self.weight(&name, WeightClass::Exact, &table(&long.inv_freq))?.into());
        }
        let switch = long.map(|l| LongSwitch { after: l.after, long_scale: l.scale });
        let angles = self.g.one(Op::RopeAngles { scale: rope.scale, switch }, &inputs)?;
        self.angles.push((rope, angles));
        Ok(angles)
    }

    /// Stores keys or values, and returns the updated cache.
    ///
    /// # Errors
    /// Those of [`Self::norm`].
    pub fn cache(
        &mut self,
        name: &str,
        [heads, dim]: [usize; 2],
        window: Option<usize>,
        x: ValueId,
    ) -> LowerResult<Operand> {
        let (rows, kind) = self.shapes.kv_state(window);
        let state = self.state(name, kind, [heads, rows, dim]);
        let inputs = [state.into(), x.into(), Graph::POS.into(), Graph::SLOT.into()];
        Ok(self.g.one(Op::CacheWrite, &inputs)?.into())
    }

    /// A state, `[heads, rows, dim]` for every slot.
    pub fn state(&mut self, name: &str, kind: StateKind, [heads, rows, dim]: [usize; 3]) -> StateId {
        let ty = Type::f32([self.shapes.slots, heads, rows, dim]);
        self.g.module().add_state(StateDecl { name: name.to_owned(), ty, kind })
    }

    /// A weight.
    ///
    /// # Errors
    /// Those of [`Self::norm`].
    pub fn weight(&mut self, name: &str, class: WeightClass, expr: &WeightExpr) -> LowerResult<WeightId> {
        let shape = expr.shape()?;
        let weight = Weight { name: name.to_owned(), shape, class, format: Format::F32, expr: expr.clone() };
        self.g.weight(weight)
    }
}
