//! Attention on a phone's unit: the networks have no state; the host keeps it.

use super::library::installed;
use super::{Case, PHONE, Tiny, forge};
use crate::support::{Setup, checkpoint, distance, expected, fails, ferris, list, logits_file, moec, ok};
use moec_backend::Backend as _;
use moec_bundle::read::Bundle;
use moec_qnn::Qnn;
use moec_runtime::CheckLevel;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;

/// Attention, dense networks and the head on the NPU.
const ON_NPU: &str = "[placement]\nattention = \"npu\"\n";

/// Logits of a bundle with its unit emulated, or of a bundle for the CPU.
fn logits(built: &Tiny, emulate: &str) -> Vec<f32> {
    let out = built.bundle().with_file_name("logits.safetensors");
    let ids = expected(&checkpoint(&built.model)).ids;
    let mut command = built.moec("run");
    command.arg(emulate).arg(built.bundle()).args(["logits", "--ids", &list(&ids), "--out"]);
    ok(command.arg(&out));
    logits_file(&out).1
}

fn spread(x: &[f32]) -> f32 {
    x.iter().fold(f32::MIN, |a, b| a.max(*b)) - x.iter().fold(f32::MAX, |a, b| a.min(*b))
}

/// Attention with norms of queries and keys, biases, windows, and without rotation.
#[test]
fn attention_of_every_kind_becomes_networks_that_verify() {
    for model in ["bamboo", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "smallthinker_4b", "glm4_moe"] {
        let built = Tiny::new(model, &[1, 2], ON_NPU);
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
        let reference = expected(&checkpoint(model));
        let (got, want) = (logits(&built, "--emulate"), reference.logits);
        let cols = want.len() / reference.ids.len();
        // If two experts are almost equally probable, a row may get the other one; there are few such rows.
        let rows = got.chunks(cols).zip(want.chunks(cols));
        let mut off: Vec<f32> = rows.map(|(got, want)| distance(got, want) / spread(want)).collect();
        off.sort_by(f32::total_cmp);
        let (middle, most) = (off[off.len() / 2], off[off.len() - 1]);
        println!("{model}: logits are {middle:.1e} of a row's spread from the reference, {most:.1e} at most");
        assert!(got.len() == want.len() && middle > 0.0 && middle < 0.02, "{model}: {middle}");
    }
}

/// Without a request, attention is on the unit of its cache.
#[test]
fn attention_is_on_the_npu_only_on_request() {
    let built = Tiny::new("mixtral", &[1], "[placement]\nexperts = \"npu\"\n");
    let report = built.verify();
    let parts: Vec<&Value> = report["packages"].as_array().unwrap().iter().collect();
    assert!(parts.iter().all(|f| !f["package"].as_str().unwrap().contains("attn")), "{report}");
}

#[test]
fn attention_that_networks_cannot_compute_is_refused_by_name() {
    let other = "snapdragon-8-plus-gen-1";
    for (model, target, expected) in [
        ("deepseek_v2", PHONE, "it is latent attention, but networks need heads of keys and values"),
        ("gpt_oss", PHONE, "its softmax has sinks"),
        (
            "mixtral",
            other,
            "keys and values have 16 bits, but Hexagon v69 multiplies activations by at most 8",
        ),
    ] {
        let made = Tiny::calibrated(model, &[1], ON_NPU, Vec::new());
        let (code, stderr) = fails(&mut made.build(target));
        let words = ["layers.0.attn", "cannot be a graph of `npu`", expected, "attention = \"auto\""];
        assert!(code == 1 && words.iter().all(|words| stderr.contains(words)), "{model}: {stderr}");
    }
}

/// Errors that do not depend on the profile are reported before a profile is required.
#[test]
fn attention_is_refused_without_a_profile_too() {
    for (model, why) in
        [("deepseek_v2", "it is latent attention"), ("llama4", "its window is cut into chunks")]
    {
        let folder = tempfile::tempdir().unwrap();
        let setup = Setup { format: "f16", chunk: 16, batch: &[1], context: 64 };
        let toml = setup.write(&checkpoint(model), folder.path());
        let text = fs::read_to_string(&toml).unwrap();
        fs::write(&toml, text + "[placement]\nattention = \"npu\"\nexperts = \"cpu\"\n").unwrap();
        let (code, stderr) = fails(moec().arg("build").arg(&toml).args(["--target", PHONE]));
        assert!(code == 1 && stderr.contains(why) && !stderr.contains("profile"), "{stderr}");
    }
}

/// An exchanged network is named, before its shapes are checked.
#[test]
fn changed_or_exchanged_networks_are_refused() {
    let built = Tiny::new("mixtral", &[1], ON_NPU);
    let folder = built.bundle();
    let name = "artifacts/layers.0.attn.qnn/chunk1.onnx";
    // A changed network, or a changed weight file, is not executed.
    let bundle = Bundle::open(&folder).unwrap();
    let files = || bundle.files(CheckLevel::All).unwrap();
    let load = || Qnn.graphs().unwrap().host().load(&files(), &bundle.plan.graphs, 1);
    load().unwrap();
    for name in [name, "artifacts/layers.0.attn.qnn/weights.bin"] {
        let whole = fs::read(folder.join(name)).unwrap();
        let mut changed = whole.clone();
        *changed.last_mut().unwrap() ^= 1;
        fs::write(folder.join(name), changed).unwrap();
        let error = load().unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("was changed after the build"), "{error}");
        fs::write(folder.join(name), whole).unwrap();
    }
    let other = fs::read(folder.join("artifacts/layers.0.attn.qnn/chunk16.onnx")).unwrap();
    forge(&folder, name, &other);
    let mut verify = built.moec("verify");
    let (code, stderr) = fails(verify.arg(&folder).arg("--source").arg(checkpoint("mixtral")));
    let words = ["layers.0.attn.qnn", "chunk1.onnx` contains the network `chunk16`"];
    assert!(code == 1 && words.iter().all(|words| stderr.contains(words)), "{stderr}");
}

/// Every network of attention is executed by the emulator and by onnxruntime, that of prompts also from its
/// DLC. The whole model gives the same results by the emulator as by moec, and bit-identical ones in the unit
/// of a phone's `run`.
#[test]
fn attention_computes_on_the_emulator() {
    let Some(tools) = installed() else { return };
    let case = Case::of("ferris-relu", 64, "attention = \"npu\"\n[experts]\ngroup = 24\n");
    let command = |subcommand: &str| {
        let mut command = case.moec(subcommand);
        command.envs(tools.iter().map(|(name, value)| (name, value)));
        command
    };
    let bundle = case.path("a.moec");
    ok(command("build").arg(&case.toml).args(["--target", PHONE, "--no-run", "-o"]).arg(&bundle));
    let source = ferris().with_file_name("ferris-relu");
    let mut verify = command("verify");
    verify.arg(&bundle).arg("--source").arg(source).arg("--json");
    let report: Value = serde_json::from_slice(&ok(&mut verify).stdout).unwrap();
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
    // Two networks in each of four layers by both, and one DLC in each layer.
    assert_eq!(executed, 4 * (2 * 2 + 1), "{report}");
    let ids: Vec<u32> = (0..80).map(|i| i * 37 % 2000 + 1).collect();
    let logits = |emulate: &str| {
        let out = case.path("logits.safetensors");
        let mut command = command("run");
        command.arg(emulate).arg(&bundle).args(["logits", "--ids", &list(&ids), "--out"]);
        ok(command.arg(&out));
        logits_file(&out).1
    };
    let (here, library) = (logits("--emulate"), logits("--emulate=library"));
    let vocab = here.len() / ids.len();
    let rows = here.chunks(vocab).zip(library.chunks(vocab));
    let mut off: Vec<f32> = rows.map(|(here, there)| distance(here, there) / spread(here)).collect();
    off.sort_by(f32::total_cmp);
    let [middle, most] = [off[off.len() / 2], off[off.len() - 1]];
    println!(
        "logits on QNN's emulator and by moec's evaluator: {middle:.1e} of their spread apart, {most:.1e} at most"
    );
    // If a router is close to a tie, f16 rounding may choose the other expert, which changes the row more.
    let others = off.iter().filter(|&&off| off >= 0.02).count();
    assert!(vocab >= 2000 && off[0] > 0.0 && middle < 0.01 && others <= 3 && most < 0.2, "{off:?}");
    assert!(logits("--emulate=device") == library, "the unit and the emulator differ");
}
