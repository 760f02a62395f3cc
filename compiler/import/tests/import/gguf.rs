//! Tests of GGUF files against the checkpoints that they were made from, and of damaged files.

#[path = "../../../../gguf/tests/it/builder.rs"]
#[allow(dead_code, reason = "other tests use the rest of it")]
mod builder;

use super::support::{Folder, distance, expected, golden, logits, numbers, packed, refusal, shapes};
use builder::{ARRAY, Builder, F32, TEXT, U32, array, text};
use moec_cpu::Weighting;
use moec_gguf::Header;
use moec_import::ImportOptions;
use moec_import::lower::lower;
use moec_ir::types::GROUP;
use moec_ir::{Format, WeightClass};
use moec_runtime::serving::text::Text;
use moec_testing::GGUF;
use moec_testing::checkpoints::{GGUF_OF_2026, GGUF_WRITTEN};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// A folder with a `model.gguf` that was converted from a checkpoint with these options.
fn write(checkpoint: &Path, options: &[&str]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(moec_testing::gguf().unwrap());
    command.arg(golden("gguf/write.py")).arg(checkpoint).arg("model.gguf").args(options);
    let out = command.current_dir(folder.path()).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    folder
}

/// The golden checkpoint of a family as an absolute path.
fn of(family: &str) -> PathBuf {
    golden("hf").join(family).canonicalize().unwrap()
}

#[test]
fn the_same_weights_give_the_same_logits() {
    if !GGUF.met_or_skip() {
        return;
    }
    for family in GGUF_WRITTEN {
        let checkpoint = of(family);
        let folder = write(&checkpoint, &[]);
        let (ids, want) = expected(&checkpoint);
        let got = logits(&folder.path().join("model.gguf"), &ids, 16);
        assert_eq!(got, logits(&checkpoint, &ids, 16), "{family}");
        assert!(distance(&got, &want) < 2e-3, "{family}");
    }
}

/// A checkpoint of 2026 that GGUF can represent: in llama.cpp, Llama 4's chunks and query factors are
/// constants.
fn representable(family: &str) -> Option<TempDir> {
    let changed = Folder::golden(family).set("attention_chunk_size", 8192).set("floor_scale", 8192);
    (family == "llama4").then(|| changed.write())
}

/// The import undoes the converter's changes to each architecture. The logits are those of transformers, and
/// of the safetensors except for values that the file rounds (rates of decay, frequencies).
#[test]
fn architectures_of_2026() {
    if !GGUF.met_or_skip() {
        return;
    }
    for (i, family) in moec_testing::every_nth(2, GGUF_OF_2026.into_iter().enumerate()) {
        let changed = representable(family);
        let checkpoint = changed.as_ref().map_or_else(|| of(family), |folder| folder.path().to_owned());
        let folder = write(&checkpoint, &["--type", ["F32", "BF16"][i / 2 % 2]]);
        let (ids, reference) = expected(&of(family));
        let got = logits(&folder.path().join("model.gguf"), &ids, 16);
        let plain = logits(&checkpoint, &ids, 16);
        let want = if changed.is_some() { &plain } else { &reference };
        assert!(distance(&got, want) < 1e-4, "{family}: {}", distance(&got, want));
        assert!(distance(&got, &plain) < 1e-4, "{family}: {}", distance(&got, &plain));
    }
}

#[test]
fn quantised_gguf_gives_the_logits_of_the_decoded_model() {
    if !GGUF.met_or_skip() {
        return;
    }
    let types = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4", "F16"];
    for (i, family) in GGUF_WRITTEN.into_iter().enumerate() {
        let checkpoint = of(family);
        for kind in [types[i % types.len()], if family == "gpt_oss" { "MXFP4" } else { "Q4_0" }] {
            let folder = write(&checkpoint, &["--type", kind, "--decoded", "decoded"]);
            let (ids, _) = expected(&checkpoint);
            let got = logits(&folder.path().join("model.gguf"), &ids[..20], 16);
            assert_eq!(got, logits(&folder.path().join("decoded"), &ids[..20], 16), "{family} in {kind}");
        }
    }
}

/// The small model with many types, and the same in F32: `model.gguf` and `decoded.gguf`.
fn of_many_types() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(moec_testing::gguf().unwrap());
    command.arg(golden("../gguf/tests/samples/model.py").canonicalize().unwrap());
    command.args(["model.gguf", "decoded.gguf"]).env("PYTHONDONTWRITEBYTECODE", "1");
    let out = command.current_dir(folder.path()).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    folder
}

#[test]
fn every_block_type_decodes_to_the_same_logits() {
    if !GGUF.met_or_skip() {
        return;
    }
    let folder = of_many_types();
    let [stored, decoded] = ["model.gguf", "decoded.gguf"].map(|name| folder.path().join(name));
    let ids: Vec<u32> = (0..20).map(|i| i * 7 % 64).collect();
    assert_eq!(logits(&stored, &ids, 16), logits(&decoded, &ids, 16));
}

/// A NaN scale is an error with the tensor's name and the position: in IQ1_S, IQ2_XS and TQ2_0.
#[test]
fn scales_that_are_not_finite() {
    if !GGUF.met_or_skip() {
        return;
    }
    let folder = of_many_types();
    let path = folder.path().join("model.gguf");
    let file = fs::read(&path).unwrap();
    let header = Header::read(&file).unwrap();
    for (tensor, name, at) in [
        ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight", 0),
        ("blk.0.attn_output.weight", "model.layers.0.self_attn.o_proj.weight", 0),
        ("blk.1.attn_output.weight", "model.layers.1.self_attn.o_proj.weight", 64),
    ] {
        let bytes = header.tensors().iter().find(|t| t.name == tensor).unwrap().bytes.clone();
        let mut changed = file.clone();
        changed[bytes][at..at + 2].copy_from_slice(&half::f16::NAN.to_le_bytes());
        fs::write(&path, changed).unwrap();
        let (checkpoint, spec) = moec_import::open(&path, &ImportOptions::default()).unwrap();
        let module = lower(&spec, &shapes(64, 16)).unwrap();
        let weight = module.weights.iter().find(|w| w.expr.leaves().any(|leaf| leaf.tensor == name)).unwrap();
        let mut out = vec![0.0; weight.cols()];
        let error = weight.expr.read(0, 0..1, 0..weight.cols(), &checkpoint, &mut out).unwrap_err();
        assert_eq!(error.to_string(), format!("tensor `{name}` in `model.gguf` is NaN at [0, 0]"));
    }
}

/// For weights in blocks of 32 codes, a bundle has the same numbers as the Python package decodes.
#[test]
fn gguf_block_codes_are_kept_unchanged() {
    if !GGUF.met_or_skip() {
        return;
    }
    for (family, kind, format) in [
        ("mixtral", "Q8_0", Format::Q8h),
        ("qwen3_moe", "Q4_0", Format::Q4h),
        ("olmoe", "MXFP4", Format::Mxfp4),
        ("gpt_oss", "MXFP4", Format::Mxfp4),
    ] {
        let folder = write(&of(family), &["--type", kind, "--decoded", "decoded"]);
        let open = |name: &str| {
            let (checkpoint, spec) = moec_import::open(&folder.path().join(name), &ImportOptions::default())
                .unwrap_or_else(|e| panic!("{e}"));
            (checkpoint, lower(&spec, &shapes(64, 16)).unwrap_or_else(|e| panic!("{e}")))
        };
        let ((ours, module), (package, decoded)) = (open("model.gguf"), open("decoded"));
        let mut taken = [0; WeightClass::ALL.len()];
        for (weight, same) in module.weights.iter().zip(&decoded.weights) {
            // Rows without whole blocks are stored as f16, and angles are not tensors.
            if weight.class == WeightClass::Exact
                || !weight.expr.leaves().all(|leaf| ours.format(leaf) == Some(format))
            {
                continue;
            }
            assert_eq!(weight.name, same.name);
            let want = numbers(same, &package);
            assert_eq!(packed(weight, format, &ours), want, "{family}: {}", weight.name);
            taken[weight.class as usize] += 1;
        }
        assert!(taken[WeightClass::Experts as usize] > 0, "{family}: {taken:?}");
        assert!(taken[WeightClass::Attention as usize] > 0, "{family}: {taken:?}");
        assert!(taken[WeightClass::Embeddings as usize] > 0, "{family}: {taken:?}");
    }
}

#[test]
fn gguf_of_earlier_converters_gives_the_same_logits() {
    if !GGUF.met_or_skip() {
        return;
    }
    for family in ["deepseek_v2", "deepseek_v3", "qwen2_moe"] {
        let folder = write(&of(family), &["--old"]);
        let (ids, _) = expected(&of(family));
        let got = logits(&folder.path().join("model.gguf"), &ids, 16);
        assert_eq!(got, logits(&of(family), &ids, 16), "{family}");
    }
}

#[test]
fn gguf_metadata_contains_the_configuration() {
    if !GGUF.met_or_skip() {
        return;
    }
    let yarn = json!({
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
        "mscale": 0.707, "mscale_all_dim": 0.707,
    });
    let factors = |from: f64| (0..8).map(|i| from + 0.3 * f64::from(i)).collect::<Vec<_>>();
    let long = json!({
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32,
        "short_factor": factors(1.0), "long_factor": factors(2.0),
    });
    let groups = [("n_group", json!(2)), ("topk_group", json!(1))];
    let cases: [(&str, Vec<(&str, Value)>); 4] = [
        ("deepseek_v2", vec![("rope_parameters", yarn)]),
        ("deepseek_v2", [&groups[..], &[("topk_method", json!("group_limited_greedy"))]].concat()),
        ("phimoe", vec![("rope_parameters", long)]),
        (
            "smallthinker_21b",
            vec![("rope_layout", json!([0, 1, 1])), ("sliding_window_layout", json!([0, 1, 1]))],
        ),
    ];
    for (family, changes) in cases {
        let what = format!("{family} with {changes:?}");
        let (ids, _) = expected(&of(family));
        let plain = logits(&of(family), &ids, 16);
        let changed = changes.into_iter().fold(Folder::golden(family), |f, (key, value)| f.set(key, value));
        let checkpoint = changed.write();
        let folder = write(checkpoint.path(), &[]);
        let got = logits(&folder.path().join("model.gguf"), &ids, 16);
        assert_eq!(got, logits(checkpoint.path(), &ids, 16), "{what}");
        assert!(got != plain, "{what}: it changes nothing");
    }
}

#[test]
fn a_model_in_several_files() {
    if !GGUF.met_or_skip() {
        return;
    }
    let folder = write(&of("qwen3_moe"), &["--split", "9"]);
    let at = |n: usize| folder.path().join(format!("model-{n:05}-of-00003.gguf"));
    let (ids, _) = expected(&of("qwen3_moe"));
    assert_eq!(logits(&at(1), &ids[..20], 16), logits(&of("qwen3_moe"), &ids[..20], 16));
    insta::assert_snapshot!(refusal(&at(2)), @"
    Input: `model-00002-of-00003.gguf` is file 2 of 3
      hint: give the first: `model-00001-of-00003.gguf`
    ");
    fs::rename(at(3), folder.path().join("kept")).unwrap();
    insta::assert_snapshot!(refusal(&at(1)), @"
    Input: `model-00003-of-00003.gguf` is missing
      because `model-00001-of-00003.gguf` is the first of 3 files
      hint: download all files of the model again, into one folder
    ");
    fs::copy(at(2), at(3)).unwrap();
    insta::assert_snapshot!(refusal(&at(1)), @"
    Input: `model-00003-of-00003.gguf` is file 2 of 3 by its header, but file 3 of 3 by its name
      because the header has `split.no` and `split.count`
      hint: download all files of the model again, into one folder
    ");
    #[cfg(unix)]
    {
        fs::remove_file(at(3)).unwrap();
        std::os::unix::fs::symlink("/etc/hostname", at(3)).unwrap();
        assert!(refusal(&at(1)).contains("outside of the checkpoint's folder"));
    }
}

#[test]
fn the_demo_model_has_its_tokenizer() {
    if !GGUF.met_or_skip() {
        return;
    }
    let ferris = golden("models/ferris").canonicalize().unwrap();
    let folder = write(&ferris, &[]);
    let options = ImportOptions::default();
    let read = |path: &Path| {
        let (checkpoint, spec) = moec_import::open(path, &options).unwrap_or_else(|e| panic!("{e}"));
        let text = Text::parse(checkpoint.tokenizer(&spec).unwrap().unwrap(), None).unwrap();
        let begins = checkpoint.tokenizer_config().unwrap().unwrap().flag_or("add_bos_token", false).unwrap();
        (text, begins, spec)
    };
    let (ours, begins, spec) = read(&folder.path().join("model.gguf"));
    let (theirs, want, original) = read(&ferris);
    assert_eq!((begins, spec.bos, spec.eos), (want, original.bos, original.eos));
    let text = fs::read_to_string(ferris.join("eval/text.txt")).unwrap();
    for text in text.lines().chain(["", "<|endoftext|>fn  main() { 1234 }", "Grüße, 世界\t\n\n"]) {
        let ids = ours.encode(text).unwrap();
        assert_eq!(ids, theirs.encode(text).unwrap(), "{text}");
        assert_eq!(ours.decode(&ids).unwrap(), theirs.decode(&ids).unwrap(), "{text}");
    }
}

/// Packing of Q8_0 and Q4_0: most blocks keep their codes, with scales rounded to bf16, and the error is never
/// larger than that of kept codes. ggml's quantisers give the largest number of a block the code at the end of
/// the range, ±127 or −8.
#[test]
fn packing_keeps_the_codes_of_blocks() {
    let mut state = 7_u64;
    let mut random = |n: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % n) as i32
    };
    for (format, lowest, top) in [(Format::Q8, -126, 127), (Format::Q4, -7, -8)] {
        let (mut kept, mut off, mut size) = (0, 0.0, 0.0);
        let blocks = 2000;
        for _ in 0..blocks {
            let scale = half::f16::from_f32((1 + random(60000)) as f32 / 1e6).to_f32();
            let mut codes: [i32; GROUP] = std::array::from_fn(|_| lowest + random((1 - 2 * lowest) as u64));
            codes[random(GROUP as u64) as usize] = top;
            let numbers = codes.map(|code| code as f32 * scale);
            let error = |scale: f32, codes: [i32; GROUP]| -> f64 {
                let each =
                    numbers.iter().zip(codes).map(|(x, code)| f64::from(x - code as f32 * scale).powi(2));
                each.sum()
            };
            let groups = moec_cpu::groups(format, &numbers, GROUP, Weighting::default());
            let (packed, by_packing) = groups.unwrap().next().unwrap();
            let by_packing = by_packing.map(i32::from);
            kept += usize::from(by_packing == codes);
            let (ours, theirs) =
                (error(packed, by_packing), error(half::bf16::from_f32(scale).to_f32(), codes));
            assert!(ours <= theirs * 1.000_001, "{format}: {ours:e} where keeping codes gives {theirs:e}");
            off += ours;
            size += numbers.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
        }
        let off = (off / size).sqrt();
        println!(
            "{format}: {kept} of {blocks} blocks keep their codes; numbers are off by {off:.5} (root mean square)"
        );
        assert!(kept * 100 >= blocks * 95 && off < 1.0 / 512.0, "{format}: {kept} of {blocks}, {off}");
    }
}

/// The tokenizer of a file, empty if there is none. The metadata of a damaged file make one, or are refused.
fn metadata_of(bytes: &[u8]) -> Option<Vec<u8>> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    fs::write(&path, bytes).unwrap();
    let container = moec_import::containers::open(&path, |_| Ok(())).ok()?;
    let _ = (container.tokenizer_config(), container.chat_template());
    let tokenizer = container.tokenizer().ok()?;
    if let Some(text) = tokenizer.as_deref().and_then(|json| Text::parse(json, None).ok()) {
        let _ = text.encode("A text,\n\nand ▁ more").map(|ids| text.decode(&ids));
    }
    Some(tokenizer.unwrap_or_default())
}

/// A model's metadata without its tensors, from the seeds of fuzzing.
fn metadata() -> Vec<u8> {
    fs::read(golden("../fuzz/seeds/gguf/model")).unwrap()
}

#[test]
fn seed_of_fuzzing_has_a_tokenizer() {
    let json = metadata_of(&metadata()).unwrap();
    assert!(Text::parse(&json, None).unwrap().encode("the").unwrap().len() > 1);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn damaged_metadata_never_panic(damage in prop::collection::vec(any::<(prop::sample::Index, u8)>(), 1..6)) {
        let mut bytes = metadata();
        for (at, byte) in damage {
            let n = bytes.len();
            bytes[at.index(n)] = byte;
        }
        metadata_of(&bytes);
    }
}

/// The error message for a file.
fn error_of(bytes: &[u8]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    fs::write(&path, bytes).unwrap();
    refusal(&path)
}

/// A file of an architecture, with no other keys yet.
fn model(architecture: &str) -> Builder {
    Builder::default().key("general.architecture", TEXT, &text(architecture))
}

#[test]
fn files_that_are_refused() {
    let cases = [
        ("no GGUF", b"PK\x03\x04".to_vec()),
        ("empty", Vec::new()),
        ("cut", model("qwen3moe").build_of(3, 1)),
        ("no architecture", Builder::default().build()),
        ("an architecture", model("mamba").build()),
        ("a projector", model("clip").key("general.type", TEXT, &text("mmproj")).build()),
        ("no size", model("qwen3moe").build()),
        ("a size that is a text", model("qwen3moe").key("qwen3moe.vocab_size", TEXT, &text("many")).build()),
        ("a llama", llama(0).build()),
        ("rope_freqs", llama(2).tensor("rope_freqs.weight", &[4], 0, &[0; 16]).build()),
        (
            "more experts than in its tensors",
            llama(1 << 20).tensor("blk.0.ffn_gate_exps.weight", &[8, 4, 2], 0, &[0; 256]).build(),
        ),
        ("a type", llama(1).tensor("blk.0.ffn_gate_exps.weight", &[256, 4, 1], 15, &[0; 1168]).build()),
        ("a shape", llama(1).tensor("blk.0.ffn_gate_exps.weight", &[32, 4, 1], 8, &[0; 136]).build()),
        (
            "two of a name",
            llama(1)
                .tensor("blk.0.ffn_gate_exps.weight", &[256, 4, 1], 0, &[0; 4096])
                .tensor("blk.0.ffn_gate.0.weight", &[256, 4], 0, &[0; 4096])
                .build(),
        ),
    ];
    let all: Vec<String> =
        cases.iter().map(|(name, file)| format!("# {name}\n{}\n", error_of(file))).collect();
    insta::assert_snapshot!(all.join("\n"));
}

/// Features and required keys of the architectures of 2026, each by its name.
#[test]
fn models_of_2026_that_are_refused() {
    let count = |builder: Builder, key: &str, n: u32| builder.key(key, U32, &n.to_le_bytes());
    let list = |builder: Builder, key: &str, numbers: &[u32]| {
        let numbers: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        builder.key(key, ARRAY, &[array(U32, (numbers.len() / 4) as u64), numbers].concat())
    };
    let one = |builder: Builder, tensor: &str| builder.tensor(tensor, &[4], 0, &[0; 16]);
    let kv = |architecture: &str, layers: u32, numbers: &[u32]| {
        list(small(architecture, 2, layers), &format!("{architecture}.attention.head_count_kv"), numbers)
    };
    let gemma = count(kv("gemma4", 2, &[1, 1]), "gemma4.attention.key_length", 4);
    let factors: Vec<u8> = [1.0_f32, 3.0].iter().flat_map(|x| x.to_le_bytes()).collect();
    let jamba = ["blk.0.attn_q.weight", "blk.1.attn_q.weight"].into_iter().fold(small("jamba", 2, 3), one);
    let warm =
        small("deepseek2", 2, 1).key("deepseek2.attention.temperature_scale", F32, &0.1_f32.to_le_bytes());
    let cases = [
        ("a size is missing", small("qwen3next", 2, 1)),
        ("experts are missing", small("minimax-m2", 0, 1)),
        ("another routing", count(small("minimax-m2", 2, 1), "minimax-m2.expert_gating_func", 1)),
        ("heads that differ", kv("dots1", 2, &[1, 2])),
        ("too few heads", kv("lfm2moe", 3, &[1, 2])),
        (
            "heads that are no twice",
            count(kv("mimo2", 2, &[2, 3]), "mimo2.attention.sliding_window_pattern", 2),
        ),
        ("layers at no distance", jamba),
        ("chunks", count(small("llama4", 2, 1), "llama4.attention.sliding_window", 0)),
        ("queries that grow", warm),
        ("frequencies", gemma.tensor("rope_freqs.weight", &[2], 0, &factors)),
        ("a tensor is missing", count(small("minimax-m2", 2, 1), "minimax-m2.rope.dimension_count", 4)),
        ("a shape", small("minimax-m2", 2, 1).tensor("blk.0.ffn_gate_exps.weight", &[8, 4, 2], 0, &[0; 256])),
    ];
    let all: Vec<String> =
        cases.iter().map(|(name, file)| format!("# {name}\n{}\n", error_of(&file.build()))).collect();
    insta::assert_snapshot!(all.join("\n"));
}

/// A small llama with one layer and this many experts, without its tensors.
fn llama(experts: u32) -> Builder {
    small("llama", experts, 1)
}

/// A small model of an architecture.
fn small(architecture: &str, experts: u32, layers: u32) -> Builder {
    let eps = format!("{architecture}.attention.layer_norm_rms_epsilon");
    let mut builder = model(architecture).key(&eps, F32, &1e-5_f32.to_le_bytes());
    for (key, n) in [
        ("vocab_size", 4_u32),
        ("embedding_length", 256),
        ("block_count", layers),
        ("attention.head_count", 2),
        ("context_length", 16),
        ("feed_forward_length", 4),
        ("expert_count", experts),
        ("expert_used_count", 1),
    ] {
        builder = builder.key(&format!("{architecture}.{key}"), U32, &n.to_le_bytes());
    }
    builder
}
