//! GGUF files through the binary: the same weights as safetensors give the same bundle, and the same tokens.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::support;

use moec_testing::GGUF;
use moec_testing::checkpoints::{GGUF_OF_2026, GGUF_WRITTEN};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::{
    Setup, checkpoint, clean, distance, expected, fails, ferris, list, logits_file, moec, ok, root, tree,
};

/// Families whose tensors have another order in GGUF: permuted rows, split matrices, gate and up separate.
const TURNED: [&str; 3] = ["mixtral", "deepseek_v2", "gpt_oss"];

/// Writes the GGUF file of a checkpoint.
fn write(checkpoint: &Path, folder: &Path, options: &[&str]) -> PathBuf {
    let out = folder.join("model.gguf");
    let mut python = clean(Command::new(moec_testing::gguf().unwrap()));
    ok(python.arg(root().join("golden/gguf/write.py")).arg(checkpoint).arg(&out).args(options));
    out
}

fn build(source: &Path, folder: &Path, setup: Setup<'_>) -> PathBuf {
    let toml = setup.write(source, folder);
    let bundle = folder.join("out.moec");
    ok(moec().arg("build").arg(&toml).args(["--quiet", "--no-run", "-o"]).arg(&bundle));
    bundle
}

#[test]
fn every_family_gives_its_tokens_from_gguf() {
    if !GGUF.met_or_skip() {
        return;
    }
    for (i, family) in GGUF_WRITTEN.into_iter().enumerate() {
        let source = checkpoint(family);
        let folder = tempfile::tempdir().unwrap();
        let setup = Setup { format: ["f32", "bf16"][i % 2], chunk: 20, batch: &[1], context: 96 };
        let bundle = build(&write(&source, folder.path(), &[]), folder.path(), setup);
        if TURNED.contains(&family) {
            let other = tempfile::tempdir().unwrap();
            let want = build(&source, other.path(), setup);
            let [ours, theirs] = [&bundle, &want].map(|bundle| {
                let mut files = tree(bundle);
                files.retain(|(name, _)| name.contains("weights"));
                files
            });
            assert!(!ours.is_empty() && ours == theirs, "{family}: other weights");
        }
        check_tokens(&bundle, &source, family);
    }
}

/// Compares the tokens of a bundle with the reference of its checkpoint.
fn check_tokens(bundle: &Path, source: &Path, family: &str) {
    let want = expected(source);
    let prompt = want.greedy.len() - 24;
    let ids = list(&want.greedy[..prompt]);
    let output = ok(moec().arg("run").arg(bundle).args(["generate", "--ids", &ids, "-n", "24", "--json"]));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let ids: Vec<u32> = serde_json::from_value(report["ids"].clone()).unwrap();
    assert_eq!(ids, want.greedy[prompt..], "{family}");
}

/// Tokens and logits of architectures of 2026, stored in f32, through the binary.
fn late(families: impl IntoIterator<Item = &'static str>) {
    if !GGUF.met_or_skip() {
        return;
    }
    // Llama 4's chunks are a constant of llama.cpp, which no golden checkpoint has. A test of the importer
    // compares it with safetensors.
    for family in families.into_iter().filter(|family| *family != "llama4") {
        let (source, folder) = (checkpoint(family), tempfile::tempdir().unwrap());
        let setup = Setup { format: "f32", chunk: 20, batch: &[1], context: 96 };
        let bundle = build(&write(&source, folder.path(), &["--type", "F32"]), folder.path(), setup);
        check_tokens(&bundle, &source, family);
        let want = expected(&source);
        let out = folder.path().join("logits.safetensors");
        ok(moec().arg("run").arg(&bundle).args(["logits", "--ids", &list(&want.ids), "--out"]).arg(&out));
        let off = distance(&logits_file(&out).1, &want.logits);
        assert!(off <= want.tolerance(), "{family}: logits differ by {off}");
    }
}

#[test]
fn four_architectures_of_2026() {
    late(["qwen3_5_moe", "gemma4", "nemotron_h", "step3p7"]);
}

#[test]
fn all_architectures_of_2026() {
    late(GGUF_OF_2026);
}

#[test]
fn the_demo_model_from_init_to_text() {
    if !GGUF.met_or_skip() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    write(&ferris(), folder.path(), &[]);
    let here = |mut command: Command| {
        command.current_dir(folder.path());
        command
    };
    ok(here(moec()).args(["init", "model.gguf"]));
    let toml = fs::read_to_string(folder.path().join("model.toml")).unwrap();
    assert!(toml.contains("source = \"model.gguf\"") && toml.contains("# qwen3_moe: "), "{toml}");
    ok(here(moec()).args(["build", "model.toml", "--quiet", "--no-run", "-o", "as_init_says"]));
    let setup = Setup { format: "bf16", chunk: 64, batch: &[1], context: 1024 };
    let [ours, theirs] = [folder.path().join("model.gguf"), ferris()].map(|source| {
        let folder = tempfile::tempdir().unwrap();
        let bundle = build(&source, folder.path(), setup);
        (bundle, folder)
    });
    let text = |bundle: &Path| {
        let mut run = moec();
        run.arg("run").arg(bundle).args(["generate", "--prompt", "fn main() { 1234", "-n", "16", "--json"]);
        let report: serde_json::Value = serde_json::from_slice(&ok(&mut run).stdout).unwrap();
        (report["ids"].clone(), report["text"].clone())
    };
    assert_eq!(text(&ours.0), text(&theirs.0));
    let want = expected(&ferris());
    let out = folder.path().join("logits.safetensors");
    ok(moec().arg("run").arg(&ours.0).args(["logits", "--ids", &list(&want.ids), "--out"]).arg(&out));
    assert!(distance(&logits_file(&out).1, &want.logits) <= 2e-3);
}

/// Configurations by `init` keep codes and scales. Such a bundle gives the results of the same file in f32,
/// and `inspect` and `verify` report the stored formats.
#[test]
fn gguf_codes_are_kept_from_init_to_bundle() {
    if !GGUF.met_or_skip() {
        return;
    }
    let source = checkpoint("mixtral");
    let want = expected(&source);
    for (kind, format) in [("Q8_0", "q8h"), ("Q4_0", "q4h"), ("MXFP4", "mxfp4")] {
        let folder = tempfile::tempdir().unwrap();
        let model = write(&source, folder.path(), &["--type", kind]);
        let toml = folder.path().join("model.toml");
        ok(moec().args(["init", "--all"]).arg(&model).arg("-o").arg(&toml));
        let text = fs::read_to_string(&toml).unwrap();
        for class in ["experts", "attention", "embeddings"] {
            assert!(text.contains(&format!("\n{class} = \"{format}\"")), "{kind}: {text}");
        }
        let inspected = ok(moec().args(["inspect", "--json"]).arg(&model));
        let report: serde_json::Value = serde_json::from_slice(&inspected.stdout).unwrap();
        assert_eq!(report["model"]["stored_by_class"]["experts"], format, "{kind}");
        // With exact activations, and as `init` configures them.
        let exact = text.replace("activations = \"auto\"", "activations = \"f32\"");
        assert_ne!(exact, text);
        let plain = exact.replace(&format!(" = \"{format}\""), " = \"f32\"");
        let logits = |name: &str, text: &str| {
            fs::write(&toml, text).unwrap();
            let bundle = folder.path().join(name);
            ok(moec().arg("build").arg(&toml).args(["--quiet", "--no-run", "-o"]).arg(&bundle));
            let out = folder.path().join("logits.safetensors");
            ok(moec().arg("run").arg(&bundle).args(["logits", "--ids", &list(&want.ids), "--out"]).arg(&out));
            (logits_file(&out).1, bundle)
        };
        let (as_f32, _) = logits("plain", &plain);
        let (taken, bundle) = logits("taken", &exact);
        assert!(distance(&taken, &as_f32) < 1e-5, "{kind}: {}", distance(&taken, &as_f32));
        ok(moec().arg("verify").arg(&bundle).arg("--source").arg(&model));
        // Rounded activations sometimes choose other experts, so only the bound of `verify` is checked.
        let (_, bundle) = logits("rounded", &text);
        ok(moec().arg("verify").arg(&bundle).arg("--source").arg(&model));
        let inspected = ok(moec().args(["inspect", "--json"]).arg(&bundle));
        let stdout = String::from_utf8(inspected.stdout).unwrap();
        assert!(stdout.contains(&format!("\"{format}\"")), "{stdout}");
    }
}

/// A model with matrices in many block types, some of two bits and fewer, is built in every format. Weights
/// and tokens are those of a model with the same numbers in F32; `inspect` names the types.
#[test]
fn every_block_type_gives_the_tokens_of_its_decoded_numbers() {
    if !GGUF.met_or_skip() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let [stored, decoded] = ["model.gguf", "decoded.gguf"].map(|name| folder.path().join(name));
    let mut python = clean(Command::new(moec_testing::gguf().unwrap()));
    ok(python.arg(root().join("gguf/tests/samples/model.py")).arg(&stored).arg(&decoded));
    let inspected = ok(moec().args(["inspect", "--json"]).arg(&stored));
    let report: serde_json::Value = serde_json::from_slice(&inspected.stdout).unwrap();
    let types: Vec<_> = report["stored_as"].as_object().unwrap().keys().map(String::as_str).collect();
    for name in ["Q2_K", "Q3_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"] {
        assert!(types.contains(&name), "{name}: {types:?}");
    }
    for name in ["IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "NVFP4", "MXFP4"] {
        assert!(types.contains(&name), "{name}: {types:?}");
    }
    let ids = list(&(0..24).map(|i| i * 11 % 64).collect::<Vec<u32>>());
    for format in ["f32", "q8"] {
        let setup = Setup { format, chunk: 16, batch: &[1], context: 64 };
        let [ours, theirs] = [&stored, &decoded].map(|source| {
            let folder = tempfile::tempdir().unwrap();
            let bundle = build(source, folder.path(), setup);
            let run = |arguments: &[&str]| ok(moec().arg("run").arg(&bundle).args(arguments)).stdout;
            let stdout = run(&["generate", "--ids", &ids, "-n", "24", "--json"]);
            let report: serde_json::Value = serde_json::from_slice(&stdout).unwrap();
            let mut weights = tree(&bundle);
            weights.retain(|(name, _)| name.contains("weights"));
            (report["ids"].clone(), weights)
        });
        assert_eq!(ours.0, theirs.0, "{format}");
        assert_eq!(ours.0.as_array().unwrap().len(), 24, "{format}");
        assert!(!ours.1.is_empty() && ours.1 == theirs.1, "{format}: other weights");
    }
}

/// Types of the matrices of a model as published files mix them: the table and the head, then query, key,
/// value, output, gate, up and down of each layer. Gate and up of the second differ: one weight of moec.
const MIXED: [&str; 16] = [
    "Q4_K", "Q6_K", "Q4_K", "Q2_K", "Q3_K", "Q5_K", "Q2_K", "Q2_K", "Q6_K", "Q5_K", "IQ4_XS", "Q5_K", "Q6_K",
    "Q5_K", "IQ3_S", "Q8_0",
];

/// `stored` keeps the codes and scales of each matrix. The bundle gives the tokens of the file's numbers in
/// f32, and takes about as many bits.
#[test]
fn stored_codes_give_the_tokens_of_their_numbers() {
    if !GGUF.met_or_skip() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let [model, decoded] = ["model.gguf", "decoded.gguf"].map(|name| folder.path().join(name));
    let mut python = clean(Command::new(moec_testing::gguf().unwrap()));
    ok(python.arg(root().join("gguf/tests/samples/model.py")).args([&model, &decoded]).args(MIXED));
    let toml = folder.path().join("model.toml");
    ok(moec().args(["init", "--all"]).arg(&model).arg("-o").arg(&toml));
    let text = fs::read_to_string(&toml).unwrap();
    assert!(text.contains("\nembeddings = \"stored\""), "{text}");
    let ids: Vec<u32> = (0..24).map(|i| i * 11 % 64).collect();
    let built = |name: &str, source: &Path, format: &str, activations: &str| {
        let bundle = folder.path().join(name);
        let text = format!(
            "[model]\nsource = {source:?}\n[shapes]\nmax_context = 64\nprefill_chunk = 16\n[weights]\n\
             experts = \"{format}\"\nattention = \"{format}\"\nembeddings = \"{format}\"\n\
             activations = \"{activations}\"\n"
        );
        fs::write(&toml, text).unwrap();
        ok(moec().arg("build").arg(&toml).args(["--quiet", "--no-run", "-o"]).arg(&bundle));
        let run = |arguments: &[&str]| ok(moec().arg("run").arg(&bundle).args(arguments)).stdout;
        let stdout = run(&["generate", "--ids", &list(&ids), "-n", "24", "--json"]);
        let report: serde_json::Value = serde_json::from_slice(&stdout).unwrap();
        let out = folder.path().join("logits.safetensors");
        ok(moec().arg("run").arg(&bundle).args(["logits", "--ids", &list(&ids), "--out"]).arg(&out));
        (bundle, report["ids"].clone(), logits_file(&out).1)
    };
    let (_, tokens, logits) = built("plain", &decoded, "f32", "f32");
    let (bundle, kept, near) = built("kept", &model, "stored", "f32");
    assert_eq!(kept, tokens);
    assert_eq!(kept.as_array().unwrap().len(), 24);
    let range = logits.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
    assert!(distance(&near, &logits) <= 1e-5 * range, "{} of {range}", distance(&near, &logits));
    ok(moec().arg("verify").arg(&bundle).arg("--source").arg(&model));
    let inspected = ok(moec().args(["inspect", "--json"]).arg(&bundle));
    let report: serde_json::Value = serde_json::from_slice(&inspected.stdout).unwrap();
    let bits = |name: &str| {
        let of = report["plan"]["formats"].as_array().unwrap().iter().find(|f| f["format"] == name);
        of.unwrap_or_else(|| panic!("{name}: {report}"))["bits_per_weight"].as_f64().unwrap()
    };
    // Rows of a panel are padded.
    for (name, of_file) in [
        ("q2k", 2.625),
        ("q3k", 3.4375),
        ("iq4xs", 4.25),
        ("q4k", 4.5),
        ("q5k", 5.5),
        ("q6k", 6.5625),
        ("q8h", 8.5),
    ] {
        assert!((of_file..of_file + 0.7).contains(&bits(name)), "{name}: {}", bits(name));
    }
    // With activations that are rounded, the bound of `verify` is checked. It is a reference of its own.
    let (bundle, ..) = built("rounded", &model, "stored", "auto");
    ok(moec().arg("verify").arg(&bundle).arg("--source").arg(&model));
    ok(moec().arg("verify").arg(&bundle));
}

#[test]
fn a_damaged_file_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    for (bytes, words) in [
        (&b"not at all"[..], ["model.gguf", "begins with"]),
        (b"GGUF\x03\0\0\0", ["model.gguf", "ends inside its header"]),
    ] {
        fs::write(&path, bytes).unwrap();
        let (code, stderr) = fails(moec().arg("init").arg(&path).arg("-o").arg(folder.path().join("m.toml")));
        assert!(code == 1 && words.iter().all(|w| stderr.contains(w)), "{code}: {stderr}");
        assert!(!folder.path().join("m.toml").exists());
    }
}
