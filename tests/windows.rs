//! Layers with a sliding window keep a ring of positions: their results, and refused rewinds.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::support;

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::{checkpoint, distance, list, logits_file, moec, ok};

/// A model of two layers, one of which has a window of 16 tokens.
const FAMILY: &str = "gpt_oss";
const CONTEXT: usize = 512;

/// Builds with this chunk size. With the largest chunk, window and chunk together span the context, so there
/// is no ring.
fn build(folder: &Path, chunk: usize, format: &str) -> PathBuf {
    let toml = folder.join(format!("{format}-{chunk}.toml"));
    let text = format!(
        "[model]\nsource = \"{}\"\n[shapes]\nmax_context = {CONTEXT}\nprefill_chunk = {chunk}\ndecode_batch = [1, 2]\n\
         [weights]\nactivations = \"f32\"\n[memory]\nkv_cache = \"{format}\"\n",
        checkpoint(FAMILY).display()
    );
    fs::write(&toml, text).unwrap();
    let bundle = folder.join(format!("{format}-{chunk}"));
    ok(moec().arg("build").arg(&toml).args(["--quiet", "--no-run", "-o"]).arg(&bundle));
    bundle
}

fn run(bundle: &Path) -> Command {
    let mut command = moec();
    command.arg("run").arg(bundle);
    command
}

fn json(command: &mut Command) -> Value {
    serde_json::from_slice(&ok(command).stdout).unwrap()
}

fn prompt(tokens: u32) -> Vec<u32> {
    (0..tokens).map(|i| (i * 37 + i / 7) % 320).collect()
}

fn generated(bundle: &Path, prompt: &[u32], more: &[&str]) -> Vec<u32> {
    let report =
        json(run(bundle).args(["generate", "--ids", &list(prompt), "-n", "40", "--json"]).args(more));
    serde_json::from_value(report["ids"].clone()).unwrap()
}

#[test]
fn bundles_with_rings_and_full_caches_agree() {
    let folder = tempfile::tempdir().unwrap();
    // More than three times around a ring of 128 rows.
    let ids = prompt(430);
    for format in ["f32", "bf16", "q8", "q4"] {
        let [ring, cache] = [32, CONTEXT].map(|chunk| build(folder.path(), chunk, format));
        let saved = |bundle: &Path| json(run(bundle).args(["info", "--json"]))["memory"].clone();
        assert_eq!(saved(&cache)["kv_bytes_saved_by_windows"], 0);
        let bytes = |v: &Value, key: &str| v[key].as_u64().unwrap();
        let (ring_bytes, cache_bytes) = (saved(&ring), saved(&cache));
        assert_eq!(
            bytes(&ring_bytes, "kv_bytes") + bytes(&ring_bytes, "kv_bytes_saved_by_windows"),
            bytes(&cache_bytes, "kv_bytes")
        );
        // One of two layers keeps 128 of 512 rows.
        assert_eq!(bytes(&ring_bytes, "kv_bytes") * 8, bytes(&cache_bytes, "kv_bytes") * 5, "{format}");
        let logits = |bundle: &Path| {
            let out = bundle.with_extension("safetensors");
            ok(run(bundle).args(["logits", "--ids", &list(&ids), "--out"]).arg(&out));
            logits_file(&out).1
        };
        let off = distance(&logits(&ring), &logits(&cache));
        assert!(off < 2e-4, "{format}: {off}");
        assert_eq!(generated(&ring, &ids, &[]), generated(&cache, &ids, &[]), "{format}");
        ok(moec().arg("verify").arg(&ring).arg("--source").arg(checkpoint(FAMILY)));
    }
}

#[test]
fn saved_prompts_and_draft_tokens_rewind_in_a_ring_or_restart() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = build(folder.path(), 32, "bf16");
    let ids = prompt(300);
    let want = generated(&bundle, &ids, &[]);
    assert_eq!(generated(&bundle, &ids, &["--speculate", "4"]), want);
    let file = folder.path().join("saved");
    let file = file.to_str().unwrap();
    assert_eq!(generated(&bundle, &ids, &["--save-prompt", file]), want);
    assert_eq!(generated(&bundle, &ids, &["--load-prompt", file]), want);
    // The prompt shares a prefix that the ring still holds, or one that it has overwritten.
    for shared in [290, 100] {
        let other: Vec<u32> =
            ids[..shared].iter().copied().chain(prompt(340)[shared + 7..].iter().copied()).collect();
        assert_eq!(generated(&bundle, &other, &["--load-prompt", file]), generated(&bundle, &other, &[]));
    }
}

/// Heads and layers of gpt-oss-20b, as published; other extents are small.
#[test]
fn the_cache_of_gpt_oss_20b_at_8192_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let (layers, heads, kv_heads, dim, hidden) = (24, 64, 8, 64, 64);
    let mut config: Value =
        serde_json::from_slice(&fs::read(checkpoint(FAMILY).join("config.json")).unwrap()).unwrap();
    let kinds: Vec<_> = ["sliding_attention", "full_attention"].into_iter().cycle().take(layers).collect();
    for (key, value) in [
        ("num_hidden_layers", Value::from(layers)),
        ("num_attention_heads", heads.into()),
        ("num_key_value_heads", kv_heads.into()),
        ("head_dim", dim.into()),
        ("sliding_window", 128.into()),
        ("max_position_embeddings", 131_072.into()),
        ("layer_types", kinds.into()),
    ] {
        config[key] = value;
    }
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let bytes = fs::read(checkpoint(FAMILY).join("model.safetensors")).unwrap();
    let golden = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let zeros = vec![0; heads * dim * hidden * 4];
    let mut tensors = Vec::new();
    for (name, tensor) in golden.tensors() {
        let Some(rest) = name.strip_prefix("model.layers.0.") else {
            if !name.starts_with("model.layers.") {
                tensors.push((name, tensor));
            }
            continue;
        };
        let (q, kv) = (heads * dim, kv_heads * dim);
        let shape = match rest {
            "self_attn.q_proj.weight" => vec![q, hidden],
            "self_attn.k_proj.weight" | "self_attn.v_proj.weight" => vec![kv, hidden],
            "self_attn.o_proj.weight" => vec![hidden, q],
            "self_attn.q_proj.bias" => vec![q],
            "self_attn.k_proj.bias" | "self_attn.v_proj.bias" => vec![kv],
            "self_attn.sinks" => vec![heads],
            _ => tensor.shape().to_vec(),
        };
        let size =
            shape.iter().product::<usize>() * tensor.data().len() / tensor.shape().iter().product::<usize>();
        let dtype = tensor.dtype();
        for layer in 0..layers {
            let view = safetensors::tensor::TensorView::new(dtype, shape.clone(), &zeros[..size]).unwrap();
            tensors.push((format!("model.layers.{layer}.{rest}"), view));
        }
    }
    safetensors::serialize_to_file(tensors, None, &folder.path().join("model.safetensors")).unwrap();
    let toml = folder.path().join("model.toml");
    fs::write(&toml, "[model]\nsource = \".\"\n[shapes]\nmax_context = 8192\ndecode_batch = [1]\n").unwrap();
    let report = json(moec().arg("inspect").arg(&toml).arg("--json"));
    let mib = |key: &str| report["estimate"][key].as_u64().unwrap() >> 20;
    // 24 layers × 8192 rows, or 12 × 8192 and 12 × 384, of 2 × 8 × 64 numbers of two bytes.
    assert_eq!((mib("kv_cache_bytes_without_windows"), mib("kv_cache_bytes")), (384, 201));
}
