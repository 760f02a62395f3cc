//! Shapes of real models: one row each.

use super::popularity::{self, Popularity};
use moec_base::Result;
use serde_json::{Value, json};

/// The models whose shapes are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Like {
    /// OLMoE-1B-7B: 6.9 billion parameters, 16 layers, 64 experts, 8 per token
    Olmoe,
    /// Qwen3-30B-A3B: 30.5 billion parameters, 48 layers, 128 experts, 8 per token
    #[value(name = "qwen3-30b-a3b")]
    Qwen3_30bA3b,
    /// Phi-tiny-MoE: 3.8 billion parameters, 32 layers, 16 experts, 2 per token
    PhiTiny,
}

/// What is smaller than in the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cut {
    /// Layers; `None`: all.
    pub layers: Option<usize>,
    /// Vocabulary; `None`: all.
    pub vocab: Option<usize>,
}

/// What tokens ask for.
#[derive(Clone, Copy, Debug)]
pub struct Popular<'a> {
    /// How often they choose each expert.
    pub popularity: &'a Popularity,
    /// Share of the neurons of the experts that a token chooses which are 0 for it: gates are ReLU. `None`: gates are what they
    /// are in the model.
    pub zeros: Option<f64>,
}

/// A normal distribution.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Draw {
    /// Mean.
    pub(super) mean: f64,
    /// Standard deviation.
    pub(super) std: f64,
}

/// Matrices and embeddings, as models are initialised.
pub(super) const WEIGHT: Draw = Draw { mean: 0.0, std: 0.02 };
/// Weights of norms.
pub(super) const NORM: Draw = Draw { mean: 1.0, std: 0.1 };

/// A tensor to write, in bf16.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Tensor {
    /// Name.
    pub(super) name: String,
    /// Shape.
    pub(super) shape: Vec<usize>,
    /// Its numbers.
    pub(super) draw: Draw,
    /// Those that are not drawn.
    pub(super) first: First,
}

/// What replaces numbers that belong to the first channel.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum First {
    /// Nothing.
    Drawn,
    /// The first number of every row, by row, again and again; of a vector, its first.
    OfRows(Vec<f64>),
    /// Zeros, in the whole first row.
    NoRow,
}

/// The numbers to replace among `count` of a tensor, `from` its own `from`-th on: place among them, value.
pub(super) fn first_numbers(tensor: &Tensor, from: u64, count: usize) -> Vec<(usize, f64)> {
    let columns = tensor.shape.last().map_or(1, |&c| c.max(1) as u64);
    let to = from + count as u64;
    match &tensor.first {
        First::Drawn => Vec::new(),
        First::NoRow => (from..to.min(columns)).map(|i| ((i - from) as usize, 0.0)).collect(),
        First::OfRows(values) => (from.div_ceil(columns)..to.div_ceil(columns))
            .filter_map(|row| {
                let value = values.get((row % values.len().max(1) as u64) as usize)?;
                Some(((row * columns - from) as usize, *value))
            })
            .collect(),
    }
}

impl Tensor {
    /// Size.
    pub(super) fn bytes(&self) -> u64 {
        self.shape.iter().map(|&d| d as u64).product::<u64>() * 2
    }
}

/// What the models have in common, and where they differ.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    pub(super) layers: usize,
    pub(super) hidden: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) experts: usize,
    pub(super) inner: usize,
    pub(super) vocab: usize,
    /// Channels of the norms of query and key.
    pub(super) qk_norm: Option<(usize, usize)>,
    /// Biases of norms, attention and head.
    pub(super) biases: bool,
    /// The layer's feed-forward block.
    pub(super) block: &'static str,
    /// Names of gate, up and down.
    pub(super) names: [&'static str; 3],
    /// The rest of `config.json`.
    pub(super) config: Value,
}

impl Like {
    pub(super) fn shape(self) -> Shape {
        match self {
            Self::Olmoe => Shape {
                layers: 16,
                hidden: 2048,
                heads: 16,
                kv_heads: 16,
                head_dim: 128,
                experts: 64,
                inner: 1024,
                vocab: 50304,
                qk_norm: Some((2048, 2048)),
                biases: false,
                block: "mlp",
                names: ["gate_proj", "up_proj", "down_proj"],
                config: json!({
                    "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "clip_qkv": null,
                    "intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8,
                    "norm_topk_prob": false, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
                    "rope_theta": 10000.0, "eos_token_id": 50279, "pad_token_id": 1,
                }),
            },
            Self::Qwen3_30bA3b => Shape {
                layers: 48,
                hidden: 2048,
                heads: 32,
                kv_heads: 4,
                head_dim: 128,
                experts: 128,
                inner: 768,
                vocab: 151_936,
                qk_norm: Some((128, 128)),
                biases: false,
                block: "mlp",
                names: ["gate_proj", "up_proj", "down_proj"],
                config: json!({
                    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 128,
                    "decoder_sparse_step": 1, "intermediate_size": 6144, "moe_intermediate_size": 768,
                    "mlp_only_layers": [], "num_experts": 128, "num_experts_per_tok": 8,
                    "norm_topk_prob": true, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
                    "rope_theta": 1_000_000.0, "use_sliding_window": false, "sliding_window": null,
                    "bos_token_id": 151_643, "eos_token_id": 151_645,
                }),
            },
            // Heads are 128 wide, not hidden / heads: only so does the count of parameters come out.
            Self::PhiTiny => Shape {
                layers: 32,
                hidden: 4096,
                heads: 16,
                kv_heads: 4,
                head_dim: 128,
                experts: 16,
                inner: 448,
                vocab: 32064,
                qk_norm: None,
                biases: true,
                block: "block_sparse_moe",
                names: ["w1", "w3", "w2"],
                config: json!({
                    "architectures": ["PhiMoEForCausalLM"], "model_type": "phimoe", "head_dim": 128,
                    "intermediate_size": 448, "num_local_experts": 16, "num_experts_per_tok": 2,
                    "attention_bias": true, "lm_head_bias": true, "router_jitter_noise": 0.01,
                    "input_jitter_noise": 0.0, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
                    "rope_theta": 10000.0, "sliding_window": null, "bos_token_id": 1, "eos_token_id": 32000,
                }),
            },
        }
    }

    /// `config.json`, and every tensor in order.
    ///
    /// # Errors
    /// A popularity of another number of experts, or a model whose router cannot have one.
    pub(super) fn describe(self, cut: Cut, popular: Option<Popular<'_>>) -> Result<(Value, Vec<Tensor>)> {
        let mut s = self.shape();
        let depth = s.layers;
        s.layers = cut.layers.unwrap_or(s.layers);
        s.vocab = cut.vocab.unwrap_or(s.vocab);
        let mut tensors = s.tensors();
        let Some(Popular { popularity, zeros }) = popular else { return Ok((s.into_config(false), tensors)) };
        popularity::skew(&s, depth, popularity, zeros, &mut tensors)?;
        Ok((s.into_config(zeros.is_some()), tensors))
    }
}

impl Shape {
    /// The whole `config.json`. `relu`: gates are ReLU, and not what they are in the model.
    pub(super) fn into_config(self, relu: bool) -> Value {
        let mut config = self.config;
        for (key, value) in [
            ("num_hidden_layers", json!(self.layers)),
            ("hidden_size", json!(self.hidden)),
            ("num_attention_heads", json!(self.heads)),
            ("num_key_value_heads", json!(self.kv_heads)),
            ("vocab_size", json!(self.vocab)),
            ("attention_dropout", json!(0.0)),
            ("hidden_act", json!(if relu { "relu" } else { "silu" })),
            ("initializer_range", json!(0.02)),
            ("rope_scaling", Value::Null),
            ("tie_word_embeddings", json!(false)),
            ("torch_dtype", json!("bfloat16")),
            ("use_cache", json!(true)),
        ] {
            config[key] = value;
        }
        // A vocabulary that was cut has lost its special tokens.
        for key in ["bos_token_id", "eos_token_id", "pad_token_id"] {
            if config[key].as_u64().is_some_and(|id| id >= self.vocab as u64) {
                config[key] = Value::Null;
            }
        }
        config
    }

    pub(super) fn tensors(&self) -> Vec<Tensor> {
        let mut all = Vec::new();
        let mut put = |name: String, shape: Vec<usize>, draw| {
            all.push(Tensor { name, shape, draw, first: First::Drawn });
        };
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        put("model.embed_tokens.weight".into(), vec![self.vocab, self.hidden], WEIGHT);
        for l in 0..self.layers {
            let at = format!("model.layers.{l}");
            for (name, out, inp) in [
                ("q_proj", q, self.hidden),
                ("k_proj", kv, self.hidden),
                ("v_proj", kv, self.hidden),
                ("o_proj", self.hidden, q),
            ] {
                put(format!("{at}.self_attn.{name}.weight"), vec![out, inp], WEIGHT);
                if self.biases {
                    put(format!("{at}.self_attn.{name}.bias"), vec![out], WEIGHT);
                }
            }
            if let Some((q, k)) = self.qk_norm {
                put(format!("{at}.self_attn.q_norm.weight"), vec![q], NORM);
                put(format!("{at}.self_attn.k_norm.weight"), vec![k], NORM);
            }
            let block = format!("{at}.{}", self.block);
            put(format!("{block}.gate.weight"), vec![self.experts, self.hidden], WEIGHT);
            for e in 0..self.experts {
                let [gate, up, down] = self.names.map(|n| format!("{block}.experts.{e}.{n}.weight"));
                put(gate, vec![self.inner, self.hidden], WEIGHT);
                put(up, vec![self.inner, self.hidden], WEIGHT);
                put(down, vec![self.hidden, self.inner], WEIGHT);
            }
            for name in ["input_layernorm", "post_attention_layernorm"] {
                self.norm(&format!("{at}.{name}"), &mut put);
            }
        }
        self.norm("model.norm", &mut put);
        put("lm_head.weight".into(), vec![self.vocab, self.hidden], WEIGHT);
        if self.biases {
            put("lm_head.bias".into(), vec![self.vocab], WEIGHT);
        }
        all
    }

    fn norm(&self, name: &str, put: &mut impl FnMut(String, Vec<usize>, Draw)) {
        put(format!("{name}.weight"), vec![self.hidden], NORM);
        if self.biases {
            put(format!("{name}.bias"), vec![self.hidden], WEIGHT);
        }
    }
}
