//! Mixtures of experts: expert matrices in all layouts of checkpoints, and common routers.
#![expect(clippy::cast_possible_truncation, reason = "models compute with their factors in f32")]

pub use super::parts::{PROJ, Parts, STACKS, W123};
use super::{Mix, Mlp};
use crate::common::{Base, EXPERTS};
use crate::config::Config;
use crate::lower::{LowerResult, Lowering, Rows};
use crate::quantised::{MXFP4, named};
use crate::spec::Projection;
use crate::tensors::Dim;
use moec_base::error::{Error, Result};
use moec_ir::infer::TypeError;
use moec_ir::op::{GroupScore, Groups, Renorm, Score, WeightFrom};
use moec_ir::{Activation, Axis, Glu, Op, Operand, Part, RouterDesc, WeightClass, WeightExpr};

/// A mixture of experts.
#[derive(Clone, Debug, PartialEq)]
pub struct Moe {
    /// Routing, from the logits on.
    pub router: RouterDesc,
    /// Logits, `[experts, hidden]`.
    pub logits: Projection,
    /// Rows that are the router's input.
    pub router_reads: RouterInput,
    /// Whether the weight of a token's only expert multiplies the expert's input instead of its output.
    pub weighs_input: bool,
    /// Whether router and experts read the input of the previous layer's last block, and the shared expert its
    /// own input: the shortcut of LongCat-Flash (arXiv 2509.01322, section 2.2).
    pub reads_previous_layer: bool,
    /// Bias on the choice of experts, `[experts]`.
    pub select_bias: Option<WeightExpr>,
    /// Projections of the experts' input and of the sum of their results: `[latent, hidden]` and `[hidden,
    /// latent]`.
    pub latent: Option<[Projection; 2]>,
    /// The experts.
    pub experts: ExpertWeights,
    /// Expert for every token, whose result is added to the routed ones.
    pub shared: Option<Shared>,
    /// Factor on the sum of the routed and the shared experts' results.
    pub sum_scale: f32,
}

/// Input of a router.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RouterInput {
    /// The rows that the experts read.
    Experts,
    /// The residual stream before the layer: experts are chosen before attention (SmallThinker).
    Layer,
    /// The residual stream before the block, normalised to this root mean square (Gemma 4).
    Block {
        /// Added to the mean square.
        eps: f32,
        /// The root mean square.
        to: f32,
    },
}

/// The routed experts of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertWeights {
    /// Channels between gate-up and down.
    pub intermediate: usize,
    /// `[experts, 2·intermediate, hidden]`: gate, then up; `[experts, intermediate, hidden]` without a gate.
    pub gate_up: WeightExpr,
    /// `[experts, hidden, intermediate]`.
    pub down: WeightExpr,
    /// `[experts, 2·intermediate]` or `[experts, intermediate]`, and `[experts, hidden]`.
    pub bias: Option<(WeightExpr, WeightExpr)>,
    /// Function that combines gate and up.
    pub glu: Glu,
}

/// An expert that every token uses.
#[derive(Clone, Debug, PartialEq)]
pub struct Shared {
    /// The expert.
    pub mlp: Mlp,
    /// `[1, hidden]`: the expert's weight is the sigmoid of this projection.
    pub gate: Option<WeightExpr>,
}

impl Mix for Moe {
    fn part(&self) -> Part {
        Part::FFN
    }

    fn weights(&self) -> Vec<(WeightClass, &WeightExpr)> {
        let e = &self.experts;
        let experts = [&e.gate_up, &e.down].map(|w| (WeightClass::Experts, w));
        let router = [&self.logits.weight].into_iter().chain(&self.logits.bias).chain(&self.select_bias);
        let shared = self.shared.iter().flat_map(|s| s.mlp.weights());
        let gate = self.shared.iter().flat_map(|s| &s.gate);
        let exact = e.bias.iter().flat_map(|(a, b)| [a, b]).chain(router).chain(gate);
        let latent = super::projections(self.latent.iter().flatten());
        experts.into_iter().chain(latent).chain(super::exact(exact)).chain(shared).collect()
    }

    fn lower<'a>(&'a self, l: &mut Lowering<'a, '_>, at: &str, rows: Rows) -> LowerResult {
        let x = match rows.before {
            Some(before) if self.reads_previous_layer => before,
            None if self.reads_previous_layer => return Err(TypeError::new(at, "no layer is before it")),
            _ => rows.normed,
        };
        let routed = match self.router_reads {
            RouterInput::Experts => x,
            RouterInput::Layer => rows.layer,
            RouterInput::Block { eps, to } => {
                let norm = Op::RmsNorm { eps, groups: 1, weight: false };
                let normed = l.g.one(norm, &[rows.block.into()])?;
                l.scaled(to, normed)?
            }
        };
        let logits = l.linear(&format!("{at}.moe.router"), WeightClass::Exact, &self.logits, routed)?;
        let mut inputs = vec![logits.into()];
        if let Some(bias) = &self.select_bias {
            inputs.push(l.weight(&format!("{at}.moe.select_bias"), WeightClass::Exact, bias)?.into());
        }
        let routed = l.g.push(Op::Router(l.shapes.router(&self.router, l.kind)), &inputs)?;
        let [ids, weights] = routed[..] else {
            return Err(TypeError::new("router", "does not give ids and weights"));
        };
        let (ids, zero_expert_weight) = match self.router.zero {
            None => (ids, None),
            Some(zero) => {
                let op = Op::ZeroExperts { experts: self.router.experts, zero };
                match l.g.push(op, &[ids.into(), weights.into()])?[..] {
                    [served, weight] => (served, Some(weight)),
                    _ => return Err(TypeError::new("zero_experts", "does not give ids and sums")),
                }
            }
        };
        let partial = zero_expert_weight.is_some();
        let [read, weights] = if self.weighs_input {
            let read = l.g.one(Op::Mul, &[x.into(), weights.into()])?;
            [read, l.g.one(Op::Clamp { lo: 1.0, hi: 1.0 }, &[weights.into()])?]
        } else {
            [x, weights]
        };
        let dispatch = l.g.one(Op::Dispatch { experts: self.router.experts, partial }, &[ids.into()])?;
        let e = &self.experts;
        let given = match &self.latent {
            Some([first, _]) => l.linear(&format!("{at}.moe.latent"), WeightClass::Attention, first, read)?,
            None => read,
        };
        let gate_up = l.weight(&format!("{at}.moe.gate_up"), WeightClass::Experts, &e.gate_up)?;
        let down = l.weight(&format!("{at}.moe.down"), WeightClass::Experts, &e.down)?;
        let mut inputs: Vec<Operand> = vec![given.into(), dispatch.into(), gate_up.into(), down.into()];
        if let Some((gate_up, down)) = &e.bias {
            inputs.push(l.weight(&format!("{at}.moe.gate_up.bias"), WeightClass::Exact, gate_up)?.into());
            inputs.push(l.weight(&format!("{at}.moe.down.bias"), WeightClass::Exact, down)?.into());
        }
        let y = l.g.one(Op::ExpertFfn { glu: e.glu, bias: e.bias.is_some(), fixed: false }, &inputs)?;
        let mut y = l.g.one(Op::Combine { partial }, &[y.into(), dispatch.into(), weights.into()])?;
        if let Some([_, last]) = &self.latent {
            y = l.linear(&format!("{at}.moe.out"), WeightClass::Attention, last, y)?;
        }
        if let Some(weight) = zero_expert_weight {
            let zero = l.g.one(Op::Mul, &[x.into(), weight.into()])?;
            y = l.g.one(Op::Add, &[y.into(), zero.into()])?;
        }
        let Some(shared) = &self.shared else { return Ok(y) };
        let own = rows.normed;
        let mut h = shared.mlp.of_rows(l, &format!("{at}.shared"), own)?;
        if let Some(gate) = &shared.gate {
            let gate = l.weight(&format!("{at}.shared.weight"), WeightClass::Exact, gate)?;
            let gate = l.g.one(Op::Linear { bias: false }, &[own.into(), gate.into()])?;
            let gate = l.g.one(Op::Act(Activation::Sigmoid), &[gate.into()])?;
            h = l.g.one(Op::Mul, &[h.into(), gate.into()])?;
        }
        let sum = l.g.one(Op::Add, &[y.into(), h.into()])?;
        l.scaled(self.sum_scale, sum)
    }
}

/// Layout of gate and up in one tensor, by the order of its last two axes: outputs are the channels that a
/// projection computes, inputs those that it reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fused {
    /// Outputs, then inputs: `[experts, 2·intermediate, hidden]`, all of gate before all of up; or both tensors
    /// of a layer with these two axes exchanged.
    OutIn,
    /// Inputs, then outputs: `[experts, hidden, 2·intermediate]`, gate and up interleaved, with biases, as in
    /// gpt-oss; or blocks of MXFP4.
    InOut,
}

/// Router with softmax, sigmoid or plain scores and no further parts.
pub fn plain_router(
    experts: usize,
    k: usize,
    score: Score,
    weight_from: WeightFrom,
    renorm: Renorm,
) -> RouterDesc {
    RouterDesc {
        experts,
        zero: None,
        k,
        score,
        select_bias: false,
        groups: None,
        weight_from,
        renorm,
        scale: 1.0,
    }
}

/// Renormalisation by the sum if the config says so, as in Qwen and OLMoE.
pub fn renorm(norm_topk_prob: bool) -> Renorm {
    if norm_topk_prob { Renorm::Sum { eps: 0.0 } } else { Renorm::None }
}

/// Layers of Qwen's models that are mixtures of experts.
///
/// # Errors
/// Fails if keys have the wrong type.
pub fn sparse_layers(config: &Config) -> Result<impl Fn(usize) -> bool + use<>> {
    let dense = config.opt_ids("mlp_only_layers")?.unwrap_or_default();
    let step = config.opt_size(&["decoder_sparse_step"])?.map_or(1, |s| s.n);
    Ok(move |layer: usize| !dense.iter().any(|&d| d as usize == layer) && (layer + 1).is_multiple_of(step))
}

/// Dense layers of DeepSeek's models and similar ones: the first few, and those that `moe_layer_freq` leaves
/// out.
///
/// # Errors
/// Fails if keys have the wrong type.
pub fn dense_first(config: &Config, default: usize) -> Result<impl Fn(usize) -> bool + use<>> {
    let first = config.opt_count(&["first_k_dense_replace"])?.map_or(default, |s| s.n);
    let step = config.opt_size(&["moe_layer_freq"])?.map_or(1, |s| s.n);
    Ok(move |layer: usize| layer < first || !layer.is_multiple_of(step))
}

/// Names of a mixture's tensors, below the layer.
#[derive(Clone, Copy, Debug)]
pub struct MoeNames {
    /// Router.
    pub gate: &'static str,
    /// Bias on the choice, if there is one.
    pub bias: Option<&'static str>,
    /// Experts.
    pub experts: &'static str,
    /// Their parts.
    pub parts: Parts,
    /// Expert for every token.
    pub shared: &'static str,
}

impl MoeNames {
    /// Names in DeepSeek-V3.
    pub const DEEPSEEK: Self = Self {
        gate: "mlp.gate",
        bias: Some("mlp.gate.e_score_correction_bias"),
        experts: "mlp.experts",
        parts: PROJ,
        shared: "mlp.shared_experts",
    };
}

/// A mixture that is the same in all layers that have one.
#[derive(Clone, Debug)]
pub struct Mixture {
    /// Routing.
    pub router: RouterDesc,
    /// Routed experts.
    pub experts: Dim,
    /// Channels of a routed expert between gate-up and down.
    pub intermediate: Dim,
    /// Channels of the expert for every token, if there is one.
    pub shared: Option<Dim>,
    /// Names.
    pub names: MoeNames,
}

/// Keys for the number of experts that every token uses.
const SHARED: [&str; 3] = ["n_shared_experts", "num_shared_experts", "moe_num_shared_experts"];
/// Keys for the number of experts per token.
const CHOSEN: [&str; 5] = ["num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k"];

impl Mixture {
    /// The mixture of DeepSeek-V3 (arXiv 2412.19437, section 2.1): sigmoid scores, a selection bias that
    /// balances load without an auxiliary loss (`noaux_tc`), groups, ungated shared experts. `groups` and
    /// `scale` are the defaults for groups of experts (their number and the number that is kept) and for the
    /// factor on weights.
    ///
    /// # Errors
    /// Fails if keys are missing or do not fit, or if the kind of routing is not supported.
    pub fn noaux_tc(b: &Base<'_>, groups: (usize, usize), scale: f64, names: MoeNames) -> Result<Self> {
        let c = b.config;
        for (key, known) in [("scoring_func", &["sigmoid", "noaux_tc"][..]), ("topk_method", &["noaux_tc"])] {
            match c.opt_text(key)? {
                Some(other) if !known.contains(&other) => return Err(c.unsupported(key, other, &known[..1])),
                _ => {}
            }
        }
        let n = c.opt_size(&["n_group", "num_expert_group"])?.map_or(groups.0, |s| s.n);
        let keep = c.opt_size(&["topk_group"])?.map_or(groups.1, |s| s.n);
        let groups = Groups { n, keep, score: GroupScore::Top2Sum, mask_neg_inf: true };
        let norm = c.flag_or("norm_topk_prob", c.flag_or("moe_renormalize", true)?)?;
        let renorm = if norm { Renorm::Sum { eps: 1e-20 } } else { Renorm::None };
        let key =
            ["routed_scaling_factor", "router_scaling_factor", "moe_router_scaling_factor", "route_scale"]
                .into_iter()
                .find(|key| c.has(key));
        let scale = key.map_or(Ok(scale), |key| c.number_or(key, scale))?;
        let mixture = Self::of(b, Score::Sigmoid, WeightFrom::Score, renorm, names)?;
        let groups = b.groups(groups, &mixture.experts, mixture.router.k)?;
        Ok(Self { router: RouterDesc { groups, scale: scale as f32, ..mixture.router }, ..mixture })
    }

    /// A mixture with these scores and weights and without groups; its sizes are under their usual keys.
    ///
    /// # Errors
    /// Fails if keys are missing or do not fit.
    pub fn of(
        b: &Base<'_>,
        score: Score,
        weight_from: WeightFrom,
        renorm: Renorm,
        names: MoeNames,
    ) -> Result<Self> {
        let c = b.config;
        let (experts, k) = b.expert_counts_of(&EXPERTS, &CHOSEN)?;
        let intermediate = Dim::from(c.size(&["moe_intermediate_size", "intermediate_size"])?);
        let shared = c.opt_count(&SHARED)?.filter(|s| s.n > 0).map(|n| intermediate.times(&n.into()));
        let select_bias = names.bias.is_some();
        let router = RouterDesc { select_bias, ..plain_router(experts.n, k, score, weight_from, renorm) };
        Ok(Self { router, experts, intermediate, shared, names })
    }

    /// Reads the mixture of a layer.
    ///
    /// # Errors
    /// Fails if tensors do not fit the config.
    pub fn moe(&self, b: &Base<'_>, layer: usize) -> Result<Moe> {
        self.moe_with_glu(b, layer, [b.glu, b.glu])
    }

    /// Like [`Self::moe`], with functions that combine gate and up of the routed experts and of the expert
    /// for every token.
    ///
    /// # Errors
    /// Those of [`Self::moe`].
    pub fn moe_with_glu(&self, b: &Base<'_>, layer: usize, [routed, shared]: [Glu; 2]) -> Result<Moe> {
        let (n, layer) = (self.names, b.layer(layer));
        let at = |name: &str| format!("{layer}.{name}");
        let experts =
            b.experts(&at(n.experts), n.parts, Fused::OutIn, &self.experts, &self.intermediate, routed)?;
        let bias = n.bias.map(|name| b.tensors.take_squeezed(&at(name), &[&self.experts])).transpose()?;
        let shared = match &self.shared {
            Some(intermediate) => {
                let mlp = Mlp { glu: shared, ..b.mlp(&at(n.shared), intermediate, false)? };
                Some(Shared { mlp, gate: None })
            }
            None => None,
        };
        let moe = b.simple_moe(&at(n.gate), self.router.clone(), &self.experts, experts)?;
        Ok(Moe { select_bias: bias, shared, ..moe })
    }
}

impl Base<'_> {
    /// Number of routed experts and of experts per token.
    ///
    /// # Errors
    /// Fails if keys are missing or do not fit each other.
    pub fn expert_counts(&self) -> Result<(Dim, usize)> {
        self.expert_counts_of(&EXPERTS, &["num_experts_per_tok"])
    }

    /// Both numbers, each under the first of its keys that exists.
    ///
    /// # Errors
    /// Those of [`Self::expert_counts`].
    pub fn expert_counts_of(&self, experts: &[&'static str], k: &[&'static str]) -> Result<(Dim, usize)> {
        let (experts, k) = (self.config.size(experts)?, self.config.size(k)?);
        if k.n > experts.n {
            return Err(Error::input(format!(
                "{} is {}, more than `{}`, which is {}",
                self.config.name(k.key),
                k.n,
                experts.key,
                experts.n
            )));
        }
        Ok((experts.into(), k.n))
    }

    /// The first of the names that the checkpoint has, or the first of all if it has none.
    pub fn first_of(&self, names: &[String]) -> String {
        let found = names.iter().find(|n| self.tensors.has(n)).or(names.first());
        found.cloned().unwrap_or_default()
    }

    /// The router's matrix, `{at}.weight`.
    ///
    /// # Errors
    /// Fails if tensors do not fit the config.
    pub fn router(&self, at: &str, experts: &Dim, bias: bool) -> Result<Projection> {
        self.tensors.projection(at, experts, &self.hidden, bias)
    }

    /// A mixture without selection bias and without shared expert.
    ///
    /// # Errors
    /// Fails if tensors do not fit the config.
    pub fn simple_moe(
        &self,
        gate: &str,
        router: RouterDesc,
        experts: &Dim,
        read: ExpertWeights,
    ) -> Result<Moe> {
        let logits = self.router(gate, experts, false)?;
        Ok(Moe {
            router,
            logits,
            router_reads: RouterInput::Experts,
            weighs_input: false,
            reads_previous_layer: false,
            select_bias: None,
            latent: None,
            experts: read,
            shared: None,
            sum_scale: 1.0,
        })
    }

    /// Checks groups of experts of which the router keeps the best; `None` if all are kept.
    ///
    /// # Errors
    /// Fails if groups do not fit the experts.
    pub fn groups(&self, groups: Groups, experts: &Dim, k: usize) -> Result<Option<Groups>> {
        let Groups { n, keep, score, .. } = groups;
        let size = experts.n / n.max(1);
        let whole = n > 0 && experts.n.is_multiple_of(n) && (1..=n).contains(&keep);
        if !whole || k > keep * size || (score == GroupScore::Top2Sum && size < 2) {
            return Err(Error::input(format!(
                "`n_group` {n} and `topk_group` {keep} in `config.json` do not fit {} {} and `num_experts_per_tok` {k}",
                experts.why, experts.n
            )));
        }
        Ok((keep < n).then_some(groups))
    }

    /// Reads the routed experts below `at`: fused into one tensor, as MXFP4 blocks, each part stacked, or one
    /// by one.
    ///
    /// # Errors
    /// Fails if tensors do not fit the config.
    pub fn experts(
        &self,
        at: &str,
        parts: Parts,
        fused: Fused,
        experts: &Dim,
        intermediate: &Dim,
        glu: Glu,
    ) -> Result<ExpertWeights> {
        if !glu.is_gated() {
            return self.one_by_one(at, parts, experts, intermediate, glu);
        }
        let (t, hidden) = (&self.tensors, &self.hidden);
        let [gate_up, down] = parts.stacks.map(|name| format!("{at}.{name}"));
        let both = intermediate.doubled();
        if t.has(&named(&gate_up, MXFP4.codes.suffix)) {
            let matrices = [
                interleaved(t.take(&gate_up, &[experts, &both, hidden])?, Axis::Rows, intermediate.n),
                t.take(&down, &[experts, hidden, intermediate])?,
            ];
            return self.assemble(at, matrices, experts, intermediate, glu);
        }
        if t.has(&gate_up) {
            let matrices = if fused == Fused::InOut {
                let gate_up = transpose(t.take(&gate_up, &[experts, hidden, &both])?);
                let down = transpose(t.take(&down, &[experts, intermediate, hidden])?);
                [interleaved(gate_up, Axis::Rows, intermediate.n), down]
            } else if self.exchanged([&gate_up, &down], experts, intermediate)? {
                [
                    transpose(t.take(&gate_up, &[experts, hidden, &both])?),
                    transpose(t.take(&down, &[experts, intermediate, hidden])?),
                ]
            } else {
                [
                    t.take(&gate_up, &[experts, &both, hidden])?,
                    t.take(&down, &[experts, hidden, intermediate])?,
                ]
            };
            return self.assemble(at, matrices, experts, intermediate, glu);
        }
        let stacked = format!("{at}.{}.weight", parts.gate);
        if t.has(&stacked) {
            let part =
                |name: &str, out, input| t.take(&format!("{at}.{name}.weight"), &[experts, out, input]);
            let of = vec![part(parts.gate, intermediate, hidden)?, part(parts.up, intermediate, hidden)?];
            let matrices =
                [WeightExpr::Concat { axis: Axis::Rows, of }, part(parts.down, hidden, intermediate)?];
            return self.assemble(at, matrices, experts, intermediate, glu);
        }
        self.one_by_one(at, parts, experts, intermediate, glu)
    }

    /// Reads experts with separate tensors; all have biases if the first one does.
    fn one_by_one(
        &self,
        at: &str,
        parts: Parts,
        experts: &Dim,
        intermediate: &Dim,
        glu: Glu,
    ) -> Result<ExpertWeights> {
        let (t, hidden) = (&self.tensors, self.latent.as_ref().unwrap_or(&self.hidden));
        let first = if glu.is_gated() { parts.gate } else { parts.up };
        let biased = t.has(&format!("{at}.0.{first}.bias"));
        let (mut gate_ups, mut downs) = (Vec::new(), Vec::new());
        let (mut gate_up_biases, mut down_biases) = (Vec::new(), Vec::new());
        for e in 0..experts.n {
            let part = |name: &str, out: &Dim, input: &Dim| {
                t.projection(&format!("{at}.{e}.{name}"), out, input, biased)
            };
            let gate = glu.is_gated().then(|| part(parts.gate, intermediate, hidden)).transpose()?;
            let (up, down) = (part(parts.up, intermediate, hidden)?, part(parts.down, hidden, intermediate)?);
            let (weights, biases): (Vec<_>, Vec<_>) =
                gate.into_iter().chain([up]).map(|p| (p.weight, p.bias)).unzip();
            gate_ups.push(joined(Axis::Rows, weights));
            downs.push(down.weight);
            gate_up_biases.push(joined(Axis::Cols, biases.into_iter().flatten().collect()));
            down_biases.extend(down.bias);
        }
        let (gate_up, down) = (WeightExpr::Stack(gate_ups), WeightExpr::Stack(downs));
        let bias = biased.then_some((WeightExpr::Stack(gate_up_biases), WeightExpr::Stack(down_biases)));
        Ok(ExpertWeights { intermediate: intermediate.n, gate_up, down, bias, glu })
    }

    /// Whether the fused tensors of a layer are stored as `[experts, in, out]`, as in some checkpoints.
    ///
    /// A single tensor may be square, so that its shape fits both orders. `[hidden, 2·intermediate]` and
    /// `[hidden, intermediate]` are never both square, so the pair fits at most one order.
    ///
    /// # Errors
    /// Fails if tensors of one layer have different orders.
    fn exchanged(&self, names: [&str; 2], experts: &Dim, intermediate: &Dim) -> Result<bool> {
        let (n, hidden, intermediate) = (experts.n, self.hidden.n, intermediate.n);
        let shapes = names.map(|name| self.tensors.shape(name));
        let fits = |gate_up: [usize; 3], down: [usize; 3]| {
            [shapes[0].as_deref() == Some(&gate_up[..]), shapes[1].as_deref() == Some(&down[..])]
        };
        let out_in = fits([n, 2 * intermediate, hidden], [n, hidden, intermediate]);
        let in_out = fits([n, hidden, 2 * intermediate], [n, intermediate, hidden]);
        let each_fits = (0..2).all(|i| out_in[i] || in_out[i]);
        if each_fits && out_in != [true; 2] && in_out != [true; 2] {
            let [gate_up, down] = names;
            let [first, second] = shapes.map(Option::unwrap_or_default);
            return Err(Error::input(format!("`{gate_up}` and `{down}` store their axes in different orders"))
                .because(format!(
                    "their shapes are {first:?} and {second:?}; both must be [experts, out, in], or both [experts, in, out]"
                ))
                .hint("the tensors may be of two checkpoints; download the model again"));
        }
        Ok(in_out == [true; 2])
    }

    /// Adds the biases of fused experts, if the checkpoint has them.
    fn assemble(
        &self,
        at: &str,
        matrices: [WeightExpr; 2],
        experts: &Dim,
        intermediate: &Dim,
        glu: Glu,
    ) -> Result<ExpertWeights> {
        let (t, [gate_up, down]) = (&self.tensors, matrices);
        let (gate_up_bias, down_bias) = (format!("{at}.gate_up_proj_bias"), format!("{at}.down_proj_bias"));
        let bias = if t.has(&gate_up_bias) {
            let gate_up = t.take(&gate_up_bias, &[experts, &intermediate.doubled()])?;
            Some((
                interleaved(gate_up, Axis::Cols, intermediate.n),
                t.take(&down_bias, &[experts, &self.hidden])?,
            ))
        } else {
            None
        };
        Ok(ExpertWeights { intermediate: intermediate.n, gate_up, down, bias, glu })
    }
}

/// Weights concatenated along an axis.
fn joined(axis: Axis, mut of: Vec<WeightExpr>) -> WeightExpr {
    match of.pop() {
        Some(alone) if of.is_empty() => alone,
        last => WeightExpr::Concat { axis, of: of.into_iter().chain(last).collect() },
    }
}

fn transpose(of: WeightExpr) -> WeightExpr {
    WeightExpr::Transpose(Box::new(of))
}

/// Gate (even rows) and up (odd rows), concatenated.
fn interleaved(of: WeightExpr, axis: Axis, len: usize) -> WeightExpr {
    let half = |start| WeightExpr::Slice { axis, start, step: 2, len, of: Box::new(of.clone()) };
    WeightExpr::Concat { axis, of: vec![half(0), half(1)] }
}
