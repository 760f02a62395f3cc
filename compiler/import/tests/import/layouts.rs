//! Tests of the many layouts in which one checkpoint may be published: the logits are equal.

use super::support::{Folder, Tensor, distance, expected, golden, logits, refusal, shard, spec, write_index};
use moec_testing::checkpoints::VERSION_5;
use safetensors::tensor::Dtype;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// Compares the logits of a changed golden checkpoint with those of transformers.
fn check(family: &str, dir: &Path) {
    let (ids, want) = expected(&golden("hf").join(family));
    let off = distance(&logits(dir, &ids, 20), &want);
    assert!(off < 1e-4, "{family}: logits differ by {off}");
}

/// Rewrites a config in the spelling of transformers 4.
fn version_4(mut folder: Folder, family: &str) -> Folder {
    let experts = ["num_experts", "num_local_experts", "n_routed_experts"];
    let n = experts.iter().find_map(|key| folder.cut(key)).unwrap();
    let key = match family {
        "mixtral" | "phimoe" | "gpt_oss" => "num_local_experts",
        "deepseek_v2" | "deepseek_v3" | "glm4_moe" => "n_routed_experts",
        _ => "num_experts",
    };
    folder.config[key] = n;
    folder.config["torch_dtype"] = folder.cut("dtype").unwrap();
    folder.cut("transformers_version");
    let Some(Value::Object(mut rope)) = folder.cut("rope_parameters") else { panic!("no rope") };
    folder.config["rope_theta"] = rope.shift_remove("rope_theta").unwrap();
    if let Some(partial) = rope.shift_remove("partial_rotary_factor") {
        folder.config["partial_rotary_factor"] = partial;
    }
    let kind = rope.shift_remove("rope_type").unwrap();
    folder.config["rope_scaling"] = if kind == "default" {
        Value::Null
    } else {
        rope.insert("type".to_owned(), kind);
        rope.into()
    };
    folder
}

#[test]
fn the_spelling_of_transformers_4() {
    for family in VERSION_5 {
        let folder = version_4(Folder::golden(family), family);
        assert!(!folder.config.to_string().contains("rope_parameters"));
        check(family, folder.write().path());
    }
}

#[test]
fn keys_missing_in_older_configs_have_defaults() {
    for (family, keys) in [
        ("mixtral", ["head_dim", "sliding_window"].as_slice()),
        (
            "qwen2_moe",
            &["qkv_bias", "layer_types", "mlp_only_layers", "decoder_sparse_step", "norm_topk_prob"],
        ),
        ("qwen3_moe", &["head_dim", "architectures"]),
        (
            "qwen3_next",
            &["layer_types", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", "attention_bias"],
        ),
        ("qwen3_5_moe", &["layer_types", "attention_bias", "hidden_act"]),
        ("deepseek_v3", &["head_dim", "qk_head_dim", "rope_interleave"]),
        ("glm4_moe", &["use_qk_norm", "first_k_dense_replace", "head_dim"]),
        ("gpt_oss", &["layer_types", "swiglu_alpha", "swiglu_limit", "head_dim", "attention_bias"]),
        ("phimoe", &["router_jitter_noise"]),
    ] {
        let mut folder = Folder::golden(family);
        for key in keys {
            folder.cut(key);
        }
        check(family, folder.write().path());
    }
}

/// Layers with attention follow from a list or from an interval; the rotated share of a head has a default.
#[test]
fn layers_of_the_delta_rule() {
    for (family, types) in [("qwen3_next", true), ("qwen3_next", false), ("qwen3_5_moe", false)] {
        let mut folder = Folder::golden(family).set("full_attention_interval", if types { 2 } else { 4 });
        if !types {
            folder.cut("layer_types").unwrap();
        }
        let rope = folder.config["rope_parameters"].as_object_mut().unwrap();
        rope.shift_remove("partial_rotary_factor").unwrap();
        check(family, folder.write().path());
    }
    // With another interval other layers have attention, whose tensors are not in the file.
    let mut folder = Folder::golden("qwen3_next").set("full_attention_interval", 2);
    folder.cut("layer_types").unwrap();
    let error = refusal(folder.write().path());
    assert!(error.contains("no tensor `model.layers.1.self_attn."), "{error}");
}

#[test]
fn smallthinker_in_earlier_and_later_spelling() {
    for family in ["smallthinker_4b", "smallthinker_21b"] {
        let mut folder = Folder::golden(family).set("architectures", json!(["SmallthinkerForCausalLM"]));
        for (key, earlier) in [
            ("moe_num_primary_experts", "num_experts"),
            ("moe_num_active_primary_experts", "num_experts_per_tok"),
            ("moe_ffn_hidden_size", "moe_intermediate_size"),
            ("sliding_window_size", "sliding_window"),
        ] {
            folder.config[earlier] = folder.cut(key).unwrap();
        }
        let layers = folder.config["num_hidden_layers"].as_u64().unwrap() as usize;
        folder = folder.set("moe_layer_layout", json!(vec![1; layers])).set("moe_enable_early_router", true);
        check(family, folder.write().path());
        let theta = folder.cut("rope_theta").unwrap();
        let folder = folder.set("rope_parameters", json!({"rope_type": "default", "rope_theta": theta}));
        check(family, folder.write().path());
    }
    // Without these lists every layer is rotated and none has a window; the embedding table is the head.
    let mut folder = Folder::golden("smallthinker_4b");
    for key in ["rope_layout", "sliding_window_layout", "tie_word_embeddings", "head_dim", "norm_topk_prob"] {
        folder.cut(key).unwrap();
    }
    check("smallthinker_4b", folder.write().path());
}

/// The differences between SmallThinker's two published shapes change the logits.
#[test]
fn smallthinker_rope_window_and_router_keys_affect_logits() {
    for (key, value) in [
        ("rope_layout", json!([1, 1, 0])),
        ("rope_layout", json!([0, 1, 1])),
        ("sliding_window_layout", json!([1, 1, 1])),
        ("sliding_window_layout", json!([0, 1, 0])),
        ("sliding_window_size", json!(15)),
        ("moe_primary_router_apply_softmax", json!(false)),
    ] {
        let dir = Folder::golden("smallthinker_21b").set(key, value).write();
        let (ids, want) = expected(&golden("hf/smallthinker_21b"));
        let off = distance(&logits(dir.path(), &ids, 20), &want);
        assert!(off > 1e-2, "{key}: logits differ by {off}");
    }
}

#[test]
fn neuron_predictors_are_skipped_with_a_warning() {
    for (family, at) in [("bamboo", "mlp"), ("turbosparse_mixtral", "block_sparse_moe.experts.3")] {
        let mut folder = Folder::golden(family);
        for part in ["fc1", "fc2"] {
            let name = format!("model.layers.1.{at}.predictor.{part}.weight");
            folder.tensors.insert(name, Tensor::f32(&[2, 2], &[1.0; 4]));
        }
        let dir = folder.write();
        check(family, dir.path());
        assert_eq!(
            spec(dir.path()).warnings,
            [format!(
                "predictors of neurons (2 tensors, such as `model.layers.1.{at}.predictor.fc1.weight`) are not used: every \
                 neuron is computed"
            )]
        );
    }
}

#[test]
fn model_type_alone_selects_the_family() {
    let mut folder = Folder::golden("olmoe");
    folder.cut("architectures");
    assert_eq!(spec(folder.write().path()).family, "olmoe");
}

#[test]
fn sharded() {
    for family in ["mixtral", "gpt_oss", "deepseek_v3"] {
        check(family, Folder::golden(family).write_sharded().path());
    }
}

#[test]
fn shards_in_a_subfolder() {
    let folder = Folder::golden("olmoe");
    let dir = folder.write_sharded();
    fs::create_dir(dir.path().join("weights")).unwrap();
    let mut map = serde_json::Map::new();
    for i in 0..2 {
        fs::rename(dir.path().join(shard(i)), dir.path().join("weights").join(shard(i))).unwrap();
    }
    for (i, name) in folder.tensors.keys().enumerate() {
        map.insert(name.clone(), format!("weights/{}", shard(i % 2)).into());
    }
    write_index(dir.path(), map.into());
    check("olmoe", dir.path());
}

/// The download cache of Hugging Face links each file of a snapshot to a blob.
#[cfg(unix)]
#[test]
fn the_cache_of_hugging_face() {
    let flat = Folder::golden("olmoe").write_sharded();
    let cache = tempfile::tempdir().unwrap();
    let (blobs, snapshot) = (cache.path().join("blobs"), cache.path().join("snapshots/0123abcd"));
    fs::create_dir_all(&blobs).unwrap();
    fs::create_dir_all(&snapshot).unwrap();
    for (i, entry) in fs::read_dir(flat.path()).unwrap().enumerate() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), blobs.join(i.to_string())).unwrap();
        std::os::unix::fs::symlink(format!("../../blobs/{i}"), snapshot.join(entry.file_name())).unwrap();
    }
    check("olmoe", &snapshot);
}

#[test]
fn other_dtypes() {
    for dtype in [Dtype::F32, Dtype::F16] {
        let mut folder = Folder::golden("qwen2_moe");
        for t in folder.tensors.values_mut() {
            let numbers = t.numbers();
            *t = Tensor::f32(&t.shape, &numbers);
            if dtype == Dtype::F16 {
                t.dtype = dtype;
                t.data = numbers.iter().flat_map(|x| half::f16::from_f32(*x).to_le_bytes()).collect();
            }
        }
        let dir = folder.write();
        let (ids, want) = expected(&golden("hf/qwen2_moe"));
        let off = distance(&logits(dir.path(), &ids, 20), &want);
        // The numbers of bf16 are those of f32, but small ones lose digits in f16.
        let bound = if dtype == Dtype::F16 { 2e-3 } else { 1e-4 };
        assert!(off < bound, "{dtype}: logits differ by {off}");
    }
}

/// Fuses experts with separate tensors: `[experts, 2·inner, hidden]` and `[experts, hidden, inner]`.
fn fuse(folder: &mut Folder, from: &str, to: &str, parts: [&str; 3], experts: usize, exchanged: bool) {
    let mut names: Vec<String> = folder.tensors.keys().filter(|n| n.contains(from)).cloned().collect();
    names.retain(|n| n.contains(".0.") && n.ends_with(&format!("experts.0.{}.weight", parts[0])));
    for name in names {
        let at = name.split(&format!(".0.{}", parts[0])).next().unwrap().to_owned();
        let mut fused = [Vec::new(), Vec::new()];
        let mut shapes = [Vec::new(), Vec::new()];
        for e in 0..experts {
            let [gate, up, down] = parts.map(|p| folder.take(&format!("{at}.{e}.{p}.weight")));
            let both = Tensor {
                shape: vec![gate.shape[0] * 2, gate.shape[1]],
                data: [gate.data, up.data].concat(),
                dtype: gate.dtype,
            };
            for (i, t) in [both, down].into_iter().enumerate() {
                let t = if exchanged { transpose(&t) } else { t };
                fused[i].extend(t.data);
                shapes[i] = [vec![experts], t.shape].concat();
            }
        }
        let at = at.replace(from, to);
        for (i, part) in ["gate_up_proj", "down_proj"].into_iter().enumerate() {
            let data = std::mem::take(&mut fused[i]);
            folder.tensors.insert(format!("{at}.{part}"), Tensor::bytes(Dtype::BF16, &shapes[i], data));
        }
    }
}

fn transpose(t: &Tensor) -> Tensor {
    let (rows, cols) = (t.shape[0], t.shape[1]);
    let at = |r: usize, c: usize| &t.data[2 * (r * cols + c)..2 * (r * cols + c) + 2];
    let data = (0..cols).flat_map(|c| (0..rows).flat_map(move |r| at(r, c).to_vec())).collect();
    Tensor::bytes(t.dtype, &[cols, rows], data)
}

#[test]
fn fused_experts() {
    for (family, experts) in
        [("qwen3_moe", 16), ("qwen2_moe", 6), ("olmoe", 8), ("deepseek_v2", 8), ("glm4_moe", 8)]
    {
        for exchanged in [false, true] {
            let mut folder = Folder::golden(family);
            fuse(
                &mut folder,
                "experts",
                "experts",
                ["gate_proj", "up_proj", "down_proj"],
                experts,
                exchanged,
            );
            assert!(folder.tensors.contains_key("model.layers.1.mlp.experts.gate_up_proj"));
            let dir = folder.write();
            check(family, dir.path());
            assert_eq!(spec(dir.path()).warnings, Vec::<String>::new());
        }
    }
}

/// OLMoE's golden checkpoint with another number of neurons; additional neurons are 0.
fn olmoe_with_inner(inner: usize) -> Folder {
    let mut folder = Folder::golden("olmoe").set("intermediate_size", inner);
    for (name, t) in &mut folder.tensors {
        let axis = match name.rsplit('.').nth(1) {
            Some("gate_proj" | "up_proj") => 0,
            Some("down_proj") => 1,
            _ => continue,
        };
        let by_neuron = if axis == 0 { t.clone() } else { transpose(t) };
        let mut data = by_neuron.data.clone();
        data.resize(2 * inner * by_neuron.shape[1], 0);
        *t = Tensor::bytes(t.dtype, &[inner, by_neuron.shape[1]], data);
        if axis == 1 {
            *t = transpose(t);
        }
    }
    folder
}

#[test]
fn exchanged_axes_are_detected_despite_a_square_tensor() {
    // Hidden is 64: gate and up together are square with 32 neurons, and down is with 64.
    for inner in [32, 64] {
        let separate = olmoe_with_inner(inner);
        let (ids, _) = expected(&golden("hf/olmoe"));
        let want = logits(separate.write().path(), &ids, 20);
        let parts = ["gate_proj", "up_proj", "down_proj"];
        for exchanged in [false, true] {
            let mut fused = separate.clone();
            fuse(&mut fused, "experts", "experts", parts, 8, exchanged);
            let off = distance(&logits(fused.write().path(), &ids, 20), &want);
            assert!(off < 1e-5, "{inner} neurons, exchanged {exchanged}: logits differ by {off}");
        }
    }
}

#[test]
fn fused_tensors_of_one_layer_in_different_orders_are_refused() {
    let mut folder = Folder::golden("olmoe");
    fuse(&mut folder, "experts", "experts", ["gate_proj", "up_proj", "down_proj"], 8, false);
    let down = folder.tensors.get_mut("model.layers.1.mlp.experts.down_proj").unwrap();
    down.shape.swap(1, 2);
    insta::assert_snapshot!(refusal(folder.write().path()), @r"
    Input: `model.layers.1.mlp.experts.gate_up_proj` and `model.layers.1.mlp.experts.down_proj` store their axes in different orders
      because their shapes are [8, 96, 64] and [8, 48, 64]; both must be [experts, out, in], or both [experts, in, out]
      hint: the tensors may be of two checkpoints; download the model again
    ");
}

#[test]
fn names_of_transformers_5() {
    for (family, router) in [("mixtral", "gate"), ("phimoe", "router")] {
        let mut folder = Folder::golden(family);
        fuse(&mut folder, "block_sparse_moe", "mlp", ["w1", "w3", "w2"], 8, false);
        for layer in 0..2 {
            let gate = folder.take(&format!("model.layers.{layer}.block_sparse_moe.gate.weight"));
            folder.tensors.insert(format!("model.layers.{layer}.mlp.{router}.weight"), gate);
        }
        let dir = folder.write();
        check(family, dir.path());
        assert_eq!(spec(dir.path()).warnings, Vec::<String>::new());
    }
}

#[test]
fn multi_token_prediction_layers_are_skipped() {
    let mut folder = Folder::golden("deepseek_v3");
    for (name, t) in folder.tensors.clone() {
        if let Some(rest) = name.strip_prefix("model.layers.2.") {
            folder.tensors.insert(format!("model.layers.3.{rest}"), t);
        }
    }
    let dir = folder.write();
    check("deepseek_v3", dir.path());
    let spec = spec(dir.path());
    assert_eq!((spec.layers.len(), spec.warnings), (3, vec![]));
}

#[test]
fn unused_tensors_are_reported() {
    let mut folder = Folder::golden("olmoe");
    folder.tensors.insert("model.layers.0.self_attn.rotary_emb.inv_freq".into(), Tensor::f32(&[1], &[1.0]));
    assert_eq!(spec(folder.write().path()).warnings, Vec::<String>::new());
    for i in 0..4 {
        folder.tensors.insert(format!("model.extra{i}"), Tensor::f32(&[1], &[1.0]));
    }
    insta::assert_snapshot!(spec(folder.write().path()).warnings.join("\n"), @"4 tensors of the checkpoint are not used: `model.extra0`, `model.extra1`, `model.extra2`, …");
}

#[test]
fn a_tied_head_is_the_embedding_table() {
    let mut folder = Folder::golden("olmoe").set("tie_word_embeddings", true);
    let with_head = spec(folder.write().path());
    assert_eq!((&with_head.head, &with_head.warnings), (&None, &vec![]));
    folder.take("lm_head.weight");
    assert_eq!(spec(folder.write().path()), with_head);
}

#[test]
fn the_end_of_a_sequence() {
    let folder = Folder::golden("olmoe").set("eos_token_id", 7).set("bos_token_id", 1);
    let dir = folder.write();
    assert_eq!((spec(dir.path()).bos, spec(dir.path()).eos), (Some(1), vec![7]));
    let generation = json!({"eos_token_id": [5, 6], "bos_token_id": null});
    fs::write(dir.path().join("generation_config.json"), generation.to_string()).unwrap();
    assert_eq!((spec(dir.path()).bos, spec(dir.path()).eos), (Some(1), vec![5, 6]));
}

#[test]
fn total_and_active_parameters_are_counted() {
    // Of 8 experts with 3 · 48 · 64 parameters, 2 are active, in both layers.
    let olmoe = spec(&golden("hf/olmoe"));
    let idle = 2 * 6 * 3 * 48 * 64;
    let count =
        |name: &str| Folder::golden(name).tensors.values().map(|t| t.numbers().len() as u64).sum::<u64>();
    assert_eq!((olmoe.params, olmoe.active_params), (count("olmoe"), count("olmoe") - idle));
    // Experts in one tensor, with biases.
    let gpt_oss = spec(&golden("hf/gpt_oss"));
    let idle = 2 * 6 * (3 * 48 * 64 + 2 * 48 + 64);
    assert_eq!((gpt_oss.params, gpt_oss.active_params), (count("gpt_oss"), count("gpt_oss") - idle));
}

/// Experts that read rows with twice as many channels, the second half of which has no effect.
#[test]
fn experts_between_two_projections() {
    let mut folder = Folder::golden("nemotron_h").set("moe_latent_size", 128);
    let matrix = |[rows, cols]: [usize; 2], at: &dyn Fn(usize, usize) -> f32| {
        let numbers: Vec<f32> = (0..rows * cols).map(|i| at(i / cols, i % cols)).collect();
        Tensor::f32(&[rows, cols], &numbers)
    };
    for at in [1, 3, 6].map(|layer| format!("backbone.layers.{layer}.mixer")) {
        let one = |row, column, one| if row == column { one } else { 0.0 };
        let first = matrix([128, 64], &|r, c| one(r, c, 2.0));
        let last = matrix([64, 128], &|r, c| one(r, c, 1.0));
        folder.tensors.insert(format!("{at}.fc1_latent_proj.weight"), first);
        folder.tensors.insert(format!("{at}.fc2_latent_proj.weight"), last);
        for at in (0..8).map(|e| format!("{at}.experts.{e}")) {
            let [up, down] =
                ["up", "down"].map(|part| folder.take(&format!("{at}.{part}_proj.weight")).numbers());
            let up = matrix([48, 128], &|r, c| if c < 64 { up[r * 64 + c] / 2.0 } else { 7.0 });
            let down = matrix([128, 48], &|r, c| if r < 64 { down[r * 48 + c] } else { 7.0 });
            folder.tensors.insert(format!("{at}.up_proj.weight"), up);
            folder.tensors.insert(format!("{at}.down_proj.weight"), down);
        }
    }
    let dir = folder.write();
    assert_eq!(spec(dir.path()).warnings, Vec::<String>::new());
    check("nemotron_h", dir.path());
    folder.take("backbone.layers.3.mixer.fc2_latent_proj.weight");
    assert!(refusal(folder.write().path()).contains("`backbone.layers.3.mixer.fc2_latent_proj.weight`"));
}
