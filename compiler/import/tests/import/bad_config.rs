//! Tests of configs that are wrong, do not fit the weights, or need unsupported features.

use super::support::{Folder, Tensor, refusal};
use serde_json::{Value, json};
use std::fs;

/// The error after setting one key of a golden config.
fn set(family: &str, key: &str, value: impl Into<Value>) -> String {
    refusal(Folder::golden(family).set(key, value).write().path())
}

/// The error after removing one key of a golden config.
fn cut(family: &str, key: &str) -> String {
    let mut folder = Folder::golden(family);
    folder.cut(key).unwrap();
    refusal(folder.write().path())
}

#[test]
fn no_config() {
    let dir = tempfile::tempdir().unwrap();
    insta::assert_snapshot!(refusal(dir.path()), @"
    Input: `DIR` is not a checkpoint
      hint: give the folder of a Hugging Face checkpoint, with its `config.json` and its weights as safetensors, or a GGUF file (the first of a split one)
    ");
    fs::write(dir.path().join("config.json"), "{").unwrap();
    insta::assert_snapshot!(refusal(dir.path()), @"
    Input: `config.json` is not valid JSON
      because EOF while parsing an object at line 1 column 1
      hint: the file may be that of another model, or damaged; download it again
    ");
    fs::write(dir.path().join("config.json"), "[]").unwrap();
    insta::assert_snapshot!(refusal(dir.path()), @"
    Input: `config.json` is not a JSON object
      hint: the file may be that of another model, or damaged; download it again
    ");
    fs::write(dir.path().join("config.json"), "{}").unwrap();
    insta::assert_snapshot!(refusal(dir.path()), @"
    Input: `architectures` in `config.json` and `model_type` are both absent
      hint: the file does not describe a language model; download it again
    ");
}

#[test]
fn unknown_architecture() {
    insta::assert_snapshot!(set("olmoe", "architectures", json!(["GemmaForCausalLM"])), @r#"
    Limit: `architectures` in `config.json` is "GemmaForCausalLM", which is not supported
      hint: supported: MixtralForCausalLM, Qwen2MoeForCausalLM, Qwen3MoeForCausalLM, Qwen3NextForCausalLM, Qwen3_5MoeForCausalLM, Qwen3_5MoeForConditionalGeneration, AfmoeForCausalLM, Cohere2MoeForCausalLM, Dots1ForCausalLM, Ernie4_5_MoeForCausalLM, ExaoneMoeForCausalLM, FlexOlmoForCausalLM, Glm4MoeLiteForCausalLM, GraniteMoeForCausalLM, GraniteMoeSharedForCausalLM, HunYuanMoEV1ForCausalLM, HYV3ForCausalLM, LagunaForCausalLM, Lfm2MoeForCausalLM, MellumForCausalLM, MiMoV2FlashForCausalLM, MiniMaxM2ForCausalLM, SolarOpenForCausalLM, Mistral4ForCausalLM, Mistral3ForConditionalGeneration, Llama4ForCausalLM, Llama4ForConditionalGeneration, Step3p7ForConditionalGeneration, Step3p5ForCausalLM, LongcatFlashForCausalLM, Gemma4ForCausalLM, Gemma4ForConditionalGeneration, GraniteMoeHybridForCausalLM, KimiLinearForCausalLM, BailingHybridForCausalLM, BailingMoeV3ForCausalLM, NemotronHForCausalLM, JambaForCausalLM, OlmoeForCausalLM, DeepseekV2ForCausalLM, DeepseekV3ForCausalLM, Glm4MoeForCausalLM, PhimoeForCausalLM, PhiMoEForCausalLM, GptOssForCausalLM, SmallThinkerForCausalLM, SmallthinkerForCausalLM, TurboSparseMixtralForCausalLM, BambooForCausalLM, SparseLlamaForCausalLM
    "#);
    let mut folder = Folder::golden("olmoe").set("model_type", "gemma");
    folder.cut("architectures");
    insta::assert_snapshot!(refusal(folder.write().path()), @r#"
    Limit: `model_type` in `config.json` is "gemma", which is not supported
      hint: supported: mixtral, qwen2_moe, qwen3_moe, qwen3_next, qwen3_5_moe, afmoe, cohere2_moe, dots1, ernie4_5_moe, exaone_moe, flex_olmo, glm4_moe_lite, granitemoe, granitemoeshared, hunyuan_v1_moe, hy_v3, laguna, lfm2_moe, mellum, mimo_v2_flash, minimax_m2, solar_open, mistral4, llama4, step3p7, longcat_flash, gemma4, granitemoehybrid, kimi_linear, bailing_hybrid, nemotron_h, jamba, olmoe, deepseek_v2, deepseek_v3, glm4_moe, phimoe, gpt_oss, smallthinker, turbosparsemixtral, bamboo, sparsellama
    "#);
}

#[test]
fn missing_keys() {
    insta::assert_snapshot!(cut("olmoe", "hidden_size"), @"
    Input: `config.json` has no `hidden_size`
      hint: the file may be that of another model, or damaged; download it again
    ");
    insta::assert_snapshot!(cut("qwen2_moe", "num_experts"), @"
    Input: `config.json` has none of `num_experts`, `num_local_experts`, `n_routed_experts`, `moe_num_experts`
      hint: the file may be that of another model, or damaged; download it again
    ");
    insta::assert_snapshot!(cut("deepseek_v2", "kv_lora_rank"), @"
    Input: `config.json` has no `kv_lora_rank`
      hint: the file may be that of another model, or damaged; download it again
    ");
    insta::assert_snapshot!(cut("gpt_oss", "rope_parameters"), @"
    Input: `rope_scaling` in `config.json` and `rope_parameters` are both absent
      hint: the file may be damaged; download it again
    ");
}

#[test]
fn values_of_the_wrong_kind() {
    insta::assert_snapshot!(set("olmoe", "hidden_size", "64"), @r#"Input: `hidden_size` in `config.json` is "64", expected a whole number"#);
    insta::assert_snapshot!(set("olmoe", "hidden_size", 0), @"Input: `hidden_size` in `config.json` is 0, expected a whole number of at least 1");
    insta::assert_snapshot!(set("olmoe", "hidden_size", -64), @"Input: `hidden_size` in `config.json` is -64, expected a whole number");
    insta::assert_snapshot!(set("olmoe", "num_hidden_layers", 1.5), @"Input: `num_hidden_layers` in `config.json` is 1.5, expected a whole number");
    insta::assert_snapshot!(set("olmoe", "vocab_size", u64::MAX), @"Input: `vocab_size` in `config.json` is 18446744073709551615, expected at most 268435456");
    insta::assert_snapshot!(set("olmoe", "norm_topk_prob", 1), @"Input: `norm_topk_prob` in `config.json` is 1, expected true or false");
    insta::assert_snapshot!(set("olmoe", "rms_norm_eps", "small"), @r#"Input: `rms_norm_eps` in `config.json` is "small", expected a number"#);
    insta::assert_snapshot!(set("olmoe", "clip_qkv", -1.0), @"Input: `clip_qkv` in `config.json` is -1.0, expected a number above 0");
    insta::assert_snapshot!(set("olmoe", "rope_parameters", 5), @"Input: `rope_parameters` in `config.json` is 5, expected an object");
    insta::assert_snapshot!(set("olmoe", "eos_token_id", "end"), @r#"Input: `eos_token_id` in `config.json` is "end", expected a token id or a list of them"#);
    insta::assert_snapshot!(set("qwen2_moe", "layer_types", json!([1, 2])), @"Input: `layer_types` in `config.json` is [1,2], expected a list of strings");
    insta::assert_snapshot!(set("olmoe", "architectures", "x".repeat(200)), @r#"Input: `architectures` in `config.json` is "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx…, expected a list of strings"#);
}

#[test]
fn unsupported_activations_and_routing_methods_are_refused() {
    insta::assert_snapshot!(set("olmoe", "hidden_act", "xielu"), @r#"
    Limit: `hidden_act` in `config.json` is "xielu", which is not supported
      hint: supported: silu, swish, gelu, gelu_new, gelu_pytorch_tanh, relu, sigmoid, relu2
    "#);
    insta::assert_snapshot!(set("deepseek_v2", "topk_method", "noaux_tc"), @r#"
    Limit: `topk_method` in `config.json` is "noaux_tc", which is not supported
      hint: supported: greedy, group_limited_greedy
    "#);
    insta::assert_snapshot!(set("deepseek_v2", "scoring_func", "sigmoid"), @r#"
    Limit: `scoring_func` in `config.json` is "sigmoid", which is not supported
      hint: supported: softmax
    "#);
    insta::assert_snapshot!(set("deepseek_v2", "norm_topk_prob", true), @"
    Limit: `norm_topk_prob` in `config.json` is true, which is not supported
      hint: supported: false
    ");
    insta::assert_snapshot!(set("deepseek_v3", "topk_method", "greedy"), @r#"
    Limit: `topk_method` in `config.json` is "greedy", which is not supported
      hint: supported: noaux_tc
    "#);
    insta::assert_snapshot!(set("glm4_moe", "scoring_func", "softmax"), @r#"
    Limit: `scoring_func` in `config.json` is "softmax", which is not supported
      hint: supported: sigmoid
    "#);
    insta::assert_snapshot!(set("phimoe", "num_experts_per_tok", 3), @"
    Limit: `num_experts_per_tok` in `config.json` is 3, which is not supported
      hint: supported: 2
    ");
}

#[test]
fn unsupported_quantisations_are_refused() {
    let errors = [
        json!({"quant_method": "bitsandbytes", "load_in_4bit": true}),
        json!({"quant_method": "fp8", "fmt": "e5m2"}),
        json!({"quant_method": "fp8", "weight_block_size": [64, 0]}),
        json!({"quant_method": "awq", "bits": 3, "group_size": 128}),
        json!({"quant_method": "awq", "bits": 4, "version": "gemv"}),
        json!({"quant_method": "gptq", "bits": 3, "group_size": 128}),
        json!({"quant_method": "gptq", "bits": 4, "group_size": 0}),
        json!({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}),
        json!({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*mlp.*": {}}}),
        json!({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}),
        packed(json!({"num_bits": 3, "strategy": "channel"})),
        packed(json!({"num_bits": 4, "strategy": "group"})),
        packed(json!({"num_bits": 4, "type": "float", "strategy": "channel"})),
        json!({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}),
        json!({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"u": {}}}}),
        json!({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {}, "format": "marlin-24"}}}),
    ]
    .map(|config| set("olmoe", "quantization_config", config));
    insta::assert_snapshot!(errors.join("\n"));
}

/// A configuration of compressed-tensors with one group.
fn packed(weights: Value) -> Value {
    let groups = json!({"group_0": {"targets": ["Linear"], "weights": weights}});
    json!({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups})
}

#[test]
fn unsupported_rope_types_are_refused() {
    insta::assert_snapshot!(set("olmoe", "rope_scaling", json!({"type": "dynamic", "factor": 2.0})), @r#"
    Limit: `rope_scaling.type` in `config.json` is "dynamic", which is not supported
      hint: supported: default, linear, yarn, longrope, llama3, dynamic with `alpha`, proportional
    "#);
    insta::assert_snapshot!(set("olmoe", "rope_parameters", json!({"rope_type": "mrope"})), @r#"
    Limit: `rope_parameters.rope_type` in `config.json` is "mrope", which is not supported
      hint: supported: default, linear, yarn, longrope, llama3, dynamic, proportional
    "#);
    let nested =
        json!({"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}});
    insta::assert_snapshot!(set("olmoe", "rope_parameters", nested), @"Limit: `rope_parameters.full_attention` in `config.json` differs by kind of layer, which is not supported");
    insta::assert_snapshot!(set("glm4_moe", "rope_parameters", json!({"partial_rotary_factor": 0.2})), @"
    Limit: 3.2 of 16 channels would be rotated in each head, expected an even number
      because `config.json` sets it with `head_dim` and `partial_rotary_factor`
    ");
    insta::assert_snapshot!(set("olmoe", "rope_parameters", json!({"rope_theta": 1.0})), @"Input: `rope_theta` in `config.json` is 1, expected more than 1");
    let factors = json!({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]});
    insta::assert_snapshot!(set("phimoe", "rope_parameters", factors), @"Input: `rope_parameters.short_factor` in `config.json` has 1 numbers, expected 8 above 0");
}

#[test]
fn tensor_shapes_that_contradict_the_config_are_refused() {
    insta::assert_snapshot!(set("qwen3_moe", "head_dim", 16), @"
    Input: tensor `model.layers.0.self_attn.q_norm.weight` in `model.safetensors` has shape [32], but `config.json` requires [16]
      because axis 0 is 32, which `head_dim` sets to 16
      hint: `config.json` and the weights may be of different models; download both again
    ");
    insta::assert_snapshot!(set("olmoe", "vocab_size", 321), @"
    Input: tensor `model.embed_tokens.weight` in `model.safetensors` has shape [320, 64], but `config.json` requires [321, 64]
      because axis 0 is 320, which `vocab_size` sets to 321
      hint: `config.json` and the weights may be of different models; download both again
    ");
    insta::assert_snapshot!(set("qwen2_moe", "shared_expert_intermediate_size", 65), @"
    Input: tensor `model.layers.0.mlp.shared_expert.gate_proj.weight` in `model.safetensors` has shape [64, 64], but `config.json` requires [65, 64]
      because axis 0 is 64, which `shared_expert_intermediate_size` sets to 65
      hint: `config.json` and the weights may be of different models; download both again
    ");
    insta::assert_snapshot!(set("deepseek_v2", "v_head_dim", 8), @"
    Input: tensor `model.layers.0.self_attn.kv_b_proj.weight` in `model.safetensors` has shape [128, 32], but `config.json` requires [96, 32]
      because axis 0 is 128, which `num_attention_heads` · (`qk_nope_head_dim` + `v_head_dim`) sets to 96
      hint: `config.json` and the weights may be of different models; download both again
    ");
    insta::assert_snapshot!(set("gpt_oss", "num_local_experts", 4), @"
    Input: tensor `model.layers.0.mlp.router.weight` in `model.safetensors` has shape [8, 64], but `config.json` requires [4, 64]
      because axis 0 is 8, which `num_local_experts` sets to 4
      hint: `config.json` and the weights may be of different models; download both again
    ");
    insta::assert_snapshot!(set("mixtral", "num_attention_heads", 6), @"
    Input: tensor `model.layers.0.self_attn.q_proj.weight` of shape [64, 64] does not divide into 6 heads
      because `num_attention_heads` in `config.json` gives the heads, and there is no `head_dim`
    ");
    insta::assert_snapshot!(set("mixtral", "num_key_value_heads", 3), @"Input: `num_attention_heads` in `config.json` is 4, not a multiple of `num_key_value_heads`, which is 3");
    let mut folder = Folder::golden("olmoe");
    folder.tensors.insert("model.norm.weight".into(), Tensor::f32(&[1, 64], &[1.0; 64]));
    insta::assert_snapshot!(refusal(folder.write().path()), @"
    Input: tensor `model.norm.weight` in `model.safetensors` has shape [1, 64], but `config.json` requires [64]
      because it has 2 axes, expected 1
      hint: `config.json` and the weights may be of different models; download both again
    ");
}

#[test]
fn missing_tensors() {
    insta::assert_snapshot!(set("qwen3_moe", "num_local_experts", 17), @"
    Input: `model.safetensors` has no tensor `model.layers.0.mlp.experts.16.gate_proj.weight`
      hint: the download may be incomplete, or `config.json` may be that of another model
    ");
    insta::assert_snapshot!(set("olmoe", "num_hidden_layers", 200_000_000), @"
    Input: `model.safetensors` has no tensor `model.layers.2.mlp.experts.0.gate_proj.weight`
      hint: the download may be incomplete, or `config.json` may be that of another model
    ");
    insta::assert_snapshot!(set("glm4_moe", "use_qk_norm", true), @"
    Input: `model.safetensors` has no tensor `model.layers.0.self_attn.q_norm.weight`
      hint: the download may be incomplete, or `config.json` may be that of another model
    ");
    let dir = {
        let mut folder = Folder::golden("deepseek_v3");
        folder.take("model.layers.2.mlp.gate.e_score_correction_bias");
        folder.write_sharded()
    };
    insta::assert_snapshot!(refusal(dir.path()), @"
    Input: `model.safetensors.index.json` has no tensor `model.layers.2.mlp.gate.e_score_correction_bias`
      hint: the download may be incomplete, or `config.json` may be that of another model
    ");
}

#[test]
fn inconsistent_delta_rule_layers_are_refused() {
    let types = |of: &str| json!(["linear_attention", of, "linear_attention", "full_attention"]);
    let mut errors = vec![
        set("qwen3_next", "layer_types", types("sliding_attention")),
        set("qwen3_next", "layer_types", types("full_attention")),
        set("qwen3_next", "linear_num_value_heads", 3),
        set("qwen3_next", "linear_num_key_heads", 4),
        set("qwen3_next", "linear_conv_kernel_dim", 3),
        set("qwen3_next", "linear_value_head_dim", 32),
        set("qwen3_next", "linear_key_head_dim", 15),
        cut("qwen3_next", "linear_num_key_heads"),
        set("qwen3_5_moe_published", "quantization_config", json!({"quant_method": "hqq"})),
    ];
    for (family, at, names) in [
        (
            "qwen3_next",
            "model.layers.1.linear_attn",
            ["A_log", "dt_bias", "conv1d.weight", "in_proj_ba.weight"],
        ),
        (
            "qwen3_5_moe_published",
            "model.language_model.layers.1.linear_attn",
            ["in_proj_qkv.weight", "in_proj_z.weight", "norm.weight", "out_proj.weight"],
        ),
    ] {
        for name in names {
            let mut folder = Folder::golden(family);
            folder.take(&format!("{at}.{name}"));
            errors.push(refusal(folder.write().path()));
        }
    }
    let mut folder = Folder::golden("qwen3_next");
    folder.tensors.insert("model.layers.1.linear_attn.A_log".into(), Tensor::f32(&[4, 1], &[0.0; 4]));
    errors.push(refusal(folder.write().path()));
    insta::assert_snapshot!(errors.join("\n"));
}

#[test]
fn inconsistent_mamba_layers_are_refused() {
    let short = json!(["linear_attention", "sliding_attention"]);
    let mut errors = vec![
        set("nemotron_h", "layers_block_type", short),
        set("nemotron_h", "hybrid_override_pattern", "MEX"),
        set("nemotron_h", "hybrid_override_pattern", "MXMMMMMM"),
        set("nemotron_h", "num_hidden_layers", 8),
        cut("nemotron_h", "layers_block_type"),
        set("nemotron_h", "mlp_hidden_act", "xielu"),
        set("nemotron_h", "mlp_hidden_act", "silu"),
        set("nemotron_h", "mamba_hidden_act", "relu"),
        set("nemotron_h", "time_step_limit", json!([0.001, 0.1])),
        set("nemotron_h", "conv_kernel", 1),
        set("nemotron_h", "ssm_state_size", 8),
        set("nemotron_h", "moe_latent_size", 32),
        set("nemotron_h", "moe_shared_expert_intermediate_size", 71),
        cut("nemotron_h", "moe_shared_expert_intermediate_size"),
        set("nemotron_h", "use_bias", true),
        set("jamba", "attn_layer_offset", 4),
        set("jamba", "attn_layer_offset", 1),
        set("jamba", "expert_layer_period", 1),
        set("jamba", "mamba_dt_rank", "some"),
        set("jamba", "mamba_dt_rank", 5),
        set("jamba", "mamba_d_state", 8),
        set("jamba", "mamba_d_conv", 3),
        set("jamba", "mamba_expand", 4),
        cut("jamba", "mamba_d_state"),
    ];
    for (family, at, names) in [
        (
            "nemotron_h",
            "backbone.layers.4.mixer",
            &["A_log", "D", "dt_bias", "conv1d.bias", "norm.weight"][..],
        ),
        (
            "nemotron_h",
            "backbone.layers.3.mixer",
            &["experts.7.up_proj.weight", "gate.e_score_correction_bias"],
        ),
        (
            "jamba",
            "model.layers.1.mamba",
            &["A_log", "D", "conv1d.bias", "x_proj.weight", "dt_proj.bias", "b_layernorm.weight"],
        ),
    ] {
        for name in names {
            let mut folder = Folder::golden(family);
            folder.take(&format!("{at}.{name}"));
            errors.push(refusal(folder.write().path()));
        }
    }
    let mut folder = Folder::golden("jamba");
    folder.tensors.insert("model.layers.1.mamba.A_log".into(), Tensor::f32(&[128], &[0.0; 128]));
    errors.push(refusal(folder.write().path()));
    // Jamba's rank has a default, which depends on its width.
    errors.push(set("jamba", "mamba_dt_rank", "auto"));
    insta::assert_snapshot!(errors.join("\n"));
}

#[test]
fn unsupported_mistral4_llama4_and_step3p7_keys_are_refused() {
    let text = |key: &str, value: Value| {
        let mut folder = Folder::golden("step3p7");
        folder.config["text_config"][key] = value;
        refusal(folder.write().path())
    };
    let rope = |key: &str, value: Value| {
        let mut folder = Folder::golden("mistral4");
        folder.config["rope_parameters"][key] = value;
        refusal(folder.write().path())
    };
    let theta = json!([5e6, 1e4, 2e4, 5e6]);
    let errors = [
        set("mistral4", "model_type", "mistral"),
        set("mistral4", "n_group", 3),
        set("mistral4", "num_experts_per_tok", 9),
        rope("partial_rotary_factor", json!(0.5)),
        rope("original_max_position_embeddings", Value::Null),
        set("llama4", "num_experts_per_tok", 2),
        set("llama4", "no_rope_layers", json!([1, 0])),
        set("llama4", "layer_types", json!(vec!["sliding_attention"; 4])),
        set("llama4", "floor_scale", 0),
        set("llama4", "attention_chunk_size", 0),
        set("llama4", "attn_temperature_tuning", "on"),
        set("llama4", "intermediate_size_mlp", 95),
        set("llama4", "use_qk_norm", 1),
        text("hidden_act", json!("gelu")),
        text("swiglu_limits", json!([0, 0])),
        text("swiglu_limits_shared", json!([0, 0, -1, 0.5])),
        text("moe_router_activation", json!("softmax")),
        text("use_moe_router_bias", json!(false)),
        text("use_rope_layers", json!([0, 1, 1, 1])),
        text("moe_layers_enum", json!("1,x")),
        text("num_sliding_attention_heads", json!(5)),
        text("share_expert_dim", Value::Null),
        text("rope_theta", theta),
    ];
    insta::assert_snapshot!(errors.join("\n"));
}

#[test]
fn unsupported_longcat_flash_keys_are_refused() {
    let errors = [
        set("longcat_flash", "zero_expert_type", "drop"),
        set("longcat_flash", "router_bias", true),
        set("longcat_flash", "norm_topk_prob", true),
        set("longcat_flash", "attention_method", "MHA"),
        set("longcat_flash", "zero_expert_num", 5),
        set("longcat_flash", "moe_topk", 9),
        cut("longcat_flash", "ffn_hidden_size"),
    ];
    insta::assert_snapshot!(errors.join("\n"));
}

#[test]
fn inconsistent_routing_keys_are_refused() {
    insta::assert_snapshot!(set("olmoe", "num_experts_per_tok", 9), @"Input: `num_experts_per_tok` in `config.json` is 9, more than `num_experts`, which is 8");
    insta::assert_snapshot!(set("deepseek_v3", "n_group", 3), @"Input: `n_group` 3 and `topk_group` 1 in `config.json` do not fit `n_routed_experts` 8 and `num_experts_per_tok` 2");
    insta::assert_snapshot!(set("deepseek_v3", "topk_group", 3), @"Input: `n_group` 2 and `topk_group` 3 in `config.json` do not fit `n_routed_experts` 8 and `num_experts_per_tok` 2");
    let groups = Folder::golden("deepseek_v2").set("topk_method", "group_limited_greedy").set("n_group", 8);
    insta::assert_snapshot!(refusal(groups.write().path()), @"Input: `n_group` 8 and `topk_group` 1 in `config.json` do not fit `n_routed_experts` 8 and `num_experts_per_tok` 3");
}

#[test]
fn inconsistent_smallthinker_layouts_are_refused() {
    insta::assert_snapshot!(set("smallthinker_21b", "rope_layout", json!([0, 1])), @"
    Input: `rope_layout` in `config.json` has 2 entries, but the model has 3 layers
      hint: the file may be that of another model, or damaged; download it again
    ");
    insta::assert_snapshot!(set("smallthinker_21b", "sliding_window_layout", json!([0, 1, 2])), @"Input: `sliding_window_layout` in `config.json` is [0,1,2], expected a list of 0 and 1");
    insta::assert_snapshot!(set("smallthinker_21b", "moe_layer_layout", json!([1, 0, 1])), @"
    Limit: `moe_layer_layout` in `config.json` has no experts in layer 1
      because no published checkpoint says how the tensors of such a layer are called
      hint: supported: experts in every layer
    ");
    insta::assert_snapshot!(cut("smallthinker_21b", "moe_num_primary_experts"), @"
    Input: `config.json` has none of `moe_num_primary_experts`, `num_experts`
      hint: the file may be that of another model, or damaged; download it again
    ");
    insta::assert_snapshot!(set("smallthinker_4b", "moe_num_active_primary_experts", 9), @"Input: `moe_num_active_primary_experts` in `config.json` is 9, more than `moe_num_primary_experts`, which is 8");
}

#[test]
fn unsupported_smallthinker_keys_are_refused() {
    insta::assert_snapshot!(set("smallthinker_4b", "use_qk_norm", true), @"
    Limit: `use_qk_norm` in `config.json` is true, which is not supported
      hint: supported: false
    ");
    insta::assert_snapshot!(set("smallthinker_4b", "moe_enable_early_router", false), @"
    Limit: `moe_enable_early_router` in `config.json` is false, which is not supported
      hint: supported: true
    ");
    insta::assert_snapshot!(set("smallthinker_4b", "moe_shared_primary_experts", 1), @"
    Limit: `moe_shared_primary_experts` in `config.json` is 1, which is not supported
      hint: supported: 0
    ");
}

#[test]
fn activations_of_families_with_relu() {
    insta::assert_snapshot!(set("turbosparse_mixtral", "hidden_act", "silu"), @r#"
    Limit: `hidden_act` in `config.json` is "silu", which is not supported
      hint: supported: relu
    "#);
    insta::assert_snapshot!(set("prosparse", "hidden_act", "shiftrelu"), @r#"
    Limit: `hidden_act` in `config.json` is "shiftrelu", which is not supported
      hint: supported: fatrelu, relu
    "#);
    insta::assert_snapshot!(set("prosparse", "hidden_act_param", -0.5), @"Input: `hidden_act_param` in `config.json` is -0.5, expected a number of at least 0");
    insta::assert_snapshot!(cut("prosparse", "hidden_act_param"), @"
    Input: `config.json` has no `hidden_act_param`
      hint: the file may be that of another model, or damaged; download it again
    ");
}

/// IBM's hybrid with a similar name is another model.
#[test]
fn bamba_is_not_mistaken_for_bamboo() {
    let error = set("bamboo", "architectures", json!(["BambaForCausalLM"]));
    assert!(
        error.starts_with(
            "Limit: `architectures` in `config.json` is \"BambaForCausalLM\", which is not supported"
        ),
        "{error}"
    );
}

/// Sets every key of every golden config to invalid values: no import panics.
#[test]
fn invalid_values_in_any_key_do_not_panic() {
    let families = [
        "deepseek_v2",
        "deepseek_v3",
        "glm4_moe",
        "gpt_oss",
        "jamba",
        "llama4",
        "longcat_flash",
        "mistral4",
        "nemotron_h",
        "phimoe",
        "qwen2_moe",
        "qwen3_next",
        "smallthinker_21b",
        "step3p7",
        "turbosparse_mixtral",
        "bamboo",
        "prosparse",
    ];
    for family in families {
        let mut folder = Folder::golden(family);
        if let Some(text) = folder.cut("text_config") {
            folder.config = text;
            folder = folder.set("architectures", json!(["Step3p5ForCausalLM"]));
        }
        let dir = folder.write();
        for key in folder.config.as_object().unwrap().keys() {
            for value in [
                json!(0),
                json!(1),
                json!(7),
                json!(1u64 << 28),
                json!(1e300),
                json!("x"),
                json!([]),
                json!({}),
            ] {
                let config = folder.clone().set(key, value).config;
                fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
                refusal(dir.path());
            }
        }
    }
}
