//! Shapes of real models: one row each.

use super::popularity::{self, Popularity};
use moec_base::Result;
use moec_import::ModelSpec;
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
    /// Qwen3.6-35B-A3B, which has the shapes of Qwen3.5's: 34.7 billion parameters, 40 layers, 256 experts, 8
    /// per token
    #[value(name = "qwen3.6-35b-a3b")]
    Qwen3_6_35bA3b,
    /// Qwen3-Next-80B-A3B: 79.7 billion parameters, 48 layers, 512 experts, 10 per token
    #[value(name = "qwen3-next-80b-a3b")]
    Qwen3Next80bA3b,
    /// GLM-4.7-Flash: 29.9 billion parameters, 47 layers, 64 experts, 4 per token
    #[value(name = "glm-4.7-flash")]
    Glm47Flash,
    /// gpt-oss-20b: 20.9 billion parameters, 24 layers, 32 experts, 4 per token
    #[value(name = "gpt-oss-20b")]
    GptOss20b,
    /// GLM-4.5-Air: 106.9 billion parameters, 46 layers, 128 experts, 8 per token
    #[value(name = "glm-4.5-air")]
    Glm45Air,
    /// DeepSeek-V3: 671 billion parameters, 61 layers, 256 experts, 8 per token
    #[value(name = "deepseek-v3")]
    DeepseekV3,
    /// Nemotron-3-Nano-30B-A3B: 31.6 billion parameters, 52 layers, 128 experts, 6 per token
    #[value(name = "nemotron-3-nano")]
    Nemotron3Nano,
    /// The text part of Gemma-4-26B-A4B: 25.2 billion parameters, 30 layers, 128 experts, 8 per token
    #[value(name = "gemma-4-26b-a4b")]
    Gemma4_26bA4b,
}

/// Dimensions that are smaller than in the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReducedDims {
    /// Layers; `None`: all.
    pub layers: Option<usize>,
    /// Vocabulary; `None`: all.
    pub vocab: Option<usize>,
}

/// Popularity of experts among tokens.
#[derive(Clone, Copy, Debug)]
pub struct Popular<'a> {
    /// Number of tokens that choose each expert.
    pub popularity: &'a Popularity,
    /// Share of the neurons of the experts that a token chooses which are 0 for it: gates are ReLU. `None`:
    /// gates are what they are in the model.
    pub zeros: Option<f64>,
}

/// A normal distribution.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Normal {
    /// Mean.
    pub(super) mean: f64,
    /// Standard deviation.
    pub(super) std: f64,
}

/// Matrices and embeddings, as models are initialised.
pub(super) const WEIGHT: Normal = Normal { mean: 0.0, std: 0.02 };
/// Weights of norms.
pub(super) const NORM: Normal = Normal { mean: 1.0, std: 0.1 };

/// A tensor to write, in bf16.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Tensor {
    /// Name.
    pub(super) name: String,
    /// Shape.
    pub(super) shape: Vec<usize>,
    /// Its numbers.
    pub(super) distribution: Normal,
    /// Those that are not drawn.
    pub(super) first: First,
}

/// Replacement of numbers that belong to the first channel.
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

/// Common and different parts of the models.
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
    /// Biases of norms, attention and head.
    pub(super) biases: bool,
    /// Names of gate, up and down.
    pub(super) names: [&'static str; 3],
    /// The rest of `config.json`.
    pub(super) config: Value,
}

impl Like {
    /// Shapes of models with attention and experts alone, whose routers can be given a popularity.
    pub(super) fn shape(self) -> Option<Shape> {
        Some(match self {
            Self::Olmoe => Shape {
                layers: 16,
                hidden: 2048,
                heads: 16,
                kv_heads: 16,
                head_dim: 128,
                experts: 64,
                inner: 1024,
                vocab: 50304,
                biases: false,
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
                biases: false,
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
                biases: true,
                names: ["w1", "w3", "w2"],
                config: json!({
                    "architectures": ["PhiMoEForCausalLM"], "model_type": "phimoe", "head_dim": 128,
                    "intermediate_size": 448, "num_local_experts": 16, "num_experts_per_tok": 2,
                    "attention_bias": true, "lm_head_bias": true, "router_jitter_noise": 0.01,
                    "input_jitter_noise": 0.0, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
                    "rope_theta": 10000.0, "sliding_window": null, "bos_token_id": 1, "eos_token_id": 32000,
                }),
            },
            _ => return None,
        })
    }

    /// `config.json` of the others, as published, and the ends of names that say how experts are stored.
    /// Sizes are the defaults of transformers 5.24, which are those of these models, and, of gpt-oss-20b,
    /// Nemotron 3 and Gemma 4, those of their model cards and configurations.
    fn published(self) -> (Value, &'static [&'static str]) {
        const STACKED: &[&str] = &["experts.gate_up_proj"];
        let delta = json!({
            "attention_bias": false, "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
            "linear_num_value_heads": 32, "linear_value_head_dim": 128, "max_position_embeddings": 262_144,
            "moe_intermediate_size": 512, "num_attention_heads": 16, "num_key_value_heads": 2,
            "rms_norm_eps": 1e-6, "shared_expert_intermediate_size": 512, "tie_word_embeddings": false,
            "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 1e7, "rope_type": "default"},
        });
        // Every fourth layer has attention.
        let of_delta = |layers: usize, more: Value| {
            let kinds = (1..=layers).map(|l| if l % 4 == 0 { "full_attention" } else { "linear_attention" });
            let layers = json!({"num_hidden_layers": layers, "layer_types": kinds.collect::<Vec<_>>()});
            merged([delta.clone(), layers, more])
        };
        match self {
            Self::Qwen3Next80bA3b => {
                let own = json!({
                    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next",
                    "decoder_sparse_step": 1, "intermediate_size": 5120, "mlp_only_layers": [],
                    "norm_topk_prob": true, "num_experts": 512, "num_experts_per_tok": 10,
                    "vocab_size": 151_936,
                });
                (of_delta(48, own), &[])
            }
            Self::Glm47Flash => {
                let own = json!({
                    "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite",
                    "attention_bias": false, "first_k_dense_replace": 1, "hidden_act": "silu",
                    "hidden_size": 2048, "intermediate_size": 10240, "kv_lora_rank": 512,
                    "max_position_embeddings": 202_752, "moe_intermediate_size": 1536, "n_group": 1,
                    "n_routed_experts": 64, "n_shared_experts": 1, "norm_topk_prob": true,
                    "num_attention_heads": 20, "num_experts_per_tok": 4, "num_hidden_layers": 47,
                    "num_key_value_heads": 20, "q_lora_rank": 768, "qk_nope_head_dim": 192,
                    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.8,
                    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
                    "tie_word_embeddings": false, "topk_group": 1, "v_head_dim": 256,
                    "vocab_size": 154_880,
                });
                (own, &[])
            }
            Self::Glm45Air => {
                let own = json!({
                    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe",
                    "attention_bias": true, "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu",
                    "hidden_size": 4096, "intermediate_size": 10944, "max_position_embeddings": 131_072,
                    "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128,
                    "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 96,
                    "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8,
                    "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
                    "routed_scaling_factor": 1.0, "tie_word_embeddings": false, "topk_group": 1,
                    "use_qk_norm": false, "vocab_size": 151_552,
                });
                (own, &[])
            }
            Self::DeepseekV3 => {
                let own = json!({
                    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
                    "attention_bias": false, "first_k_dense_replace": 3, "hidden_act": "silu",
                    "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
                    "max_position_embeddings": 163_840, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
                    "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true,
                    "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
                    "num_key_value_heads": 128, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
                    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
                    "rope_scaling": {
                        "type": "yarn", "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
                        "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
                    },
                    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": false,
                    "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129_280,
                });
                (own, &[])
            }
            Self::GptOss20b => {
                let kinds = (0..24).map(|l| if l % 2 == 0 { "sliding_attention" } else { "full_attention" });
                let own = json!({
                    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": true,
                    "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "intermediate_size": 2880,
                    "layer_types": kinds.collect::<Vec<_>>(), "max_position_embeddings": 131_072,
                    "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
                    "num_key_value_heads": 8, "num_local_experts": 32, "rms_norm_eps": 1e-5,
                    "rope_parameters": {
                        "rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "beta_fast": 32.0,
                        "beta_slow": 1.0, "original_max_position_embeddings": 4096, "truncate": false,
                    },
                    "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": false,
                    "vocab_size": 201_088,
                });
                (own, &["experts.gate_up_proj", "experts.gate_up_proj_bias"])
            }
            Self::Nemotron3Nano => {
                let own = json!({
                    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h",
                    "attention_bias": false, "conv_kernel": 4, "head_dim": 128, "hidden_size": 2688,
                    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
                    "intermediate_size": 1856, "layer_norm_epsilon": 1e-5, "mamba_head_dim": 64,
                    "mamba_hidden_act": "silu", "mamba_num_heads": 64, "max_position_embeddings": 262_144,
                    "mlp_bias": false, "mlp_hidden_act": "relu2", "moe_intermediate_size": 1856,
                    "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "n_groups": 8,
                    "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": true,
                    "num_attention_heads": 32, "num_experts_per_tok": 6, "num_hidden_layers": 52,
                    "num_key_value_heads": 2, "routed_scaling_factor": 2.5, "ssm_state_size": 128,
                    "tie_word_embeddings": false, "topk_group": 1, "use_bias": false, "use_conv_bias": true,
                    "vocab_size": 131_072,
                });
                (own, &[])
            }
            Self::Gemma4_26bA4b => {
                let kinds = (1..=30).map(|l| if l % 6 == 0 { "full_attention" } else { "sliding_attention" });
                let own = json!({
                    "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text",
                    "attention_bias": false, "attention_k_eq_v": true, "enable_moe_block": true,
                    "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
                    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2816,
                    "hidden_size_per_layer_input": 0, "intermediate_size": 2112,
                    "layer_types": kinds.collect::<Vec<_>>(), "max_position_embeddings": 262_144,
                    "moe_intermediate_size": 704, "num_attention_heads": 16, "num_experts": 128,
                    "num_global_key_value_heads": 2, "num_hidden_layers": 30, "num_key_value_heads": 8,
                    "num_kv_shared_layers": 0, "rms_norm_eps": 1e-6,
                    "rope_parameters": {
                        "full_attention": {
                            "partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional",
                        },
                        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
                    },
                    "sliding_window": 1024, "tie_word_embeddings": true, "top_k_experts": 8,
                    "use_double_wide_mlp": false, "vocab_size": 262_144,
                });
                (own, &["experts.gate_up_proj", "layer_scalar"])
            }
            _ => {
                let own = json!({
                    "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text",
                    "num_experts": 256, "num_experts_per_tok": 8, "vocab_size": 248_320,
                });
                (of_delta(40, own), STACKED)
            }
        }
    }

    /// The model's specification, whose weights cannot be read.
    ///
    /// # Errors
    /// Those of the importer.
    pub fn spec(self) -> Result<ModelSpec> {
        let (config, there) = match self.shape() {
            Some(shape) => (shape.config(false), &[][..]),
            None => self.published(),
        };
        Ok(moec_import::without_weights(config.as_object().cloned().unwrap_or_default(), there)?.0)
    }

    /// `config.json` of the model.
    ///
    /// # Errors
    /// Only bugs: a configuration that the importer refuses.
    pub fn config(self) -> Result<Value> {
        Ok(self.describe(ReducedDims::default(), None)?.0)
    }

    /// `config.json`, and every tensor in order.
    ///
    /// # Errors
    /// A popularity of another number of experts, or a model whose router cannot have one.
    pub(super) fn describe(
        self,
        cut: ReducedDims,
        popular: Option<Popular<'_>>,
    ) -> Result<(Value, Vec<Tensor>)> {
        let Some(mut s) = self.shape() else {
            if popular.is_some() {
                return Err(popularity::refused("this model's layers are not attention and experts alone"));
            }
            let (config, there) = self.published();
            let config = reduce(config, cut);
            let tensors = tensors(&config, there)?;
            return Ok((config, tensors));
        };
        let depth = s.layers;
        s.layers = cut.layers.unwrap_or(s.layers);
        s.vocab = cut.vocab.unwrap_or(s.vocab);
        let config = s.config(popular.is_some_and(|p| p.zeros.is_some()));
        let mut tensors = tensors(&config, &[])?;
        if let Some(Popular { popularity, zeros }) = popular {
            popularity::skew(&s, depth, popularity, zeros, &mut tensors)?;
        }
        Ok((config, tensors))
    }
}

/// One object of several, the last counts.
fn merged(of: [Value; 3]) -> Value {
    Value::Object(
        of.into_iter()
            .filter_map(|v| if let Value::Object(map) = v { Some(map) } else { None })
            .flatten()
            .collect(),
    )
}

/// A configuration with fewer layers, and a smaller vocabulary.
fn reduce(mut config: Value, cut: ReducedDims) -> Value {
    if let Some(layers) = cut.layers {
        config["num_hidden_layers"] = json!(layers);
        for key in ["layer_types", "hybrid_override_pattern"] {
            match config.get_mut(key) {
                Some(Value::Array(list)) => list.truncate(layers),
                Some(Value::String(letters)) => *letters = letters.chars().take(layers).collect(),
                _ => {}
            }
        }
    }
    if let Some(vocab) = cut.vocab {
        config["vocab_size"] = json!(vocab);
    }
    config
}

/// The tensors that the importer requests, with how each is drawn.
pub(super) fn tensors(config: &Value, there: &'static [&'static str]) -> Result<Vec<Tensor>> {
    let map = config.as_object().cloned().unwrap_or_default();
    let of = |(name, shape): (String, Vec<usize>)| Tensor {
        distribution: draw(&name),
        name,
        shape,
        first: First::Drawn,
    };
    Ok(moec_import::without_weights(map, there)?.1.into_iter().map(of).collect())
}

/// Distribution of a tensor's numbers: decays and steps of recurrences as Mamba draws them at first (rates of
/// 1 to 16, steps of 0.001 to 0.1).
fn draw(name: &str) -> Normal {
    let short = name.trim_end_matches(".weight").rsplit('.').next().unwrap_or_default();
    match short {
        "A_log" => Normal { mean: 1.9, std: 0.5 },
        "dt_bias" => Normal { mean: -4.6, std: 1.0 },
        _ if short.contains("norm")
            || ["D", "layer_scalar", "scale", "per_expert_scale"].contains(&short) =>
        {
            NORM
        }
        _ => WEIGHT,
    }
}

impl Shape {
    /// The whole `config.json`. `relu`: gates are ReLU, and not what they are in the model.
    pub(super) fn config(&self, relu: bool) -> Value {
        let mut config = self.config.clone();
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
}
