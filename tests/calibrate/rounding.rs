//! Builds that round weights with a profile.

use super::case::{Case, ids, json};
use crate::support::{self, cache, moec, ok};
use moec_base::progress::Progress;
use moec_config::Config;
use moec_import::ImportOptions;
use moec_ir::eval::Evaluator;
use moec_pipeline::{Compilation, Inputs, Stops};
use moec_profile::Profile;
use serde_json::Value;
use std::fs;

/// A build with texts calibrates once, and a build with that profile is identical. Both round q4 weights
/// differently from a build without a profile.
#[test]
fn a_build_rounds_with_its_profile() {
    let case = Case::new("qwen3_moe");
    case.text("t.txt", &ids(300));
    let toml = fs::read_to_string(&case.toml).unwrap().replace("attention = \"bf16\"", "attention = \"q4\"");
    let toml = toml.replace("experts = \"bf16\"", "experts = \"q4\"");
    let build = |calibrate: &str| {
        fs::write(&case.toml, format!("{toml}[calibrate]\n{calibrate}\n")).unwrap();
        let mut command = moec();
        command.env("MOEC_CACHE", cache(case.folder.path())).env("MOEC_THREADS", "1");
        command.arg("build").arg(&case.toml).args(["--no-run", "-o"]).arg(case.path("out.moec"));
        let stderr = String::from_utf8(ok(&mut command).stderr).unwrap();
        (support::tree(&case.path("out.moec")), stderr)
    };
    let (plain, stderr) = build("");
    assert!(!stderr.contains("Reading 300"), "{stderr}");
    let (first, stderr) = build("text = [\"t.txt\"]");
    assert!(stderr.contains("Reading 300"), "{stderr}");
    // 600 choices of 16 experts: most experts have fewer than 64 tokens, which is reported.
    assert!(stderr.contains("have fewer than 64 tokens"), "{stderr}");
    let (again, stderr) = build("text = [\"t.txt\"]");
    assert!(stderr.contains("Calibrated") && !stderr.contains("Reading 300"), "{stderr}");
    assert!(first == again, "the cached profile gives another bundle");
    ok(case.calibrate().arg("-o").arg(case.path("t.trace")));
    let (given, stderr) = build("profile = \"t.trace\"");
    assert!(!stderr.contains("Reading 300"), "{stderr}");
    // The bundle records its rounding; everything else is the same.
    let entry = |tree: &[(String, Vec<u8>)]| -> Value {
        let manifest = tree.iter().find(|(name, _)| name == "manifest.json").unwrap();
        serde_json::from_slice::<Value>(&manifest.1).unwrap()["profile"].clone()
    };
    let hash = moec_base::hashing::hex(&moec_base::hashing::sha256(&fs::read(case.path("t.trace")).unwrap()));
    assert_eq!(entry(&plain), Value::Null);
    assert_eq!(entry(&first), serde_json::json!({"name": "t.txt", "sha256": hash}));
    assert_eq!(entry(&given), serde_json::json!({"name": "t.trace", "sha256": hash}));
    let others = |tree: &[(String, Vec<u8>)]| -> Vec<(String, Vec<u8>)> {
        tree.iter().filter(|(name, _)| name != "manifest.json").cloned().collect()
    };
    assert!(others(&first) == others(&given), "the written profile gives another bundle");
    let shown = ok(moec().arg("inspect").arg(case.path("out.moec"))).stdout;
    let shown = String::from_utf8(shown).unwrap();
    assert!(shown.contains(&format!("t.trace (sha256 {}…)", &hash[..12])), "{shown}");
    let shown = json(moec().arg("inspect").arg(case.path("out.moec")));
    assert_eq!(shown["profile"], entry(&given));
    let changed = |name: &str| {
        let of = |tree: &[(String, Vec<u8>)]| tree.iter().find(|(n, _)| n == name).map(|(_, b)| b.clone());
        of(&plain).unwrap() != of(&first).unwrap()
    };
    assert!(changed("weights/experts.bin") && changed("weights/dense.bin"), "importance changed nothing");
    assert!(!changed("artifacts/graph.moe"), "importance changes weights only");
    fs::remove_dir_all(case.path("out.moec")).unwrap();
    case.nothing_left(&["t.txt", "t.trace"]);
}

/// Importance lowers the rounding error on the calibrated inputs. An effect on perplexity needs more text
/// than a test should read; docs/benchmarks.md has those figures.
#[test]
fn importance_lowers_the_error_on_the_calibrated_inputs() {
    let case = Case::new("olmoe");
    case.text("t.txt", &ids(400));
    case.append("[calibrate]\ntext = [\"t.txt\"]\n");
    ok(case.calibrate().arg("-o").arg(case.path("t.trace")));
    let profile = Profile::read(&case.path("t.trace")).unwrap();
    let (name, moments) = profile.weights.iter().find(|(n, _)| n.ends_with("attn.q")).unwrap();
    let build = |calibrate: &str| {
        let text = format!(
            "[model]\nsource = \"hf\"\n[shapes]\nmax_context = 64\n[weights]\nattention = \"q4\"\nrounding = \"nearest\"\n{calibrate}"
        );
        fs::write(&case.toml, text).unwrap();
        ok(moec().arg("build").arg(&case.toml).args(["-q", "--no-run", "-o"]).arg(case.path("out.moec")));
        let bundle = moec_bundle::read::Bundle::open(&case.path("out.moec")).unwrap();
        let segment = bundle.plan.segments.iter().find(|s| s.name == *name).unwrap();
        let file = &bundle.plan.files[segment.file as usize].path;
        let all = fs::read(case.path("out.moec").join(file)).unwrap();
        let packed = &all[segment.offset as usize..(segment.offset + segment.bytes) as usize];
        let (_, rows, cols) = segment.extents();
        let (rows, cols) = (rows as usize, cols as usize);
        let mut stored = vec![0.0; rows * cols];
        moec_cpu::unpack(segment, packed, 0, 0..rows, 0..cols, &mut stored).unwrap();
        stored
    };
    let plain = build("");
    let weighted = build("[calibrate]\nprofile = \"t.trace\"\n");
    let (checkpoint, spec) = moec_import::open(&case.path("hf"), &ImportOptions::default()).unwrap();
    let config = Config::load(&case.toml).unwrap();
    let device = moec_targets::target("native").unwrap();
    let mut lowered = Compilation::new(Inputs::new(&config, &checkpoint, &spec, &device));
    let stops = Stops { stop_after: Some("lower"), ..Stops::default() };
    lowered.run(stops, &Progress::silent(), &mut |_| {}).unwrap();
    let id = lowered.module.weights.iter().position(|w| w.name == *name).unwrap();
    let exact = Evaluator::new(&lowered.module, &checkpoint).weight(moec_ir::WeightId(id as u32)).unwrap();
    let error = |stored: &[f32]| -> f64 {
        let squares = exact.as_f32().iter().zip(stored).map(|(a, b)| f64::from(a - b).powi(2));
        squares.enumerate().map(|(i, e)| e * f64::from(moments.of(0)[i % moments.cols])).sum()
    };
    let (plain, weighted) = (error(&plain), error(&weighted));
    assert!(weighted < plain, "the weighted error went from {plain} to {weighted}");
}
