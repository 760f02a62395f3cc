//! Lowering: from what a checkpoint computes to Graphs, one for each entry point.
//!
//! The form is naive: one operator for each step of the equations. What can be computed better is found
//! by the passes behind, whatever family it came from.

use moec_base::error::{Error, Result};
use moec_cpu::CACHE_BLOCK;
use moec_import::spec::{
    Attention, Block, Gqa, LayerSpec, Mixer, Mla, Mlp, ModelSpec, Moe, Norm, Projection, Rope, RouterInput,
};
use moec_ir::infer::TypeError;
use moec_ir::op::{AttentionDesc, LongSwitch};
use moec_ir::{
    Activation, EntryKind, Format, Glu, Graph, GraphBuilder, Module, Op, Operand, Part, RopeStyle,
    RouterDesc, Scope, StateDecl, StateId, StateKind, Type, ValueId, Weight, WeightClass, WeightExpr,
    WeightId,
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
    /// Whether layers with a sliding window keep a ring of positions. A static graph of attention has a cache of its own.
    pub rings: bool,
    /// Experts per token of the little entry points, one beside each of decode; `None`: there are none.
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

    /// Rows of the states of an attention that sees so many positions, and their kind: a ring where that is shorter than the
    /// context. The rows of a call are all written before the first of them looks back, and kernels write whole blocks.
    pub fn kept(&self, window: Option<usize>) -> (usize, StateKind) {
        let ring = window.filter(|_| self.rings).and_then(|window| {
            let most = self.entries().map(|(kind, _)| kind.rows()).max().unwrap_or(1);
            let rows = window.checked_add(most - 1)?.checked_next_multiple_of(CACHE_BLOCK)?;
            let window = u32::try_from(window).ok()?;
            (rows < self.max_context).then_some((rows, StateKind::Ring { window }))
        });
        ring.unwrap_or((self.max_context, StateKind::Cache))
    }

    /// The router of an entry point. That of a little one takes the first of the experts that the model would take, and
    /// weighs them by the family's own rule as if the model had been configured with so few experts per token (MoBiLE,
    /// §III-A: "activating fewer than the default number"): weights that the family divides by their sum are divided by
    /// the sum of those few, others stay what they are. Groups, biases and factors are the family's.
    fn router(&self, router: &RouterDesc, kind: EntryKind) -> RouterDesc {
        let few = self.little.filter(|_| matches!(kind, EntryKind::Little(_)));
        RouterDesc { k: few.map_or(router.k, |few| few.min(router.k)), ..router.clone() }
    }
}

/// Lowers a model to a module of one graph per entry point. Weights are f32 until a later pass chooses.
///
/// # Errors
/// Shapes out of range. A specification whose parts do not fit each other is a bug of the import.
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
        };
        let logits = lowering.model().map_err(bug)?;
        lowering.g.finish(logits).map_err(bug)?;
    }
    Ok(module)
}

fn bug(e: TypeError) -> Error {
    Error::bug("a model does not lower").because(e)
}

type Built<T = ValueId> = std::result::Result<T, TypeError>;

struct Lowering<'a, 'm> {
    spec: &'a ModelSpec,
    shapes: &'a Shapes,
    kind: EntryKind,
    g: GraphBuilder<'m>,
    /// Angles of each rotation, which layers share.
    angles: Vec<(&'a Rope, ValueId)>,
}

impl<'a> Lowering<'a, '_> {
    fn model(&mut self) -> Built {
        let spec = self.spec;
        self.g.scope(Part::EMBED);
        let table = self.weight("embed", WeightClass::Embeddings, &spec.embed)?;
        let mut x = self.g.one(Op::Embed, &[Graph::IDS.into(), table.into()])?;
        for rope in spec.layers.iter().filter_map(LayerSpec::attention).filter_map(Attention::rope) {
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
        self.g.one(Op::Linear { bias: spec.head_bias.is_some() }, &inputs)
    }

    fn layer(&mut self, i: u32, layer: &'a LayerSpec, input: ValueId) -> Built {
        let mut parts = BTreeSet::new();
        if let Some(part) = layer.mixers().map(Mixer::part).find(|part| !parts.insert(part.clone())) {
            return Err(TypeError::new(format!("layers.{i}"), format!("two mixers are its `{part}`")));
        }
        layer.blocks.iter().try_fold(input, |x, block| self.block(i, block, input, x))
    }

    /// A block of layer `i` on the stream `x`; `input` is the stream in front of the layer. The norm in front stands in the
    /// scope of the first mixer, what joins the mixers and the stream in that of the last.
    fn block(&mut self, i: u32, block: &'a Block, input: ValueId, x: ValueId) -> Built {
        let empty = || TypeError::new(format!("layers.{i}"), "a block without mixers");
        let (first, rest) = block.mixers.split_first().ok_or_else(empty)?;
        let scope = Scope::in_layer(i, first.part());
        self.g.scope(scope.clone());
        let h = match &block.norm {
            Some(norm) => self.norm(&format!("{scope}.norm"), norm, x)?,
            None => x,
        };
        let mut sum = self.mixer(i, first, input, h)?;
        for mixer in rest {
            let y = self.mixer(i, mixer, input, h)?;
            sum = self.g.one(Op::Add, &[sum.into(), y.into()])?;
        }
        if let Some(norm) = &block.post_norm {
            sum = self.norm(&format!("{scope}.post_norm"), norm, sum)?;
        }
        self.g.one(Op::Add, &[x.into(), sum.into()])
    }

    /// A mixer of layer `i` on the rows `h`; `input` is the stream in front of the layer.
    fn mixer(&mut self, i: u32, mixer: &'a Mixer, input: ValueId, h: ValueId) -> Built {
        self.g.scope(Scope::in_layer(i, mixer.part()));
        let at = format!("layers.{i}");
        match mixer {
            Mixer::Attention(Attention::Gqa(a)) => self.gqa(&at, a, h),
            Mixer::Attention(Attention::Mla(a)) => self.mla(&at, a, h),
            Mixer::Dense(mlp) => self.mlp(&format!("{at}.ffn"), mlp, h),
            Mixer::Moe(moe) => {
                let routed = match moe.router_reads {
                    RouterInput::Experts => h,
                    RouterInput::Layer => input,
                };
                self.moe(&at, moe, routed, h)
            }
        }
    }

    fn gqa(&mut self, at: &str, a: &'a Gqa, x: ValueId) -> Built {
        let mut q = self.linear(&format!("{at}.attn.q"), WeightClass::Attention, &a.q, x)?;
        let mut k = self.linear(&format!("{at}.attn.k"), WeightClass::Attention, &a.k, x)?;
        let mut v = self.linear(&format!("{at}.attn.v"), WeightClass::Attention, &a.v, x)?;
        if let Some(n) = &a.qk_norm {
            let groups = |heads: usize| if n.per_head { heads } else { 1 };
            q = self.rms(&format!("{at}.attn.q_norm"), n.eps, groups(a.heads), &n.q, q)?;
            k = self.rms(&format!("{at}.attn.k_norm"), n.eps, groups(a.kv_heads), &n.k, k)?;
        }
        if let Some(c) = a.clip {
            for x in [&mut q, &mut k, &mut v] {
                *x = self.g.one(Op::Clamp { lo: -c, hi: c }, &[(*x).into()])?;
            }
        }
        if let Some(rope) = &a.rope {
            let angles = self.rope(rope)?;
            let rotate = |heads| Op::Rope { heads, offset: 0, style: RopeStyle::Half };
            q = self.g.one(rotate(a.heads), &[q.into(), angles.into()])?;
            k = self.g.one(rotate(a.kv_heads), &[k.into(), angles.into()])?;
        }
        // A window as long as the context hides nothing.
        let window = a.window.filter(|&w| w < self.shapes.max_context);
        let keys = self.cache(&format!("{at}.k"), [a.kv_heads, a.head_dim], window, k)?;
        let values = self.cache(&format!("{at}.v"), [a.kv_heads, a.head_dim], window, v)?;
        let desc = AttentionDesc {
            heads: a.heads,
            kv_heads: a.kv_heads,
            qk_dim: a.head_dim,
            v_dim: a.head_dim,
            scale: a.scale,
            window,
            sinks: a.sinks.is_some(),
            v_from_k: false,
        };
        let mut inputs = vec![q.into(), keys, values, Graph::POS.into(), Graph::SLOT.into()];
        if let Some(sinks) = &a.sinks {
            inputs.push(self.weight(&format!("{at}.attn.sinks"), WeightClass::Exact, sinks)?.into());
        }
        let y = self.g.one(Op::Attention(desc), &inputs)?;
        self.linear(&format!("{at}.attn.o"), WeightClass::Attention, &a.o, y)
    }

    /// The absorbed form: see [`Mla`].
    fn mla(&mut self, at: &str, a: &'a Mla, x: ValueId) -> Built {
        const CLASS: WeightClass = WeightClass::Attention;
        let angles = self.rope(&a.rope)?;
        let rank = match &a.q_down {
            None => x,
            Some((down, norm)) => {
                let rank = self.linear(&format!("{at}.attn.q_down"), CLASS, down, x)?;
                self.norm(&format!("{at}.attn.q_norm"), norm, rank)?
            }
        };
        let q = self.linear(&format!("{at}.attn.q"), CLASS, &a.q, rank)?;
        let slice = |heads, start, len| Op::Slice { heads, start, len };
        let plain = self.g.one(slice(a.heads, 0, a.nope), &[q.into()])?;
        let rotated = self.g.one(slice(a.heads, a.nope, a.rotated), &[q.into()])?;
        let k_up = self.weight(&format!("{at}.attn.k_up"), CLASS, &a.k_up)?;
        let plain = self.g.one(Op::HeadLinear { heads: a.heads }, &[plain.into(), k_up.into()])?;
        let rotate = |heads| Op::Rope { heads, offset: 0, style: a.style };
        let rotated = self.g.one(rotate(a.heads), &[rotated.into(), angles.into()])?;
        let q = self.g.one(Op::Concat { heads: a.heads }, &[plain.into(), rotated.into()])?;

        let kv = self.linear(&format!("{at}.attn.kv_down"), CLASS, &a.kv_down, x)?;
        let latent = self.g.one(slice(1, 0, a.latent), &[kv.into()])?;
        let latent = self.norm(&format!("{at}.attn.kv_norm"), &a.kv_norm, latent)?;
        let rotated = self.g.one(slice(1, a.latent, a.rotated), &[kv.into()])?;
        let rotated = self.g.one(rotate(1), &[rotated.into(), angles.into()])?;
        let k = self.g.one(Op::Concat { heads: 1 }, &[latent.into(), rotated.into()])?;
        let dim = a.latent + a.rotated;
        let keys = self.cache(&format!("{at}.k"), [1, dim], None, k)?;
        let desc = AttentionDesc {
            heads: a.heads,
            kv_heads: 1,
            qk_dim: dim,
            v_dim: a.latent,
            scale: a.scale,
            window: None,
            sinks: false,
            v_from_k: true,
        };
        let y = self.g.one(Op::Attention(desc), &[q.into(), keys, Graph::POS.into(), Graph::SLOT.into()])?;
        let v_up = self.weight(&format!("{at}.attn.v_up"), CLASS, &a.v_up)?;
        let y = self.g.one(Op::HeadLinear { heads: a.heads }, &[y.into(), v_up.into()])?;
        self.linear(&format!("{at}.attn.o"), CLASS, &a.o, y)
    }

    fn mlp(&mut self, at: &str, mlp: &Mlp, x: ValueId) -> Built {
        const CLASS: WeightClass = WeightClass::Attention;
        let gate = self.linear(&format!("{at}.gate"), CLASS, &mlp.gate, x)?;
        let up = self.linear(&format!("{at}.up"), CLASS, &mlp.up, x)?;
        let h = match mlp.glu {
            Glu::Gated(activation) => {
                let gate = self.g.one(Op::Act(activation), &[gate.into()])?;
                self.g.one(Op::Mul, &[gate.into(), up.into()])?
            }
            glu => self.g.one(Op::Glu(glu), &[gate.into(), up.into()])?,
        };
        self.linear(&format!("{at}.down"), CLASS, &mlp.down, h)
    }

    /// A mixture on the rows `x`, whose router reads `routed`.
    fn moe(&mut self, at: &str, moe: &Moe, routed: ValueId, x: ValueId) -> Built {
        let logits = self.linear(&format!("{at}.moe.router"), WeightClass::Exact, &moe.logits, routed)?;
        let mut inputs = vec![logits.into()];
        if let Some(bias) = &moe.select_bias {
            inputs.push(self.weight(&format!("{at}.moe.select_bias"), WeightClass::Exact, bias)?.into());
        }
        let routed = self.g.push(Op::Router(self.shapes.router(&moe.router, self.kind)), &inputs)?;
        let [ids, weights] = routed[..] else {
            return Err(TypeError::new("router", "does not give ids and weights"));
        };
        let dispatch =
            self.g.one(Op::Dispatch { experts: moe.router.experts, partial: false }, &[ids.into()])?;
        let e = &moe.experts;
        let gate_up = self.weight(&format!("{at}.moe.gate_up"), WeightClass::Experts, &e.gate_up)?;
        let down = self.weight(&format!("{at}.moe.down"), WeightClass::Experts, &e.down)?;
        let mut inputs: Vec<Operand> = vec![x.into(), dispatch.into(), gate_up.into(), down.into()];
        if let Some((gate_up, down)) = &e.bias {
            inputs.push(self.weight(&format!("{at}.moe.gate_up.bias"), WeightClass::Exact, gate_up)?.into());
            inputs.push(self.weight(&format!("{at}.moe.down.bias"), WeightClass::Exact, down)?.into());
        }
        let y = self.g.one(Op::ExpertFfn { glu: e.glu, bias: e.bias.is_some(), fixed: false }, &inputs)?;
        let y = self.g.one(Op::Combine { partial: false }, &[y.into(), dispatch.into(), weights.into()])?;
        let Some(shared) = &moe.shared else { return Ok(y) };
        let mut h = self.mlp(&format!("{at}.shared"), &shared.mlp, x)?;
        if let Some(gate) = &shared.gate {
            let gate = self.weight(&format!("{at}.shared.weight"), WeightClass::Exact, gate)?;
            let gate = self.g.one(Op::Linear { bias: false }, &[x.into(), gate.into()])?;
            let gate = self.g.one(Op::Act(Activation::Sigmoid), &[gate.into()])?;
            h = self.g.one(Op::Mul, &[h.into(), gate.into()])?;
        }
        self.g.one(Op::Add, &[y.into(), h.into()])
    }

    fn norm(&mut self, name: &str, norm: &Norm, x: ValueId) -> Built {
        match norm {
            Norm::Rms { eps, weight } => self.rms(name, *eps, 1, weight, x),
            Norm::Layer { eps, weight, bias } => {
                let weight = self.weight(name, WeightClass::Exact, weight)?;
                let bias = self.weight(&format!("{name}.bias"), WeightClass::Exact, bias)?;
                self.g.one(Op::LayerNorm { eps: *eps }, &[x.into(), weight.into(), bias.into()])
            }
        }
    }

    fn rms(&mut self, name: &str, eps: f32, groups: usize, weight: &WeightExpr, x: ValueId) -> Built {
        let weight = self.weight(name, WeightClass::Exact, weight)?;
        self.g.one(Op::RmsNorm { eps, groups, weight: true }, &[x.into(), weight.into()])
    }

    fn linear(&mut self, name: &str, class: WeightClass, p: &Projection, x: ValueId) -> Built {
        let mut inputs = vec![x.into(), self.weight(name, class, &p.weight)?.into()];
        if let Some(bias) = &p.bias {
            inputs.push(self.weight(&format!("{name}.bias"), WeightClass::Exact, bias)?.into());
        }
        self.g.one(Op::Linear { bias: p.bias.is_some() }, &inputs)
    }

    /// Angles of a rotation, computed once for the layers that share it.
    fn rope(&mut self, rope: &'a Rope) -> Built {
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
        // A context that the short frequencies cover never switches.
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

    /// Stores keys or values, and returns the cache as it is then.
    fn cache(
        &mut self,
        name: &str,
        [heads, dim]: [usize; 2],
        window: Option<usize>,
        x: ValueId,
    ) -> Built<Operand> {
        let (rows, kind) = self.shapes.kept(window);
        let ty = Type::f32([self.shapes.slots, heads, rows, dim]);
        let state: StateId = self.g.module().add_state(StateDecl { name: name.to_owned(), ty, kind });
        let inputs = [state.into(), x.into(), Graph::POS.into(), Graph::SLOT.into()];
        Ok(self.g.one(Op::CacheWrite, &inputs)?.into())
    }

    fn weight(&mut self, name: &str, class: WeightClass, expr: &WeightExpr) -> Built<WeightId> {
        let shape = expr.shape()?;
        let weight = Weight { name: name.to_owned(), shape, class, format: Format::F32, expr: expr.clone() };
        self.g.weight(weight)
    }
}
