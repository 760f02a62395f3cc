//! Common parts of most families: sizes, llama-like attention, gated networks, embedding table and head.
#![expect(clippy::cast_possible_truncation, reason = "models compute with their factors in f32")]

use super::checkpoint::Checkpoint;
use super::config::{Config, Size};
use super::families::Family;
use super::mixers::{GqaOptions, Mixer, Moe};
use super::spec::{Block, LayerSpec, ModelSpec, Multipliers, Norm};
use super::tensors::{Dim, Tensors};
use moec_base::error::{Error, Result};
use moec_ir::{Activation, Elementwise, Glu, WeightExpr};

/// Config keys for the number of routed experts.
pub const EXPERTS: [&str; 4] = ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"];

/// A checkpoint being read, with the sizes that every family has.
pub struct Base<'a> {
    /// Its config.
    pub config: &'a Config,
    /// Its tensors.
    pub tensors: Tensors<'a>,
    /// Channels of the residual stream.
    pub hidden: Dim,
    /// Channels of the rows that routed experts read, if those are projected first.
    pub latent: Option<Dim>,
    /// Number of layers.
    pub layers: usize,
    /// Query heads.
    pub heads: Size,
    /// Key-value heads.
    pub kv_heads: Size,
    /// Added to the variance in norms.
    pub eps: f32,
    /// Function that combines gate and up of networks.
    pub glu: Glu,
    /// Default of tied embeddings: whether the embedding table is the head.
    pub tied: bool,
    /// Whether norms store their weights minus 1.
    pub zero_centred: bool,
    /// Factors of rows.
    pub multipliers: Multipliers,
    /// Bound of the magnitude of logits.
    pub logit_cap: Option<f32>,
    /// Prefix of the names of all tensors but the head's.
    root: &'static str,
    vocab: Dim,
}

impl<'a> Base<'a> {
    /// Reads the sizes.
    ///
    /// # Errors
    /// Fails if keys are missing or wrong, or activations or quantisations are not supported.
    pub fn read(config: &'a Config, checkpoint: &'a Checkpoint) -> Result<Self> {
        let glu = Glu::Gated(activation(config)?);
        Self::read_with_glu(glu, config, checkpoint)
    }

    /// Reads the sizes. The family says how gate and up are combined, so `hidden_act` is ignored.
    ///
    /// # Errors
    /// Fails if keys are missing or wrong, or quantisations are not supported.
    pub fn read_with_glu(glu: Glu, config: &'a Config, checkpoint: &'a Checkpoint) -> Result<Self> {
        let heads = config.size(&["num_attention_heads"])?;
        let kv_heads = config.opt_size(&["num_key_value_heads", "num_attention_groups"])?.unwrap_or(heads);
        if !heads.n.is_multiple_of(kv_heads.n) {
            return Err(Error::input(format!(
                "{} is {}, not a multiple of `{}`, which is {}",
                config.name(heads.key),
                heads.n,
                kv_heads.key,
                kv_heads.n
            )));
        }
        Ok(Self {
            config,
            tensors: Tensors::new(config, checkpoint)?,
            hidden: config.size(&["hidden_size"])?.into(),
            latent: None,
            layers: match config.opt_texts(LAYERS)?.filter(|kinds| !kinds.is_empty()) {
                Some(kinds) if !config.has("num_hidden_layers") => kinds.len(),
                _ => config.size(&["num_hidden_layers", "num_layers"])?.n,
            },
            heads,
            kv_heads,
            eps: eps(config)?,
            glu,
            tied: false,
            zero_centred: false,
            multipliers: Multipliers::default(),
            logit_cap: None,
            root: ROOTS.into_iter().find(|root| embeddings(checkpoint, root).is_some()).unwrap_or(ROOTS[0]),
            vocab: config.size(&["vocab_size"])?.into(),
        })
    }

    /// Prefix of a layer's tensors.
    pub fn layer(&self, layer: usize) -> String {
        format!("{}.layers.{layer}", self.root)
    }

    /// Channels of a head: `head_dim`, or as many as the query projection has.
    ///
    /// # Errors
    /// Fails if the query projection does not divide into heads.
    pub fn head_dim(&self) -> Result<Dim> {
        if let Some(size) = self.config.opt_size(&["head_dim"])? {
            return Ok(size.into());
        }
        let name = format!("{}.self_attn.q_proj.weight", self.layer(0));
        let heads = self.heads.n;
        match self.tensors.shape(&name).as_deref() {
            Some([rows, _]) if *rows > 0 && rows.is_multiple_of(heads) => {
                Ok(Dim::new(rows / heads, format!("`{name}` / `num_attention_heads`")))
            }
            Some(shape) => Err(Error::input(format!(
                "tensor `{name}` of shape {shape:?} does not divide into {heads} heads"
            ))
            .because(format!(
                "{} gives the heads, and there is no `head_dim`",
                self.config.name(self.heads.key)
            ))),
            None => Ok(Dim::new(self.hidden.n / heads, "`hidden_size` / `num_attention_heads`")),
        }
    }

    /// A model of llama-like layers without experts; `bias` says whether its networks have biases.
    ///
    /// # Errors
    /// Fails if tensors do not fit the config.
    pub fn dense_model(self, family: &Family, attention: GqaOptions, bias: bool) -> Result<ModelSpec> {
        self.pre_norm_model(family, PRE_NORMS, |b, l| Ok([b.gqa(l, attention)?.into(), b.dense(l, bias)?]))
    }

    /// A block of one mixer with a norm before and after it.
    ///
    /// # Errors
    /// Fails if tensors do not fit the config.
    pub fn sandwich(&self, layer: usize, [before, after]: [&str; 2], mixer: Mixer) -> Result<Block> {
        let at = self.layer(layer);
        let norm = Some(self.rms_norm(&format!("{at}.{before}"))?);
        let post_norm = Some(self.rms_norm(&format!("{at}.{after}"))?);
        Ok(Block { norm, mixers: vec![mixer], post_norm })
    }

    /// Whether each layer is of the first of two kinds, by `layer_types`.
    ///
    /// # Errors
    /// Fails for another kind, and if the list is missing or too short.
    pub fn is_first_kind(&self, kinds: [&'static str; 2]) -> Result<impl Fn(usize) -> bool + use<>> {
        let c = self.config;
        let types = c.opt_texts("layer_types")?.unwrap_or_default();
        if let Some(other) = types.iter().find(|t| !kinds.contains(&t.as_str())) {
            return Err(c.unsupported("layer_types", other, &kinds));
        }
        if types.len() < self.layers {
            return Err(Error::input(format!(
                "{} has {} entries, but the model has {} layers",
                c.name("layer_types"),
                types.len(),
                self.layers
            )));
        }
        Ok(move |layer: usize| types.get(layer).is_some_and(|t| t == kinds[0]))
    }

    /// The sliding window of each layer: by `layer_types`, or for all but every n-th layer, where several
    /// keys may give n.
    ///
    /// # Errors
    /// Fails if keys have the wrong type, or kinds of layers are not supported.
    pub fn windows(&self) -> Result<impl Fn(usize) -> Option<usize> + use<>> {
        const KINDS: [&str; 2] = ["sliding_attention", "full_attention"];
        let c = self.config;
        let window = c.opt_size(&["sliding_window"])?.map(|s| s.n);
        let types = c.opt_texts("layer_types")?;
        if let Some(other) = types.iter().flatten().find(|t| !KINDS.contains(&t.as_str())) {
            return Err(c.unsupported("layer_types", other, &KINDS));
        }
        let every = c.opt_size(&["sliding_window_pattern", "global_attn_every_n_layers"])?.map(|s| s.n);
        let below = c.opt_count(&["max_window_layers"])?.map(|s| s.n);
        Ok(move |layer: usize| {
            window.filter(|_| match (&types, every, below) {
                (Some(types), ..) => types.get(layer).is_some_and(|t| t == KINDS[0]),
                (None, Some(every), _) => !(layer + 1).is_multiple_of(every),
                (None, None, Some(below)) => layer >= below,
                (None, None, None) => false,
            })
        })
    }

    /// Whether each layer is dense: by `mlp_layer_types`, or the first few and those that `moe_layer_freq`
    /// leaves out. `first` is the default number of dense layers at the start.
    ///
    /// # Errors
    /// Fails if keys have the wrong type, or kinds are not supported.
    pub fn dense_layers(&self, first: usize) -> Result<impl Fn(usize) -> bool + use<>> {
        const KINDS: [&str; 2] = ["dense", "sparse"];
        let c = self.config;
        let types = c.opt_texts("mlp_layer_types")?;
        if let Some(other) = types.iter().flatten().find(|t| !KINDS.contains(&t.as_str())) {
            return Err(c.unsupported("mlp_layer_types", other, &KINDS));
        }
        let first = c.opt_count(&["first_k_dense_replace", "num_dense_layers"])?.map_or(first, |s| s.n);
        let sparse = match c.value("moe_layer_freq") {
            Some(list) if list.is_array() => c.opt_layout("moe_layer_freq", self.layers)?,
            _ => {
                let step = c.opt_size(&["moe_layer_freq"])?.map_or(1, |s| s.n);
                Some((0..self.layers).map(|l| l >= first && l.is_multiple_of(step)).collect())
            }
        };
        Ok(move |layer: usize| match (&types, &sparse) {
            (Some(types), _) => types.get(layer).is_some_and(|t| t == KINDS[0]),
            (None, sparse) => !sparse.as_ref().and_then(|s| s.get(layer).copied()).unwrap_or(true),
        })
    }

    /// A root-mean-square norm over the residual stream.
    ///
    /// # Errors
    /// Fails if tensors do not fit the config.
    pub fn rms_norm(&self, name: &str) -> Result<Norm> {
        Ok(Norm::Rms { eps: self.eps, weight: self.norm_weight(&format!("{name}.weight"), &self.hidden)? })
    }

    /// The norm before the head.
    ///
    /// # Errors
    /// Those of [`Self::rms_norm`].
    pub fn final_norm(&self) -> Result<Norm> {
        self.rms_norm(&self.final_name())
    }

    /// Name of the norm before the head.
    fn final_name(&self) -> String {
        let named = FINAL_NORMS.map(|name| format!("{}.{name}", self.root));
        let found = named.iter().find(|name| self.tensors.has(&format!("{name}.weight")));
        found.unwrap_or(&named[0]).clone()
    }

    /// A model of layers with a norm before each of two blocks, a mixer of tokens and one of channels.
    ///
    /// # Errors
    /// Fails if tensors do not fit the config; errors of `blocks` are returned.
    pub fn pre_norm_model(
        self,
        family: &Family,
        norms: [&str; 2],
        mut blocks: impl FnMut(&Self, usize) -> Result<[Mixer; 2]>,
    ) -> Result<ModelSpec> {
        let layers = self.each_layer(|l| {
            let [tokens, channels] = blocks(&self, l)?;
            let [first, second] = norms.map(|name| format!("{}.{name}", self.layer(l)));
            Ok(LayerSpec::pre_norm([(self.rms_norm(&first)?, tokens), (self.rms_norm(&second)?, channels)]))
        })?;
        let norm = self.final_norm()?;
        self.finish(family, layers, norm, false)
    }

    /// The weight of a norm, as a factor.
    ///
    /// # Errors
    /// Those of [`Self::rms_norm`].
    pub fn norm_weight(&self, name: &str, width: &Dim) -> Result<WeightExpr> {
        if self.zero_centred {
            self.tensors.take_mapped(name, &[width], Elementwise::PlusOne)
        } else {
            self.tensors.take(name, &[width])
        }
    }

    /// Reads the layers one by one.
    ///
    /// # Errors
    /// Those of `read`.
    pub fn each_layer(&self, read: impl FnMut(usize) -> Result<LayerSpec>) -> Result<Vec<LayerSpec>> {
        (0..self.layers).map(read).collect()
    }

    /// Reads the parts outside the layers, and puts the model together.
    ///
    /// # Errors
    /// Fails if tensors do not fit the config.
    pub fn finish(
        self,
        family: &Family,
        layers: Vec<LayerSpec>,
        norm: Norm,
        head_bias: bool,
    ) -> Result<ModelSpec> {
        let (t, config) = (&self.tensors, self.config);
        let table = [&self.vocab, &self.hidden];
        let named = embeddings(t.checkpoint(), self.root)
            .unwrap_or_else(|| format!("{}.{}", self.root, EMBEDDINGS[0]));
        let embed = t.take(&named, &table)?;
        let tied = config.flag_or("tie_word_embeddings", self.tied)?;
        let named = HEADS.into_iter().find(|name| t.has(name)).unwrap_or(HEADS[0]);
        let head = t.take_if(!tied, named, &table)?;
        if tied {
            t.skip(named);
        }
        let head_bias = t.take_if(head_bias, "lm_head.bias", &[&self.vocab])?;
        let params = t.parameters();
        let idle: u64 = layers.iter().filter_map(LayerSpec::moe).map(idle).sum();
        let (bos, eos) = self.special_tokens()?;
        let warnings =
            [self.unused(), self.activations(), self.vision(), self.predictors(), no_end(&eos, self.vocab.n)];
        Ok(ModelSpec {
            family: family.name,
            title: family.title,
            vocab: self.vocab.n,
            hidden: self.hidden.n,
            max_positions: config.size(&["max_position_embeddings", "model_max_length"])?.n,
            embed,
            multipliers: self.multipliers,
            logit_cap: self.logit_cap,
            layers,
            final_norm: norm,
            head,
            head_bias,
            bos,
            eos,
            params,
            active_params: params - idle.min(params),
            warnings: warnings.into_iter().flatten().collect(),
        })
    }

    /// First and last tokens: those of `generation_config.json`, with defaults from the config.
    fn special_tokens(&self) -> Result<(Option<u32>, Vec<u32>)> {
        let generation = self.tensors.checkpoint().generation_config()?;
        let ids = |key| match generation.as_ref().map(|g| g.opt_ids(key)).transpose()?.flatten() {
            Some(ids) => Ok(Some(ids)),
            None => self.config.opt_ids(key),
        };
        let bos = ids("bos_token_id")?.and_then(|ids| ids.first().copied());
        Ok((bos, ids("eos_token_id")?.unwrap_or_default()))
    }

    /// A warning about predictors of neurons. TurboSparse-Mistral's own code skips neurons that its predictor
    /// marks as inactive. Here all neurons are computed, so the result has no prediction errors.
    fn predictors(&self) -> Option<String> {
        let rest = self.tensors.rest();
        let mut found = rest.into_iter().filter(|name| name.contains(PREDICTOR));
        let first = found.next()?;
        Some(format!(
            "predictors of neurons ({} tensors, such as `{first}`) are not used: every neuron is computed",
            1 + found.count()
        ))
    }

    /// A warning about scales that other engines use to round activations or the KV cache.
    fn activations(&self) -> Option<String> {
        let rest = self.tensors.rest();
        let mut found = rest.into_iter().filter(|name| is_of_activations(name));
        let first = found.next()?;
        let n = 1 + found.count();
        Some(format!(
            "scales of activations ({n} tensors, such as `{first}`) are not used: weights alone are quantised"
        ))
    }

    /// A warning about the vision part of a model.
    fn vision(&self) -> Option<String> {
        let rest = self.tensors.rest();
        match rest.iter().filter(|name| is_vision(name)).count() {
            0 => None,
            n => Some(format!(
                "the vision part of the model ({n} tensors) is not used: moec runs the text part alone"
            )),
        }
    }

    /// A warning about tensors that are not used.
    fn unused(&self) -> Option<String> {
        let known = |name: &str| {
            // Layers past the last one are for multi-token prediction; RoPE frequencies are computed.
            let layers = name.strip_prefix(self.root).and_then(|rest| rest.strip_prefix(".layers."));
            let layer = layers.and_then(|rest| rest.split('.').next()?.parse().ok());
            layer.is_some_and(|l: usize| l >= self.layers)
                || name.starts_with(AHEAD)
                || is_vision(name)
                || is_of_activations(name)
                || name.ends_with(".rotary_emb.inv_freq")
                || name.contains(PREDICTOR)
        };
        let rest: Vec<_> = self.tensors.rest().into_iter().filter(|name| !known(name)).collect();
        let shown: Vec<_> = rest.iter().take(3).map(|name| format!("`{name}`")).collect();
        match (rest.len(), shown.join(", ")) {
            (0, _) => None,
            (1, name) => Some(format!("the checkpoint's tensor {name} is not used")),
            (n @ 2..=3, names) => Some(format!("{n} tensors of the checkpoint are not used: {names}")),
            (n, names) => Some(format!("{n} tensors of the checkpoint are not used: {names}, …")),
        }
    }
}

/// Whether a tensor is a scale of activations, by its name.
fn is_of_activations(name: &str) -> bool {
    const NAMES: [&str; 7] = [
        "input_scale",
        "input_global_scale",
        "activation_scale",
        "output_scale",
        "q_scale",
        "k_scale",
        "v_scale",
    ];
    name.rsplit_once('.').is_some_and(|(_, last)| NAMES.contains(&last))
}

/// Prefixes of tensor names, in text-only and in multimodal models.
const ROOTS: [&str; 4] = ["model", "model.language_model", "language_model.model", "backbone"];

/// Names of the head, in text-only and in multimodal models.
const HEADS: [&str; 2] = ["lm_head.weight", "language_model.lm_head.weight"];

/// Prefix of the names of tensors for multi-token prediction.
const AHEAD: &str = "mtp.";

/// Whether a tensor belongs to the vision part of a model.
fn is_vision(name: &str) -> bool {
    const PARTS: [&str; 5] =
        ["visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "vit_large_projector."];
    let name = name.strip_prefix("model.").unwrap_or(name);
    PARTS.iter().any(|part| name.starts_with(part))
}

/// Names of the embedding table below the root.
const EMBEDDINGS: [&str; 3] = ["embed_tokens.weight", "word_embeddings.weight", "embeddings.weight"];

/// Names of the norm before the head, below the root.
const FINAL_NORMS: [&str; 4] = ["norm", "embedding_norm", "norm_f", "final_layernorm"];

/// Name of the embedding table, if the checkpoint has one below a root.
fn embeddings(checkpoint: &Checkpoint, root: &str) -> Option<String> {
    let named = EMBEDDINGS.map(|name| format!("{root}.{name}"));
    named.into_iter().find(|name| checkpoint.get(name).is_some())
}

/// Epsilon of norms, which is added to the variance.
fn eps(config: &Config) -> Result<f32> {
    const KEYS: [&str; 5] =
        ["rms_norm_eps", "norm_eps", "layer_norm_epsilon", "layer_norm_eps", "layernorm_epsilon"];
    let key = KEYS.into_iter().find(|key| config.has(key)).unwrap_or(KEYS[0]);
    Ok(config.positive(key)? as f32)
}

/// Key of a list with the kind of each layer, whose length is the number of layers.
pub const LAYERS: &str = "layers_block_type";

/// Norms of a layer before its two blocks, by their names in most families.
pub const PRE_NORMS: [&str; 2] = ["input_layernorm", "post_attention_layernorm"];

/// Part of the names of tensors that predict active neurons (TurboSparse, PowerInfer).
const PREDICTOR: &str = ".predictor.";

/// A warning about last tokens that are not in the vocabulary.
fn no_end(eos: &[u32], vocab: usize) -> Option<String> {
    let outside = eos.iter().find(|&&id| id as usize >= vocab)?;
    Some(format!(
        "`eos_token_id` names token {outside}, but the model has {vocab} tokens: no text ends with it"
    ))
}

/// Parameters of experts that are not used for a given token.
fn idle(moe: &Moe) -> u64 {
    let size = |w: &WeightExpr| {
        w.leaves().map(|l| l.shape.iter().map(|&d| d as u64).product()).max().unwrap_or(0_u64)
    };
    let parts = |w: &WeightExpr| match w {
        // Separate experts have one tensor for each expert and part; fused ones have one for each part.
        WeightExpr::Stack(_) => w.leaves().map(|l| l.shape.iter().map(|&d| d as u64).product::<u64>()).sum(),
        _ => size(w),
    };
    let e = &moe.experts;
    let bias = e.bias.iter().map(|(a, b)| parts(a) + parts(b)).sum::<u64>();
    let all = parts(&e.gate_up) + parts(&e.down) + bias;
    let n = moe.router.experts as u64;
    all / n.max(1) * n.saturating_sub(moe.router.k as u64)
}

/// Refuses a `hidden_act` that is not among `known`; the first of these is the default. Returns its name.
///
/// # Errors
/// Fails for another name or an invalid value.
pub fn only_act(config: &Config, known: &[&'static str]) -> Result<&'static str> {
    const KEY: &str = "hidden_act";
    let Some(name) = config.opt_text(KEY)? else { return Ok(known.first().copied().unwrap_or_default()) };
    known.iter().find(|k| **k == name).copied().ok_or_else(|| config.unsupported(KEY, name, known))
}

/// Refuses a key with an activation other than SiLU.
///
/// # Errors
/// Fails for another name or an invalid value.
pub fn only_silu(config: &Config, key: &str) -> Result<()> {
    match config.opt_text(key)? {
        Some(other) if !["silu", "swish"].contains(&other) => {
            Err(config.unsupported(key, other, &["silu", "swish"]))
        }
        _ => Ok(()),
    }
}

/// The activation that `hidden_act` names.
fn activation(config: &Config) -> Result<Activation> {
    activation_of(config, "hidden_act", "silu")
}

/// The activation that a key names; `usual` is the default.
///
/// # Errors
/// Fails for an unknown name, with the names that are known.
pub fn activation_of(config: &Config, key: &str, usual: &str) -> Result<Activation> {
    const KNOWN: [(&str, Activation); 8] = [
        ("silu", Activation::Silu),
        ("swish", Activation::Silu),
        ("gelu", Activation::Gelu),
        ("gelu_new", Activation::GeluTanh),
        ("gelu_pytorch_tanh", Activation::GeluTanh),
        ("relu", Activation::Relu),
        ("sigmoid", Activation::Sigmoid),
        ("relu2", Activation::Relu2),
    ];
    let name = config.opt_text(key)?.unwrap_or(usual);
    match KNOWN.iter().find(|(known, _)| *known == name) {
        Some((_, activation)) => Ok(*activation),
        None => Err(config.unsupported(key, name, &KNOWN.map(|(known, _)| known))),
    }
}
