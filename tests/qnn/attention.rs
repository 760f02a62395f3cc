//! Attention on a phone's unit: networks that keep no state, and hosts that keep it for them.

use super::library::installed;
use super::{Case, PHONE, Tiny, forge};
use crate::support::{Setup, checkpoint, distance, expected, fails, list, logits_file, moec, ok};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;

/// Attention, dense networks and the head.
const ASKED: &str = "[placement]\nattention = \"npu\"\n";

/// Logits of a bundle's emulated unit, or of a processor's bundle.
fn logits(built: &Tiny, how: &str) -> Vec<f32> {
    let out = built.bundle().with_file_name("logits.safetensors");
    let ids = expected(&checkpoint(&built.model)).ids;
    let mut command = built.moec("run");
    command.arg(how).arg(built.bundle()).args(["logits", "--ids", &list(&ids), "--out"]);
    ok(command.arg(&out));
    logits_file(&out).1
}

fn spread(x: &[f32]) -> f32 {
    x.iter().fold(f32::MIN, |a, b| a.max(*b)) - x.iter().fold(f32::MAX, |a, b| a.min(*b))
}

/// Norms of queries and keys, clipping, biases, windows, layers without rotation, pairs of either style.
#[test]
fn attention_of_every_kind_becomes_networks_that_verify() {
    for model in ["bamboo", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "smallthinker_4b", "glm4_moe"] {
        let built = Tiny::new(model, &[1, 2], ASKED);
        let report = built.verify();
        let mut found: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for f in report["packages"].as_array().unwrap() {
            let error = f["error"]["relative"].as_f64().unwrap();
            assert!(error > 0.0 && error < 0.03 && f["refused"] == false, "{model}: {f}");
            assert_eq!(f["findings"], json!([]), "{model}: {f}");
            let name = f["package"].as_str().unwrap();
            found.entry(name).or_default().insert(f["function"].as_str().unwrap());
        }
        let attention: Vec<_> = found.iter().filter(|(name, _)| name.ends_with(".attn.qnn")).collect();
        assert!(!attention.is_empty(), "{model}: {found:?}");
        // A prompt's chunk, and one row for sequences of any batch.
        for (name, functions) in attention {
            assert_eq!(*functions, BTreeSet::from(["chunk1", "chunk16"]), "{model}: {name}");
        }
        let want = expected(&checkpoint(model)).logits;
        let got = logits(&built, "--emulate");
        let off = distance(&got, &want) / spread(&want);
        println!("{model}: logits are {off:.1e} of their spread from the reference");
        assert!(off > 0.0 && off < 0.05, "{model}: {off}");
    }
}

/// Left to itself a build keeps attention where its cache is.
#[test]
fn attention_goes_to_the_unit_only_where_it_is_asked_for() {
    let built = Tiny::new("mixtral", &[1], "");
    let report = built.verify();
    let parts: Vec<&Value> = report["packages"].as_array().unwrap().iter().collect();
    assert!(parts.iter().all(|f| !f["package"].as_str().unwrap().contains("attn")), "{report}");
}

#[test]
fn attention_that_networks_cannot_compute_is_refused_by_name() {
    let other = "snapdragon-8-plus-gen-1";
    for (model, target, expected) in [
        ("deepseek_v2", PHONE, "it is latent attention: networks have heads of keys and of values"),
        ("gpt_oss", PHONE, "its softmax has sinks"),
        (
            "mixtral",
            other,
            "keys and values have 16 bits, and Hexagon v69 multiplies activations by 8 at most",
        ),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let setup = Setup { format: "f16", chunk: 16, batch: &[1], context: 64 };
        let toml = setup.write(&checkpoint(model), folder.path());
        let text = fs::read_to_string(&toml).unwrap();
        fs::write(&toml, text + ASKED).unwrap();
        let mut build = moec();
        build.env("MOEC_CACHE", folder.path().join("cache")).args(["build", "--quiet"]).arg(&toml);
        build.args(["--target", target, "--no-run", "-o"]).arg(folder.path().join("a.moec"));
        let (code, said) = fails(&mut build);
        let words = ["layers.0.attn", "cannot be a graph of `npu`", expected, "attention = \"auto\""];
        assert!(code == 1 && words.iter().all(|words| said.contains(words)), "{model}: {said}");
    }
}

/// A network in the place of another is named, before its rows are counted.
#[test]
fn a_network_is_what_its_file_says() {
    let built = Tiny::new("mixtral", &[1], ASKED);
    let folder = built.bundle();
    let name = "artifacts/layers.0.attn.qnn/chunk1.onnx";
    let other = fs::read(folder.join("artifacts/layers.0.attn.qnn/chunk16.onnx")).unwrap();
    forge(&folder, name, &other);
    let mut verify = built.moec("verify");
    let (code, said) = fails(verify.arg(&folder).arg("--source").arg(checkpoint("mixtral")));
    let words = ["layers.0.attn.qnn", "chunk1.onnx` is the network `chunk16`, by its own account"];
    assert!(code == 1 && words.iter().all(|words| said.contains(words)), "{said}");
}

/// Every network of attention is executed by the emulator and by onnxruntime, the prompt's from its DLC, too; the whole model gives on
/// the emulator what it gives here, and in the unit of a phone's `run` the same to the last bit.
#[test]
fn attention_computes_on_the_emulator() {
    let Some(tools) = installed() else { return };
    let case = Case::of("ferris-relu", 64, "attention = \"npu\"\n[experts]\ngroup = 24\n");
    let command = |verb: &str| {
        let mut command = case.moec(verb);
        command.envs(tools.iter().map(|(name, value)| (name, value)));
        command
    };
    let bundle = case.path("a.moec");
    ok(command("build").arg(&case.toml).args(["--target", PHONE, "--no-run", "-o"]).arg(&bundle));
    let report: Value =
        serde_json::from_slice(&ok(command("verify").arg(&bundle).arg("--json")).stdout).unwrap();
    assert_eq!(report.get("unverified"), None, "{report}");
    let mut executed = 0;
    for f in report["packages"].as_array().unwrap() {
        if !f["package"].as_str().unwrap().contains("attn") {
            continue;
        }
        for check in f["checks"].as_array().unwrap() {
            let off = check["share_of_spread"].as_f64().unwrap();
            println!("{} {} by {}: {off:.1e}", f["package"], f["function"], check["by"]);
            assert!(off > 0.0 && off < 0.02, "{f}");
            executed += 1;
        }
    }
    // Two networks of each of four layers by both, and a DLC of each layer.
    assert_eq!(executed, 4 * (2 * 2 + 1), "{report}");
    let ids: Vec<u32> = (0..80).map(|i| i * 37 % 2000 + 1).collect();
    let logits = |how: &str| {
        let out = case.path("logits.safetensors");
        let mut command = command("run");
        command.arg(how).arg(&bundle).args(["logits", "--ids", &list(&ids), "--out"]);
        ok(command.arg(&out));
        logits_file(&out).1
    };
    let (here, library) = (logits("--emulate"), logits("--emulate=library"));
    let off = distance(&here, &library) / spread(&here);
    println!("logits on QNN's emulator and by moec's evaluator: {off:.1e} of their spread apart");
    assert!(here.len() >= 2000 && off > 0.0 && off < 0.02, "{off}");
    assert!(logits("--emulate=device") == library, "the unit and the emulator differ");
}
